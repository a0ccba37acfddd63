"""The README's pictures, of a demo round's own figures: `make screenshots`, with `ROUND=folder` of a round there is.

- Without a round it plays the demo first. The round is served as it ended, without its learner.
- A round of another file: `ROUND=runs/demo-real/round ARGS="examples/sums.toml model.path=FOLDER"`.
- Pictures are small: WebP, the upper part of each page, in light and dark, wide and narrow.
"""

import asyncio
import subprocess
import sys
from asyncio.subprocess import DEVNULL, PIPE
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.coordinator.pages.browser import Browser, open_browser
from tests.processes.programs import free_address, script
from tests.tidy.repository import ROOT

PICTURES = ROOT / "docs" / "img"
CONFIG = ROOT / "examples" / "demo.toml"
DESKTOP, SHORT, PHONE = {"width": 1000, "height": 640}, {"width": 1000, "height": 400}, {"width": 360, "height": 640}


async def main(folder: Path, config: Path = CONFIG, *more: str) -> None:
    """Serve the round of this file, with more settings, and take every picture."""
    listen = free_address()
    settings = [f"round.directory={folder}", f"round.listen={listen}", f"round.seeder={free_address()}", *more]
    chosen = [part for setting in settings for part in ("--set", setting)]
    command = [script("swarm-coordinator"), "launch", str(config), "--no-learner", "--quiet", *chosen]
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=DEVNULL)
    try:
        assert process.stdout
        while b"Join with" not in (line := await process.stdout.readline()):
            assert line, "the coordinator did not start"
        async with open_browser() as browser:
            await _take(browser, f"http://{listen}")
    finally:
        process.terminate()
        await process.wait()


async def _take(browser: Browser, home: str) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    async with browser.tab() as tab:
        await tab.open(f"{home}/leaderboard")
        node = await tab.look("document.querySelector('tbody a').getAttribute('href')")
        for name, path, size, dark in (
            ("front", "/", DESKTOP | {"height": 1000}, False),
            ("front-phone", "/", PHONE, True),
            ("board", "/leaderboard", DESKTOP, False),
            ("board-phone", "/leaderboard", PHONE, True),
            ("training", "/training", DESKTOP | {"height": 1000}, True),
            ("node", node, DESKTOP, False),
            ("owners", "/leaderboard?view=owners", SHORT, True),
            ("days", "/leaderboard?view=days", SHORT, False),
            ("ledger", "/entries/0", SHORT, True),
            ("training-phone", "/training", PHONE, False),
        ):
            await tab.open(f"{home}{path}", dark=dark, **size)
            if name == "node":
                await tab.click("button[data-claim]")
                await tab.until("document.getElementById('checked').textContent")
                await tab.look("document.getElementById('receipts').scrollIntoView({ behavior: 'instant' })")
            (PICTURES / f"{name}.webp").write_bytes(await tab.picture())


def demo(folder: Path) -> Path:
    """A round from beginning to end; its folder."""
    subprocess.run([script("swarm-coordinator"), "demo", str(CONFIG), "--directory", str(folder)], check=True)
    return folder / "round"


if __name__ == "__main__":
    with TemporaryDirectory() as scratch:
        round_folder, *others = sys.argv[1:] or [str(demo(Path(scratch)))]
        config, *changes = others or [str(CONFIG)]
        asyncio.run(main(Path(round_folder), Path(config), *changes))
