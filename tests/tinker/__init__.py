"""Tinker's own client and cookbook against the server, with a real round behind it."""
