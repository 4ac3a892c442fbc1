"""What benchmarks of placement share: models, costs measured on this machine, and plans that run.

Everything happens in one process: kernels are built and measured once for all models, and each plan
is built in memory and called through the loader.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from engines import CATALOG, LIGHT, find_model
from hybridc.targets.registry import parse_targets

import hybridc
from hybridc.calibration.build import ModelRequest, build_calibration
from hybridc.calibration.machine import to_json
from hybridc.calibration.run import run_calibration
from hybridc.calibration.timing import Timing, measure
from hybridc.compiler import Options, build, load_built, plan_model
from hybridc.frontend.read import read_model
from hybridc.frontend.shapes import parse_shapes
from hybridc.placement.decide import Costs
from hybridc.placement.fallback import fallback_device
from hybridc.placement.hardware import Hardware, load_hardware
from hybridc.placement.plan_file import PlanFile

NAMES = (*LIGHT, *CATALOG)
WHOLE, HALVES = ("llvm",), ("llvm:0", "llvm:1")


@dataclass(frozen=True)
class Case:
    """A model with inputs and the options that fix its sizes."""

    name: str
    path: Path
    feeds: Mapping[str, Any]

    @property
    def shapes(self) -> list[str]:
        """``--shape`` options for all inputs that have dimensions."""
        return [
            f"{name}={'x'.join(map(str, array.shape))}"
            for name, array in self.feeds.items()
            if array.shape
        ]


def find_cases(names: Iterable[str], batch: int = 1) -> list[Case]:
    """Models by name, with inputs of a batch; those that have a batch of their own are left out."""
    found = []
    for name in names:
        try:
            found.append(Case(name, *find_model(name, batch)))
        except ValueError as error:
            print(f"{name} is left out at batch {batch}: {error}", file=sys.stderr)
    return found


def calibrate(cases: Sequence[Case], targets: Sequence[str], seconds: float, file: Path) -> None:
    """Measure the groups of all models on some devices of this machine, into a machine's file."""
    requests = [ModelRequest(case.path, parse_shapes(case.shapes)) for case in cases]
    with tempfile.TemporaryDirectory(prefix="hybridc-") as folder:
        bundle = Path(folder) / "calibration"
        build_calibration(bundle, parse_targets(targets), requests)
        file.write_text(to_json(run_calibration(bundle, seconds)))


def without(file: Path, signatures: set[str], output: Path) -> None:
    """A machine's file without measurements of some groups, as if they had never been seen."""
    data = json.loads(file.read_text())
    for device in data["devices"].values():
        rows = device["measurements"]
        device["measurements"] = [r for r in rows if r["work"]["signature"] not in signatures]
    output.write_text(json.dumps(data))


def hardware(targets: Sequence[str], file: Path) -> Hardware:
    """The devices with the costs of a machine's file."""
    devices = parse_targets(targets)
    versions = {"hybridc": hybridc.__version__, "tvm": version("apache-tvm")}
    profiles = {device.name: str(file) for device in devices}
    found = load_hardware(devices, fallback_device(devices), profiles, {}, versions)
    assert found is not None
    return found


def options(case: Case, targets: Sequence[str], file: Path, **others: Any) -> Options:
    """Options of a compile by the costs of a machine's file."""
    return Options(
        devices=parse_targets(targets),
        shapes=parse_shapes(case.shapes),
        hardware=hardware(targets, file),
        verify=False,
        **others,
    )


def plan(case: Case, chosen: Options) -> tuple[PlanFile, Costs]:
    """The plan of a model, with the figures that it rests on."""
    _, placed, found, _ = plan_model(read_model(case.path), chosen)
    assert placed.decision.costs is not None
    return found, placed.decision.costs


def run(case: Case, chosen: Options, seconds: float, clock: str = "wall") -> Timing:
    """Build a plan and time a run of it through the loader.

    Args:
        case: The model.
        chosen: How to build it.
        seconds: Time to measure for.
        clock: ``wall``, or ``cpu`` for the time that the process has computed: the same on a
            machine that others use too, for devices of one core each, one at work at a time.
    """
    built, _ = build(read_model(case.path), chosen)
    with load_built(built) as model:
        names = {spec.name for spec in model.inputs}
        arrays = {name: array for name, array in case.feeds.items() if name in names}

        def call(count: int) -> None:
            for _ in range(count):
                model.run(arrays)

        if clock == "cpu":
            return measure(call, seconds, time.process_time, lambda: 0)
        return measure(call, seconds)
