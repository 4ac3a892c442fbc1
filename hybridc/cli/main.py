"""The ``hybridc`` command: finds the verb, and turns errors into a sentence and an exit code."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from types import FrameType

import click

from hybridc import __version__
from hybridc.errors import HybridcError, InternalError

VERBS = {
    "calibrate": "Measure what kernels and copies cost on a machine.",
    "compare": "Run two models on the same inputs and show how their results differ.",
    "compile": "Compile an ONNX model to a bundle.",
    "doctor": "Show what this machine can build for and run on.",
    "explain": "Say why each node of a plan or bundle is where it is.",
    "inspect": "Show what a model or a bundle holds.",
    "plan": "Place a model on devices by cost, without compiling it.",
    "profile": "Show when each part and kernel of a bundle is at work.",
    "run": "Run a bundle on inputs from a file, or on random ones.",
    "verify": "Check a bundle's files and its results on the stored samples.",
}
"""Verbs with their one line in ``hybridc --help``, so that help imports none of them."""

_EXTRA_OF = dict.fromkeys(
    "tvm onnx onnx_ir onnxruntime onnxsim highspy networkx ml_dtypes google".split(), "compiler"
)
"""Which extra brings a package that is missing."""


class _Verbs(click.Group):
    """A group whose commands live in ``hybridc.cli.<verb>`` and are imported on use."""

    def list_commands(self, _context: click.Context) -> list[str]:
        return sorted(VERBS)

    def get_command(self, _context: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        module = importlib.import_module(f"hybridc.cli.{name}")
        command: click.Command = module.command
        return command

    def format_commands(self, _context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(VERBS.items()))


@click.command(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hybridc")
def cli() -> None:
    """Compile ONNX models ahead of time to bundles that a tiny loader runs.

    \b
    Exit codes:
      0 done                      5 a budget missed
      1 a fault of hybridc        6 bundle damaged or not trusted
      2 wrong usage               7 device or driver missing
      3 model not supported       8 remote end missing
      4 accuracy missed
    """


def commands() -> dict[tuple[str, ...], click.Command]:
    """Every command by its words: verbs, and what stands behind those that have several."""
    found: dict[tuple[str, ...], click.Command] = {}
    context = click.Context(cli)
    for verb in VERBS:
        command = cli.get_command(context, verb)
        if isinstance(command, click.Group):
            found.update({(verb, name): one for name, one in command.commands.items()})
        elif command is not None:
            found[verb,] = command
    return found


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and leave with its exit code."""
    try:
        _run(arguments)
    except click.exceptions.Exit as leaving:
        sys.exit(leaving.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        _fail("interrupted; nothing was left behind", 130)
    except BrokenPipeError:
        sys.stdout = None  # type: ignore[assignment]
        sys.exit(141)
    except ModuleNotFoundError as error:
        extra = _EXTRA_OF.get((error.name or "").partition(".")[0])
        if extra is None:
            _fail_internally(error)
        _fail(f"this needs the {extra}; run: pip install 'hybridc[{extra}]'", 2)
    except InternalError as error:
        _fail_internally(error)
    except HybridcError as error:
        _fail(str(error), error.exit_code)
    except Exception as error:
        _fail_internally(error)


def _run(arguments: list[str] | None) -> None:
    interrupts = _catch_interrupts()
    try:
        cli.main(arguments, standalone_mode=False, obj=interrupts)
    except Exception as error:
        if interrupts:  # native code turns an interrupt that passes through it into another error
            raise KeyboardInterrupt from error
        raise


def _fail(message: str, code: int) -> None:
    click.echo(f"error: {message}", err=True)
    sys.exit(code)


def _fail_internally(error: BaseException) -> None:
    if os.environ.get("HYBRIDC_DEBUG"):
        raise error
    _fail(
        f"{type(error).__name__}: {error}\nThis is a fault of hybridc. Set HYBRIDC_DEBUG=1 for the "
        "traceback, and report it with the model if you can.",
        1,
    )


def _catch_interrupts() -> list[int]:
    """Turn SIGTERM and Ctrl-C into an exception, so that half-written files are removed.

    Returns:
        The signals received, for where native code loses the exception; filled as they come.
    """
    received: list[int] = []

    def interrupt(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as for a job in the background
            signal.signal(number, interrupt)
    return received
