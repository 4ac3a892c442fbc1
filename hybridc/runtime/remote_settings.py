"""Where the other end of a hybrid bundle is, and how to talk to it.

Settings come from ``hybridc.load(path, remote=...)``, or from the environment where that is not
given:

    HYBRIDC_REMOTE              host:port, or several with commas between, tried in their order
    HYBRIDC_REMOTE_CA           file with the certificates that may sign the server's; turns TLS on
    HYBRIDC_REMOTE_CERTIFICATE  file with this end's certificate, for mutual TLS
    HYBRIDC_REMOTE_KEY          file with its key
    HYBRIDC_REMOTE_TOKEN        token that is sent with every request
    HYBRIDC_REMOTE_TOKEN_FILE   file to read it from
    HYBRIDC_REMOTE_HEADER       header that the token is sent in
    HYBRIDC_REMOTE_DEADLINE     seconds within which a call ends
    HYBRIDC_REMOTE_COMPRESSION  deflate: tensors are compressed, over HTTP
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hybridc.errors import UsageError

_ENDPOINT = re.compile(r"((grpc|http)s?://)?(?P<host>\[[\da-fA-F:.]+\]|[\w.-]+):(?P<port>\d{1,5})")
_LOOPBACK = re.compile(r"localhost|127\.[\d.]+|\[::1\]")


@dataclass(frozen=True)
class RemoteSettings:
    """The other end.

    Attributes:
        endpoints: Each ``host:port``, or ``grpcs://host:port`` for TLS; ``http://`` and
            ``https://`` speak HTTP instead of gRPC. The first that works is used, and the next
            where it fails.
        ca: File with the certificates that may sign the server's, as PEM; turns TLS on where an
            endpoint names no protocol. TLS without it trusts those that gRPC brings, or those of
            this machine over HTTP.
        certificate: File with this end's certificate, for mutual TLS.
        key: File with its key.
        token: Token that is sent with every request.
        header: Header that it is sent in; ``authorization`` carries ``Bearer`` before it.
        deadline: Seconds within which a call ends.
        attempts: How often a request is sent at most, over all endpoints.
        plan: Name of the only plan to run; without it the loader chooses.
        probe_seconds: Least time between two looks at the link; a quarter of it, if what a call
            took makes one doubt what is known.
        probe_bytes: What such a look sends at first; 0 measures the round trip alone.
        compression: Whether requests and replies are compressed without loss; over HTTP only,
            since gRPC does not tell how many bytes went.
    """

    endpoints: tuple[str, ...]
    ca: str | None = None
    certificate: str | None = None
    key: str | None = None
    token: str | None = None
    header: str = "authorization"
    deadline: float = 10.0
    attempts: int = 3
    plan: str | None = None
    probe_seconds: float = 1.0
    probe_bytes: int = 32768
    compression: bool = False

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise UsageError("remote names no endpoint; write it as in host:8001")
        for endpoint in self.endpoints:
            match = _ENDPOINT.fullmatch(endpoint)
            if match is None or not 0 < int(match["port"]) < 65536:
                raise UsageError(f"remote endpoint {endpoint!r} is not of the form host:port")
            if (
                self.token
                and not self.is_secure(endpoint)
                and not _LOOPBACK.fullmatch(match["host"])
            ):
                protocol = "https" if self.is_http(endpoint) else "grpcs"
                place = endpoint.partition("://")[2] or endpoint
                raise UsageError(
                    f"a token is not sent to {endpoint} in the clear; write {protocol}://{place}"
                )
        if (self.certificate is None) != (self.key is None):
            raise UsageError("mutual TLS needs both a certificate and a key")
        if not 0 < self.deadline < float("inf"):
            raise UsageError(f"deadline is {self.deadline} and must be above 0 seconds")
        if self.attempts < 1 or self.probe_bytes < 0 or self.probe_seconds < 0:
            raise UsageError("attempts must be at least 1, and probes not below 0")
        if self.compression and not all(map(self.is_http, self.endpoints)):
            raise UsageError("compression needs endpoints as in http://host:8000")

    def is_http(self, endpoint: str) -> bool:
        """Whether an endpoint speaks HTTP rather than gRPC."""
        return endpoint.startswith(("http://", "https://"))

    def is_secure(self, endpoint: str) -> bool:
        """Whether TLS is used for an endpoint."""
        protocol, named, _ = endpoint.partition("://")
        return protocol.endswith("s") if named else (self.ca or self.certificate) is not None

    def __repr__(self) -> str:
        return f"RemoteSettings({', '.join(self.endpoints)})"  # not the token


def read_settings(remote: str | RemoteSettings | None) -> RemoteSettings | None:
    """Settings as given to ``hybridc.load``: those of the environment add what a text leaves out.

    Raises:
        UsageError: They cannot be read, or do not fit together.
    """
    if isinstance(remote, RemoteSettings):
        return remote
    return settings_from(os.environ, remote)


def settings_from(values: Mapping[str, str], remote: str | None = None) -> RemoteSettings | None:
    """Settings out of environment variables; ``None`` if no endpoint is given.

    Args:
        values: The variables.
        remote: Endpoints that take the place of ``HYBRIDC_REMOTE``.

    Raises:
        UsageError: They cannot be read, or do not fit together.
    """
    text = values.get("HYBRIDC_REMOTE", "") if remote is None else remote
    endpoints = tuple(part.strip() for part in text.split(",") if part.strip())
    if not endpoints and remote is None:
        return None
    path = values.get("HYBRIDC_REMOTE_TOKEN_FILE")
    token = read_file(path).decode().strip() if path else values.get("HYBRIDC_REMOTE_TOKEN")
    deadline = values.get("HYBRIDC_REMOTE_DEADLINE", "10")
    try:
        seconds = float(deadline)
    except ValueError as error:
        raise UsageError(f"HYBRIDC_REMOTE_DEADLINE is {deadline!r} and must be seconds") from error
    compression = values.get("HYBRIDC_REMOTE_COMPRESSION", "none")
    if compression not in ("none", "deflate"):
        raise UsageError(f"HYBRIDC_REMOTE_COMPRESSION is {compression!r} and must be deflate")
    return RemoteSettings(
        endpoints,
        values.get("HYBRIDC_REMOTE_CA"),
        values.get("HYBRIDC_REMOTE_CERTIFICATE"),
        values.get("HYBRIDC_REMOTE_KEY"),
        token,
        values.get("HYBRIDC_REMOTE_HEADER", "authorization"),
        seconds,
        compression=compression == "deflate",
    )


def read_file(path: str) -> bytes:
    """Bytes of a file with a certificate, a key or a token.

    Raises:
        UsageError: It cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
