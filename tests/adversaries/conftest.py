"""Stores without syncs, as in the tests of the coordinator."""

from tests.coordinator.unsynced import unsynced_stores

__all__ = ["unsynced_stores"]
