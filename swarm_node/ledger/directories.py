"""The directories of rounds that a home knows: where they lie, their newest copies, and the rounds that it refuses.

    directories.json          {"places": ["https://rounds.example.org/rounds.json#<node id>", …], "refused": [{…}, …],
                               "witnesses": ["<node id>", …]}
    directories/<node id>.json  the newest file of a curator that was seen
    directories/<node id>-other.json  another file with the same number: proof of a split view

- A place is a URL or a path, and after the # the curator's key: any mirror of the same curator is as good as another.
- The newest copy is kept. A mirror with a lower number is named, and the copy counts instead until it expires; so an
  old file is never taken for the newest.
- Every witness that the owner names must have signed a directory, the kept copy, too. A kept copy that they have not
  signed is not used, but newer files are compared with it: what was seen stays seen.
- A round whose log contradicts its listing is refused from then on, whatever directories say. Its listing, which
  proves the lie together with the log, is kept beside: `directories/refused-<round id>.json`.
"""

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import trio

from ledger.directory import (
    DIRECTORY_MAX_BYTES,
    LISTING_MAX_BYTES,
    KnownRound,
    OpenDirectory,
    RefusedRound,
    merge,
    open_directory,
    refusal,
    require_one_view,
    require_witnessed,
)
from ledger.listing import OpenListing, open_listing
from protocol import ids
from protocol.errors import (
    ConfigInvalid,
    NotFound,
    ProofInvalid,
    RolledBack,
    SwarmError,
    Unreachable,
    UntrustedMetadata,
    named,
)
from protocol.ids import NodeId
from protocol.wire.signing import read_object
from swarm_node.base.disk import disk_named, hold_lock, write_durably
from swarm_node.coordinator_api.join_string import JoinString, is_in_own_network, is_public, resolve
from swarm_node.coordinator_api.origin import Patience, open_origin

FILE, FOLDER = "directories.json", "directories"

PLACES_MAX = 16
REFUSED_MAX = 1_000

PATIENCE = Patience(silence_s=10.0, grace_s=10.0)


class DirectoryPlace(NamedTuple):
    """A place of a directory, and the key of its curator."""

    where: str
    signer: NodeId

    def __str__(self) -> str:
        return f"{self.where}#{self.signer}"


@dataclass
class FoundRounds:
    """The rounds of all directories that could be read."""

    rounds: list[KnownRound] = field(default_factory=list)
    refused: list[RefusedRound] = field(default_factory=list)
    """Each round once; this home's own refusals first."""
    problems: list[str] = field(default_factory=list)
    """Places that could not be used, and entries that are wrong."""


def parse_place(text: str) -> DirectoryPlace:
    """Parse `URL#KEY` or `FILE#KEY`."""
    where, mark, signer = text.strip().rpartition("#")
    try:
        ids.public_key(NodeId(signer))
    except SwarmError:
        mark = ""
    if not mark or not where:
        raise ConfigInvalid(
            f"{text[:80]!r} does not name the key of the directory's curator.",
            hint="Write --directory 'URL#KEY', as the curator publishes it; the key makes every mirror as good.",
        )
    if "://" not in where:
        where = str(Path(where).absolute())  # it is remembered for commands that run in another folder
    return DirectoryPlace(where, NodeId(signer))


def parse_witness(text: str) -> NodeId:
    """Parse the key of a witness of directories."""
    try:
        ids.public_key(NodeId(text))
    except SwarmError:
        raise ConfigInvalid(
            f"{text[:80]!r} is not the key of a witness.", hint="`swarm-node directory witness` prints it: 12D3KooW…"
        ) from None
    return NodeId(text)


