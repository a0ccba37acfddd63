"""Settings of the round: its mode, folder, addresses and length, its model and store, its publications and messages.

Each mode changes the defaults of a few settings, which the file may still override:

| mode | what happens |
|---|---|
| `echo2` | nodes sample while the learner trains and versions spread; admission keeps groups from becoming too old |
| `push-pull` | Echo's replay buffer: nodes sample without pause, the learner trains on what is there, S filters |
| `sequential` | Echo's pull: all nodes have the newest version before they sample; no steps overlap |
| `colocated` | central training: one local node on the learner's device, in turns with it, and no other nodes |
"""

import re
from collections.abc import Mapping
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, StringConstraints, field_validator, model_validator

from coordinator.config.section import Section
from protocol import limits
from protocol.errors import ConfigInvalid
from protocol.people.addresses import host_and_port
from protocol.policy.description import Fact, Passage, RoundDescription, Title
from protocol.policy.origin import OriginUrl
from protocol.text.money import DEFAULT_DECIMALS, DEFAULT_NAME, MICRO_DECIMALS, Unit, checked_name

HUB = "hf://"
"""The prefix of a `model.path` that names a model of the hub."""

ModeName = Literal["echo2", "push-pull", "sequential", "colocated"]

IN_TURNS = {"max_updates": 0, "publish_every": 1}
"""S = 0: a batch is sampled from the newest version, then trained on, then published, one step at a time."""

UNAUDITED = {"first_groups": 0, "floor": 0.0, "trusted_floor": 0.0, "max_owner_share": 1.0}
"""Settings without audits, for a local node."""

PRESETS: dict[ModeName, dict[str, dict[str, Any]]] = {
    "echo2": {},
    "push-pull": {"staleness": {"admission": "buffer"}},
    "sequential": {"staleness": IN_TURNS},
    "colocated": {
        "staleness": IN_TURNS,
        "fleet": {"local_nodes": 1, "strangers": False},
        "audit": UNAUDITED,
    },
}


def with_mode(table: Any) -> Any:
    """Return the operator's table on top of its mode's defaults; a value that is no table is left to the checks."""
    place = table.get("round", {}) if isinstance(table, Mapping) else None
    mode = place.get("mode") if isinstance(place, Mapping) else None
    if mode not in get_args(ModeName):
        return table
    merged = dict(table)
    for section, defaults in PRESETS[cast(ModeName, mode)].items():
        keys = table.get(section, {})
        if isinstance(keys, Mapping):
            merged[section] = {**defaults, **keys}
    return merged


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


def _is_url(said: str) -> str:
    if not re.match(r"https?://[^/\s]", said, re.IGNORECASE):
        raise ValueError(f"'{said}' is not a URL. For example https://swarm.example.org")
    return said


UrlOrNone = Annotated[str, AfterValidator(lambda said: said and _is_url(said))]
"""An address on the web, or an empty string for none."""


def _is_network(said: str) -> str:
    try:
        return str(ip_network(said))
    except ValueError as error:
        raise ValueError(f"{error}; write an address such as 10.0.0.5, or a network such as 10.0.0.0/24") from None


NetworkText = Annotated[str, AfterValidator(_is_network)]

HostName = Annotated[str, StringConstraints(to_lower=True, pattern=r"^[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?$")]

UnitName = Annotated[str, AfterValidator(checked_name)]


