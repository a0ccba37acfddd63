"""Tests of problems, prompts and rewards."""
