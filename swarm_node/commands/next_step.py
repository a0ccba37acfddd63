"""`swarm-node` without a command: the state of this machine in one line, and the command to run next."""

from pathlib import Path
from typing import NamedTuple

from protocol.errors import ConfigInvalid


class NextStep(NamedTuple):
    """A state of this machine, and what its owner does next."""

    said: str
    command: str
    then: str = ""

    def lines(self) -> list[str]:
        more = [self.then] if self.then else []
        return [self.said, f"Next:  {self.command}", *more, "All commands:  swarm-node --help"]


def find_next_step(home: Path, vllm_python: str) -> NextStep:
    """Return the next step: an agent runs, no engine is installed, no round was joined, or the agent is stopped."""
    from swarm_node.coordinator_api.last_round import find_last

    if is_running(home):
        then = "`swarm-node open` shows it in a browser."
        return NextStep(f"The agent in {home} is running.", "swarm-node status", then)
    if not has_engine(vllm_python):
        return NextStep("No sampling engine is installed.", "swarm-node doctor", "It says how to install one.")
    try:
        last = find_last(home)
    except ConfigInvalid:
        last = None
    if last is None:
        return NextStep(
            f"The node in {home} has not joined a round yet.",
            "swarm-node join HOST",
            "HOST is the address of a round, from its operator. `swarm-node doctor` checks this machine first.",
        )
    urls = [join.url for join in (last.join, *last.others)]
    named = f"Its last round: {urls[0]}" if len(urls) == 1 else f"Its last rounds: {', '.join(urls)}"
    return NextStep(f"No agent is running in {home}. {named}", "swarm-node join")


def is_running(home: Path) -> bool:
    """Return True if an agent answers in this home, or uses it already or still."""
    import trio

    from swarm_node.owner.control_socket import NoAgent, is_in_use, knock

    async def answers() -> bool:
        try:
            stream, _ = await knock(home)
        except NoAgent:
            return is_in_use(home)
        except ConfigInvalid:  # an agent of another user
            return True
        await stream.aclose()
        return True

    return trio.run(answers)


def has_engine(vllm_python: str) -> bool:
    """Return True if an engine is installed; nothing is imported or started."""
    from swarm_node.engine.choose import this_machine

    packages = this_machine().packages
    return (
        {"torch", "transformers"} <= packages
        or {"llama_cpp", "gguf"} <= packages
        or (bool(vllm_python) and Path(vllm_python).exists())
    )
