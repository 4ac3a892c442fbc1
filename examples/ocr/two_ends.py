"""Reads a photographed receipt with detection here and recognition on a server.

Compiles both models and the step between them to one chain, unless it is there. The picture is
private: only crops of lines, which the step gives, may reach the server, and the compile holds to
that. Without --server, recognition runs here, too. Exits with 1 where less than 99 % of the
characters are right.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image

import models
from between import WIDTH, lines_of
from detection import prepare_picture
from hybridc.runtime.chain import Chain, load_chain
from main import ACCURACY_LIMIT, DETECTION_SIZE, HERE, ROOT, accuracy, read_characters
from recognition import HEIGHT, decode


def compile_chain(cache: Path, output: Path) -> Path:
    """Return the chain of both models, compiled if it is not there; RuntimeError on failure."""
    if (output / "chain").exists():
        return output / "chain"
    output.mkdir(parents=True, exist_ok=True)
    for name, member in (("det", models.DETECTION), ("rec", models.RECOGNITION)):
        shutil.copy(models.fetch_model(member, cache), output / f"{name}.onnx")
    height, width = DETECTION_SIZE
    command = [sys.executable, "-m", "hybridc", "compile", "det.onnx", "rec.onnx", "-o", "chain"]
    command += ["--step", "rec=between:crops", "--remote", "server=llvm"]
    command += ["--link", "server=100mbit,5ms", "--private", "det_x", "--release", "rec_x"]
    command += ["--shape", f"det_x=1x3x{height}x{width}"]
    command += ["--shape", f"rec_x=1x3x{HEIGHT}x{WIDTH}"]
    if subprocess.run(command, cwd=output, check=False).returncode:
        raise RuntimeError("hybridc could not compile the models")
    return output / "chain"


def read_lines(chain: Chain, picture: Image.Image, characters: list[str]) -> list[str]:
    """Return the text of each line of a picture, from top to bottom."""
    tensor, _ = prepare_picture(picture, *DETECTION_SIZE)
    given = {"det_x": tensor, "picture": np.asarray(picture)}
    known = {**given, **chain.run(given)}
    name = chain.stages[1].model.outputs[0].name
    pieces = iter([decode(own, characters)[0] for own in known[name]])
    lines = [" ".join(filter(str.strip, (next(pieces) for _ in row))) for row in lines_of(known)]
    return [line for line in lines if line]


def main() -> int:
    """Compile, read, compare, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", metavar="HOST:PORT", help="where Triton serves the repository")
    parser.add_argument("--output", type=Path, default=ROOT / "demo-output" / "two-ends")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "ocr")
    options = parser.parse_args()
    path = compile_chain(options.cache, options.output)
    characters = read_characters(options.output / "rec.onnx")
    with load_chain(path, remote=options.server) as chain:
        lines = read_lines(chain, Image.open(HERE / "page.jpg").convert("RGB"), characters)
        status = getattr(chain.stages[1].model, "status", None)
    print("\n".join(lines))
    share = accuracy(lines, (HERE / "page.txt").read_text().splitlines())
    print(f"{share:.2%} of the characters are right")
    if status is not None:
        print(f"recognition ran by plan: {dict(status.runs)}")
    return 0 if share >= ACCURACY_LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
