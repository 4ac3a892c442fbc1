"""A compile in another precision: prepare, quantize, compile, check the budget, publish.

    read -> passes -> quantize -> compile_model -> compare with the original on held-out samples

The quantized model is an ONNX model, which goes the way of any other; the check at the end of its
compile compares the bundle with ONNX Runtime on that model. What quantization cost is measured
against the original. The bundle gets its name only when both were passed.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import onnx_ir as ir

from hybridc.bundle.files import replacing
from hybridc.bundle.manifest import TensorSpec
from hybridc.bundle.storage import staging_folder
from hybridc.bundle.tensors import Array
from hybridc.bundle.write import check_destination, publish, storage_error
from hybridc.compiler import DEFAULT_TOLERANCE, Options, Report, compile_model, plan_model
from hybridc.errors import AccuracyError, UsageError
from hybridc.frontend.bind import bind_inputs
from hybridc.frontend.read import read_model
from hybridc.frontend.shapes import Range, specialize
from hybridc.lowering.ops import default_table
from hybridc.packed_code import keeping
from hybridc.passes.pipeline import run_passes
from hybridc.passes.raise_opset import ensure_opset
from hybridc.precision.budget import Budget, Outputs, relative_error
from hybridc.precision.costs import PrecisionCost, predict, weight_bytes
from hybridc.precision.curve import auto_notes, check_suffix, write_curve
from hybridc.precision.gains import multiplies_int16, no_faster
from hybridc.precision.half import BFLOAT16, FLOAT16, convert_floats
from hybridc.precision.placed import place_precisions
from hybridc.precision.qdq import can_be_wide
from hybridc.precision.quantize import (
    AUTO,
    BF16,
    DEFAULT_METHOD,
    DYNAMIC,
    FP16,
    INT4_WEIGHTS,
    INT8_WEIGHTS,
    STATIC,
    Calibration,
    quantize_dynamic,
    quantize_static,
)
from hybridc.precision.samples import FEW, Samples, load_samples, specs_of
from hybridc.precision.search import Found, afford_halves, search
from hybridc.precision.static import Calibrated, calibrate_model
from hybridc.precision.weights import quantize_tables, quantize_weights
from hybridc.progress import Progress
from hybridc.reference import open_session
from hybridc.runtime.arrays import make_inputs, write_arrays
from hybridc.runtime.loader import load

OPSET = 17
"""Opset that a model is raised to, if it can be, before it is quantized."""

SPREAD, LEAST_TOLERANCE, BFLOAT16_TOLERANCE = 3, 0.02, 0.1
"""Error allowed between the bundle and ONNX Runtime on the quantized model: a multiple of what
ONNX Runtime's own results differ by; see :func:`_steadiest`. Where a number lies between two steps,
any two of them may round differently, and the difference grows on its way: one symbol of a line of
text may come out as another one, which says nothing about the kernels. bfloat16 has eight bits, and
ONNX Runtime's results are rounded at casts only."""

_HALVES = {FP16: FLOAT16, BF16: BFLOAT16}

CANDIDATES, SHAKES, SHAKE = 4, 4, 1e-5
"""Samples that a bundle may be checked on, how often the inputs of each are shaken, and by
how much: less would often be rounded away at once."""


@dataclass(frozen=True)
class Wanted:
    """A precision and what it may cost.

    Attributes:
        precision: A precision other than fp32.
        data: Where samples are: a folder or ``module:function``.
        method: How ranges are found.
        budget: The bound to keep.
        keep: Where the quantized ONNX model is to be written, too.
        trade_off: Where the curve of ``auto`` is to be written, as ``.json``, ``.md`` or ``.svg``.
    """

    precision: str
    data: str | None = None
    method: str = DEFAULT_METHOD
    budget: Budget | None = None
    keep: Path | None = None
    trade_off: Path | None = None


@dataclass(frozen=True)
class Prepared:
    """A model that is ready to be quantized.

    Attributes:
        model: Simplified, with the shapes asked for.
        dims: Range of each dimension that stays dynamic.
        bound: Values of inputs that were bound.
        inputs: Its inputs.
        notes: Passes that were left out.
    """

    model: onnx.ModelProto
    dims: Mapping[str, Range]
    bound: Mapping[str, Array]
    inputs: tuple[TensorSpec, ...]
    notes: tuple[str, ...]


