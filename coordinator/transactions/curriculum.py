"""The curriculum: the problems that come next and the results of their groups, as effects.

- The problem of a group is chosen once, when the group is made, and stored with it: it does not change with the group's
  leases. A group of the learner's is about a problem of the train split; one of an evaluation, of another split. A
  group may also be about a query of the endpoint, which is no problem of the task.
- Without rules, group n is about place n of the train split. With them (`coordinator.rules.selection`), windows of
  places are read in order; the places chosen from one wait in the store until groups are made of them.
- The results of a prompt are stored under its hash, and change with the acceptance or the reward that they follow from.
- The state is one row: after any crash, and for every other process, the next group is the same. Rules may be changed,
  or switched on and off, between two starts: the places chosen before are used up first.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa

from coordinator.rules.lifecycle import UNFINISHED, GroupState
from coordinator.rules.prompt_refs import TRAIN, PromptRef
from coordinator.rules.selection import PromptCandidate, PromptOutcome, SelectionRules, choose
from coordinator.store.facts import Fact, get_fact, set_fact
from coordinator.store.tables import groups, is_for_training, outcomes
from coordinator.transactions import tally
from ledger.prepared import Prepared
from protocol.policy import chunks
from protocol.work.rollout import pack_tokens

# Built once: making a statement costs more than running it, and this one runs for every lease and every rollout.
_source = Prepared(
    sa.select(groups.c.split, groups.c.prompt.label("number")).where(groups.c.group_no == sa.bindparam("group")),
    PromptRef,
)


def source_of(connection: sa.Connection, group_no: int) -> PromptRef:
    """Return the reference of the problem that a group is about."""
    return _source(connection, group=group_no).single_row()


STANDS = Fact[dict[str, Any] | None]("curriculum", None)
"""The fact of the next place to read, the places that were chosen, and counts of all others."""

Prompt = Callable[[PromptRef], list[int]]
"""A function that returns the tokens of a problem's prompt."""


class GroupPlace(NamedTuple):
    """A group, and the place of its problem in the train split."""

    group_no: int
    place: int


class OutcomeRow(NamedTuple):
    """The results of a prompt's groups, under its hash; as `PromptOutcome`."""

    prompt: str
    groups: int
    mean: float
    variance: float
    alike: int
    left_out: int


# Built once: making a statement costs more than running it, and these run for every lease and every rollout.
_newest = Prepared(sa.select(sa.func.max(groups.c.group_no)).where(is_for_training(groups.c.group_no)))
_known = Prepared(sa.select(outcomes).where(outcomes.c.prompt.in_(sa.bindparam("names", expanding=True))), OutcomeRow)
_change = Prepared(
    sa.update(outcomes)
    .where(outcomes.c.prompt == sa.bindparam("name"))
    .values({name: sa.bindparam(f"new_{name}") for name in PromptOutcome.__dataclass_fields__})
)
_begin_prompt = Prepared(sa.insert(outcomes))
_make = Prepared(sa.insert(groups))
_total = Prepared(sa.select(sa.func.coalesce(sa.func.sum(outcomes.c.groups), 0)))


def record_outcome(connection: sa.Connection, prompt: bytes, rewards: Sequence[float]) -> None:
    """Record the rewards of a prompt's group; an empty sequence changes nothing."""
    if not rewards:
        return
    name = chunks.digest(prompt)
    known = _outcomes(connection, [name])
    _keep(connection, known, {name: known.get(name, PromptOutcome()).after(rewards)})


def next_places(connection: sa.Connection, count: int, rules: SelectionRules, prompt: Prompt) -> list[GroupPlace]:
    """Return numbers for `count` more groups, each with its place in the train split."""
    newest = _newest(connection).scalar()
    first = 0 if newest is None else newest + 1
    places = _places(connection, count, first, rules, prompt)
    return [GroupPlace(number, place) for number, place in enumerate(places, first)]


def make(connection: sa.Connection, count: int, rules: SelectionRules, prompt: Prompt, state: GroupState) -> list[int]:
    """Make `count` more groups for the learner, each in `state`, and return their numbers."""
    if count <= 0:
        return []
    made = next_places(connection, count, rules, prompt)
    rows = [{"group_no": number, "state": state.value, "split": TRAIN, "prompt": place} for number, place in made]
    _make.each(connection, rows)
    tally.change(connection, groups=len(rows) if state in UNFINISHED else 0)
    return [number for number, _ in made]


