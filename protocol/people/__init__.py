"""Nodes and owners: their names, addresses, delegations and orders."""
