"""Certificates for tests, and servers that have them."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

import grpc

from tests.remote.conftest import Hybrid
from tests.remote.http_server import HttpServer
from tests.remote.server import Server


def make_certificates(folder: Path) -> None:
    """An authority with a certificate for the server and one for the client, and a stranger."""
    for name in ("authority", "stranger"):
        openssl(folder, f"req -x509 {NEW_KEY} -keyout {name}.key -out {name}.pem -subj /CN={name}")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    for name in ("server", "client"):
        openssl(folder, f"req {NEW_KEY} -keyout {name}.key -out {name}.csr -subj /CN={name}")
        signer = "-CA authority.pem -CAkey authority.key -CAcreateserial"
        openssl(folder, f"x509 -req -in {name}.csr {signer} -out {name}.pem -extfile names -days 9")


NEW_KEY = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"


def openssl(folder: Path, arguments: str) -> None:
    command = ["openssl", *arguments.split()]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


def credentials(folder: Path, mutual: bool) -> grpc.ServerCredentials:
    pair = ((folder / "server.key").read_bytes(), (folder / "server.pem").read_bytes())
    roots = (folder / "authority.pem").read_bytes() if mutual else None
    return grpc.ssl_server_credentials([pair], roots, mutual)


def secure(kind: type, hybrid: Hybrid, certificates: Path, mutual: bool):
    if kind is HttpServer:
        return HttpServer(hybrid.repository, tls=tls_context(certificates, mutual))
    return Server(hybrid.repository, credentials=credentials(certificates, mutual))


def tls_context(folder: Path, mutual: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    if mutual:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(folder / "authority.pem")
    return context
