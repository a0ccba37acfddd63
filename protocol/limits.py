"""Every bound of the protocol in one place, each with its reason.

- A limit is checked before the value it limits is built: bytes before parsing, counts before allocation.
- A higher limit lets an untrusted sender cost us more: say here why the new value is safe.
"""

from collections.abc import Sequence

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
GB = 10**9
"""A decimal gigabyte, as network providers and makers of cards count."""

HOUR_S, HOUR_MS = 3600, 3_600_000
DAY_S, DAY_MS = 24 * HOUR_S, 24 * HOUR_MS

MESSAGE_MAX_BYTES = 8 * MIB
"""Any canonical message: 64 samples x 8,192 tokens x 8 bytes is 4 MiB, and the envelope must fit beside it."""

REQUEST_MAX_BYTES = MESSAGE_MAX_BYTES + 64 * KIB
"""A signed request: the largest message and the envelope around it."""

SMALL_REQUEST_MAX_BYTES = 16 * KIB
"""A request that carries no rollouts: sending one costs the sender more than checking it costs us."""

MESSAGE_MAX_DEPTH = 8
"""No message nests deeper than offer → lease → field; eight leaves room and stops nesting bombs."""

MESSAGE_MAX_ITEMS = 100_000
"""Containers and scalars in one message: tokens travel as packed bytes, so even a manifest stays below."""

SPARE_ITEMS = 64
"""Values of a message beyond those that its fields can hold, so that the error can name an unknown field."""

REGISTER_MAX_ITEMS = 1_000
"""Values of a registration: ours has thirty. One of another generation must be read far enough to name the cause."""

MALFORMED_MAX = 3
"""Unreadable envelopes of one request, after which the rest is not read: an honest node sends none."""

ANSWER_HEAD_BYTES, ANSWER_SAMPLE_BYTES = 1 * KIB, 128
"""Bytes of the envelope of a claim or a fragment beside tokens and log-probabilities: once, and for each sample.
Names, digests and a signature take 600 bytes, the keys of a sample 70."""

READ_AT_ONCE_BYTES = 64 * KIB
"""A single envelope up to this size is decoded before its lease is looked up: at most a millisecond."""

STRING_MAX_BYTES = 4 * KIB
"""Names, hints and addresses; long text travels as tokens."""

SAMPLES_MAX = 64
"""Samples in one group; papers use 8 to 16."""

CANARY_TOKENS_MAX = 256
"""Tokens of a version's canary: scored at every swap, so they must cost less than a second."""

EVALUATIONS_TOLD_MAX = 8
"""Ended evaluations in each answer to the learner; it asks more often than evaluations end."""

EVALUATION_SAMPLES_MAX, EVALUATION_TEXT_MAX_CHARS = 64, 2000
"""Samples of one evaluation that people read, and the characters of a prompt or completion: together 1 MiB at most,
which a page must hold for several evaluations."""

WEIGHT_MAX = 100.0
"""The weight of one sample relative to others: with more it would outweigh a batch."""

SKIPPED_SPANS_MAX = 64
"""Spans of a completion that are not trained on; a reward that needs more should be another reward."""

LOGPROB_MIN = -104.0
"""The lowest log-probability of a drawn token, in nats: e to this power is less than the smallest float32 above 0, so
no float32 softmax gives a token less. A uniform of 53 bits hardly ever draws one below 2^-53, which is -36.7 nats."""

TEMPERATURE_MIN, TEMPERATURE_MAX = 0.01, 2.0
"""A lease's own temperature, if it is not 0. At a lower one, rounding alone picks among near tokens, and logits divided
by it may overflow float32. At a higher one, nearly any token is drawn."""

TOKENS_MAX = 32_768
"""Tokens of one prompt or completion; the longest contexts that consumer cards sample."""

CHUNK_MAX_BYTES = 4 * MIB
"""One chunk: large enough that hashing and framing cost little, small enough that one bad chunk costs little."""

MANIFEST_MAX_BYTES = 4 * MIB
"""A manifest of 4 MiB chunks at 40 bytes each describes 400 GB of weights."""

MANIFEST_MAX_FILES = 256
"""Files of one policy: shards, tokenizer, configuration."""

MANIFEST_MAX_CHUNKS = 90_000
"""Chunks of one policy; 360 GB at full chunk size, and below `MESSAGE_MAX_ITEMS`."""

METADATA_MAX_BYTES = 256 * KIB
"""One trust document: four roles, a dozen targets."""

