"""The mapping of this node's port at the router, kept while the node runs.

    ask (PCP, NAT-PMP, UPnP) ──► granted ──► renewed at half of the lease ──► removed at the end
            ▲                       │
            └── again after a while ┴── refused, silent, or an address that is not public

- The mapping is optional: nothing waits for it, and nothing fails without it. One line reports the result, and another
  one only when it changes.
- The router's answer is not trusted: an external address that is not public, such as one behind a second NAT, is
  reported but not advertised, and its mapping is removed.
- A killed node leaves its mapping until the lease ends; if a router supports only permanent mappings, until the next
  start renews it and the next end removes it.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import trio

from protocol.people.addresses import ip_of, why_undialable
from swarm_node.reach.gateway import Gateway, NoMapping, find_gateway
from swarm_node.reach.listening import Reachability
from swarm_node.reach.methods import Mapping, Method, NatPmp, Pcp, Upnp

log = logging.getLogger(__name__)

ATTEMPT_S = 30.0
"""Time-out of one attempt of one method: search, description and six actions of a slow router."""

UNMAP_S = 2.0
"""Time-out at the end, so that Ctrl-C stays quick; a mapping that is not removed ends with its lease."""


@dataclass(frozen=True)
class RenewalPace:
    """Lease time of a mapping, and the pauses before renewals and retries."""

    lease_s: int = 1800
    """A restarted router forgets its mappings: it is asked again after 15 min."""
    renew_min_s: float = 30.0
    """Smallest pause, however short the granted lease is."""
    renew_max_s: float = 900.0
    again_s: float = 60.0
    """Pause after a failed renewal, while the lease is valid."""
    retry_s: float = 900.0
    """Pause after a failed attempt: the machine may be in another network by then."""

    def renewal_s(self, lease_s: int) -> float:
        """Return the pause before the next renewal."""
        return min(max(lease_s / 2, self.renew_min_s), self.renew_max_s) if lease_s else self.renew_max_s


class PortMapper:
    """Keeps one TCP port mapped."""

    def __init__(
        self,
        port: int,
        reach: Reachability,
        *,
        only_if: Callable[[], Awaitable[bool]] | None = None,
        find: Callable[[], Awaitable[Gateway]] = find_gateway,
        methods: Sequence[Method] | None = None,
        pace: RenewalPace | None = None,
    ) -> None:
        self._port, self._reach, self._only_if, self._find = port, reach, only_if, find
        self._methods = (Pcp(), NatPmp(), Upnp()) if methods is None else tuple(methods)
        self._pace = pace or RenewalPace()
        self._held: tuple[Gateway, Method] | None = None
        self._ends_at = 0.0
        """End of the advertised mapping's lease, by trio's clock."""

    async def run(self) -> None:
        """Map and renew until cancelled; then remove the mapping."""
        if self._only_if is not None and not await self._only_if():
            return
        try:
            while True:
                pause_s = await self._step()
                await trio.sleep(pause_s)
        finally:
            with trio.CancelScope(shield=True), trio.move_on_after(UNMAP_S):
                await self._unmap()

    async def _step(self) -> float:
        """Make or renew the mapping; return how long to wait before the next attempt."""
        try:
            gateway = await self._find()
            if ip_of(gateway.own_address).is_global:
                self._report(f"This machine has a public address ({gateway.own_address}); no port mapping is needed.")
                return self._pace.retry_s
            method, mapping = await self._map(gateway)
        except (
            NoMapping,
            OSError,
            ValueError,
        ) as error:  # the node continues after any failure of a router or a network
            if self._reach.mapped and trio.current_time() < self._ends_at:
                log.debug("renewal failed: %s", error)
                return self._pace.again_s
            self._reach.mapped, self._held = "", None
            self._report(f"The router does not forward port {self._port} to this node: {error}.")
            return self._pace.retry_s
        self._held = gateway, method
        address = f"{mapping.address}:{mapping.port}"
        if why := _why_not_public(mapping):
            await self._unmap()
            self._reach.mapped = ""
            self._report(
                f"The router would forward a port ({method.name}), but {why}: a second NAT is in between, so others "
                "still cannot connect to you."
            )
            return self._pace.retry_s
        self._reach.mapped = address
        self._ends_at = trio.current_time() + mapping.lease_s if mapping.lease_s else float("inf")
        self._report(f"The router forwards {address} to port {self._port} of this node ({method.name}).")
        return self._pace.renewal_s(mapping.lease_s)

    async def _map(self, gateway: Gateway) -> tuple[Method, Mapping]:
        """Ask with the method that worked last, or with all in turn."""
        reasons: list[str] = []
        held = self._held[1] if self._held and self._held[0] == gateway else None
        for method in [held] if held else self._methods:
            try:
                with trio.fail_after(ATTEMPT_S):
                    return method, await method.map(gateway, self._port, self._pace.lease_s)
            except NoMapping as error:
                reasons.append(f"{method.name}: {error}")
            except trio.TooSlowError:
                reasons.append(f"{method.name}: it answers too slowly")
        raise NoMapping("; ".join(reasons))

    async def _unmap(self) -> None:
        if self._held is not None:
            gateway, method = self._held
            self._held = None
            with suppress(NoMapping):
                await method.unmap(gateway, self._port)

    def _report(self, line: str) -> None:
        if line != self._reach.mapping:
            self._reach.mapping = line
            log.info("%s", line)


def _why_not_public(mapping: Mapping) -> str:
    """Return what is wrong with the external address; empty if others can dial it."""
    address = f"[{mapping.address}]:{mapping.port}" if ":" in mapping.address else f"{mapping.address}:{mapping.port}"
    if why_undialable(address) or not mapping.port:
        return f"it names {address}, which nobody can dial"
    return "" if ip_of(mapping.address).is_global else f"its own address {mapping.address} is not public"
