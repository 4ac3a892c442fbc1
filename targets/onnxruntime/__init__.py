"""The onnxruntime target: ONNX Runtime runs what no other target compiles.

A part of this target is stored in the bundle as an ONNX model, and the machine that loads the
bundle needs the package ``onnxruntime``. The specification is the path of a shared library with
custom operators, or empty; the library is stored in the bundle too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hybridc.targets.protocol import Artifact, Compatibility, Found, Section

from hybridc.errors import UsageError

if TYPE_CHECKING:
    from hybridc.targets.onnxruntime.extract import Extracted


@dataclass(frozen=True)
class OnnxRuntimeTarget:
    """ONNX Runtime's CPU execution provider."""

    kind: str = "onnxruntime"

    def check(self, specification: str) -> None:
        """Refuse what is not a library of custom operators."""
        if not specification:
            return
        from hybridc.runtime.session import session_options

        try:
            session_options([specification])
        except Exception as error:  # its exceptions share no base but Exception
            raise UsageError(
                f"--target onnxruntime:{specification} is not a library of custom operators that "
                f"ONNX Runtime can load: {error}"
            ) from error

    def lower(self, section: Section, specification: str) -> Extracted:
        """A section as an ONNX model that ONNX Runtime has accepted."""
        from hybridc.targets.onnxruntime.extract import extract

        return extract(section, specification)

    def build(self, lowered: Extracted, specification: str) -> Artifact:
        """The ONNX model's bytes; ONNX Runtime does not tell what memory it will take."""
        library = Path(specification)
        companions = {library.name: library.read_bytes()} if specification else {}
        return Artifact(lowered.model, memory_bytes=0, suffix=".onnx", companions=companions)

    def runtime_library(self, stem: str, specification: str) -> bytes:
        """Nothing of TVM's runtime is needed, so this is never called."""
        raise NotImplementedError(stem)

    def compatibility(self, specification: str) -> Compatibility:
        """Any machine that has this version of ONNX Runtime or a later one."""
        from importlib.metadata import version

        release = ".".join(version("onnxruntime").split(".")[:2])
        return Compatibility("ONNX Runtime", "", packages=(f"onnxruntime>={release}",))

    def probe(self) -> list[Found]:
        """The installed ONNX Runtime."""
        from importlib.metadata import PackageNotFoundError, version

        try:
            found = version("onnxruntime")
        except PackageNotFoundError:
            return []
        return [Found("ONNX Runtime", {"version": found})]


TARGET = OnnxRuntimeTarget()
