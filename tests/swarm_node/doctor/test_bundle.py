"""A support bundle tells a stranger nothing of its owner: planted secrets are looked for in every byte of it."""

import getpass
import json
import socket
import zipfile
from pathlib import Path
from urllib.parse import quote

import pytest

from protocol.errors import DiskFull
from swarm_node.allowance import settings
from swarm_node.coordinator_api.join_string import JoinString
from swarm_node.doctor import bundle
from swarm_node.doctor.bundle import known_names, redact
from swarm_node.doctor.report import fail, ok
from swarm_node.keys import identity
from swarm_node.owner import stopped

HOMES = "/" + "home"

SECRETS = (
    "203.0.113.77",
    "2001:db8::dead:beef",
    "coordinator.secret.example",
    "alice@secret.example",
    f"{HOMES}/alice",
    "C:\\Users\\alice",
    "aa:bb:cc:dd:ee:ff",
    "alices-laptop.fritz.box",
    "/dns4/mallory.secret.example/tcp/4001",
    "/dnsaddr/bootstrap.secret.example",
    "12D3KooWQ1j1Zbq3C4v6sD5fYz7h8K9mNpRtUvWxYzAbCdEfGhJk",
)


def everything_in(path: Path) -> str:
    with zipfile.ZipFile(path) as archive:
        return "\n".join(archive.read(name).decode() for name in archive.namelist())


def test_nothing_that_names_the_owner_is_in_a_bundle(tmp_path: Path) -> None:
    home = tmp_path / "alices-node"
    me = identity.load_or_create(home / identity.FILE)
    identity.load_or_create(home / "old-abc" / identity.FILE)
    seeds = [path.read_text().strip() for path in home.glob("**/*.key")]
    said = " and ".join(SECRETS)
    findings = [
        fail("round", f"http://{SECRETS[2]}:8700#{'ab' * 32} does not answer", f"[{SECRETS[1]}]:443 {said}", str(home)),
        ok("key", f"{me.key.node_id} {seeds[0]}", f"{SECRETS[0]}:8700, user {getpass.getuser()}"),
        ok("disk", f"{Path.home()}/x on {socket.gethostname()}"),
    ]
    stopped.record_end(home, DiskFull(f"There is no room below {home} ({said})."))
    (home / settings.FILE).write_text(f"# {said}\nhours = '22:00-07:00'\n")
    join = JoinString(f"https://{SECRETS[2]}:8700", "ab" * 32)
    bundle.write(tmp_path / "bundle.zip", home, findings, joins=[join])
    text = everything_in(tmp_path / "bundle.zip")
    planted = [*SECRETS, *seeds, me.key.node_id, str(home), str(tmp_path), "ab" * 32, "alice", "secret.example"]
    planted += [name for name in (socket.gethostname(), str(Path.home())) if len(name) >= 3 and name != "/"]
    found = [secret for secret in planted if secret in text or json.dumps(secret)[1:-1] in text]
    assert found == []
    assert "There is no room below" in text
    assert "22:00-07:00" in text
    assert '"libp2p"' in text


@pytest.mark.parametrize(
    "text",
    [
        r"\u0032\u0030\u0033.0.113.77 refused",
        r"203\u002e0\u002e113\u002e77",
        r"b'203\x2e0\x2e113\x2e77'",
        r"http:\u002f\u002fcoordinator.secret.example",
        r"[\u0032001:db8::dead:beef]:443",
        "/ip4/203.0.113.77/tcp/4001 and /dns6/coordinator.secret.example/udp/1/quic",
    ],
)
def test_an_address_does_not_hide_behind_escapes_or_in_a_multiaddress(text: str) -> None:
    shown = redact(text, {})
    assert "113" not in shown
    assert "secret" not in shown
    assert "dead" not in shown


def test_names_that_are_not_ascii_are_found_however_they_are_written(tmp_path: Path) -> None:
    home = tmp_path / "Jürgens Rechner"
    secrets = known_names(home)
    for form in (str(home), json.dumps(str(home)), ascii(str(home)), repr(str(home).encode()), quote(str(home))):
        shown = redact(f"there is no {form}", secrets)
        assert "rgens" not in shown, form


def test_what_helps_is_kept(tmp_path: Path) -> None:
    kept = "Driver 550.54.14 at 61.5 °C, mode 0644, version 12, 12:34:56, torch 2.6.0+cu124, 22:00-07:00, 1.5 GB"
    assert redact(kept, {}) == kept


def test_a_short_name_is_taken_out_as_a_word_only() -> None:
    assert redact(f"dev uses the device {HOMES}/dev/x", {"dev": "<user>"}) == "<user> uses the device <home>"


def test_a_bundle_is_never_written_over_anything(tmp_path: Path) -> None:
    (tmp_path / "bundle.zip").write_text("mine")
    with pytest.raises(FileExistsError):
        bundle.write(tmp_path / "bundle.zip", tmp_path, [])
    assert (tmp_path / "bundle.zip").read_text() == "mine"
