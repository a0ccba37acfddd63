"""The topology of a broadcast: a pure plan from measured links to one tree per stripe.

- A version's chunks are dealt to K stripes. Each stripe goes down a tree of its own, from the source (the
  coordinator's seeder) to every node; a node that has many children in one stripe is a leaf in most others, so every
  uplink is used.
- The common rate R is the largest that the links allow: `R ≤ u_source` and `R ≤ (u_source + Σ u_i) / N`, counting the
  uplinks of the nodes that themselves receive at R. One stripe is R/K wide, and a link of u bytes/s has ⌊K·u/R⌋
  *slots*: children it can feed.
- All slots of all nodes together are at least N·K, one for each node and stripe. Each stripe has N slots, at least one
  of them at the source. The widest node left takes the shallowest open slot and opens at least one, so a slot is open
  until only leaves are left: the trees fit.
- A chunk of c bytes passes one hop in c·K/R. In trees of depth D all G bytes have arrived at (1 + D·K·c/G) times G/R.
- Within a tree, nodes with many children (*wide* ones) are nearer to the source than those with few (*narrow* ones),
  which makes it as flat as possible.
- A node's uplink is spread evenly over all others; of the source's uplink, nodes that pass on much get less.
- A node that cannot be dialled (a *shy* one) feeds only nodes that can: it dials them, and they ask over the connection
  that it opened. So only the source and the dialable nodes feed shy nodes: with S of them `R ≤ (u_source + Σ
  u_dialable) / S`.
- Two shy nodes that can dial each other at once (*punchable* ones) feed each other, too. If all shy nodes are
  punchable, any node may feed any other; else the source and the dialable nodes feed the other shy ones.
- No node has more than `FAN_OUT_MAX` children in one stripe, nor more slots than that in a larger swarm.
- `join` gives new nodes their parents without changing other nodes' parents or slots: a new node is a *leaf* that feeds
  nobody, and thousands of them cost the others nothing until they really fetch. A node that leaves takes only its own
  edges out of the plan. Neither step reads the edges of others.

bench/RESULTS.md has how far real runs are from the bound.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import islice

SOURCE = ""
"""The name of the root of every tree: the coordinator's own seeder."""

STRIPES = 16
"""Trees per version: more split an uplink more finely, fewer mean fewer parents per node."""

FAN_OUT_MAX = 128
"""Children of one node: each costs a connection."""

SOURCE_FAN_OUT_MAX = 256
"""Children of the source, which has no other work."""

SPARES = 4
"""Upstreams beside the parents, at least, for the case that a parent fails."""

HELP_SHARE = 0.1
"""The share of the source's uplink for requests beyond the plan: many of these must not starve its own trees."""

HELP_FREELY_MAX = 16
"""The largest swarm in which the source helps any node without a limit: nearly all nodes are its children."""

COMPARED = 16
"""The largest swarm in which all nodes are compared for each slot; in a larger one, two nodes rarely meet twice."""

NARROW = 4
"""A node that feeds this many times fewer nodes than the widest may be far from the source in a small swarm."""

_RATE_STEPS = 50
"""Halvings in the search for R: more than a float has relevant bits."""


@dataclass(frozen=True)
class NodeLinks:
    """The links of a node; rates are measured, in bytes per second."""

    name: str
    up: float
    down: float
    dialable: bool = True
    punchable: bool = False
    """True if it cannot be dialled, but it and another such node can connect."""


