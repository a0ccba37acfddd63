"""The work of a node, from a lease to a paid claim: lease, sample, sign, store, send, record the verdict."""
