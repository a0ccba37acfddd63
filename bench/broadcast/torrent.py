"""libtorrent: a seed at the source and a peer at every worker, each told of all the others.

- Settings are chosen for this task, not for a crowded internet: TCP only, no discovery, no encryption, connections at
  once, all peers unchoked. Super-seeding made it three times slower here, so the source does not.
- The source has hashed its file before the start; the workers then learn the torrent and everybody's address.
- As a program, `ADDRESS` is one peer, told on standard input what to share and with whom.
"""

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

from bench.broadcast.contender import SOURCE, Outcome, bad_bytes, workers_of
from bench.broadcast.net import Net
from bench.broadcast.program import Program, module

PORT = 6881
PIECE_BYTES = 128 << 10
"""The best of 64, 128 and 256 KiB, by a little."""

SETTINGS: dict[str, Any] = {
    "enable_dht": False,
    "enable_lsd": False,
    "enable_upnp": False,
    "enable_natpmp": False,
    "enable_incoming_utp": False,
    "enable_outgoing_utp": False,
    "out_enc_policy": 2,
    "in_enc_policy": 2,
    "allow_multiple_connections_per_ip": True,
    "unchoke_slots_limit": -1,
    "connection_speed": 500,
    "smooth_connects": False,
    "torrent_connect_boost": 200,
    "mixed_mode_algorithm": 0,
    "min_reconnect_time": 1,
    "alert_mask": 0x40 | 0x1,
}


class Torrent:
    """A seed and its peers."""

    name = "libtorrent"

    def __init__(self, net: Net, folder: Path) -> None:
        self._net, self._folder = net, folder
        self._programs: dict[str, Program] = {}
        self._count = 0

    def start(self) -> None:
        for party in self._net.parties:
            command = [*module("torrent"), f"{self._net.listen_host(party)}:{PORT}"]
            self._programs[party] = Program(self._net, party, command, self._folder / "logs" / f"{party}.log")
        for program in self._programs.values():
            program.heard("ready", lambda line: "ready" in line)

    def broadcast(self, payload: Path, *, within_s: float) -> Outcome:
        self._count += 1
        number, torrent = self._count, self._folder / f"{self._count}.torrent"
        torrent.write_bytes(describe(payload))
        peers = [self._net.address(party) for party in self._net.parties]
        order = {"number": number, "torrent": str(torrent), "peers": peers}
        self._programs[SOURCE].tell({**order, "folder": str(payload.parent), "peers": []})
        self._heard(SOURCE, number, within_s)
        copies = {worker: self._folder / worker / str(number) / payload.name for worker in workers_of(self._net)}
        began_at_s = time.time()
        for worker, copy in copies.items():
            self._programs[worker].tell({**order, "folder": str(copy.parent)})
        seconds = {worker: self._heard(worker, number, within_s) - began_at_s for worker in copies}
        for program in self._programs.values():
            program.tell({"drop": number})
        for program in self._programs.values():
            program.heard("the end of it", lambda line: line.get("dropped") == number)
        wrong = sum(bad_bytes(copy, payload) for copy in copies.values())
        for copy in copies.values():
            copy.unlink(missing_ok=True)
        sent = {"from_peers": payload.stat().st_size * len(copies)}
        return Outcome(began_at_s=began_at_s, seconds=seconds, bad_bytes=wrong, bytes_from=sent)

    def close(self) -> None:
        for program in self._programs.values():  # a session takes its time to say goodbye to trackers it never had
            program.kill()

    def _heard(self, party: str, number: int, within_s: float) -> float:
        line = self._programs[party].heard("the end", lambda line: line.get("done") == number, within_s=within_s)
        return float(line["at_s"])


def describe(payload: Path) -> bytes:
    """The torrent of one file."""
    import libtorrent as lt

    torrent = lt.create_torrent(lt.list_files(str(payload)), PIECE_BYTES, flags=lt.create_torrent.v1_only)
    lt.set_piece_hashes(torrent, str(payload.parent))
    return bytes(lt.bencode(torrent.generate()))


class Peer:
    """A libtorrent session with commands from standard input."""

    def __init__(self, address: str) -> None:
        import libtorrent as lt

        self._lt = lt
        settings: Any = {**SETTINGS, "listen_interfaces": address}
        self._session = lt.session(settings)
        self._handles: dict[int, Any] = {}
        self._numbers: dict[str, int] = {}
        self._ended = threading.Event()

    def run(self) -> None:
        watcher = threading.Thread(target=self._watch)
        watcher.start()
        _say(ready=True)
        for line in sys.stdin:
            order = json.loads(line)
            if "drop" in order:
                self._drop(order["drop"])
            else:
                self._add(order)
        self._ended.set()
        watcher.join()

    def _add(self, order: dict[str, Any]) -> None:
        lt, flags = self._lt, self._lt.torrent_flags
        parameters = lt.add_torrent_params()
        parameters.ti = lt.torrent_info(order["torrent"])
        parameters.save_path = order["folder"]
        parameters.flags &= ~(flags.auto_managed | flags.paused)
        self._numbers[str(parameters.ti.info_hash())] = order["number"]
        handle = self._session.add_torrent(parameters)
        self._handles[order["number"]] = handle
        for peer in order["peers"]:
            handle.connect_peer((peer, PORT))

    def _drop(self, number: int) -> None:
        handle = self._handles.pop(number)
        self._session.remove_torrent(handle)

    def _watch(self) -> None:
        lt = self._lt
        while not self._ended.is_set():
            self._session.wait_for_alert(200)
            for alert in self._session.pop_alerts():
                if isinstance(alert, lt.torrent_finished_alert):
                    _say(done=self._numbers[str(alert.handle.info_hash())], at_s=time.time())
                elif isinstance(alert, lt.torrent_removed_alert):
                    _say(dropped=self._numbers[str(alert.info_hash)])
                elif isinstance(alert, lt.torrent_error_alert):
                    print(alert.message(), file=sys.stderr, flush=True)


def _say(**line: object) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    Peer(sys.argv[1]).run()
