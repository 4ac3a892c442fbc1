"""Runs a plan: the parts in order, tensors in numbered slots, each dropped after its last use.

One executor serves one call at a time, since TVM's virtual machine keeps its frames; the loader
keeps as many as there are calls at once. Code and weights are shared by all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybridc.bundle.manifest import Manifest
from hybridc.errors import UsageError
from hybridc.runtime.parts import Function, LoadedPart


@dataclass(frozen=True)
class _Step:
    """One part, ready to be called: which slots it reads, writes and frees."""

    function: Function
    trailing: tuple[Any, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    dead: tuple[int, ...]


class Executor:
    """Calls the parts of a plan in order."""

    def __init__(self, manifest: Manifest, parts: Sequence[LoadedPart]) -> None:
        names = [spec.name for spec in manifest.inputs]
        for part in parts:
            names.extend(part.spec.outputs)
        self._slots = {name: index for index, name in enumerate(dict.fromkeys(names))}
        self._inputs = len(manifest.inputs)
        self._outputs = [self._slots[spec.name] for spec in manifest.outputs]
        last = self._last_uses(parts)
        self._steps = [self._step(part, index, last) for index, part in enumerate(parts)]

    def _last_uses(self, parts: Sequence[LoadedPart]) -> dict[int, int]:
        """Step after which each slot is dead; outputs of the model never are."""
        last: dict[int, int] = {}
        for index, part in enumerate(parts):
            for name in (*part.spec.inputs, *part.spec.outputs):
                last[self._slots[name]] = index
        return {slot: step for slot, step in last.items() if slot not in self._outputs}

    def _step(self, part: LoadedPart, index: int, last: dict[int, int]) -> _Step:
        function, trailing = part.start()
        dead = tuple(slot for slot, step in last.items() if step == index)
        inputs = tuple(self._slots[name] for name in part.spec.inputs)
        outputs = tuple(self._slots[name] for name in part.spec.outputs)
        return _Step(function, trailing, inputs, outputs, dead)

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """Outputs for the model's inputs, both as tvm_ffi tensors in the manifest's order.

        Raises:
            UsageError: The model cannot run with inputs of these shapes or values.
        """
        slots: list[Any] = [*inputs, *[None] * (len(self._slots) - self._inputs)]
        for step in self._steps:
            try:
                results = step.function(*[slots[slot] for slot in step.inputs], *step.trailing)
            except ValueError as error:  # what the checks that are compiled in raise
                raise UsageError(str(error)) from error
            for slot, tensor in zip(step.outputs, results, strict=True):
                slots[slot] = tensor
            for slot in step.dead:
                slots[slot] = None
        return [slots[slot] for slot in self._outputs]
