"""Real nginx and real Caddy with the configurations of `installers/proxy`, before a real coordinator, by TLS.

Only names, ports and certificates differ from what an operator installs.
"""

import json
import shutil
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from protocol import limits
from protocol.wire import canonical
from protocol.work.messages import Dial, Dialled, Uploaded
from tests.certificates import write_certificate
from tests.processes.light_node import LightNode
from tests.processes.nginx import start_nginx
from tests.processes.programs import Program, Swarm, free_address, until
from tests.processes.rounds import Coordinator, Settings, join, operator_of

pytestmark = pytest.mark.processes

EXAMPLES = Path(__file__).resolve().parents[2] / "installers" / "proxy"
CADDY = shutil.which("caddy")

AROUND_CADDY = "{{\n\tadmin off\n\tdefault_bind 127.0.0.1\n\thttp_port {http}\n\thttps_port {https}\n"
ELSEWHERE = "127.0.0.9"
"""A second address of this machine: the proxy sees it, and the coordinator only if the proxy names it."""


@dataclass
class Place:
    """The addresses of a proxy and its files."""

    folder: Path
    coordinator: str
    https: str
    http: str

    @property
    def certificate(self) -> Path:
        return self.folder / "tls.crt"


def replaced(name: str, *pairs: tuple[str, str]) -> str:
    """Return an example with other words, each of which it must have."""
    text = (EXAMPLES / name).read_text()
    for old, new in pairs:
        assert old in text, f"{name} has no {old!r} any more"
        text = text.replace(old, new)
    return text


def nginx(swarm: Swarm, place: Place) -> Program:
    text = replaced(
        "nginx.conf",
        ("127.0.0.1:8700", place.coordinator),
        ("    listen [::]:80;\n", ""),
        ("    listen [::]:443 ssl http2;\n", ""),
        ("listen 80;", f"listen {place.http};"),
        ("listen 443 ", f"listen {place.https} "),
        ("/etc/letsencrypt/live/swarm.example.org/fullchain.pem", str(place.certificate)),
        ("/etc/letsencrypt/live/swarm.example.org/privkey.pem", str(place.folder / "tls.key")),
        ("swarm.example.org", "localhost"),
    )
    return start_nginx(swarm, place.folder, text)


def caddy(swarm: Swarm, place: Place) -> Program:
    if CADDY is None:
        # The program is the operator's choice, so the tests ask for no more than what is here.
        pytest.skip("Caddy is not installed here (Debian: apt-get install caddy)")
    http, https = (address.rpartition(":")[2] for address in (place.http, place.https))
    tls = f"tls {place.certificate} {place.folder / 'tls.key'}"
    text = replaced(
        "Caddyfile",
        ("\n{\n\tservers", "\n" + AROUND_CADDY.format(http=http, https=https) + "\tservers"),
        ("swarm.example.org} {", f"swarm.example.org}} {{\n\t{tls}\n"),
    )
    file = place.folder / "Caddyfile"
    file.write_text(text)
    variables = [f"{name}={place.folder}" for name in ("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME")]
    variables += [f"SWARM_HOST=https://127.0.0.1:{https}", f"SWARM_UPSTREAM={place.coordinator}"]
    return swarm.start("caddy", "env", *variables, CADDY, "run", "--config", str(file), "--adapter", "caddyfile")


class Scene:
    """A coordinator with one version behind a proxy, and clients that trust the proxy's certificate."""

    def __init__(self, swarm: Swarm, policy: Path, proxy: str) -> None:
        self.swarm = swarm
        https = free_address()
        settings: Settings = {
            "round": {
                "public_url": f"https://{https}",
                "seeder_public": "127.0.0.1:1",  # so that chunks come through the proxy
                "listeners_per_address": 1,
            },
            "sampling": {"samples_per_group": 2, "max_new_tokens": 8},
            "staleness": {"max_updates": 100},
        }
        self.coordinator = Coordinator(swarm, settings)
        self.place = Place(swarm.folder, self.coordinator.address, https, free_address())
        write_certificate(self.place.folder, "test")
        self.program = {"nginx": nginx, "caddy": caddy}[proxy](swarm, self.place)
        self.coordinator.start()
        operator_of(swarm, self.coordinator, policy).publish()
        self.trusted = ssl.create_default_context(cafile=str(self.place.certificate))
        self.http = self.client()
        until(f"{proxy} to listen", self._answers)

    def client(self, *, address: str = "127.0.0.1", **headers: str) -> httpx.Client:
        transport = httpx.HTTPTransport(verify=self.trusted, local_address=address)
        made = httpx.Client(base_url=f"https://{self.place.https}", transport=transport, headers=headers, timeout=30)
        self.swarm.at_end(made.close)
        return made

    def light_node(self, **headers: str) -> LightNode:
        """Return a node that calls from `ELSEWHERE`, and writes these headers itself."""
        node = LightNode(self.coordinator.join_string)
        node.http.close()
        node.http = self.client(address=ELSEWHERE, **headers)
        return node

    def _answers(self) -> bool:
        try:
            return self.http.get("/healthz").status_code == 200
        except httpx.TransportError:
            return False


