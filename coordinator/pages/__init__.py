"""The pages: functions that turn figures into HTML text.

- Pure: no store, clock or request here; `coordinator.api.pages` supplies the figures and sends the text.
- A page is complete without JavaScript. The scripts in `static/` only refresh it and check receipts.
- Text from volunteers enters a page in one place only, `html.el`, which escapes it.
"""

__all__ = [
    "board",
    "entries",
    "feed",
    "front",
    "joining",
    "layout",
    "node",
    "pictures",
    "qr",
    "training",
    "usage",
    "verifying",
    "words",
]
