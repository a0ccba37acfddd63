"""The learner: a child process with torch, and a client of the coordinator's API like any other.

It asks for a batch, takes one GRPO step, reports, and publishes a version every kappa updates. Read `loop` first.
"""
