"""From graphs and profiles to problems: bytes, readers, memories, and what a copy costs."""

import dataclasses
import math

import onnx_ir as ir
import pytest
from hybridc.cost_models.cost import Ranked
from hybridc.cost_models.device import HANDOFF_SECONDS, DeviceProfile, MemoryLevel
from hybridc.cost_models.link import Route
from hybridc.cost_models.load import DeviceModel
from hybridc.cost_models.roofline import Roofline
from hybridc.targets.protocol import Device
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridc.errors import UsageError
from hybridc.placement.cost_graph import CostGraph, make_cost_graph
from hybridc.placement.group import make_groups
from hybridc.placement.hardware import Hardware, load_hardware, make_problem
from hybridc.placement.moves import change_of_move, tensors_of
from hybridc.placement.problem import (
    DOLLARS,
    HOST,
    SECONDS,
    Tensor,
    busy,
    objective,
    taker_of,
    total,
)
from tests.models import branched_model, make_model, node
from tests.placement.graphs import models
from tests.placement.solvers.problems import make_problem as random_problem

CPU = DeviceProfile(
    "cpu", "data sheet", "", {"float32": 1e9}, (MemoryLevel("m", 10**9, 1e9),), 1e-6
)
GPU = dataclasses.replace(
    CPU,
    in_host_memory=False,
    synchronize_seconds=1e-5,
    to_host=Route(1e-6, 1e9),
    from_host=Route(2e-6, 2e9),
    watts=10.0,
    dollars_per_hour=3600.0,
)


def hardware(links=(), **profiles):
    found = {n: DeviceModel(p, Ranked([Roofline()])) for n, p in profiles.items()}
    return Hardware(tuple(profiles), found, dict(links))


def problem_of(hardware):
    """The ways of a problem without groups."""
    return make_problem(CostGraph((), ()), hardware, ())


@pytest.mark.parametrize(
    ("profiles", "links", "places"),
    [
        ({"a": CPU}, {}, (0,)),
        ({"a": CPU, "b": CPU}, {}, (0, 0)),
        ({"a": GPU, "b": CPU, "c": GPU}, {}, (1, 0, 2)),
        ({"a": CPU, "b": CPU}, {("a", "b"): Route(1, 1), ("b", "a"): Route(1, 1)}, (0, 1)),
    ],
)
def test_memories(profiles, links, places):
    assert hardware(links, **profiles).places() == places


def test_ways():
    problem = problem_of(hardware(a=CPU, b=CPU, c=GPU, d=GPU))
    seconds = {key: (way.fixed, way.per_byte) for key, way in problem.figures[SECONDS].ways.items()}
    assert problem.places == (0, 0, 1, 2)
    assert seconds[0, 1] == seconds[HOST, 1] == (2e-6, 0.5e-9)
    assert seconds[2, 0] == pytest.approx((1e-5 + 1e-6, 1e-9))
    assert seconds[2, 2] == pytest.approx((1e-5 + 1e-6 + 2e-6, 1.5e-9)), "through the host"
    taker = taker_of(problem.places, 1)
    assert seconds[0, taker] == (HANDOFF_SECONDS, 1e-9), "through memory"
    assert problem.destinations(0, 1) == (taker,)
    assert problem.destinations(0, HOST) == problem.destinations(HOST, 1) == ()
    assert problem.destinations(2, 0) == problem.destinations(2, HOST) == (0,)


def test_a_link_that_was_given_counts():
    link = {("c", "d"): Route(7.0, 1.0), ("d", "c"): Route(8.0, 1.0)}
    ways = problem_of(hardware(link, a=CPU, c=GPU, d=GPU)).figures[SECONDS].ways
    assert ways[1, 2].fixed == pytest.approx(7.0 + 1e-5)
    assert ways[2, 1].fixed == pytest.approx(8.0 + 1e-5)
    assert ways[1, 0].fixed == pytest.approx(1.1e-5)


