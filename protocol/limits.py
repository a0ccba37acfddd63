"""Every bound of the protocol in one place, each with its reason.

- A limit is checked before the thing it limits is built: bytes before parsing, counts before allocation.
- Raising one changes what a stranger can cost us: say here why the new value is safe.
"""

KIB = 1024
MIB = 1024 * KIB

MESSAGE_MAX_BYTES = 8 * MIB
"""Any canonical message: 64 samples x 8,192 tokens x 8 bytes is 4 MiB, and the envelope must fit beside it."""

REQUEST_MAX_BYTES = MESSAGE_MAX_BYTES + 64 * KIB
"""A signed request: the largest message and the words around it."""

SMALL_REQUEST_MAX_BYTES = 16 * KIB
"""A request that carries no rollouts: checking one costs a stranger more than us."""

MESSAGE_MAX_DEPTH = 8
"""No message nests deeper than offer → lease → field; eight leaves room and stops nesting bombs."""

MESSAGE_MAX_ITEMS = 100_000
"""Containers and scalars in one message: tokens travel as packed bytes, so even a manifest stays below."""

SPARE_ITEMS = 64
"""Values of a message beyond what its fields can hold: an unknown field is then refused by its name."""

REGISTER_MAX_ITEMS = 1_000
"""Values of a registration: ours has thirty, and one of another generation is read far enough to be told so."""

MALFORMED_MAX = 3
"""Envelopes of one request that cannot be read, before the rest is left unread: an honest node sends none."""

ANSWER_HEAD_BYTES, ANSWER_SAMPLE_BYTES = 1 * KIB, 128
"""What an envelope around a claim or a fragment has beside tokens and log-probabilities: once, and for each sample.
Names, digests and a signature take 600 bytes, the words around a sample 70."""

READ_AT_ONCE_BYTES = 64 * KIB
"""An envelope that comes alone and is no larger is decoded before its lease is looked up: a millisecond at the most."""

STRING_MAX_BYTES = 4 * KIB
"""Names, hints and addresses; long text travels as tokens."""

SAMPLES_MAX = 64
"""Samples in one group; papers use 8 to 16."""

CANARY_TOKENS_MAX = 256
"""Tokens of a version's canary: scored at every swap, so they must cost less than a second."""

EVALUATIONS_TOLD_MAX = 8
"""Those that a learner is told of whenever it asks; it asks more often than they end."""

WEIGHT_MAX = 100.0
"""Of a sample beside others: more would be a batch of its own."""

SKIPPED_SPANS_MAX = 64
"""Spans of a completion that are not trained on; who wants more wants another reward."""

LOGPROB_MIN = -104.0
"""Of a drawn token, in nats: e to this power is less than the smallest float32 above 0, so no softmax in float32 gives
a token such a probability. A uniform of 53 bits hardly ever draws one below 2^-53, which is -36.7 nats."""

TOKENS_MAX = 32_768
"""Tokens of one prompt or completion; the longest contexts that consumer cards sample."""

CHUNK_MAX_BYTES = 4 * MIB
"""One chunk: large enough that hashing and framing cost nothing, small enough to lose one to a liar."""

MANIFEST_MAX_BYTES = 4 * MIB
"""A manifest of 4 MiB chunks at 40 bytes each describes 400 GB of weights."""

MANIFEST_MAX_FILES = 256
"""Files of one policy: shards, tokenizer, configuration."""

MANIFEST_MAX_CHUNKS = 90_000
"""Chunks of one policy; 360 GB at full chunk size, and below `MESSAGE_MAX_ITEMS`."""

METADATA_MAX_BYTES = 256 * KIB
"""One trust document: four roles, a dozen targets."""

ROOT_ROTATIONS_MAX = 256
"""New roots followed in one refresh: weekly rotations for five years, and an endless chain cannot hold a node."""

PATCHES_MAX = 16
"""Patches of one file behind each other: a joiner applies them all, at about a second per gigabyte of weights each."""

PATCH_BLOCK_BYTES = 4 * MIB
"""What is patched in one step: bounds the memory, and a zstd frame of it unfolds to no more than this."""

TENSORS_HEADER_MAX_BYTES = 16 * MIB
"""The header of a safetensors file: a hundred thousand tensors; beyond this, reading it costs more than it is worth."""

POLICY_CONFIG_MAX_BYTES = 1 * MIB
"""A policy's config.json, and what stands beside it to say how it ends: a few kilobytes each."""

TOKENIZER_MAX_BYTES = 48 * MIB
"""A tokenizer.json, or another file of a vocabulary: a quarter of a million tokens take 34 MB."""

ADDED_TOKENS_MAX = 16_384
"""Added tokens of a tokenizer: the largest published ones have 6,400, and each costs time in every text."""

