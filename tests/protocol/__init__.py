"""Tests of the protocol: bytes in, verdict out."""
