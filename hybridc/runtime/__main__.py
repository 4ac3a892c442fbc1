"""``python -m hybridc.runtime BUNDLE [REPOSITORY]``: check a bundle with the loader alone.

With a model repository, each plan of the bundle is run, the server's parts in this process.

Runs in a fresh process at the end of a compile. Everything of the compiler is made unimportable
first, so a bundle that needs any of it fails here and not at deployment. Prints one JSON object.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

COMPILER = ("tvm", "onnx", "onnx_ir", "onnxsim", "networkx")


def main(path: str, repository: str | None = None) -> int:
    """Check a bundle; returns the exit code and prints the outputs' errors or the fault."""
    for name in COMPILER:
        sys.modules[name] = None  # type: ignore[assignment]
    from hybridc.bundle.read import open_bundle
    from hybridc.errors import HybridcError
    from hybridc.runtime.samples import run_plans, run_samples

    try:
        bundle = open_bundle(path)
        if not any(device.packages for device in bundle.manifest.devices):
            sys.modules["onnxruntime"] = None  # type: ignore[assignment]
        bundle.check_all()
        found = run_samples(bundle) if repository is None else run_plans(bundle, Path(repository))
        errors = [dataclasses.asdict(error) for error in found]
    except HybridcError as error:
        print(json.dumps({"fault": str(error), "exit_code": error.exit_code}))
        return error.exit_code
    print(json.dumps({"errors": errors}))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
