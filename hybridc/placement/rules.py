"""Rules on placement: what the user demands, as hard constraints.

Each rule takes devices away from groups. What is left to a group is where the solver may put it;
where nothing is left, the rules contradict each other or what targets can compile, and
:mod:`hybridc.placement.conflict` finds the smallest set that does.

    --pin NODE=DEVICE           the node on that device, and on no other
    --forbid NODE=DEVICE        the node on any other device
    --keep-on DEVICE TENSOR     the tensor, and all that is computed from it, on that device ...
    --private INPUT             the input, and all that is computed from it, not on the server ...
    --residency [INPUT=]REGION  as --private, if --region says that the server is elsewhere ...
    --release TENSOR            ... up to this tensor, which may leave
    --memory DEVICE=2GiB        so many bytes on the device at a time, and no more
    --max-latency 20ms          one run in that time, by the cost model
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from hybridc.cost_models.link import parse_seconds
from hybridc.errors import UsageError
from hybridc.placement.group import Group, read_values

PINNED = "pinned"
RULE = "rule"

_UNITS = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_SIZE = re.compile(r"(?P<number>[\d.]+)\s*(?P<unit>[kmg]?i?)b?", re.IGNORECASE)


@dataclass(frozen=True)
class NodeRule:
    """A rule about nodes: ``--pin`` or ``--forbid``.

    Attributes:
        option: ``pin`` or ``forbid``.
        pattern: Name of a node or of a value that it computes; ``*`` and ``?`` match as in a shell.
        device: Name of the device.
    """

    option: str
    pattern: str
    device: str

    def __str__(self) -> str:
        return f"--{self.option} {self.pattern}={self.device}"


@dataclass(frozen=True)
class KeepRule:
    """``--keep-on DEVICE TENSOR``: a tensor and what is computed from it stay on a device."""

    device: str
    tensor: str

    def __str__(self) -> str:
        return f"--keep-on {self.device} {self.tensor}"


@dataclass(frozen=True)
class PrivateRule:
    """``--private`` or ``--residency``: inputs and what is computed from them stay off the server.

    Attributes:
        device: Name of the device on the server.
        tensor: Name of the input; empty for all of them.
        region: Where it may be, for a residency.
    """

    device: str
    tensor: str
    region: str = ""

    def __str__(self) -> str:
        if not self.region:
            return f"--private {self.tensor}"
        return f"--residency {self.tensor and self.tensor + '='}{self.region}"


@dataclass(frozen=True)
class LimitRule:
    """A limit on memory or time.

    Attributes:
        option: ``memory`` or ``max-latency``.
        text: The limit as it was given.
        most: Bytes or seconds.
        device: Device that the memory is of; empty for a latency.
    """

    option: str
    text: str
    most: float
    device: str = ""

    def __str__(self) -> str:
        device = f"{self.device}=" if self.device else ""
        return f"--{self.option} {device}{self.text}"


Rule = NodeRule | KeepRule | PrivateRule | LimitRule


@dataclass(frozen=True)
class Rules:
    """All rules of a compile.

    Attributes:
        rules: What must hold.
        releases: Tensors that may leave the device that they are kept on, or reach the server.
    """

    rules: tuple[Rule, ...] = ()
    releases: tuple[str, ...] = ()

    @property
    def limits(self) -> list[LimitRule]:
        """Those on memory and time."""
        return [rule for rule in self.rules if isinstance(rule, LimitRule)]

    def devices(self) -> set[str]:
        """Devices that a rule names."""
        return {rule.device for rule in self.rules} - {""}


@dataclass(frozen=True)
class RuleTexts:
    """Rules as given on the command line or in a file, by option."""

    pin: tuple[str, ...] = ()
    forbid: tuple[str, ...] = ()
    memory: tuple[str, ...] = ()
    keep_on: tuple[tuple[str, str], ...] = ()
    release: tuple[str, ...] = ()
    max_latency: str | None = None
    private: tuple[str, ...] = ()
    residency: tuple[str, ...] = ()
    region: tuple[str, ...] = ()


def parse_rules(texts: RuleTexts, devices: Sequence[str], remote: str | None = None) -> Rules:
    """Rules out of their texts.

    Args:
        texts: The rules.
        devices: Names of all devices.
        remote: That of the one on a server, if there is one.

    Raises:
        UsageError: One cannot be read or names a device that is not there.
    """
    rules: list[Rule] = [_node_rule("pin", text, devices) for text in texts.pin]
    rules += [_node_rule("forbid", text, devices) for text in texts.forbid]
    for device, tensor in texts.keep_on:
        _check_device("keep-on", f"{device} {tensor}", device, devices)
        rules.append(KeepRule(device, tensor))
    rules += _private_rules(texts, remote)
    rules += [_memory_rule(text, devices) for text in texts.memory]
    if texts.max_latency is not None:
        try:
            most = parse_seconds(texts.max_latency)
        except ValueError as error:
            raise UsageError(f"--max-latency: {error}") from error
        rules.append(LimitRule("max-latency", texts.max_latency, most))
    return Rules(tuple(rules), texts.release)


def _private_rules(texts: RuleTexts, remote: str | None) -> list[PrivateRule]:
    """What the server may not see; a residency that it keeps takes nothing from it."""
    for option in ("private", "residency", "region"):
        for text in getattr(texts, option):
            if remote is None:
                raise UsageError(f"--{option} {text} keeps nothing from anyone without --remote")
    regions = dict(_region(text, str(remote)) for text in texts.region)
    rules = [PrivateRule(str(remote), tensor) for tensor in texts.private]
    for text in texts.residency:
        if remote not in regions:
            raise UsageError(
                f"--residency {text} needs the server's region: --region {remote}=REGION"
            )
        tensor, _, region = text.rpartition("=")
        if region != regions[remote]:
            rules.append(PrivateRule(remote, tensor, region))
    return rules


def _region(text: str, remote: str) -> tuple[str, str]:
    name, _, region = text.partition("=")
    if name != remote or not region:
        raise UsageError(f"--region {text!r} is not of the form {remote}=REGION")
    return name, region


def _node_rule(option: str, text: str, devices: Sequence[str]) -> NodeRule:
    pattern, separator, device = text.rpartition("=")
    if not separator or not pattern:
        raise UsageError(f"--{option} {text!r} is not of the form NODE=DEVICE")
    _check_device(option, text, device, devices)
    return NodeRule(option, pattern, device)


def _memory_rule(text: str, devices: Sequence[str]) -> LimitRule:
    device, separator, size = text.rpartition("=")
    if not separator:
        raise UsageError(f"--memory {text!r} is not of the form DEVICE=SIZE")
    _check_device("memory", text, device, devices)
    return LimitRule("memory", size, parse_size(size), device)


def _check_device(option: str, text: str, device: str, devices: Sequence[str]) -> None:
    if device not in devices:
        raise UsageError(
            f"--{option} {text!r} names device {device!r}; the devices are {', '.join(devices)}"
        )


def parse_size(text: str) -> int:
    """Bytes out of a size such as ``2GiB``, ``512MB`` or ``1000``.

    Raises:
        UsageError: It is none.
    """
    match = _SIZE.fullmatch(text.strip())
    try:
        if match is None:
            raise ValueError(text)
        return int(float(match["number"]) * _UNITS[match["unit"].lower()])
    except (ValueError, KeyError) as error:
        raise UsageError(f"{text!r} is no size; write it as in 512MB or 2GiB") from error


def read_rules(text: str, where: str) -> RuleTexts:
    """Rules out of a TOML file, which has a key for each option.

    Raises:
        UsageError: It is not TOML, or has a key or a value that is none.
    """
    data = _toml(text, where)
    known = {name.replace("_", "-"): name for name in RuleTexts.__dataclass_fields__}
    unknown = sorted(set(data) - set(known))
    if unknown:
        raise UsageError(f"{where}: there is no rule {unknown[0]!r}; rules are {', '.join(known)}")
    latency = data.pop("max-latency", None)
    if latency is not None and not isinstance(latency, str):
        raise UsageError(f"{where}: max-latency is not a text such as '20ms'")
    fields: dict[str, tuple[str, ...]] = {}
    for key, value in data.items():
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise UsageError(f"{where}: {key} is not a list of texts")
        fields[known[key]] = tuple(value)
    kept = tuple(_keep(text, where) for text in fields.pop("keep_on", ()))
    return RuleTexts(**fields, keep_on=kept, max_latency=latency)  # type: ignore[arg-type]


def _toml(text: str, where: str) -> dict[str, object]:
    import tomllib  # type: ignore[import-not-found, unused-ignore]  # from Python 3.11 on, as all of the compiler

    try:
        data: dict[str, object] = tomllib.loads(text)
        return data
    except ValueError as error:
        raise UsageError(f"{where} is not TOML: {error}") from error


def _keep(text: str, where: str) -> tuple[str, str]:
    device, _, tensor = text.partition(" ")
    if not tensor.strip():
        raise UsageError(f"{where}: keep-on {text!r} is not of the form 'DEVICE TENSOR'")
    return device, tensor.strip()


def merge(first: RuleTexts, second: RuleTexts) -> RuleTexts:
    """Rules of both; the second's latency counts where both have one."""
    return RuleTexts(
        first.pin + second.pin,
        first.forbid + second.forbid,
        first.memory + second.memory,
        first.keep_on + second.keep_on,
        first.release + second.release,
        second.max_latency or first.max_latency,
        first.private + second.private,
        first.residency + second.residency,
        first.region + second.region,
    )


