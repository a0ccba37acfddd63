"""vLLM made to fail in ways that must not go unnoticed; run as a program under its interpreter.

Prints a line for each: weights packed for oneDNN, of which a reload leaves stale copies and a plain copy finds nothing;
then memory that ends while more than a few samples run.
"""

import os
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROWS_THAT_FIT = 3


def main(policy: Path, other: Path) -> None:
    from vllm import _custom_ops

    from protocol.errors import EngineFailed
    from protocol.rollout import pack_tokens
    from swarm_node.engine import vllm_engine, vllm_model
    from swarm_node.engine.messages import GroupDone, Request
    from swarm_node.engine.vllm_worker import WorkerExtension

    settings, take, step = vllm_model.of_platform, WorkerExtension.swap_policy, vllm_model.VllmModel.step

    def packed() -> dict[str, object]:
        found = settings()
        _custom_ops._supports_onednn = True
        return found

    def reload(worker: WorkerExtension, folder: str) -> None:
        worker.reload_weights(weights_path=folder)  # type: ignore[attr-defined]  # mixed into vLLM's worker

    def refuse(version: int) -> None:
        engine.load(policy, 1)
        try:
            engine.load(other, version)
        except EngineFailed as error:
            print(error.message)

    def sampled() -> list[bytes]:
        prompt = pack_tokens([19, 20, 31])
        for seed in (1, 2):
            engine.add(
                Request(
                    request_id=str(seed),
                    version=1,
                    prompt=prompt,
                    seed=seed,
                    samples=4,
                    max_new_tokens=6,
                    temperature=1.0,
                )
            )
        ended = []
        while engine.busy:
            ended += engine.step()
        groups = sorted(ended, key=lambda group: group.request_id)
        return [one.tokens for group in groups if isinstance(group, GroupDone) for one in group.samples]

    engine = vllm_engine.VllmEngine(dtype="float32")
    vllm_model.of_platform = packed
    WorkerExtension.swap_policy = reload  # type: ignore[method-assign]  # what vLLM offers for the purpose
    refuse(2)
    WorkerExtension.swap_policy = take  # type: ignore[method-assign]  # ours again
    refuse(3)

    vllm_model.of_platform = settings
    engine.load(policy, 1)
    plenty = sampled()

    def scarce(model: vllm_model.VllmModel) -> list[vllm_model.Drawn]:
        if model.rows > ROWS_THAT_FIT:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return step(model)

    vllm_model.VllmModel.step = scarce  # type: ignore[method-assign]  # what torch says where memory ends
    print("fewer at once, the same tokens" if len(plenty) == 8 and sampled() == plenty else "other tokens")


if __name__ == "__main__":
    runpy.run_path(str(ROOT / "swarm_node" / "engine" / "foreign.py"))["take_rooms"]()
    from swarm_node.engine.vllm_command import environment

    os.environ.update(environment(threads=1))
    main(*map(Path, sys.argv[1:]))
