"""Takes out of a text what names its owner, their machine or their network, before it is shown to strangers.

- Known things go first: home, user, host, keys. Then whatever looks like an address, a key or a path of a person.
- Better too much than too little: a version number of four parts is lost with the addresses.
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
"""How ASCII is escaped that needs no escape: an address must not hide behind it."""

_TIME = re.compile(r"^\d{1,2}:\d{2}:\d{2}$")


def known_names(home: Path, url: str = "") -> dict[str, str]:
    """What this machine's owner and their coordinator are called here, and what each is replaced by."""
    found = {str(home.absolute()): "<node home>", str(home): "<node home>", str(Path.home()): "<home>"}
    found[socket.gethostname()] = "<host>"
    found[urlsplit(url).hostname or ""] = "<coordinator>"
    with suppress(OSError, KeyError):  # a user without a name
        found[getpass.getuser()] = "<user>"
    for path in home.glob("**/*.key"):
        seed = path.read_text(errors="replace").strip()
        found[seed] = "<key>"
    named = {secret: mark for secret, mark in found.items() if len(secret) >= 3}
    return {form: mark for secret, mark in named.items() for form in _written(secret)}


def _written(secret: str) -> set[str]:
    """As it is, and as JSON, Python, bytes and addresses write what is not ASCII."""
    data = secret.encode(errors="surrogateescape")
    forms = {secret, json.dumps(secret)[1:-1], ascii(secret)[1:-1], ascii(data)[2:-1], quote(data)}
    return forms | {form.lower() for form in forms}


def redact(text: str, secrets: Mapping[str, str]) -> str:
    """The text without them."""
    for secret in sorted(secrets, key=len, reverse=True):
        if secret.isalnum():  # a user called `dev` is not taken out of `device`
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
    """A time of day looks like an address of the newer kind, and is none."""
    return match[0] if _TIME.match(match[0]) else mark
