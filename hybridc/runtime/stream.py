"""A pipeline over many inputs: several calls under way, results in order.

The next input is taken only when there is room, so a slow device or a slow reader of results holds
back the source; nothing piles up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def stream(
    submit: Callable[[Item], Future[Result]], items: Iterable[Item], depth: int
) -> Iterator[Result]:
    """Results of items in their order.

    Args:
        submit: Begins the work on an item.
        items: Where items come from; at most ``depth`` are taken beyond the results given.
        depth: Most items under way.

    Raises:
        BaseException: What went wrong with an item, in the place of its result. What is under way
            is waited for, so that nothing runs on behind the caller's back.
    """
    under_way: deque[Future[Result]] = deque()
    try:
        for item in items:
            under_way.append(submit(item))
            while len(under_way) >= depth:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    finally:
        wait(under_way)
