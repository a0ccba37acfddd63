"""A round saved while it runs, and brought back elsewhere.

- What is saved belongs together: the learner's checkpoint first, then the store in one snapshot, then the documents and
  chunks. Whatever comes later knows at least as much as what came before, which is what a crash leaves, too.
- A backup has its name only when it is whole and was read again: digests, the store's own check, the ledger's fsck.
- Keys are sealed with a passphrase, or left out; never plain.
- A restored round goes on from its last signed checkpoint. Where anything newer was published, it would sign another
  history of the same ledger: that is refused (`coordinator.service.backup.forks`).
"""