@dataclass
class Topology:
    """The trees of one version: for each node its parent in every stripe, and spare upstreams."""

    stripes: int
    rate: float
    source_up: float
    parents: dict[str, list[str]] = field(default_factory=dict)
    spares: dict[str, list[str]] = field(default_factory=dict)
    planned: tuple[str, ...] = ()
    """The nodes of the plan; the others have joined it as leaves."""
    turns: deque[str] = field(default_factory=deque)
    """The nodes that feed the next leaves, in turn: the source and feeding nodes, more often with more spare slots."""
    feeding: set[str] = field(default_factory=set)
    """Nodes of the plan that can be dialled: only these are spares of others, or feed leaves."""
    dialable: set[str] = field(default_factory=set)
    punchable: set[str] = field(default_factory=set)
    fed: dict[str, dict[str, None]] = field(default_factory=dict)
    """The children of each node, in any stripe: the reverse of `parents`."""

    def upstreams(self, name: str) -> dict[str, list[int]]:
        """Return every upstream of a node, with the stripes that it is asked for first."""
        sources: dict[str, list[int]] = {}
        for stripe, parent in enumerate(self.parents[name]):
            sources.setdefault(parent, []).append(stripe)
        for spare in self.spares[name]:
            if spare in self.feeding:  # it may have left
                sources.setdefault(spare, [])
        sources.setdefault(SOURCE, [])
        return sources

    def children(self, name: str) -> list[str]:
        """Return the nodes that a node feeds, in any stripe."""
        return list(self.fed.get(name, ()))

    def hops(self, name: str) -> int:
        """Return the hops from the source to a node, in the stripe in which it is farthest away."""
        farthest = 0
        for stripe in range(self.stripes):
            passed, hops = name, 0
            while passed != SOURCE:
                passed, hops = self.parents[passed][stripe], hops + 1
            farthest = max(farthest, hops)
        return farthest

    @property
    def help_rate(self) -> float:
        """Return the bytes per second that each node may request from the source beyond its part; 0: no limit.

        Leaves do not count: keys are free, and many of them would make the rate too small for all.
        """
        count = len(self.planned)
        return 0.0 if count <= HELP_FREELY_MAX else HELP_SHARE * self.source_up / count


def fluid_bound_s(size_bytes: float, source_up: float, nodes: Sequence[NodeLinks]) -> float:
    """Return the seconds that every plan needs: for the source's uplink, the slowest downlink, all uplinks together, or
    the uplinks that can feed shy nodes."""
    together = source_up + sum(node.up for node in nodes)
    for_shy = source_up + sum(node.up for node in nodes if node.dialable)
    # Every byte reaches the punchable nodes at least once from the source or an open node.
    hidden = sum(_is_hidden(node) for node in nodes) + any(node.punchable for node in nodes)
    shy = sum(not node.dialable for node in nodes)
    for_punchable = for_shy + sum(node.up for node in nodes if node.punchable)
    copies_s = max(len(nodes) * size_bytes / together, hidden * size_bytes / for_shy, shy * size_bytes / for_punchable)
    return max(size_bytes / source_up, size_bytes / min(n.down for n in nodes), copies_s)


def plan(source_up: float, nodes: Sequence[NodeLinks], *, stripes: int = STRIPES) -> Topology:
    """Plan the trees of one version."""
    rate, relays = _common_rate(source_up, nodes)
    topology = Topology(stripes, rate, source_up, dialable={node.name for node in nodes if node.dialable})
    topology.punchable = {node.name for node in nodes if node.punchable}
    reach = _reach(nodes)
    topology.parents = {node.name: [SOURCE] * stripes for node in nodes}
    slots = _slots(source_up, relays, len(nodes), reach, stripes)
    source_slots = slots.pop(SOURCE)
    shares = _share_out(slots, source_slots, len(nodes), reach, stripes)
    used: dict[str, int] = dict.fromkeys(slots, 0)
    given = _Given(slots)
    for stripe, fan_outs in enumerate(shares):
        wide = len(nodes) - sum(fan_outs.values())
        for child, parent in _tree(nodes, fan_outs, wide, stripe / stripes, reach, given):
            topology.parents[child][stripe] = parent
            given.record(parent, child)
            if parent != SOURCE:
                used[parent] += 1
    topology.planned = tuple(node.name for node in nodes)
    topology.feeding = {node.name for node in nodes if node.dialable and node.up}
    whole = {node.name: min(int(stripes * node.up / rate), FAN_OUT_MAX) for node in relays}
    to_spare = {name: whole[name] - used[name] for name in whole if whole[name] and name in topology.feeding}
    to_spare[SOURCE] = int(stripes * source_up / rate) - source_slots if rate else stripes
    topology.turns = _turns(to_spare, stripes)
    topology.spares = {name: _spares(topology, name, position) for position, name in enumerate(topology.planned)}
    for name in topology.planned:
        _note_edges(topology, name)
    return topology


