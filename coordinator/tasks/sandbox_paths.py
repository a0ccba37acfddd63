"""The files that a sandboxed process may read: of Python, of the system's libraries and of the operator's function.

- Everything else is forbidden, so a list of secrets need not be complete.
- The folder of the operator's file is readable, but not the round's folder in it, nor the operator's key files, nor
  names that begin with a dot, such as `.env` and `.git`. Landlock only permits: the entries around a hidden one are
  permitted one by one. The names in such a folder can be listed; entries that are made later cannot be read.
- If the operator's file lies in the round's folder, that file alone is readable. The same holds for the home folder's
  names with a dot, but Python's own folders and the hub's cache are readable wherever they are. The cache's tokens are
  not in the folders that are permitted.
- A path in `readable` may lie in a hidden folder: the operator named it. The round's folder itself is never readable.
"""

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from coordinator.tasks.sandbox_kernel import READ, READ_FOLDER, USE_DEVICE, WRITE, Rules

_LIBRARIES = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/nix/store")

_SETTINGS = (
    "alternatives", "ca-certificates", "ca-certificates.conf", "crypto-policies", "fonts", "gai.conf", "group",
    "host.conf", "hosts", "inputrc", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "locale.alias", "locale.conf",
    "localtime", "magic", "mime.types", "nsswitch.conf", "os-release", "passwd", "pki/ca-trust", "pki/tls/certs",
    "pki/tls/cert.pem", "protocols", "resolv.conf", "services", "ssl/certs", "ssl/cert.pem", "ssl/openssl.cnf",
    "terminfo", "timezone",
)  # fmt: skip
"""The names in /etc that libraries read; others, such as those of daemons, may hold passwords."""

_KERNEL = (
    "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/loadavg", "/proc/uptime", "/proc/version",
    "/proc/filesystems", "/proc/self", "/proc/sys/kernel", "/proc/sys/vm", "/sys/devices/system", "/sys/fs/cgroup",
    "/sys/kernel/mm/transparent_hugepage",
)  # fmt: skip
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")

_HUB_FOLDERS = ("hub", "datasets", "modules", "assets", "xet")


def rules(
    places: Sequence[str],
    readable: Sequence[str],
    writable: Sequence[str],
    hidden: Sequence[str],
    environment: Mapping[str, str],
) -> Rules:
    """Return Landlock's rules for functions at `places`; `hidden` are the round's folder and the operator's keys."""
    secret, home = {Path(each).resolve() for each in hidden}, Path(environment.get("HOME") or "/").resolve()
    of_home = _dotted(home)
    made = [(Path(each).resolve(), READ) for each in (*_LIBRARIES, *(f"/etc/{name}" for name in _SETTINGS), *_KERNEL)]
    made += [(Path(each), USE_DEVICE) for each in _DEVICES]
    for folder in {*_of_python(environment), *_of_hub(home, environment)}:
        made += _without(folder.resolve(), secret, of_home)
    for path in map(_file, places):
        if path is not None and _is_in(path.parent, secret):
            made.append((path, READ))
        elif path is not None:
            made += _without(path.parent, secret, of_home | _dotted(path.parent))
    for path in (Path(each).resolve() for each in readable):
        made += _without(path, secret, of_home)
    for path in (Path(each).resolve() for each in writable):
        made += _without(path, secret, of_home, READ | WRITE)
    return made


def _without(path: Path, secret: Collection[Path], dotted: Collection[Path], rights: int = READ) -> Rules:
    """Return rules for what is below `path`, except the hidden paths below it; none if the path itself is secret."""
    if path in secret:
        return []
    below = {each for each in (*secret, *dotted) if each != path and each.is_relative_to(path)}
    return list(_expanded(path, rights, below))


def _expanded(path: Path, rights: int, hidden: Collection[Path]) -> Iterator[tuple[Path, int]]:
    """Yield one rule for `path`, or rules around the hidden paths below it."""
    if not hidden:
        yield path, rights
        return
    yield path, READ_FOLDER
    for entry in _entries(path):
        if entry not in hidden:
            yield from _expanded(entry, rights, {each for each in hidden if each.is_relative_to(entry)})


def _entries(path: Path) -> list[Path]:
    try:
        return list(path.iterdir())
    except OSError:
        return []


def _dotted(folder: Path) -> set[Path]:
    return {path for path in _entries(folder) if path.name.startswith(".")}


def _is_in(path: Path, folders: Collection[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def _file(place: str) -> Path | None:
    where = place.rpartition(":")[0]
    return Path(where).resolve() if where.endswith(".py") else None


def _of_python(environment: Mapping[str, str]) -> Iterator[Path]:
    yield from map(Path, (sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix))
    searched = (*sys.path, *environment.get("LD_LIBRARY_PATH", "").split(":"), *environment.get("PATH", "").split(":"))
    yield from (Path(each) for each in searched if each)


def _of_hub(home: Path, environment: Mapping[str, str]) -> Iterator[Path]:
    cache = Path(environment.get("XDG_CACHE_HOME") or home / ".cache")
    top = Path(environment.get("HF_HOME") or cache / "huggingface")
    yield from (top / name for name in _HUB_FOLDERS)
    yield from (Path(environment[name]) for name in ("HF_HUB_CACHE", "HF_DATASETS_CACHE") if environment.get(name))
