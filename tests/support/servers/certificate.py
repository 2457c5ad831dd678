"""A certificate for localhost, signed by its own key."""

import shutil
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Certificate:
    """The PEM files of a certificate and of its key."""

    path: Path
    key: Path

    def server_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.path, self.key)
        return context


def self_signed(folder: Path) -> Certificate:
    """Make one in a folder. Skips the test if openssl is not installed."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    words += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-days", "2"]
    subprocess.run([*words, "-keyout", "key.pem", "-out", "cert.pem"], cwd=folder, check=True, capture_output=True)
    return Certificate(folder / "cert.pem", folder / "key.pem")
