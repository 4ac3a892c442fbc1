"""Options about devices and placement, which ``compile`` and ``plan`` share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hybridc.cli.options import Function, with_options
from hybridc.errors import UsageError

if TYPE_CHECKING:
    from hybridc.placement.hardware import Hardware
    from hybridc.placement.plan_file import PlanFile
    from hybridc.placement.rules import RuleTexts
    from hybridc.targets.protocol import Device

OBJECTIVES = ("latency", "throughput", "energy", "cost")

_MODEL_OPTIONS = (
    click.option(
        "--target",
        "targets",
        multiple=True,
        default=("llvm",),
        show_default=True,
        metavar="[NAME=]KIND[:WHAT]",
        help="A device to compile for, such as llvm, llvm:x86-64-v3, llvm:znver3, llvm:aarch64. "
        "Repeatable; devices are called llvm:0, llvm:1, ... unless named. Costs decide which part "
        "goes where if the device's profiles are known; otherwise what is not pinned goes to the "
        "first.",
    ),
    click.option(
        "--remote",
        metavar="NAME=KIND[:WHAT]",
        help="A server that may run parts, with what to compile for there, as in server=llvm. It "
        "needs a --link.",
    ),
    click.option(
        "--shape",
        "shapes",
        multiple=True,
        metavar="NAME=DIMENSIONS",
        help="Dimensions of an input (x=1x3x224x224) or of a named dynamic dimension (batch=1 or "
        "batch=1..8). Repeatable.",
    ),
    click.option(
        "--bind",
        "bindings",
        multiple=True,
        metavar="INPUT=VALUE",
        help="Bind an input to a value that never changes (sr=16000, axes=[0,1], or "
        "table=@FILE.npy); the bundle has it no more. Repeatable.",
    ),
)

_RULE_OPTIONS = (
    click.option(
        "--pin",
        multiple=True,
        metavar="NODE=DEVICE",
        help="Place a node, named by itself or by a value it computes, on a device. * and ? match "
        "several. Repeatable.",
    ),
    click.option(
        "--forbid",
        multiple=True,
        metavar="NODE=DEVICE",
        help="Keep a node off a device. Repeatable.",
    ),
    click.option(
        "--memory",
        multiple=True,
        metavar="DEVICE=SIZE",
        help="Most memory that the model may take on a device, as in cuda:0=2GiB. Repeatable.",
    ),
    click.option(
        "--max-latency",
        metavar="TIME",
        help="Longest time of one run by the cost model, as in 20ms.",
    ),
    click.option(
        "--keep-on",
        nargs=2,
        multiple=True,
        metavar="DEVICE TENSOR",
        help="Keep a tensor, and what is computed from it, on a device. Repeatable.",
    ),
    click.option(
        "--release",
        multiple=True,
        metavar="TENSOR",
        help="A tensor that may leave the device it is kept on, or reach the server. Repeatable.",
    ),
    click.option(
        "--private",
        multiple=True,
        metavar="INPUT",
        help="Keep an input, and what is computed from it, off the server. Repeatable.",
    ),
    click.option(
        "--residency",
        multiple=True,
        metavar="[INPUT=]REGION",
        help="Keep all inputs, or one, in a region: off a server in another. Repeatable.",
    ),
    click.option(
        "--region", multiple=True, metavar="NAME=REGION", help="Where the server is: server=eu."
    ),
    click.option(
        "--rules",
        "rules_file",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="A TOML file with rules, beside those given as options.",
    ),
)

_COST_OPTIONS = (
    click.option(
        "--costs",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="What hybridc calibrate run measured: costs of the devices that have no --profile.",
    ),
    click.option(
        "--profile",
        "profiles",
        multiple=True,
        metavar="DEVICE=PROFILE",
        help="What a device can do: the name of a profile, such as zen3 or h100, or a file. "
        "Repeatable.",
    ),
    click.option(
        "--link",
        "links",
        multiple=True,
        metavar="A-B=RATE,DELAY",
        help="The link between two devices, as in llvm:0-cuda:0=20gbit,5us, or from the first to "
        "another, as in server=20mbit,15ms. Repeatable.",
    ),
    click.option(
        "--objective",
        type=click.Choice(OBJECTIVES),
        default="latency",
        show_default=True,
        help="What the placement minimizes.",
    ),
    click.option(
        "--solve-seconds",
        type=click.FloatRange(min=0, min_open=True),
        default=10.0,
        show_default=True,
        help="Time to search for a placement.",
    ),
)


def model_options(function: Function) -> Function:
    """Targets, shapes and bindings."""
    return with_options(_MODEL_OPTIONS, function)


def rule_options(function: Function) -> Function:
    """Rules on placement."""
    return with_options(_RULE_OPTIONS, function)


def cost_options(function: Function) -> Function:
    """What is known about devices, and what to minimize."""
    return with_options(_COST_OPTIONS, function)


@dataclass(frozen=True)
class Asked:
    """The options as given, and the plan that stands in for those that were not."""

    values: Mapping[str, Any]
    plan: PlanFile | None = None

    def texts(self, name: str, planned: Sequence[str]) -> tuple[str, ...]:
        """An option's values, or the plan's if it was not given."""
        if self.plan is not None and not is_given(name):
            return tuple(planned)
        return tuple(self.values[name])


def is_given(name: str) -> bool:
    """Whether an option was given, and is not at its default."""
    source = click.get_current_context().get_parameter_source(name)
    return source not in (click.core.ParameterSource.DEFAULT, None)


def compile_options(asked: Asked) -> dict[str, Any]:
    """The fields of ``hybridc.compiler.Options`` that these options give.

    Raises:
        UsageError: An option cannot be read, or options do not fit each other.
    """
    from hybridc.frontend.bind import parse_bindings
    from hybridc.frontend.shapes import parse_shapes
    from hybridc.placement.rules import parse_rules

    plan = asked.plan
    remote = _remote(asked)
    devices = (*_devices(asked), *((remote,) if remote else ()))
    name = remote.name if remote else None
    shapes = asked.texts("shapes", plan.shapes if plan else ())
    bindings = asked.texts("bindings", plan.bindings if plan else ())
    rules = _rule_texts(asked)
    return {
        "devices": devices,
        "shapes": parse_shapes(shapes),
        "bindings": parse_bindings(bindings),
        "rules": parse_rules(rules, [device.name for device in devices], name),
        "hardware": _hardware(asked, devices, name),
        "objective": asked.values["objective"],
        "solve_seconds": asked.values["solve_seconds"],
        "fixed": plan.device_of_nodes() if plan else None,
        "remote": name,
        "texts": (shapes, bindings),
        "rule_texts": rules,
    }


def _devices(asked: Asked) -> tuple[Device, ...]:
    from hybridc.targets.protocol import Device
    from hybridc.targets.registry import find_target, parse_targets

    if asked.plan is None or is_given("targets"):
        return parse_targets(asked.values["targets"])
    if asked.plan.remote is not None:
        raise UsageError("a plan with a server cannot be compiled again; give its options instead")
    found = [d for d in asked.plan.devices if not d.is_fallback]
    for device in found:
        find_target(device.kind).check(device.specification)
    return tuple(Device(d.name, d.kind, d.specification) for d in found)


def _remote(asked: Asked) -> Device | None:
    """The device on a server.

    Raises:
        UsageError: It is not of the right form, or cannot be on a server.
    """
    from hybridc.runtime.parts import SESSION_KIND
    from hybridc.targets.registry import parse_targets

    text = asked.values["remote"]
    if text is None:
        return None
    name, separator, _ = text.partition("=")
    (device,) = parse_targets([text])
    first = parse_targets(asked.values["targets"])[0]
    if not separator or device.kind == SESSION_KIND:
        raise UsageError(f"--remote {text!r} is not of the form NAME=KIND, with a compiled target")
    if first.kind != "llvm":
        raise UsageError("--remote needs a first --target that is this end's CPU, such as llvm")
    if not any(
        link.partition("=")[0] in (name, f"{first.name}-{name}") for link in asked.values["links"]
    ):
        raise UsageError(f"--remote {text} needs its link: --link {name}=RATE,DELAY")
    if device.name in {d.name for d in parse_targets(asked.values["targets"])}:
        raise UsageError(f"--remote and --target are both called {name!r}")
    return device


def _rule_texts(asked: Asked) -> RuleTexts:
    from hybridc.placement.rules import RuleTexts, merge, read_rules

    texts = asked.plan.rules if asked.plan else RuleTexts()
    path = asked.values["rules_file"]
    if path is not None:
        try:
            texts = merge(texts, read_rules(path.read_text("utf-8"), str(path)))
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read the rules: {error}") from error
    names = RuleTexts.__dataclass_fields__
    return merge(texts, RuleTexts(**{name: asked.values[name] for name in names}))


EDGE_PROFILE, SERVER_PROFILE = "cortex-a76", "sapphire-rapids"
"""What devices of a hybrid compile are taken for where nothing says what they are."""


def _hardware(asked: Asked, devices: Sequence[Device], remote: str | None) -> Hardware | None:
    from importlib.metadata import version

    import hybridc
    from hybridc.cost_models.link import parse_links
    from hybridc.cost_models.load import default_profile
    from hybridc.placement.fallback import fallback_device
    from hybridc.placement.hardware import load_hardware
    from hybridc.placement.reconsider import Change, hardware_of

    names = [device.name for device in devices]
    versions = {"hybridc": hybridc.__version__, "tvm": version("apache-tvm")}
    local = [device for device in devices if device.name != remote]
    profiles = _measured_profiles(asked, local, versions)
    profiles |= parse_profiles(asked.values["profiles"], names)
    links = parse_links(asked.values["links"], names)
    if remote is not None:
        for device in devices:
            if device.kind == "llvm" and not default_profile(device.kind, device.specification):
                assumed = SERVER_PROFILE if device.name == remote else EDGE_PROFILE
                profiles.setdefault(device.name, assumed)
    plan = asked.plan
    if plan is not None and not profiles and not links and not is_given("targets"):
        return hardware_of(plan, Change()) if plan.prediction else None
    return load_hardware(devices, fallback_device(devices), profiles, links, versions)


def _measured_profiles(
    asked: Asked, devices: Sequence[Device], versions: Mapping[str, str]
) -> dict[str, str]:
    """The file of ``--costs`` for each device that it knows, the fallback device included."""
    from hybridc.cost_models.load import measured_devices
    from hybridc.cost_models.measured import Code
    from hybridc.placement.fallback import fallback_device

    path = asked.values["costs"]
    if path is None:
        return {}
    known = (*devices, fallback_device(devices))
    codes = {d.name: Code(d.kind, d.specification, versions) for d in known}
    return dict.fromkeys(measured_devices(str(path), codes), str(path))


def parse_profiles(options: Sequence[str], devices: Sequence[str]) -> dict[str, str]:
    """Profiles by device, out of ``--profile DEVICE=PROFILE`` options.

    Raises:
        UsageError: One cannot be read or names a device that is not there.
    """
    found = {}
    for option in options:
        device, separator, name = option.partition("=")
        if not separator or device not in devices:
            raise UsageError(
                f"--profile {option!r} is not of the form DEVICE=PROFILE with one of the devices "
                f"{', '.join(devices)}"
            )
        found[device] = name
    return found


def read_plan(path: Path) -> PlanFile:
    """A plan, out of a JSON file or a bundle.

    Raises:
        UsageError: There is none.
    """
    from hybridc.bundle.manifest import MANIFEST
    from hybridc.bundle.read import open_bundle
    from hybridc.bundle.storage import SUFFIX
    from hybridc.placement.plan_file import PLAN, plan_from_json

    if path.suffix == SUFFIX or (path / MANIFEST).exists():
        bundle = open_bundle(path)
        if PLAN not in {file.path for file in bundle.manifest.files}:
            raise UsageError(f"{path} has no plan: it was compiled by an older hybridc")
        return plan_from_json(bytes(bundle.read(PLAN)), f"{path}: {PLAN}")
    try:
        return plan_from_json(path.read_bytes(), str(path))
    except OSError as error:
        raise UsageError(f"cannot read the plan: {error}") from error
