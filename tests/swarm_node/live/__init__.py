"""Tests of what the owner sees of a running agent."""
