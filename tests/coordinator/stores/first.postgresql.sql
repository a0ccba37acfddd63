CREATE TABLE audits (
    claim_id VARCHAR NOT NULL,
    lease_id VARCHAR NOT NULL,
    node_id VARCHAR NOT NULL,
    owner VARCHAR NOT NULL,
    groups INTEGER NOT NULL,
    place BIGINT NOT NULL,
    version BIGINT NOT NULL,
    epoch BIGINT NOT NULL,
    rate_ppm INTEGER NOT NULL,
    why VARCHAR NOT NULL,
    finding VARCHAR,
    used BOOLEAN NOT NULL,
    settled BOOLEAN NOT NULL,
    taken_by VARCHAR NOT NULL,
    taken_until_ms BIGINT NOT NULL,
    tries INTEGER NOT NULL,
    judged_ms BIGINT,
    report BYTEA,
    PRIMARY KEY (claim_id),
    UNIQUE (lease_id)
);
CREATE INDEX audits_open ON audits (owner, place);
CREATE INDEX audits_waiting ON audits (version);
CREATE INDEX ix_audits_epoch ON audits (epoch);
CREATE TABLE batches (
    batch INTEGER NOT NULL,
    formed_ms BIGINT NOT NULL,
    max_staleness INTEGER NOT NULL,
    reported_ms BIGINT,
    idle_s FLOAT,
    busy_s FLOAT,
    metrics JSON,
    PRIMARY KEY (batch)
);
CREATE TABLE blames (
    number SERIAL NOT NULL,
    accuser VARCHAR NOT NULL,
    accused VARCHAR NOT NULL,
    chunk VARCHAR NOT NULL,
    got VARCHAR NOT NULL,
    recorded_ms BIGINT NOT NULL,
    PRIMARY KEY (number),
    UNIQUE (accuser, accused, chunk)
);
CREATE TABLE broadcasts (
    version BIGINT NOT NULL,
    node_id VARCHAR NOT NULL,
    heard_ms BIGINT,
    fetched_ms BIGINT,
    loaded_ms BIGINT,
    first_token_ms BIGINT,
    PRIMARY KEY (version, node_id)
);
CREATE TABLE dials (
    receiver VARCHAR NOT NULL,
    node VARCHAR NOT NULL,
    version BIGINT NOT NULL,
    answered BOOLEAN NOT NULL,
    PRIMARY KEY (receiver, node)
);
CREATE TABLE epochs (
    epoch BIGINT NOT NULL,
    secret_digest VARCHAR NOT NULL,
    state VARCHAR NOT NULL,
    claims BIGINT NOT NULL,
    PRIMARY KEY (epoch)
);
CREATE TABLE facts (
    name VARCHAR NOT NULL,
    value JSON NOT NULL,
    PRIMARY KEY (name)
);
CREATE TABLE fleet (
    node_id VARCHAR NOT NULL,
    works BOOLEAN NOT NULL,
    since_ms BIGINT NOT NULL,
    reason VARCHAR NOT NULL,
    groups_per_s FLOAT NOT NULL,
    cost_micros_per_s FLOAT NOT NULL,
    PRIMARY KEY (node_id)
);
CREATE TABLE fragments (
    lease_id VARCHAR NOT NULL,
    number INTEGER NOT NULL,
    envelope BYTEA NOT NULL,
    PRIMARY KEY (lease_id, number)
);
CREATE TABLE groups (
    group_no INTEGER NOT NULL,
    state VARCHAR NOT NULL,
    begun VARCHAR,
    begun_version BIGINT,
    PRIMARY KEY (group_no)
);
CREATE INDEX ix_groups_state ON groups (state);
CREATE TABLE leases (
    lease_id VARCHAR NOT NULL,
    group_no INTEGER NOT NULL,
    node_id VARCHAR NOT NULL,
    continues VARCHAR,
    state VARCHAR NOT NULL,
    code VARCHAR NOT NULL,
    surplus BOOLEAN NOT NULL,
    said VARCHAR NOT NULL,
    max_cost_micros BIGINT NOT NULL,
    offer BYTEA NOT NULL,
    issued_ms BIGINT NOT NULL,
    expires_ms BIGINT NOT NULL,
    ended_ms BIGINT,
    PRIMARY KEY (lease_id)
);
CREATE INDEX ix_leases_ended_ms ON leases (ended_ms);
CREATE INDEX leases_by_group ON leases (group_no);
CREATE INDEX leases_by_node ON leases (node_id, ended_ms);
CREATE INDEX leases_held ON leases (node_id) WHERE state IN ('offered', 'held', 'generating');
CREATE INDEX leases_open ON leases (expires_ms, max_cost_micros) WHERE state IN ('offered', 'held', 'generating');
CREATE TABLE nodes (
    node_id VARCHAR NOT NULL,
    owner VARCHAR NOT NULL,
    revoked_ms BIGINT,
    name VARCHAR NOT NULL,
    price_micros_per_mtok BIGINT NOT NULL,
    addresses JSON NOT NULL,
    shares BOOLEAN NOT NULL,
    registered_ms BIGINT NOT NULL,
    last_seen_ms BIGINT NOT NULL,
    version BIGINT NOT NULL,
    phase VARCHAR NOT NULL,
    tokens_per_s FLOAT NOT NULL,
    lease_allowance INTEGER,
    uploaded_bytes BIGINT NOT NULL,
    PRIMARY KEY (node_id)
);
CREATE INDEX ix_nodes_owner ON nodes (owner);
CREATE TABLE nonces (
    node_id VARCHAR NOT NULL,
    nonce BYTEA NOT NULL,
    sent_ms BIGINT NOT NULL,
    PRIMARY KEY (node_id, nonce)
);
CREATE INDEX ix_nonces_sent_ms ON nonces (sent_ms);
CREATE TABLE parts (
    claim_id VARCHAR NOT NULL,
    whole VARCHAR NOT NULL,
    lease_id VARCHAR NOT NULL,
    node_id VARCHAR NOT NULL,
    tokens BIGINT NOT NULL,
    credit_micros BIGINT NOT NULL,
    credited_ms BIGINT NOT NULL,
    PRIMARY KEY (claim_id),
    UNIQUE (lease_id)
);
CREATE INDEX ix_parts_credited_ms ON parts (credited_ms);
CREATE INDEX ix_parts_whole ON parts (whole);
CREATE TABLE payees (
    batch BIGINT NOT NULL,
    place INTEGER NOT NULL,
    owner VARCHAR NOT NULL,
    address VARCHAR NOT NULL,
    amount_micros BIGINT NOT NULL,
    PRIMARY KEY (batch, place)
);
CREATE TABLE payout_batches (
    batch BIGINT NOT NULL,
    state VARCHAR NOT NULL,
    rail VARCHAR NOT NULL,
    reference VARCHAR,
    checkpoint_size BIGINT NOT NULL,
    made_ms BIGINT NOT NULL,
    PRIMARY KEY (batch),
    UNIQUE (reference)
);
CREATE TABLE receipts (
    version BIGINT NOT NULL,
    receiver VARCHAR NOT NULL,
    seconds FLOAT NOT NULL,
    from_origins BIGINT NOT NULL,
    received_ms BIGINT NOT NULL,
    envelope BYTEA NOT NULL,
    PRIMARY KEY (version, receiver)
);
CREATE TABLE rejections (
    node_id VARCHAR NOT NULL,
    code VARCHAR NOT NULL,
    count BIGINT NOT NULL,
    last_lease_id VARCHAR NOT NULL,
    last_message VARCHAR NOT NULL,
    last_ms BIGINT NOT NULL,
    PRIMARY KEY (node_id, code)
);
CREATE TABLE rollouts (
    claim_id VARCHAR NOT NULL,
    lease_id VARCHAR NOT NULL,
    group_no INTEGER NOT NULL,
    node_id VARCHAR NOT NULL,
    version BIGINT NOT NULL,
    policy_update BIGINT NOT NULL,
    tokens BIGINT NOT NULL,
    credit_micros BIGINT NOT NULL,
    rewards BYTEA NOT NULL,
    envelope BYTEA NOT NULL,
    accepted_ms BIGINT NOT NULL,
    state VARCHAR NOT NULL,
    batch INTEGER,
    PRIMARY KEY (claim_id),
    UNIQUE (lease_id)
);
CREATE INDEX ix_rollouts_node_id ON rollouts (node_id);
CREATE INDEX rollouts_by_batch ON rollouts (batch);
CREATE INDEX rollouts_by_state ON rollouts (state, policy_update);
CREATE TABLE statements (
    owner VARCHAR NOT NULL,
    number BIGINT NOT NULL,
    kind VARCHAR NOT NULL,
    address VARCHAR NOT NULL,
    envelope BYTEA NOT NULL,
    received_ms BIGINT NOT NULL,
    counts_from_ms BIGINT,
    PRIMARY KEY (owner, number)
);
CREATE TABLE transfers (
    node_id VARCHAR NOT NULL,
    session VARCHAR NOT NULL,
    from_peers BIGINT NOT NULL,
    from_seeder BIGINT NOT NULL,
    from_http BIGINT NOT NULL,
    to_peers BIGINT NOT NULL,
    PRIMARY KEY (node_id, session)
);
CREATE TABLE trust (
    owner VARCHAR NOT NULL,
    accepted BIGINT NOT NULL,
    claims BIGINT NOT NULL,
    groups BIGINT NOT NULL,
    soft INTEGER NOT NULL,
    hard INTEGER NOT NULL,
    banned_ms BIGINT,
    PRIMARY KEY (owner)
);
CREATE TABLE uploads (
    version BIGINT NOT NULL,
    receiver VARCHAR NOT NULL,
    sender VARCHAR NOT NULL,
    size_bytes BIGINT NOT NULL,
    busy_s FLOAT NOT NULL,
    hindered BOOLEAN NOT NULL,
    PRIMARY KEY (version, receiver, sender)
);
CREATE TABLE versions (
    version BIGINT NOT NULL,
    policy_update BIGINT NOT NULL,
    manifest_digest VARCHAR NOT NULL,
    size_bytes BIGINT NOT NULL,
    published_ms BIGINT NOT NULL,
    PRIMARY KEY (version)
);
CREATE TABLE ledger_balances (
    account VARCHAR(80) NOT NULL,
    micros BIGINT NOT NULL,
    PRIMARY KEY (account),
    CONSTRAINT ledger_no_debt CHECK (account = 'outside' OR micros >= 0)
);
CREATE TABLE ledger_checkpoint (
    id INTEGER NOT NULL CHECK (id = 0),
    size BIGINT NOT NULL,
    root BYTEA NOT NULL,
    note BYTEA NOT NULL,
    PRIMARY KEY (id)
);
CREATE TABLE ledger_claims (
    claim_id VARCHAR(64) NOT NULL,
    node_id VARCHAR(64) NOT NULL,
    state VARCHAR(16) NOT NULL,
    amount_micros BIGINT NOT NULL,
    tokens BIGINT NOT NULL,
    entry_hash VARCHAR(64) NOT NULL,
    PRIMARY KEY (claim_id)
);
CREATE TABLE ledger_entries (
    index BIGINT NOT NULL,
    content_hash VARCHAR(64) NOT NULL,
    effect VARCHAR(120) NOT NULL,
    kind VARCHAR(16) NOT NULL,
    body BYTEA NOT NULL,
    recorded_ms BIGINT NOT NULL,
    PRIMARY KEY (index),
    UNIQUE (content_hash),
    UNIQUE (effect)
);
CREATE TABLE ledger_head (
    id INTEGER NOT NULL CHECK (id = 0),
    size BIGINT NOT NULL,
    PRIMARY KEY (id)
);
CREATE TABLE ledger_tiles (
    level INTEGER NOT NULL,
    number BIGINT NOT NULL,
    width INTEGER NOT NULL,
    hashes BYTEA NOT NULL,
    PRIMARY KEY (level, number)
);
