"""A support bundle: a zip file with the data that a helper needs, and without data that identifies its owner.

- It contains only the listed items, never whole folders: no key, no log of other programs, no policy.
- Every text goes through `redact`, including the names and versions of programs.

Removal of text that identifies the owner, their machine or their network, before it is shown to others.

- Known names are removed first: home, user, host, keys. Then everything that looks like an address, a key or a user's
  path.
- Better too much than too little: a version number of four parts is removed like an address.
"""

import getpass
import json
import platform
import re
import socket
import sys
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from urllib.parse import quote, urlsplit

from swarm_node.allowance import settings
from swarm_node.coordinator_api.join_string import JoinString
from swarm_node.doctor.report import CheckResult
from swarm_node.owner import stopped

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


def known_names(home: Path, *urls: str) -> dict[str, str]:
    """Return the names of this machine's owner and their coordinators, with the replacement of each."""
    marks = {str(home.absolute()): "<node home>", str(home): "<node home>", str(Path.home()): "<home>"}
    marks[socket.gethostname()] = "<host>"
    marks |= {urlsplit(url).hostname or "": "<coordinator>" for url in urls}
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


PACKAGES = (
    "echo-swarm",
    "libp2p",
    "trio",
    "httpx",
    "tuf",
    "torch",
    "transformers",
    "llama-cpp-python",
    "gguf",
    "numpy",
)


def write(target: Path, home: Path, findings: list[CheckResult], *, joins: Sequence[JoinString] = ()) -> None:
    """Write the bundle to a new file."""
    secrets = known_names(home, *(join.url for join in joins))
    texts = {
        "findings.json": json.dumps([finding.to_json() for finding in findings], indent=1, ensure_ascii=False),
        "system.json": json.dumps(_system(), indent=1, ensure_ascii=False),
        "stopped.json": json.dumps(stopped.last(home), indent=1, ensure_ascii=False),
        "limits.toml": _text(home / settings.FILE),
        "README.txt": "Made by `swarm-node doctor --bundle`. Keys, addresses, names and paths were taken out.\n",
    }
    with zipfile.ZipFile(target, "x", zipfile.ZIP_DEFLATED) as bundle:
        for name, text in texts.items():
            bundle.writestr(name, redact(text, secrets))


def _system() -> dict[str, object]:
    return {
        "system": platform.system(),
        "release": platform.release(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "implementation": sys.implementation.name,
        "packages": {name: _version(name) for name in PACKAGES},
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
