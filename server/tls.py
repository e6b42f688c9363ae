"""TLS of the server, with vLLM's option names."""

from __future__ import annotations

import ssl
from pathlib import Path

from llmc.errors import LlmcError


def tls_context(ssl_keyfile: Path | None, ssl_certfile: Path | None, ssl_ca_certs: Path | None,
                ssl_cert_reqs: int) -> ssl.SSLContext | None:
    """Build the TLS context of the server; None without a certificate.

    Args:
        ssl_keyfile: PEM file; None: the key is in `ssl_certfile`.
        ssl_certfile: PEM file of the server's certificate, then intermediate certificates.
        ssl_ca_certs: PEM file of the authorities of client certificates.
        ssl_cert_reqs: `ssl.VerifyMode` of client certificates: 0 none, 1 optional, 2 required.

    Raises:
        LlmcError: the files are not a certificate and its key, or an option is missing.
    """
    if ssl_certfile is None:
        if ssl_keyfile or ssl_ca_certs or ssl_cert_reqs:
            raise LlmcError("TLS options are given without --ssl_certfile; add it, or leave them "
                            "out")
        return None
    if ssl_cert_reqs and ssl_ca_certs is None:
        raise LlmcError(f"--ssl_cert_reqs {ssl_cert_reqs} requires --ssl_ca_certs; give the "
                        f"authorities of client certificates")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(ssl_certfile, ssl_keyfile, password=lambda: "")
    except OSError as error:  # includes ssl.SSLError
        key = f" and --ssl_keyfile '{ssl_keyfile}'" if ssl_keyfile else ""
        raise LlmcError(f"--ssl_certfile '{ssl_certfile}'{key} cannot be used ({_reason(error)}); "
                        f"give a PEM certificate and its unencrypted key") from error
    if ssl_ca_certs is not None:
        try:
            context.load_verify_locations(ssl_ca_certs)
        except OSError as error:
            raise LlmcError(f"--ssl_ca_certs '{ssl_ca_certs}' cannot be used ({_reason(error)}); "
                            f"give a PEM file of certificates") from error
    context.verify_mode = ssl.VerifyMode(ssl_cert_reqs)
    return context


def _reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
