"""Pins: nodes that the user places by hand."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from hybridc.errors import UsageError
from hybridc.placement.group import Group


@dataclass(frozen=True)
class Pin:
    """One ``--pin PATTERN=DEVICE``.

    Attributes:
        pattern: Name of a node or of a value that it computes; ``*`` and ``?`` match as in a shell.
        device: Name of the device.
    """

    pattern: str
    device: str


def parse_pins(options: Sequence[str], devices: Sequence[str]) -> tuple[Pin, ...]:
    """Pins out of ``--pin`` options.

    Raises:
        UsageError: An option cannot be read or names a device that is not there.
    """
    pins = []
    for option in options:
        pattern, separator, device = option.rpartition("=")
        if not separator or not pattern:
            raise UsageError(f"--pin {option!r} is not of the form NODE=DEVICE")
        if device not in devices:
            raise UsageError(
                f"--pin {option!r} names device {device!r}; the devices are {', '.join(devices)}"
            )
        pins.append(Pin(pattern, device))
    return tuple(pins)


def place(groups: Sequence[Group], pins: Sequence[Pin], default: str) -> dict[int, str]:
    """Device of each group: what its pins say, otherwise ``default``.

    Raises:
        UsageError: A pin matches nothing, or pins of one group name different devices.
    """
    names = {index: _names(group) for index, group in enumerate(groups)}
    chosen: dict[int, Pin] = {}
    for pin in pins:
        matched = [index for index, own in names.items() if _filter(own, pin)]
        if not matched:
            raise UsageError(_no_match(pin, names))
        for index in matched:
            other = chosen.setdefault(index, pin)
            if other.device != pin.device:
                raise UsageError(_conflict(groups[index], other, pin))
    return {i: chosen[i].device if i in chosen else default for i in range(len(groups))}


def matches(pin: Pin, node: ir.Node) -> bool:
    """Whether a pin names a node or a value that it computes."""
    return bool(_filter(_names(Group((node,))), pin))


def _filter(names: Sequence[str], pin: Pin) -> list[str]:
    """The names that a pin's pattern matches; brackets in it mean themselves."""
    return fnmatch.filter(names, pin.pattern.replace("[", "[[]"))


def _names(group: Group) -> list[str]:
    """What a pin may call a group: its nodes, and the values that they compute."""
    values = [str(value.name) for node in group.nodes for value in node.outputs]
    return [str(node.name) for node in group.nodes] + values


def _no_match(pin: Pin, names: Mapping[int, list[str]]) -> str:
    known = [name for own in names.values() for name in own]
    close = difflib.get_close_matches(pin.pattern, known, 1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return (
        f"--pin {pin.pattern}={pin.device}: no node of the simplified model is called "
        f"{pin.pattern!r}{hint}; hybridc inspect --nodes lists them"
    )


def _conflict(group: Group, first: Pin, second: Pin) -> str:
    nodes = ", ".join(str(node.name) for node in group.nodes)
    return (
        f"--pin {first.pattern}={first.device} and --pin {second.pattern}={second.device} "
        f"contradict each other: both place the nodes {nodes}, which are computed in one kernel"
    )
