"""A kernel of a calibration bundle, ready to be timed as it would run in the middle of a model.

weights      come from memory there: all of the model's have been read since this kernel's last
             run. So copies of them take turns, together as large as the weights of the model.
activations  have just been written, so they are in caches, as they are here.
layouts      are those that convolutions pass on among themselves. A group alone changes from
             and to the model's layout at its borders. The virtual machine tells when the kernels
             that do so begin and end, and their time is noted apart; so is that of all others,
             since of a small group with large borders nothing certain is left of a difference.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tvm_ffi

from hybridc.bundle.manifest import Manifest, PartSpec
from hybridc.calibration.timing import Clock, Timing, timing_of
from hybridc.runtime.arrays import make_inputs
from hybridc.runtime.parts import CompiledPart, LoadedPart
from hybridc.runtime.tensors import HOST, Place, move, synchronize, to_tensor

MOST_COPIES = 256
"""Copies of weights that take turns; more would be of weights too small to matter."""

MOST_BYTES = 2**27
"""Bytes of all copies together: more than the caches that a core has to itself, by far."""

_LAYOUT_WORDS = frozenset({"block", "unblock"})
"""In the names that the llvm target gives to kernels that change a tensor's layout."""

_BUILTIN = "vm.builtin."
"""What instructions begin with that are no kernels."""

_STEP_RUNS = 9


@dataclass
class ReadyKernel:
    """A loaded kernel with inputs, and weights that take turns.

    Attributes:
        part: The part that it is.
        inputs: Tensors where the part needs them.
        trailing: What it takes behind its inputs, for each turn.
    """

    part: LoadedPart
    inputs: Sequence[Any]
    trailing: Sequence[tuple[Any, ...]]
    _function: Callable[..., Any]
    _turn: int = field(default=0)

    @property
    def place(self) -> Place:
        """Where its tensors are."""
        return self.part.place

    def run(self, count: int) -> None:
        """Run so often, and wait for the device at the end."""
        for _ in range(count):
            self._call()
        synchronize(self.place)

    def _call(self) -> None:
        self._turn = (self._turn + 1) % len(self.trailing)
        self._function(*self.inputs, *self.trailing[self._turn])

    def step_times(self, clock: Clock = time.perf_counter) -> Steps | None:
        """Times of the kernels that change layouts at its borders; ``None`` if there are none."""
        if not isinstance(self.part, CompiledPart) or self.place != HOST:
            return None
        machine, watch = self.part.machine(), _Watch(clock)
        machine["set_instrument"](tvm_ffi.convert(watch.step))
        layout, own = [], []
        for turn in range(_STEP_RUNS):
            watch.layout = watch.own = 0.0
            machine["main"](*self.inputs, *self.trailing[turn % len(self.trailing)])
            layout.append(watch.layout)
            own.append(watch.own)
            if not watch.layout:
                return None
        return Steps(statistics.median(layout), timing_of(own))


@dataclass(frozen=True)
class Steps:
    """Where the time of a group alone goes.

    Attributes:
        layout: Seconds of the kernels at its borders that only change a layout.
        own: Time of its own kernels.
    """

    layout: float
    own: Timing


def ready(manifest: Manifest, spec: PartSpec, part: LoadedPart, footprint: int) -> ReadyKernel:
    """A part with inputs that fit it.

    Args:
        manifest: The bundle's description.
        spec: The part's.
        part: The part, loaded.
        footprint: Bytes of weights that a model reads between two runs of this kernel.
    """
    function, trailing = part.start()
    specs = {one.name: one for one in manifest.inputs}
    arrays = make_inputs([specs[name] for name in spec.inputs], {}, 0)
    inputs = [move(to_tensor(arrays[name]), part.place) for name in spec.inputs]
    turns = [trailing]
    if isinstance(part, CompiledPart) and part.place == HOST:
        turns += [(weights,) for weights in _copies(part.weights, footprint)]
    return ReadyKernel(part, inputs, turns, function)


def _copies(weights: Sequence[Any], footprint: int) -> list[Any]:
    """Copies of weights that make up a footprint together with the weights themselves."""
    arrays = [np.from_dlpack(tensor) for tensor in weights]
    size = sum(array.nbytes for array in arrays)
    if not size:
        return []
    count = min(math.ceil(min(footprint, MOST_BYTES) / size) - 1, MOST_COPIES)
    return [tvm_ffi.Array([to_tensor(array.copy()) for array in arrays]) for _ in range(count)]


@dataclass
class _Watch:
    """Adds up times of kernels; a virtual machine tells of each."""

    clock: Clock
    layout: float = 0.0
    own: float = 0.0
    _begins: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def step(self, _function: Any, name: str, is_before: bool, *_values: Any) -> int:
        """Note the begin or the end of an instruction; gives 0, which lets it run."""
        if name.startswith(_BUILTIN):
            return 0
        if is_before:
            self._begins[name].append(self.clock())
            return 0
        taken = self.clock() - self._begins[name].pop()
        if _LAYOUT_WORDS.isdisjoint(name.split("_")):
            self.own += taken
        else:
            self.layout += taken
        return 0
