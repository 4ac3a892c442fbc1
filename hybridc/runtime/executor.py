"""Runs a plan: the parts in order, tensors in numbered slots, each dropped after its last use.

One executor serves one call at a time, since TVM's virtual machine keeps its frames; the loader
keeps as many as there are calls at once. Code and weights are shared by all of them.

Where parts run on different devices, a tensor is copied to where a part needs it, once in a call
for each device; between parts of one device it stays where it is. The results are in host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm_ffi

from hybridc.bundle.manifest import Manifest
from hybridc.errors import UsageError
from hybridc.runtime.parts import Function, LoadedPart
from hybridc.runtime.tensors import HOST, Place, allocate, copy, move, place_of


@dataclass(frozen=True)
class _Step:
    """One part, ready to be called: which slots it reads, writes and frees."""

    function: Function
    trailing: tuple[Any, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    dead: tuple[int, ...]
    place: Place


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
        self._on_host = all(part.place == HOST for part in parts)
        self._staged: dict[tuple[int, Place], Any] = {}

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
        return _Step(function, trailing, inputs, outputs, dead, part.place)

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """Outputs for the model's inputs, both as tvm_ffi tensors in the manifest's order.

        Raises:
            UsageError: The model cannot run with inputs of these shapes or values.
        """
        slots: list[Any] = [*inputs, *[None] * (len(self._slots) - self._inputs)]
        copies: dict[tuple[int, Place], Any] = {}
        for step in self._steps:
            arguments = [slots[slot] for slot in step.inputs]
            if not self._on_host:
                arguments = self._moved(step, arguments, copies)
            try:
                results = step.function(*arguments, *step.trailing)
            except ValueError as error:  # what the checks that are compiled in raise
                raise UsageError(str(error)) from error
            for slot, tensor in zip(step.outputs, results, strict=True):
                slots[slot] = tensor
            for slot in step.dead:
                slots[slot] = None
        results = [slots[slot] for slot in self._outputs]
        return results if self._on_host else [_at(result, HOST) for result in results]

    def _moved(
        self, step: _Step, values: Sequence[Any], copies: dict[tuple[int, Place], Any]
    ) -> list[Any]:
        """A step's inputs where it needs them; each is copied to a place once in a call."""
        moved = []
        for slot, value in zip(step.inputs, values, strict=True):
            if isinstance(value, tvm_ffi.Tensor) and place_of(value) != step.place:
                key = (slot, step.place)
                if key not in copies:
                    copies[key] = self._copied(key, value)
                value = copies[key]
            moved.append(value)
        return moved

    def _copied(self, key: tuple[int, Place], value: Any) -> Any:
        """A copy of a tensor; on a device in memory that is kept, which is slow to get there."""
        place = key[1]
        if place == HOST:
            return move(value, HOST)
        if place_of(value) != HOST:
            value = move(value, HOST)
        kept = self._staged.get(key)
        if kept is None or kept.shape != value.shape:
            kept = self._staged[key] = allocate(value, place)
        copy(value, kept)
        return kept


def _at(value: Any, place: Place) -> Any:
    """A tensor at a place; what is no tensor as it is."""
    return move(value, place) if isinstance(value, tvm_ffi.Tensor) else value
