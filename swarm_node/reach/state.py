"""Reachability of this node: its dialable addresses; port mapping and plans change it.

- Addresses that the owner sets replace the listening addresses; the router's address is added in both cases.
- The coordinator reports whether others can connect (`FetchPlan.dialled`), from the receipts of nodes that tried.
"""

from dataclasses import dataclass

from protocol import limits

CAN, CANNOT = (
    "others can connect to you",
    "others cannot connect to you, so your node connects to them",
)


@dataclass
class Reachability:
    """Reachability of one node."""

    shares: bool
    """True if the node listens for others."""
    own: tuple[str, ...] = ()
    """The listening addresses, or those that the owner advertises."""
    mapped: str = ""
    """The router's address that is forwarded to this node; empty if there is none."""
    mapping: str = ""
    """Result of the attempt to map the port, in one sentence."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """The dialable addresses that the node registers."""
        addresses = dict.fromkeys((*self.own, *filter(None, [self.mapped])))
        return tuple(addresses)[: limits.ADDRESSES_MAX] if self.shares else ()

    def describe(self, dialled: bool | None) -> str:
        """Return one sentence on whether others can connect; `dialled` is the coordinator's report, None if unknown."""
        if not self.shares:
            return "incoming connections are off (--no-share); your node connects to others"
        if dialled is None:
            return "not known yet whether others can connect to you"
        return CAN if dialled else CANNOT
