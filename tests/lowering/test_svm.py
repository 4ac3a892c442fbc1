"""Support vector machines against ONNX Runtime."""

import pytest
from harness import floats, lower_model
from test_ml import check, model_of

from hybridc.errors import UnsupportedError


def machine(kernel, **more):
    return {
        "kernel_type": kernel,
        "kernel_params": [0.4, 0.3, 2.0],
        "coefficients": floats(3, seed=1).tolist(),
        "support_vectors": floats(12, seed=2).tolist(),
        "n_supports": 3,
        "rho": [0.7],
    } | more


@pytest.mark.parametrize("kernel", ["LINEAR", "POLY", "RBF", "SIGMOID"])
@pytest.mark.parametrize("one_class", [0, 1])
def test_regressor(kernel, one_class):
    check("SVMRegressor", [floats(5, 4)], machine(kernel, one_class=one_class))


def test_an_odd_power_of_a_negative_number():
    check("SVMRegressor", [floats(5, 4)], machine("POLY", kernel_params=[1.0, -3.0, 3.0]))


def test_a_linear_model():
    attributes = {"coefficients": floats(4, seed=1).tolist(), "rho": [0.2]}
    unused = {"kernel_params": [0.0, 0.0, 0.0]}  # ONNX Runtime insists on them
    check("SVMRegressor", [floats(5, 4)], attributes | unused)


@pytest.mark.parametrize("change", [{"post_transform": "LOGISTIC"}, {"n_supports": 0}])
def test_what_is_refused(change):
    with pytest.raises(UnsupportedError, match="SVMRegressor"):
        lower_model(model_of("SVMRegressor", [floats(5, 4)], machine("RBF", **change)))
