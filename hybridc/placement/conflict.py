"""The smallest set of rules that cannot be kept together, found by a deletion filter.

Each rule in turn is left out. If the others still contradict each other, it stays out, since it had
no part in the conflict; otherwise it belongs to it. What is left conflicts, and without any one of
it there is a placement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hybridc.placement.rules import Rule


def smallest_conflict(
    rules: Sequence[Rule], can_hold: Callable[[Sequence[Rule]], bool]
) -> list[Rule]:
    """Rules that cannot hold together, none of which can be left out.

    Args:
        rules: Rules that cannot hold together.
        can_hold: Whether some rules can; fewer rules can whenever more can.
    """
    kept = list(rules)
    for rule in rules:
        without = [other for other in kept if other is not rule]
        if not can_hold(without):
            kept = without
    return kept
