"""Tests of every architecture through every part that computes with a policy."""
