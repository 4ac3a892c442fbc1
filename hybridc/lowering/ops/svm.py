"""Support vector machines of ai.onnx.ml: the sum of ``coefficient[i] K(x, support[i])``, and rho.

LINEAR    x . s
POLY      (gamma (x . s) + coef0) ** degree
RBF       exp(-gamma |x - s| ** 2)
SIGMOID   tanh(gamma (x . s) + coef0)
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import relax

from hybridc.lowering.call import Call, Operator, Unsupported
from hybridc.lowering.ops.common import cast, derived_constant
from hybridc.lowering.ops.ml import DOMAIN
from hybridc.lowering.value import Expression

Array = np.ndarray[Any, Any]


def svm_regressor(call: Call) -> Expression:
    """One number for each row of a matrix, as float32; of one class, whether it is above zero."""
    if call.rank(0) != 2 or call.attribute("post_transform", "NONE") != "NONE":
        raise Unsupported("SVMRegressor on other than a matrix, or with a post-transform")
    data = cast(call, call.tensor(0), "float32")
    count = call.attribute("n_supports", 0)
    if count:
        supports = _numbers(call, "support_vectors").reshape(count, -1)
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


def _kernel(call: Call, data: Expression, supports: Array) -> Expression:
    """The kernel of each row with each support vector."""
    kind = call.attribute("kernel_type", "LINEAR")
    parameters = call.attribute("kernel_params") or [0.0, 0.0, 0.0]
    gamma, offset, degree = map(_scalar, parameters)
    if kind == "RBF":
        places = call.materialize(derived_constant(call, "supports", supports))
        apart = call.emit(relax.op.subtract(call.emit(relax.op.expand_dims(data, 1)), places))
        far = call.emit(relax.op.sum(call.emit(relax.op.multiply(apart, apart)), axis=2))
        negative = call.emit(relax.op.negative(call.emit(relax.op.multiply(far, gamma))))
        return call.emit(relax.op.exp(negative))
    columns = call.materialize(derived_constant(call, "supports", supports.T.copy()))
    products = call.emit(relax.op.matmul(data, columns))
    if kind == "LINEAR":
        return products
    scaled = call.emit(relax.op.add(call.emit(relax.op.multiply(products, gamma)), offset))
    if kind == "POLY":
        return call.emit(relax.op.power(scaled, degree))
    if kind == "SIGMOID":
        return call.emit(relax.op.tanh(scaled))
    raise Unsupported(f"SVMRegressor with the kernel {kind}")


def _numbers(call: Call, name: str) -> Array:
    return np.array(call.attribute(name) or [], np.float32)


def _scalar(number: float) -> Expression:
    return relax.const(np.float32(number), "float32")


OPERATORS: tuple[Operator, ...] = (Operator("SVMRegressor", svm_regressor, domain=DOMAIN),)
