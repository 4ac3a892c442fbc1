"""What layers cost in fp32, int8 and int16, by the same cost models as placement.

An instruction for 16 bits multiplies twice as many numbers as one for float32, and no more than one
for 8 bits does. So the peak for int16 is the lower of twice float32's and int8's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import onnx
import onnx_ir as ir

from hybridc.cost_models.device import DEFAULT_DTYPE, DeviceProfile
from hybridc.cost_models.group_work import GroupWork, describe_group
from hybridc.cost_models.load import DeviceModel, default_profile, load_device
from hybridc.cost_models.measured import Code
from hybridc.placement.group import make_groups
from hybridc.placement.hardware import Hardware
from hybridc.targets.protocol import Device

FALLBACK_PROFILE = {"cuda": "a10", "opencl": "integrated-gpu"}
USUAL_PROFILE = "zen3"
"""Profiles for targets that name no device; only ratios between layers matter here."""

INT8 = "int8"
_WIDTHS, _WIDTHS_16 = 4, 2  # bytes of a float32 beside those of an int8 and of an int16


class PrecisionCost(Protocol):
    """What a model costs with some of its layers in int8."""

    @property
    def profile(self) -> str:
        """What times are predicted for."""

    def ranked(self, errors: Mapping[str, float]) -> dict[str, float]:
        """Layers that int8 makes faster, the most worth their errors first; and what each saves.

        Args:
            errors: Of each layer in int8; seconds are returned.
        """

    def ranked_wide(self, errors: Mapping[str, float]) -> dict[str, float]:
        """The same of layers in int16; none where no kernel computes on that."""

    def seconds_with(self, names: Collection[str], wide: Collection[str] = ()) -> float:
        """Predicted time of a run with some layers in int8, and others in int16."""

    def bytes_with(self, names: Collection[str], wide: Collection[str] = ()) -> int:
        """Bytes of weights with some layers in int8, and others in int16."""


@dataclass(frozen=True)
class LayerCost:
    """A layer's cost in several precisions.

    Attributes:
        seconds: Predicted time in fp32.
        saved_seconds: What of it int8 is predicted to save.
        saved_bytes: Bytes of weights that int8 saves.
        wide_seconds: What int16 is predicted to save; 0 where no kernel computes on it.
        wide_bytes: Bytes of weights that int16 saves.
    """

    seconds: float
    saved_seconds: float
    saved_bytes: int
    wide_seconds: float = 0.0
    wide_bytes: int = 0


@dataclass(frozen=True)
class ModelCost:
    """What a model costs in fp32.

    Attributes:
        seconds: Predicted time of a run.
        bytes: Bytes of its weights.
        layers: Of the layers that were asked for, by name.
        profile: Name of the device's profile.
    """

    seconds: float
    bytes: int
    layers: dict[str, LayerCost]
    profile: str

    def ranked(self, errors: Mapping[str, float]) -> dict[str, float]:
        """Layers that int8 makes faster, the most worth their errors first; and what each saves.

        Args:
            errors: Of each layer in int8; seconds are returned.
        """
        return _by_worth({name: self.layers[name].saved_seconds for name in errors}, errors)

    def ranked_wide(self, errors: Mapping[str, float]) -> dict[str, float]:
        """The same of layers in int16, of which the errors in int8 tell the order."""
        return _by_worth({name: self.layers[name].wide_seconds for name in errors}, errors)

    def seconds_with(self, names: Collection[str], wide: Collection[str] = ()) -> float:
        """Predicted time of a run with some layers in int8, and others in int16."""
        saved = sum(self.layers[name].saved_seconds for name in names)
        return self.seconds - saved - sum(self.layers[name].wide_seconds for name in wide)

    def bytes_with(self, names: Collection[str], wide: Collection[str] = ()) -> int:
        """Bytes of weights with some layers in int8, and others in int16."""
        saved = sum(self.layers[name].saved_bytes for name in names)
        return self.bytes - saved - sum(self.layers[name].wide_bytes for name in wide)


def _by_worth(saved: Mapping[str, float], errors: Mapping[str, float]) -> dict[str, float]:
    """What layers save that save something, in the order of error over that."""
    useful = [name for name in saved if saved[name] > 0]
    order = sorted(useful, key=lambda name: max(errors[name], 0.0) / saved[name])
    return {name: saved[name] for name in order}


def predict(
    model: onnx.ModelProto,
    layers: Collection[str],
    device: Device,
    hardware: Hardware | None,
    has_wide: bool = False,
) -> ModelCost:
    """Cost of a model and of some of its layers on a device.

    Args:
        model: A model with shapes.
        layers: Names of nodes with a weight.
        device: What it is compiled for.
        hardware: What is known of it; a usual device of its kind is supposed without.
        has_wide: Whether layers may be in int16.
    """
    graph = ir.from_proto(model).graph
    estimator = _model_of(device, hardware)
    total, found = 0.0, {}
    for group in make_groups(list(graph)):
        work = describe_group(group.nodes)
        seconds = estimator.estimate(work).seconds
        total += seconds
        for node in group.nodes:
            if node.name in layers:
                saved = max(0.0, seconds - estimator.estimate(in_int8(work)).seconds)
                cost = LayerCost(seconds, saved, saved_bytes(work))
                if has_wide:
                    wide = estimator.estimate(in_int16(work, estimator.profile)).seconds
                    cost = dataclasses.replace(
                        cost,
                        wide_seconds=max(0.0, seconds - wide),
                        wide_bytes=saved_bytes(work, _WIDTHS_16),
                    )
                found[str(node.name)] = cost
    return ModelCost(total, weight_bytes(graph), found, estimator.profile.name)


def weight_bytes(graph: ir.Graph) -> int:
    """Bytes of a graph's weights."""
    return sum(
        value.const_value.nbytes for value in graph.initializers.values() if value.const_value
    )


def _model_of(device: Device, hardware: Hardware | None) -> DeviceModel:
    if hardware is not None and device.name in hardware.models:
        return hardware.models[device.name]
    name = default_profile(device.kind, device.specification)
    name = name or FALLBACK_PROFILE.get(device.kind, USUAL_PROFILE)
    return load_device(name, Code(device.kind, device.specification, {}))


def in_int8(work: GroupWork) -> GroupWork:
    """A group whose anchor computes on integers and whose tensors are a quarter as large."""
    return _narrowed(work, _WIDTHS, work.nodes[0].operations)


def in_int16(work: GroupWork, profile: DeviceProfile) -> GroupWork:
    """A group whose anchor computes on integers of 16 bits, as so many operations of 8 bits."""
    slower = max(1.0, profile.peak(INT8) / (2 * profile.peak(DEFAULT_DTYPE)))
    return _narrowed(work, _WIDTHS_16, round(work.nodes[0].operations * slower))


def _narrowed(work: GroupWork, times: int, operations: int) -> GroupWork:
    """A group with so many operations on int8 in its anchor, and smaller tensors."""
    first, *others = work.nodes
    return dataclasses.replace(
        work,
        nodes=(dataclasses.replace(first, dtype=INT8, operations=operations), *others),
        read_bytes=work.read_bytes // times,
        written_bytes=work.written_bytes // times,
        weight_bytes=work.weight_bytes // times,
        signature="",
    )


def saved_bytes(work: GroupWork, times: int = _WIDTHS) -> int:
    """Bytes of a group's weights that int8 saves, or another type so many times as small."""
    return work.weight_bytes - work.weight_bytes // times
