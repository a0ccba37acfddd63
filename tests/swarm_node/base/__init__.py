"""Tests of what everything stands on."""
