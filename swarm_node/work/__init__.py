"""From a lease to a paid claim: lease, sample, sign, store, send, and learn the verdict."""
