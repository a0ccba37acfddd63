"""Fixtures of the pages: a fresh round, a served one with nodes that earned, and a real Chromium."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests import npm
from tests.coordinator.conftest import store_url, world
from tests.coordinator.pages.browser import Browser, Tab, open_browser
from tests.coordinator.pages.rounds import furnished
from tests.coordinator.served import Served

__all__ = ["axe", "browser", "served", "store_url", "tab", "world"]

JS = Path(__file__).with_name("js")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    async with furnished(tmp_path_factory.mktemp("round")) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with open_browser() as opened:
        yield opened


@pytest_asyncio.fixture(loop_scope="module")
async def tab(browser: Browser) -> AsyncIterator[Tab]:
    async with browser.tab() as opened:
        yield opened


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The accessibility checker's script."""
    folder = npm.install(JS, tmp_path_factory.mktemp("axe") / "js")
    return (folder / "node_modules/axe-core/axe.min.js").read_text()
