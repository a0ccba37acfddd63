"""A directory: a static JSON file with the listings of many rounds, signed by the curator who made it.

    {"signed": {Directory}, "signature": "…", "signer": "<node id of the curator's key>",
     "witnesses": {"<node id of a witness's key>": "<signature>"}}

1. The file is not larger than `DIRECTORY_MAX_BYTES`, and is an object of JSON.
2. The signer is the key that the reader chose, and has signed it under the domain `directory`.
3. The form; no round stands in it twice.
4. It has not expired. A reader also remembers the highest number that it has seen of each signer, and takes no lower
   one: so a mirror with an old file is noticed.
5. Each listing is checked by itself (`ledger.listing`). One that fails is refused and named; the others count.

- Whoever hosts the file is not trusted. The curator is trusted for the choice of rounds and for the sightings; amounts
  are proved by each round's log.
- A **sighting** is what the curator saw of a round's log at a time by the curator's clock, after verifying all of it:
  the curator is a witness. A round cannot move a payment to another time across a sighting.
- A curator also lists the rounds that it refuses, with the reason.
- A **witness** of a directory signs the file of each number once, and no lower number afterwards, under the domain
  `witnessed`. So a curator cannot show other rounds to readers who ask for the witness than to everybody else.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field

from ledger.listing import CLOCKS_DIFFER_MS, Micros, Milliseconds, OpenListing, Size, contradiction, open_listing
from protocol import limits
from protocol.errors import MalformedMessage, MetadataExpired, NotWitnessed, ProofInvalid, SwarmError, UntrustedMetadata
from protocol.ids import Hex64, NodeId
from protocol.limits import DAY_MS
from protocol.people.names import skeleton
from protocol.policy.description import Fact, Passage, Title, require_visible_line
from protocol.text.plain import visible
from protocol.wire.message import Message
from protocol.wire.signing import NodeKey, check_signed, read_object, sign_json

KIND: Final = "echo-swarm/directory"

DIRECTORY_MAX_BYTES = 8 * limits.MIB
"""The size of a directory: a thousand rounds whose keys were never replaced, with their sightings."""

ROUNDS_MAX = 1_000

SIGHTINGS_MAX = 40
"""Sightings of a round: one a day for the last 30 days, and some spare."""

LISTING_MAX_BYTES = 256 * limits.KIB
"""The size of one listing: eighty root documents, or the checkpoints of all witnesses."""

LIFETIME_MAX_MS = 31 * DAY_MS


class Sighting(Message):
    """The log of a round as a curator saw and verified it at a time."""

    ms: Milliseconds
    size: Size
    root: Hex64
    paid_micros: Micros


class ListedRound(Message):
    """A listing as it was read, and the sightings of its round, the oldest first."""

    listing: dict[str, Any]
    sightings: Annotated[tuple[Sighting, ...], Field(max_length=SIGHTINGS_MAX)]


class RefusedRound(Message):
    """A round that a curator or this reader refuses."""

    round_id: Hex64
    title: Title
    reason: Passage
    ms: Milliseconds


class Directory(Message):
    """The signed part of a directory."""

    kind: Literal["echo-swarm/directory"] = KIND
    name: Annotated[Fact, Field(min_length=1), AfterValidator(require_visible_line)]
    number: int = Field(ge=1, le=limits.VERSION_MAX)
    made_ms: Milliseconds
    expires_ms: Milliseconds
    rounds: Annotated[tuple[ListedRound, ...], Field(max_length=ROUNDS_MAX)]
    refused: Annotated[tuple[RefusedRound, ...], Field(max_length=ROUNDS_MAX)]


@dataclass(frozen=True)
class KnownRound:
    """A round of a directory whose listing is checked."""

    listing: OpenListing
    sightings: tuple[Sighting, ...] = ()


@dataclass(frozen=True)
class OpenDirectory:
    """A directory whose signature and listings are checked."""

    signer: NodeId
    directory: Directory
    rounds: tuple[KnownRound, ...]
    refused: tuple[RefusedRound, ...]
    """Rounds that the curator refuses, or whose signed listing contradicts what the curator saw."""
    invalid: tuple[RefusedRound, ...]
    """Entries that no round has signed, or of a form that this reader does not know. They say nothing about a round."""


def open_directory(data: bytes, signer: NodeId, *, now_ms: int) -> OpenDirectory:
    """Check a directory of the given signer (1 to 5)."""
    document = read_object(data, DIRECTORY_MAX_BYTES)  # (1)
    if document.get("signer") != signer:
        raise UntrustedMetadata(
            f"This directory is of another curator than {signer}.",
            hint="Check the address after its #, and compare it with the one that the curator publishes.",
        )
    signed = check_signed("directory", document, signer)  # (2)
    directory = _directory(signed)  # (3)
    _require_fresh(directory, now_ms)  # (4)
    rounds: list[KnownRound] = []
    refused, invalid = list(directory.refused), list[RefusedRound]()
    seen: set[str] = set()
    for entry in directory.rounds:
        try:
            known = KnownRound(open_listing(entry.listing), entry.sightings)  # (5)
            known.listing.require_made_by(now_ms)
        except SwarmError as error:
            invalid.append(refusal(entry.listing, error, now_ms))
            continue
        if known.listing.round_id in seen:
            raise MalformedMessage(f"{known.listing.name} stands in the directory twice.")
        seen.add(known.listing.round_id)
        try:
            require_possible(known)
            rounds.append(known)
        except ProofInvalid as error:
            refused.append(refusal(entry.listing, error, now_ms))
    return OpenDirectory(signer, directory, tuple(rounds), tuple(refused), tuple(invalid))


def make_directory(directory: Directory, key: NodeKey) -> dict[str, Any]:
    """Return the signed document of a directory."""
    value: dict[str, Any] = directory.model_dump(mode="json")
    return sign_json("directory", value, key) | {"signer": key.node_id}


def add_witness(data: bytes, key: NodeKey) -> dict[str, Any]:
    """Return the document of a directory with the signature of a witness."""
    document = read_object(data, DIRECTORY_MAX_BYTES)
    signature = sign_json("witnessed", _witnessed(document), key)["signature"]
    return document | {"witnesses": _witnesses(document) | {key.node_id: signature}}


def require_witnessed(data: bytes, witnesses: Iterable[NodeId]) -> None:
    """Raise `NotWitnessed` if one of the witnesses has not signed a directory, whose own signature is checked."""
    document = read_object(data, DIRECTORY_MAX_BYTES)
    for witness in witnesses:
        signature = _witnesses(document).get(witness)
        if signature is None:
            raise NotWitnessed(
                f"The witness {witness} has not signed this directory.",
                hint="Use a mirror with the witness's signature, or ask the curator and the witness why it is missing.",
            )
        check_signed("witnessed", {"signed": _witnessed(document), "signature": signature}, witness)


def require_one_view(kept: bytes, data: bytes) -> None:
    """Raise `ProofInvalid` if a curator has signed two different directories with one number."""
    first, second = (read_object(each, DIRECTORY_MAX_BYTES)["signed"] for each in (kept, data))
    if first["number"] == second["number"] and first != second:
        raise ProofInvalid(
            f"The curator of {second['name']} has signed two different directories with number {second['number']}.",
            hint="It shows different readers different rounds. Both files prove it; ask the curator.",
        )


def _witnessed(document: Mapping[str, Any]) -> dict[str, Any]:
    return {"curator": document.get("signer"), "directory": document.get("signed")}


def _witnesses(document: Mapping[str, Any]) -> dict[str, Any]:
    signatures = document.get("witnesses")
    return signatures if isinstance(signatures, dict) else {}


def _directory(signed: dict[str, Any]) -> Directory:
    """Return the directory of its checked value. Listings stay as they are: lists, and fields of a later form."""
    rounds = signed.get("rounds")
    listings = [entry.get("listing") for entry in rounds if isinstance(entry, dict)] if isinstance(rounds, list) else []
    directory = Directory.from_value(signed)
    kept = tuple(
        entry.model_copy(update={"listing": listing}) for entry, listing in zip(directory.rounds, listings, strict=True)
    )
    return directory.model_copy(update={"rounds": kept})


def _require_fresh(directory: Directory, now_ms: int) -> None:
    if not directory.made_ms < directory.expires_ms <= directory.made_ms + LIFETIME_MAX_MS:
        raise MalformedMessage(f"The directory {directory.name} is valid for more than 31 days, or for none.")
    if directory.made_ms > now_ms + CLOCKS_DIFFER_MS:
        raise MetadataExpired(
            f"The directory {directory.name} was made in the future.", hint="Check this machine's clock."
        )
    if directory.expires_ms <= now_ms:
        raise MetadataExpired(
            f"The directory {directory.name} has expired.",
            hint="Another mirror may have a newer one; otherwise ask its curator, and check this machine's clock.",
        )


def require_possible(known: KnownRound) -> None:
    """Raise `ProofInvalid` if a listing contradicts what the curator saw of the log before."""
    said, listing = known.listing, known.listing.listing
    for sighting in known.sightings:
        if not said.still_has(sighting.size):
            continue
        if sighting.size == said.checkpoint.size and sighting.root != said.checkpoint.root.hex():
            raise ProofInvalid(f"{said.name} has shown its curator another log of {sighting.size} entries.")
        for payment in listing.payments:
            was_there = payment.size <= sighting.size
            if was_there and payment.paid_micros > sighting.paid_micros:
                raise ProofInvalid(f"{said.name} says that it had paid more than its curator saw in the log then.")
            if was_there and payment.ms > sighting.ms + CLOCKS_DIFFER_MS:
                raise ProofInvalid(f"{said.name} gives a payment a later time than that at which its curator saw it.")
            if not was_there and payment.ms < sighting.ms - CLOCKS_DIFFER_MS:
                raise ProofInvalid(f"{said.name} gives a payment a time at which its log did not have it yet.")


def refusal(listing: Mapping[str, Any], error: SwarmError, now_ms: int) -> RefusedRound:
    """Return the refusal of a round, named as far as its wrong listing says; the texts are made visible."""
    signed = listing.get("signed")
    about = signed.get("description") if isinstance(signed, dict) else None
    said = about if isinstance(about, dict) else {}
    title, round_id = str(said.get("title", "")), str(said.get("round_id", ""))
    is_id = len(round_id) == 64 and set(round_id) <= set("0123456789abcdef")
    return RefusedRound(
        round_id=round_id if is_id else "0" * 64,
        title=visible(title, limits.ROUND_TITLE_MAX_CHARS),
        reason=visible(error.message, limits.ROUND_TEXT_MAX_CHARS),
        ms=now_ms,
    )


def merge(rounds: Sequence[KnownRound]) -> tuple[list[KnownRound], list[tuple[KnownRound, ProofInvalid]]]:
    """Return one entry for each round, the newest, and those that contradict another with the reason.

    A listing under newer roots is newer whatever its time says: a replaced key may be stolen.
    """
    newest: dict[str, KnownRound] = {}
    wrong: dict[str, tuple[KnownRound, ProofInvalid]] = {}
    for known in sorted(rounds, key=lambda known: (known.listing.root_version, known.listing.listing.made_ms)):
        round_id = known.listing.round_id
        before = newest.get(round_id)
        if before and (error := contradiction(before.listing, known.listing)):
            wrong[round_id] = (known, error)
        sightings = known.sightings or (before.sightings if before else ())
        newest[round_id] = KnownRound(known.listing, sightings)
    return [known for round_id, known in newest.items() if round_id not in wrong], list(wrong.values())


def look_alikes(rounds: Sequence[OpenListing]) -> list[list[OpenListing]]:
    """Return the groups of different rounds whose titles a reader would confuse."""
    groups: dict[str, list[OpenListing]] = {}
    for listing in rounds:
        groups.setdefault(skeleton(listing.title), []).append(listing)
    return [group for group in groups.values() if len(group) > 1]


def thinned(sightings: Sequence[Sighting], newest: Sighting) -> tuple[Sighting, ...]:
    """Return the sightings to keep: the newest, and of each earlier day the last, as many as fit."""
    by_day = {sighting.ms // DAY_MS: sighting for sighting in sightings}
    by_day[newest.ms // DAY_MS] = newest
    return tuple(by_day[day] for day in sorted(by_day))[-SIGHTINGS_MAX:]
