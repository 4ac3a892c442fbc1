"""Loops whose number of iterations only running tells, against ONNX Runtime."""

import numpy as np
import pytest
from onnx import TensorProto, helper

from hybridc.compiler import build, load_built
from hybridc.errors import UnsupportedError
from hybridc.frontend.read import read_model
from tests.models import make_model, node, random, run_reference, save
from tests.support import assert_close, make_options


def compiled(model, folder, *shapes):
    path = save(model, folder / "m.onnx")
    return load_built(build(read_model(path), make_options(shapes=shapes, fallback=False))[0])


def assert_right(model, loaded, **inputs):
    assert_close(loaded.run(inputs), run_reference(model, inputs))


def value(name, dims, kind=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, kind, dims)


def typed(model, **kinds):
    """The model with other element types of some inputs; outputs without a shape."""
    for item in model.graph.input:
        if item.name in kinds:
            item.type.tensor_type.elem_type = kinds[item.name]
    for item in model.graph.output:
        item.type.tensor_type.ClearField("shape")
    return model


def loop_model(body_nodes, state, rows, inputs, weights=None, names="trips - x", outputs="y r"):
    """A Loop over a state ``s`` of some shape, with the results ``s2`` and perhaps rows ``r``."""
    body = helper.make_graph(
        body_nodes,
        "body",
        [value("i", [], TensorProto.INT64), value("c", [], TensorProto.BOOL), value("s", state)],
        [value("c2", [], TensorProto.BOOL), value("s2", state)]
        + [value("row", dims) for dims in rows],
    )
    names_out = outputs.split()[: 1 + len(rows)]
    loop = node("Loop", names, " ".join(names_out), "loop", body=body)
    model = make_model([loop], inputs, dict.fromkeys(names_out, ()), weights)
    return typed(model, trips=TensorProto.INT64, go=TensorProto.BOOL)


def adding_loop():
    """Adds ``x`` to the state; a row is the state times the number of the iteration."""
    nodes = [
        node("Identity", "c", "c2"),
        node("Add", "s x", "s2"),
        node("Cast", "i", "number", to=TensorProto.FLOAT),
        node("Mul", "s2 number", "row"),
    ]
    return loop_model(nodes, ["n", 3], [["n", 3]], {"trips": (), "x": ("n", 3)})


def test_trip_count_at_run_time(tmp_path):
    model = adding_loop()
    with compiled(model, tmp_path, "n=1..4") as loaded:
        for trips, rows in ((1, 1), (2, 2), (7, 3), (300, 4)):
            assert_right(model, loaded, trips=np.array(trips), x=random(rows, 3))


@pytest.mark.parametrize("trips", [0, -3])
def test_no_iteration(tmp_path, trips):
    """ONNX Runtime leaves the sizes of rows that were never made at zero."""
    x = random(2, 3)
    with compiled(adding_loop(), tmp_path, "n=1..4") as loaded:
        results = loaded.run({"trips": np.array(trips), "x": x})
    np.testing.assert_array_equal(results["y"], x)
    assert results["r"].shape == (0, 2, 3)


def test_condition_at_run_time(tmp_path):
    """Goes on while a sum is below a limit; there is no trip count."""
    nodes = [
        node("Add", "s one", "s2"),
        node("ReduceSum", "s2", "sum", keepdims=0),
        node("Less", "sum limit", "c2"),
        node("Identity", "s2", "row"),
    ]
    inputs = {"go": (), "x": (3,), "limit": ()}
    weights = {"one": np.array(1, "f")}
    model = loop_model(nodes, [3], [[3]], inputs, weights, names="- go x")
    with compiled(model, tmp_path) as loaded:
        for go, limit in ((True, 20), (False, 20), (True, -100), (True, 3000)):
            limits = np.array(limit, "f")
            assert_right(model, loaded, go=np.array(go), x=random(3), limit=limits)


def test_state_that_grows(tmp_path):
    nodes = [node("Identity", "c", "c2"), node("Concat", "s x", "s2", axis=0)]
    model = loop_model(nodes, [None, 3], [], {"trips": (), "x": (2, 3)})
    with compiled(model, tmp_path) as loaded:
        for trips in (0, 1, 5):
            assert_right(model, loaded, trips=np.array(trips), x=random(2, 3))