def price_of(problem, source, reader, count=100):
    """What one reader pays."""
    ways = problem.figures[SECONDS].ways
    return sum(ways[source, q].price(count) for q in problem.destinations(source, reader))


def test_measured_handoffs_count_where_both_ends_know_each_other():
    route = Route(5.0, 0.5)
    cpu = dataclasses.replace(CPU, handoffs={"b": route, "c": Route(4.0, 0.5)})
    gpu = dataclasses.replace(GPU, handoffs={"a": Route(6.0, 0.25)})
    known = {"a": cpu, "b": dataclasses.replace(CPU, handoffs={"a": route}), "c": gpu}
    problem = problem_of(hardware(**known))
    assert price_of(problem, 1, 0) == price_of(problem, 0, 1) == 5.0 + 200
    assert price_of(problem, 0, 2) == 6.0 + 400
    assert price_of(problem, 2, 0) == pytest.approx(4.0 + 200), "back, too"
    assert price_of(problem, 1, 2) == price_of(problem, HOST, 2), "this pair was not measured"
    assert price_of(problem, 2, 1) == pytest.approx(1.1e-5 + 1e-7), "nor this one"
    replaced = problem_of(hardware(**{**known, "c": GPU}))
    assert price_of(replaced, 0, 2) == price_of(replaced, HOST, 2), "of another device"
    assert price_of(replaced, 2, 0) == pytest.approx(1.1e-5 + 1e-7)
    link = {("a", "c"): Route(7.0, 1.0), ("c", "a"): Route(8.0, 1.0)}
    linked = problem_of(hardware(link, **known)).figures[SECONDS].ways
    assert (linked[0, 1].fixed, linked[2, 0].fixed) == (7.0, pytest.approx(8.0 + 1e-5))


def with_handoffs(**latencies):
    """Two CPUs, to which a GPU hands over in times that were measured."""
    gpu = dataclasses.replace(GPU, handoffs={name: Route(1.0, 1e9) for name in latencies})
    cpus = {
        name: dataclasses.replace(CPU, handoffs={"g": Route(latency, 1e8)})
        for name, latency in latencies.items()
    }
    return hardware(**cpus, g=gpu)


@pytest.mark.parametrize("latencies", [(3.0, 2.0), (1e-6, 2.0), (0.0, 0.0)])
def test_readers_in_one_memory_share_the_copy(latencies):
    """Each alone pays what was measured; together they pay the copy once, and each its rest."""
    problem = problem_of(with_handoffs(**dict(zip("ab", latencies, strict=True))))
    caller, rates = 1.1e-5, (1e-9, 1e-8, 1e-8)
    wholes = dict(zip((HOST, 0, 1), (caller, *latencies), strict=True))
    copy = problem.figures[SECONDS].ways[2, 0]
    assert (copy.fixed, copy.per_byte) == pytest.approx((min(wholes.values()), min(rates)))
    for (reader, fixed), rate in zip(wholes.items(), rates, strict=True):
        assert price_of(problem, 2, reader) == pytest.approx(fixed + 100 * rate)
    tensor = Tensor("t", 100, 0, (1, 2, 3), True)
    known = dataclasses.replace(problem, groups=("g",) * 4, tensors=(tensor,))
    ways = problem.figures[SECONDS].ways
    paid = [ways[a, q].price(t.bytes) for t, a, q in known.copies((2, 0, 1, 1))]
    alone = [fixed + 100 * rate for fixed, rate in zip(wholes.values(), rates, strict=True)]
    assert math.fsum(paid) == pytest.approx(math.fsum(alone) - 2 * copy.price(100))


