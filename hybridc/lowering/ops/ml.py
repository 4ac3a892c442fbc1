"""Operators of the domain ai.onnx.ml on tensors: scaling, labels, linear models, trees."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from tvm import relax, te, tirx

from hybridc.lowering.call import Call, Operator, Unsupported, shape_of
from hybridc.lowering.ops import trees
from hybridc.lowering.ops.common import (
    Own,
    cast,
    compute,
    derived_constant,
    emit_kernel,
    map_elements,
    number,
    product,
    reduce_axis,
    reshape,
    same_dim,
)
from hybridc.lowering.value import Expression, Value

DOMAIN = "ai.onnx.ml"


def array_attribute(call: Call, name: str, dtype: str) -> np.ndarray[Any, Any] | None:
    """An attribute that is a list of numbers or a tensor, as a vector; ``None`` if not given."""
    for key in (name, f"{name}_as_tensor"):
        value = call.attribute(key)
        if value is not None:
            values = value.numpy() if hasattr(value, "numpy") else np.array(value)
            return np.ravel(values).astype(dtype)
    return None


def scaler(call: Call) -> Expression:
    """``(x - offset) * scale`` by feature, as float32."""
    parts = []
    for name, neutral in (("offset", 0.0), ("scale", 1.0)):
        array = array_attribute(call, name, "float32")
        array = np.array([neutral], np.float32) if array is None or not array.size else array
        parts.append(derived_constant(call, name, array))

    def element(x: Any, offset: Any, scale: Any) -> Any:
        return (x.astype("float32") - offset) * scale

    return map_elements(call, element, call.value(0), *parts, name="scaler")


def normalizer(call: Call) -> Expression:
    """Each row over its largest element, its sum of magnitudes, or its Euclidean length."""
    norm = call.attribute("norm", "MAX")
    data = cast(call, call.tensor(0), "float32")
    axis = call.rank(0) - 1
    if norm == "MAX":
        size = call.emit(relax.op.max(data, axis=[axis], keepdims=True))
    elif norm == "L1":
        size = call.emit(relax.op.abs(data))
        size = call.emit(relax.op.sum(size, axis=[axis], keepdims=True))
    elif norm == "L2":
        size = call.emit(relax.op.multiply(data, data))
        size = call.emit(relax.op.sqrt(relax.op.sum(size, axis=[axis], keepdims=True)))
    else:
        raise Unsupported(f"Normalizer with the norm {norm!r}")

    def element(x: Any, s: Any) -> Any:
        return tirx.Select(tirx.EQ(s, number(0, s)), x, x / s)

    return map_elements(call, element, data, size, name="normalizer")


def binarizer(call: Call) -> Expression:
    """One where the input is above the threshold, zero elsewhere."""
    threshold = float(call.attribute("threshold", 0.0))

    def element(x: Any) -> Any:
        above = x.astype("float64") > tirx.const(threshold, "float64")
        return tirx.Select(above, number(1, x), number(0, x))

    return map_elements(call, element, call.value(0), name="binarizer")


def array_feature_extractor(call: Call) -> Expression:
    """Elements of the last axis at given positions."""
    data, axis = call.tensor(0), call.rank(0) - 1
    count = product(call.shape(1))
    places = call.materialize(reshape(call, call.value(1), (count,)))
    result = call.emit(relax.op.take(data, places, axis=axis, mode="clip"))
    return reshape(call, result, (1, count)) if axis == 0 else result


def feature_vectorizer(call: Call) -> Expression:
    """Inputs as float32, side by side."""
    widths = call.attribute("inputdimensions")
    pieces = []
    for index in range(len(call.inputs)):
        shape = call.shape(index)
        rows, columns = (shape[0], product(shape[1:])) if len(shape) > 1 else (1, shape[0])
        if widths is not None and not same_dim(columns, widths[index]):
            raise Unsupported("FeatureVectorizer that cuts or pads an input")
        piece = reshape(call, call.value(index), (rows, columns))
        pieces.append(cast(call, call.materialize(piece), "float32"))
    return call.emit(relax.op.concat(pieces, 1))


_SUFFIXES = {"int64s": "int64", "floats": "float32"}


def label_encoder(call: Call) -> Expression:
    """The value that belongs to each key; a default for what is no key."""
    keys, values = (_labels(call, name) for name in ("keys", "values"))
    if len(keys) != len(values) or len(set(keys.tolist())) != len(keys):
        raise Unsupported("LabelEncoder with repeated keys or too few values")
    if str(keys.dtype) != call.dtype(0):
        raise Unsupported(f"keys of type {keys.dtype} for an input of type {call.dtype(0)}")
    tensors = [call.materialize(derived_constant(call, n, a)) for n, a in
               (("keys", keys), ("values", values))]  # fmt: skip
    default = tirx.const(_default(call, str(values.dtype)), str(values.dtype))

    def kernel(own: Own, data: te.Tensor, known: te.Tensor, results: te.Tensor) -> te.Tensor:
        place = reduce_axis(len(keys), "key")

        def find(*index: Any) -> Any:
            x, key = data(*index), known(place)
            same = tirx.EQ(x, key)
            if str(data.dtype).startswith("float"):
                same = tirx.any(same, tirx.all(tirx.isnan(x), tirx.isnan(key)))
            return te.max(tirx.Select(same, place.var, tirx.const(-1, "int64")), axis=place)

        found = compute(data.shape, find, "found")

        def element(*index: Any) -> Any:
            at = found(*index)
            return tirx.if_then_else(at < 0, default, results(tirx.max(at, tirx.const(0, "int64"))))

        return compute(data.shape, element, "encoded")

    return emit_kernel(call, kernel, call.tensor(0), *tensors, name="label_encoder")


def _labels(call: Call, name: str) -> np.ndarray[Any, Any]:
    """Keys or values of LabelEncoder, whichever numeric attribute holds them."""
    for suffix, dtype in _SUFFIXES.items():
        found = array_attribute(call, f"{name}_{suffix}", dtype)
        if found is not None:
            return found
    tensor = call.attribute(f"{name}_tensor")
    if tensor is None or tensor.numpy().dtype.kind not in "iuf":
        raise Unsupported("LabelEncoder of strings")
    return np.ravel(tensor.numpy())


def _default(call: Call, dtype: str) -> float:
    tensor = call.attribute("default_tensor")
    if tensor is not None:
        value: float = tensor.numpy().reshape(()).item()
        return value
    if dtype.startswith("float"):
        return float(call.attribute("default_float", -0.0))
    return int(call.attribute("default_int64", -1))


def _linear(call: Call) -> Expression:
    """``X W' + b`` as float32, one column per row of the coefficients."""
    data = cast(call, call.tensor(0), "float32")
    if call.rank(0) == 1:
        data = reshape(call, data, (1, *call.shape(0)))
    features = shape_of(data)[1]
    coefficients = array_attribute(call, "coefficients", "float32")
    if not isinstance(features, int) or coefficients is None or coefficients.size % features:
        raise Unsupported("coefficients that do not fit the number of features")
    weights = np.ascontiguousarray(coefficients.reshape(-1, features).T)
    weight = call.materialize(derived_constant(call, "coefficients", weights))
    result = call.emit(relax.op.matmul(data, weight))
    intercepts = array_attribute(call, "intercepts", "float32")
    if intercepts is None or not intercepts.size:
        return result
    bias = derived_constant(call, "intercepts", intercepts)
    return map_elements(call, lambda x, b: x + b, result, bias, name="intercepts")


