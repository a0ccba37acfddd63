"""Parts of libp2p that a node does not use, left out of its start.

- `import libp2p` imports all of its transports, muxers, discovery, relays and clients for certificates, and their
  libraries: a third of the processor time of an agent's or a seeder's start.
- `leave_out` puts an empty module in the place of each such part. Every name in it is a class that `isinstance` and
  `except` accept. The use of an instance is an error, so that no use is missed.
- It is for the program `swarm-node`: whoever imports libp2p without it gets all of libp2p.
- The list is for the pinned version (see `workarounds`). A part that a later version does not have costs nothing; one
  that it begins to use raises `LeftOut` in the tests with real processes.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PARTS = (
    "multiaddr.resolvers",
    "libp2p.crypto.keystore",
    "libp2p.discovery",
    "libp2p.host.routed_host",
    "libp2p.identity_utils",
    "libp2p.peer.persistent",
    "libp2p.rcmgr.prometheus_exporter",
    "libp2p.relay",
    "libp2p.security.insecure",
    "libp2p.security.noise",
    "libp2p.security.pnet",
    "libp2p.security.secio",
    "libp2p.security.tls",
    "libp2p.stream_muxer.mplex",
    "libp2p.stream_muxer.yamux",
    "libp2p.transport.quic",
    "libp2p.transport.websocket",
)
"""The parts, each with all that is in it. Our hosts use TCP between IP addresses, with our own Noise and Yamux."""


class LeftOut(Exception):
    """A part of libp2p that was left out is used."""


class _Unused(Exception):
    """The class of every name. A host makes a resolver of names, for example, and never asks it."""

    def __bool__(self) -> bool:
        raise LeftOut(f"{self!r} is used.")

    def __getattr__(self, name: str) -> Any:
        raise LeftOut(f"{name} of {self!r} is used.")


class _Empty(ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> type[_Unused]:
        if name.startswith("__"):  # what the import system asks a module for
            raise AttributeError(name)
        made = type(name, (_Unused,), {"__module__": self.__name__})
        setattr(self, name, made)
        return made


class _PartFinder(MetaPathFinder, Loader):
    """Finds the parts before anything else does."""

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        if not any(fullname == part or fullname.startswith(f"{part}.") for part in PARTS):
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module empty."""


FINDER = _PartFinder()


def leave_out() -> None:
    """Leave these parts out of libp2p, which must not be imported yet."""
    assert "libp2p" not in sys.modules
    sys.meta_path.insert(0, FINDER)
