"""HTTPS with the operator's own certificate, in addition to the plain address for the round's own programs.

- A renewed certificate is loaded within the hour, without a restart; with a broken one, the old one stays in use.
- Trust in weights and ledger does not depend on it: those are signed. It keeps the requests of nodes private.
"""

import logging
import ssl

from coordinator.config import Config
from protocol.errors import ConfigInvalid

log = logging.getLogger(__name__)

RELOAD_S = 3600.0


def context(config: Config) -> ssl.SSLContext | None:
    """Return the TLS context for HTTPS; None if `round.tls_listen` is not set."""
    place = config.round
    if not place.tls_listen:
        return None
    made = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    _load(made, config)
    return made


async def reload(made: ssl.SSLContext, config: Config) -> None:
    """Load the certificate files again; open connections keep the old certificate."""
    try:
        _load(made, config)
    except ConfigInvalid as error:
        log.warning("cannot load the new certificate; keeping the old one: %s", error)


def _load(made: ssl.SSLContext, config: Config) -> None:
    certificate, key = config.round.tls_certificate, config.round.tls_key
    try:
        made.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigInvalid(
            f"Cannot serve HTTPS with {certificate} and {key}: {error}.",
            hint="round.tls_certificate must be the chain in PEM, round.tls_key its private key without a passphrase.",
        ) from error
