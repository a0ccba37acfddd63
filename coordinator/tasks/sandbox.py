"""A sandbox for the processes that run an operator's code on strangers' text: reward functions, and later more.

    the coordinator                 the process
    Sandbox ── make_scratch ──▶ enter(settings): namespaces, user, limits, Landlock, seccomp
                                ▶ loads the operator's functions, and judges

- The process enters the sandbox by itself, before it loads anything of the operator's and before it has a second
  thread. There is no way out, and all that it starts is in it, too.
- No network unless granted; files are read-only except one scratch folder; the round's folder, its keys and the home
  folder's secrets are not readable; memory, processes, processor time and the scratch folder have limits; no process
  outside can be traced, signalled or read.
- Where the kernel lacks a part, the others still hold. `enter` returns the gaps, and the coordinator logs each once,
  with the next step; `task check` lists them.
- A forbidden act fails with the kernel's usual error. `explained` and `explained_signal` add its reason and setting.

The files that a process may read are those of Python, of the system's libraries and of the operator's function.

- Everything else is forbidden, so a list of secrets need not be complete.
- The folder of the operator's file is readable, but not the round's folder in it, nor the operator's key files, nor
  names that begin with a dot, such as `.env` and `.git`. Landlock only permits: the entries around a hidden one are
  permitted one by one. The names in such a folder can be listed; entries that are made later cannot be read.
- If the operator's file lies in the round's folder, that file alone is readable. The same holds for the home folder's
  names with a dot, but Python's own folders and the hub's cache are readable wherever they are. The cache's tokens are
  not in the folders that are permitted.
- A path in `readable` may lie in a hidden folder: the operator named it. The round's folder itself is never readable.
"""

import errno
import logging
import os
import platform
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from coordinator.tasks import sandbox_kernel as kernel
from coordinator.tasks.sandbox_kernel import READ, READ_FOLDER, USE_DEVICE, WRITE, Rules

SCRATCH_FILES = 16_384

USERS = range(61_184, 65_520)
"""The numbers of users that no file belongs to; systemd uses them the same way."""

PROCESSES_COUNTED_MAX = 1 << 22
"""The largest number of processes that Linux permits."""

CAUSES_MAX = 8
"""The exceptions that are searched for the sandbox's error; libraries wrap it a few times."""

NO_LANDLOCK, OLD_LANDLOCK, NO_FILTER, NO_MOUNTS = "no_landlock", "old_landlock", "no_filter", "no_mounts"
SHARED_COUNT, UNCOUNTED, NO_LINUX = "shared_count", "uncounted", "no_linux"


class SandboxGap(NamedTuple):
    """A part of the sandbox that this machine's kernel cannot enforce."""

    message: str
    next_step: str


GAPS = {
    NO_LANDLOCK: SandboxGap(
        "The kernel has no Landlock: reward functions can read the round's keys and write files.",
        "Use Linux 5.13 or newer with landlock among its security modules (boot option lsm=…).",
    ),
    OLD_LANDLOCK: SandboxGap(
        "The kernel's Landlock is older than version 6: reward functions can send signals to other processes.",
        "Use Linux 6.12 or newer.",
    ),
    NO_FILTER: SandboxGap(
        "System calls cannot be filtered on this machine: reward functions can use the network.",
        "Use Linux on x86-64 or arm64.",
    ),
    NO_MOUNTS: SandboxGap(
        "No namespaces are permitted: a file in a task process's scratch folder is limited, but not their sum.",
        "Permit user namespaces, or put the temporary folder (TMPDIR) on a small file system.",
    ),
    SHARED_COUNT: SandboxGap(
        "No namespaces are permitted: reward.processes_max counts from all processes that this user has at the start.",
        "Permit user namespaces, or run the coordinator as a user of its own.",
    ),
    UNCOUNTED: SandboxGap(
        "The processes that a task process starts are not limited in number, because they are root's.",
        "Run the coordinator as another user than root.",
    ),
    NO_LINUX: SandboxGap(
        "This system has no sandbox: reward functions can read the round's keys, write files and use the network.",
        "Run the coordinator on Linux.",
    ),
}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sandbox:
    """The settings of a sandbox; paths are absolute."""

    network: bool = False
    listening: bool = False
    """True if its processes may listen on TCP ports that the kernel chooses; needs `network`."""
    readable: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    """The round's folder, and the operator's key files."""
    processes_max: int = 64
    scratch_mib: int = 256

    def for_child(self, scratch: Path) -> dict[str, Any]:
        """Return the message for `enter`."""
        return asdict(self) | {"scratch": str(scratch)}


def make_scratch() -> Path:
    """Return a new scratch folder, whose path is TMPDIR of the process."""
    return Path(tempfile.mkdtemp(prefix="swarm-scratch-")).resolve()


def remove_scratch(scratch: Path) -> None:
    """Remove a scratch folder after the end of its process."""
    shutil.rmtree(scratch, ignore_errors=True)


def missing_here() -> list[str]:
    """Return the names of the gaps that are known before a process starts."""
    if platform.system() != "Linux":
        return [NO_LINUX]
    version, missing = kernel.landlock_version(), []
    if version == 0:
        missing.append(NO_LANDLOCK)
    elif version < 6:
        missing.append(OLD_LANDLOCK)
    if not kernel.has_filter():
        missing.append(NO_FILTER)
    return missing