class RoundSection(Section):
    """The round: its mode, folder, addresses and length."""

    mode: ModeName = Field("echo2", description="set of defaults: echo2, push-pull, sequential or colocated")
    title: Title = Field("", description="title of the round on its pages and for volunteers; signed")
    description: Passage = Field("", description="what is trained, in a sentence or two; signed")
    purpose: Passage = Field("", description="why it is trained and who will use the result; signed")
    licence: Fact = Field("", description="licence of the trained weights, for example Apache-2.0; signed")
    operator: Fact = Field("", description="name of the person or organisation that runs the round; signed")
    contact: Fact = Field("", description="how to reach the operator: an e-mail address or a URL; signed")
    directory: Path = Field(
        Path("round"), description="folder of the round: keys, state, checkpoints and published versions"
    )
    listen: Address = Field("127.0.0.1:8700", description="address of the HTTP API and the leaderboard")
    tls_listen: AddressOrNone = Field(
        "", description="address of the API and the leaderboard over HTTPS; empty: no HTTPS"
    )
    tls_certificate: Path = Field(Path("tls.crt"), description="PEM file of the certificate and its chain")
    tls_key: Path = Field(Path("tls.key"), description="PEM file of its private key")
    public_url: UrlOrNone = Field("", description="URL at which nodes reach the coordinator; empty: the listen address")
    hosts: tuple[HostName, ...] = Field(
        (),
        max_length=64,
        description="more names of a round that is not on the internet, such as one of a company's network; a request "
        "for any other public name is refused, since a page of a stranger may have sent it",
    )
    agent_wheel: str = Field(
        "", description="wheel of echo-swarm that this coordinator's /install.sh installs; empty: the newest release"
    )
    trusted_proxies: tuple[NetworkText, ...] = Field(
        (),
        max_length=64,
        description="addresses or networks of proxies on other machines, whose X-Forwarded-For names the caller; "
        "proxies on this machine are always trusted",
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
    unit: UnitName = Field(
        DEFAULT_NAME,
        description="unit of all amounts, such as EUR or points: letters a to z, or a currency sign; amounts are kept "
        "in its millionths",
    )
    unit_decimals: int = Field(
        DEFAULT_DECIMALS, ge=0, le=MICRO_DECIMALS, description="decimals with which amounts are shown"
    )

    @property
    def money(self) -> Unit:
        """The unit with its decimals."""
        return Unit(self.unit, self.unit_decimals)

    @property
    def proxies(self) -> tuple[IPv4Network | IPv6Network, ...]:
        """The networks of trusted proxies on other machines."""
        return tuple(map(ip_network, self.trusted_proxies))

    def join_string(self, round_id: str) -> str:
        """Return what volunteers join with: the URL of the coordinator and the fingerprint of the round."""
        url = self.public_url or (f"https://{self.tls_listen}" if self.tls_listen else f"http://{self.listen}")
        return f"{url}#{round_id}"

    def describe(self, round_id: str) -> RoundDescription:
        """Return what the operator says about this round."""
        return RoundDescription(
            round_id=round_id,
            title=self.title,
            description=self.description,
            purpose=self.purpose,
            licence=self.licence,
            operator=self.operator,
            contact=self.contact,
        )


class ModelSection(Section):
    """The initial policy of the round."""

    path: str = Field(
        "embedded", description="model folder in hub format, hf://owner/name, or 'embedded' (a tiny built-in model)"
    )
    revision: str = Field("", description="branch, tag or commit on the hub; empty: the main branch")

    @property
    def base_name(self) -> str:
        """The name that published adapters give their base: of a folder not its path, since versions are public."""
        return self.path.removeprefix(HUB) if self.path.startswith(HUB) else Path(self.path).name


class StoreSection(Section):
    """The database of the round."""

    url: str = Field(
        "", pattern=STORE, description="database: postgresql://user@host/name; empty: SQLite in round.directory"
    )
    queries_d: float = Field(
        30.0,
        ge=0,
        description="time that ended queries of the endpoint are kept; 0: for ever. Their claims and proofs stay",
    )


MAIL = r"^[^@\s<>,;]{1,64}@[^@\s<>,;]{1,190}$"


class NotifySection(Section):
    """Messages to the operator: a webhook and mail about alarms and incidents."""

    webhook: str = Field(
        "",
        pattern=r"^$|^https?://[^\s]+$",
        max_length=2000,
        description="URL to which messages are posted as JSON, signed by the key in notify.key; empty: none",
    )
    mail_to: tuple[Annotated[str, Field(pattern=MAIL)], ...] = Field(
        (), max_length=16, description="addresses that get messages by mail; empty: none"
    )
    mail_from: str = Field("", pattern=f"^$|{MAIL}", description="sender of the mail")
    smtp: AddressOrNone = Field("", description="host:port of the mail server, such as smtp.example.org:587")
    smtp_security: Literal["starttls", "tls", "none"] = Field(
        "starttls", description="how the connection to the mail server is protected: starttls, tls or none"
    )
    smtp_user: str = Field(
        "", description="user at the mail server, with the password in SWARM_SMTP_PASSWORD; empty: no login"
    )
    level: Literal["warning", "critical"] = Field("warning", description="least severity of an alarm that is sent")
    hold_s: float = Field(
        120.0, ge=0, description="time for which an alarm must stand, or be over, until a message says so"
    )

    @model_validator(mode="after")
    def _has_what_mail_needs(self) -> "NotifySection":
        if self.mail_to and not (self.mail_from and self.smtp):
            raise ValueError("notify.mail_to needs notify.mail_from and notify.smtp")
        return self

    @property
    def channels(self) -> tuple[str, ...]:
        """The ways in which messages are sent."""
        return tuple(name for name, place in (("webhook", self.webhook), ("mail", self.mail_to)) if place)


UPLOAD = r"^$|^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9_~][A-Za-z0-9._~-]*)*$"
"""The form of an upload address, without characters that a signed address would have to escape."""


class PublishSection(Section):
    """Publication of versions: chunks, patches, kept versions and copies."""

    chunk_size_bytes: int = Field(
        0,
        ge=0,
        le=limits.CHUNK_MAX_BYTES,
        description="size of a chunk; 0: chosen by the size of the version, 64 KiB to 4 MiB",
    )
    patches: bool = Field(True, description="publish patches instead of whole files where they are smaller")
    keep: int = Field(
        0,
        ge=0,
        le=limits.VERSION_MAX,
        description="newest versions kept for `policy rollback`, beside those that rollouts may still use",
    )
    keep_h: float = Field(0.0, ge=0, description="also keep versions younger than this")
    keep_every: int = Field(0, ge=0, le=limits.VERSION_MAX, description="keep every Nth version for ever; 0: none")
    timestamp_lifetime_s: float = Field(
        600.0, gt=0, description="lifetime of a signed timestamp; nodes stop working when it has expired"
    )
    origins: tuple[OriginUrl, ...] = Field(
        (),
        max_length=limits.ORIGINS_MAX,
        description="URLs of copies of public/; nodes try them before the coordinator",
    )
    upload: str = Field(
        "",
        pattern=UPLOAD,
        description="s3://bucket/prefix to which public/ is uploaded; credentials from AWS_* variables",
    )
    upload_patience_s: float = Field(60.0, ge=0, description="maximum time that a new version waits for its upload")

    @field_validator("chunk_size_bytes")
    @classmethod
    def _is_worth_a_frame(cls, size_bytes: int) -> int:
        if 0 < size_bytes < limits.KIB:
            raise ValueError("a chunk has at least 1024 bytes; 0 chooses a size by the version")
        return size_bytes


def host_of_url(url: str) -> str:
    """Return the host of a URL, or of `host:port` without a scheme; empty if there is none."""
    try:
        return urlsplit(url if "//" in url else f"//{url}").hostname or ""
    except ValueError:  # brackets that are not closed
        return ""
