"""What carries requests to one endpoint: the protocol over gRPC, or over HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hybridc.bundle.manifest import RemoteSpec
from hybridc.runtime.remote_settings import RemoteSettings
from hybridc.runtime.remote_tensors import WireTensor


class Lost(Exception):
    """A request did not reach the server or got no answer; it may be sent again."""


class Refused(Exception):
    """An endpoint does not serve a part, or gives no sense; asking it again is of no use."""


@dataclass(frozen=True)
class Exchange:
    """An answer to a request to run a part.

    Attributes:
        tensors: The outputs.
        bytes: What was sent and received, headers aside.
    """

    tensors: Sequence[WireTensor]
    bytes: int


@dataclass(frozen=True)
class Signature:
    """The tensors of a model on a server: element type by name."""

    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


class Transport(Protocol):
    """A kept connection to one endpoint; serves several threads.

    ``until`` is a time of ``time.monotonic`` at which to give up. Each method raises :class:`Lost`
    or :class:`Refused`.
    """

    address: str
    """``host:port``, for messages."""

    def ask_live(self, until: float) -> None:
        """A call without contents."""

    def signature(self, spec: RemoteSpec, until: float) -> Signature:
        """The tensors of the model that serves a part."""

    def build(self, spec: RemoteSpec, until: float) -> str | None:
        """The build that the model's configuration names; ``None`` if the server does not tell."""

    def infer(
        self,
        spec: RemoteSpec,
        tensors: Sequence[WireTensor],
        until: float,
        headers: Mapping[str, str],
    ) -> Exchange:
        """Run a part; the headers go with the request."""

    def send(self, count: int, until: float) -> None:
        """Send so many bytes that mean nothing, which the server reads and refuses."""

    def close(self) -> None:
        """Close the connection."""


PROBE_MODEL = "hybridc-probe"
"""A model that no server has: what is sent to it is read, and refused."""


def token_header(settings: RemoteSettings) -> tuple[tuple[str, str], ...]:
    """The header that carries the token; none without a token."""
    if settings.token is None:
        return ()
    prefix = "Bearer " if settings.header.lower() == "authorization" else ""
    return ((settings.header.lower(), prefix + settings.token),)