@dataclass
class Exclusions:
    """Which rules keep each group off each device.

    Attributes:
        by_group: For each group, by device, the rules that take the device away.
    """

    by_group: list[dict[str, list[Rule]]] = field(default_factory=list)

    def exclude(self, group: int, devices: Iterable[str], rule: Rule) -> None:
        """Take devices away from a group."""
        for device in devices:
            self.by_group[group].setdefault(device, []).append(rule)


def exclude(
    graph: ir.Graph, groups: Sequence[Group], rules: Rules, devices: Sequence[str]
) -> Exclusions:
    """What the rules take away from each group.

    Raises:
        UsageError: A rule names no node or tensor of the model.
    """
    found = Exclusions([{} for _ in groups])
    names = [_names(group) for group in groups]
    for rule in rules.rules:
        if isinstance(rule, NodeRule):
            matched = [index for index, own in enumerate(names) if _filter(own, rule.pattern)]
            if not matched:
                raise UsageError(_no_match(str(rule), rule.pattern, names))
            away = set(devices) - {rule.device} if rule.option == "pin" else {rule.device}
            for index in matched:
                found.exclude(index, sorted(away), rule)
        elif isinstance(rule, KeepRule):
            for index in _kept_groups(graph, groups, rule, rules.releases):
                found.exclude(index, sorted(set(devices) - {rule.device}), rule)
        elif isinstance(rule, PrivateRule):
            _check_input(graph, rule)
            for index in _kept_groups(graph, groups, rule, rules.releases):
                found.exclude(index, [rule.device], rule)
    return found


