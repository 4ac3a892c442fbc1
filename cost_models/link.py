"""Links between devices: what a copy of so many bytes takes.

    seconds = latency + bytes / bandwidth

Each way has figures of its own, and may have a price.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hybridc.errors import UsageError

_BITS = {"bit": 1 / 8, "B": 1.0}
_PREFIX = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_TIME = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_RATE = re.compile(r"(?P<number>[\d.]+)(?P<prefix>[kKmMgGtT]?i?)(?P<unit>bit|B)")
_PRICE = re.compile(r"(?P<number>\d+(\.\d*)?|\.\d+)usd/GB", re.IGNORECASE)
_DELAY = re.compile(r"(?P<number>[\d.]+)(?P<unit>ns|us|ms|s)", re.IGNORECASE)

GIGABYTE = 10**9


@dataclass(frozen=True)
class Route:
    """One way of a link.

    Attributes:
        latency_seconds: Time of a copy of no bytes.
        bytes_per_second: Bandwidth.
        joules_per_byte: Energy of a byte that is copied.
        dollars_per_gigabyte: Price of so many bytes that are copied.
    """

    latency_seconds: float
    bytes_per_second: float
    joules_per_byte: float = 0.0
    dollars_per_gigabyte: float = 0.0

    def seconds(self, count: int) -> float:
        """Time of a copy of so many bytes."""
        return self.latency_seconds + count / self.bytes_per_second


def parse_links(options: Sequence[str], devices: Sequence[str]) -> dict[tuple[str, str], Route]:
    """Routes by source and destination, out of ``--link A-B=20gbit,5us[/10gbit,8us]`` options.

    What follows a slash is the way back; without it both ways are the same. Each way may have a
    price, as in ``20mbit,15ms,0.09usd/GB``. ``B=...`` is the link of a device to the first.

    Raises:
        UsageError: An option cannot be read, or names a device that is not there.
    """
    routes: dict[tuple[str, str], Route] = {}
    for option in options:
        pair, _, figures = option.rpartition("=")
        source, destination = _devices(option, pair, devices)
        there, slash, back = _ways(figures)
        routes[source, destination] = _route(option, there)
        routes[destination, source] = _route(option, back if slash else there)
    return routes


def _devices(option: str, pair: str, devices: Sequence[str]) -> tuple[str, str]:
    """The two names of a pair, which may have hyphens in them; one alone is linked to the first."""
    if pair in devices[1:]:
        return devices[0], pair
    for position, letter in enumerate(pair):
        first, second = pair[:position], pair[position + 1 :]
        if letter == "-" and first in devices and second in devices and first != second:
            return first, second
    raise UsageError(
        f"--link {option!r} is not of the form A-B=BANDWIDTH,LATENCY with two of the devices "
        f"{', '.join(devices)}"
    )


def _ways(figures: str) -> tuple[str, str, str]:
    """The way there, a slash, and the way back; the slash of a price is none of these."""
    there, slash, back = re.sub(r"usd/(?=GB)", "usd:", figures, flags=re.IGNORECASE).partition("/")
    return there.replace(":", "/"), slash, back.replace(":", "/")


def _route(option: str, figures: str) -> Route:
    rate, _, rest = figures.partition(",")
    delay, comma, price = rest.partition(",")
    try:
        return Route(
            parse_seconds(delay.strip()),
            parse_rate(rate.strip()),
            dollars_per_gigabyte=_parse_price(price.strip()) if comma else 0.0,
        )
    except ValueError as error:
        raise UsageError(f"--link {option!r}: {error}; write it as in 20gbit,5us") from error


def _parse_price(text: str) -> float:
    match = _PRICE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no price; write it as in 0.09usd/GB")
    return float(match["number"])


def parse_rate(text: str) -> float:
    """Bytes per second out of a rate such as ``20gbit`` or ``1.5GB``.

    Raises:
        ValueError: It is none.
    """
    match = _RATE.fullmatch(text)
    if match is None or match["prefix"].lower() not in _PREFIX:
        raise ValueError(f"{text!r} is no bandwidth")
    scale = _PREFIX[match["prefix"].lower()] * _BITS[match["unit"]]
    rate = float(match["number"]) * scale
    if rate <= 0:
        raise ValueError(f"{text!r} is not above zero")
    return rate


def parse_seconds(text: str) -> float:
    """Seconds out of a time such as ``5us`` or ``1.5ms``.

    Raises:
        ValueError: It is none.
    """
    match = _DELAY.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no time; write it as in 5us or 1.5ms")
    return float(match["number"]) * _TIME[match["unit"].lower()]
