"""What several tests share: the command line in this process, and compiling in this process."""

from __future__ import annotations

import io
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import pytest
from hybridc.targets.llvm.object_cache import default_folder
from hybridc.targets.registry import parse_targets

from hybridc.cli.main import main
from hybridc.compiler import Options, Report, compile_model
from hybridc.frontend.shapes import parse_shapes
from hybridc.placement.rules import RuleTexts, parse_rules
from tests.models import save

_PROGRESS = re.compile(r"\[\d/\d\] ")


@dataclass(frozen=True)
class Outcome:
    """What a command left: its exit code and what it printed."""

    code: int
    stdout: str
    stderr: str

    @property
    def complaint(self) -> list[str]:
        """Lines on standard error but for progress."""
        return [line for line in self.stderr.splitlines() if not _PROGRESS.match(line)]


def hybridc(*arguments: str | Path) -> Outcome:
    """Run the command line in this process."""
    stdout, stderr = io.StringIO(), io.StringIO()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with redirect_stdout(stdout), redirect_stderr(stderr):
            main([str(argument) for argument in arguments])
        code: Any = 0
    except SystemExit as leaving:
        code = leaving.code or 0
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return Outcome(code, stdout.getvalue(), stderr.getvalue())


def assert_refused(outcome: Outcome, code: int, *words: str) -> None:
    """The command failed with one sentence that holds all the words."""
    assert outcome.code == code, outcome
    assert outcome.stdout == ""
    assert len(outcome.complaint) == 1, outcome.stderr
    sentence = outcome.complaint[0]
    assert sentence.startswith("error: ")
    assert "Traceback" not in sentence
    for word in words:
        assert word in sentence


def assert_compile_refused(
    model: Path, folder: Path, code: int, *words: str, options: tuple[str, ...] = ()
) -> None:
    """A compile fails with one sentence and leaves nothing in the output folder."""
    output = folder / "output"
    output.mkdir()
    assert_refused(hybridc("compile", model, "-o", output / "bundle", *options), code, *words)
    assert list(output.iterdir()) == []


def make_options(
    targets: tuple[str, ...] = ("llvm",),
    shapes: tuple[str, ...] = (),
    pins: tuple[str, ...] = (),
    **options: Any,
) -> Options:
    """Options as the command line makes them; without the check in a second process by default."""
    devices = parse_targets(targets)
    return Options(
        devices=devices,
        shapes=parse_shapes(shapes),
        rules=parse_rules(RuleTexts(pin=pins), [device.name for device in devices]),
        **{"verify": False, "cache": default_folder(), **options},
    )


def compile_to(output: Path, model: onnx.ModelProto | Path, **options: Any) -> Report:
    """Compile in this process; see :func:`make_options`."""
    if isinstance(model, onnx.ModelProto):
        model = save(model, output.with_name(f"{output.name}.onnx"))
    return compile_model(model, output, make_options(**options))


@contextmanager
def changed_byte(path: Path, offset: int, mask: int = 0x01) -> Iterator[None]:
    """Flip bits of one byte of a file, and put it right afterwards."""
    with open(path, "r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ mask]))
        file.flush()
        try:
            yield
        finally:
            file.seek(offset)
            file.write(bytes([byte]))


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Same names, types and shapes, and values within ``tolerance`` of the largest magnitude."""
    from hybridc.runtime.samples import relative_error

    assert actual.keys() == expected.keys()
    for name in expected:
        assert relative_error(actual[name], expected[name]) == pytest.approx(0, abs=tolerance)