def _turns(to_spare: Mapping[str, int], stripes: int) -> deque[str]:
    """Return turns for each name: one, and one more for each spare slot, up to one for each stripe; mixed evenly."""
    weights = {name: 1 + min(max(0, slots), stripes) for name, slots in to_spare.items()}
    turns = (((at + 0.5) / weight, name) for name, weight in weights.items() for at in range(weight))
    return deque(name for _, name in sorted(turns))


def join(
    topology: Topology, nodes: Sequence[NodeLinks], *, is_proven: Callable[[str], bool] = lambda _name: False
) -> None:
    """Give new nodes their parents, in turn; a node that is not proven has the source as one, which sees it fetch."""
    for node in nodes:
        position = len(topology.parents)
        parents = [_next_turn(topology) for _ in range(topology.stripes)]
        if not is_proven(node.name):
            parents[position % topology.stripes] = SOURCE
        topology.parents[node.name] = parents
        topology.spares[node.name] = _spares(topology, node.name, position)
        if node.dialable:
            topology.dialable.add(node.name)
        _note_edges(topology, node.name)


def _next_turn(topology: Topology) -> str:
    """Return the next node that feeds a leaf, and drop nodes that have left."""
    turns = topology.turns
    while (name := turns[0]) != SOURCE and name not in topology.feeding:
        turns.popleft()
    turns.rotate(-1)
    return name


def leave(topology: Topology, names: Iterable[str]) -> None:
    """Remove nodes from the plan: their children ask their other upstreams until the next version's plan."""
    for name in names:
        for parent in topology.parents.pop(name):
            topology.fed.get(parent, {}).pop(name, None)
        for child in topology.fed.pop(name, ()):
            parents = topology.parents[child]
            parents[:] = [SOURCE if parent == name else parent for parent in parents]
        topology.spares.pop(name)
        topology.feeding.discard(name)
        topology.dialable.discard(name)
        topology.punchable.discard(name)


def renew_spares(topology: Topology, name: str) -> None:
    """Replace the spares of a node if any of them has left."""
    if not topology.feeding.issuperset(topology.spares[name]):
        topology.planned = tuple(other for other in topology.planned if other in topology.parents)
        position = topology.planned.index(name) if name in topology.planned else len(topology.spares)
        topology.spares[name] = _spares(topology, name, position)


def _note_edges(topology: Topology, name: str) -> None:
    for parent in topology.parents[name]:
        if parent != SOURCE:
            topology.fed.setdefault(parent, {})[name] = None


@dataclass(frozen=True)
class _Reach:
    """The nodes by whom they can feed: open nodes feed all, punchable ones feed both kinds, others only open ones."""

    open: Set[str]
    punchable: Set[str]


def _is_hidden(node: NodeLinks) -> bool:
    return not (node.dialable or node.punchable)


def _reach(nodes: Sequence[NodeLinks]) -> _Reach:
    """Return the reach of the nodes; if none is hidden, punchable nodes count as open, as they can feed all."""
    if not any(map(_is_hidden, nodes)):
        return _Reach({node.name for node in nodes}, frozenset())
    return _Reach(
        {node.name for node in nodes if node.dialable},
        {node.name for node in nodes if node.punchable},
    )


def _common_rate(source_up: float, nodes: Sequence[NodeLinks]) -> tuple[float, list[NodeLinks]]:
    """Return R, and the nodes that receive fast enough to pass on the chunks that they receive."""
    best, relays = min([source_up / max(1, len(nodes)), *(node.down for node in nodes)]), 0
    together = for_shy = for_punchable = source_up
    hidden = sum(map(_is_hidden, nodes)) + any(node.punchable for node in nodes)
    shy = sum(not node.dialable for node in nodes)
    by_down = sorted(nodes, key=lambda node: -node.down)
    for count, node in enumerate(by_down, start=1):
        together += node.up
        for_shy += node.up if node.dialable else 0.0
        for_punchable += 0.0 if _is_hidden(node) else node.up
        rate = min(source_up, node.down, together / len(nodes))
        rate = min(rate, for_shy / hidden if hidden else rate, for_punchable / shy if shy else rate)
        if rate >= best:
            best, relays = rate, count
    return best, by_down[:relays]


