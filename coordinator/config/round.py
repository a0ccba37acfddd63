"""What is trained, for how long, and where its state lives."""

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
"""Empty for none."""


class RoundSection(Section):
    """What is trained, for how long, and where its state lives."""

    mode: ModeName = Field("echo2", description="echo2, push-pull, sequential or colocated: other defaults")
    directory: Path = Field(Path("round"), description="keys, state, checkpoints and published versions")
    listen: Address = Field("127.0.0.1:8700", description="address of the HTTP API and the leaderboard")
    tls_listen: AddressOrNone = Field("", description="address of the same over HTTPS; empty for none")
    tls_certificate: Path = Field(Path("tls.crt"), description="PEM file of the certificate and its chain")
    tls_key: Path = Field(Path("tls.key"), description="PEM file of its private key")
    public_url: str = Field("", description="how nodes reach it, if not by the listen address")
    connections_per_address: int = Field(
        256, ge=0, description="HTTP connections from one address that is not this machine's; 0 for any number"
    )
    listeners_per_address: int = Field(
        16, ge=0, description="streams of /v1/events to one such address; 0 for any number"
    )
    seeder: Address = Field("127.0.0.1:8701", description="address on which the seeder serves chunks over libp2p")
    seeder_public: AddressOrNone = Field(
        "", description="host:port at which nodes reach the seeder, if not as it listens"
    )
    seed: int = Field(0, ge=0, description="decides the embedded model, the prompts and their order")
    max_updates: int = Field(1000, ge=1, description="learner updates until the round is finished")


class ModelSection(Section):
    """Which policy the round starts from."""

    path: str = Field(
        "embedded", description="a folder in hub format, hf://owner/name, or 'embedded' for the tiny built-in one"
    )
    revision: str = Field("", description="branch, tag or commit on the hub; its main branch if there is none")


class StoreSection(Section):
    """Where the round's state lives."""

    url: str = Field("", pattern=STORE, description="postgresql://user@host/name; empty is SQLite in round.directory")