def private_inputs(graph: ir.Graph, rules: Rules) -> list[str]:
    """The inputs that the server may not see."""
    found = [
        name
        for rule in rules.rules
        if isinstance(rule, PrivateRule)
        for name in ([rule.tensor] if rule.tensor else _inputs(graph))
    ]
    return list(dict.fromkeys(found))


def _inputs(graph: ir.Graph) -> list[str]:
    return [str(value.name) for value in graph.inputs if value.const_value is None]


def _check_input(graph: ir.Graph, rule: PrivateRule) -> None:
    names = _inputs(graph)
    if rule.tensor not in ("", *names):
        raise UsageError(f"{rule}: the model has no such input; its inputs are {', '.join(names)}")


def leaking_outputs(graph: ir.Graph, rules: Rules) -> Mapping[KeepRule, list[str]]:
    """Outputs of the model that a rule keeps on a device: the caller would read them elsewhere."""
    found: dict[KeepRule, list[str]] = {}
    for rule in rules.rules:
        if isinstance(rule, KeepRule):
            kept = kept_values(graph, rule, rules.releases)
            names = [str(value.name) for value in graph.outputs if value in kept]
            if names:
                found[rule] = names
    return found


def _kept_groups(
    graph: ir.Graph, groups: Sequence[Group], rule: KeepRule | PrivateRule, releases: Sequence[str]
) -> list[int]:
    """Groups that compute or read a kept tensor."""
    kept = kept_values(graph, rule, releases)
    touched = []
    for index, group in enumerate(groups):
        values = [v for node in group.nodes for v in (*read_values(node), *node.outputs)]
        if any(value in kept for value in values):
            touched.append(index)
    return touched


def kept_values(
    graph: ir.Graph, rule: KeepRule | PrivateRule, releases: Sequence[str]
) -> set[ir.Value]:
    """The tensor and what is computed from it, without what is released."""
    values = {str(value.name): value for value in graph.inputs}
    values |= {str(value.name): value for node in graph for value in node.outputs}
    tensors = [rule.tensor] if rule.tensor else _inputs(graph)
    named = [(str(rule), name) for name in tensors]
    for option, name in (*named, *(("--release", name) for name in releases)):
        if name not in values:
            raise UsageError(_no_match(option, name, [list(values)], "tensor"))
    kept = {values[name] for name in tensors} - {values[name] for name in releases}
    for node in graph:
        if any(value in kept for value in read_values(node)):
            kept.update(value for value in node.outputs if value.name not in releases)
    return kept


def _filter(names: Sequence[str], pattern: str) -> list[str]:
    """The names that a pattern matches; brackets in it mean themselves."""
    return fnmatch.filter(names, pattern.replace("[", "[[]"))


def _names(group: Group) -> list[str]:
    """What a rule may call a group: its nodes, and the values that they compute."""
    values = [str(value.name) for node in group.nodes for value in node.outputs]
    return [str(node.name) for node in group.nodes] + values


def _no_match(option: str, pattern: str, names: Sequence[Sequence[str]], what: str = "node") -> str:
    known = [name for own in names for name in own]
    close = difflib.get_close_matches(pattern, known, 1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return (
        f"{option}: no {what} of the simplified model is called {pattern!r}{hint}; "
        "hybridc inspect --nodes lists them"
    )
