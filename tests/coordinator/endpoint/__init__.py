"""Tests of the forms of the OpenAI-compatible endpoint."""