class Directories:
    """The directories that a home knows, and the rounds that it refuses."""

    def __init__(self, home: Path) -> None:
        self._home, self._path, self._folder = home, home / FILE, home / FOLDER
        self.places: list[DirectoryPlace] = []
        self.refused: dict[str, RefusedRound] = {}
        self.witnesses: list[NodeId] = []
        with disk_named(home), suppress(FileNotFoundError):
            self._read_kept(self._path.read_bytes())

    def _read_kept(self, content: bytes) -> None:
        try:
            kept = json.loads(content)
            self.places = list(map(parse_place, kept["places"]))
            self.witnesses = [parse_witness(text) for text in kept.get("witnesses", [])]
            refused = map(RefusedRound.from_value, kept["refused"])
            self.refused = {wrong.round_id: wrong for wrong in refused}
        except (ValueError, LookupError, TypeError, SwarmError) as error:
            raise ConfigInvalid(
                f"{self._path} cannot be read ({error}).", hint="Move it away, and give --directory again."
            ) from None

    def remember(self, places: Iterable[DirectoryPlace]) -> None:
        """Add places for the next time, the newest first."""
        self.places = list(dict.fromkeys([*places, *self.places]))[:PLACES_MAX]
        self._save()

    def require_witnesses(self, witnesses: Iterable[NodeId]) -> None:
        """Require the signatures of these witnesses, too, from now on."""
        self.witnesses = list(dict.fromkeys([*witnesses, *self.witnesses]))
        self._save()

    def forget_witnesses(self, witnesses: Iterable[NodeId]) -> None:
        """Require the signatures of these witnesses no more."""
        gone = set(witnesses)
        if strangers := sorted(gone - set(self.witnesses)):
            known = ", ".join(self.witnesses) or "none"
            raise NotFound(f"{strangers[0]} is not required.", hint=f"Required witnesses: {known}.")
        self.witnesses = [key for key in self.witnesses if key not in gone]
        self._save()

    async def may_name_own_network(self) -> bool:
        """Return True if a known directory lies in this machine's own network, or is a file."""
        hosts = [urlsplit(place.where).hostname or "" for place in self.places if "://" in place.where]
        if len(hosts) < len(self.places):
            return True
        return any([await is_in_own_network(host) for host in hosts])

    async def read_all(self, now_ms: int) -> FoundRounds:
        """Read every known place, and return the rounds of the newest directory of each curator."""
        found = FoundRounds(refused=list(self.refused.values()))
        newest = {signer: kept for signer in {place.signer for place in self.places} if (kept := self._kept(signer))}
        for place in self.places:
            try:
                newest[place.signer] = await self.read_newest(place, now_ms)
            except SwarmError as error:
                found.problems.append(f"{place.where}: {named(error)}")
        every: list[KnownRound] = []
        for signer, data in newest.items():
            try:
                require_witnessed(data, self.witnesses)
                self._add(open_directory(data, signer, now_ms=now_ms), every, found)
            except SwarmError as error:
                found.problems.append(f"the kept copy of {signer[-8:]}: {named(error)}")
        rounds, wrong = merge(every)
        for known, lie in wrong:
            found.refused.append(self.refuse(known.listing, lie, now_ms))
        refused = {one.round_id: one for one in reversed(found.refused)}
        found.refused = list(refused.values())[::-1]
        found.rounds = [known for known in rounds if known.listing.round_id not in refused]
        return found

    async def read_newest(self, place: DirectoryPlace, now_ms: int) -> bytes:
        """Return the checked directory of a place, and keep it; raise an error if a newer or another one was seen."""
        data = await _fetch(place.where)
        read = open_directory(data, place.signer, now_ms=now_ms)
        busy = ConfigInvalid(f"Another command reads {place.where}.", hint="Try again.")
        with disk_named(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
        with hold_lock(self._folder / "lock", busy):
            kept = self._kept(place.signer)
            self._require_newest(place, read, kept)
            try:
                if kept:
                    require_one_view(kept, data)
            except ProofInvalid:
                self._write(self._folder / f"{place.signer}-other.json", data)
                raise
            require_witnessed(data, self.witnesses)
            self._write(self._folder / f"{place.signer}.json", data)
        return data

    def refuse(self, said: OpenListing, error: SwarmError, now_ms: int) -> RefusedRound:
        """Refuse a round for ever, and keep the listing that proves its lie."""
        wrong = refusal(said.document, error, now_ms)
        self.refused = dict(list({**self.refused, wrong.round_id: wrong}.items())[-REFUSED_MAX:])
        self._write(self.evidence(wrong.round_id), json.dumps(said.document).encode())
        self._save()
        return wrong

    def evidence(self, round_id: str) -> Path:
        """Return the path of the kept listing of a refused round."""
        return self._folder / f"refused-{round_id[:16]}.json"

    def require_not_refused(self, round_id: str) -> None:
        """Raise `ProofInvalid` if this home refuses a round."""
        if wrong := self.refused.get(round_id):
            raise ProofInvalid(
                f"This node refuses the round {wrong.title or round_id[:8]}: {wrong.reason}",
                hint=f"Its signed listing is in {self.evidence(round_id)}. To join it all the same, remove the round "
                f"from {self._path}.",
            )

    def _add(self, read: OpenDirectory, every: list[KnownRound], found: FoundRounds) -> None:
        every += read.rounds
        found.refused += read.refused
        name = read.directory.name
        found.problems += [f"{name} has a wrong entry, {wrong.title}: {wrong.reason}" for wrong in read.invalid]

    def _require_newest(self, place: DirectoryPlace, read: OpenDirectory, kept: bytes | None) -> None:
        """Raise `RolledBack` if a place has an older file than the one that was seen."""
        number = _number(kept)
        if read.directory.number < number:
            raise RolledBack(
                f"{place.where} has number {read.directory.number} of {read.directory.name}, and number {number} was "
                "seen before: the mirror is old.",
                hint="The newer copy is used. If all mirrors stay old, ask the curator.",
            )

    def _kept(self, signer: NodeId) -> bytes | None:
        """Return the newest copy that was seen; a witness that was named later may not have signed it."""
        path = self._folder / f"{signer}.json"
        return path.read_bytes() if path.exists() else None

    def _save(self) -> None:
        refused = [wrong.model_dump() for wrong in self.refused.values()]
        record = {"places": list(map(str, self.places)), "refused": refused, "witnesses": self.witnesses}
        self._write(self._path, json.dumps(record, indent=1, ensure_ascii=False).encode())

    def _write(self, path: Path, data: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, data, temp_folder=path.parent)


def _number(kept: bytes | None) -> int:
    """Return the number of a kept copy, which may have expired; 0 without one."""
    try:
        return int(json.loads(kept or b"{}")["signed"]["number"])
    except (ValueError, LookupError, TypeError):
        return 0


async def _fetch(where: str) -> bytes:
    """Return the bytes at a URL or in a file."""
    if "://" in where:
        return await _file_at(where, DIRECTORY_MAX_BYTES, own_network=True)  # the owner typed this address
    return await trio.to_thread.run_sync(_read_file, Path(where))


def _read_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(DIRECTORY_MAX_BYTES + 1)
    except OSError as error:
        raise NotFound(f"{path} cannot be read ({error.strerror}).", hint="Check the path.") from None


async def require_contactable(join: JoinString, *, own_network: bool) -> None:
    """Raise `UntrustedMetadata` if a round of a directory names an address in this machine's own network.

    Only a directory of that network, or a file, may name such addresses.
    """
    addresses = await resolve(urlsplit(join.url).hostname or "")
    if not addresses:
        raise Unreachable(f"{join.url} has no address.", hint="Check this machine's network connection.")
    if not own_network and not all(map(is_public, addresses)):
        raise UntrustedMetadata(
            f"{join.url} is an address in this machine's own network, and its directory comes from the internet.",
            hint="If you know this round, join it by its join string.",
        )


async def fetch_listing(join: JoinString, *, now_ms: int, own_network: bool) -> OpenListing:
    """Return what a round says of itself now."""
    data = await _file_at(f"{join.url}/v1/listing", LISTING_MAX_BYTES, own_network=own_network)
    said = open_listing(read_object(data, LISTING_MAX_BYTES))
    said.require_valid_at(now_ms)
    if said.round_id != join.round_id:
        raise UntrustedMetadata(f"{join.url} serves the listing of another round, {said.name}.")
    return said


async def _file_at(url: str, max_bytes: int, *, own_network: bool) -> bytes:
    base, _, name = url.rpartition("/")
    origin = open_origin(base, own_network=own_network, patience=PATIENCE)
    try:
        data = await origin.file(name, max_bytes)
    finally:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 1.0):
            await origin.close()
    if data is None:
        raise NotFound(f"There is nothing at {url}.", hint="Check the address.")
    return data
