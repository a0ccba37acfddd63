"""`make bench-endpoint`: completions that a round's nodes sample for callers of the endpoint.

- `overhead`: the time that a lone caller waits, without the time for which the node has the query: from passing it to
  the engine until its answer is signed and sent.
- `crowd`: a thousand callers at once over four nodes, each with one short completion; none may fail.
- `fairness`: the time that a caller with a few queries waits while another key has hundreds open, against alone.
- `first`: the time to the only token of a short prompt, against vLLM's own server with the same engine and the smallest
  model, where `SWARM_VLLM_PYTHON` names an environment with vLLM.
- `direct`: the time to the first token of a stream, against the torch engine alone in one process. The policy is the
  embedded one, or the one that `--policy` names.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from statistics import median, quantiles

import httpx

from bench.endpoint.callers import Endpoint, call, first_tokens
from bench.harness import Bench, Child, quick_from_environment
from bench.rounds.served import BenchRound, make_policy
from tests.processes.programs import free_address, script

PARTS = ("overhead", "crowd", "fairness", "first", "direct")
TOKENS = 16
NODES = 4
SETTINGS = {
    "task.name": "arithmetic",
    "sampling.max_new_tokens": 64,
    "sampling.samples_per_group": 2,
    "learner.groups_per_update": 64,
    "staleness.max_updates": 0,
    "audit.first_groups": 0,
    "audit.floor": 0,
    "audit.trusted_floor": 0,
    "leases.over_issue": 0,
    "market.budget_micros": 10**12,
}
"""Training needs a few groups in all: nodes that have proven themselves are then there for the callers."""

BUDGET = "100000000000"

FLOOD_COMES_S = 1.0
"""The time in which hundreds of requests are recorded; the last of them is answered seconds later."""

LOOK_S = 0.5
"""The time between two looks whether a server answers."""

SERVER_S = 300.0
"""The limit until vLLM's server answers: it imports much, and the machine may have other work."""


class ServedRound:
    """A round with nodes that answer callers."""

    def __init__(self, folder: Path, policy: Path) -> None:
        self.round = BenchRound(folder, policy, SETTINGS)
        self.folder = folder

    def __enter__(self) -> "ServedRound":
        self.round.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.round.close()

    def add_nodes(self, count: int, *options: str, record: Path | None = None) -> None:
        """Start nodes, the first with a clock if there is a `record`, and wait until all have passed their trial."""
        for number in range(count):
            program: Sequence[str] = ()
            if record is not None and not number:
                program = [sys.executable, "-P", "-m", "bench.rounds.timed_node", str(record)]
            self.round.add_node(f"node-{number}", "--no-share", *options, program=program)
        logs = [self.folder / f"node-{number}.log" for number in range(count)]
        self.round.wait_for(
            "credit of every node", lambda: all("credited" in log.read_text(errors="replace") for log in logs)
        )

    def endpoint(self, name: str) -> Endpoint:
        """Make a key, and return the endpoint for its owner."""
        words = [script("swarm-coordinator"), "api-keys", "create", str(self.round.config), name, "--budget", BUDGET]
        made = json.loads(subprocess.run([*words, "--json"], check=True, capture_output=True, text=True).stdout)
        return Endpoint(made["url"], made["key"])


def own_seconds(record: Path) -> list[float]:
    """Return for how long the node had each query that it answered, from a node's record."""
    events = [json.loads(line) for line in record.read_text().splitlines()]
    began = {event["lease"]: event["began"] for event in events if event["kind"] == "sample"}
    sent = [(event, lease) for event in events if event["kind"] == "submit" for lease in event["answered"]]
    return [event["began"] - began[lease] for event, lease in sent if lease in began]


def measure_overhead(bench: Bench, policy: Path, folder: Path, rounds: int, count: int) -> None:
    """A lone caller and a lone node."""
    record = folder / "overhead.jsonl"
    with ServedRound(folder / "overhead", policy) as served:
        served.add_nodes(1, record=record)
        endpoint = served.endpoint("lone")
        call(endpoint, range(10), tokens=TOKENS)
        for _ in range(rounds):
            seconds = call(endpoint, range(count), tokens=TOKENS).seconds
            node_s = median(own_seconds(record)[-count:])
            bench.measure("a lone caller waits", 1000 * median(seconds), unit="ms")
            bench.measure("of this at the node", 1000 * node_s, unit="ms")
            bench.measure("overhead", 1000 * (median(seconds) - node_s), unit="ms")
    bench.goal("the overhead is at most 20 ms", bench.median("overhead"), at_most=20.0)


def measure_crowd(bench: Bench, policy: Path, folder: Path, rounds: int, callers: int) -> None:
    """Everybody at once, again and again."""
    with ServedRound(folder / "crowd", policy) as served:
        served.add_nodes(NODES)
        endpoint = served.endpoint("crowd")
        call(endpoint, range(NODES), tokens=TOKENS, at_once=NODES)
        for _ in range(rounds):
            began = time.monotonic()
            called = call(endpoint, range(callers), tokens=TOKENS, at_once=callers)
            seconds = time.monotonic() - began
            bench.measure("crowd: answers", len(called.seconds) / seconds, unit="per s")
            bench.measure("crowd: tokens", called.tokens / seconds, unit="per s")
            bench.measure("crowd: median of the waits", median(called.seconds), unit="s")
            bench.measure("crowd: 95 of 100 wait at most", quantiles(called.seconds, n=20)[-1], unit="s")
            bench.measure("crowd: told to come back", called.refused, unit="requests")
            bench.check(f"all of {callers} callers are answered", len(called.seconds) == callers)


