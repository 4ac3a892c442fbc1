"""Build the bundles that a machine with a GPU checks: ``python -m tests.gpu.bundles FOLDER``.

Runs where the compiler is and needs no GPU. Each bundle carries sample inputs with reference
outputs, so that nothing but the loader is needed where it is checked.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from pathlib import Path

import onnx
from hybridc.targets.registry import parse_targets

from hybridc.compiler import Options, compile_model
from tests.gpu.models import SMALL, coarse_light_model

LIGHT = ("squeezenet", "resnet50")


def build(name: str, folder: Path, target: str) -> None:
    """Compile one model into ``folder``."""
    model = SMALL[name]() if name in SMALL else coarse_light_model(name)
    path = folder / f"{name}.onnx"
    onnx.save(model, path)
    options = Options(devices=parse_targets([target]), tolerance=1e-3)
    try:
        compile_model(path, folder / name, options)
    finally:
        path.unlink()


def link_equal_files(folder: Path) -> None:
    """Make files of equal contents one file, such as the runtime, which every bundle has."""
    first: dict[str, Path] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        original = first.setdefault(digest, path)
        if original is not path:
            path.unlink()
            path.hardlink_to(original)


def main() -> int:
    """Compile all models, or those named; returns how many could not be compiled."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", default=[*SMALL, *LIGHT])
    parser.add_argument("--target", default="cuda:sm_80,sm_90")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in arguments.names:
        start = time.perf_counter()
        try:
            build(name, arguments.folder, arguments.target)
            outcome = "built"
        except Exception as error:
            failed += 1
            outcome = f"FAILED: {type(error).__name__} {str(error)[-300:]}"
        print(f"{name:28} {time.perf_counter() - start:6.1f} s  {outcome}", flush=True)
    link_equal_files(arguments.folder)
    return failed


if __name__ == "__main__":
    sys.exit(main())