def test_who_is_busy_with_what_comes_from_a_gpu():
    """The link with the copy, and each CPU with taking it."""
    figure = problem_of(with_handoffs(a=3.0, b=2.0)).figures[SECONDS]
    problem = dataclasses.replace(
        problem_of(with_handoffs(a=3.0, b=2.0)),
        groups=("g",) * 3,
        tensors=(Tensor("t", 0, 0, (1, 2)),),
        figures={SECONDS: dataclasses.replace(figure, groups=((0.0,) * 3,) * 3)},
    )
    found = busy(problem, (2, 0, 1))
    expected = {"a": 3.0 - 1.1e-5, "b": 2.0 - 1.1e-5, "g": 0.0, "g->host": 1.1e-5}
    assert found == pytest.approx(expected)


def test_taking_costs_the_time_of_both_ends():
    gpu = dataclasses.replace(GPU, dollars_per_hour=3600.0, handoffs={"a": Route(1.0, 1e9)})
    cpu = dataclasses.replace(CPU, dollars_per_hour=7200.0, handoffs={"g": Route(3.0, 1e9)})
    problem = problem_of(hardware(a=cpu, g=gpu))
    dollars = problem.figures[DOLLARS].ways
    assert dollars[1, 0].fixed == pytest.approx(1.1e-5), "the caller's memory has no price"
    assert dollars[1, taker_of(problem.places, 0)].fixed == pytest.approx(3 * (3.0 - 1.1e-5))


def test_pairs_of_which_handing_over_was_measured():
    assert with_handoffs(a=3.0, b=2.0).measured_handoffs() == {(0, 2), (1, 2), (2, 0), (2, 1)}
    assert hardware(a=CPU, g=GPU).measured_handoffs() == frozenset()


def test_a_run_takes_more_on_several_devices():
    cpu = dataclasses.replace(CPU, run_seconds=2.0, split_seconds=3.0)
    figure = problem_of(hardware(a=cpu, b=CPU)).figures[SECONDS]
    assert [figure.of_run(p) for p in ((), (0, 0), (1,), (0, 1))] == [2.0, 2.0, 2.0, 5.0]


def test_two_machines():
    link = {("a", "b"): Route(1.0, 1e6), ("b", "a"): Route(2.0, 1e6)}
    ways = problem_of(hardware(link, a=CPU, b=CPU, c=GPU)).figures[SECONDS].ways
    assert ways[HOST, 1].fixed == ways[0, 1].fixed == 1.0
    assert ways[1, 2].fixed == pytest.approx(2.0 + 2e-6), "back, and then to the GPU"


@pytest.mark.parametrize("objective", ["energy", "cost"])
def test_energy_and_money(objective):
    """At 10 watts and a dollar a second, they are the seconds times that."""
    graph = make_cost_graph(*described(branched_model()), {})
    allowed = [frozenset({0})] * len(graph.groups)
    problem = make_problem(graph, hardware(a=GPU), allowed, objective)
    rate = {"energy": 10.0, "cost": 1.0}[objective]
    seconds = [row[0] for row in problem.figures[SECONDS].groups]
    assert [row[0] / rate for row in problem.figure.groups] == pytest.approx(seconds)
    with pytest.raises(UsageError, match="the energy of a device is not known"):
        make_problem(graph, hardware(a=CPU), allowed, "energy")


def test_bytes_on_a_link_with_a_price():
    link = {
        ("a", "b"): Route(1.0, 1e6, dollars_per_gigabyte=0.5),
        ("b", "a"): Route(2.0, 1e6),
    }
    ways = problem_of(hardware(link, a=CPU, b=CPU)).figures[DOLLARS].ways
    assert ways[0, 1].price(10**9) - ways[0, 1].price(0) == pytest.approx(0.5)
    assert ways[1, 0].price(10**9) == 0, "time costs nothing here"


def described(model):
    import onnx

    graph = ir.from_proto(onnx.shape_inference.infer_shapes(model)).graph
    return graph, make_groups(list(graph))


