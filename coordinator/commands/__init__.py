"""The commands of `swarm-coordinator`, one module per subject; `coordinator.cli` combines them.

- A command reads its options, calls the code that decides, and prints; with `--json` it prints data for scripts.
- Modules that are slow to import are imported inside the command that needs them.
"""
