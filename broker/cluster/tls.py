"""TLS between the processes of a namespace: both sides show a certificate of the namespace's own authority."""

import ssl
from pathlib import Path

from broker.settings.cluster import Cluster
from broker.settings.config import ConfigurationError


def server_context(cluster: Cluster) -> ssl.SSLContext | None:
    """Make the context of a worker's listener; None without certificates. Raises ConfigurationError."""
    return _context(ssl.PROTOCOL_TLS_SERVER, cluster)


def client_context(cluster: Cluster) -> ssl.SSLContext | None:
    """Make the context for connections to workers, whose certificates must have the host's name.

    Returns None without certificates. Raises ConfigurationError.
    """
    return _context(ssl.PROTOCOL_TLS_CLIENT, cluster)


def _context(protocol: int, cluster: Cluster) -> ssl.SSLContext | None:
    certificate, key, ca = cluster.certificate, cluster.key, cluster.ca
    if certificate is None or key is None or ca is None:
        return None
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(
            f"cluster.certificate {certificate} with cluster.key {key} cannot be used: {error}. "
            "Both must be readable PEM files that belong together"
        ) from error
    _load_authority(context, ca)
    return context


def _load_authority(context: ssl.SSLContext, ca: Path) -> None:
    try:
        context.load_verify_locations(ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(f"cluster.ca {ca} cannot be used: {error}") from error
