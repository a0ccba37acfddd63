"""Progress of a version's download: plain values for `status`, and one text for the log, `status` and the live view."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import trio

from protocol.text.plain import counted, duration_text, size_text

if TYPE_CHECKING:
    from swarm_node.p2p.download import DownloadProgress, FetchReport

LOG_EVERY_S = 10.0
"""Time between two lines of the log about one download; most downloads take less."""

LEFT_MAX_S = 7 * 86_400.0
"""A longer estimate says only that the download hardly moves."""


@dataclass
class Download:
    """Progress of a version's download."""

    version: int
    bytes: int
    report: "FetchReport"
    """The sources of the bytes that have arrived."""
    bytes_done: int = 0
    """Bytes that are stored, with those that were stored before."""
    peers: int = 0
    """Number of connected peers."""
    started_at: float = field(default_factory=trio.current_time)
    _logged_at: float = field(default_factory=trio.current_time)

    def advance(self, progress: "DownloadProgress", peers: int) -> bool:
        """Record progress; return True if the log is to have a line about it."""
        self.bytes_done, self.bytes, self.peers = progress.bytes_done, progress.bytes, peers
        now = trio.current_time()
        if now - self._logged_at < LOG_EVERY_S:
            return False
        self._logged_at = now
        return True

    def to_json(self) -> dict[str, float]:
        seconds = max(1e-3, trio.current_time() - self.started_at)
        arrived = self.report.bytes_from
        return {
            "version": self.version,
            "bytes_done": self.bytes_done,
            "bytes": self.bytes,
            "peers": self.peers,
            "bytes_per_s": arrived.total() / seconds,
            "bytes_arrived": arrived.total(),
            "bytes_from_peers": arrived["peer"],
        }


def progress_text(load: Mapping[str, Any]) -> str:
    """Return version, share, size, speed, time left, and the share of what has arrived that came from other nodes."""
    share = load["bytes_done"] / load["bytes"] if load["bytes"] else 0.0
    rate = f"{load['bytes_per_s'] / 1e6:.1f} MB/s from {counted(load['peers'], 'peer')}"
    said = [f"fetching version {load['version']}: {share:.0%} of {size_text(load['bytes'])}", rate]
    if load["bytes_arrived"]:
        left_s = (load["bytes"] - load["bytes_done"]) / load["bytes_per_s"]
        said.append(f"about {duration_text(left_s)} left" if left_s < LEFT_MAX_S else "more than a week left")
        said.append(f"{load['bytes_from_peers'] / load['bytes_arrived']:.0%} of it from other nodes")
    return ", ".join(said)