def _slots(source_up: float, relays: Sequence[NodeLinks], count: int, reach: _Reach, stripes: int) -> dict[str, int]:
    """Return the fewest slots that suffice for all nodes, in proportion to the uplinks: so all links are used alike."""
    cap = stripes * (count - 1) if count - 1 <= FAN_OUT_MAX else FAN_OUT_MAX
    source_cap = stripes * count if count <= SOURCE_FAN_OUT_MAX else max(stripes, SOURCE_FAN_OUT_MAX)
    for_open = stripes * len(reach.open)
    # The first punchable node of a tree hangs below an open one.
    for_both = for_open + stripes * max(0, len(reach.punchable) - 1)
    hidden = [node.name for node in relays if node.name not in reach.open and node.name not in reach.punchable]
    punchable = [node.name for node in relays if node.name in reach.punchable]

    def at(rate: float) -> dict[str, int]:
        slots = {node.name: min(cap, int(stripes * node.up / rate)) for node in relays}
        return {SOURCE: max(stripes, min(source_cap, int(stripes * source_up / rate)))} | slots

    def fits(rate: float) -> bool:
        slots = at(rate)
        of_hidden, of_punchable = (sum(slots[name] for name in names) for names in (hidden, punchable))
        of_shy = min(min(of_hidden, for_open) + of_punchable, for_both)
        return sum(slots.values()) - of_hidden - of_punchable + of_shy >= count * stripes

    low = high = (source_up + sum(node.up for node in relays)) / max(1, count)
    while not fits(low) and low > high / 1024:
        low /= 2
    for _ in range(_RATE_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return at(low)


def _share_out(
    slots: Mapping[str, int], source_slots: int, count: int, reach: _Reach, stripes: int
) -> list[dict[str, int]]:
    """Return, for each stripe, the nodes that pass it on and to how many: as few stripes per node as possible."""
    # The source feeds equally many in each tree; but if a node can feed all others alone, the source feeds one in that
    # node's trees, and more in the others: else the source would feed most of them, and the node's uplink would idle.
    room = [count - source_slots // stripes - (stripe < source_slots % stripes) for stripe in range(stripes)]
    if max(slots.values(), default=0) >= count - 1:
        room = [count - 1] * stripes
    shares: list[dict[str, int]] = [{} for _ in range(stripes)]
    wide_first = sorted(slots, key=lambda name: -slots[name])
    # In a small swarm a narrow node feeds one other in each of its trees, so that this can always be the widest one:
    # the widest node then need not ask the source for these stripes.
    narrow = max(slots.values(), default=0) / NARROW if count <= COMPARED and len(reach.open) == count else -1
    fan_out_max = {name: 1 if slots[name] <= narrow else min(max(1, count - 1), FAN_OUT_MAX) for name in slots}
    left = count * stripes - source_slots
    # Shy nodes have the least choice: in every tree they feed at most as many nodes as they can reach.
    hidden, near = slots.keys() - reach.open - reach.punchable, len(reach.open)
    for kind, reached in ((hidden, near), (reach.punchable, near + len(reach.punchable) - 1), (reach.open, count)):
        given = [sum(share.values()) for share in shares]
        free = [min(most, reached) - used for most, used in zip(room, given, strict=True)]
        left = _deal({name: slots[name] for name in wide_first if name in kind}, free, shares, fan_out_max, left)
    return shares


def _deal(
    left: dict[str, int], room: list[int], shares: list[dict[str, int]], fan_out_max: Mapping[str, int], needed: int
) -> int:
    """Deal these slots to the stripes that have room for them, and return how many more are needed then."""
    while needed > 0 and any(free > 0 for free in room) and any(left.values()):
        for name, slots in left.items():
            stripe = max(range(len(room)), key=lambda s: (name not in shares[s], room[s]))
            given = min(slots, room[stripe], fan_out_max[name] - shares[stripe].get(name, 0), needed)
            if given > 0:
                shares[stripe][name] = shares[stripe].get(name, 0) + given
                room[stripe] -= given
                left[name] = slots - given
                needed -= given
            elif name in shares[stripe] or room[stripe] <= 0:
                left[name] = 0
    return needed


class _Given:
    """The number of stripes that each node gives to each other.

    An uplink is shared equally by all its children, so each of them should need the same part of it. A child that
    passes on much should need less: chunks that reach it late reach many nodes late.
    """

    def __init__(self, slots: Mapping[str, int]) -> None:
        self._slots, self._usual = slots, sum(slots.values()) / max(1, len(slots))
        self._stripes: Counter[tuple[str, str]] = Counter()

    def record(self, parent: str, child: str) -> None:
        self._stripes[parent, child] += 1

    def weight(self, parent: str, child: str) -> float:
        return self._stripes[parent, child] * (self._usual + self._slots.get(child, 0))


def _tree(
    nodes: Sequence[NodeLinks],
    fan_outs: Mapping[str, int],
    wide: int,
    turn: float,
    reach: _Reach,
    given: _Given,
) -> Iterable[tuple[str, str]]:
    """Yield the edges (child, parent) of one stripe from the top down; `turn` (0 to 1) is where equal nodes begin."""
    start = int(turn * len(nodes))
    widest = max(fan_outs.values(), default=0)
    # In a small swarm one more hop costs little; but if some nodes are shy, their leaves need every open slot first.
    may_wait = len(nodes) <= COMPARED and len(reach.open) == len(nodes)
    narrow = [name for name in fan_outs if may_wait and NARROW * fan_outs[name] <= widest]
    leaves = [node.name for node in (*nodes[start:], *nodes[:start]) if node.name not in fan_outs]
    inner = sorted(fan_outs.keys() - narrow, key=lambda name: (-fan_outs[name], name))
    callers = deque(name for name in inner if name not in reach.open and name not in reach.punchable)
    # Punchable nodes come first: open nodes below them leave open slots to the nodes that need these.
    others = deque(name for kind in (reach.punchable, reach.open) for name in inner if name in kind)
    # Shy slots are for open children: if there are more of them than open leaves, inner open nodes must use them, too.
    crowded = sum(fan_outs[name] for name in callers) - sum(name in reach.open for name in leaves)
    open_slots, punch_slots, shy_slots = deque([SOURCE] * wide), deque[str](), deque[str]()

    def next_inner() -> str:
        if not others or (callers and len(others) <= crowded and not shy_slots and open_slots):
            return callers.popleft()
        return others.popleft()

    while callers or others:
        child = next_inner()
        own: deque[str]
        fitting: Sequence[deque[str]]
        if child in reach.open:
            own, fitting = open_slots, (shy_slots, punch_slots, open_slots)
        elif child in reach.punchable:
            own, fitting = punch_slots, (punch_slots, open_slots)
        else:
            own, fitting = shy_slots, (open_slots,)
        slots = next(filter(None, fitting), None)
        crowded -= slots is shy_slots
        yield child, slots.popleft() if slots else SOURCE
        own.extend([child] * fan_outs[child])
    hidden = [name for name in leaves if name not in reach.open and name not in reach.punchable]
    yield from _hang(hidden, fan_outs, [open_slots], given)  # these have the least choice, so they come first
    yield from _hang([name for name in leaves if name in reach.punchable], fan_outs, [punch_slots, open_slots], given)
    rest = [*narrow, *(name for name in leaves if name in reach.open)]
    yield from _hang(rest, fan_outs, [shy_slots, punch_slots, open_slots], given)


def _hang(
    names: Sequence[str], fan_outs: Mapping[str, int], queues: Sequence[deque[str]], given: _Given
) -> Iterable[tuple[str, str]]:
    """Yield a slot for each node: of a few nodes, the one that the slot's owner has given the fewest stripes so far."""
    later = iter(names)
    few = list(islice(later, COMPARED if len(names) <= COMPARED else 1))
    while few:
        parent = next((queue.popleft() for queue in queues if queue), SOURCE)
        closes = not any(queues)  # only nodes that bring slots of their own are left
        child = min(few, key=lambda name: (closes and name not in fan_outs, given.weight(parent, name)))
        few.remove(child)
        few.extend(islice(later, 1))
        yield child, parent
        queues[-1].extend([child] * fan_outs.get(child, 0))


def _spares(topology: Topology, name: str, position: int) -> list[str]:
    """Return spare upstreams of a node, so that it has some beside the source, spread evenly over the swarm."""
    names = topology.planned
    parents = set(topology.parents[name])
    step = max(1, len(names) // (SPARES + 1))
    around = (names[(position + 1 + offset * step) % len(names)] for offset in range(SPARES if names else 0))
    return [
        other for other in dict.fromkeys(around) if other != name and other not in parents and other in topology.feeding
    ]
