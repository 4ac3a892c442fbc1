"""Cases of a benchmark of plans in processes of their own, which prepare side by side.

First a process for each case measures its groups, and one machine's file takes all of that. Then
one for each case, or for each share of a case's plans, judges plans by that file. See turns.py for
who measures when.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turns import run_all

ONLY_COSTS = "--only-costs"
SHARE = "--share"
RESULTS = "results"
"""Field of an output with the rows of a case."""


@dataclass(frozen=True)
class Spread:
    """How a script is run for some of its cases.

    Attributes:
        script: Its path.
        words: Its command line, without what says which cases, and where costs and results are.
        jobs: Most processes at a time.
    """

    script: str
    words: tuple[str, ...]
    jobs: int

    @classmethod
    def of(cls, script: str, arguments: Sequence[str] | None) -> Spread:
        """By the command line of the script for all cases; without one, that of this process."""
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        for name in ("--model", "--batch", "--costs", "--output", "--budget"):
            parser.add_argument(name)
        parser.add_argument(ONLY_COSTS, action="store_true")
        parser.add_argument("--jobs", type=int, default=1)
        own, words = parser.parse_known_args(arguments)
        return cls(script, tuple(words), own.jobs)

    def command(self, name: str, batch: int, *more: str) -> list[str]:
        """The command line for a case."""
        which = ("--model", name, "--batch", str(batch))
        return [sys.executable, self.script, *self.words, *which, *more]

    def costs(self, cases: Sequence[tuple[str, int]], known: Path) -> Iterator[dict[str, Any]]:
        """Machine's files with the costs of cases, one for each.

        Args:
            cases: Each a name and a batch.
            known: The machine's file, to which each case adds by itself.
        """
        yield from self._written(self._commands(cases, ONLY_COSTS, "--costs"), known.read_text())

    def _commands(self, cases: Sequence[tuple[str, int]], *more: str) -> dict[str, list[str]]:
        """A command line for each case, by its name."""
        return {f"{n}, batch {batch}": self.command(n, batch, *more) for n, batch in cases}

    def judge(
        self, cases: Sequence[tuple[str, int]], costs: Path, seconds: float, shares: int = 1
    ) -> Iterator[list[dict[str, Any]]]:
        """Results of cases by one machine's file, or of each share of a case.

        Args:
            cases: Each a name and a batch.
            costs: The machine's file.
            seconds: Time for a share; see ``--budget``.
            shares: Processes that share out the plans of a case, told which by ``--share``.
        """
        more = ("--costs", str(costs), "--budget", str(seconds), "--output")
        commands = {
            f"{name}, {share}": words
            for share in range(shares)
            for name, words in self._commands(
                cases, *((SHARE, str(share)) if shares > 1 else ()), *more
            ).items()
        }
        for found in self._written(commands):
            yield found[RESULTS]

    def _written(
        self, commands: Mapping[str, Sequence[str]], before: str = ""
    ) -> Iterator[dict[str, Any]]:
        """What commands write as JSON to a file that each gets as its last word.

        Args:
            commands: Each by the name of its case.
            before: What is in the files at first, if anything.
        """
        with tempfile.TemporaryDirectory(prefix="hybridc-") as place:
            files = {name: Path(place) / f"{name}.json" for name in commands}
            for file in files.values() if before else ():
                file.write_text(before)
            complete = ((name, [*words, str(files[name])]) for name, words in commands.items())
            for name, ended in run_all(complete, self.jobs):
                if ended.code:
                    print("\n".join((f"{name} failed:", *ended.lines[-9:])), file=sys.stderr)
                if files[name].exists():
                    yield json.loads(files[name].read_text())
