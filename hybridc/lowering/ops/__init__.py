"""The operator table: every ONNX operator that hybridc lowers, one file per family.

To add an operator, write a small function in the family's file and a row in its ``OPERATORS``.
A row with a higher ``since`` takes over from that opset version on.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field

from hybridc.lowering.call import Converter, Operator


@dataclass(frozen=True)
class OperatorTable:
    """Converters by domain, operator and opset."""

    rows: tuple[Operator, ...]
    _index: dict[tuple[str, str], list[Operator]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for row in sorted(self.rows, key=lambda row: row.since):
            self._index.setdefault((row.domain, row.name), []).append(row)

    def lowers(self, domain: str, name: str, opset: int) -> bool:
        """Whether an operator has a converter at an opset version."""
        return self.find(domain, name, opset) is not None

    def find(self, domain: str, name: str, opset: int) -> Converter | None:
        """The converter for an operator at an opset version, or ``None``."""
        rows = self._index.get((domain, name), [])
        fitting = [row for row in rows if row.since <= opset]
        return fitting[-1].convert if fitting else None


FAMILIES = (
    "control",
    "convolution",
    "data_dependent",
    "elementwise",
    "linear",
    "microsoft",
    "ml",
    "movement",
    "ngrams",
    "normalization",
    "pooling",
    "quantization",
    "random",
    "recent",
    "recurrent",
    "reduction",
    "sequence",
    "signal",
    "svm",
    "training",
    "vision",
)
"""Modules of this package that hold a family's ``OPERATORS``; imported when a table is made."""


def default_table() -> OperatorTable:
    """The table of all operators that hybridc knows."""
    modules = (importlib.import_module(f"{__name__}.{family}") for family in FAMILIES)
    return OperatorTable(tuple(row for module in modules for row in module.OPERATORS))
