"""Operators of ai.onnx.ml against ONNX Runtime."""

import numpy as np
import onnx
import pytest
from harness import assert_same, floats, lower_model, run_lowered
from onnx import helper, numpy_helper
from test_microsoft import run_reference

from hybridc.errors import UnsupportedError


def model_of(op, inputs, attributes, outputs=1, opset=3, symbolic=False):
    names = [f"x{i}" for i in range(len(inputs))]
    results = [f"y{i}" for i in range(outputs)]
    node = helper.make_node(op, names, results, name="node", domain="ai.onnx.ml", **attributes)
    values = []
    for name, array in zip(names, inputs, strict=True):
        dims = ["n", *array.shape[1:]] if symbolic else array.shape
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        values.append(helper.make_tensor_value_info(name, kind, dims))
    untyped = [onnx.ValueInfoProto(name=name) for name in results]
    graph = helper.make_graph([node], "one", values, untyped)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", opset)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def check(op, inputs, attributes, outputs=1, opset=3, tolerance=1e-5, symbolic=False):
    model = model_of(op, inputs, attributes, outputs, opset, symbolic)
    expected = run_reference(model, {f"x{i}": array for i, array in enumerate(inputs)})
    actual = run_lowered(lower_model(model), inputs)
    for got, wanted in zip(actual, expected, strict=True):
        assert_same(got, np.asarray(wanted), tolerance)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "int32"])
@pytest.mark.parametrize("width", [1, 4])
def test_scaler(dtype, width):
    attributes = {"offset": [0.5, 1.5, -2.0, 0.25][:width], "scale": [2.0, 0.5, 1.0, -1.0][:width]}
    check("Scaler", [(floats(3, 4) * 5).astype(dtype)], attributes)


@pytest.mark.parametrize("norm", ["MAX", "L1", "L2"])
@pytest.mark.parametrize("shape", [(3, 4), (6,)])
def test_normalizer(norm, shape):
    data = floats(*shape)
    if len(shape) > 1:
        data[1] = 0
    check("Normalizer", [data], {"norm": norm})


@pytest.mark.parametrize("threshold", [0.0, 0.7])
def test_binarizer(threshold):
    check("Binarizer", [floats(3, 4)], {"threshold": threshold})


@pytest.mark.parametrize("shape", [(3, 6), (6,), (2, 3, 6)])
def test_array_feature_extractor(shape):
    check("ArrayFeatureExtractor", [floats(*shape), np.array([0, 5, 2])], {})


def test_feature_vectorizer():
    check("FeatureVectorizer", [floats(3, 2), floats(3, 4)], {"inputdimensions": [2, 4]}, opset=1)


INTEGERS = np.array([[3, 1, 4], [1, 5, 9]])


@pytest.mark.parametrize(
    ("data", "attributes"),
    [
        (INTEGERS, {"keys_int64s": [1, 3, 9], "values_int64s": [10, 30, 90]}),
        (INTEGERS, {"keys_int64s": [1, 3], "values_int64s": [10, 30], "default_int64": 7}),
        (INTEGERS, {"keys_int64s": [1, 3], "values_floats": [0.5, 1.5], "default_float": -3.0}),
        (
            np.array([0.5, 1.25, np.nan], np.float32),
            {"keys_floats": [0.5, 2.0], "values_int64s": [4, 5]},
        ),
        (floats(7), {"keys_floats": [0.5], "values_floats": [4.0]}),
    ],
)
def test_label_encoder(data, attributes):
    check("LabelEncoder", [data], attributes, opset=2)


def test_label_encoder_with_tensors():
    attributes = {
        "keys_tensor": numpy_helper.from_array(np.array([1, 4, 5])),
        "values_tensor": numpy_helper.from_array(np.array([0.5, 1.5, 2.5], np.float32)),
        "default_tensor": numpy_helper.from_array(np.array([9.0], np.float32)),
    }
    check("LabelEncoder", [INTEGERS], attributes, opset=4)


def test_label_encoder_of_strings_is_refused():
    model = model_of("LabelEncoder", [INTEGERS], {"keys_int64s": [1], "values_strings": ["a"]})
    with pytest.raises(UnsupportedError, match="strings"):
        lower_model(model)


@pytest.mark.parametrize("transform", ["NONE", "SOFTMAX", "LOGISTIC"])
@pytest.mark.parametrize("targets", [1, 3])
def test_linear_regressor(transform, targets):
    attributes = {
        "coefficients": floats(targets * 4, seed=1).tolist(),
        "intercepts": floats(targets, seed=2).tolist(),
        "targets": targets,
        "post_transform": transform,
    }
    if targets == 1 and transform != "NONE":
        with pytest.raises(UnsupportedError, match="single score"):
            lower_model(model_of("LinearRegressor", [floats(5, 4)], attributes))
        return
    check("LinearRegressor", [floats(5, 4)], attributes)


