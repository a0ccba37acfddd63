"""Signed versions of the policy: creation, storage, mirroring, replacement and verification; and the signing keys."""
