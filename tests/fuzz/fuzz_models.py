"""Fuzz the compiler with atheris: ``make fuzz SECONDS=3600``.

The fuzzer's bytes choose a model and what is damaged in it (see mutate.py), or damage the file's
bytes. Whatever comes out, only a ``UserError`` may be raised, and no call may take longer than
libFuzzer's ``-timeout`` or more memory than its ``-rss_limit_mb``.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

from tests.fuzz.mutate import mutate, seeds

with atheris.instrument_imports(include=["hybridc"]):
    from tests.fuzz.contract import try_file, try_model

MODELS = seeds()


class Bytes:
    """Choices out of a fuzzer's bytes; when they run out, the first choice is taken."""

    def __init__(self, data: bytes) -> None:
        self._provider = atheris.FuzzedDataProvider(data)

    def below(self, count: int) -> int:
        return int(self._provider.ConsumeIntInRange(0, count - 1)) if count > 1 else 0

    def blob(self, count: int) -> bytes:
        return bytes(self._provider.ConsumeBytes(count))


def check(data: bytes) -> None:
    """One input of the fuzzer."""
    choices = Bytes(data)
    model = MODELS[choices.below(len(MODELS))]
    if choices.below(8):
        try_model(mutate(model, choices, 1 + choices.below(6)))
        return
    content = bytearray(model.SerializeToString())
    for _ in range(1 + choices.below(4)):
        content[choices.below(len(content))] = choices.below(256)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        path.write_bytes(content)
        try_file(path)


if __name__ == "__main__":
    atheris.Setup(sys.argv, check)
    atheris.Fuzz()
