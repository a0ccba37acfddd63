"""Environments: what the policy reads after each of its turns, and the reward at the end of an episode."""

__all__ = [
    "games.betting",
    "games.episodes",
    "games.exploitability",
    "games.limit_poker",
    "gym_answers",
    "host",
    "interface",
    "python_tool",
    "tool_calls",
]
