"""Arrays from files and to files, and made-up ones; for the command line and for checks."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np

from hybridc.bundle.dtypes import NARROW, carried, dtype_named, restored
from hybridc.bundle.files import replacing
from hybridc.bundle.manifest import STRING, TensorSpec
from hybridc.bundle.tensors import Array
from hybridc.errors import UsageError

if TYPE_CHECKING:
    from hybridc.runtime.loader import Model


WORDS = ("", "a", "the", "dog", "Zürich", "zwölf", "0", "two words")
"""What strings are made up of."""

MADE_UP_CODES = {
    "float4_e2m1fn": (0, 15),
    "float6_e2m3fn": (0, 63),
    "float6_e3m2fn": (0, 63),
    "float8_e4m3fn": (0x20, 0x48),
    "float8_e4m3fnuz": (0x28, 0x50),
    "float8_e5m2": (0x30, 0x44),
    "float8_e5m2fnuz": (0x34, 0x48),
    "float8_e8m0fnu": (124, 130),
}
"""Bit patterns that narrow floats are made up of: any of a format below a byte, and of the others
positive numbers from 1/8 to 4 or 8. Narrow integers are zeros and ones.
"""


def make_inputs(
    specs: Sequence[TensorSpec], sizes: Mapping[str, int], seed: int
) -> dict[str, Array]:
    """Seeded inputs: normal floats; zeros and ones for integers, which index anything; words.

    Args:
        specs: The model's inputs.
        sizes: A value for each dynamic dimension.
        seed: Same seed, same arrays, whatever the version of numpy.
    """
    random = np.random.RandomState(seed)
    inputs = {}
    for spec in specs:
        shape = tuple(dim if isinstance(dim, int) else sizes[dim] for dim in spec.shape)
        if spec.dtype == STRING:
            inputs[spec.name] = np.asarray(random.choice(WORDS, shape)).astype(object)
            continue
        if spec.dtype in NARROW:
            low, high = MADE_UP_CODES.get(spec.dtype, (0, 1))
            codes = random.randint(low, high + 1, shape)
            inputs[spec.name] = restored(np.asarray(codes, NARROW[spec.dtype].dtype), spec.dtype)
            continue
        dtype = dtype_named(spec.dtype)
        integer = dtype.kind in "biu"
        numbers = random.randint(0, 2, shape) if integer else random.standard_normal(shape)
        inputs[spec.name] = np.asarray(numbers).astype(dtype)
    return inputs


def random_inputs(model: Model, seed: int) -> dict[str, Array]:
    """Inputs for a loaded model, dynamic dimensions at their lowest value."""
    sizes = {name: low for name, (low, _) in model.manifest.dimensions.items()}
    return make_inputs(model.inputs, sizes, seed)


def read_arrays(path: Path, specs: Sequence[TensorSpec]) -> dict[str, Array]:
    """Inputs out of an ``.npz`` file, or of an ``.npy`` file for a model with one input.

    Raises:
        UsageError: The file cannot be read, or holds object arrays.
    """
    try:
        loaded = np.load(path, allow_pickle=False)
        if not isinstance(loaded, np.ndarray):
            with loaded:
                return {name: loaded[name] for name in loaded.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UsageError(f"{path} cannot be read as npy or npz: {error}") from error
    if len(specs) != 1:
        names = ", ".join(spec.name for spec in specs)
        raise UsageError(f"{path} holds one array and the model takes {names}; give an npz")
    return {specs[0].name: loaded}


def write_arrays(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write outputs to an ``.npz`` file, or the only one to an ``.npy`` file.

    Numbers of a narrow type, which these files do not know, are written as their carriers.

    Raises:
        UsageError: The file cannot be written, or an ``.npy`` is to hold several arrays.
    """
    if path.suffix == ".npy" and len(arrays) != 1:
        raise UsageError(f"{path} can hold one array and there are {len(arrays)}; write an npz")
    try:
        with replacing(path) as temporary, open(temporary, "wb") as file:
            if path.suffix == ".npy":
                np.save(file, carried(next(iter(arrays.values()))))
            else:
                _write_npz(file, arrays)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error


def _write_npz(file: IO[bytes], arrays: Mapping[str, Array]) -> None:
    """Like ``np.savez``, which cannot take an array that is called as one of its parameters."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, carried(array), allow_pickle=False)
