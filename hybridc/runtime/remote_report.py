"""What a model with a server tells about itself: its state, and each of its runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Status:
    """What a hybrid model is doing.

    Attributes:
        plan: Name of the plan that runs next.
        connected: Whether the server answered last.
        endpoint: The server's address.
        round_trip_seconds: Measured time of a call without contents, or what was expected.
        bytes_per_second: Measured bandwidth, or what was expected.
        expected_seconds: Time that each plan would take now.
        runs: How many results each plan gave.
        fallbacks: How many results had to come from the plan without the server.
        switches: How often another plan took over.
        trouble: Why the server failed last; empty if it never did.
        active: Calls under way.
        errors: Calls that had no result, since the server failed and there was no other plan.
    """

    plan: str
    connected: bool
    endpoint: str
    round_trip_seconds: float
    bytes_per_second: float
    expected_seconds: Mapping[str, float]
    runs: Mapping[str, int]
    fallbacks: int
    switches: int
    trouble: str
    active: int
    errors: int


@dataclass(frozen=True)
class RequestReport:
    """One request to the server.

    Attributes:
        model: Name of the model there.
        bytes: What was sent and received.
        network_seconds: Time of the call without the server's.
        server_seconds: The server's time.
    """

    model: str
    bytes: int
    network_seconds: float
    server_seconds: float


@dataclass(frozen=True)
class RunReport:
    """One call of a hybrid model.

    Attributes:
        plan: Name of the plan that gave the result, or was to give it.
        start_nanoseconds: When it began, as ``time.time_ns`` has it.
        seconds: What it took.
        edge_seconds: Time of the parts here; 0 if there is no result.
        requests: What was asked of the server, but for requests that failed.
        trouble: Why the server failed; empty if it did not.
        is_fallback: Whether the plan without the server had to stand in.
        is_error: Whether there is no result.
    """

    plan: str
    start_nanoseconds: int
    seconds: float
    edge_seconds: float
    requests: tuple[RequestReport, ...] = ()
    trouble: str = ""
    is_fallback: bool = False
    is_error: bool = False


Listener: TypeAlias = Callable[[RunReport], None]
"""Is told of each run, by the thread that made it and before it has the result."""

Beginner: TypeAlias = Callable[[], tuple[Mapping[str, str], Listener]]
"""Is called where a run begins; gives headers for its requests, and who is told of its end."""