def log_gaps(missing: object, logged: set[str]) -> None:
    """Log the gaps that are not in `logged`, and add them; `missing` may be the answer of a process."""
    for name in missing if isinstance(missing, list) else ():
        if isinstance(name, str) and name in GAPS and name not in logged:
            logged.add(name)
            log.warning("task processes have an incomplete sandbox: %s %s", *GAPS[name])


def enter(settings: Mapping[str, Any], places: list[str]) -> list[str]:
    """Enter a sandbox for the functions at `places`; return the names of the gaps."""
    if (missing := missing_here()) == [NO_LINUX]:
        return missing
    if len(list(Path("/proc/self/task").iterdir())) != 1:
        raise RuntimeError("A process with several threads cannot enter a sandbox.")
    scratch = Path(settings["scratch"])
    rules = readable_paths(places, settings["readable"], settings["writable"], settings["hidden"], os.environ)
    if os.geteuid():
        counted_before = _namespace(missing)
        user = os.geteuid()
    else:
        counted_before, user = 0, USERS[os.getpid() % len(USERS)]
    has_mounts = _mount(scratch, settings, user, missing)
    changed = not os.geteuid() and _become(user, scratch, missing)
    kernel.drop_capabilities(files=changed)
    _limit(settings, counted_before)
    kernel.forbid_new_privileges()
    if NO_LANDLOCK not in missing:
        granted = {name: settings[name] for name in ("network", "listening")}
        kernel.restrict_paths([*rules, (scratch, kernel.READ | kernel.WRITE)], **granted)
    if NO_FILTER not in missing:
        kernel.install_filter(kernel.filter_program(network=settings["network"], modes=has_mounts))
    return missing


def _namespace(missing: list[str]) -> int:
    """Enter a user namespace; return the number of processes that count against the limit from before."""
    try:
        kernel.enter_user_namespace()
    except OSError:
        missing.append(SHARED_COUNT)
        return _count()
    return 0


def _count() -> int:
    """Return the kernel's own number of this user's processes: the least limit with which one more starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    low, high = 0, PROCESSES_COUNTED_MAX if hard == resource.RLIM_INFINITY else hard
    while low < high:
        middle = (low + high) // 2
        resource.setrlimit(resource.RLIMIT_NPROC, (middle, hard))
        try:
            child = os.fork()
        except BlockingIOError:
            low = middle + 1
            continue
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        high = middle
    resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard))
    return low


def _mount(scratch: Path, settings: Mapping[str, Any], user: int, missing: list[str]) -> bool:
    """Make the mounts read-only and the scratch folder limited; return False if that is not permitted here."""
    writable = [path for each in settings["writable"] if (path := Path(each).resolve()).exists()]
    try:
        kernel.enter_mount_namespace()
        kernel.mount_scratch(scratch, settings["scratch_mib"] * 2**20, SCRATCH_FILES, user)
        kernel.make_readonly(scratch, writable)
    except OSError:
        missing.append(NO_MOUNTS)
        return False
    return True


def _become(user: int, scratch: Path, missing: list[str]) -> bool:
    """Change from root to `user`, whose processes can be counted, if Landlock restricts what it may open."""
    with suppress(OSError):
        if NO_LANDLOCK not in missing:
            os.chown(scratch, user, user)
            kernel.become(user)
            return True
    missing.append(UNCOUNTED)
    return False


def _limit(settings: Mapping[str, Any], counted_before: int) -> None:
    """Set the limits on the size of a file and on processes and threads; nobody in the sandbox can raise them."""
    size, processes = settings["scratch_mib"] * 2**20, counted_before + settings["processes_max"]
    for what, most in ((resource.RLIMIT_FSIZE, size), (resource.RLIMIT_NPROC, processes)):
        _, hard = resource.getrlimit(what)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))


def explained(error: BaseException) -> str:
    """Return the sandbox's reason for an error of the operator's code, with the setting; "" if it is no such error."""
    cause: BaseException | None = error
    for _ in range(CAUSES_MAX):
        if cause is None:
            break
        if reason := _reason(cause):
            return f" [sandbox: {reason}]"
        cause = cause.__cause__ or cause.__context__
    return ""


def _reason(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return "a process needs more memory than reward.memory_mib"
    match error.errno if isinstance(error, OSError) else None:
        case errno.ENETDOWN:
            return "the network is forbidden; reward.network = true permits it, and Unix sockets stay forbidden"
        case errno.EAGAIN:
            return "the limit reward.processes_max on processes and threads may be reached"
        case errno.ENOSPC | errno.EFBIG | errno.EDQUOT:
            return "the scratch folder is full; reward.scratch_mib is its size"
        case errno.ENOMEM:
            return "a process needs more memory than reward.memory_mib"
        case errno.EACCES | errno.EROFS | errno.EXDEV if getattr(error, "filename", None):
            return (
                "only Python, the function's folder and reward.readable can be read, "
                "only TMPDIR and reward.writable be written"
            )
        case errno.EPERM | errno.EACCES | errno.EROFS | errno.ENOSYS:
            return "this system call is forbidden"
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return "the limit reward.processes_max on processes and threads is reached"
    return ""


def explained_signal(number: int) -> str:
    """Return the reason why a process was ended by a signal, "" if the sandbox has none."""
    match number:
        case signal.SIGSYS:
            return "It made a system call that the sandbox forbids, such as ptrace or mount."
        case signal.SIGXCPU:
            return "It used more processor time than reward.timeout_s."
    return ""


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


def readable_paths(
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
