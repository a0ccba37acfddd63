"""The Linux kernel's interfaces for a sandbox: Landlock, namespaces and mounts, users, and seccomp.

- Everything is called through libc with ctypes, so that a sandbox needs no package, no helper program and no root.
- A function that the kernel refuses raises OSError; `sandbox.enter` decides whether that matters.
- Everything but the count of processes applies to the calling thread and its later children: the process has one
  thread while it enters.
"""

import ctypes
import os
from contextlib import suppress
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # Landlock; the same on every architecture
_MOUNT_SETATTR = 442

_PR_SET_DUMPABLE, _PR_SET_KEEPCAPS, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 4, 8, 38, 47
_CAP_AMBIENT_RAISE, _CAP_AMBIENT_CLEAR_ALL = 2, 4

READ_FILE, READ_FOLDER = 1 << 2, 1 << 3
READ = 1 << 0 | READ_FILE | READ_FOLDER
"""Landlock's rights to execute and read files, and to list folders."""

WRITE = sum(1 << bit for bit in (1, 4, 5, 7, 8, 9, 10, 12, 13, 14))
"""Landlock's rights to write, create, rename, truncate and remove; not to create devices."""

USE_DEVICE = READ_FILE | 1 << 1 | 1 << 14 | 1 << 15
_OF_FILES = 1 << 0 | USE_DEVICE
"""The rights that a rule about a single file may have."""

_HANDLED = {1: 13, 2: 14, 3: 15, 4: 15}
"""The number of rights that each version of Landlock knows; 16 since version 5."""

_RULE_OF_PATH, _RULE_OF_PORT = 1, 2
_BIND_TCP, _CONNECT_TCP = 1, 2
_SCOPED = 0b11
"""Abstract sockets and signals stay within the sandbox; since version 6."""

_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
_AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY = -100, 0x8000, 1

_CAPABILITIES_V3 = 0x20080522
_CAP_DAC = 0b110
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: files are opened as root would open them, where Landlock permits it."""

_SHARED = Path("/dev/shm")
"""The place of POSIX semaphores, which multiprocessing needs; in a sandbox, it is the scratch folder."""

Rules = list[tuple[Path, int]]
"""Paths with the rights below them."""


class _Ruleset(ctypes.Structure):
    _fields_ = (("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


class _NetPort(ctypes.Structure):
    _fields_ = (("allowed", ctypes.c_uint64), ("port", ctypes.c_uint64))


class _MountAttributes(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns"))


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


def landlock_version() -> int:
    """Return the version of Landlock's interface; 0 if the kernel has none, or has it switched off."""
    with suppress(OSError):
        return _syscall(_CREATE_RULESET, None, 0, 1)
    return 0