ROOT_ROTATIONS_MAX = 256
"""New roots followed in one refresh: weekly rotations for five years; an endless chain of roots cannot stop a node."""

PATCHES_MAX = 16
"""Patches of one file in a chain: a joining node applies them all, each at about one second per gigabyte of weights."""

PATCH_BLOCK_BYTES = 4 * MIB
"""Bytes patched in one step: this bounds the memory and the decompressed size of a zstd frame."""

TENSORS_HEADER_MAX_BYTES = 16 * MIB
"""The header of a safetensors file: a hundred thousand tensors; beyond this, reading it costs more than it is worth."""

POLICY_CONFIG_MAX_BYTES = 1 * MIB
"""A policy's config.json and generation_config.json: a few kilobytes each."""

TOKENIZER_MAX_BYTES = 48 * MIB
"""A tokenizer.json, or another file of a vocabulary: a quarter of a million tokens take 34 MB."""

ADDED_TOKENS_MAX = 16_384
"""Added tokens of a tokenizer: the largest published ones have 6,400, and each costs time in every text."""

CHAT_TEMPLATE_MAX_BYTES = 1 * MIB
"""A chat template: the longest published ones have 100 kB; nodes never render it."""

TENSOR_INDEX_MAX_BYTES = 16 * MIB
"""The index that names the file of each tensor: as large as the headers that it repeats."""

REPEATED_MIN_BYTES, REPEATED_FACTOR_MAX = 64 * MIB, 4
"""A file larger than `REPEATED_MIN_BYTES` may be at most `REPEATED_FACTOR_MAX` times as large as its distinct chunks:
fresh weights have tensors of zeros, but nobody may fill a disk with one chunk that they send once."""

VERSION_MAX = 2**40
"""Policy versions; nobody publishes that often, and a counter near 2^63 is an attack."""

TRAINING_SETTINGS_MAX_BYTES = 64 * KIB
"""The settings of an update as JSON: about 2 KiB, and 100 bytes for each file of the starting policy."""

TRAINING_PART_BYTES = 64 * MIB
"""A part of a checkpoint's file: a replay fetches 1.6 GB for a policy of 135 million parameters."""

KEPT_BATCH_MAX_BYTES = 4096 * MIB
"""A batch of 512 of the largest groups, which a replay holds in memory as the learner does."""

KEPT_BATCH_MAX_ITEMS = 2**24
"""Values in such a batch: 512 groups of 64 samples have at most 7 million, if each has the most spans to skip."""

KEPT_UPDATES_MAX = 10_000
"""Drawn updates whose checkpoints a learner keeps, the newest: the disk is full long before."""

RETRACTED_OWNERS_MAX = 256
"""Owners in one retraction, 54 bytes each: an entry of the log with so many has 14 KiB."""

ORIGINS_MAX = 8
"""Origins in the list for nodes: with more, a list of dead origins would only take longer to try."""

ORIGIN_URL_MAX_CHARS = 300
"""A host name has at most 253 characters; the path to a round's files is short."""

LEASES_PER_REQUEST_MAX = 64
"""Groups that one node may request at once."""

CONTEXT_PAID_MAX = SAMPLES_MAX * 2 * TOKENS_MAX
"""Tokens paid for the context of a lease: at most those of its prompt and prefixes."""

TURNS_MAX = 256
"""Turns of an episode: each is a lease with the whole context, so that many cost more than any game is worth."""

FRAGMENTS_MAX = 256
"""Fragments of one lease: each costs a row, and all are read when another node continues. A group that is read while it
grows, first every 50 ms and later at intervals of a 24th of its age, has about 220 in an hour."""

REPORT_EVERY_MIN_MS, REPORT_EVERY_MAX_MS = 50, 60_000
"""The interval between fragments that a lease may ask for. A node reports no more often, whatever it is asked."""

HANDS_MAX = 4
"""Nodes that leave an unfinished group to the next: each makes a claim, and every lease of the group reads them all."""

NAME_MAX_CHARS = 40
"""The name of a node. It must fit a table column, with the end of the node's id if another node has the same name."""

NAME_MARKS_MAX = 2
"""Combining marks on one letter: no language stacks more, and a hundred of them would cover the lines around."""

ROUND_TITLE_MAX_CHARS = 80
"""The title of a round. It must fit one line of a terminal, and the title of a browser's tab."""

