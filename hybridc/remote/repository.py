"""A Triton model repository: a model for each part on the server, and its versions.

    REPOSITORY/
      edge-cut1/             a part on the server, by the plan that needs it
        config.pbtxt         its tensors, batching, instances; the build of each version
        1/model.py           loads the bundle with hybridc's loader
        1/bundle.hyb         the part
        2/...                a later version; both are served
        packages/            what you install for Triton's Python, if you do

All versions of a model have the same tensors, since they share ``config.pbtxt``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hybridc.bundle.manifest import Manifest, TensorSpec
from hybridc.errors import UnsupportedError, UsageError
from hybridc.runtime.remote_encoding import wire_specs
from hybridc.runtime.remote_tensors import BUILD, BUILD_BYTES, DATATYPES
from hybridc.runtime.serving import BUNDLE, build_of, open_served

CONFIG = "config.pbtxt"

_MODEL_PY = '''\
"""Runs the bundle beside this file on Triton's Python back end. Written by hybridc."""

import os
import sys

_packages = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "packages")
if os.path.isdir(_packages):
    sys.path.insert(0, _packages)

from hybridc.runtime.serving import TritonPythonModel  # noqa: E402, F401
'''


@dataclass(frozen=True)
class ServerOptions:
    """How the server's side is written.

    Attributes:
        repository: The model repository.
        name: What the names of its models start with.
        version: Version that is written.
        plans: Most plans with a server in the edge bundle.
        batch: Most requests' rows that run at once; 0 to run each request by itself.
        delay_seconds: How long the first request of a batch waits for others.
        instances: How many run at the same time.
        warm_up: Whether Triton runs each model once before it serves.
        encoding: Element type in which large tensors of floating-point numbers cross, ``float16``
            or ``uint8``; ``None`` to send them as they are.
        tolerance: Largest error of a plan with such tensors.
        storage: Where KServe finds the repository; ``None`` to write no manifest.
        updates: Whether the models may be replaced while the edge bundle stays.
        rate: Runs per second at which plans are to cost little; ``None`` where time counts.
    """

    repository: Path
    name: str
    version: int = 1
    plans: int = 3
    batch: int = 0
    delay_seconds: float = 0.001
    instances: int = 1
    warm_up: bool = False
    storage: str | None = None
    encoding: str | None = None
    tolerance: float | None = None
    updates: bool = False
    rate: float | None = None


def model_name(text: str) -> str:
    """A name that Triton, KServe and file systems take: lower-case letters, digits, hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "model"


def check_repository(options: ServerOptions) -> None:
    """Refuse a place that holds something else, or that has the version already.

    Raises:
        UsageError: It does.
    """
    folder = options.repository
    if not folder.exists():
        return
    children = list(folder.iterdir()) if folder.is_dir() else None
    if children is None or any(not (c / CONFIG).is_file() for c in children if c.is_dir()):
        raise UsageError(f"{folder} is in the way and is no model repository; choose another")
    for child in children:
        own = re.fullmatch(rf"{re.escape(options.name)}-(remote|cut\d+)(-\d+)?", child.name)
        if own and (child / str(options.version)).exists():
            raise UsageError(
                f"{child} has version {options.version}, which bundles may be using; choose "
                "another --remote-version, or remove it"
            )


def check_tensors(specs: Iterable[TensorSpec]) -> None:
    """Refuse tensors that the protocol cannot carry.

    Raises:
        UnsupportedError: One is of such a type.
    """
    for spec in specs:
        if spec.dtype not in DATATYPES:
            raise UnsupportedError(
                f"the tensor {spec.name!r} would cross to the server, and {spec.dtype} cannot; "
                "keep what computes and reads it together with --pin"
            )


def check_batch(manifest: Manifest, batch: int) -> None:
    """Refuse batching for a part whose tensors do not share a first dimension with that range.

    Raises:
        UsageError: They do not.
    """
    if not batch:
        return
    tensors = (*manifest.inputs, *manifest.outputs)
    first = {spec.shape[0] if spec.shape else 1 for spec in tensors}
    name = next(iter(first))
    low, high = manifest.dimensions.get(str(name), (0, 0))
    if len(first) > 1 or not isinstance(name, str) or not low <= batch <= high:
        raise UsageError(
            f"--remote-batch {batch} needs a first dimension that all tensors at the cut share, "
            f"with a range up to {batch}, as in --shape batch=1..{batch}; they are "
            + ", ".join(f"{spec.name}[{'x'.join(map(str, spec.shape))}]" for spec in tensors)
        )


def write_config(folder: Path, options: ServerOptions) -> None:
    """Write ``config.pbtxt`` of a model for the versions that its folder has.

    Raises:
        UsageError: The versions differ in their tensors.
    """
    versions = sorted(int(child.name) for child in folder.iterdir() if child.name.isdigit())
    bundles = {version: open_served(folder / str(version)) for version in versions}
    manifests = {version: bundle.manifest for version, bundle in bundles.items()}
    own = manifests[options.version]
    for version, other in manifests.items():
        if _signature(other) != _signature(own):
            raise UsageError(
                f"version {version} of {folder.name} has other tensors than version "
                f"{options.version}; write to another --repository"
            )
        if other.interface != own.interface:
            raise UsageError(
                f"version {version} of {folder.name} is for another edge bundle than version "
                f"{options.version}, and a bundle takes the newest; write to another --repository"
            )
    builds = {str(version): build_of(bundle) for version, bundle in bundles.items()}
    if own.interface:
        builds[""] = own.interface  # of requests that name no version
    (folder / CONFIG).write_text(config_text(folder.name, own, builds, options), "utf-8")


def _signature(manifest: Manifest) -> tuple[Sequence[TensorSpec], Sequence[TensorSpec]]:
    """The tensors of requests and of replies."""
    inputs = wire_specs(manifest.inputs, manifest.encodings)
    return inputs, wire_specs(manifest.outputs, manifest.encodings)


def write_version(folder: Path) -> Path:
    """Make the folder of a version with its ``model.py``; returns where the bundle goes."""
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(_MODEL_PY, "utf-8")
    return folder / BUNDLE


def config_text(
    name: str, manifest: Manifest, builds: Mapping[str, str], options: ServerOptions
) -> str:
    """The text of ``config.pbtxt``."""
    batched = bool(options.batch)
    inputs, outputs = _signature(manifest)
    mark = TensorSpec(BUILD, "uint8", (*(("batch",) if batched else ()), BUILD_BYTES))
    lines = [
        f"name: {json.dumps(name)}",
        'backend: "python"',
        f"max_batch_size: {options.batch}",
        *(_tensor("input", spec, batched) for spec in inputs),
        *(_tensor("output", spec, batched) for spec in (*outputs, mark)),
        "version_policy { all { } }",
        f"instance_group [ {{ kind: KIND_CPU count: {options.instances} }} ]",
    ]
    if batched:
        delay = round(options.delay_seconds * 1e6)
        lines.append(f"dynamic_batching {{ max_queue_delay_microseconds: {delay} }}")
    if options.warm_up:
        lines.append(_warm_up(manifest, batched))
    for version, build in builds.items():
        value = f'value {{ string_value: "{build}" }}'
        lines.append(f'parameters {{ key: "{BUILD}_{version}" {value} }}')
    return "\n".join(lines) + "\n"


def _tensor(kind: str, spec: TensorSpec, batched: bool) -> str:
    dims = ", ".join(map(str, _dims(spec, batched)))
    return (
        f"{kind} [ {{ name: {json.dumps(spec.name)} data_type: TYPE_{DATATYPES[spec.dtype]} "
        f"dims: [ {dims} ] }} ]"
    )


def _dims(spec: TensorSpec, batched: bool) -> Sequence[int]:
    """Dimensions as Triton wants them: without the batch, and -1 for what is dynamic."""
    shape = spec.shape[1:] if batched else spec.shape
    return [dim if isinstance(dim, int) else -1 for dim in shape]


def _warm_up(manifest: Manifest, batched: bool) -> str:
    """A run with zeros, at the lowest value of each dynamic dimension."""
    rows = []
    for spec in _signature(manifest)[0]:
        shape = spec.shape[1:] if batched else spec.shape
        low = [d if isinstance(d, int) else max(manifest.dimensions[d][0], 1) for d in shape]
        value = f"data_type: TYPE_{DATATYPES[spec.dtype]} dims: {low} zero_data: true"
        rows.append(f"inputs {{ key: {json.dumps(spec.name)} value {{ {value} }} }}")
    return f'model_warmup [ {{ name: "zeros" batch_size: {int(batched)} {" ".join(rows)} }} ]'
