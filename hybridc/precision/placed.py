"""Precision and placement as one choice, for a model on several devices.

How much int8 saves depends on a layer's device, and the best device on the precision. Let an error
have a price in seconds. Then a group takes, on each device, the less of two times,

    fp32:  its seconds there          int8:  its seconds there + price * error

and placing the groups by these times is a problem like any other: its solution says where each
layer runs and in which precision. The higher the price, the fewer layers are in int8. Going through
falling prices gives the order in which layers are worth their error. (A budget by Lagrange's
multiplier: H. Everett, Generalized Lagrange multiplier method, Operations Research 11, 1963.)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from hybridc.placement.decide import Costs
from hybridc.placement.problem import LATENCY, SECONDS, Placement, Problem, objective
from hybridc.placement.solvers.choose import solve
from hybridc.precision.costs import in_int8, saved_bytes

PRICES = 16
"""Prices that are tried, besides none."""

SOLVE_SECONDS = 1.0
"""Time for the solver at each price."""

_BELOW = 1 - 1e-6
"""A layer is worth its error at prices below what it saves over its error."""

_LEAST_ERROR = 1e-12
"""An error that was measured as none, or as less."""


@dataclass(frozen=True)
class PlacedCost:
    """What a model costs on several devices, with each group where it is best.

    Attributes:
        problem: Of placing it in fp32, for the least latency.
        layers: Group of each layer that may be in int8.
        int8: Seconds of each group in int8 on each device; infinite where that does not pay.
        saved: Bytes of weights that a layer saves in int8.
        bytes: Bytes of all weights in fp32.
        profile: Names of the devices.
    """

    problem: Problem
    layers: Mapping[str, int]
    int8: tuple[tuple[float, ...], ...]
    saved: Mapping[str, int]
    bytes: int
    profile: str

    def ranked(self, errors: Mapping[str, float]) -> dict[str, float]:
        """Layers that int8 makes faster, the most worth their errors first.

        Args:
            errors: Of each layer in int8.

        Returns:
            Seconds that each saves on the device that it is placed on then.
        """
        costs = {name: max(errors[name], _LEAST_ERROR) for name in self.layers}
        found: dict[str, float] = {}
        for price in self._prices(costs):
            _, saved = self.choose(costs, price)
            worth = saved.keys() - found.keys()
            found |= {n: saved[n] for n in sorted(worth, key=lambda n: (costs[n] / saved[n], n))}
        return found

    def choose(
        self, errors: Mapping[str, float], price: float
    ) -> tuple[Placement, dict[str, float]]:
        """The placement that is best at a price, and what each layer in int8 saves in it.

        Args:
            errors: Of each layer in int8.
            price: Seconds that an error of 1 counts as.
        """
        problem = self._timed(lambda name, full, small: min(full, small + price * errors[name]))
        placement = solve(problem, SOLVE_SECONDS).placement
        saved = {name: self._saved(name, placement[group]) for name, group in self.layers.items()}
        return placement, {n: value for n, value in saved.items() if value > price * errors[n]}

    def ranked_wide(self, errors: Mapping[str, float]) -> dict[str, float]:
        """None: of several devices, layers are not offered int16."""
        return {}

    def seconds_with(self, names: Collection[str], wide: Collection[str] = ()) -> float:
        """Predicted time of a run with some layers in int8, placed for that."""

        def time(name: str, full: float, small: float) -> float:
            return small if name in names and math.isfinite(small) else full

        problem = self._timed(time)
        return objective(problem, solve(problem, SOLVE_SECONDS).placement)

    def bytes_with(self, names: Collection[str], wide: Collection[str] = ()) -> int:
        """Bytes of weights with some layers in int8."""
        return self.bytes - sum(self.saved[name] for name in names)

    def _saved(self, name: str, device: int) -> float:
        group = self.layers[name]
        full, small = self._full[group][device], self.int8[group][device]
        return full - small if small < full else 0.0

    @property
    def _full(self) -> tuple[tuple[float, ...], ...]:
        return self.problem.figures[SECONDS].groups

    def _prices(self, costs: Mapping[str, float]) -> list[float]:
        """Falling prices at which layers begin to be worth their errors, and none at last."""
        devices = range(len(self.problem.devices))
        most = {name: max(self._saved(name, d) for d in devices) for name in self.layers}
        ratios = sorted({most[n] / costs[n] for n in most if most[n] > 0}, reverse=True)
        step = max(1, math.ceil(len(ratios) / PRICES))
        return [*(ratio * _BELOW for ratio in ratios[step - 1 :: step]), 0.0]

    def _timed(self, time: Callable[[str, float, float], float]) -> Problem:
        """The problem with other times for layers, made of those in fp32 and in int8."""
        rows = list(self._full)
        for name, group in self.layers.items():
            pairs = zip(rows[group], self.int8[group], strict=True)
            rows[group] = tuple(time(name, full, small) for full, small in pairs)
        seconds = dataclasses.replace(self.problem.figures[SECONDS], groups=tuple(rows))
        return dataclasses.replace(self.problem, figures={SECONDS: seconds})


def place_precisions(
    costs: Costs, layers: Collection[str], slow: Sequence[Collection[str]], weights: int
) -> PlacedCost:
    """What a model costs on the devices of a placement.

    Args:
        costs: Of the model in fp32.
        layers: Names of the layers that may be in int8.
        slow: For each device those of them that int8 makes no faster there.
        weights: Bytes of all weights.
    """
    names = costs.hardware.names
    found: dict[str, int] = {}
    rows, saved = [], {}
    for index, (group, allowed) in enumerate(
        zip(costs.graph.groups, costs.problem.allowed, strict=True)
    ):
        layer = next((node for node in group.nodes if node in layers), None)
        row = [math.inf] * len(names)
        if layer is not None:
            found[layer], saved[layer] = index, saved_bytes(group.work)
            for device in allowed:
                if layer not in slow[device]:
                    small = costs.hardware.estimate(in_int8(group.work), names[device])
                    row[device] = small.seconds
        rows.append(tuple(row))
    problem = dataclasses.replace(
        costs.problem,
        figures={SECONDS: costs.problem.figures[SECONDS]},
        objective=LATENCY,
        limits={},
    )
    return PlacedCost(problem, found, tuple(rows), saved, weights, ", ".join(names))
