"""Tests of the sampling engine."""
