"""Errors that hybridc raises, with the exit code that the command line gives for each.

Two families. :class:`UserError` is about what the user handed in or the machine it runs on: its
message says what is wrong, where, and what to do. :class:`InternalError` is a fault of hybridc.
"""

from __future__ import annotations

from typing import ClassVar


class HybridcError(Exception):
    """Base of everything that hybridc raises on purpose."""

    exit_code: ClassVar[int] = 1


class InternalError(HybridcError):
    """A fault of hybridc itself: an invariant that did not hold."""


class PartError(InternalError):
    """A part failed while it ran; the message names it and its device."""


class UserError(HybridcError):
    """Something the user can mend: the message says how."""

    exit_code: ClassVar[int] = 2


class UsageError(UserError):
    """Options or arguments that do not fit, at the command line or at a call."""


class ModelError(UserError):
    """A model that cannot be read or is not valid ONNX."""

    exit_code: ClassVar[int] = 3


class UnsupportedError(ModelError):
    """A valid model that no chosen target can compile.

    Attributes:
        reasons: One ``(node, operator, reason)`` per node that stands in the way.
    """

    def __init__(self, message: str, reasons: tuple[tuple[str, str, str], ...] = ()) -> None:
        lines = [f"  {name} ({operator}): {reason}" for name, operator, reason in reasons]
        super().__init__("\n".join([message, *lines]))
        self.reasons = reasons


class AccuracyError(UserError):
    """A bundle whose results differ from the reference by more than was allowed."""

    exit_code: ClassVar[int] = 4


class BudgetError(UserError):
    """A limit on time, memory or size that was not kept."""

    exit_code: ClassVar[int] = 5


class BundleError(UserError):
    """A bundle that is damaged, not trusted, or of a schema that this version cannot read."""

    exit_code: ClassVar[int] = 6


class DeviceError(UserError):
    """A device, driver, CPU feature or runtime library that the bundle needs is not here."""

    exit_code: ClassVar[int] = 7


class RemoteMissing(UserError):
    """The other end of a hybrid bundle cannot be reached, refuses, or is of another build."""

    exit_code: ClassVar[int] = 8