def compile_in_precision(
    model: Path,
    output: Path,
    options: Options,
    progress: Progress,
    wanted: Wanted,
) -> Report:
    """Compile an ONNX file to a bundle in another precision.

    Raises:
        AccuracyError: The budget is not kept; nothing is written.
        UserError: Something else that the user can mend.
    """
    check_destination(output)
    _check_wanted(wanted)
    progress(f"[1/6] reading {model}")
    prepared = prepare(model, options)
    samples = _samples(wanted, prepared, progress)
    progress(f"[1/6] quantizing to {wanted.precision}")
    quantized, notes, found = _quantized(prepared, samples, wanted, options)
    try:
        with staging_folder(output) as staging, TemporaryDirectory(prefix="hybridc-") as folder:
            source = Path(folder) / model.name
            onnx.save(quantized, source)
            least = BFLOAT16_TOLERANCE if wanted.precision == BF16 else LEAST_TOLERANCE
            inner = _inner(options, prepared, samples, quantized, Path(folder), least)
            report = compile_model(source, staging / "bundle", inner, _without_reading(progress))
            if wanted.budget is not None and samples is not None:
                notes.append(_keep_budget(model, staging / "bundle", prepared, samples, wanted))
            if wanted.keep is not None:
                with replacing(wanted.keep) as beside:
                    onnx.save(quantized, beside)
            if wanted.trade_off is not None and found is not None:
                write_curve(found, wanted.trade_off)
            publish(staging / "bundle", output, keeping(options.cache))
    except OSError as error:
        raise storage_error(error, output) from error
    return dataclasses.replace(
        report, output=output, notes=(*notes, *prepared.notes, *report.notes)
    )


def _without_reading(progress: Progress) -> Progress:
    """Progress without the line about the quantized model's file, which is gone afterwards."""
    return lambda line: None if line.startswith("[1/6]") else progress(line)


def _check_wanted(wanted: Wanted) -> None:
    if wanted.data is None and wanted.precision in (STATIC, AUTO):
        raise UsageError(
            f"--precision {wanted.precision} needs samples to find ranges with: give "
            "--calibration, or use int8-dynamic or int8-weights"
        )
    if wanted.budget is None and wanted.precision == AUTO:
        raise UsageError(
            "--precision auto needs a bound to keep: give --accuracy-budget, such as cosine=0.999"
        )
    if wanted.trade_off is not None:
        if wanted.precision != AUTO:
            raise UsageError("--trade-off is for --precision auto, which finds a curve")
        check_suffix(wanted.trade_off)
    if wanted.data is None and wanted.budget is not None:
        raise UsageError("--accuracy-budget needs samples to be checked on: give --calibration")


def prepare(path: Path, options: Options) -> Prepared:
    """Read a model, set its shapes, and simplify it."""
    model = read_model(path).model
    bound = bind_inputs(model, options.bindings)
    dims = specialize(model, options.shapes)
    model, notes = run_passes(model, default_table().lowers, options.isolate)
    ensure_opset(model, OPSET)
    inputs = specs_of(model)
    proto = ir.to_proto(model)
    proto.ir_version = max(proto.ir_version, 8)
    return Prepared(proto, dims, bound, inputs, tuple(notes))


def _samples(wanted: Wanted, prepared: Prepared, progress: Progress) -> Samples | None:
    if wanted.data is None:
        return None
    progress(f"[1/6] reading samples from {wanted.data}")
    samples = load_samples(wanted.data, prepared.inputs, prepared.dims)
    if wanted.budget is not None and samples.count < 2:
        raise UsageError(
            f"{wanted.data} holds one sample; a budget is checked on samples that were not used "
            "for calibration, so give at least two"
        )
    return samples


def _quantized(
    prepared: Prepared, samples: Samples | None, wanted: Wanted, options: Options
) -> tuple[onnx.ModelProto, list[str], Found | None]:
    """The model in the precision, notes about it, and what a search found."""
    if wanted.precision in _HALVES:
        return convert_floats(prepared.model, _HALVES[wanted.precision]), [], None
    if wanted.precision == DYNAMIC:
        return quantize_tables(quantize_dynamic(prepared.model)), [], None
    if wanted.precision in (INT8_WEIGHTS, INT4_WEIGHTS):
        bits = 8 if wanted.precision == INT8_WEIGHTS else 4
        return quantize_weights(prepared.model, bits), [], None
    assert samples is not None
    used = samples if wanted.budget is None else samples.part(held_out=False)
    few = f"fewer than {FEW} samples may miss the range of values that occur"
    notes = [few] if used.count < FEW else []
    slow = no_faster(prepared.model, options.devices)
    if wanted.precision == AUTO:
        model, found = _searched(prepared, used, wanted, options, slow)
        return model, [*auto_notes(found), *_slow_notes(slow), *notes], found
    quantized = quantize_static(prepared.model, Calibration(used, wanted.method), slow)
    head = (
        f"{quantized.count} convolutions and matrix products are in int8; ranges by "
        f"{wanted.method} over {used.count} samples"
    )
    kept = [
        f"{name} stays fp32: in int8 it alone would make the cosine {1 - error:.4f}"
        for name, error in quantized.kept.items()
    ]
    notes = [head, *kept, *_slow_notes(quantized.slow), *notes]
    return quantize_tables(quantized.model), notes, None


def _slow_notes(slow: Sequence[str]) -> list[str]:
    if not slow:
        return []
    return [
        f"{', '.join(slow)} stay fp32: depthwise, which this target computes no faster on 8-bit "
        "integers"
    ]


