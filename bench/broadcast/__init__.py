"""Speed of the broadcast of a version to all nodes, against the fluid bound and against other programs.

- Every party has a network namespace of its own; its link is capped by `tc tbf` in both directions.
- Every contender brings the same bytes to the same hosts over the same links, taking turns in one run.
- Ours is what is shipped: `swarm-coordinator launch`, its seeder, and one `swarm-node mirror` per worker.
"""