def test_rows_that_grow_are_refused(tmp_path):
    nodes = [
        node("Identity", "c", "c2"),
        node("Concat", "s x", "s2", axis=0),
        node("Identity", "s2", "row"),
    ]
    model = loop_model(nodes, [None, 3], [[None, 3]], {"trips": (), "x": (2, 3)})
    with pytest.raises(UnsupportedError, match="whose shape changes from iteration to iteration"):
        compiled(model, tmp_path)


def test_state_that_changes_its_rank_is_refused(tmp_path):
    nodes = [
        node("Identity", "c", "c2"),
        node("Unsqueeze", "s first", "s2"),
    ]
    weights = {"first": np.array([0])}
    model = loop_model(nodes, None, [], {"trips": (), "x": (2, 3)}, weights)
    with pytest.raises(UnsupportedError, match="changes its type or its rank"):
        compiled(model, tmp_path)


def test_a_branch_inside_a_loop(tmp_path):
    """The branches read the iteration's number and the state."""
    double = helper.make_graph([node("Add", "s s", "then.y")], "t", [], [value("then.y", ["n", 3])])
    add = helper.make_graph([node("Add", "s x", "else.y")], "e", [], [value("else.y", ["n", 3])])
    nodes = [
        node("Identity", "c", "c2"),
        node("Equal", "i two", "flag"),
        node("If", "flag", "s2", then_branch=double, else_branch=add),
    ]
    inputs = {"trips": (), "x": ("n", 3)}
    model = loop_model(nodes, ["n", 3], [], inputs, {"two": np.array(2)})
    with compiled(model, tmp_path, "n=1..4") as loaded:
        for trips in (1, 2, 3, 6):
            assert_right(model, loaded, trips=np.array(trips), x=random(2, 3))


SCANS = [
    {},
    {"scan_input_directions": [1], "scan_output_directions": [1]},
    {"scan_input_axes": [1], "scan_output_axes": [-1]},
    {"scan_input_axes": [-1], "scan_output_axes": [1], "scan_output_directions": [1]},
]


@pytest.mark.parametrize("attributes", SCANS, ids=str)
@pytest.mark.parametrize("shape", ["range", "long"])
def test_scan_of_run_time_length(tmp_path, attributes, shape):
    """Sums along an axis, and every sum on the way times two."""
    nodes = [node("Add", "s piece", "s2"), node("Add", "s2 s2", "row")]
    body = helper.make_graph(
        nodes, "body", [value("s", [4]), value("piece", [4])], [value("s2", [4]), value("row", [4])]
    )
    scan = node("Scan", "start x", "y r", "scan", body=body, num_scan_inputs=1, **attributes)
    axis = attributes.get("scan_input_axes", [0])[0] % 2
    dims = ["n", 4] if axis == 0 else [4, "n"]
    model = typed(make_model([scan], {"start": (4,), "x": dims}, {"y": (), "r": ()}))
    lengths, option = ((1, 2, 9), "n=1..9") if shape == "range" else ((300,), "n=300")
    with compiled(model, tmp_path, option) as loaded:
        for length in lengths:
            x = random(*[length if dim == "n" else dim for dim in dims])
            assert_right(model, loaded, start=random(4, seed=1), x=x)


@pytest.mark.parametrize("directions", [[0, 0], [0, 1], [1, 1]])
@pytest.mark.parametrize(("batch", "length"), [(1, 3), (3, 5), (2, 300)])
def test_scan_of_batches(tmp_path, directions, batch, length):
    """Opset 8: each element of a batch is scanned on its own."""
    nodes = [node("Add", "s a", "t"), node("Mul", "t b", "row"), node("Tanh", "row", "s2")]
    names = ("s", "a", "b", "s2", "row")
    values = {name: value(name, [4]) for name in names}
    inputs = [values[name] for name in ("s", "a", "b")]
    body = helper.make_graph(nodes, "body", inputs, [values["s2"], values["row"]])
    scan = node(
        "Scan", "- start x w", "y r", "scan", body=body, num_scan_inputs=2, directions=directions
    )
    dims = (batch, length, 4)
    outputs = {"y": (batch, 4), "r": dims}
    model = make_model([scan], {"start": (batch, 4), "x": dims, "w": dims}, outputs, opset=8)
    with compiled(model, tmp_path) as loaded:
        given = {"x": random(*dims), "w": random(*dims, seed=1)}
        assert_right(model, loaded, start=random(batch, 4, seed=2), **given)
