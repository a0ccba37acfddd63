"""Check that a round's audits are those that its lottery drew: compares the log with the lists of the coordinator.

1. The list of a revealed epoch has the digest in the log, and names credited claims, each in only one list.
2. A claim that the epoch's secret draws is paid only after a verdict on it; a pardon is a verdict, and anybody can
   count pardons.
3. The same holds for a claim that is in no list: without a committed secret, every claim is audited. Claims since the
   last epoch but one cannot be checked yet.
4. A claim that an audit found wrong is not paid after that.

The check does not prove that each claim's *rate* was right: it depends on the owner's history, which is only partly in
the log.
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
"""The parts of a group that ends an epoch are credited in that epoch, and drawn in the next."""


@dataclass(frozen=True)
class DrawSummary:
    """Totals over the lists of all revealed epochs."""

    claims: int = 0
    drawn: int = 0
    pardoned: int = 0
    """Number of pardons among the drawn claims."""


@dataclass
class Audits:
    """The log's entries about audits, with their indexes."""

    credited: dict[str, int] = field(default_factory=dict)
    posted: dict[str, int] = field(default_factory=dict)
    verdicts: dict[str, tuple[int, str]] = field(default_factory=dict)
    reveals: list[tuple[int, Reveal]] = field(default_factory=list)

    def add(self, index: int, entry: Entry) -> None:
        """Record the next entry."""
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
        """Raise an error if the claim was paid without a verdict before it (2, 3)."""
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
