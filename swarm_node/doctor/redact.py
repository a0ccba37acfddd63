"""Removal of text that identifies the owner, their machine or their network, before it is shown to others.

- Known names are removed first: home, user, host, keys. Then everything that looks like an address, a key or a user's
  path.
- Better too much than too little: a version number of four parts is removed like an address.
"""

import getpass
import json
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from urllib.parse import quote, urlsplit

_PATTERNS = (
    (r"[a-z][a-z0-9+.-]*://[^\s\"'<>]+", "<url>"),
    (r"[\w.+-]+@[\w-]+(\.[\w-]+)+", "<email>"),
    (r"(?<=/)(dns[46]?|dnsaddr)/[^/\s\"',;]+", r"<host>"),
    (r"\b12D3Koo[1-9A-HJ-NP-Za-km-z]{20,}\b", "<node>"),
    (r"\b[0-9a-fA-F]{32,}\b", "<hex>"),
    (r"(?<![\w.])\d{1,3}(\.\d{1,3}){3}(?![\w.])(:\d+)?", "<address>"),
    (r"(?<![\w:])\[?([0-9a-fA-F]{0,4}:){2,7}[0-9a-fA-F]{0,4}\]?(%\w+)?(:\d+)?(?![\w:])", "<address>"),
    (r"\b([0-9a-fA-F]{2}[:-]){5}[0-9a-fA-F]{2}\b", "<address>"),
    (r"(?<![\w])(/home|/Users|/root|/var/home)(/[^\s\"':,;()]*)?", "<home>"),
    (r"[A-Za-z]:\\+Users\\+[^\s\"':,;()]*", "<home>"),
    (r"\b(?!localhost\b)[\w-]+(\.[\w-]+)*\.(local|lan|home|internal|fritz\.box)\b", "<host>"),
)

_ESCAPE = re.compile(r"\\(?:u00|x)([2-7][0-9a-fA-F])")
"""Unnecessary escapes of ASCII characters: an address must not be hidden by them."""

_TIME = re.compile(r"^\d{1,2}:\d{2}:\d{2}$")


def known_names(home: Path, url: str = "") -> dict[str, str]:
    """Return the names of this machine's owner and their coordinator, with the replacement of each."""
    marks = {str(home.absolute()): "<node home>", str(home): "<node home>", str(Path.home()): "<home>"}
    marks[socket.gethostname()] = "<host>"
    marks[urlsplit(url).hostname or ""] = "<coordinator>"
    with suppress(OSError, KeyError):  # a user without a name
        marks[getpass.getuser()] = "<user>"
    for path in home.glob("**/*.key"):
        seed = path.read_text(errors="replace").strip()
        marks[seed] = "<key>"
    named = {secret: mark for secret, mark in marks.items() if len(secret) >= 3}
    return {form: mark for secret, mark in named.items() for form in _written(secret)}


def _written(secret: str) -> set[str]:
    """Return all spellings of a text: plain, and as JSON, Python, bytes and URLs escape it."""
    data = secret.encode(errors="surrogateescape")
    forms = {secret, json.dumps(secret)[1:-1], ascii(secret)[1:-1], ascii(data)[2:-1], quote(data)}
    return forms | {form.lower() for form in forms}


def redact(text: str, secrets: Mapping[str, str]) -> str:
    """Return the text without secrets and addresses."""
    for secret in sorted(secrets, key=len, reverse=True):
        if secret.isalnum():  # a user called `dev` is not removed from `device`
            text = re.sub(
                rf"(?<![A-Za-z0-9]){re.escape(secret)}(?![A-Za-z0-9])", secrets[secret], text, flags=re.IGNORECASE
            )
        else:
            text = text.replace(secret, secrets[secret])
    text = _ESCAPE.sub(_unescaped, text)
    for pattern, mark in _PATTERNS:
        text = re.sub(pattern, partial(_marked, mark), text)
    return text


def _unescaped(match: re.Match[str]) -> str:
    sign = chr(int(match[1], 16))
    return match[0] if sign in '"\\\x7f' else sign


def _marked(mark: str, match: re.Match[str]) -> str:
    """Return the replacement of a match; a time of day looks like an IPv6 address, and is kept."""
    return match[0] if _TIME.match(match[0]) else mark
