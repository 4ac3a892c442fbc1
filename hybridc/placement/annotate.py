"""Write a placement into an ONNX model as metadata of its nodes, where viewers show it."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from hybridc.errors import UsageError
from hybridc.placement.plan_file import PlanFile, PlanGroup

DEVICE, GROUP, WHY, REASON = ("hybridc.device", "hybridc.group", "hybridc.why", "hybridc.reason")

_NODE_METADATA = 10
"""The first version of ONNX's file format in which nodes have metadata."""

_MOST_BYTES = 2**31 - 2**20
"""Weights beyond this go into a file of their own: a protobuf message holds 2 GB at most."""


def annotate(model: ir.Model, plan: PlanFile) -> None:
    """Set the device, the group and the reason of each node of a model that was planned."""
    groups: dict[str, PlanGroup] = {node: group for group in plan.groups for node in group.nodes}
    for node in model.graph:
        group = groups.get(str(node.name))
        if group is not None:
            node.metadata_props[DEVICE] = group.device
            node.metadata_props[GROUP] = group.name
            node.metadata_props[WHY] = group.why
            node.metadata_props[REASON] = group.reason
    used = {group.device for group in plan.groups}
    names = (device.name for device in plan.devices if device.name in used)
    model.metadata_props["hybridc.devices"] = ", ".join(names)
    model.ir_version = max(model.ir_version, _NODE_METADATA)


def save_annotated(model: ir.Model, plan: PlanFile, path: Path) -> None:
    """Save a model with its placement in it.

    Raises:
        UsageError: The file cannot be written.
    """
    annotate(model, plan)
    weights = (value.const_value for value in model.graph.initializers.values())
    large = sum(tensor.nbytes for tensor in weights if tensor is not None) > _MOST_BYTES
    try:
        ir.save(model, path, external_data=f"{path.name}.data" if large else None)
    except OSError as error:
        raise UsageError(f"cannot write the model: {error}") from error
