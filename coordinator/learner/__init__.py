"""The learner: a child process with torch, and an ordinary client of the coordinator's API.

It requests a batch, makes one GRPO step, reports, and publishes a version every kappa updates. Read `loop` first.
"""

__all__ = [
    "advantages",
    "boards",
    "checkpoint",
    "export",
    "external",
    "hub",
    "launch",
    "loop",
    "memory_plan",
    "offering",
    "preflight",
    "ranks",
    "replaying",
    "retracting",
    "settings",
    "start",
]