@pytest.mark.parametrize("transform", ["NONE", "SOFTMAX", "LOGISTIC"])
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_linear_classifier(transform, dtype):
    attributes = {
        "coefficients": floats(12, seed=1).tolist(),
        "intercepts": floats(3, seed=2).tolist(),
        "classlabels_ints": [4, 7, 5],
        "post_transform": transform,
        "multi_class": 1,
    }
    check("LinearClassifier", [(floats(5, 4) * 3).astype(dtype)], attributes, outputs=2)


@pytest.mark.parametrize("transform", ["SOFTMAX_ZERO", "PROBIT"])
@pytest.mark.parametrize("op", ["LinearRegressor", "TreeEnsembleClassifier"])
def test_transforms_that_onnx_runtime_defines(op, transform):
    """Scores that are zero, and such that are no probabilities, among them."""
    if op == "LinearRegressor":
        attributes = {"coefficients": floats(12, seed=1).tolist(), "targets": 3}
        data = np.concatenate([floats(9, 4), np.zeros((1, 4), np.float32)])
    else:
        attributes = grown().attributes("class", [0, 1, 2])
        attributes["classlabels_int64s"] = [5, 2, 9]
        data = samples()
    check(op, [data], attributes | {"post_transform": transform}, 2 if "class" in op.lower() else 1)


@pytest.mark.parametrize("transform", ["NONE", "LOGISTIC"])
def test_linear_classifier_of_two_classes_and_one_score(transform):
    attributes = {
        "coefficients": floats(4, seed=1).tolist(),
        "intercepts": [0.25],
        "classlabels_ints": [3, 8],
        "post_transform": transform,
    }
    check("LinearClassifier", [floats(9, 4)], attributes, outputs=2)


class Growing:
    """Random trees as attributes of the ensemble operators."""

    def __init__(self, seed, features=4, modes=("BRANCH_LEQ",)):
        self.random = np.random.default_rng(seed)
        self.features, self.modes = features, modes
        self.nodes, self.leaves = [], []

    def grow(self, tree, depth):
        """Append a subtree; returns its node id."""
        number = sum(1 for node in self.nodes if node["treeids"] == tree)
        node = {"treeids": tree, "nodeids": number, "modes": "LEAF", "featureids": 0}
        node |= {"values": 0.0, "truenodeids": 0, "falsenodeids": 0, "hitrates": 1.0}
        node["missing_value_tracks_true"] = int(self.random.integers(2))
        self.nodes.append(node)
        if depth == 0 or (depth < 3 and self.random.random() < 0.3):
            self.leaves.append((tree, number))
            return number
        node["modes"] = str(self.random.choice(self.modes))
        node["featureids"] = int(self.random.integers(self.features))
        node["values"] = float(np.round(self.random.uniform(-2, 2), 1))
        node["truenodeids"] = self.grow(tree, depth - 1)
        node["falsenodeids"] = self.grow(tree, depth - 1)
        return number

    def attributes(self, prefix, targets, low=-1.0):
        columns = {f"nodes_{key}": [node[key] for node in self.nodes] for key in self.nodes[0]}
        owners = [(leaf, target) for leaf in self.leaves for target in targets]
        columns |= {
            f"{prefix}_treeids": [leaf[0] for leaf, _ in owners],
            f"{prefix}_nodeids": [leaf[1] for leaf, _ in owners],
            f"{prefix}_ids": [target for _, target in owners],
            f"{prefix}_weights": self.random.uniform(low, 1, len(owners)).tolist(),
        }
        return columns


def grown(seed=0, count=5, depth=4, **options):
    trees = Growing(seed, **options)
    for tree in range(count):
        trees.grow(tree, depth)
    return trees


def samples(count=40, dtype="float32"):
    """Rows with ties on thresholds and with missing values."""
    data = np.round(floats(count, 4, seed=3), 1).astype(dtype)
    if np.dtype(dtype).kind == "f":
        data[3, 1] = data[7, 0] = np.nan
    return data


@pytest.mark.parametrize("aggregate", ["SUM", "AVERAGE", "MIN", "MAX"])
@pytest.mark.parametrize("targets", [[0], [0, 1, 2]])
def test_tree_regressor(aggregate, targets):
    attributes = grown().attributes("target", targets)
    attributes |= {"n_targets": len(targets), "aggregate_function": aggregate}
    check("TreeEnsembleRegressor", [samples()], attributes)


@pytest.mark.parametrize("mode", ["LEQ", "LT", "GTE", "GT", "EQ", "NEQ"])
def test_tree_modes(mode):
    attributes = grown(modes=[f"BRANCH_{mode}"]).attributes("target", [0])
    check("TreeEnsembleRegressor", [samples()], attributes | {"n_targets": 1})


