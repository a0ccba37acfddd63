"""The credit ledger: a double-entry book in integer micro-units, stored in a log that anybody can verify.

Glossary:

- **micros**: a millionth of the round's unit of credit; every amount is an integer number of them.
- **entry**: a recorded event, as canonical bytes: a deposit, a pending credit, its post or its void; a version,
  a document that names the round's keys (*root* in an entry, of TUF, not the tree's); a verdict, an appeal and the
  ruling on it; the secret that drew the audits and the commitment to it; an owner's statement, a payout; a batch for
  the learner, and an update that it made.
- **content hash**: the BLAKE3 hash of an entry's bytes, and its name.
- **effect**: the part of an entry that may happen only once: one deposit reference, one pending credit per claim,
  one settlement, appeal, ruling and reinstatement per claim, one commitment and one reveal per epoch, one payout per
  batch and node.
- **account**: `outside` (the source of deposits), `budget` (the operator's money still free),
  `pending:<node>` (credited, not yet settled), `payable:<node>` (validated, owed), `paying:<node>` (in a batch that is
    being paid), `paid:<node>` (paid to its owner).
- **claim**: a signed rollout that is paid for; absent → pending → posted or voided; voided → posted by an appeal.
- **appeal**, **ruling**: a node's signed objection to a fault or a ban, and the operator's answer; if it is granted,
  the voided credit is *reinstated*, once and with the same amount.
- **payout**: a node's share of a batch; absent → paying → paid. A **batch** is paid by one transfer, to many payees.
- **payee**: an owner's address and the amount for all nodes of this owner.
- **outcome**: the named result of applying an entry; only `APPLIED` changes anything.
- **log**: all entries in the order of their indexes; the leaves of a Merkle tree.
- **checkpoint**: size and root of the log, signed; the entries that it covers are *published*.
- **tile**, **bundle**: static files of the tree's hashes and of the entries.
- **receipt**, **fork**: files that prove to anybody that entries are in the log, or that two logs were signed.
- **chain of updates**: the states of training in the log: each update begins with the state after the one before.
- **witness**: somebody outside the round who signs that the ledger they saw has only grown.

Rules:

- Every applied entry moves one amount from one account to another, or nothing; so the accounts always sum to zero.
- Only `outside` may be below zero.
- Entries are never changed or removed: a void is a new entry.
- All modules except `store`, `parts` and `prepared` are pure; these use the database, in the caller's transaction.
- The store decides nothing: it calls `book` and `tiles` and stores their results.
- A proof is checked by its sizes, hashes and signatures alone; its sender does not matter.
"""
