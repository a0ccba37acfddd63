"""Settings of the round: its mode, folder, addresses and length."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from coordinator.config.modes import ModeName
from coordinator.config.section import Section
from protocol.errors import ConfigInvalid
from protocol.people.addresses import host_and_port

STORE = r"^$|^postgresql(\+psycopg)?://"


def _is_address(said: str) -> str:
    try:
        host_and_port(said)
    except ConfigInvalid as error:
        raise ValueError(f"{error.message} {error.hint}".removesuffix(".")) from None
    return said


Address = Annotated[str, AfterValidator(_is_address)]
AddressOrNone = Annotated[str, AfterValidator(lambda said: said and _is_address(said))]
"""An address, or an empty string for none."""


class RoundSection(Section):
    """The round: its mode, folder, addresses and length."""

    mode: ModeName = Field("echo2", description="set of defaults: echo2, push-pull, sequential or colocated")
    directory: Path = Field(
        Path("round"), description="folder of the round: keys, state, checkpoints and published versions"
    )
    listen: Address = Field("127.0.0.1:8700", description="address of the HTTP API and the leaderboard")
    tls_listen: AddressOrNone = Field(
        "", description="address of the API and the leaderboard over HTTPS; empty: no HTTPS"
    )
    tls_certificate: Path = Field(Path("tls.crt"), description="PEM file of the certificate and its chain")
    tls_key: Path = Field(Path("tls.key"), description="PEM file of its private key")
    public_url: str = Field("", description="URL at which nodes reach the coordinator; empty: the listen address")
    agent_wheel: str = Field(
        "", description="wheel of echo-swarm that this coordinator's /install.sh installs; empty: the newest release"
    )
    connections_per_address: int = Field(
        256, ge=0, description="maximum HTTP connections from one remote address; 0: no limit"
    )
    listeners_per_address: int = Field(
        16, ge=0, description="maximum /v1/events streams to one remote address; 0: no limit"
    )
    seeder: Address = Field("127.0.0.1:8701", description="address on which the seeder serves chunks over libp2p")
    seeder_public: AddressOrNone = Field(
        "", description="host:port at which nodes reach the seeder; empty: its listen address"
    )
    seed: int = Field(0, ge=0, description="random seed for the embedded model and for the prompts and their order")
    max_updates: int = Field(1000, ge=1, description="learner updates until the round is finished")

    def join_string(self, round_id: str) -> str:
        """Return what volunteers join with: the URL of the coordinator and the fingerprint of the round."""
        url = self.public_url or (f"https://{self.tls_listen}" if self.tls_listen else f"http://{self.listen}")
        return f"{url}#{round_id}"


class ModelSection(Section):
    """The initial policy of the round."""

    path: str = Field(
        "embedded", description="model folder in hub format, hf://owner/name, or 'embedded' (a tiny built-in model)"
    )
    revision: str = Field("", description="branch, tag or commit on the hub; empty: the main branch")


class StoreSection(Section):
    """The database of the round."""

    url: str = Field(
        "", pattern=STORE, description="database: postgresql://user@host/name; empty: SQLite in round.directory"
    )
