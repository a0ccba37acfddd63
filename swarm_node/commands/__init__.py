"""The commands of `swarm-node`, a module per subject; `swarm_node.cli` puts them together.

- A command reads its options, calls what decides, and prints; with `--json` what it prints is for scripts.
- What is slow to import is imported inside of the command that needs it.
"""
