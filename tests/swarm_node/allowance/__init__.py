"""Tests of what the owner allows."""
