"""Support vector machines of ai.onnx.ml: sums of ``coefficient[i] K(x, support[i])``, and rho.

LINEAR    x . s
POLY      (gamma (x . s) + coef0) ** degree
RBF       exp(-gamma |x - s| ** 2)
SIGMOID   tanh(gamma (x . s) + coef0)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from tvm import relax, tirx

from hybridc.lowering.call import Call, Invalid, Operator, Unsupported, shape_of
from hybridc.lowering.ops.common import (
    Own,
    cast,
    derived_constant,
    map_elements,
    number,
    reshape,
    same_dim,
)
from hybridc.lowering.ops.loops import Array as Buffer
from hybridc.lowering.ops.loops import count, emit_program, local, repeat_while, when
from hybridc.lowering.ops.ml import DOMAIN, best_class, class_labels, label_of, transformed
from hybridc.lowering.value import Expression, Value

Array: TypeAlias = "np.ndarray[Any, Any]"


def svm_regressor(call: Call) -> Expression:
    """One number for each row of a matrix, as float32; of one class, whether it is above zero."""
    if call.attribute("post_transform", "NONE") != "NONE":
        raise Unsupported("SVMRegressor with a post-transform")  # ONNX Runtime leaves it out
    data = _matrix(call)
    vectors = call.attribute("n_supports", 0)
    if vectors:
        supports = _numbers(call, "support_vectors").reshape(vectors, -1)
        data = _kernel(call, data, supports)
    elif call.attribute("kernel_type", "LINEAR") != "LINEAR":
        raise Unsupported("SVMRegressor without support vectors and with a kernel")
    column = derived_constant(call, "coefficients", _numbers(call, "coefficients")[:, np.newaxis])
    scores = call.emit(relax.op.matmul(data, call.materialize(column)))
    scores = call.emit(relax.op.add(scores, _scalar(_numbers(call, "rho")[0])))
    if not call.attribute("one_class", 0):
        return scores
    above = call.emit(relax.op.greater(scores, _scalar(0)))
    return call.emit(relax.op.where(above, _scalar(1), _scalar(-1)))


def _matrix(call: Call) -> Expression:
    """The input as float32, a vector as one row."""
    data = cast(call, call.tensor(0), "float32")
    if call.rank(0) == 1:
        data = reshape(call, data, (1, *call.shape(0)))
    if call.rank(0) not in (1, 2):
        raise Unsupported(f"{call.node.op_type} on other than a matrix")
    return data


def _products(call: Call, data: Expression, rows: Array, name: str) -> Expression:
    """The product of each row of the input with each row of a constant."""
    if not same_dim(shape_of(data)[1], rows.shape[1]):
        raise Unsupported(f"{name} that do not fit the number of features")
    columns = derived_constant(call, name, rows.T)
    return call.emit(relax.op.matmul(data, call.materialize(columns)))


def _kernel(call: Call, data: Expression, supports: Array) -> Expression:
    """The kernel of each row with each support vector."""
    kind = call.attribute("kernel_type", "LINEAR")
    parameters = call.attribute("kernel_params") or [0.0, 0.0, 0.0]
    gamma, offset, degree = map(_scalar, parameters)
    if kind == "RBF":
        if not same_dim(shape_of(data)[1], supports.shape[1]):
            raise Unsupported("support vectors that do not fit the number of features")
        places = call.materialize(derived_constant(call, "supports", supports))
        apart = call.emit(relax.op.subtract(call.emit(relax.op.expand_dims(data, 1)), places))
        far = call.emit(relax.op.sum(call.emit(relax.op.multiply(apart, apart)), axis=2))
        negative = call.emit(relax.op.negative(call.emit(relax.op.multiply(far, gamma))))
        return call.emit(relax.op.exp(negative))
    products = _products(call, data, supports, "supports")
    if kind == "LINEAR":
        return products
    scaled = call.emit(relax.op.add(call.emit(relax.op.multiply(products, gamma)), offset))
    if kind == "POLY":
        return call.emit(relax.op.power(scaled, degree))
    if kind == "SIGMOID":
        return call.emit(relax.op.tanh(scaled))
    raise Unsupported(f"{call.node.op_type} with the kernel {kind}")


def _numbers(call: Call, name: str) -> Array:
    return np.array(call.attribute(name) or [], np.float32)


def _scalar(number: float) -> Expression:
    return relax.const(np.float32(number), "float32")


def svm_classifier(call: Call) -> tuple[Value, ...]:
    """The class of each row, int64, and float32 scores or probabilities.

    With support vectors there is one score for each pair of classes, and the class with most of the
    pairs wins; without them each class has a linear score.
    """
    if call.attribute("classlabels_strings"):
        raise Unsupported("classes named by strings")
    labels = class_labels(call, "classlabels_ints")
    transform = call.attribute("post_transform", "NONE")
    counts = call.attribute("vectors_per_class") or []
    if not sum(counts):
        return _linear_classifier(call, labels, transform)
    if len(labels) < 2 or len(counts) != len(labels):
        raise Unsupported("SVMClassifier of less than two classes, or of vectors for others")
    scores, votes = _pairs(call, counts)
    label = label_of(call, best_class(call, votes), labels)
    if call.attribute("prob_a"):
        return label, transformed(call, _probabilities(call, scores, len(labels)), transform)
    if len(labels) > 2:
        return label, transformed(call, scores, transform)
    return label, _both(call, scores, transform)


def _both(call: Call, scores: Expression, transform: str) -> Expression:
    """Scores of two classes from that of their pair, which is the second one's."""
    if transform == "LOGISTIC":
        scores = map_elements(call, tirx.sigmoid, scores, name="logistic")
        first = map_elements(call, lambda x: number(1, x) - x, scores, name="complement")
    elif transform == "NONE":
        first = map_elements(call, lambda x: -x, scores, name="negative")
    else:
        # ONNX Runtime leaves it out there, against the standard.
        raise Unsupported(f"the post-transform {transform} of a single pair of classes")
    return call.emit(relax.op.concat([first, scores], 1))


