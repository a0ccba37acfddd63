"""Fixtures of the pages: the same fresh round as the coordinator's other tests have."""

from tests.coordinator.conftest import store_url, world

__all__ = ["store_url", "world"]
