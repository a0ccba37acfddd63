"""Tests of the client, and of the server for clients of Tinker."""
