"""Arrays from files and to files, and made-up ones; for the command line and for checks."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np

from hybridc.bundle.dtypes import dtype_named
from hybridc.bundle.manifest import STRING, TensorSpec
from hybridc.bundle.tensors import Array
from hybridc.errors import UsageError

if TYPE_CHECKING:
    from hybridc.runtime.loader import Model


WORDS = ("", "a", "the", "dog", "Zürich", "zwölf", "0", "two words")
"""What strings are made up of."""


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

    Raises:
        UsageError: The file cannot be written, or an ``.npy`` is to hold several arrays.
    """
    if path.suffix == ".npy" and len(arrays) != 1:
        raise UsageError(f"{path} can hold one array and there are {len(arrays)}; write an npz")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            if path.suffix == ".npy":
                np.save(file, next(iter(arrays.values())))
            else:
                _write_npz(file, arrays)
        os.replace(temporary, path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _write_npz(file: IO[bytes], arrays: Mapping[str, Array]) -> None:
    """Like ``np.savez``, which cannot take an array that is called as one of its parameters."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
