"""Tests of what lives as long as the coordinator."""
