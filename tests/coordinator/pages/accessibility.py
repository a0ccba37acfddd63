"""Accessibility of the pages as a table for bench/RESULTS.md: `make accessibility`. The tests require the same.

Every page in light and dark, as wide as a phone, a tablet and a desktop, with all that folds unfolded, looked at by
axe-core in Chromium.
"""

import asyncio
import json
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

from tests import npm
from tests.coordinator.pages.browser import open_browser
from tests.coordinator.pages.conftest import JS
from tests.coordinator.pages.rounds import furnished
from tests.coordinator.pages.test_browser import PAGES, url

LOOKS = [(dark, width) for dark in (False, True) for width in (360, 768, 1280)]


async def report(folder: Path) -> None:
    """Print a line for each page."""
    axe = (npm.install(JS, folder / "js") / "node_modules/axe-core/axe.min.js").read_text()
    print("| page | looks | rules passed | minor | moderate | serious | critical | for people to judge |")
    print("|---|---|---|---|---|---|---|---|")
    async with furnished(folder) as served, open_browser() as browser, browser.tab() as tab:
        for path in PAGES:
            found: Counter[str] = Counter()
            passed: set[str] = set()
            for dark, width in LOOKS:
                await tab.open(url(served, path), width=width, height=740, dark=dark)
                await tab.look("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
                await tab.look(f"{axe}; 0")
                told = json.loads(await tab.look("axe.run().then((found) => JSON.stringify(found))"))
                passed |= {rule["id"] for rule in told["passes"]}
                found.update(rule["impact"] for rule in told["violations"])
                found["judge"] += len(told["incomplete"])
            counts = " | ".join(str(found[name]) for name in ("minor", "moderate", "serious", "critical", "judge"))
            shown = path if len(path) < 20 else f"{path[:9]}…"
            print(f"| `{shown}` | {len(LOOKS)} | {len(passed)} | {counts} |", flush=True)


if __name__ == "__main__":
    with TemporaryDirectory() as scratch:
        asyncio.run(report(Path(scratch)))
