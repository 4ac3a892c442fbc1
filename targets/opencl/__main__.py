"""``python -m hybridc.targets.opencl``: build the plug-in, and print its path."""

from __future__ import annotations

import platform
import sys

from hybridc.targets.opencl.plugin import plugin

from hybridc.errors import UserError

if __name__ == "__main__":
    try:
        print(plugin(platform.machine()))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
