"""Who is owed what: a double-entry book in integer micro-units, in a log that proves itself.

Glossary:

- **micros**: a millionth of the round's unit of credit; every amount is an integer number of them.
- **entry**: one thing that happened, as canonical bytes: a deposit, a pending credit, its post or its void; a version,
  a document that names the round's keys (*root* in an entry, of TUF, not the tree's); a verdict, an appeal and the
  ruling on it; the secret that drew the audits and the commitment to it; an owner's statement, a payout.
- **content hash**: the BLAKE3 hash of an entry's bytes, and its name.
- **effect**: what an entry does that may be done only once: one deposit reference, one pending credit per claim,
  one settlement, appeal, ruling and reinstatement per claim, one commitment and one reveal per epoch, one payout per
  batch and node.
- **account**: `outside` (where deposits come from), `budget` (the operator's money still free),
  `pending:<node>` (credited, not yet settled), `payable:<node>` (validated, owed), `paying:<node>` (in a batch that is
  being paid), `paid:<node>` (gone to its owner).
- **claim**: one signed rollout that is paid for; absent → pending → posted or voided; voided → posted by an appeal.
- **appeal**, **ruling**: a node's signed word against a fault or a ban, and the operator's answer; one that grants it
  lets what was voided be *reinstated*, once and as it was.
- **payout**: a node's share of a batch; absent → paying → paid. A **batch** is paid by one transfer, to many payees.
- **payee**: an owner's address and what all nodes of this owner get.
- **outcome**: the named result of applying an entry; only `APPLIED` changes anything.
- **log**: all entries in the order of their indexes; the leaves of a Merkle tree.
- **checkpoint**: size and root of the log, signed; what is under one is *published*.
- **tile**, **bundle**: static files of the tree's hashes and of the entries.
- **receipt**, **fork**: files that prove what is in the log, or that two logs were signed, to anybody for ever.
- **witness**: a stranger who signs that the log they saw only ever grew.

Rules:

- Every applied entry moves one amount from one account to another, or nothing; so the accounts always sum to zero.
- Only `outside` may be below zero.
- Entries are never changed or removed: a void is a new entry.
- All but `store` is pure; it alone reads and writes, and only through its caller's transaction.
- The store decides nothing: it asks `book` and `tiles` and writes down the answer.
- A proof is checked from the sizes, hashes and signatures in hand; who sent it does not matter.
"""
