"""Tests of the coordinator: effects on a real store, signed metadata on disk, and the HTTP layer over both."""