ROUND_FACT_MAX_CHARS = 200
"""The licence, operator or contact of a round: a line each, or an address."""

ROUND_TEXT_MAX_CHARS = 500
"""The description or purpose of a round: a paragraph that visitors read in ten seconds, before they join."""

DESCRIPTION_MAX_BYTES = 8 * KIB
"""The description of a round: its texts at their limits, in the longest UTF-8."""

ADDRESSES_MAX = 8
"""Addresses a node may register: other nodes try each of them."""

FETCH_MIN_S, FETCH_MAX_S = 1e-3, 7 * 86_400
"""Seconds that a fetch may report. A longer fetch is reported as a week; 0 s would mean an infinite rate."""

STRIPES_MAX = 64
"""Stripes of a version; each may come from another node, and each costs a connection."""

PEERS_MAX = 96
"""Peers in one plan: a parent for each stripe, and some replacements."""

HOPS_MAX = 64
"""Uplinks that a chunk passes: trees are a few levels high; a longer chain of nodes would be a bad plan."""

CALLS_MAX = 128
"""Nodes that one plan lists for a node to call: as many as it may have children."""

OBSERVERS_MAX = 2
"""Nodes that a plan names to ask for the own address: two equal answers show one address for all, others none."""

PUNCHES_MAX = 144
"""Nodes in one plan that dial each other at the same time as this node: a parent for each stripe and `CALLS_MAX`
children."""

PUNCH_PORT_MIN = 1024
"""Lower ports belong to other services: no plan has a node dial them."""

PUNCH_DIALS_PER_HOST, PUNCH_DIALS = 10, 2 * PUNCHES_MAX
"""Dials per minute, to one address and in all, whatever the plans say: a dial is three small packets, so a third party
whose address is named gets at most one packet every two seconds from each node."""

DIALS_MAX = 40
"""Nodes that one receipt lists as reached, and as many as unreached: the seeder, a parent for each stripe and some
replacements; with the uploads of `PEERS_MAX` nodes they still fit into a small request."""

REACHED_MAX = 16
"""Stages in one heartbeat: those of the last four versions; earlier ones are not needed."""

REACHED_AGO_MAX_S = 86_400
"""A stage that was reached earlier is reported as one day old."""

TRANSFER_MAX_BYTES = 2**50
"""A petabyte moved by one agent since it started; the sum of thousands of such counters still fits into 64 bits."""

AUDIT_CASES_MAX = 64
"""Cases that one auditor fetches at once: a killed auditor delays at most these."""

CLASSES_MAX = 100
"""Classes that a round admits or has tolerances for; seven are included."""

PROBES_MAX = 256
"""Nodes that an operator may name to calibrate classes on: a few of each."""

HELD_CLAIMS_MAX = 2
"""Held claims of one owner, after which it gets no more work until their class is calibrated. Held claims are not
audited yet, so a forger could go on for ever; a ban follows after as many faults."""

AUDITOR_CASES_AT_ONCE = 32
"""Cases that our auditor takes together: they share passes of the model, and progress is told after each slice."""

AUDITOR_VERSIONS_MAX = 2
"""Versions that an auditor has in memory: the one being audited, and the one before it."""

AUDIT_REPORT_MAX_BYTES = 64 * KIB
"""Evidence on one claim: a few findings of eight positions each."""

EXPLANATIONS_MAX = 20
"""Leases explained at once: more than a person reads."""

APPEAL_MAX_BYTES = 4 * KIB
"""A signed appeal: its reason in any script, a claim, a round and a signature."""

APPEAL_REASON_MAX_CHARS = 500
"""The reason in an appeal: the evidence is stored anyway, and the operator reads the reason on a terminal."""

APPEALS_OPEN_MAX = 8
"""Appeals of one owner without a ruling: for a ban and both its faults, and again after the operator lifted the ban."""

APPEALS_MAX = 64
"""Appeals of one owner in a round; each is about a hard fault or a ban, and the second fault bans."""

PROBE_MAX_BYTES = 4 * MIB
"""Bytes a machine may send to measure its uplink: a third of a second at 100 Mbit/s, and no more than a submission."""

CLOCK_SKEW_MAX_S = 90
"""The largest difference of a node's clock; a nonce is remembered for twice as long."""

STATEMENT_MAX_BYTES = 1 * KIB
"""An owner's signed statement: two keys, a number, an address."""

MOMENT_MAX_MS = 253_402_300_799_000
"""The end of the year 9999: Python cannot write a later moment as a date."""

