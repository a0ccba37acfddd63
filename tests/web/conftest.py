"""The same fresh round as the coordinator's other tests have."""

from tests.coordinator.conftest import world

__all__ = ["world"]
