"""Tests of the transactions."""
