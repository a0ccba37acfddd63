"""The addresses at which others can dial this node, and whether they can; port mapping and plans change them.

- Addresses that the owner names replace those that are listened on; an address that the router gives is added to both.
- Whether others can connect is the coordinator's word (`FetchPlan.dialled`), which rests on the receipts of those who
  tried.
"""

from dataclasses import dataclass

from protocol import limits

CAN, CANNOT = (
    "others can connect to you",
    "others cannot connect to you, so your node connects to them",
)


@dataclass
class Reachability:
    """How one node is reached."""

    shares: bool
    """Whether anything listens for others."""
    own: tuple[str, ...] = ()
    """Where it listens, or what its owner advertises."""
    mapped: str = ""
    """The router's address that leads here; empty if there is none."""
    mapping: str = ""
    """What became of the attempt to map the port, in one sentence."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where others may dial it, as it registers them."""
        found = dict.fromkeys((*self.own, *filter(None, [self.mapped])))
        return tuple(found)[: limits.ADDRESSES_MAX] if self.shares else ()

    def describe(self, dialled: bool | None) -> str:
        """Say in one sentence whether others can connect; `dialled`: what the coordinator says, None if it does not."""
        if not self.shares:
            return "incoming connections are off (--no-share); your node connects to others"
        if dialled is None:
            return "not known yet whether others can connect to you"
        return CAN if dialled else CANNOT
