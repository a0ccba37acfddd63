"""Tests of how other nodes reach this one."""