def linear_regressor(call: Call) -> Expression:
    """A linear model for each target."""
    return transformed(call, _linear(call), call.attribute("post_transform", "NONE"))


def transformed(call: Call, scores: Expression, name: str) -> Expression:
    """Scores ``(rows, classes)`` behind the post-transform of a name."""
    if name == "NONE":
        return scores
    if shape_of(scores)[1] == 1:
        # ONNX Runtime leaves it out there, against the standard.
        raise Unsupported(f"the post-transform {name} of a single score")
    if name == "LOGISTIC":
        return map_elements(call, tirx.sigmoid, scores, name="logistic")
    if name == "SOFTMAX":
        return call.emit(relax.op.nn.softmax(scores, axis=-1))
    if name == "PROBIT":
        return map_elements(call, _probit, scores, name="probit")
    if name == "SOFTMAX_ZERO":
        return _softmax_but_zeros(call, scores)
    raise Unsupported(f"the post-transform {name}")


def _probit(p: Any) -> Any:
    """The quantile of the normal distribution by the formula of ONNX Runtime and of ONNX's
    evaluator, which take an approximation (Winitzki's) with constants of a few digits."""
    a, pi, one = 0.147, 3.14159, number(1, p)
    x = number(2, p) * p - one
    logarithm = tirx.log((one - x) * (one + x))
    middle = number(2 / (pi * a), p) + number(0.5, p) * logarithm
    root = tirx.sqrt(middle * middle - number(1 / a, p) * logarithm)
    size = number(1.41421356, p) * tirx.sqrt(root - middle)
    return tirx.Select(x < number(0, p), -size, size)


