"""The pages, as text: figures in, HTML out.

- Pure: no store, clock or request in here; `coordinator.api.pages` brings the figures and sends the text.
- A page is whole without JavaScript. The scripts in `static/` only keep it fresh and check receipts.
- What a stranger wrote becomes text of the page in one place only, `html.el`, which escapes it.
"""
