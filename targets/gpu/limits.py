"""What a kernel may use."""

from __future__ import annotations

from dataclasses import dataclass

from hybridc.targets.tuning import UNTUNED, Tuning


@dataclass(frozen=True)
class Limits:
    """Limits of one block of threads.

    Attributes:
        threads: Most threads.
        warp: Threads that run in step; 1 if nothing is known of that.
        shared_bytes: Most shared memory.
        types: Element types that the device computes with; ``None`` if all of them.
        matrix_types: Types of factors whose products go to tensor cores.
        tuning: Choices of the schedules that were measured.
        strict_math: Whether kernels may change sums in nothing but their order.
    """

    threads: int
    warp: int
    shared_bytes: int
    types: frozenset[str] | None = None
    matrix_types: frozenset[str] = frozenset()
    tuning: Tuning = UNTUNED
    strict_math: bool = False
