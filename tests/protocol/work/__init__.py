"""Tests of `protocol.work`."""
