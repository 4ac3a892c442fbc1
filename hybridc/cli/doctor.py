"""``hybridc doctor``."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

import click

from hybridc import __version__
from hybridc.cli.output import format_option, show, table


@click.command("doctor")
@format_option
def command(format_: str) -> None:
    """Show devices, compilers and versions on this machine, and what is missing for what."""
    data: dict[str, Any] = {
        "hybridc": __version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()} {platform.system()} {platform.release()}",
        "packages": {group: _packages(group) for group in ("loader", "compiler")},
    }
    missing = [name for name, found in data["packages"]["compiler"].items() if found is None]
    data["can"] = {"run bundles": _loader_works(), "compile": not missing}
    data["targets"] = _targets(compiler=not missing)
    show(format_, data, lambda: _as_lines(data))


def _packages(group: str) -> dict[str, str | None]:
    """Installed version of each package that a group needs; ``None`` where it is missing."""
    found: dict[str, str | None] = {}
    for requirement in requires("hybridc") or ():
        text, _, marker = requirement.partition(";")
        wanted = (
            "extra" not in marker if group == "loader" else f'"{group}"' in marker.replace("'", '"')
        )
        name = text.strip().split("=")[0].split(">")[0].split("<")[0].strip()
        if wanted and not name.startswith("hybridc"):
            found[name] = _version(name)
    return found


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _loader_works() -> bool:
    try:
        import tvm_ffi  # noqa: F401
    except ImportError:
        return False
    return platform.system() == "Linux"


_WITHOUT_COMPILER = ("cuda", "llvm", "onnxruntime", "opencl")
"""Kinds of device that can be looked for with the loader alone."""


def _targets(compiler: bool) -> dict[str, list[dict[str, Any]]]:
    from hybridc.targets.registry import find_target, target_kinds

    return {
        kind: [
            {"name": found.name, "details": dict(found.details), "missing": list(found.missing)}
            for found in find_target(kind).probe()
        ]
        for kind in target_kinds()
        if compiler or kind in _WITHOUT_COMPILER
    }


def _as_lines(data: dict[str, Any]) -> list[str]:
    lines = [f"hybridc {data['hybridc']}, Python {data['python']}, {data['machine']}"]
    for group, packages in data["packages"].items():
        missing = [name for name, found in packages.items() if found is None]
        install = "hybridc" if group == "loader" else f"'hybridc[{group}]'"
        state = f"pip install {install} for {', '.join(missing)}" if missing else "complete"
        lines.append(f"{group}: {state}")
        lines += table([[name, found or "missing"] for name, found in packages.items()])
    for kind, devices in data["targets"].items():
        for device in devices:
            lines.append(f"target {kind}: {device['name']}")
            lines += table([[key, value] for key, value in device["details"].items()])
            lines += [f"  missing: {item}" for item in device["missing"]]
    return lines