def restrict_paths(rules: Rules, *, network: bool, listening: bool) -> None:
    """Forbid everything outside `rules`, and TCP.

    `network` permits connections; `listening` permits to listen, on ports that the kernel chooses.
    """
    version = landlock_version()
    handled = (1 << _HANDLED.get(version, 16)) - 1
    net = 0 if version < 4 else _BIND_TCP | (0 if network else _CONNECT_TCP)
    asked = _Ruleset(handled, net, _SCOPED if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = _syscall(_CREATE_RULESET, ctypes.byref(asked), size, 0)
    try:
        for path, rights in rules:
            _permit(ruleset, path, rights & handled)
        if listening and net:
            any_port = _NetPort(_BIND_TCP, 0)
            _syscall(_ADD_RULE, ruleset, _RULE_OF_PORT, ctypes.byref(any_port), 0)
        _syscall(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _permit(ruleset: int, path: Path, rights: int) -> None:
    """Add a rule for a path; one that does not exist, or is a symbolic link, needs none."""
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        rights = rights if path.is_dir() else rights & _OF_FILES
        beneath = _PathBeneath(rights, opened)
        if rights and not path.is_symlink():
            _syscall(_ADD_RULE, ruleset, _RULE_OF_PATH, ctypes.byref(beneath), 0)
    finally:
        os.close(opened)


def enter_user_namespace() -> None:
    """Enter an own user namespace with the same user: it counts its own processes, and may have mounts."""
    user, group = os.geteuid(), os.getegid()
    _check(_libc.unshare(_CLONE_NEWUSER))
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def enter_mount_namespace() -> None:
    _check(_libc.unshare(_CLONE_NEWNS))
    _mount("none", Path("/"), None, _MS_REC | _MS_PRIVATE)


def make_readonly(scratch: Path, writable: list[Path]) -> None:
    """Make all mounts read-only in this mount namespace, except the scratch folder and what is `writable`."""
    for path in writable:
        _mount(str(path), path, None, _MS_BIND | _MS_REC)
    _set_mount(Path("/"), _MountAttributes(set=_MOUNT_ATTR_RDONLY))
    for path in (scratch, *((_SHARED,) if _SHARED.is_dir() else ()), *writable):
        _set_mount(path, _MountAttributes(clear=_MOUNT_ATTR_RDONLY))


def mount_scratch(folder: Path, size_bytes: int, files: int, user: int) -> None:
    """Mount an empty folder of limited size, in memory, which is also the place of POSIX semaphores."""
    options = f"size={size_bytes},nr_inodes={files},mode=700,uid={user}"
    _mount("tmpfs", folder, "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    if _SHARED.is_dir():
        _mount(str(folder), _SHARED, None, _MS_BIND)


def become(user: int) -> None:
    """Change from root to a user that owns nothing, but keep root's capabilities until they are dropped."""
    _prctl(_PR_SET_KEEPCAPS, 1)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def drop_capabilities(*, files: bool) -> None:
    """Give up all capabilities; `files` keeps the one to open root's files, for programs that are started, too."""
    held = _CAP_DAC if files else 0
    _set_capabilities(held)
    _prctl(_PR_CAP_AMBIENT, _CAP_AMBIENT_CLEAR_ALL)
    for number in range(held.bit_length()):
        if held >> number & 1:
            _prctl(_PR_CAP_AMBIENT, _CAP_AMBIENT_RAISE, number)


def forbid_new_privileges() -> None:
    """Forbid programs with more rights than this process has, and reading its memory by the user's other processes."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_DUMPABLE, 0)


def install_filter(program: bytes) -> None:
    """Have the kernel judge all later system calls by a seccomp program."""
    instructions = ctypes.create_string_buffer(program, len(program))

    class _Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))

    asked = _Program(len(program) // 8, ctypes.addressof(instructions))
    _prctl(22, 2, ctypes.addressof(asked))  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def _set_capabilities(held: int) -> None:
    header = _CapabilityHeader(_CAPABILITIES_V3, 0)
    data = (ctypes.c_uint32 * 6)(held, held, held, 0, 0, 0)  # effective, permitted, inheritable; then the upper halves
    _check(_libc.capset(ctypes.byref(header), ctypes.byref(data)))


def _mount(source: str, target: Path, kind: str | None, flags: int, options: str = "") -> None:
    encoded = (os.fsencode(source), os.fsencode(target), kind and kind.encode())
    _check(_libc.mount(*encoded, ctypes.c_ulong(flags), options.encode()))


def _set_mount(path: Path, attributes: _MountAttributes) -> None:
    size = ctypes.sizeof(attributes)
    _syscall(_MOUNT_SETATTR, _AT_FDCWD, os.fsencode(path), _AT_RECURSIVE, ctypes.byref(attributes), size)


def _prctl(option: int, *arguments: int) -> None:
    _check(_libc.prctl(option, *map(ctypes.c_ulong, (*arguments, 0, 0, 0, 0)[:4])))


def _syscall(number: int, *arguments: object) -> int:
    plain = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    return _check(int(_libc.syscall(ctypes.c_long(number), *plain)))


def _check(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
