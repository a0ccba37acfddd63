"""The learner: a child process with torch, and an ordinary client of the coordinator's API.

It requests a batch, makes one GRPO step, reports, and publishes a version every kappa updates. Read `loop` first.
"""
