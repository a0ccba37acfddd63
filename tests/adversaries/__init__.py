"""The attacks that a swarm of strangers must withstand, each as a node that runs beside honest ones, or as tests.

- `arena` is a round at the shipped settings: real store, leases, intake, rewards, escrow and lottery, and an audit that
  replays every drawn claim in torch by the shipped tolerances. `nodes` are who works in it.
- A family of attacks is a module: `forging`, `weights`, `choosing`, `waiting`, `leasing`, `payloads`, `telling`,
  `mismatch`, `answers`, `theft`, `poisoning`; `catalogue` lists them.
- A *gain* is what was paid for groups that were not worked for, less what was voided of groups that were.
- `outsiders` lists what peers, origins and others do, by the tests that play it; `trials` has pytest run them.
- `make adversaries` plays all, the nodes on a trained policy, prints both tables, and trains among hostile nodes;
  bench/RESULTS.md and docs/security.md have the tables. `make test` runs what a tiny policy shows for a few groups
  (`test_attacks`, `test_claims`), patience and crowds without a model (`test_patience`, `test_crowd`), and all that
  `outsiders` names; the others run only there.
"""