def _linear_classifier(call: Call, labels: Array, transform: str) -> tuple[Value, ...]:
    if len(labels) <= 2 and not call.attribute("prob_a"):
        # ONNX Runtime's label is then not always the one with the higher score.
        raise Unsupported("SVMClassifier of two classes without support vectors")
    data = _matrix(call)
    rows = _numbers(call, "coefficients").reshape(len(labels), -1)
    scores = _products(call, data, rows, "coefficients")
    scores = call.emit(relax.op.add(scores, _scalar(_numbers(call, "rho")[0])))
    label = label_of(call, best_class(call, scores), labels)
    return label, transformed(call, scores, transform)


def _pairs(call: Call, counts: Sequence[int]) -> tuple[Expression, Expression]:
    """A score for each pair of classes, and how many of its pairs each class wins.

    A pair's score has a coefficient for each support vector of either class. Class ``i`` keeps them
    for a pair with a later class ``j`` in row ``j - 1``, with an earlier one in row ``j``.
    """
    classes, total = len(counts), sum(counts)
    supports = _numbers(call, "support_vectors").reshape(total, -1)
    weights = _numbers(call, "coefficients")
    pairs = [(i, j) for i in range(classes) for j in range(i + 1, classes)]
    if weights.size < (classes - 1) * total or _numbers(call, "rho").size < len(pairs):
        raise Invalid("SVMClassifier with too few coefficients or rho")
    rows = weights[: (classes - 1) * total].reshape(classes - 1, total)
    tables = {
        "coefficients": rows,
        "rho": _numbers(call, "rho"),
        "starts": np.cumsum([0, *counts], dtype=np.int64),
        "pairs": np.array(pairs, np.int64),
    }
    data = _kernel(call, _matrix(call), supports)
    operands = [call.materialize(derived_constant(call, n, a)) for n, a in tables.items()]
    samples = shape_of(data)[0]
    results = [((samples, len(pairs)), "float32"), ((samples, classes), "int32")]
    scores, votes = emit_program(call, _vote, results, data, *operands, name="svm_pairs")
    return scores, votes


def _vote(
    _own: Own,
    data: Buffer,
    weights: Buffer,
    rho: Buffer,
    starts: Buffer,
    pairs: Buffer,
    scores: Buffer,
    votes: Buffer,
) -> None:
    with count(data.shape[0], parallel=True) as sample:
        total = local("float64", 0)
        with count(votes.shape[1]) as kind:
            votes[sample, kind] = 0

        def add(own: Any, row: Any) -> None:
            """The part of the support vectors of class ``own``."""
            with count(starts[own + 1] - starts[own], start=starts[own]) as place:
                part = data[sample, place] * weights[row, place]
                total[0] = total[0] + part.astype("float64")

        with count(pairs.shape[0]) as pair:
            first, second = pairs[pair, 0], pairs[pair, 1]
            total[0] = 0.0
            add(first, second - 1)
            add(second, first)
            total[0] = total[0] + rho[pair].astype("float64")
            scores[sample, pair] = total[0].astype("float32")
            winner = tirx.Select(total[0] > tirx.const(0, "float64"), first, second)
            votes[sample, winner] = votes[sample, winner] + 1


