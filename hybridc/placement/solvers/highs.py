"""HiGHS, quietly: a mixed-integer program as it grows, and a run of it.

Two rules keep HiGHS from losing an optimum or running for ever, which tests/placement/solvers show:
a column occurs in a row once, and every column has finite bounds. Where one has none, HiGHS may cut
off the optimum (its issue 3273).
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hybridc.errors import InternalError

if TYPE_CHECKING:
    import highspy


@dataclass
class Program:
    """A linear program, to be minimized; rows and columns are numbered as they come."""

    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    cost: list[float] = field(default_factory=list)
    rows: list[tuple[float, float]] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    columns: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def variable(self, high: float = 1.0, whole: bool = False) -> int:
        """A new variable between 0 and a finite bound; returns its number."""
        if not math.isfinite(high):
            raise ValueError("a variable needs a bound")
        self.lower.append(0.0)
        self.upper.append(high)
        self.whole.append(whole)
        self.cost.append(0.0)
        return len(self.cost) - 1

    def row(self, terms: Iterable[tuple[int, float]], low: float, high: float) -> None:
        """Require a sum to be within bounds; a variable may be named more than once."""
        factors: dict[int, float] = {}
        for column, value in terms:
            factors[column] = factors.get(column, 0.0) + value
        kept = {column: factor for column, factor in factors.items() if factor}
        self.columns += kept
        self.values += kept.values()
        self.starts.append(len(self.columns))
        self.rows.append((low, high))


def run(
    program: Program, seconds: float, gap: float, start: Mapping[int, float] | None = None
) -> highspy.Highs:
    """Minimize a program.

    Args:
        program: The program.
        seconds: Time to search.
        gap: Relative gap at which a solution counts as proven.
        start: Values of some variables to begin with.

    Returns:
        HiGHS with what it found.

    Raises:
        InternalError: HiGHS refuses the program.
    """
    import highspy  # here, since most compiles have nothing to solve

    with _silence():
        highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("threads", 1)  # more would make the result depend on the machine
    highs.setOptionValue("presolve", "off")
    highs.setOptionValue("time_limit", float(seconds))
    highs.setOptionValue("mip_rel_gap", gap)
    highs.setOptionValue("mip_feasibility_tolerance", 1e-9)
    if highs.passModel(_as_highs(program)) != highspy.HighsStatus.kOk:
        raise InternalError("HiGHS refuses the program that stands for the placement")
    if start is not None:
        values = np.array(list(start.values()), np.float64)
        highs.setSolution(len(start), np.array(list(start), np.int32), values)
    highs.run()
    return highs


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Without standard output, on which HiGHS 1.16 says its name before it can be told not to."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 1)
        yield
        _flush_native()
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _flush_native() -> None:
    """Write out what libraries in C have in their buffer."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # as on Windows
        library: Any = ctypes.CDLL(None)
        library.fflush(None)


def _as_highs(program: Program) -> highspy.HighsLp:
    import highspy

    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(program.cost), len(program.rows)
    lp.col_cost_ = np.array(program.cost)
    lp.col_lower_, lp.col_upper_ = np.array(program.lower), np.array(program.upper)
    lp.row_lower_ = np.array([low for low, _ in program.rows])
    lp.row_upper_ = np.array([high for _, high in program.rows])
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.num_col_, lp.a_matrix_.num_row_ = lp.num_col_, lp.num_row_
    lp.a_matrix_.start_ = np.array(program.starts)
    lp.a_matrix_.index_ = np.array(program.columns)
    lp.a_matrix_.value_ = np.array(program.values)
    kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
    lp.integrality_ = [kinds[whole] for whole in program.whole]
    return lp
