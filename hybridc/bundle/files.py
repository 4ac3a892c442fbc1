"""Files that are there as a whole or not at all."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hybridc.errors import UsageError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside ``path`` to write to: it takes that place in the end, and is gone on failure.

    What is no regular file, such as a pipe, is written to as it is.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str, what: str) -> None:
    """Write a file that an option names.

    Raises:
        UsageError: It cannot be written; the message says what it was to hold.
    """
    try:
        with replacing(path) as beside:
            beside.write_text(text, "utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {what}: {error}") from error
