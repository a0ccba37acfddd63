"""Settings of the task: where problems come from, what answers earn, and how versions are evaluated."""

from typing import Any, Literal

from pydantic import Field, JsonValue, field_validator, model_validator

from coordinator.config.section import Section
from protocol import limits


class TaskSection(Section):
    """Which task the round is about."""

    name: str = Field("arithmetic", description="a built-in task, data, math, reasoning-gym, or a file like my_task.py")
    parameters: dict[str, str | int | float | bool] = Field(
        {}, description="of a built-in task, or of reasoning-gym: generator and what that takes"
    )


class DataSection(Section):
    """Files of problems, for tasks data and math."""

    train: str = Field("", description="a .jsonl, .json or .parquet file, a folder of them, or hf://owner/name/folder")
    eval: str = Field("", description="the same for held-out problems; empty keeps a tenth of train for that")
    revision: str = Field("", description="branch, tag or commit on the hub; its main branch if there is none")
    columns: dict[str, str] = Field(
        {}, description="prompt and answer → the columns they stand in, like a.b if within another"
    )
    chat: bool = Field(False, description="say text prompts as a user, by the policy's chat template")
    system_prompt: str = Field("", description="first message, of the system, where chat messages have none")
    template_arguments: dict[str, JsonValue] = Field(
        {}, description='for the chat template: {enable_thinking = false}, {tools = […]}, {date_string = "1 Jan 2026"}'
    )
    suffix: str | None = Field(None, description="text after each prompt; math asks for steps and \\boxed{}")
    shuffle: bool = Field(True, description="another order in each pass over the problems; round.seed decides")
    size: int = Field(0, ge=0, description="most problems taken; 0 is all of a file, and 10000 of a generator")

    @field_validator("template_arguments")
    @classmethod
    def _leave_the_messages(cls, arguments: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if taken := arguments.keys() & {"messages", "add_generation_prompt"}:
            raise ValueError(f"{min(taken)} comes from the round, not from template_arguments")
        return arguments

    @field_validator("columns")
    @classmethod
    def _are_known(cls, columns: dict[str, str]) -> dict[str, str]:
        if unknown := columns.keys() - {"prompt", "answer"}:
            raise ValueError(f"there is no column {sorted(unknown)[0]!r} to map, only prompt and answer")
        return columns


class RewardSection(Section):
    """What answers earn, and what the processes may take that say so."""

    functions: tuple[str, ...] = Field(
        (), description="file.py:function, module:function, exact, math or reasoning-gym; the task's own if empty"
    )
    weights: tuple[float, ...] = Field((), description="how much each function counts; 1 if empty")
    timeout_s: float = Field(10.0, gt=0, le=3600, description="for all completions of a group; then it is killed")
    processes: int = Field(2, ge=1, le=64, description="how many groups are judged at once")
    memory_mib: int = Field(4096, ge=64, description="most memory of such a process, as address space")
    environment: tuple[str, ...] = Field(
        (), description="variables that these processes see beside paths and language, such as a judge's key"
    )

    @field_validator("functions", mode="before")
    @classmethod
    def _may_be_one(cls, functions: Any) -> Any:
        return (functions,) if isinstance(functions, str) else functions

    @model_validator(mode="after")
    def _have_weights(self) -> "RewardSection":
        if self.weights and len(self.weights) != len(self.functions):
            raise ValueError(f"{len(self.weights)} weights for {len(self.functions)} functions")
        return self


class EvalSection(Section):
    """Evaluations of versions, sampled by the nodes like any other work."""

    every: int = Field(0, ge=0, description="versions from one evaluation to the next; 0 is none at all")
    before_train: bool = Field(True, description="measure the first version before anything is trained on")
    splits: tuple[Literal["held_out", "validation"], ...] = Field(
        ("held_out",), min_length=1, description="held_out, validation: the best version is that on the first"
    )
    problems: int = Field(64, ge=1, le=10_000, description="n: problems of each split; fewer if it has fewer")
    samples: int = Field(8, ge=1, le=limits.SAMPLES_MAX, description="k: samples of each, as for training")
    share: float = Field(0.25, gt=0, le=1, description="most of the nodes at work that measure while others train")
    patience_s: float = Field(600.0, gt=0, description="after this an evaluation ends with what it has")
    solved: float = Field(1.0, description="a sample with this score or more counts as right in pass@k")
