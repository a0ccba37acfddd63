"""Bytes and envelopes: the canonical encoding, messages, signatures, and the exchange between two nodes."""