def test_tree_regressor_of_mixed_modes_with_base_and_symbolic_rows():
    attributes = grown(modes=["BRANCH_LEQ", "BRANCH_GT", "BRANCH_EQ"]).attributes("target", [0, 1])
    attributes |= {"n_targets": 2, "base_values": [0.5, -1.0], "post_transform": "LOGISTIC"}
    check("TreeEnsembleRegressor", [samples()], attributes, symbolic=True)


@pytest.mark.parametrize("transform", ["NONE", "SOFTMAX", "LOGISTIC"])
def test_tree_classifier(transform):
    attributes = grown().attributes("class", [0, 1, 2])
    attributes |= {"classlabels_int64s": [5, 2, 9], "post_transform": transform}
    check("TreeEnsembleClassifier", [samples()], attributes, outputs=2)


@pytest.mark.parametrize("transform", ["NONE", "LOGISTIC"])
@pytest.mark.parametrize("low", [-1.0, 0.0])
@pytest.mark.parametrize("target", [0, 1])
def test_tree_classifier_of_one_score(transform, low, target):
    attributes = grown(count=3).attributes("class", [target], low)
    if low == 0:
        attributes["class_weights"] = [weight / 3 for weight in attributes["class_weights"]]
    attributes |= {"classlabels_int64s": [3, 6], "post_transform": transform}
    check("TreeEnsembleClassifier", [samples()], attributes, outputs=2)


@pytest.mark.parametrize("base", [[0.25], [0.75]])
@pytest.mark.parametrize("low", [-1.0, 0.0])
def test_tree_classifier_of_one_score_with_base(base, low):
    attributes = grown(count=3).attributes("class", [0], low)
    attributes |= {"classlabels_int64s": [3, 6], "base_values": base}
    check("TreeEnsembleClassifier", [samples()], attributes, outputs=2)


@pytest.mark.parametrize("dtype", ["int64", "int32", "float64"])
def test_tree_classifier_inputs(dtype):
    attributes = grown().attributes("class", [0, 1, 2]) | {"classlabels_int64s": [0, 1, 2]}
    check("TreeEnsembleClassifier", [samples(dtype=dtype)], attributes, outputs=2)


def test_tree_regressor_in_double_precision():
    attributes = grown().attributes("target", [0]) | {"n_targets": 1}
    for key in ("nodes_values", "target_weights"):
        values = np.array(attributes.pop(key))
        attributes[f"{key}_as_tensor"] = numpy_helper.from_array(values)
    del attributes["nodes_hitrates"]
    check("TreeEnsembleRegressor", [samples(dtype="float64")], attributes)


def test_a_cycle_of_nodes_is_refused():
    attributes = grown(count=1).attributes("target", [0]) | {"n_targets": 1}
    attributes["nodes_truenodeids"][0] = 0
    with pytest.raises(UnsupportedError, match="trees"):
        lower_model(model_of("TreeEnsembleRegressor", [samples()], attributes))


def ensemble(aggregate, transform=0, dtype="float32"):
    """Two trees: comparisons, and a test of membership."""
    tensor = numpy_helper.from_array
    return {
        "aggregate_function": aggregate,
        "post_transform": transform,
        "n_targets": 2,
        "tree_roots": [0, 2],
        "nodes_modes": tensor(np.array([0, 3, 6], np.uint8)),
        "nodes_featureids": [0, 1, 2],
        "nodes_splits": tensor(np.array([0.5, -0.3, 0.0], dtype)),
        "nodes_truenodeids": [1, 0, 2],
        "nodes_trueleafs": [0, 1, 1],
        "nodes_falsenodeids": [1, 3, 4],
        "nodes_falseleafs": [1, 1, 1],
        "leaf_targetids": [0, 1, 0, 1, 0],
        "leaf_weights": tensor(np.array([1.5, -2.0, 0.25, 3.0, -0.5], dtype)),
        "membership_values": tensor(np.array([0, 1, -2, np.nan], dtype)),
    }


@pytest.mark.parametrize("aggregate", [0, 1, 2, 3])
def test_tree_ensemble(aggregate):
    data = samples(200)
    data[:, 2] = np.round(data[:, 2])
    check("TreeEnsemble", [data], ensemble(aggregate), opset=5)


def test_tree_ensemble_in_double_precision():
    data = samples(99, "float64")
    data[:, 2] = np.round(data[:, 2])
    check("TreeEnsemble", [data], ensemble(1, 0, "float64"), opset=5)
    with pytest.raises(UnsupportedError, match="post-transform"):
        lower_model(model_of("TreeEnsemble", [data], ensemble(1, 2, "float64"), opset=5))
