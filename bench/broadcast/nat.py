"""NAT routers and firewalls, made of nftables rules, that stand between a party and the others.

- `cone`: the party's listening port has one address outside, with another number, and whoever dials that gets in.
- `restricted`: the port has one address outside; only those get in whom the party has sent a packet to before.
- `symmetric`: every connection leaves from another port, drawn by chance; so nobody knows where to dial.
- `firewall`: the party has its own address, and drops what it did not ask for.
- Routers drop what they do not expect, as RFC 5382 demands, and answer nothing.
- Half of the workers of a `nat` cell are `restricted`, as most home routers are.
"""

from typing import Literal, get_args

Nat = Literal["cone", "restricted", "symmetric", "firewall"]
KINDS: tuple[Nat, ...] = get_args(Nat)

INSIDE_PORT, OUTSIDE_PORT = 4001, 14001
"""The listening port that a `cone` translates."""

_STATEFUL = """
table ip filter {
  chain input { type filter hook input priority 0; policy drop;
    iifname != "OUTSIDE" accept
    ct state established,related accept
  }
  chain forward { type filter hook forward priority 0; policy drop;
    iifname "inside" accept
    ct state established,related accept
    ct status dnat accept
  }
}
"""

_NAT = """
table ip nat {
  chain prerouting { type nat hook prerouting priority dstnat;
    PREROUTING
  }
  chain postrouting { type nat hook postrouting priority srcnat;
    POSTROUTING
    oifname "outside" masquerade RANDOM
  }
}
"""


def router_rules(kind: Nat, *, outside: str, inside: str) -> str:
    """The rules of a router with these two addresses: its own outside, and the party's inside."""
    cone = kind == "cone"
    into = f'iifname "outside" tcp dport {OUTSIDE_PORT} dnat to {inside}:{INSIDE_PORT}' if cone else ""
    out = f'oifname "outside" tcp sport {INSIDE_PORT} snat to {outside}:{OUTSIDE_PORT}' if cone else ""
    rules = _NAT.replace("PREROUTING", into).replace("POSTROUTING", out)
    rules = rules.replace("RANDOM", "fully-random" if kind == "symmetric" else "")
    return _STATEFUL.replace("OUTSIDE", "outside") + rules


def firewall_rules() -> str:
    """The rules of a party that drops what it did not ask for."""
    return _STATEFUL.replace("OUTSIDE", "eth0")
