"""Tests of `protocol.text`."""