def _softmax_but_zeros(call: Call, scores: Expression) -> Expression:
    """Softmax in which scores that are zero have no part: they are scaled and stay zero."""

    def is_zero(x: Any) -> Any:
        return tirx.abs(x) <= number(1e-7, x)

    highest = call.emit(relax.op.max(scores, axis=[-1], keepdims=True))
    weights = map_elements(
        call,
        lambda x, m: tirx.Select(is_zero(x), number(0, x), tirx.exp(x - m)),
        scores,
        highest,
        name="weights",
    )
    total = call.emit(relax.op.sum(weights, axis=[-1], keepdims=True))

    def share(x: Any, w: Any, m: Any, t: Any) -> Any:
        return tirx.Select(is_zero(x), x * tirx.exp(-m), w) / t

    return map_elements(call, share, scores, weights, highest, total, name="shares")


def linear_classifier(call: Call) -> tuple[Value, ...]:
    """The most likely class of a linear model, and the scores of all classes."""
    scores, transform = _linear(call), call.attribute("post_transform", "NONE")
    labels = class_labels(call, "classlabels_ints")
    if shape_of(scores)[1] == 1:
        if len(labels) != 2:
            raise Unsupported("LinearClassifier with one score and other than two classes")
        winner = _above(call, scores, 0.0)
        return label_of(call, winner, labels), _two_classes(call, scores, transform, False)
    return label_of(call, best_class(call, scores), labels), transformed(call, scores, transform)


def class_labels(call: Call, name: str) -> np.ndarray[Any, Any]:
    """The numbers of the classes, from an attribute of that name; refuses strings."""
    labels = array_attribute(call, name, "int64")
    if labels is None or not labels.size:
        raise Unsupported("classes named by strings")
    return labels


def _above(call: Call, scores: Expression, threshold: float) -> Expression:
    """1 where the only score of a row is above a threshold, else 0, as int64."""
    flat = reshape(call, scores, (shape_of(scores)[0],))

    def element(x: Any) -> Any:
        return tirx.Select(x > number(threshold, x), tirx.const(1, "int64"), tirx.const(0, "int64"))

    return map_elements(call, element, flat, name="above")


def best_class(call: Call, scores: Expression) -> Expression:
    """Position of each row's largest score, the first one of several."""
    return call.emit(relax.op.argmax(scores, axis=1, keepdims=False))


def label_of(call: Call, position: Expression, labels: np.ndarray[Any, Any]) -> Expression:
    """The label at each row's position, int64."""
    if np.array_equal(labels, np.arange(len(labels))):
        return position
    table = call.materialize(derived_constant(call, "labels", labels))
    return call.emit(relax.op.take(table, position, axis=0, mode="fast"))


def _two_classes(call: Call, scores: Expression, transform: str, negative: bool) -> Expression:
    """Scores of both classes from the second one's.

    The first one's is its negative or its complement to one; with LOGISTIC both come to the same.
    """
    if transform == "LOGISTIC":
        first = map_elements(call, lambda x: tirx.sigmoid(-x), scores, name="logistic")
        scores = map_elements(call, tirx.sigmoid, scores, name="logistic")
    elif transform != "NONE":
        raise Unsupported(f"the post-transform {transform} of one score")
    elif negative:
        first = map_elements(call, lambda x: -x, scores, name="negative")
    else:
        first = map_elements(call, lambda x: number(1, x) - x, scores, name="complement")
    return call.emit(relax.op.concat([first, scores], 1))


def _attributes(call: Call) -> dict[str, Any]:
    """All attributes as lists and plain values."""
    result = {}
    for name in call.node.attributes:
        value = call.attribute(name)
        value = np.ravel(value.numpy()).tolist() if hasattr(value, "numpy") else value
        result[name.removesuffix("_as_tensor")] = value
    return result


def _scores(
    call: Call, forest: trees.Forest, targets: int, aggregate: str, dtype: str
) -> Expression:
    """Raw scores of a forest for each row of the input."""
    if call.rank(0) != 2:
        raise Unsupported("trees over an input that is not a matrix")
    width = call.shape(0)[1]
    if not isinstance(width, int) or max(forest.features, default=0) >= width:
        raise Unsupported("trees that look at a feature that the input may not have")
    if any(not 0 <= target < targets for target in forest.targets):
        raise Unsupported("a leaf for a target that does not exist")
    arrays = forest.arrays(dtype)
    tensors = [call.materialize(derived_constant(call, n, a)) for n, a in arrays.items()]
    modes = sorted({mode for mode in forest.modes if mode != trees.LEAF})
    kernel = partial(trees.evaluate, forest.depth, modes, aggregate, targets, tuple(arrays))
    return call.emit_te(kernel, call.tensor(0), *tensors, primfunc_name_hint="trees")


