"""Settings of the task: where problems come from, what answers earn, and how versions are evaluated."""

from typing import Any, Literal

from pydantic import Field, JsonValue, field_validator, model_validator

from coordinator.config.section import Section
from protocol import limits


class TaskSection(Section):
    """The task of the round."""

    name: str = Field(
        "arithmetic",
        description="task: a built-in one, data, math, reasoning-gym, an environment, or a file such as my_task.py",
    )
    parameters: dict[str, JsonValue] = Field(
        {}, description="arguments of the task or environment; for reasoning-gym, generator and its arguments"
    )


class EpisodeSection(Section):
    """Limits of the episodes of an environment."""

    turns_max: int = Field(16, ge=1, le=limits.TURNS_MAX, description="maximum number of turns; a longer episode ends")
    turn_tokens_max: int = Field(
        256,
        ge=1,
        le=limits.TOKENS_MAX,
        description="maximum number of tokens of one turn; sampling.max_new_tokens is for the whole episode, "
        "observations included",
    )


class DataSection(Section):
    """Files of problems, for tasks data and math."""

    train: str = Field(
        "", description="training problems: a .jsonl, .json or .parquet file, a folder, or hf://owner/name/folder"
    )
    eval: str = Field("", description="held-out problems, as for train; empty: a tenth of train")
    revision: str = Field("", description="branch, tag or commit on the hub; empty: the main branch")
    columns: dict[str, str] = Field({}, description="column names of prompt and answer; a.b for a nested column")
    chat: bool = Field(False, description="format text prompts as user messages with the policy's chat template")
    system_prompt: str = Field("", description="system message, for prompts without one")
    template_arguments: dict[str, JsonValue] = Field(
        {},
        description='chat template arguments: {enable_thinking = false}, {tools = […]}, {date_string = "1 Jan 2026"}',
    )
    suffix: str | None = Field(
        None, description="text appended to each prompt; default for math: ask for steps and \\boxed{}"
    )
    shuffle: bool = Field(True, description="shuffle the problems in each pass, by round.seed")
    size: int = Field(0, ge=0, description="maximum number of problems; 0: all of a file, 10000 of a generator")

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
    """Reward functions, and the limits of the task processes, which run them or the environment."""

    functions: tuple[str, ...] = Field(
        (),
        description="file.py:function, module:function, code, exact, judge, math or reasoning-gym; "
        "empty: the task's own",
    )
    weights: tuple[float, ...] = Field((), description="weight of each function; empty: 1 each")
    timeout_s: float = Field(
        10.0,
        gt=0,
        le=3600,
        description="time limit for one group, or one turn of a group; after it, the task process is killed",
    )
    processes: int = Field(2, ge=1, le=64, description="task processes: groups that are scored or played at once")
    memory_mib: int = Field(4096, ge=64, description="memory limit of a task process (address space)")
    network: bool = Field(False, description="permit task processes to connect to the network, for example to a judge")
    readable: tuple[str, ...] = Field(
        (), description="further files and folders that reward functions may read, beside Python's and their own"
    )
    writable: tuple[str, ...] = Field(
        (), description="folders that reward functions may write, beside their scratch folder (TMPDIR)"
    )
    processes_max: int = Field(64, ge=1, le=4096, description="processes and threads of one task process")
    scratch_mib: int = Field(256, ge=1, description="size limit of a task process's scratch folder, in memory")
    variables: tuple[str, ...] = Field(
        (), description="environment variables passed to task processes, such as a judge's API key"
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
    """Evaluations of versions on held-out problems, sampled by the nodes."""

    every: int = Field(0, ge=0, description="evaluate every Nth version; 0: no evaluations")
    before_train: bool = Field(True, description="evaluate the first version before training starts")
    splits: tuple[Literal["held_out", "validation"], ...] = Field(
        ("held_out",),
        min_length=1,
        description="splits to evaluate: held_out, validation; the first one selects the best version",
    )
    problems: int = Field(64, ge=1, le=10_000, description="n: problems of each split; all of them if it has fewer")
    samples: int = Field(8, ge=1, le=limits.SAMPLES_MAX, description="k: samples per problem")
    share: float = Field(
        0.25, gt=0, le=1, description="maximum share of active nodes that work on an evaluation at once"
    )
    patience_s: float = Field(
        600.0, gt=0, description="time limit of an evaluation; it then ends with the results so far"
    )
    solved: float = Field(1.0, description="minimum score of a correct sample in pass@k")
    publish_samples: int = Field(
        0,
        ge=0,
        le=limits.EVALUATION_SAMPLES_MAX,
        description="problems of each evaluation whose first sample is public, with prompt and completion; 0: none",
    )