def _searched(
    prepared: Prepared,
    samples: Samples,
    wanted: Wanted,
    options: Options,
    slow: Sequence[str],
) -> tuple[onnx.ModelProto, Found]:
    """The model with the layers in integers that a search under the budget chose."""
    assert wanted.budget is not None
    calibrated = calibrate_model(prepared.model, samples, wanted.method)
    fast = tuple(name for name in calibrated.anchors if name not in slow)
    calibrated = dataclasses.replace(calibrated, anchors=fast)  # rounding the others costs budget
    calibrated = afford_halves(calibrated, samples, wanted.budget)
    found = search(calibrated, samples, wanted.budget, _cost(prepared, calibrated, options))
    if not found.chosen:
        return prepared.model, found
    return calibrated.quantized(found.names, wide=found.wide), found


def _cost(prepared: Prepared, calibrated: Calibrated, options: Options) -> PrecisionCost:
    """What the layers cost: placed by cost if there are several devices to choose from."""
    layers = calibrated.anchors
    if len(options.devices) > 1:
        with TemporaryDirectory(prefix="hybridc-") as folder:
            path = Path(folder) / "model.onnx"
            onnx.save(prepared.model, path)
            _, placed, _, _ = plan_model(read_model(path), _for_prepared(options, prepared))
        costs = placed.decision.costs
        if costs is not None:
            devices = {device.name: device for device in options.devices}
            known = (devices.get(name) for name in costs.hardware.names)
            slow = [no_faster(prepared.model, (one,)) if one else () for one in known]
            return place_precisions(
                costs, layers, slow, weight_bytes(ir.from_proto(prepared.model).graph)
            )
    has_wide = multiplies_int16(options.devices) and can_be_wide(prepared.model)
    return predict(prepared.model, layers, options.devices[0], options.hardware, has_wide)


def _for_prepared(options: Options, prepared: Prepared) -> Options:
    """Options for a model whose shapes and bindings are set already."""
    sizes = {name: (size,) for name, size in prepared.dims.items()}
    return dataclasses.replace(options, shapes=sizes, bindings={})


def _inner(
    options: Options,
    prepared: Prepared,
    samples: Samples | None,
    quantized: onnx.ModelProto,
    folder: Path,
    least: float,
) -> Options:
    """Options for the quantized model, whose shapes and bindings are set already.

    It is checked on a real sample if there are some: the one whose outputs noise changes least.
    ``least`` is the least tolerance of that check.
    """
    sizes = {name: size.low for name, size in prepared.dims.items()}
    some: Sequence[Mapping[str, Array]] = [make_inputs(prepared.inputs, sizes, 0)]
    if samples is not None:
        some = deque(samples, CANDIDATES)
    files, tolerance, chosen = options.samples, options.tolerance, some[-1]
    if tolerance == DEFAULT_TOLERANCE and options.verify:
        chosen, spread = _steadiest(quantized.SerializeToString(), some)
        tolerance = max(least, SPREAD * spread)
    if not files:
        files = (folder / "sample.npz",)
        write_arrays(files[0], chosen)
    return dataclasses.replace(_for_prepared(options, prepared), samples=files, tolerance=tolerance)


def _steadiest(
    model: bytes, samples: Iterable[Mapping[str, Array]]
) -> tuple[Mapping[str, Array], float]:
    """The sample whose outputs change least where nothing should change them, and by how much.

    ONNX Runtime runs the model as it is, with its own optimizations, and on inputs that are off by
    little.
    """
    plain, optimized = (open_session(model, optimize=optimize) for optimize in (False, True))
    generator = np.random.default_rng(0)

    def spread(sample: Mapping[str, Array]) -> float:
        expected = plain(sample)
        others = [plain(_shaken(sample, generator)) for _ in range(SHAKES)]
        return max(relative_error(expected, other) for other in (optimized(sample), *others))

    return min(((sample, spread(sample)) for sample in samples), key=lambda found: found[1])


def _shaken(sample: Mapping[str, Array], generator: np.random.Generator) -> Mapping[str, Array]:
    """Inputs whose floats are off by little."""
    return {
        name: (array * (1 + SHAKE * generator.standard_normal(array.shape))).astype(array.dtype)
        if array.dtype.kind == "f"
        else array
        for name, array in sample.items()
    }


def _keep_budget(
    model: Path, bundle: Path, prepared: Prepared, samples: Samples, wanted: Wanted
) -> str:
    """Measure the bundle against the original on held-out samples; a line about it.

    Raises:
        AccuracyError: The budget is not kept.
    """
    budget, held = wanted.budget, samples.part(held_out=True)
    assert budget is not None
    compiled = load(bundle)
    try:
        value = budget.of(_pairs(model, prepared.bound, held, compiled.run))
    finally:
        compiled.close()
    line = f"{budget.metric} is {value:.6g} on {held.count} samples that were held out"
    if not budget.is_kept(value):
        raise AccuracyError(f"{line}, and {budget} was asked for; no bundle was written")
    return f"{line}; {budget} is kept"


def _pairs(
    model: Path,
    bound: Mapping[str, Array],
    samples: Samples,
    run: Callable[[Mapping[str, Array]], Outputs],
) -> Iterator[tuple[Outputs, Outputs]]:
    """The original's outputs and others, for each sample."""
    original = open_session(model)
    for sample in samples:
        yield original({**sample, **bound}), run(sample)
