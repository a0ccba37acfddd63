"""Tests of what is seen of the machine."""
