"""Magika on files of this machine: does it still name the same type?

Files are those of Python and of installed packages whose extension tells their type. Every second
one of a type is for calibration.
"""

from __future__ import annotations

import json
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from task import Array, Case, Feeds, Figure, Task

from models import archive_member

ARCHIVE = "magika-1.0.3-py3-none-manylinux_2_28_x86_64.whl"
SETTINGS = "magika/models/standard_v3_3/config.min.json"
HALF, BLOCK, PADDING = 1024, 4096, 256
EACH = 120
TYPES = {
    ".py": "python", ".pyc": "pythonbytecode", ".so": "elf", ".json": "json", ".c": "c",
    ".cpp": "cpp", ".cc": "cpp", ".js": "javascript", ".css": "css", ".html": "html",
    ".png": "png", ".ttf": "ttf", ".svg": "svg", ".xml": "xml", ".yaml": "yaml", ".md": "markdown",
    ".rst": "rst", ".sh": "shell", ".gz": "gzip", ".npz": "npz", ".npy": "npy", ".whl": "zip",
    ".csv": "csv", ".toml": "toml", ".pdf": "pdf", ".txt": "txt", ".onnx": "onnx", ".ini": "ini",
    ".cmake": "cmake", ".f90": "fortran", ".ts": "typescript", ".jpg": "jpeg", ".gif": "gif",
}  # fmt: skip


def calibration(count: int) -> Iterator[Feeds]:
    """Every second file of a type."""
    return (case.feeds for case in _cases(_files()[1::2], count))


def cases(count: int) -> Iterator[Case]:
    """The other files."""
    return _cases(_files()[0::2], count)


def judge(held: Sequence[Case], old: Sequence[Array], new: Sequence[Array]) -> list[Figure]:
    """Share of files that are of the same type as before, and that are of the right one."""
    labels = json.loads(archive_member(ARCHIVE, SETTINGS))["target_labels_space"]
    before, after = ([labels[int(np.argmax(o))] for o in outputs] for outputs in (old, new))
    truths = [case.truth for case in held]
    agree, right_before, right_after = (
        100 * float(np.mean([a == b for a, b in zip(left, right, strict=True)]))
        for left, right in ((before, after), (truths, before), (truths, after))
    )
    return [
        Figure("type as before, %", agree, 99),
        Figure("right type before, %", right_before),
        Figure("right type after, %", right_after),
    ]


@cache
def _files() -> list[Path]:
    """Files of known types, some of each, in an order that mixes the types."""
    folders = dict.fromkeys(
        Path(path).resolve()
        for path in (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))
    )
    by_type: dict[str, list[Path]] = {}
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            own = by_type.setdefault(path.suffix, []) if path.suffix in TYPES else None
            if own is not None and len(own) < 8 * EACH and path.is_file():
                own.append(path)
    chosen = []
    for own in by_type.values():
        order = np.random.default_rng(0).permutation(len(own))[:EACH]
        chosen += [own[index] for index in order if own[index].stat().st_size >= 64]
    order = np.random.default_rng(0).permutation(len(chosen))
    return [chosen[index] for index in order]


def _cases(paths: Sequence[Path], count: int) -> Iterator[Case]:
    for path in paths[:count]:
        yield Case({"bytes": _features(path)}, TYPES[path.suffix])


def _features(path: Path) -> Array:
    """The first and the last bytes without white space, as magika takes them."""
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(BLOCK).lstrip()[:HALF]
        file.seek(max(0, size - BLOCK))
        last = file.read(BLOCK).rstrip()[-HALF:]
    result = np.full((1, 2 * HALF), PADDING, np.int32)
    result[0, : len(first)] = list(first)
    result[0, 2 * HALF - len(last) :] = list(last)
    return result


TASK = Task("magika-model", ("bytes=1x2048",), calibration, cases, judge, 600)

if __name__ == "__main__":
    print(len(_files()), "files on", sys.platform)
