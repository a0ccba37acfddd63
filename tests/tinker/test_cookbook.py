"""Tinker's own client, and an unmodified recipe of its cookbook, with a real round and node behind the server."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from coordinator.learner.embedded import EmbeddedShape, make_policy
from echo_swarm import Swarm as Round
from tests.processes.programs import Swarm, said, script
from tests.processes.rounds import Coordinator, Settings, assert_ledger_is_sound, join
from tests.tinker.warm_policy import warm_policy

tinker: Any = pytest.importorskip("tinker")

pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore")]  # of Tinker's client, which we do not write

SETTINGS: Settings = {
    "sampling": {"max_new_tokens": 16},
    "learner": {"external": True},
    "staleness": {"max_updates": 4},
}

RECIPE_ENDS_WITHIN_S = 1800.0


@dataclass(frozen=True)
class TinkerRound:
    """A round with a node, and the server in front of it."""

    coordinator: Coordinator
    policy: Path
    key: str
    url: str

    def client(self) -> Any:
        return tinker.ServiceClient(base_url=self.url, api_key=f"tml-{self.key}")


@contextmanager
def serving(folder: Path, policy: Path, settings: Settings, *options: str) -> Iterator[TinkerRound]:
    """Launch a round with this policy, a node and the server, for this block."""
    swarm = Swarm(folder)
    try:
        coordinator = Coordinator(swarm, {**settings, "model": {"path": str(policy)}}).start(learner=True)
        coordinator.reaches("version", 1)
        join(swarm, "node", coordinator.join_string, "--engine", "torch")
        words = (str(coordinator.config_file), "tinker", "--budget", "1000000000", "--publishes")
        key = said(swarm, "swarm-coordinator", "api-keys", "create", *words).split()[1]
        options = ("--key", key, "--port", "0", "--states", str(swarm.folder / "states"), *options)
        server = swarm.start("tinker", script("echo-swarm-tinker"), coordinator.url, str(policy), *options)
        url = server.said(r"TINKER_BASE_URL=(\S+)")[1]
        yield TinkerRound(coordinator, policy, key, url)
        assert_ledger_is_sound(coordinator)
    finally:
        swarm.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerRound]:
    folder = tmp_path_factory.mktemp("swarm")
    warm_policy(folder / "policy")
    with serving(folder, folder / "policy", SETTINGS) as made:
        yield made


def test_the_client_trains_publishes_and_samples_what_it_trained(served: TinkerRound) -> None:
    with served.client() as service:
        training = service.create_lora_training_client(base_model=str(served.policy), rank=8, seed=1).result()
        tokenizer = training.get_tokenizer()
        prompt = tokenizer.encode("Swarm:", add_special_tokens=False)
        answer = tokenizer.encode(" the nodes sample", add_special_tokens=False)[:6]
        tokens = prompt + answer
        datum = tinker.Datum(
            model_input=tinker.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={
                "target_tokens": tokens[1:],
                "weights": [0.0] * (len(prompt) - 1) + [1.0] * len(answer),
            },
        )
        losses = []
        for _ in range(40):
            computed = training.forward_backward([datum], "cross_entropy")
            stepped = training.optim_step(tinker.AdamParams(learning_rate=0.003))
            losses.append(computed.result().metrics["loss:sum"])
            assert stepped.result().metrics["grad_norm:mean"] > 0
        assert losses[-1] < 12.0 < losses[0], "the embeddings, which are frozen, allow no less than 8.7"
        sampler = training.save_weights_and_get_sampling_client().result()
        params = tinker.SamplingParams(max_tokens=len(answer), temperature=0.0)
        sampled = sampler.sample(tinker.ModelInput.from_ints(prompt), 2, params).result()
        assert [sequence.tokens for sequence in sampled.sequences] == [answer, answer], "nodes have what was trained"
        (theirs,) = training.forward([datum], "cross_entropy").result().loss_fn_outputs
        for sequence in sampled.sequences:
            ours = theirs["logprobs"].tolist()[len(prompt) - 1 :]
            assert sequence.logprobs == pytest.approx(ours, abs=1e-3), "nodes and trainer agree on the policy"
        with Round(served.coordinator.url, served.key) as round_:
            versions = round_.versions()
            assert (versions.newest, versions.newest_update) == (2, 40), "steps count for staleness"


def test_a_refused_call_raises_its_reason_and_the_client_goes_on(served: TinkerRound) -> None:
    with served.client() as service:
        training = service.create_lora_training_client(base_model=str(served.policy), rank=4).result()
        datum = tinker.Datum(model_input=tinker.ModelInput.from_ints([5]), loss_fn_inputs={"target_tokens": [6]})
        with pytest.raises(tinker.RequestFailedError, match="gspo is not offered"):
            training.forward_backward([datum], "gspo").result()
        with pytest.raises(tinker.RequestFailedError, match="lacks a part"):
            training.optim_step(tinker.AdamParams()).result()
        with pytest.raises(tinker.RequestFailedError, match="save_weights_external is not offered"):
            training.save_weights_external("x").result()
        training.forward_backward([datum], "cross_entropy").result()
        training.optim_step(tinker.AdamParams()).result()
        state = training.save_state("kept").result()
        again = service.create_training_client_from_state_with_optimizer(state.path).result()
        same = [client.forward([datum], "cross_entropy").result().metrics for client in (training, again)]
        assert same[0] == same[1]
        with pytest.raises(tinker.NotFoundError, match="no model 'Qwen/Qwen3-8B'"):
            service.create_lora_training_client(base_model="Qwen/Qwen3-8B").result()


def test_in_a_round_of_adapters_the_adapter_is_the_version(tmp_path: Path) -> None:
    make_policy(tmp_path / "policy", seed=1, shape=EmbeddedShape(hidden=16, layers=1, heads=2, intermediate=32))
    settings: Settings = {**SETTINGS, "learner": {"external": True, "lora_rank": 4}}
    with serving(tmp_path, tmp_path / "policy", settings, "--adapter-rank", "4", "--name", "tiny") as served:
        with served.client() as service:
            training = service.create_lora_training_client(base_model="tiny", rank=4).result()
            tokens = [5, 6, 7, 8, 9]
            inputs = {"target_tokens": tokens[1:], "weights": [1.0] * 4}
            datum = tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
            for _ in range(5):
                training.forward_backward([datum], "cross_entropy").result()
                training.optim_step(tinker.AdamParams(learning_rate=0.01)).result()
            sampler = training.save_weights_and_get_sampling_client().result()
            params = tinker.SamplingParams(max_tokens=3)
            (sampled,) = sampler.sample(tinker.ModelInput.from_ints(tokens), 1, params).result().sequences
            whole = [*tokens, *sampled.tokens]
            inputs = {"target_tokens": whole[1:], "weights": [1.0] * (len(whole) - 1)}
            datum = tinker.Datum(model_input=tinker.ModelInput.from_ints(whole[:-1]), loss_fn_inputs=inputs)
            (theirs,) = training.forward([datum], "cross_entropy").result().loss_fn_outputs
            assert sampled.logprobs == pytest.approx(theirs["logprobs"].tolist()[len(tokens) - 1 :], abs=1e-3)
        with Round(served.coordinator.url, served.key) as round_:
            assert round_.versions().newest == 2


def run_recipe(served: TinkerRound, log_path: Path, *settings: str) -> list[dict[str, float]]:
    """Run the cookbook's recipe for sums; return the metrics of its updates."""
    command = [sys.executable, "-m", "tinker_cookbook.recipes.math_rl.train", "env=arithmetic"]
    command += [f"model_name={served.policy}", "renderer_name=role_colon", f"base_url={served.url}"]
    command += ["loss_fn=importance_sampling", "max_tokens=16", "eval_every=0", "save_every=0", f"log_path={log_path}"]
    ran = subprocess.run(
        [*command, *settings],
        env=os.environ | {"TINKER_API_KEY": f"tml-{served.key}", "HF_HUB_OFFLINE": "1"},
        cwd=log_path.parent,
        capture_output=True,
        text=True,
        timeout=RECIPE_ENDS_WITHIN_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    lines = [json.loads(line) for line in (log_path / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "env/all/reward/total" in line]


def test_an_unmodified_recipe_of_the_cookbook_trains_for_some_updates(served: TinkerRound, tmp_path: Path) -> None:
    with Round(served.coordinator.url, served.key) as round_:
        before = round_.versions()
        sizes = ("groups_per_batch=8", "group_size=4", "lora_rank=8", "learning_rate=0.003", "max_steps=3")
        updates = run_recipe(served, tmp_path / "recipe", *sizes)
        after = round_.versions()
    assert len(updates) == 3
    assert after.newest >= before.newest + 3, "each update was published"
    for metrics in updates:
        assert -0.2 <= metrics["env/all/reward/total"] <= 1.0
        assert abs(metrics["optim/kl_sample_train_v1"]) < 0.01, "nodes sample with the policy that is trained"


@pytest.mark.skipif(not os.environ.get("ALL"), reason="takes minutes: make test-tinker ALL=1")
def test_the_reward_of_a_longer_run_rises(
    served: TinkerRound, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("groups_per_batch=16", "group_size=8", "lora_rank=16", "learning_rate=0.002", "max_steps=24")
    started_s = time.monotonic()
    updates = run_recipe(served, tmp_path / "recipe", *sizes)
    with capsys.disabled():
        print(f"\n{len(updates)} updates in {time.monotonic() - started_s:.0f} s")
        print("update, reward, share of answers in the right format")
        for number, metrics in enumerate(updates, 1):
            print(f"{number:2d}  {metrics['env/all/reward/total']:+.4f}  {metrics['env/all/format']:.3f}")
    rewards = [metrics["env/all/reward/total"] for metrics in updates]
    assert sum(rewards[-5:]) / 5 > rewards[0] + 0.02, "the first is the policy's as it was"
