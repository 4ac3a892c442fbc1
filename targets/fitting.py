"""Attempts that may not fit, such as a rule on a function that it is not for.

Rules refuse by :class:`Misfit`, and TVM's schedule primitives by errors of their own, where they
would change a result. A TypeError is neither but a fault of a rule. It must not stop a compile,
whose kernels are right without the rule, nor go unseen: it becomes a warning, which fails a test.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

Made = TypeVar("Made")


class Misfit(Exception):
    """A rule's refusal: the function is not of its kind after all."""


class RuleFault(RuntimeWarning):
    """A rule of hybridc failed where it should have made a kernel, or refused to."""


def if_it_fits(attempt: Callable[[], Made]) -> Made | None:
    """What an attempt makes; ``None`` if it does not fit.

    Warns:
        RuleFault: The attempt failed in a way that is no refusal.
    """
    try:
        return attempt()
    except (Misfit, RuntimeError, ValueError, ArithmeticError):
        return None
    except TypeError as error:
        message = f"a rule of hybridc failed, so a kernel may be slow; please report it: {error!r}"
        warnings.warn(message, RuleFault, stacklevel=2)
        return None
