"""The data of a round: problems, prompts and chat templates, and the functions that reward answers."""

__all__ = [
    "chat",
    "group_play",
    "import_child",
    "importing",
    "judge_store",
    "kinds",
    "prompt_room",
    "reward_functions",
    "task",
    "task_check",
    "task_pool",
    "task_process",
    "task_text",
]
