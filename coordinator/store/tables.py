"""The tables of a round's store, beside the ledger's own.

- States are the values of the enums that name them; money is integer micro-units; times are milliseconds.
- Every change of a table needs a step in `coordinator/store/migrations/versions`: existing stores have the old table.
- Uniqueness is a constraint of the table, not a check elsewhere: nonces, one rollout per lease, one entry per claim.
"""

import sqlalchemy as sa

metadata = sa.MetaData()

nodes = sa.Table(
    "nodes",
    metadata,
    sa.Column("node_id", sa.String, primary_key=True),
    sa.Column("owner", sa.String, nullable=False),  # the node's own id if it has no other owner
    sa.Column("revoked_ms", sa.BigInteger, nullable=True),  # when its owner revoked its key
    sa.Column("paused_ms", sa.BigInteger, nullable=True),  # since when the operator has paused it
    sa.Column("name", sa.String, nullable=False),  # as it is shown
    sa.Column("skeleton", sa.String, nullable=True, index=True),  # of a name that is shown without the node's id
    sa.Column("price_micros_per_mtok", sa.BigInteger, nullable=False),
    sa.Column("addresses", sa.JSON, nullable=False),
    sa.Column("shares", sa.Boolean, nullable=False),
    sa.Column("registered_ms", sa.BigInteger, nullable=False),
    sa.Column("last_seen_ms", sa.BigInteger, nullable=False),
    sa.Column("version", sa.BigInteger, nullable=False, default=0),
    sa.Column("phase", sa.String, nullable=False, default="offline"),
    sa.Column("tokens_per_s", sa.Float, nullable=False, default=0.0),
    sa.Column("lease_allowance", sa.Integer, nullable=True),  # leases it may hold; NULL if none has ended yet
    sa.Column("uploaded_bytes", sa.BigInteger, nullable=False, default=0),  # by the receipts of receivers
    sa.Column("earned", sa.Boolean, nullable=False, default=False),  # a claim of its own was posted
)
sa.Index("nodes_by_owner", nodes.c.owner, nodes.c.earned)

LEFT = "left"
"""The phase of a node whose agent has ended."""


def is_alive(since_ms: int) -> sa.ColumnElement[bool]:
    """Return the condition that a node has sent a heartbeat since a time, and has not left after it."""
    return (nodes.c.last_seen_ms >= since_ms) & (nodes.c.phase != sa.text(f"'{LEFT}'"))


# The operator's orders, each with its reason; no row is ever changed or deleted.
orders = sa.Table(
    "orders",
    metadata,
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("given_ms", sa.BigInteger, nullable=False),
    sa.Column("action", sa.String, nullable=False),  # pause, resume, ban, unban, publish, rollback
    sa.Column("subject", sa.String, nullable=False, index=True),  # a node, an owner, or a version
    sa.Column("reason", sa.String, nullable=False),
    sa.Column("given_by", sa.String, nullable=False),
)

# Owners' statements as signed; an address counts from a time on, or never if a newer one came before that.
statements = sa.Table(
    "statements",
    metadata,
    sa.Column("owner", sa.String, primary_key=True),
    sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("kind", sa.String, nullable=False),
    sa.Column("address", sa.String, nullable=False, default=""),
    sa.Column("envelope", sa.LargeBinary, nullable=False),
    sa.Column("received_ms", sa.BigInteger, nullable=False),
    sa.Column("counts_from_ms", sa.BigInteger, nullable=True),
    sa.Column("node_id", sa.String, nullable=True),  # the node that it is about
    sa.Column("sequenced", sa.Boolean, nullable=False),  # it is an entry of the ledger
)

# The nodes at work and on standby, since when and why; a node without a row may work.
fleet = sa.Table(
    "fleet",
    metadata,
    sa.Column("node_id", sa.String, primary_key=True),
    sa.Column("works", sa.Boolean, nullable=False),
    sa.Column("since_ms", sa.BigInteger, nullable=False),
    sa.Column("reason", sa.String, nullable=False),
    sa.Column("groups_per_s", sa.Float, nullable=False),
    sa.Column("cost_micros_per_s", sa.Float, nullable=False),
)