def measure_fairness(bench: Bench, policy: Path, folder: Path, rounds: int, flood: int) -> None:
    """A caller with few queries, alone and beside a key with many."""
    with ServedRound(folder / "fairness", policy) as served:
        served.add_nodes(NODES)
        small, large = served.endpoint("small"), served.endpoint("large")
        call(small, range(NODES), tokens=TOKENS, at_once=NODES)
        for _ in range(rounds):
            bench.measure("fairness: alone", 1000 * median(call(small, range(20), tokens=TOKENS).seconds), unit="ms")
            with ThreadPoolExecutor(1) as pool:
                flooding = pool.submit(call, large, range(flood), tokens=TOKENS, at_once=flood)
                time.sleep(FLOOD_COMES_S)  # part of what is measured: the other key asks once the flood is there
                beside = call(small, range(20), tokens=TOKENS).seconds
                bench.measure("fairness: beside a flood", 1000 * median(beside), unit="ms")
                bench.measure("fairness: the flood waits", 1000 * median(flooding.result().seconds), unit="ms")
    times = bench.ratio(
        "fairness: the flood's wait / the other's", "fairness: the flood waits", "fairness: beside a flood"
    )
    bench.goal("a key with one query at a time waits at most a fifth of what a flood waits", times, at_least=5.0)


def until_answers(url: str, patience_s: float, is_running: Callable[[], bool], log: Path) -> None:
    """Wait for a server."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            if httpx.get(f"{url}/models", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        if time.monotonic() > deadline or not is_running():
            raise RuntimeError(f"No server answers at {url}.\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(LOOK_S)  # a server that starts tells nobody when it listens


def measure_first(bench: Bench, policy: Path, folder: Path, python: str, rounds: int, count: int) -> None:
    """One token of a short prompt: vLLM's server, and the swarm with a node on vLLM."""
    address = free_address()
    words = [
        python,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(policy),
        "--port",
        address.split(":")[1],
    ]
    options = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--served-model-name", "swarm"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    with (folder / "vllm.log").open("wb") as log:
        server = subprocess.Popen([*words, "--host", "127.0.0.1", *options], stdout=log, stderr=log, env=environment)
        try:
            until_answers(f"http://{address}/v1", SERVER_S, lambda: server.poll() is None, folder / "vllm.log")
            theirs = Endpoint(f"http://{address}/v1")
            with ServedRound(folder / "first", policy) as served:
                served.add_nodes(1, "--engine", "vllm", "--vllm-python", python)
                ours = served.endpoint("first")
                for endpoint in (ours, theirs):
                    call(endpoint, range(10), tokens=1)
                for _ in range(rounds):
                    for name, endpoint in (("swarm on vLLM", ours), ("vLLM's server", theirs)):
                        seconds = median(call(endpoint, range(count), tokens=1).seconds)
                        bench.measure(f"first token: {name}", 1000 * seconds, unit="ms")
        finally:
            server.terminate()
            server.wait()
    times = bench.ratio("first token: ours / vLLM's", "first token: swarm on vLLM", "first token: vLLM's server")
    bench.goal("the first token comes in 1.5 times of what vLLM's server takes", times, at_most=1.5)


def measure_direct(bench: Bench, policy: Path, folder: Path, rounds: int, count: int) -> None:
    """The first token of a stream, and of the node's engine alone."""
    child = Child([sys.executable, "-P", "-m", "bench.endpoint.direct", str(policy)])
    with closing(child) as engine, ServedRound(folder / "direct", policy) as served:
        served.add_nodes(1)
        endpoint = served.endpoint("direct")
        first_tokens(endpoint, range(3), tokens=TOKENS)
        for _ in range(rounds):
            alone = median(engine.ask(number)["seconds"] for number in range(count))
            streamed = median(first_tokens(endpoint, range(count), tokens=TOKENS))
            bench.measure("stream: first token", 1000 * streamed, unit="ms")
            bench.measure("stream: first token of the engine alone", 1000 * alone, unit="ms")
    bench.ratio(
        "stream: the endpoint's / the engine's", "stream: first token", "stream: first token of the engine alone"
    )


def main() -> int:
    """Measure, print and judge."""
    quick = quick_from_environment()
    parser = argparse.ArgumentParser(
        prog="bench endpoint", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--policy", type=Path, metavar="FOLDER")
    parser.add_argument("--callers", type=int, default=100 if quick else 1000)
    chosen, rounds, count = parser.parse_args(), 1 if quick else 3, 30 if quick else 100
    bench = Bench("endpoint", inputs={"parts": chosen.parts, "callers": chosen.callers, "tokens": TOKENS}, quick=quick)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        policy = chosen.policy or make_policy(folder / "policy")
        if "overhead" in chosen.parts:
            measure_overhead(bench, policy, folder, rounds, count)
        if "crowd" in chosen.parts:
            measure_crowd(bench, policy, folder, rounds, chosen.callers)
        if "fairness" in chosen.parts:
            measure_fairness(bench, policy, folder, rounds, chosen.callers // 2)
        if "first" in chosen.parts:
            if python := os.environ.get("SWARM_VLLM_PYTHON", ""):
                measure_first(bench, policy, folder, python, rounds, count)
            else:
                print("left out: first, since SWARM_VLLM_PYTHON names no environment with vLLM", flush=True)
        if "direct" in chosen.parts:
            measure_direct(bench, policy, folder, rounds, count)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