def curriculum_report(connection: sa.Connection, rules: SelectionRules) -> dict[str, int]:
    """Return counts of the prompts that were seen and left out so far; empty if prompts are not chosen."""
    stands = get_fact(connection, STANDS)
    if not rules.chooses and stands is None:
        return {}
    seen, alike = outcomes.c.groups > 0, outcomes.c.alike >= max(1, rules.filter_after)
    right = outcomes.c.mean >= rules.solved
    counted = {"prompts_seen": seen, "prompts_always_right": seen & alike & right}
    counted |= {"prompts_always_wrong": seen & alike & ~right}
    columns = [sa.func.coalesce(sa.func.sum(sa.case((which, 1), else_=0)), 0) for which in counted.values()]
    report = dict(zip(counted, map(int, connection.execute(sa.select(*columns)).one()), strict=True))
    counts: dict[str, int] = (stands or _begin(0))["counts"]
    return report | counts


def _places(connection: sa.Connection, count: int, first: int, rules: SelectionRules, prompt: Prompt) -> list[int]:
    """Return the next `count` places; `first` groups were made until now."""
    stands = get_fact(connection, STANDS)
    if stands is None:
        if not rules.chooses:
            return list(range(first, first + count))
        stands = _begin(first)
    while len(stands["chosen"]) < count:
        if rules.chooses:
            _choose_from_window(connection, stands, rules, prompt)
        else:
            stands["chosen"].append(stands["next"])
            stands["next"] += 1
    given: list[int] = stands["chosen"][:count]
    stands["chosen"] = stands["chosen"][count:]
    set_fact(connection, STANDS, stands)
    return given


def _begin(first: int) -> dict[str, Any]:
    counts = dict.fromkeys(("always_right", "always_wrong", "passed_over", "probed"), 0)
    return {"next": first, "chosen": [], "counts": counts}


def _choose_from_window(
    connection: sa.Connection, stands: dict[str, Any], rules: SelectionRules, prompt: Prompt
) -> None:
    """Choose from the next window of places."""
    window = range(stands["next"], stands["next"] + rules.window)
    names: dict[int, str] = {place: chunks.digest(pack_tokens(prompt(PromptRef(TRAIN, place)))) for place in window}
    known = _outcomes(connection, names.values())
    candidates = [PromptCandidate(place, name, known.get(name, PromptOutcome())) for place, name in names.items()]
    taken, left = choose(candidates, int(_total(connection).scalar_one()), rules)
    after = {names[place]: known.get(names[place], PromptOutcome()).left() for place in left}
    after |= {names[place]: known[names[place]].taken() for place in taken if names[place] in known}
    _keep(connection, known, after)
    probed = sum(names[place] in known and known[names[place]].left_out > 0 for place in taken)
    counts = Counter(stands["counts"]) + Counter(left.values()) + Counter(probed=probed)
    stands["counts"] = {name: counts[name] for name in stands["counts"]}
    stands["chosen"] += taken
    stands["next"] = window.stop


def _outcomes(connection: sa.Connection, names: Iterable[str]) -> dict[str, PromptOutcome]:
    rows = _known(connection, names=list(names))
    return {row.prompt: PromptOutcome(row.groups, row.mean, row.variance, row.alike, row.left_out) for row in rows}


def _keep(connection: sa.Connection, known: dict[str, PromptOutcome], after: dict[str, PromptOutcome]) -> None:
    """Store the outcomes that have changed."""
    fields = PromptOutcome.__dataclass_fields__
    values = {name: {field: getattr(outcome, field) for field in fields} for name, outcome in after.items()}
    changed = [
        {"name": name, **{f"new_{field}": value for field, value in values[name].items()}}
        for name, outcome in after.items()
        if name in known and outcome != known[name]
    ]
    new = [{"prompt": name, **values[name]} for name in after if name not in known]
    _change.each(connection, changed)
    _begin_prompt.each(connection, new)
