"""The tool: a server of its own, which verifiers starts for each episode."""

import verifiers.v1 as vf


class VaultData(vf.TaskData):  # type: ignore[misc]  # verifiers is not where types are checked
    """A safe and its code."""

    code: str


class VaultState(vf.State):  # type: ignore[misc]  # as above
    """The tries of an episode, shared by the tool and the rewards."""

    tries: int = 0


class VaultToolset(vf.Toolset[vf.ToolsetConfig, VaultState]):  # type: ignore[misc]  # as above
    """Turns the wheels of the safe."""

    TOOL_PREFIX = "safe"

    async def setup_task(self, task: VaultData) -> None:
        self.code = task.code

    @vf.tool  # type: ignore[untyped-decorator]  # as above
    def turn(self, wheel: int, digit: int) -> str:
        """Turn a wheel, 0 to 2, to a digit; hear whether it clicks."""
        self.state.tries += 1
        return "click" if self.code[wheel] == str(digit) else f"nothing ({self.state.tries})"


if __name__ == "__main__":
    VaultToolset.run()
