"""The bytes of Echo Swarm and what they mean: shared by every program, pure of input and output.

Glossary (the same words in code, API, pages and docs):

- **round**: one training run: one model, one task, one coordinator, one trust root.
- **policy version**: published weights, numbered 1, 2, 3 …; its *update* is how many optimizer updates went into it.
- **manifest**: the signed description of a policy version: its files, their chunks, how to sample, the task.
- **chunk**: at most `chunk_size_bytes` of a file, named by its BLAKE3 hash.
- **group**: one prompt and the samples drawn for it; what GRPO compares.
- **lease**: the coordinator's offer of one group to one node: prompt, version, seed, locked price, deadline.
- **newcomer**: a node whose owner has no group yet that was found right; while others ask, its leases are **trials**,
  for which nothing waits.
- **rollout claim**: a node's signed answer to a lease: the tokens and their log-probabilities.
- **replay**: an auditor's prefill over a claim, which shows what the seed dictated; its **margin** at a position is how
  far, in nats, the claimed token lies from the dictated one.
- **broadcast**: a version on its way to every node; **T_bcast**: from publication to a node's first token under it.
- **staleness** (S): how many updates a group may lie behind the learner when it is trained on.
- **accepted**: durably stored; a retry is told so and nothing is counted twice.
- **credit**: integer micro-units owed to a node; pending at acceptance, posted or voided at settlement.
- **punching**: two nodes that nobody can dial dial each other at the same time, so that each one's first packet opens
  its own NAT for the other; who can be part of that is **punchable**.
- **origin**: the coordinator's own copy of the chunks (its seeder, or plain HTTP); **peers** are other nodes.
"""