STATEMENT_NUMBER_MAX = 2**53
"""Owners number their statements by the milliseconds of their clocks; JSON's integers hold it."""

ADDRESS_MAX_CHARS = 600
"""An owner's payout address: a Lightning offer with two blinded paths has about 500. It fits into a statement."""

ADDRESSES_PER_DAY = 4
"""Addresses of one owner in a day: one, its correction, and two to answer a thief. The last one never counts, so a
thief who uses them up does not decide. Each may become a permanent entry of the ledger."""

GROUPS_PER_ADDRESS, ADDRESSES_PER_DAY_MAX = 100, 32
"""One more address per day for every `GROUPS_PER_ADDRESS` groups that were found right: sampling them costs more than
keeping an entry. A change every hour helps nobody."""

EARNINGS_NODES_MAX = 1_000
"""Nodes listed in one answer about earnings; the total counts them all."""

RECEIPTS_MAX = 256
"""Claims of one request for receipts: the proofs of so many cost the coordinator's reader a third of a second."""

RECEIPTS_FILE_MAX = 1_000
"""Claims in one file of receipts: about 2 MB, far below `MESSAGE_MAX_BYTES`, and one file per thousand claims."""

TOKENS_PER_S_MAX = 1e9
"""The sampling rate that a node reports: far above any machine, and the sum over an owner's nodes stays finite."""

NONCE_BYTES = 16
"""Random enough that two honest requests never meet."""

PRICE_DEFAULT_MICROS_PER_MTOK = 10**6
"""The price that `join` asks if the owner sets none: one of the round's unit."""

EXACT_BONUS_MAX = 1
"""The largest addition to a node's price for exact work, as a share of it. No lease pays a node more than that."""

PRICE_MAX_MICROS_PER_MTOK = 10**12
"""A million units per million tokens: above any market, and far from overflowing 64 bits when multiplied."""

EXCHANGE_WANTS_MAX = 32
"""Unanswered WANTs on one stream: a few fill any link, the rest may wait for chunks that have not arrived yet. A WANT
costs the responder a name, and the requester a chunk in memory once it is answered."""

ARRIVING_CHUNKS_MAX_BYTES = 256 * MIB
"""Chunks of all downloads of a node that arrive or wait for the disk: 64 of the largest. A plan has up to `PEERS_MAX`
peers, and a node several rounds; a disk that is slower than they are together slows them down."""

EXCHANGE_HAVE_NAMES_MAX = 64
"""Names in one HAVE: a frame of 2 KiB; more names travel in more frames."""

EXCHANGE_HAVE_TOTAL_MAX = 2 * MANIFEST_MAX_CHUNKS
"""Names in all HAVEs of one stream: it lives as long as one download, in which the largest version fits twice."""

NEGOTIATION_WORDS_MAX, NEGOTIATION_WORD_MAX_BYTES = 16, 256
"""Bounds of what either side, still unauthenticated, may send before a protocol is agreed on: a greeting and a few
names of less than a hundred bytes each."""

HANDSHAKE_MESSAGE_MAX_BYTES = 4096
"""One message of the Noise handshake: ours have 32 to 200 bytes; others may name muxers and certificates in theirs."""

STREAM_WINDOW_OPEN_BYTES = 1 * MIB
"""The initial receive window of the side that opened a stream and requests data. It doubles as data is read."""

STREAM_WINDOW_MAX_BYTES = 16 * MIB
"""The largest receive window: credit returns at half of it, so 8 MiB are in flight, 160 MB/s at 50 ms."""

STREAM_LINGER_TICKS = 2
"""Keep-alive ticks that a stream we closed waits for its peer's end before it is reset."""

CONNECTION_RECEIVE_MAX_BYTES = 32 * MIB
"""All receive windows of one connection together: one stream at its largest, and room for sixty small ones."""

HOST_RECEIVE_MAX_BYTES = 256 * MIB
"""All receive windows of a host together: the most memory that all its peers can make it use."""

CALLERS_RECEIVE_MAX_BYTES = 3 * HOST_RECEIVE_MAX_BYTES // 4
"""Receive windows of all peers that dialled: the rest is for the peers that we dial, however many addresses call."""

ADDRESS_RECEIVE_MAX_BYTES = HOST_RECEIVE_MAX_BYTES // 4
"""Receive windows of all peers that dialled from one address: a quarter, as for connections, so that other peers still
work."""

