"""Tests of `coordinator.transactions.rails`."""