# The nodes' own reports of the bytes that they transferred.
transfers = sa.Table(
    "transfers",
    metadata,
    sa.Column("node_id", sa.String, primary_key=True),
    sa.Column("session", sa.String, primary_key=True),
    sa.Column("from_peers", sa.BigInteger, nullable=False),
    sa.Column("from_seeder", sa.BigInteger, nullable=False),
    sa.Column("from_http", sa.BigInteger, nullable=False),
    sa.Column("to_peers", sa.BigInteger, nullable=False),
)

# Transfer receipts of versions, signed by the receiver; the signed bytes are kept as evidence.
receipts = sa.Table(
    "receipts",
    metadata,
    sa.Column("version", sa.BigInteger, primary_key=True),
    sa.Column("receiver", sa.String, primary_key=True),
    sa.Column("seconds", sa.Float, nullable=False),
    sa.Column("from_origins", sa.BigInteger, nullable=False),
    sa.Column("received_ms", sa.BigInteger, nullable=False),
    sa.Column("envelope", sa.LargeBinary, nullable=False),
)

uploads = sa.Table(
    "uploads",
    metadata,
    sa.Column("version", sa.BigInteger, primary_key=True),
    sa.Column("receiver", sa.String, primary_key=True),
    sa.Column("sender", sa.String, primary_key=True),
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
    sa.Column("busy_s", sa.Float, nullable=False),
    sa.Column("hindered", sa.Boolean, nullable=False),  # the receiver could not dial the sender, as it should
)

# Results of dialling a node, by the last signed report of each node that tried.
dials = sa.Table(
    "dials",
    metadata,
    sa.Column("receiver", sa.String, primary_key=True),
    sa.Column("node", sa.String, primary_key=True),
    sa.Column("version", sa.BigInteger, nullable=False),
    sa.Column("answered", sa.Boolean, nullable=False),
)

# The nodes that were alive when a version was published, and when each reached the stages.
broadcasts = sa.Table(
    "broadcasts",
    metadata,
    sa.Column("version", sa.BigInteger, primary_key=True),
    sa.Column("node_id", sa.String, primary_key=True),
    sa.Column("heard_ms", sa.BigInteger, nullable=True),
    sa.Column("fetched_ms", sa.BigInteger, nullable=True),
    sa.Column("loaded_ms", sa.BigInteger, nullable=True),
    sa.Column("first_token_ms", sa.BigInteger, nullable=True),
)

blames = sa.Table(
    "blames",
    metadata,
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("accuser", sa.String, nullable=False),
    sa.Column("accused", sa.String, nullable=False),
    sa.Column("chunk", sa.String, nullable=False),
    sa.Column("got", sa.String, nullable=False),
    sa.Column("recorded_ms", sa.BigInteger, nullable=False),
    sa.UniqueConstraint("accuser", "accused", "chunk"),
)

nonces = sa.Table(
    "nonces",
    metadata,
    sa.Column("node_id", sa.String, primary_key=True),
    sa.Column("nonce", sa.LargeBinary, primary_key=True),
    sa.Column("sent_ms", sa.BigInteger, nullable=False, index=True),
)