CONNECTION_STREAMS_MAX = 128
"""Open streams of one connection; a node needs one or two, and each costs its peer a task."""

CONNECTION_BACKLOG_MAX = 64
"""Streams opened and not yet accepted, in either direction."""

CONNECTION_FRAMES_PER_TICK = 4096
"""Frames that an idle peer may send between two keep-alive ticks; one more for every KiB of payload. A frame of twelve
bytes costs us about 5 microseconds, so a flood can take 20 ms of every 10 s."""

CONNECTION_CONTROL_MAX_BYTES = 64 * KIB
"""Answers (pongs, resets) queued for a peer that does not read: about five thousand."""

QUERY_MAX_DEPTH = 32
"""Nesting of a query to the endpoint: the JSON schema of a tool has ten levels."""

QUERY_MAX_ITEMS = 100_000
"""Values of a query, where a list of token ids counts as one: the longest chat has about ten thousand."""

QUERY_PROMPTS_MAX = 64
"""Prompts of one query: each is a group of up to `SAMPLES_MAX` samples."""

USAGE_DAYS, USAGE_DAYS_MAX = 30, 366
"""Days of an API key's usage that are listed without a number, and at most: a year, in less than 50 kB."""

QUERY_MESSAGES_MAX = 1024
"""Messages of a chat: `TURNS_MAX` turns with two calls of tools each."""

QUERY_TOOLS_MAX = 128
"""Tools of a chat, as many as the services that clients are written for accept."""

STOPS_MAX, STOP_MAX_CHARS = 16, 128
"""Stop strings of a query: each is searched for in every new piece of text."""

SUITE_FILE_MAX_BYTES = 64 * MIB
"""Results file of an evaluation suite: one with hundreds of tasks has 5 MB; a log with long samples is an archive."""

SUITE_METRICS_MAX, SUITE_NAME_MAX_CHARS = 500, 120
"""Metrics in a results file, and characters of the name of a task or metric: the longest lists of tasks have 300."""

SUITE_RUNS_LISTED_MAX = 64
"""Imported runs in a reply and on a page, the newest: 64 · 500 metrics of 150 bytes are 5 MB."""

TOKEN_ID_MAX = 2**31 - 1
"""The largest id of a token that a query may contain: it fits into 32 bits. The policy's vocabulary is far smaller."""

TINKER_BODY_MAX_BYTES = 64 * MIB
"""A request of a Tinker client: its client splits training data into requests of 5 MB, but no example."""

TINKER_PENDING_MAX = 4096
"""Requests of Tinker clients that are not answered yet: the client itself has at most 2,000 samples under way."""

TINKER_REPLIES_MAX_BYTES = 256 * MIB
"""Replies that are kept until they are fetched, and fetched ones, as far as there is room: a fetch may be repeated."""

TINKER_POLL_S = 30.0
"""The wait for a reply in one request; the client gives up after 45 s, and asks again."""

TINKER_GAP_S = 120.0
"""The wait for an earlier request of the same model. The client sends them at once, and repeats them while it
gets no answer."""

TINKER_SILENT_S = 600.0
"""A session without heartbeats for so long has ended: the client sends one every 10 s."""

TINKER_SESSIONS_MAX = 64
"""Sessions of Tinker clients; each is one program."""

TINKER_MODELS_MAX = 8
"""Models in training at once: each costs the memory of an adapter, its gradient and its optimizer."""

TINKER_SAMPLERS_MAX = 10_000
"""Samplers that are known: a training makes one for each update, and uses the newest."""

TINKER_MICRO_BATCH_TOKENS = 8192
"""Tokens, with padding, that are computed together in training: the logits of a vocabulary of 150,000 take 5 GB."""

TINKER_NAME_MAX_CHARS = 100
"""The name of a saved state, which is also a folder's."""

ROUNDS_PER_AGENT_MAX = 8
"""Rounds in which one agent takes part: each has its own port, and a node's firewall rule names eight."""

RETRY_PAUSES_S = (0.5, 1.0, 2.0, 5.0, 10.0)
"""Pauses of what is tried again without end: a program that restarts is missed for little longer than it takes, and one
that is away for hours gets a request every ten seconds from each of those who wait for it."""


def retry_pause_s(failures: int, pauses_s: Sequence[float] = RETRY_PAUSES_S) -> float:
    """Return the pause after a failure, before which there were `failures` in a row; the last pause is repeated."""
    return pauses_s[min(failures, len(pauses_s) - 1)]