def test_tensors_of_the_branched_model():
    graph, groups = described(branched_model())
    found = {t.name: t for t in make_cost_graph(graph, groups, {}).tensors}
    index = {group.name: number for number, group in enumerate(groups)}
    assert found["x"].source == HOST
    assert found["stem.y"].source == index["stem"]
    assert found["stem.y"].readers == tuple(sorted((index["left"], index["right"])))
    assert found["x"].bytes == 4 * 3 * 8 * 8
    assert [t.name for t in found.values() if t.is_output] == [str(v.name) for v in graph.outputs]
    assert "left.y" not in found, "it stays inside of a group"


def test_dynamic_sizes_are_counted_where_asked():
    nodes = [node("Exp", "x", "a", "one"), node("MatMul", "a a", "y", "two")]
    model = make_model(nodes, {"x": ("n", "n")}, {"y": ("n", "n")})
    graph, groups = described(model)
    small, large = (make_cost_graph(graph, groups, {"n": n}) for n in (4, 8))
    assert [t.bytes for t in small.tensors] == [64, 64, 64]
    assert [t.bytes for t in large.tensors] == [256, 256, 256]
    assert small.groups[1].work.operations == 2 * 4**3
    assert large.groups[1].nodes == ("two",)
    unknown = make_cost_graph(graph, groups, {})
    assert not unknown.groups[1].work.is_known
    assert str(next(iter(graph)).outputs[0].shape[0]) == "n", "the graph stays as it was"


@settings(max_examples=200, deadline=None)
@given(models(), st.data())
def test_every_tensor_is_copied_once_to_each_memory(graph, data):
    """Against a count straight from the graph's nodes."""
    groups = make_groups(list(graph))
    described = make_cost_graph(graph, groups, {})
    machine = hardware(a=CPU, b=GPU, c=GPU)
    problem = make_problem(described, machine, [frozenset({0, 1, 2})] * len(groups))
    placement = tuple(data.draw(st.integers(0, 2)) for _ in groups)
    home = {n: placement[i] for i, group in enumerate(groups) for n in group.nodes}
    wanted = set()
    for node_ in graph:
        for value in node_.inputs:
            source = home[value.producer()] if value.producer() else 0
            if source != home[node_]:
                wanted.add((str(value.name), home[node_]))
    wanted |= {(str(v.name), 0) for v in graph.outputs if v.producer() and home[v.producer()] != 0}
    copies = [(tensor.name, destination) for tensor, _, destination in problem.copies(placement)]
    assert sorted(copies) == sorted(wanted)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10**6), st.data())
def test_the_change_of_a_move_is_exact(seed, data):
    problem = random_problem(seed, 3, 6, forbid=0.0, split=seed % 2)
    placement = tuple(data.draw(st.integers(0, 2)) for _ in range(6))
    group, device = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 2))
    change = change_of_move(problem, placement, group, device, tensors_of(problem)[group])
    moved = (*placement[:group], device, *placement[group + 1 :])
    difference = objective(problem, moved) - objective(problem, placement)
    assert change.total == pytest.approx(difference, abs=1e-9)
    assert math.isfinite(total(problem, SECONDS, moved))


LLVM, CUDA = Device("llvm:0", "llvm", "znver3"), Device("cuda:0", "cuda", "sm_90")
PORTABLE = Device("llvm:0", "llvm", "")
REFUGE = Device("onnxruntime:0", "onnxruntime")


def test_hardware_out_of_profiles():
    known = load_hardware((LLVM, CUDA), REFUGE, {}, {}, {})
    assert known.names == ("llvm:0", "cuda:0", "onnxruntime:0")
    assert known.models["onnxruntime:0"] is known.models["llvm:0"]
    assert load_hardware((PORTABLE, CUDA), REFUGE, {}, {}, {}) is None
    given = load_hardware((PORTABLE, CUDA), REFUGE, {"llvm:0": "pocl"}, {}, {})
    assert "PoCL" in given.models["llvm:0"].profile.name
    with pytest.raises(UsageError, match=r"no profile is known for llvm:0.*--profile llvm:0="):
        load_hardware((PORTABLE, CUDA), REFUGE, {"cuda:0": "l4"}, {}, {})
