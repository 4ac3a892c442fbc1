"""Groups and plans over random models."""

import networkx
import onnx_ir as ir
import pytest
from hybridc.targets.protocol import Device
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridc.placement.group import ELEMENTWISE, group_graph, make_groups
from hybridc.placement.plan import make_plan
from tests.models import branched_model, make_model, node
from tests.placement.graphs import models

DEVICES = (Device("a", "llvm"), Device("b", "llvm"))


@settings(max_examples=200, deadline=None)
@given(models())
def test_groups(graph):
    groups = make_groups(list(graph))
    assert sorted(str(n.name) for group in groups for n in group.nodes) == sorted(
        str(n.name) for n in graph
    )
    edges = group_graph(groups)
    assert networkx.is_directed_acyclic_graph(edges)
    assert all(source < target for source, target in edges.edges)


@settings(max_examples=200, deadline=None)
@given(models())
def test_inside_a_group_each_node_reads_the_one_before(graph):
    """What lies between two nodes of a group is read by nobody else."""
    for group in make_groups(list(graph)):
        for before, after in zip(group.nodes, group.nodes[1:], strict=False):
            assert after.op_type in ELEMENTWISE
            assert before in after.predecessors()
            assert set(before.successors()) == {after}
            assert not any(value.is_graph_output() for value in before.outputs)


@settings(max_examples=200, deadline=None)
@given(models(), st.data())
def test_a_plan_computes_everything_once_and_in_order(graph, data):
    groups = make_groups(list(graph))
    chosen = data.draw(st.lists(st.sampled_from(groups), unique_by=id))
    devices = [DEVICES[group in chosen] for group in groups]
    plan = make_plan(graph, groups, devices, DEVICES[0])
    known = set(graph.inputs)
    for part in plan.parts:
        assert set(part.inputs) <= known
        inside = {value for n in part.nodes for value in n.outputs}
        assert all(v in known | inside for n in part.nodes for v in n.inputs)
        assert not inside & known
        known |= set(part.outputs)
    assert set(graph.outputs) <= known
    assert sorted(n.name for part in plan.parts for n in part.nodes) == sorted(
        n.name for n in graph
    )
    pinned = {n.name for group in chosen for n in group.nodes}
    for part in plan.parts:
        assert {n.name in pinned for n in part.nodes} == {part.device.name == "b"}


def loaded(model):
    return ir.from_proto(model).graph


def test_branched_model():
    names = [[n.name for n in group.nodes] for group in make_groups(list(loaded(branched_model())))]
    assert ["stem", "stem.relu"] in names
    assert sorted(own for own in names if own[0] in ("left", "right")) == [
        ["left", "join"],
        ["right", "right.sigmoid"],
    ]


@pytest.mark.parametrize(
    ("nodes", "outputs"),
    [
        (
            [
                node("MatMul", "x x", "a", "m"),
                node("Relu", "a", "y", "r"),
                node("Neg", "a", "z", "n"),
            ],
            "yz",
        ),
        ([node("MatMul", "x x", "a", "m"), node("Relu", "a", "y", "r")], "ya"),
        ([node("MatMul", "x x", "a", "m"), node("Mul", "a a", "y", "r")], "y"),
        ([node("Split", "x", "a b", "m"), node("Add", "a b", "y", "r")], "y"),
    ],
    ids=["two readers", "also an output", "read twice", "two results"],
)
def test_a_result_with_other_readers_ends_its_group(nodes, outputs):
    model = make_model(nodes, {"x": (4, 4)}, dict.fromkeys(outputs, (4, 4)))
    groups = make_groups(list(loaded(model)))
    assert ["m"] in [[n.name for n in group.nodes] for group in groups]


def test_crossings_name_source_and_destination():
    graph = loaded(branched_model())
    groups = make_groups(list(graph))
    plan = make_plan(graph, groups, [DEVICES[g.name == "right"] for g in groups], DEVICES[0])
    crossings = [
        (value.name, source.name if source else None, to.name)
        for value, source, to in plan.crossings()
    ]
    assert ("x", None, "a") in crossings
    assert ("stem.y", "a", "b") in crossings
    assert ("right.y", "b", "a") in crossings
    assert len(crossings) == 3