def _probabilities(call: Call, scores: Expression, classes: int) -> Expression:
    """A probability for each class, from the scores of all pairs.

    A logistic function with the pair's parameters gives the probability of the first class of a
    pair, r[i, j]. Those of all classes minimize the sum of (r[j, i] p[i] - r[i, j] p[j]) ** 2; the
    iteration (Wu, Lin and Weng, "Probability estimates for multi-class classification by pairwise
    coupling", algorithm 2) stops where ONNX Runtime's does.
    """
    pairs = classes * (classes - 1) // 2
    tables = [_numbers(call, name)[:pairs] for name in ("prob_a", "prob_b")]
    if any(table.size < pairs for table in tables):
        raise Invalid("SVMClassifier with too few prob_a or prob_b")
    slope, offset = (
        call.materialize(derived_constant(call, name, table))
        for name, table in zip(("prob_a", "prob_b"), tables, strict=True)
    )
    samples = shape_of(scores)[0]
    square, row = ((samples, classes, classes), "float32"), ((samples, classes), "float32")
    results = emit_program(
        call, _couple, [row, row, square, square], scores, slope, offset, name="svm_coupling"
    )
    return results[0]


def _couple(
    _own: Own,
    scores: Buffer,
    slope: Buffer,
    offset: Buffer,
    result: Buffer,
    product: Buffer,
    ratios: Buffer,
    matrix: Buffer,
) -> None:
    classes = int(result.shape[1])
    with count(scores.shape[0], parallel=True) as sample:
        _compare(scores, slope, offset, ratios, sample, classes)
        _quadratic_form(ratios, matrix, sample, classes)
        with count(classes) as kind:
            result[sample, kind] = np.float32(1 / classes).item()
        going, rounds = local("int32", 1), local("int32", 0)
        with repeat_while(going[0] > 0):
            error = _gradient(result, product, matrix, sample, classes)
            rounds[0] = rounds[0] + 1
            limit = tirx.const(np.float32(0.005) / np.float32(classes), "float32")
            with when(error[1] < limit):
                going[0] = 0
            with when(going[0] > 0):
                _improve(result, product, matrix, error, sample, classes)
            with when(rounds[0] >= ROUNDS):
                going[0] = 0


ROUNDS = 100
"""Most iterations of the coupling."""


def _compare(
    scores: Buffer,
    slope: Buffer,
    offset: Buffer,
    ratios: Buffer,
    sample: Any,
    classes: int,
) -> None:
    """The probabilities of the classes of each pair, away from zero and one."""
    pair = local("int64", 0)
    low, one = tirx.const(1e-7, "float32"), tirx.const(1, "float32")
    with count(classes) as first, count(classes - 1 - first, start=first + 1) as second:
        place = pair[0]
        value = scores[sample, place] * slope[place] + offset[place]
        found = one - tirx.sigmoid(value)
        ratios[sample, first, second] = tirx.min(tirx.max(found, low), one - low)
        ratios[sample, second, first] = one - ratios[sample, first, second]
        pair[0] = pair[0] + 1


def _quadratic_form(ratios: Buffer, matrix: Buffer, sample: Any, classes: int) -> None:
    with count(classes) as first:
        matrix[sample, first, first] = 0.0
        with count(classes) as second, when(tirx.NE(first, second)):
            ratio, opposite = ratios[sample, second, first], ratios[sample, first, second]
            matrix[sample, first, first] = matrix[sample, first, first] + ratio * ratio
            matrix[sample, first, second] = -ratio * opposite


def _gradient(result: Buffer, product: Buffer, matrix: Buffer, sample: Any, classes: int) -> Buffer:
    """The matrix times the probabilities; gives the value of the form, and the largest error."""
    found = local("float32", 0.0, size=2)
    with count(classes) as first:
        product[sample, first] = 0.0
        with count(classes) as second:
            part = matrix[sample, first, second] * result[sample, second]
            product[sample, first] = product[sample, first] + part
        found[0] = found[0] + result[sample, first] * product[sample, first]
    with count(classes) as first:
        found[1] = tirx.max(found[1], tirx.abs(product[sample, first] - found[0]))
    return found


def _improve(
    result: Buffer,
    product: Buffer,
    matrix: Buffer,
    found: Buffer,
    sample: Any,
    classes: int,
) -> None:
    """One step along each class in turn."""
    change = local("float32", 0.0)
    one, two = tirx.const(1, "float32"), tirx.const(2, "float32")
    with count(classes) as first:
        change[0] = (found[0] - product[sample, first]) / matrix[sample, first, first]
        step = change[0]
        result[sample, first] = result[sample, first] + step
        growth = step * (step * matrix[sample, first, first] + two * product[sample, first])
        found[0] = (found[0] + growth) / (one + step) / (one + step)
        with count(classes) as second:
            moved = product[sample, second] + step * matrix[sample, first, second]
            product[sample, second] = moved / (one + step)
            result[sample, second] = result[sample, second] / (one + step)


OPERATORS: tuple[Operator, ...] = (
    Operator("SVMClassifier", svm_classifier, domain=DOMAIN),
    Operator("SVMRegressor", svm_regressor, domain=DOMAIN),
)
