"""Tests of `protocol.people`."""
