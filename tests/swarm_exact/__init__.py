"""Tests of the code that nodes and auditors share."""
