"""Fixtures of the owner's page: the browser and the accessibility checker of the coordinator's pages."""

from tests.coordinator.pages.conftest import axe, browser, tab

__all__ = ["axe", "browser", "tab"]
