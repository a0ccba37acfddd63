"""Clients of the coordinator's HTTP API and of the origins of public files."""