def _work_type(call: Call) -> str:
    return "float64" if call.dtype(0) == "float64" else "float32"


def _with_base(call: Call, scores: Expression, attributes: Mapping[str, Any]) -> Expression:
    base = attributes.get("base_values")
    if not base:
        return scores
    constant = derived_constant(call, "base", np.array(base, str(scores.ty.dtype)))
    return map_elements(call, lambda x, b: x + b, scores, constant, name="base")


def tree_ensemble_regressor(call: Call) -> Expression:
    """Sum, mean, smallest or largest of the trees' values for each target."""
    attributes = _attributes(call)
    forest = trees.forest_of(attributes, "target")
    aggregate = attributes.get("aggregate_function", "SUM")
    if aggregate not in trees.AGGREGATES:
        raise Unsupported(f"trees combined by {aggregate!r}")
    targets = int(attributes.get("n_targets", 1))
    scores = _scores(call, forest, targets, aggregate, _work_type(call))
    scores = cast(call, _with_base(call, scores, attributes), "float32")
    return transformed(call, scores, attributes.get("post_transform", "NONE"))


def tree_ensemble(call: Call) -> Expression:
    """Sum, mean, smallest or largest of the trees' values for each target, since version 5."""
    attributes = _attributes(call)
    aggregate = trees.AGGREGATES[int(attributes.get("aggregate_function", 1))]
    if attributes.get("post_transform", 0) != 0:
        # ONNX Runtime numbers the transforms otherwise than the standard does.
        raise Unsupported("TreeEnsemble with a post-transform")
    forest = trees.forest_of_ensemble(attributes)
    targets = int(attributes.get("n_targets", 1))
    return _scores(call, forest, targets, aggregate, call.dtype(0))


def tree_ensemble_classifier(call: Call) -> tuple[Value, ...]:
    """The class with the largest sum of weights, and the scores of all classes."""
    attributes = _attributes(call)
    labels = class_labels(call, "classlabels_int64s")
    forest = trees.forest_of(attributes, "class")
    transform = attributes.get("post_transform", "NONE")
    dtype = _work_type(call)
    if len(labels) == 2 and len(set(forest.targets)) == 1:
        return _binary_trees(call, forest, attributes, labels)
    scores = _with_base(call, _scores(call, forest, len(labels), "SUM", dtype), attributes)
    scores = cast(call, scores, "float32")
    return label_of(call, best_class(call, scores), labels), transformed(call, scores, transform)


def _binary_trees(
    call: Call, forest: trees.Forest, attributes: Mapping[str, Any], labels: np.ndarray[Any, Any]
) -> tuple[Value, ...]:
    """One score for two classes; with weights that are all positive it is a probability."""
    base = attributes.get("base_values")
    if base and (len(base) != 1 or forest.targets[0] != 0):
        raise Unsupported("base values of both classes with weights for one")
    transform, positive = attributes.get("post_transform", "NONE"), min(forest.weights) >= 0
    scores = _scores(call, forest, 2, "SUM", _work_type(call))
    column = forest.targets[0]
    score = call.emit(relax.op.strided_slice(scores, [1], [column], [column + 1]))
    score = cast(call, _with_base(call, score, attributes), "float32")
    winner = label_of(call, _above(call, score, 0.5 if positive else 0.0), labels)
    if column == 0:
        return winner, _two_classes(call, score, transform, not positive)
    return winner, transformed(call, cast(call, scores, "float32"), transform)


_CONVERTERS = {
    "ArrayFeatureExtractor": array_feature_extractor,
    "Binarizer": binarizer,
    "FeatureVectorizer": feature_vectorizer,
    "LabelEncoder": label_encoder,
    "LinearClassifier": linear_classifier,
    "LinearRegressor": linear_regressor,
    "Normalizer": normalizer,
    "Scaler": scaler,
    "TreeEnsemble": tree_ensemble,
    "TreeEnsembleClassifier": tree_ensemble_classifier,
    "TreeEnsembleRegressor": tree_ensemble_regressor,
}

OPERATORS: tuple[Operator, ...] = tuple(
    Operator(name, convert, domain=DOMAIN) for name, convert in _CONVERTERS.items()
)
