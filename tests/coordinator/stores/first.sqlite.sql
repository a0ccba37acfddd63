CREATE TABLE api_keys (
    number INTEGER NOT NULL,
    name VARCHAR NOT NULL,
    digest VARCHAR NOT NULL,
    budget_micros BIGINT NOT NULL,
    spent_micros BIGINT NOT NULL,
    reserved_micros BIGINT NOT NULL,
    made_ms BIGINT NOT NULL,
    expires_ms BIGINT,
    revoked_ms BIGINT,
    publishes BOOLEAN DEFAULT 0 NOT NULL,
    PRIMARY KEY (number),
    UNIQUE (name),
    UNIQUE (digest)
);
CREATE TABLE appeals (
    number INTEGER NOT NULL,
    claim_id VARCHAR NOT NULL,
    owner VARCHAR NOT NULL,
    envelope BLOB NOT NULL,
    made_ms BIGINT NOT NULL,
    state VARCHAR NOT NULL,
    reason_code VARCHAR NOT NULL,
    said VARCHAR NOT NULL,
    ruled_by VARCHAR NOT NULL,
    ruled_ms BIGINT,
    sequenced BOOLEAN NOT NULL,
    PRIMARY KEY (number),
    UNIQUE (claim_id)
);
CREATE INDEX ix_appeals_owner ON appeals (owner);
CREATE INDEX ix_appeals_state ON appeals (state);
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
    held_as VARCHAR NOT NULL,
    used BOOLEAN NOT NULL,
    settled BOOLEAN NOT NULL,
    taken_by VARCHAR NOT NULL,
    taken_until_ms BIGINT NOT NULL,
    tries INTEGER NOT NULL,
    judged_ms BIGINT,
    report BLOB,
    fault VARCHAR,
    ban_ms BIGINT,
    PRIMARY KEY (claim_id),
    UNIQUE (lease_id)
);
CREATE INDEX audits_held ON audits (owner) WHERE held_as != '' AND settled = 0;
CREATE INDEX audits_open ON audits (owner, place) WHERE settled = 0;
CREATE INDEX audits_waiting ON audits (version) WHERE why != '' AND finding IS NULL AND settled = 0 AND held_as = '';
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
    number INTEGER NOT NULL,
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
CREATE TABLE evaluations (
    number INTEGER NOT NULL,
    version BIGINT NOT NULL,
    policy_update BIGINT NOT NULL,
    split VARCHAR NOT NULL,
    samples INTEGER NOT NULL,
    problems INTEGER NOT NULL,
    solved FLOAT NOT NULL,
    why VARCHAR NOT NULL,
    state VARCHAR NOT NULL,
    begun_ms BIGINT NOT NULL,
    ended_ms BIGINT,
    axes JSON NOT NULL,
    result JSON,
    PRIMARY KEY (number)
);
CREATE INDEX ix_evaluations_state ON evaluations (state);
CREATE TABLE facts (
    name VARCHAR NOT NULL,
    value JSON NOT NULL,
    PRIMARY KEY (name)
);
CREATE TABLE faults (
    number INTEGER NOT NULL,
    claim_id VARCHAR NOT NULL,
    owner VARCHAR NOT NULL,
    claims BIGINT NOT NULL,
    groups BIGINT NOT NULL,
    judged_ms BIGINT NOT NULL,
    lifted BOOLEAN NOT NULL,
    PRIMARY KEY (number),
    UNIQUE (claim_id)
);
CREATE INDEX ix_faults_owner ON faults (owner);
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
    envelope BLOB NOT NULL,
    PRIMARY KEY (lease_id, number)
);
CREATE TABLE groups (
    group_no INTEGER NOT NULL,
    split VARCHAR NOT NULL,
    prompt INTEGER NOT NULL,
    evaluation INTEGER,
    state VARCHAR NOT NULL,
    begun VARCHAR,
    begun_version BIGINT,
    waits_until_ms BIGINT,
    expected FLOAT,
    PRIMARY KEY (group_no)
);
CREATE INDEX ix_groups_evaluation ON groups (evaluation);
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
    offer BLOB NOT NULL,
    issued_ms BIGINT NOT NULL,
    expires_ms BIGINT NOT NULL,
    ended_ms BIGINT,
    PRIMARY KEY (lease_id)
);
CREATE INDEX leases_by_node ON leases (node_id, ended_ms);
CREATE INDEX leases_of_group ON leases (group_no) WHERE ended_ms IS NULL;
CREATE INDEX leases_open ON leases (expires_ms) WHERE ended_ms IS NULL;
CREATE INDEX leases_over ON leases (ended_ms) WHERE ended_ms IS NOT NULL;
CREATE TABLE lengths (
    prompts VARCHAR NOT NULL,
    mean FLOAT NOT NULL,
    groups INTEGER NOT NULL,
    PRIMARY KEY (prompts)
);
CREATE TABLE nodes (
    node_id VARCHAR NOT NULL,
    owner VARCHAR NOT NULL,
    revoked_ms BIGINT,
    paused_ms BIGINT,
    name VARCHAR NOT NULL,
    skeleton VARCHAR,
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
    earned BOOLEAN NOT NULL,
    PRIMARY KEY (node_id)
);
CREATE INDEX ix_nodes_skeleton ON nodes (skeleton);
CREATE INDEX nodes_by_owner ON nodes (owner, earned);
CREATE TABLE nonces (
    node_id VARCHAR NOT NULL,
    nonce BLOB NOT NULL,
    sent_ms BIGINT NOT NULL,
    PRIMARY KEY (node_id, nonce)
);
CREATE INDEX ix_nonces_sent_ms ON nonces (sent_ms);
CREATE TABLE orders (
    number INTEGER NOT NULL,
    given_ms BIGINT NOT NULL,
    action VARCHAR NOT NULL,
    subject VARCHAR NOT NULL,
    reason VARCHAR NOT NULL,
    given_by VARCHAR NOT NULL,
    PRIMARY KEY (number)
);
CREATE INDEX ix_orders_subject ON orders (subject);
CREATE TABLE outcomes (
    prompt VARCHAR NOT NULL,
    groups INTEGER NOT NULL,
    mean FLOAT NOT NULL,
    variance FLOAT NOT NULL,
    alike INTEGER NOT NULL,
    left_out INTEGER NOT NULL,
    PRIMARY KEY (prompt)
);
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
CREATE TABLE queries (
    number INTEGER NOT NULL,
    api_key INTEGER NOT NULL,
    group_no INTEGER NOT NULL,
    state VARCHAR NOT NULL,
    version BIGINT,
    prompt BLOB NOT NULL,
    samples INTEGER NOT NULL,
    tokens_max INTEGER NOT NULL,
    seed BIGINT,
    reserved_micros BIGINT NOT NULL,
    asked_ms BIGINT NOT NULL,
    until_ms BIGINT NOT NULL,
    ended_ms BIGINT,
    temperature FLOAT,
    report_every_ms INTEGER,
    PRIMARY KEY (number),
    UNIQUE (group_no)
);
CREATE INDEX queries_open ON queries (api_key, number) WHERE state = 'open';
CREATE TABLE receipts (
    version BIGINT NOT NULL,
    receiver VARCHAR NOT NULL,
    seconds FLOAT NOT NULL,
    from_origins BIGINT NOT NULL,
    received_ms BIGINT NOT NULL,
    envelope BLOB NOT NULL,
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
    rewards BLOB NOT NULL,
    inserted BLOB,
    marks JSON NOT NULL,
    envelope BLOB NOT NULL,
    accepted_ms BIGINT NOT NULL,
    state VARCHAR NOT NULL,
    batch INTEGER,
    PRIMARY KEY (claim_id),
    UNIQUE (lease_id)
);
CREATE INDEX rollouts_by_batch ON rollouts (batch);
CREATE INDEX rollouts_by_node ON rollouts (node_id, state);
CREATE INDEX rollouts_by_state ON rollouts (state, policy_update);
CREATE TABLE statements (
    owner VARCHAR NOT NULL,
    number BIGINT NOT NULL,
    kind VARCHAR NOT NULL,
    address VARCHAR NOT NULL,
    envelope BLOB NOT NULL,
    received_ms BIGINT NOT NULL,
    counts_from_ms BIGINT,
    node_id VARCHAR,
    sequenced BOOLEAN NOT NULL,
    PRIMARY KEY (owner, number)
);
CREATE TABLE suite_runs (
    number INTEGER NOT NULL,
    digest VARCHAR NOT NULL,
    suite VARCHAR NOT NULL,
    release VARCHAR NOT NULL,
    version BIGINT NOT NULL,
    policy_update BIGINT NOT NULL,
    results JSON NOT NULL,
    imported_ms BIGINT NOT NULL,
    PRIMARY KEY (number),
    UNIQUE (digest)
);
CREATE TABLE tally (
    id INTEGER NOT NULL,
    unfinished BIGINT NOT NULL,
    reserved_micros BIGINT NOT NULL,
    PRIMARY KEY (id)
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
CREATE TABLE ledger_balances (
    account VARCHAR(80) NOT NULL,
    micros BIGINT NOT NULL,
    PRIMARY KEY (account),
    CONSTRAINT ledger_no_debt CHECK (account = 'outside' OR micros >= 0)
);
CREATE TABLE ledger_checkpoint (
    id INTEGER NOT NULL CHECK (id = 0),
    size BIGINT NOT NULL,
    root BLOB NOT NULL,
    note BLOB NOT NULL,
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
CREATE TABLE ledger_cosignatures (
    witness VARCHAR(300) NOT NULL,
    size BIGINT NOT NULL,
    time_s BIGINT NOT NULL,
    note BLOB NOT NULL,
    PRIMARY KEY (witness)
);
CREATE TABLE ledger_entries (
    "index" INTEGER NOT NULL,
    content_hash VARCHAR(64) NOT NULL,
    effect VARCHAR(120) NOT NULL,
    kind VARCHAR(16) NOT NULL,
    body BLOB NOT NULL,
    recorded_ms BIGINT NOT NULL,
    PRIMARY KEY ("index"),
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
    hashes BLOB NOT NULL,
    PRIMARY KEY (level, number)
);
