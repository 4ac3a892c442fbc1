"""PP-OCR's detector between two hosts: the picture is private, its feature maps are released.

    python -m tests.remote.picture [--megabits 100]

The head runs on a Triton server, and everything before it on the other host, which has the loader
alone and one core. All frames between them are captured. Prints how many bytes crossed, and
looks in them for runs of 64 bytes of the picture and of each tensor before the released one. Those
tensors are computed by ONNX Runtime and by hybridc without fusion, and numbers count as found if
their upper 24 bits are there in a row: what is rounded otherwise is found too. The exit code is the
number of tensors that were found. Wants Linux, root and ``make triton``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

import hybridc
from tests.models import save
from tests.remote.test_wire import RUN
from tests.remote.two_hosts import run_captured
from tests.support import hybridc as run_hybridc
from tools.models import model_feeds, model_path

NAME = "rapidocr-ch-PP-OCRv4-det-infer"
SHAPE = (1, 3, 320, 320)

Arrays = Mapping[str, np.ndarray[Any, Any]]


def released_node(graph: onnx.GraphProto) -> onnx.NodeProto:
    """What joins the feature maps: all of the head depends on it alone."""
    return [node for node in graph.node if node.op_type == "Concat"][-1]


def tensors_up_to_release(
    model: onnx.ModelProto, folder: Path, feeds: Arrays
) -> dict[str, list[bytes]]:
    """The tensors up to the released one, each as ONNX Runtime and as hybridc compute it."""
    prefix = onnx.shape_inference.infer_shapes(model)
    end = list(prefix.graph.node).index(released_node(prefix.graph)) + 1
    del prefix.graph.node[end:], prefix.graph.output[:]
    known = {value.name: value for value in prefix.graph.value_info}
    made = [known[o] for node in prefix.graph.node for o in node.output if o in known]
    floats = [v for v in made if v.type.tensor_type.elem_type == onnx.TensorProto.FLOAT]
    prefix.graph.output.extend(floats)
    path = save(prefix, folder / "prefix.onnx")
    names = [value.name for value in floats]
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    found = dict(zip(names, session.run(names, dict(feeds)), strict=True))
    place = ("-o", folder / "prefix.hyb", "--shape", f"x={'x'.join(map(str, SHAPE))}")
    assert run_hybridc("compile", path, *place, "--no-verify").code == 0
    with hybridc.load(folder / "prefix.hyb") as compiled:
        own = compiled.run(dict(feeds))
    return {name: [found[name].tobytes(), own[name].tobytes()] for name in names}


def upper(data: bytes, start: int = 0) -> bytes:
    """The upper 24 bits of each four bytes."""
    words = np.frombuffer(data, "<u4", (len(data) - start) // 4, start)
    return (words & 0xFFFFFF00).astype("<u4").tobytes()


class Captured:
    """Bytes in which blocks are looked up, by the words of 8 bytes at every place."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        places = [np.frombuffer(data, "<u8", (len(data) - start) // 8, start) for start in range(8)]
        self._words = np.unique(np.concatenate(places))

    def leaks(self, secret: bytes, known: bytes) -> bool:
        """As :func:`tests.remote.test_wire.leaks`, for much."""
        blocks = np.frombuffer(secret, f"V{RUN // 2}", len(secret) // (RUN // 2))
        words = blocks.view("<u8").reshape(-1, RUN // 16)
        places = np.searchsorted(self._words, words).clip(max=len(self._words) - 1)
        is_there = (self._words[places] == words).all(axis=1)
        seen = {block.tobytes() for block in blocks[is_there]}
        return any(block in self._data and block not in known for block in seen)


def find(
    secrets: Mapping[str, Sequence[bytes]], known: Sequence[bytes], captured: bytes
) -> list[str]:
    """Tensors of which runs were captured that are no part of what is known, as zeros are."""
    whole = b"".join(known)
    exact = Captured(captured)
    rough = Captured(b"".join(upper(captured, start) for start in range(4)))
    return [
        name
        for name, versions in secrets.items()
        if any(exact.leaks(d, whole) or rough.leaks(upper(d), upper(whole)) for d in versions)
    ]


def main() -> int:
    """Compile, run, look."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabits", type=float, default=100.0)
    megabits = parser.parse_args().megabits
    path, feeds = model_path(NAME), model_feeds(NAME, shapes={"x": list(SHAPE)})
    model = onnx.load(path)
    released = released_node(model.graph).output[0]
    shape = ("--shape", f"x={'x'.join(map(str, SHAPE))}")
    remote = ("--remote", "server=llvm", "--link", f"server={megabits}mbit,1ms", "--no-verify")
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        place = ("-o", folder / "edge.hyb", "--repository", folder / "repository")
        head = next(node.name for node in model.graph.node if released in node.input)
        options = (*shape, *remote, *place, "--pin", f"{head}=server", "--private", "x")
        refused = run_hybridc("compile", path, *options)
        print(f"without a release, exit code {refused.code}: {refused.complaint[-1]}")
        done = run_hybridc("compile", path, *options, "--release", released)
        if done.code:
            sys.exit(done.stderr)
        np.savez(folder / "x.npz", **feeds)
        sent, said = run_captured(
            folder, folder / "edge.hyb", folder / "repository", megabits, repeat=3
        )
        secrets = {"x": [feeds["x"].tobytes()], **tensors_up_to_release(model, folder, feeds)}
    captured = b"\0\0\0\0".join(sent)
    print(f"captured {len(captured)} bytes in {len(sent)} streams; {said['remote']['runs']}")
    known = [*secrets.pop(released), bytes(RUN)]  # looks at the link send zeros
    found = find(secrets, known, captured)
    print(f"{len(secrets)} tensors before {released}; found: {', '.join(found) or 'none'}")
    print(f"the released one: {'found' if find({released: known}, [], captured) else 'NOT FOUND'}")
    return len(found)


if __name__ == "__main__":
    sys.exit(main())