CHAT_TEMPLATE_MAX_BYTES = 1 * MIB
"""A chat template: the longest published ones have 100 kB; nodes never render one."""

TENSOR_INDEX_MAX_BYTES = 16 * MIB
"""The index that names the file of each tensor: as large as the headers that it repeats."""

REPEATED_MIN_BYTES, REPEATED_FACTOR_MAX = 64 * MIB, 4
"""A file may be this many times larger than the distinct chunks that it is made of, and small ones as large as they
like: fresh weights have tensors of zeros, and nobody fills a disk with a chunk that they send once."""

VERSION_MAX = 2**40
"""Policy versions; nobody publishes that often, and a counter near 2^63 is an attack."""

ORIGINS_MAX = 8
"""Origins a node is told of: more would only make a list of dead ones slower to get through."""

ORIGIN_URL_MAX_CHARS = 300
"""A host name has at most 253 characters; the path to a round's files is short."""

LEASES_PER_REQUEST_MAX = 64
"""Groups one node may take at once."""

ENVIRONMENTS_MAX = 64
"""Names of environments that a node can play: ten times as many as there are."""

FRAME_MAX_CHARS = 2 * KIB
"""What a chat template puts around a message: a system prompt of a few hundred words fits."""

PARAMETERS_MAX = 16
"""Parameters of an environment; none has half as many."""

FRAGMENTS_MAX = 64
"""Fragments of one lease: each costs a row, and the ones before it are read again."""

HANDS_MAX = 4
"""Nodes that leave a group to the next: each is a claim of its own, and every lease of it reads them all again."""

NAME_MAX_CHARS = 40
"""What a node calls itself; it stands in a column of a table, with the end of the node's id if another is called so."""

NAME_MARKS_MAX = 2
"""Marks on one letter: no language stacks more, and a hundred of them cover the lines around."""

ADDRESSES_MAX = 8
"""Addresses a node may register; more would make every other node dial for it."""

FETCH_MIN_S, FETCH_MAX_S = 1e-3, 7 * 86_400
"""A version that took a week is told of as a week; one that took no time would come over an endless link."""

STRIPES_MAX = 64
"""Parts into which a version is dealt; each may come from another node, and each costs a connection."""

PEERS_MAX = 96
"""Peers in one plan: a parent for each stripe, and some to turn to."""

HOPS_MAX = 64
"""Uplinks that a chunk passes: trees are a few levels high, and a chain of more nodes would be a poor plan."""

CALLS_MAX = 128
"""Nodes that one plan tells a node to call: as many as it may have children."""

OBSERVERS_MAX = 2
"""Nodes that a plan names to ask for one's own address: two that agree show one for all, two that differ none."""

PUNCHES_MAX = 144
"""Nodes that one plan has a node dial at the same time as they dial it: a parent for each stripe and `CALLS_MAX`
children."""

PUNCH_PORT_MIN = 1024
"""Ports below belong to other services: no plan has a node knock there."""

PUNCH_DIALS_PER_HOST, PUNCH_DIALS = 10, 2 * PUNCHES_MAX
"""In a minute, to one address and in all, whatever the plans say: a dial is three small packets, so a stranger whose
address is named gets no more than one packet every two seconds from each node."""

DIALS_MAX = 40
"""Nodes that one receipt calls reached, and as many that it calls unreached: the seeder, a parent for each
stripe and some to turn to; with the uploads of `PEERS_MAX` nodes they still fit into a small request."""

REACHED_MAX = 16
"""Stages told in one heartbeat: those of the last four versions; what happened before that interests nobody."""

REACHED_AGO_MAX_S = 86_400
"""A stage that was reached longer ago is told of as a day old."""

TRANSFER_MAX_BYTES = 2**50
"""A petabyte moved by one agent since it started; the sum of thousands of such counters still fits into 64 bits."""

AUDIT_CASES_MAX = 64
"""Cases that one auditor takes at once: a killed auditor delays no more than these."""

CLASSES_MAX = 100
"""Classes that a round admits or has tolerances of; seven ship."""

PROBES_MAX = 256
"""Nodes that an operator may name to calibrate classes on: a few of each."""

HELD_CLAIMS_MAX = 2
"""Claims of one owner that may be held until their class is calibrated before it gets no more work. Nothing is known of
them yet, and a forger among them could go on for ever: a fault bans after as many."""

AUDIT_REPORT_MAX_BYTES = 64 * KIB
"""Evidence on one claim: a few findings of eight positions each."""

EXPLANATIONS_MAX = 20
"""Leases explained at once: more than a person reads."""

APPEAL_MAX_BYTES = 4 * KIB
"""A signed appeal: its words in any script, a claim, a round and a signature."""

