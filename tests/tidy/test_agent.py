"""Nothing that comes from a round is executed by the agent: tokenizers, templates and models are its engine child's.

The agent is what `swarm_node.cli` leads to, imports within functions included, up to the child's first module: that one
is started as a process of its own, under limits.
"""

from pathlib import Path

from tests.tidy.repository import imports, python_files, report, text

FIRST, CHILD = "swarm_node.cli", "swarm_node.engine.child"

EXECUTES = ("tokenizers", "transformers", "jinja2", "torch", "llama_cpp", "gguf", "vllm", "protocol.policy.codec")
READS = ("safetensors", "protocol.policy.model_config", "swarm_node.engine.policy_files")
"""Nor does the agent read what a policy says of itself."""

ALLOWED = {("swarm_node.doctor.engines", "safetensors"): "it writes a model of our own"}


def modules() -> dict[str, Path]:
    """The modules of our rooms, by their names."""
    paths = python_files("swarm_node", "protocol", "ledger")
    return {".".join(path.with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def imported(path: Path, known: dict[str, Path]) -> set[str]:
    """The modules that one imports: of ours the modules themselves, of others their names as written."""
    return {name if name in known else name.rpartition(".")[0] or name for _, name in imports(path)} | {
        name for _, name in imports(path)
    }


def reached(known: dict[str, Path]) -> set[str]:
    """The agent's own modules."""
    found, left = set[str](), [FIRST, "swarm_node.__main__"]
    while left:
        name = left.pop()
        if name in found or name == CHILD or name not in known:
            continue
        found.add(name)
        left += imported(known[name], known)
    return found


def test_the_agent_executes_nothing_that_comes_from_a_round() -> None:
    known = modules()
    agent = reached(known)
    assert {
        "swarm_node.work.worker",
        "swarm_node.engine.client",
        "swarm_node.commands.why",
        "swarm_node.doctor.engines",
    } <= agent
    assert {"swarm_node.engine.session", "swarm_node.engine.policy_files", CHILD}.isdisjoint(agent)
    found = [(name, other) for name in sorted(agent) for other in sorted(imported(known[name], known))]
    banned = [
        (name, module, other)
        for name, other in found
        for module in (*EXECUTES, *READS)
        if other == module or other.startswith(f"{module}.")
    ]
    wrong = [(name, other) for name, module, other in banned if (name, module) not in ALLOWED]
    report([f"{known[name]}: {other} (the engine child may, and the agent asks it)" for name, other in wrong])
    needless = sorted(ALLOWED.keys() - {(name, module) for name, module, _ in banned})
    report([f"{name}: does not import {module}" for name, module in needless])


def test_the_agent_calls_no_policy_json_by_name() -> None:
    names = ("tokenizer.json", "config.json", "chat_template", "generation_config")
    known = modules()
    agent = sorted(name for name in reached(known) if name.startswith("swarm_node.") and "doctor" not in name)
    report([f"{known[name]}: {word}" for name in agent for word in names if f'"{word}"' in text(known[name])])
