"""The attacks that a swarm of strangers must withstand, each as a node that runs beside honest ones.

- `arena` is a round at the shipped settings: real store, leases, intake, rewards, escrow and lottery, and an audit that
  replays every drawn claim in torch by the shipped tolerances. `nodes` are who works in it.
- A family of attacks is a module: `forging`, `weights`, `choosing`, `waiting`, `leasing`, `payloads`, `telling`.
- A *gain* is what was paid for groups that were not worked for, less what was voided of groups that were.
- `make adversaries` runs them all on a trained policy, writes their table, and trains among them; docs/adversaries.md
  has the table. `make test` runs those that a tiny policy shows for a few groups (`test_attacks`), and patience and
  crowds by the rules alone or without a model (`test_patience`, `test_sybil`); the others run only there.
"""
