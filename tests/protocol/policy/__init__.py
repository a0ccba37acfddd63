"""Tests of `protocol.policy`."""
