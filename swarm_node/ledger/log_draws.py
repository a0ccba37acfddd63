"""Whether a round's audits are those that its lottery drew: the log against the lists that the coordinator serves.

1. The list of an epoch that is revealed is the one whose digest is in the log, and names credited claims, each in one
   list.
2. A claim that the epoch's secret draws is paid after a verdict on it only; a pardon is one, which everybody can count.
3. So is one that is in no list: without the secret that was committed to, everything is audited. Of claims since the
   last epoch but one nobody can know yet.
4. What an audit found to be wrong is not paid after that.

That each claim's *rate* was right is not shown: it follows from the owner's history, of which the log has not all.
"""

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from ledger import drawing
from ledger.drawing import ALL_PPM, LotteryDraw
from ledger.entry import Entry, Pending, Post, Reveal, VerdictEntry
from protocol.errors import ProofInvalid
from protocol.ids import Hex64
from swarm_node.ledger.log_reader import LogReader

_LIST = TypeAdapter(list[tuple[Hex64, Annotated[int, Field(ge=0, le=ALL_PPM)]]])

SLACK_EPOCHS = 1
"""The parts of a group that ends an epoch are credited with it, and drawn in the next."""


@dataclass(frozen=True)
class DrawSummary:
    """What the lists of all revealed epochs come to."""

    claims: int = 0
    drawn: int = 0
    pardoned: int = 0
    """Of those drawn."""


@dataclass
class Audits:
    """What the log says of audits, by the index of each entry."""

    credited: dict[str, int] = field(default_factory=dict)
    posted: dict[str, int] = field(default_factory=dict)
    verdicts: dict[str, tuple[int, str]] = field(default_factory=dict)
    reveals: list[tuple[int, Reveal]] = field(default_factory=list)

    def add(self, index: int, entry: Entry) -> None:
        """The next entry."""
        match entry:
            case Pending():
                self.credited[entry.claim_id] = index
            case Post():
                self.posted[entry.claim_id] = index
            case VerdictEntry():
                self.verdicts[entry.claim_id] = index, entry.outcome
            case Reveal():
                self.reveals.append((index, entry))

    def require_verdict(self, claim_id: str, why: str) -> None:
        """(2, 3) Refuse a claim that was paid unseen."""
        paid = self.posted.get(claim_id)
        if paid is not None and (claim_id not in self.verdicts or self.verdicts[claim_id][0] > paid):
            raise ProofInvalid(f"Entry {paid} pays claim {claim_id[:16]}…, which {why}, and no audit had looked at it.")


async def check(reader: LogReader, audits: Audits) -> DrawSummary:
    """Compare every revealed epoch with its list."""
    for claim_id, (index, outcome) in audits.verdicts.items():
        if outcome == "hard" and audits.posted.get(claim_id, -1) > index:
            raise ProofInvalid(f"Entry {audits.posted[claim_id]} pays claim {claim_id[:16]}…, found wrong by an audit.")
    listed, drawn = set[str](), list[str]()
    for _, reveal in audits.reveals:
        draws = _read(await reader.draws(reveal.epoch), reveal.epoch)
        drawn += drawing.check(reveal.secret, reveal.draws_digest, draws)
        for draw in draws:
            if draw.claim_id not in audits.credited or draw.claim_id in listed:
                raise ProofInvalid(f"The list of epoch {reveal.epoch} names claim {draw.claim_id[:16]}… wrongly.")
            listed.add(draw.claim_id)
    for claim_id in drawn:
        audits.require_verdict(claim_id, "was drawn")
    ends = [index for index, _ in audits.reveals][: -SLACK_EPOCHS or None]
    for claim_id, index in audits.credited.items():
        if ends and index < ends[-1] and claim_id not in listed:
            audits.require_verdict(claim_id, "is in no epoch's list")
    pardoned = sum(audits.verdicts.get(claim_id, (0, ""))[1] == "pardon" for claim_id in drawn)
    return DrawSummary(len(listed), len(drawn), pardoned)


def _read(data: bytes, epoch: int) -> list[LotteryDraw]:
    try:
        return [LotteryDraw(claim_id, rate_ppm) for claim_id, rate_ppm in _LIST.validate_json(data, strict=True)]
    except ValidationError:
        raise ProofInvalid(f"The list of epoch {epoch} is none of claims and rates.") from None
