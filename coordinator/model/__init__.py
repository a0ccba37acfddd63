"""Torch helpers that the learner and the auditor share: loading, packed forward, LoRA, the watchdog."""
