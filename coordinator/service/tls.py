"""HTTPS with the operator's own certificate, beside the plain address that the round's own programs use.

- A renewed certificate is taken up within the hour, without a restart; a broken one leaves the old one in use.
- Trust in weights and books does not rest on it: those are signed. It keeps what nodes ask for to themselves.
"""

import logging
import ssl

from coordinator.config import Config
from protocol.errors import ConfigInvalid

log = logging.getLogger(__name__)

RELOAD_S = 3600.0


def context(config: Config) -> ssl.SSLContext | None:
    """What to serve HTTPS with; None if the operator asked for none."""
    place = config.round
    if not place.tls_listen:
        return None
    made = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    _load(made, config)
    return made


async def reload(made: ssl.SSLContext, config: Config) -> None:
    """Take up what the files hold now; connections that are open keep what they have."""
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
            f"No HTTPS with {certificate} and {key}: {error}.",
            hint="round.tls_certificate is the chain in PEM, round.tls_key its private key without a passphrase.",
        ) from error
