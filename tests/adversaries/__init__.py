"""The attacks that a swarm of strangers must withstand, each as a node that runs beside honest ones.

- `arena` is a round at the shipped settings: real store, leases, intake, rewards, escrow and lottery, and an audit that
  replays every drawn claim in torch by the shipped tolerances. `nodes` are who works in it.
- A family of attacks is a module: `forging`, `weights`, `choosing`, `waiting`, `leasing`, `payloads`, `telling`.
- A *gain* is what was paid for groups that were not worked for, less what was voided of groups that were.
- `make adversaries` runs them all on a trained policy, writes their table, and trains among them; `make test` runs each
  for a few groups on a tiny one. docs/adversaries.md has the table.
"""