# Groups: those for the learner are numbered from 0 up, those of evaluations and of queries below 0.
groups = sa.Table(
    "groups",
    metadata,
    sa.Column("group_no", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("split", sa.String, nullable=False),  # of the task, and the problem's number; or `query` and its number
    sa.Column("prompt", sa.Integer, nullable=False),
    sa.Column("evaluation", sa.Integer, nullable=True, index=True),
    sa.Column("state", sa.String, nullable=False, index=True),  # open, leased, accepted, turn, trained
    sa.Column("begun", sa.String, nullable=True),  # the ended lease that the next may continue, while it is open
    sa.Column("begun_version", sa.BigInteger, nullable=True),
    sa.Column("waits_until_ms", sa.BigInteger, nullable=True),  # for a node with that version, in state turn
    sa.Column("expected", sa.Float, nullable=True),  # tokens of its longest sample, if known
)

# Mean lengths of a prompt's groups, and of similar prompts' groups.
lengths = sa.Table(
    "lengths",
    metadata,
    sa.Column("prompts", sa.String, primary_key=True),  # the hash of one, or the name of similar ones
    sa.Column("mean", sa.Float, nullable=False),
    sa.Column("groups", sa.Integer, nullable=False),
)

# Results of a prompt's groups, if prompts are chosen by them; as in `coordinator.rules.selection`.
outcomes = sa.Table(
    "outcomes",
    metadata,
    sa.Column("prompt", sa.String, primary_key=True),  # its hash
    sa.Column("groups", sa.Integer, nullable=False),
    sa.Column("mean", sa.Float, nullable=False),
    sa.Column("variance", sa.Float, nullable=False),
    sa.Column("alike", sa.Integer, nullable=False),
    sa.Column("left_out", sa.Integer, nullable=False),
)

leases = sa.Table(
    "leases",
    metadata,
    sa.Column("lease_id", sa.String, primary_key=True),
    sa.Column("group_no", sa.Integer, nullable=False),
    sa.Column("node_id", sa.String, nullable=False),
    sa.Column("continues", sa.String, nullable=True),  # the lease that it continues
    sa.Column("state", sa.String, nullable=False),
    sa.Column("code", sa.String, nullable=False, default=""),  # why it was rejected
    sa.Column("surplus", sa.Boolean, nullable=False, default=False),  # its group was answered by another first
    sa.Column("said", sa.String, nullable=False, default=""),  # the message that the node got
    sa.Column("max_cost_micros", sa.BigInteger, nullable=False),
    sa.Column("offer", sa.LargeBinary, nullable=False),  # the Lease as it was sent
    sa.Column("issued_ms", sa.BigInteger, nullable=False),
    sa.Column("expires_ms", sa.BigInteger, nullable=False),
    sa.Column("ended_ms", sa.BigInteger, nullable=True),  # null while its state is one of the open ones
)
IS_OPEN = leases.c.ended_ms.is_(None)
# Almost every lease is over, and most queries need the few that are open. An index of all leases by their end would be
# harmful: SQLite would use it for "ended_ms is null", and read all open leases.
_over = leases.c.ended_ms.is_not(None)
sa.Index("leases_open", leases.c.expires_ms, sqlite_where=IS_OPEN, postgresql_where=IS_OPEN)
sa.Index("leases_over", leases.c.ended_ms, sqlite_where=_over, postgresql_where=_over)
sa.Index("leases_of_group", leases.c.group_no, sqlite_where=IS_OPEN, postgresql_where=IS_OPEN)
sa.Index("leases_by_node", leases.c.node_id, leases.c.ended_ms)

# The counts of `coordinator.transactions.tally`; one row.
tally = sa.Table(
    "tally",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("unfinished", sa.BigInteger, nullable=False),  # groups for the learner that are leased or accepted
    sa.Column("reserved_micros", sa.BigInteger, nullable=False),  # what the open leases may cost at their dearest
)

# Signed fragments of open leases, and of ended leases that were or may be continued.
fragments = sa.Table(
    "fragments",
    metadata,
    sa.Column("lease_id", sa.String, primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("envelope", sa.LargeBinary, nullable=False),
)

# Claims of nodes whose groups another node finished, with the rollout that each is a part of.
parts = sa.Table(
    "parts",
    metadata,
    sa.Column("claim_id", sa.String, primary_key=True),
    sa.Column("whole", sa.String, nullable=False, index=True),
    sa.Column("lease_id", sa.String, nullable=False, unique=True),
    sa.Column("node_id", sa.String, nullable=False),
    sa.Column("tokens", sa.BigInteger, nullable=False),
    sa.Column("credit_micros", sa.BigInteger, nullable=False),
    sa.Column("credited_ms", sa.BigInteger, nullable=False, index=True),
)

rollouts = sa.Table(
    "rollouts",
    metadata,
    sa.Column("claim_id", sa.String, primary_key=True),
    sa.Column("lease_id", sa.String, nullable=False, unique=True),
    sa.Column("group_no", sa.Integer, nullable=False),
    sa.Column("node_id", sa.String, nullable=False),
    sa.Column("version", sa.BigInteger, nullable=False),
    sa.Column("policy_update", sa.BigInteger, nullable=False),
    sa.Column("tokens", sa.BigInteger, nullable=False),
    sa.Column("credit_micros", sa.BigInteger, nullable=False),
    sa.Column("rewards", sa.LargeBinary, nullable=False),  # float32, one per sample
    sa.Column("inserted", sa.LargeBinary, nullable=True),  # of a turn: what the environment answered
    sa.Column(
        "marks", sa.JSON, nullable=False
    ),  # components of the rewards, as in `coordinator.transactions.reward_columns`
    sa.Column("envelope", sa.LargeBinary, nullable=False),  # what the node signed
    sa.Column("accepted_ms", sa.BigInteger, nullable=False),
    # unscored, turn, part, buffered, batched, stale, unused, surplus, alike, retracted, verifier_error, measured,
    # served
    sa.Column("state", sa.String, nullable=False),
    sa.Column("batch", sa.Integer, nullable=True),
)
sa.Index("rollouts_by_state", rollouts.c.state, rollouts.c.policy_update)
sa.Index("rollouts_by_batch", rollouts.c.batch)
sa.Index("rollouts_by_node", rollouts.c.node_id, rollouts.c.state)
IN_NO_BATCH = rollouts.c.group_no < sa.literal_column("0")  # groups of queries and evaluations
sa.Index("rollouts_of_query", rollouts.c.group_no, sqlite_where=IN_NO_BATCH, postgresql_where=IN_NO_BATCH)

# One row per node and code, however often it happens: a node cannot fill the disk with rejections.
rejections = sa.Table(
    "rejections",
    metadata,
    sa.Column("node_id", sa.String, primary_key=True),
    sa.Column("code", sa.String, primary_key=True),
    sa.Column("count", sa.BigInteger, nullable=False),
    sa.Column("last_lease_id", sa.String, nullable=False),
    sa.Column("last_message", sa.String, nullable=False),
    sa.Column("last_ms", sa.BigInteger, nullable=False),
)

# Accepted claims between acceptance and settlement.
audits = sa.Table(
    "audits",
    metadata,
    sa.Column("claim_id", sa.String, primary_key=True),
    sa.Column("lease_id", sa.String, nullable=False, unique=True),
    sa.Column("node_id", sa.String, nullable=False),
    sa.Column("owner", sa.String, nullable=False),
    sa.Column("groups", sa.Integer, nullable=False),  # 1, or 0 for a part of a group
    sa.Column("place", sa.BigInteger, nullable=False),  # among all claims of the owner
    sa.Column("version", sa.BigInteger, nullable=False),
    sa.Column("epoch", sa.BigInteger, nullable=False, index=True),
    sa.Column("rate_ppm", sa.Integer, nullable=False),
    sa.Column("why", sa.String, nullable=False, default=""),  # the reason of its audit: drawn, learner, fault, held
    sa.Column("finding", sa.String, nullable=True),  # pass, soft, hard, pardon; null while there is none
    sa.Column("held_as", sa.String, nullable=False, default=""),  # the class that is calibrated first; `LOST`; or empty
    sa.Column("used", sa.Boolean, nullable=False, default=False),  # trained on, or not needed any more
    sa.Column("settled", sa.Boolean, nullable=False, default=False),
    sa.Column("taken_by", sa.String, nullable=False, default=""),  # the auditor that has it
    sa.Column("taken_until_ms", sa.BigInteger, nullable=False, default=0),
    sa.Column("tries", sa.Integer, nullable=False, default=0),  # auditors that lost it
    sa.Column("judged_ms", sa.BigInteger, nullable=True),
    sa.Column("report", sa.LargeBinary, nullable=True),  # the evidence, as JSON
    sa.Column("fault", sa.String, nullable=True),  # the claim whose hard fault took it out of escrow
    sa.Column("ban_ms", sa.BigInteger, nullable=True),  # the ban that took it, by its time
)
LOST = "lost"
"""The value of `held_as` for a held claim that cannot be judged any more: it is not paid, and no fault."""

_held = (audits.c.held_as != sa.text("''")) & ~audits.c.settled
HELD = _held & (audits.c.held_as != LOST)
"""The claims that are judged once their class is calibrated on this round's policy."""
WAITS = (
    (audits.c.why != sa.text("''"))
    & audits.c.finding.is_(None)
    & ~audits.c.settled
    & (audits.c.held_as == sa.text("''"))
)
"""The claims that wait for an auditor. The values are literal text, so that SQLite can use the index."""
# Almost every claim is settled, and almost none waits for an auditor.
sa.Index("audits_open", audits.c.owner, audits.c.place, sqlite_where=~audits.c.settled)
sa.Index("audits_waiting", audits.c.version, sqlite_where=WAITS)
sa.Index("audits_held", audits.c.owner, sqlite_where=_held, postgresql_where=_held)

# Trust of each owner.
trust = sa.Table(
    "trust",
    metadata,
    sa.Column("owner", sa.String, primary_key=True),
    sa.Column("accepted", sa.BigInteger, nullable=False),  # claims in all
    sa.Column("claims", sa.BigInteger, nullable=False),  # this and the next three as in `coordinator.rules.trust`
    sa.Column("groups", sa.BigInteger, nullable=False),
    sa.Column("soft", sa.Integer, nullable=False),
    sa.Column("hard", sa.Integer, nullable=False),
    sa.Column("banned_ms", sa.BigInteger, nullable=True),
)

# Hard faults in order, with the owner's counts before each; lifted: an appeal against it was granted.
faults = sa.Table(
    "faults",
    metadata,
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("claim_id", sa.String, nullable=False, unique=True),
    sa.Column("owner", sa.String, nullable=False, index=True),
    sa.Column("claims", sa.BigInteger, nullable=False),
    sa.Column("groups", sa.BigInteger, nullable=False),
    sa.Column("judged_ms", sa.BigInteger, nullable=False),
    sa.Column("lifted", sa.Boolean, nullable=False),
)

# Signed appeals of nodes and owners against faults and bans, and the operator's rulings.
appeals = sa.Table(
    "appeals",
    metadata,
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("claim_id", sa.String, nullable=False, unique=True),  # the one at fault; of a ban, the first it took
    sa.Column("owner", sa.String, nullable=False, index=True),
    sa.Column("envelope", sa.LargeBinary, nullable=False),
    sa.Column("made_ms", sa.BigInteger, nullable=False),
    sa.Column("state", sa.String, nullable=False, index=True),  # open, granted, denied
    *(sa.Column(name, sa.String, nullable=False, default="") for name in ("reason_code", "said", "ruled_by")),
    sa.Column("ruled_ms", sa.BigInteger, nullable=True),
    sa.Column("sequenced", sa.Boolean, nullable=False),  # it is an entry of the ledger
)

# The epochs of the audit lottery; their secrets are derived from the master key.
epochs = sa.Table(
    "epochs",
    metadata,
    sa.Column("epoch", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("secret_digest", sa.String, nullable=False),
    sa.Column("state", sa.String, nullable=False),  # committed, drawing, over
    sa.Column("claims", sa.BigInteger, nullable=False, default=0),
)

batches = sa.Table(
    "batches",
    metadata,
    sa.Column("batch", sa.Integer, primary_key=True, autoincrement=False),  # the update it leads to
    sa.Column("formed_ms", sa.BigInteger, nullable=False),
    sa.Column("max_staleness", sa.Integer, nullable=False),
    sa.Column("reported_ms", sa.BigInteger, nullable=True),
    sa.Column("idle_s", sa.Float, nullable=True),  # how long the learner waited for it
    sa.Column("busy_s", sa.Float, nullable=True),  # how long the update before took, publishing included
    sa.Column("metrics", sa.JSON, nullable=True),
)

evaluations = sa.Table(
    "evaluations",
    metadata,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("version", sa.BigInteger, nullable=False),
    sa.Column("policy_update", sa.BigInteger, nullable=False),
    sa.Column("split", sa.String, nullable=False),
    sa.Column("samples", sa.Integer, nullable=False),  # of each problem
    sa.Column("problems", sa.Integer, nullable=False),
    sa.Column("solved", sa.Float, nullable=False),  # the score from which a sample is right
    sa.Column("why", sa.String, nullable=False),  # before, every, last, asked
    sa.Column("state", sa.String, nullable=False, index=True),  # running, done, partial, void
    sa.Column("begun_ms", sa.BigInteger, nullable=False),
    sa.Column("ended_ms", sa.BigInteger, nullable=True),
    sa.Column("axes", sa.JSON, nullable=False),  # samples, tokens, seconds and cost until then
    sa.Column("result", sa.JSON, nullable=True),  # as in `coordinator.rules.scores`
)

# Results of evaluation suites that are not ours, as the operator imported them; one row for each run of a suite.
suite_runs = sa.Table(
    "suite_runs",
    metadata,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("digest", sa.String, nullable=False, unique=True),  # of what was read from the file
    sa.Column("suite", sa.String, nullable=False),  # lm-eval, inspect-ai, lighteval
    sa.Column("release", sa.String, nullable=False),  # of the suite; "" if its file does not have it
    sa.Column("version", sa.BigInteger, nullable=False),
    sa.Column("policy_update", sa.BigInteger, nullable=False),
    sa.Column("results", sa.JSON, nullable=False),  # as in `coordinator.transactions.suite_runs`
    sa.Column("imported_ms", sa.BigInteger, nullable=False),
)

# Money that others gave to the budget; the ledger has the amount and a digest of who gave it.
gifts = sa.Table(
    "gifts",
    metadata,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("given_by", sa.String, nullable=False),  # in the giver's words; "" if they are erased
    sa.Column("salt", sa.String, nullable=False),  # so that the digest cannot be guessed; "" if it is erased
    sa.Column("reference", sa.String, nullable=False, unique=True),  # of the payment; private
    sa.Column("amount_micros", sa.BigInteger, nullable=False),
    sa.Column("recorded_ms", sa.BigInteger, nullable=False),
)

# Keys to the endpoint, and the budget of each in micro-units.
api_keys = sa.Table(
    "api_keys",
    metadata,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("name", sa.String, nullable=False, unique=True),
    sa.Column("digest", sa.String, nullable=False, unique=True),  # of the key, which is not stored
    sa.Column("budget_micros", sa.BigInteger, nullable=False),
    sa.Column("spent_micros", sa.BigInteger, nullable=False),  # credited to nodes for its queries
    sa.Column("reserved_micros", sa.BigInteger, nullable=False),  # what nodes may still be credited for its queries
    sa.Column("made_ms", sa.BigInteger, nullable=False),
    sa.Column("expires_ms", sa.BigInteger, nullable=True),
    sa.Column("revoked_ms", sa.BigInteger, nullable=True),
    sa.Column("publishes", sa.Boolean, nullable=False, server_default=sa.false()),  # its holder may publish versions
    sa.Column("answered_queries", sa.Integer, nullable=False, server_default="0"),
    sa.Column("tokens", sa.BigInteger, nullable=False, server_default="0"),  # of answers that no audit has rejected
    sa.Column("used_ms", sa.BigInteger, nullable=True),  # of its last query; null: never, or before it was recorded
)

# The usage of each API key by day: tokens and costs are those of answers that no audit has rejected.
key_days = sa.Table(
    "key_days",
    metadata,
    sa.Column("api_key", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("day", sa.Integer, primary_key=True, autoincrement=False),  # days since 1970-01-01, UTC
    sa.Column("answered_queries", sa.Integer, nullable=False),
    sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
    sa.Column("tokens", sa.BigInteger, nullable=False),
    sa.Column("spent_micros", sa.BigInteger, nullable=False),
)

# Prompts that callers of the endpoint want completed: each is one group.
queries = sa.Table(
    "queries",
    metadata,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("api_key", sa.Integer, nullable=False),
    sa.Column("group_no", sa.Integer, nullable=False, unique=True),
    sa.Column("state", sa.String, nullable=False),  # open, answered, withdrawn
    sa.Column("version", sa.BigInteger, nullable=True),  # the only version that may answer it
    sa.Column("prompt", sa.LargeBinary, nullable=False),  # tokens, 32-bit little-endian
    sa.Column("samples", sa.Integer, nullable=False),
    sa.Column("tokens_max", sa.Integer, nullable=False),  # of a completion
    sa.Column("seed", sa.BigInteger, nullable=True),  # null: any
    sa.Column("reserved_micros", sa.BigInteger, nullable=False),
    sa.Column("asked_ms", sa.BigInteger, nullable=False),
    sa.Column("until_ms", sa.BigInteger, nullable=False),  # its caller waits no longer
    sa.Column("ended_ms", sa.BigInteger, nullable=True),  # null while it is open or reserves something
    sa.Column("temperature", sa.Float, nullable=True),  # of its leases; null: the version's
    sa.Column("report_every_ms", sa.Integer, nullable=True),  # null: its caller does not read while it is sampled
    sa.Column("priority", sa.Integer, nullable=False, server_default="0"),  # in its key's order; lowest first
    sa.Column("max_price", sa.BigInteger, nullable=True),  # micro-units per million tokens; null: the round's
)
QUERY_OPEN = queries.c.state == sa.text("'open'")
"""The queries that wait for an answer. The value is literal text, so that SQLite can use the index."""
sa.Index("queries_open", queries.c.api_key, queries.c.number, sqlite_where=QUERY_OPEN, postgresql_where=QUERY_OPEN)

versions = sa.Table(
    "versions",
    metadata,
    sa.Column("version", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("policy_update", sa.BigInteger, nullable=False),
    sa.Column("manifest_digest", sa.String, nullable=False),
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
    sa.Column("published_ms", sa.BigInteger, nullable=False),
)

facts = sa.Table(
    "facts",
    metadata,
    sa.Column("name", sa.String, primary_key=True),
    sa.Column("value", sa.JSON, nullable=False),
)


QUERY_WAITS = sa.exists().where(
    QUERY_OPEN, groups.c.group_no == queries.c.group_no, groups.c.state.in_(("open", "trial"))
)
"""The condition that a query waits for a node; a newcomer may work on it already."""


def is_for_training(group_no: sa.ColumnElement[int]) -> sa.ColumnElement[bool]:
    """Return the condition that the group is made for the learner: `coordinator.rules.lifecycle` has it in Python."""
    return group_no >= 0


# Payout batches, their states, and their payees with amounts.
payout_batches = sa.Table(
    "payout_batches",
    metadata,
    sa.Column("batch", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("state", sa.String, nullable=False),
    sa.Column("rail", sa.String, nullable=False),
    sa.Column("reference", sa.String, nullable=True, unique=True),
    sa.Column("checkpoint_size", sa.BigInteger, nullable=False),
    sa.Column("made_ms", sa.BigInteger, nullable=False),
)
payees = sa.Table(
    "payees",
    metadata,
    sa.Column("batch", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("place", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("owner", sa.String, nullable=False),
    sa.Column("address", sa.String, nullable=False),
    sa.Column("amount_micros", sa.BigInteger, nullable=False),
)