@pytest.fixture(scope="module", params=["nginx", pytest.param("caddy", marks=pytest.mark.slow)])
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, policy: Path) -> Iterator[Scene]:
    swarm = Swarm(tmp_path_factory.mktemp(request.param))
    try:
        yield Scene(swarm, policy, request.param)
    finally:
        swarm.close()


def test_a_real_node_joins_fetches_the_version_and_works_through_the_proxy(scene: Scene) -> None:
    command = ["env", f"SSL_CERT_FILE={scene.place.certificate}"]
    node = join(scene.swarm, "node", scene.coordinator.join_string, before=command)
    match = node.said(r"version fetched version=1 .*from_peers=0 from_seeder=0 from_http=(\d+)")
    assert int(match[1]) > 0
    scene.coordinator.reaches("nodes_alive", 1)
    until("a group", scene.coordinator.accepted_groups)
    node.interrupt()


def test_visitors_read_pages_by_https_and_http_2_and_the_operators_paths_are_closed(scene: Scene) -> None:
    assert f"https://{scene.place.https}" in scene.http.get("/join").text
    moved = httpx.get(f"http://{scene.place.http}/training", follow_redirects=False)
    assert moved.status_code in (301, 308)
    assert moved.headers["location"].startswith("https://")
    for path in ("/metrics", "/v1/operator/status", "/v1/learner/state"):
        assert scene.coordinator.http.get(path).status_code != 404, "the coordinator itself has it"
        assert scene.http.get(path).status_code == 404
    host, _, port = scene.place.https.partition(":")
    secure = ssl.create_default_context(cafile=str(scene.place.certificate))
    secure.set_alpn_protocols(["h2", "http/1.1"])
    with socket.create_connection((host, int(port))) as line, secure.wrap_socket(line, server_hostname=host) as agreed:
        assert agreed.selected_alpn_protocol() == "h2"


def test_an_event_stream_is_not_buffered(scene: Scene) -> None:
    with scene.http.stream("GET", "/v1/events") as stream:
        assert stream.status_code == 200
        lines = stream.iter_lines()
        assert next(line for line in lines if line.startswith("event:")) == "event: moment"
        assert json.loads(next(lines).removeprefix("data: "))["version"] == 1


def test_the_largest_bodies_of_nodes_pass_and_larger_ones_get_the_coordinators_own_answer(scene: Scene) -> None:
    answer = scene.http.post("/v1/probe/upload", content=bytes(limits.PROBE_MAX_BYTES))
    assert Uploaded.from_bytes(answer.content).size_bytes == limits.PROBE_MAX_BYTES
    refused = scene.http.post("/v1/rollouts", content=bytes(limits.REQUEST_MAX_BYTES))
    assert canonical.decode(refused.content)["code"] == "malformed_message", "it was read to its end"


def test_the_coordinator_sees_callers_and_not_what_they_write_into_x_forwarded_for(scene: Scene) -> None:
    node = scene.light_node(**{"X-Forwarded-For": "127.0.0.8, 192.0.2.1"})
    word = "ab" * 16
    with greeting(word) as port:
        reached = node.call("/v1/probe/dial", Dial(port=port, word=word), Dialled)
    assert reached == Dialled(reached=True, proxied=False)
    invented = {"X-Forwarded-For": "192.0.2.1"}
    with (
        scene.http.stream("GET", "/v1/events", headers=invented) as first,
        scene.http.stream("GET", "/v1/events", headers=invented) as second,
    ):
        assert [first.status_code, second.status_code] == [200, 200], "192.0.2.1 itself may have one stream"


@contextmanager
def greeting(word: str) -> Iterator[int]:
    """Listen at `ELSEWHERE` alone, and send `word` to the first caller."""
    with socket.create_server((ELSEWHERE, 0)) as listener:

        def greet() -> None:
            line, _ = listener.accept()
            with line:
                line.sendall(word.encode())

        thread = threading.Thread(target=greet, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(timeout=30)
