"""Run native code of others where it can break nothing: in a child process.

The child is a fork, so it starts at once and has all that the parent has. That is safe only while
the parent has no threads that hold locks, which holds for the command line and not for a program
that uses hybridc as a library.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable

_ENDING = (
    signal.SIGABRT, signal.SIGALRM, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGINT,
    signal.SIGSEGV,
)  # fmt: skip
"""Signals that end the child, whatever a library has set the parent to do with them."""


class ChildError(RuntimeError):
    """The child process did not give a result; the message says why."""


def in_child(function: Callable[[], bytes], seconds: int) -> bytes:
    """What ``function`` gives, computed in a child process.

    Raises:
        ChildError: It raised, was ended by a signal, or took longer than ``seconds``.
    """
    with tempfile.TemporaryFile() as file:
        child = os.fork()
        if child == 0:
            _run_and_exit(function, file.fileno(), seconds)
        _, status = os.waitpid(child, 0)
        file.seek(0)
        data = file.read()
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        what = f"took over {seconds} s" if number == signal.SIGALRM else f"ended by signal {number}"
        raise ChildError(what)
    if os.WEXITSTATUS(status):
        raise ChildError(data.decode(errors="replace"))
    return data


def _run_and_exit(function: Callable[[], bytes], descriptor: int, seconds: int) -> None:
    """The child's life: the result or the error's text into the file, and out."""
    code = 1
    try:
        try:
            for number in _ENDING:
                signal.signal(number, signal.SIG_DFL)
            signal.alarm(seconds)
            result = function()
            code = 0
        except BaseException as error:  # told to the parent, whatever it is
            result = f"{type(error).__name__}: {error}".encode()
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(result)
    except BaseException:  # nowhere to write: the code alone says that there is no result
        code = 1
    finally:
        os._exit(code)  # the child must never go on with the parent's work
