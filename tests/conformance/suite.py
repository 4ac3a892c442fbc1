"""ONNX's own back-end tests as cases: a model, inputs, and right outputs.

Run as ``python -m tests.conformance.suite`` to try all of them and rewrite the lists of expected
failures, the second of those among the first that fail with the fallback to ONNX Runtime too; look
at the difference before it is committed.
"""

from __future__ import annotations

import json
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.backend.test.loader import load_model_tests

from tests.conformance.disputed import DISPUTED, dispute

KINDS = ("node", "simple", "pytorch-converted", "pytorch-operator")
EXPECTED_FAILURES = Path(__file__).with_name("expected_failures.json")
FAILURES_WITH_FALLBACK = Path(__file__).with_name("expected_failures_with_fallback.json")

OTHER_GENERATOR = frozenset(
    """test_bernoulli test_bernoulli_double test_bernoulli_seed test_bernoulli_expanded
    test_bernoulli_double_expanded test_bernoulli_seed_expanded test_training_dropout
    test_training_dropout_default test_training_dropout_mask
    test_training_dropout_default_mask""".split()
)
"""Tests whose numbers come out of another generator than ours; only shapes and types count."""


@dataclass(frozen=True)
class Case:
    """One test of the suite.

    Attributes:
        name: Its name.
        model: The model.
        data: Inputs with the outputs that they must give; several sets are all to be right.
        rtol: Tolerance relative to the right value.
        atol: Absolute tolerance.
    """

    name: str
    model: onnx.ModelProto
    data: tuple[tuple[list[Any], list[Any]], ...]
    rtol: float
    atol: float


@cache
def cases() -> dict[str, Case]:
    """All tests by name."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind in KINDS:
            for test in load_model_tests(kind=kind):
                found[test.name] = _case(test)
    return found


def _case(test: Any) -> Case:
    if test.model_dir is None:
        data = tuple((_plain(ins), _plain(outs)) for ins, outs in test.data_sets)
        return Case(test.name, test.model, data, test.rtol, test.atol)
    folder = Path(test.model_dir)
    model = onnx.load(folder / "model.onnx")
    data = tuple(_read_set(place, model) for place in sorted(folder.glob("test_data_set_*")))
    return Case(test.name, model, data, test.rtol, test.atol)


def _plain(values: list[Any]) -> list[Any]:
    return [_array(value) if isinstance(value, onnx.TensorProto) else value for value in values]


def _array(tensor: onnx.TensorProto) -> np.ndarray:
    return numpy_helper.to_array(tensor)


def _read_set(folder: Path, model: onnx.ModelProto) -> tuple[list[Any], list[Any]]:
    read = []
    for prefix in ("input", "output"):
        count = len(list(folder.glob(f"{prefix}_*.pb")))
        files = [folder / f"{prefix}_{index}.pb" for index in range(count)]
        read.append([_array(onnx.load_tensor(str(file))) for file in files])
    return read[0], read[1]


def run(case: Case, fallback: bool = False, target: str = "llvm:host") -> str | None:
    """What is wrong with hybridc's result; ``None`` if it is right, and raises what it raises."""
    from hybridc import onnx_backend

    compiled = onnx_backend.prepare(case.model, target=target, fallback=fallback)
    for inputs, outputs in case.data:
        results = compiled.run(inputs)
        for index, (actual, expected) in enumerate(zip(results, outputs, strict=True)):
            fault = difference(actual, expected, case)
            if fault:
                return f"output {index}: {fault}"
    return None


def is_nearer(case: Case, target: str = "llvm:host") -> bool:
    """Whether hybridc's result of a disputed test is nearer to the exact one than the expected is.

    Values count that differ from the expected ones by more than the test allows; none may be
    further off than the expected values are.
    """
    from hybridc import onnx_backend

    ((inputs, (expected,)),) = case.data
    name = case.name.removesuffix("_expanded")
    _, exactly = DISPUTED[name]
    exact = exactly(cases()[name].model.graph.node[0], inputs)
    (ours,) = onnx_backend.prepare(case.model, target=target, fallback=False).run(inputs)
    ours, expected = (np.asarray(x).astype(np.float64) for x in (ours, expected))
    off, allowed = np.abs(ours - exact), np.abs(expected - exact)
    differs = ~np.isclose(ours, expected, rtol=case.rtol, atol=case.atol)
    nearer = bool(differs.any()) and off[differs].mean() < allowed[differs].mean()
    return nearer and bool((off <= allowed.max() + 1e-6 + 1e-7 * np.abs(exact)).all())


def difference(actual: Any, expected: Any, case: Case) -> str | None:
    """How a result differs from the right one by more than the test allows."""
    if isinstance(expected, list):
        if not isinstance(actual, list) or len(actual) != len(expected):
            return f"{actual} for a sequence of {len(expected)}"
        pairs = zip(actual, expected, strict=True)
        return next((fault for a, e in pairs if (fault := difference(a, e, case))), None)
    if actual is None or expected is None:
        return None if actual is expected else f"{actual} for {expected}"
    return _array_difference(np.asarray(actual), np.asarray(expected), case)


def _array_difference(actual: np.ndarray, expected: np.ndarray, case: Case) -> str | None:
    if actual.shape != expected.shape:
        return f"shape {actual.shape} for {expected.shape}"
    if expected.dtype.kind in "OUS":
        return None if (actual.astype(str) == expected.astype(str)).all() else "other strings"
    if actual.dtype != expected.dtype:
        return f"{actual.dtype} for {expected.dtype}"
    if case.name in OTHER_GENERATOR:
        return None
    if actual.dtype.kind not in "biufc":  # the types of ml_dtypes
        actual, expected = actual.astype(np.float32), expected.astype(np.float32)
    if np.allclose(actual, expected, rtol=case.rtol, atol=case.atol, equal_nan=True):
        return None
    return f"off by {np.abs(actual.astype(np.float64) - expected.astype(np.float64)).max():.3g}"


def expected_failures(fallback: bool = False) -> dict[str, str]:
    """Reasons by name, for the tests that fail today. The lists may only shrink."""
    return json.loads((FAILURES_WITH_FALLBACK if fallback else EXPECTED_FAILURES).read_text())


def _fault(name: str, fallback: bool) -> tuple[str, str | None]:
    try:
        fault = run(cases()[name], fallback)
    except Exception as error:
        lines = str(error).strip().splitlines()
        return name, (lines[-1].strip() if lines else type(error).__name__)[:200]
    found = dispute(name)
    return name, fault and (found[0] if found else f"WRONG: {fault}")


def _main() -> None:
    names = sorted(cases())
    with ProcessPoolExecutor() as pool:
        for path, fallback in ((EXPECTED_FAILURES, False), (FAILURES_WITH_FALLBACK, True)):
            faults = pool.map(_fault, names, [fallback] * len(names), chunksize=8)
            failures = {name: fault for name, fault in faults if fault}
            path.write_text(json.dumps(failures, indent=1, ensure_ascii=False) + "\n")
            print(f"{len(failures)} of {len(names)} fail: {path.name}", file=sys.stderr)
            names = sorted(failures)


if __name__ == "__main__":
    _main()
