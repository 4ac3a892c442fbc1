"""What layers cost in fp32 and in int8, by the same cost models as placement."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import onnx
import onnx_ir as ir

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
_WIDTHS = 4  # bytes of a float32 beside one of an int8


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

    def seconds_with(self, names: Collection[str]) -> float:
        """Predicted time of a run with some layers in int8."""

    def bytes_with(self, names: Collection[str]) -> int:
        """Bytes of weights with some layers in int8."""


@dataclass(frozen=True)
class LayerCost:
    """A layer's cost in two precisions.

    Attributes:
        seconds: Predicted time in fp32.
        saved_seconds: What of it int8 is predicted to save.
        saved_bytes: Bytes of weights that int8 saves.
    """

    seconds: float
    saved_seconds: float
    saved_bytes: int


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
        saved = {name: self.layers[name].saved_seconds for name in errors}
        useful = [name for name in saved if saved[name] > 0]
        order = sorted(useful, key=lambda name: max(errors[name], 0.0) / saved[name])
        return {name: saved[name] for name in order}

    def seconds_with(self, names: Collection[str]) -> float:
        """Predicted time of a run with some layers in int8."""
        return self.seconds - sum(self.layers[name].saved_seconds for name in names)

    def bytes_with(self, names: Collection[str]) -> int:
        """Bytes of weights with some layers in int8."""
        return self.bytes - sum(self.layers[name].saved_bytes for name in names)


def predict(
    model: onnx.ModelProto, layers: Collection[str], device: Device, hardware: Hardware | None
) -> ModelCost:
    """Cost of a model and of some of its layers on a device.

    Args:
        model: A model with shapes.
        layers: Names of nodes with a weight.
        device: What it is compiled for.
        hardware: What is known of it; a usual device of its kind is supposed without.
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
                small = estimator.estimate(in_int8(work)).seconds
                saved = max(0.0, seconds - small)
                found[str(node.name)] = LayerCost(seconds, saved, saved_bytes(work))
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
    first, *others = work.nodes
    return dataclasses.replace(
        work,
        nodes=(dataclasses.replace(first, dtype=INT8), *others),
        read_bytes=work.read_bytes // _WIDTHS,
        written_bytes=work.written_bytes // _WIDTHS,
        weight_bytes=work.weight_bytes // _WIDTHS,
        signature="",
    )


def saved_bytes(work: GroupWork) -> int:
    """Bytes of a group's weights that int8 saves."""
    return work.weight_bytes - work.weight_bytes // _WIDTHS
