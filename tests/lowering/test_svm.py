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


@pytest.mark.parametrize("one_class", [0, 1])
def test_a_vector_is_one_row(one_class):
    check("SVMRegressor", [floats(4)], machine("RBF", one_class=one_class))


@pytest.mark.parametrize("change", [{"post_transform": "LOGISTIC"}, {"n_supports": 0}])
def test_what_is_refused(change):
    with pytest.raises(UnsupportedError, match="SVMRegressor"):
        lower_model(model_of("SVMRegressor", [floats(5, 4)], machine("RBF", **change)))


def classifier(classes, kernel="RBF", counts=None, probabilities=False, **more):
    counts = counts or [3] * classes
    pairs, vectors = classes * (classes - 1) // 2, sum(counts)
    attributes = {
        "kernel_type": kernel,
        "kernel_params": [0.4, 0.3, 2.0],
        "coefficients": floats((classes - 1) * vectors, seed=1).tolist(),
        "support_vectors": floats(vectors * 4, seed=2).tolist(),
        "vectors_per_class": counts,
        "rho": floats(pairs, seed=3).tolist(),
        "classlabels_ints": [7 * label % 10 for label in range(classes)],
    }
    if probabilities:
        attributes["prob_a"] = (floats(pairs, seed=4) - 2).tolist()
        attributes["prob_b"] = floats(pairs, seed=5).tolist()
    return attributes | more


@pytest.mark.parametrize("kernel", ["LINEAR", "POLY", "RBF", "SIGMOID"])
@pytest.mark.parametrize("probabilities", [False, True])
def test_classifier(kernel, probabilities):
    attributes = classifier(3, kernel, [2, 6, 4], probabilities)
    check("SVMClassifier", [floats(9, 4)], attributes, 2, symbolic=probabilities)


@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize("probabilities", [False, True])
def test_numbers_of_classes(classes, probabilities):
    attributes = classifier(classes, probabilities=probabilities)
    check("SVMClassifier", [floats(40, 4)], attributes, 2)


@pytest.mark.parametrize("transform", ["LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO", "PROBIT"])
def test_post_transforms(transform):
    attributes = classifier(4, probabilities=True, post_transform=transform)
    check("SVMClassifier", [floats(9, 4)], attributes, 2)


def test_two_classes_with_a_logistic_function():
    check("SVMClassifier", [floats(9, 4)], classifier(2, post_transform="LOGISTIC"), 2)


@pytest.mark.parametrize("dtype", ["float64", "int32", "int64"])
def test_types(dtype):
    check("SVMClassifier", [(floats(9, 4) * 2).astype(dtype)], classifier(3), 2)


def test_kernels_that_are_zero_or_infinite():
    """What is infinite for the vectors of one class says nothing about the other classes."""
    attributes = classifier(3, "POLY", kernel_params=[1e9, 0.0, 5.0])
    vectors = floats(9, 4, seed=2)
    vectors[3:] = 0
    attributes["support_vectors"] = vectors.ravel().tolist()
    check("SVMClassifier", [floats(9, 4)], attributes, 2)


def linear(classes, **more):
    attributes = classifier(classes, "LINEAR", **more)
    del attributes["support_vectors"], attributes["vectors_per_class"]
    return attributes | {"coefficients": floats(classes * 4, seed=1).tolist()}


@pytest.mark.parametrize("transform", ["NONE", "LOGISTIC", "SOFTMAX"])
def test_classifier_without_support_vectors(transform):
    check("SVMClassifier", [floats(9, 4)], linear(3, post_transform=transform), 2)
    check("SVMClassifier", [floats(9, 4)], linear(2, probabilities=True), 2)


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        (classifier(2, classlabels_strings=["a", "b"]), "strings"),
        (classifier(2, post_transform="SOFTMAX"), "a single pair"),
        (classifier(3, "OTHER"), "the kernel OTHER"),
        (linear(2), "two classes without support vectors"),
        (classifier(3, rho=[0.5]), "too few coefficients or rho"),
        (classifier(3, prob_a=[0.5]), "too few prob_a or prob_b"),
        (classifier(3, support_vectors=[1.0] * 27), "the number of features"),
    ],
)
def test_classifiers_that_are_refused(attributes, reason):
    with pytest.raises(UnsupportedError, match=reason):
        lower_model(model_of("SVMClassifier", [floats(5, 4)], attributes, 2))
