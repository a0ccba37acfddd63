"""Backup of a running round, and its restore elsewhere.

- The parts of a backup are consistent: the learner's checkpoint is saved first, then the store in one snapshot, then
  the documents and chunks. Each part is at least as new as the one before, as after a crash.
- A backup gets its name only when it is complete and verified: digests, the store's own check, the ledger's fsck.
- Keys are sealed with a passphrase, or left out; never plain.
- A restored round continues from its last signed checkpoint. If anything newer was published, it would sign a second
  history of the same ledger: that is rejected (`coordinator.service.backup.forks`).
"""
