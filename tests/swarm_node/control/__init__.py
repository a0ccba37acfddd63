"""Tests of how the owner talks to a running agent."""
