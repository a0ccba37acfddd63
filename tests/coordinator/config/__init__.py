"""Tests of the operator's file."""
