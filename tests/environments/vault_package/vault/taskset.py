"""The tasks, their rewards, and the user who asks again."""

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

from .tools import VaultData, VaultState, VaultToolset


class VaultTaskConfig(vf.TaskConfig):  # type: ignore[misc]  # verifiers is not where types are checked
    """Settings of a task: with the tool, or without."""

    tool: bool = True
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class VaultTask(vf.Task[VaultData, VaultState, VaultTaskConfig]):  # type: ignore[misc]  # as above
    """A safe with a code; the last answer must have it."""

    @classmethod
    def toolsets(cls, config: VaultTaskConfig) -> list[Any]:
        return [VaultToolset(config.tools)] if config.tool else []

    @vf.reward(weight=1.0)  # type: ignore[untyped-decorator]  # as above
    async def opened(self, trace: Any) -> float:
        if "fault" in trace.last_reply:
            raise ValueError("the scales are broken")
        return float(self.data.code in trace.last_reply)

    @vf.reward(weight=0.5)  # type: ignore[untyped-decorator]  # as above
    async def polite(self, trace: Any) -> float:
        return float("please" in trace.last_reply)

    @vf.metric  # type: ignore[untyped-decorator]  # as above
    async def tries(self, trace: Any) -> float:
        return float(trace.state.tries)


class VaultConfig(vf.TasksetConfig):  # type: ignore[misc]  # as above
    """Settings of the taskset."""

    count: int = 40
    prompted: bool = True
    task: VaultTaskConfig = VaultTaskConfig()


class VaultTaskset(vf.Taskset[VaultTask, VaultConfig]):  # type: ignore[misc]  # as above
    """Safes with codes that follow from their numbers."""

    def load(self) -> Iterator[VaultTask]:
        for number in range(self.config.count):
            code = str(100 + 7 * number)
            prompt = f"Open safe {number}." if self.config.prompted else None
            data = VaultData(prompt=prompt, system_prompt="You open safes.", code=code)
            yield VaultTask(data, self.config.task)


class VaultEnvConfig(vf.EnvConfig):  # type: ignore[misc]  # as above
    """The seat of the policy, and how often the user asks again."""

    agent: vf.AgentConfig = vf.AgentConfig()
    asks: int = 0


class VaultEnv(vf.Env[VaultEnvConfig]):  # type: ignore[misc]  # as above
    """The user asks whether the burglar is sure."""

    async def run(self, task: Any, agents: Any) -> None:
        async with agents.agent.interaction(task) as talk:
            segment = await talk.turn(None if task.data.prompt else "Hello. Open my safe.")
            for number in range(self.config.asks):
                if segment.terminated:
                    break
                segment = await talk.turn(f"Are you sure ({number})?")