APPEAL_REASON_MAX_CHARS = 500
"""What a node says for itself: the evidence speaks by itself, and the operator reads it on a terminal."""

APPEALS_OPEN_MAX = 8
"""Of one owner, not ruled on yet: a ban and both faults of it, and again after the operator let them in."""

APPEALS_MAX = 64
"""Of one owner in a round; each stands for a hard fault or a ban, and the second fault bans."""

PROBE_MAX_BYTES = 4 * MIB
"""What a machine may send to measure its line: a third of a second at 100 Mbit/s, and no more than a submission."""

CLOCK_SKEW_MAX_S = 90
"""How far a node's clock may differ; a nonce is remembered for twice as long."""

STATEMENT_MAX_BYTES = 1 * KIB
"""An owner's signed word: two keys, a number, an address."""

MOMENT_MAX_MS = 253_402_300_799_000
"""The end of the year 9999: whoever is told of a later moment could not write it as a date."""

STATEMENT_NUMBER_MAX = 2**53
"""Owners number their statements by the milliseconds of their clocks; JSON's integers hold it."""

ADDRESS_MAX_CHARS = 200
"""Where an owner is paid: no account number of any kind is that long."""

ADDRESSES_PER_DAY = 4
"""Addresses of one owner in a day: one, its correction, and two to answer a thief; the last never counts, so that who
uses them up does not have the last word. Each may become an entry of the ledger for ever."""

GROUPS_PER_ADDRESS, ADDRESSES_PER_DAY_MAX = 100, 32
"""One address more in a day for so many groups that were found right, which cost more to sample than an entry to keep;
a change every hour helps nobody."""

EARNINGS_NODES_MAX = 1_000
"""Nodes listed in one answer about earnings; the total counts them all."""

TOKENS_PER_S_MAX = 1e9
"""What a node says that it samples: far above any machine, and the sum of all nodes of an owner stays a number."""

NONCE_BYTES = 16
"""Random enough that two honest requests never meet."""

PRICE_MAX_MICROS_PER_MTOK = 10**12
"""A million units per million tokens: above any market, and far from overflowing 64 bits when multiplied."""

EXCHANGE_WANTS_MAX = 32
"""Unanswered WANTs on one stream: a few fill any link, the rest may wait for chunks that are still on their way here;
a WANT costs the responder a name, and the requester a chunk in memory once it is answered."""

EXCHANGE_HAVE_NAMES_MAX = 64
"""Names in one HAVE: a frame of 2 KiB; more names travel in more frames."""

EXCHANGE_HAVE_TOTAL_MAX = 2 * MANIFEST_MAX_CHUNKS
"""Names in all HAVEs of one stream: it lives as long as one download, and the largest version is told of twice."""

NEGOTIATION_WORDS_MAX, NEGOTIATION_WORD_MAX_BYTES = 16, 256
"""What either side may say before a protocol is agreed on, a stranger too: a greeting and a few names, none of
which has a hundred bytes."""

HANDSHAKE_MESSAGE_MAX_BYTES = 4096
"""One message of the Noise handshake: ours have 32 to 200 bytes; others may name muxers and certificates in theirs."""

STREAM_WINDOW_OPEN_BYTES = 1 * MIB
"""The receive window that the opener of a stream begins with: it asked for what comes. It doubles as it is read."""

STREAM_WINDOW_MAX_BYTES = 16 * MIB
"""The largest receive window: credit returns at half of it, so 8 MiB are under way, 160 MB/s at 50 ms."""

STREAM_LINGER_TICKS = 2
"""How long a stream that we closed waits for its peer's end, before it is reset."""

CONNECTION_RECEIVE_MAX_BYTES = 32 * MIB
"""All receive windows of one connection together: one stream at its largest, and room for sixty small ones."""

HOST_RECEIVE_MAX_BYTES = 256 * MIB
"""All receive windows of a host together, and so what all peers in concert can make it hold."""

ADDRESS_RECEIVE_MAX_BYTES = HOST_RECEIVE_MAX_BYTES // 4
"""Those of all who called from one address: a quarter, as of connections, so that others and our own calls go on."""

CONNECTION_STREAMS_MAX = 128
"""Open streams of one connection; a node needs one or two, and each costs its peer a task."""

CONNECTION_BACKLOG_MAX = 64
"""Streams opened and not yet accepted, in either direction."""

CONNECTION_FRAMES_PER_TICK = 4096
"""Frames that an idle peer may send between two keep-alive ticks; one more for every KiB of payload moved. A frame of
twelve bytes costs us about 5 microseconds, so a flood can take 20 ms of every 10 s."""

CONNECTION_CONTROL_MAX_BYTES = 64 * KIB
"""Answers (pongs, resets) that wait for a peer that does not read: five thousand."""
