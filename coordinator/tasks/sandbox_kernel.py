"""The Linux kernel's interfaces for a sandbox: Landlock, namespaces and mounts, users, and seccomp.

- Everything is called through libc with ctypes, so that a sandbox needs no package, no helper program and no root.
- A function that the kernel refuses raises OSError; `sandbox.enter` decides whether that matters.
- Everything but the count of processes applies to the calling thread and its later children: the process has one
  thread while it enters.

The system calls that a sandbox forbids are a seccomp program for this machine's architecture.

- `KILLED`: nothing that computes ever makes these calls. The kernel ends the process with SIGSYS, so that the attempt
  is named and costs its group.
- `REFUSED`: libraries try these, and do without them. The error is `EPERM`.
- `UNKNOWN`: calls that would go around the filter, or that use memory which no limit counts. The error is `ENOSYS`,
  for which libraries have another way; `clone3`, whose flags a filter cannot read, becomes `clone`.
- `MODES`: owners, modes, times and attributes of files, which Landlock does not judge. Where the mounts are not
  read-only, they have no effect, but succeed: `shutil.copy` sets a mode, and would fail.
- A socket has no permitted family, so it costs `ENETDOWN`; with `network`, it may be IPv4 or IPv6. A socket of the
  machine itself (Unix, netlink, vsock) is never permitted: D-Bus, Docker and ssh-agent listen there.
"""

import ctypes
import errno
import os
import platform
import socket
import struct
from collections.abc import Iterable
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


_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""The column of a call's number, and the kernel's name of the architecture (AUDIT_ARCH)."""

Calls = dict[str, tuple[int | None, int | None]]

KILLED: Calls = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "move_mount": (429, 429), "open_tree": (428, 428), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467), "chroot": (161, 51), "setns": (308, 268), "bpf": (321, 280),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89),
    "open_by_handle_at": (304, 265), "quotactl": (179, 60), "quotactl_fd": (443, 443),
}  # fmt: skip

REFUSED: Calls = {
    "unshare": (272, 97), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "keyctl": (250, 219),
    "add_key": (248, 217), "request_key": (249, 218), "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190),
    "mq_open": (240, 180), "setsid": (112, 157), "setpgid": (109, 154), "name_to_handle_at": (303, 264),
    "move_pages": (279, 239), "migrate_pages": (256, 238),
}  # fmt: skip

UNKNOWN: Calls = {
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "clone3": (435, 435), "memfd_create": (319, 279), "memfd_secret": (447, 447),
}  # fmt: skip

MODES: Calls = {
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "setxattrat": (463, 463), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "removexattrat": (466, 466), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88), "file_setattr": (469, 469),
}  # fmt: skip

OF_ITSELF: Calls = {
    "prlimit64": (302, 261), "sched_setscheduler": (144, 119), "sched_setparam": (142, 118),
    "sched_setattr": (314, 274), "sched_setaffinity": (203, 122),
}  # fmt: skip
"""The calls whose first argument is a process: it must be 0, the caller itself."""

OF_ITSELF_SECOND: Calls = {"setpriority": (141, 140), "ioprio_set": (251, 30)}

_SOCKET, _CLONE, _IOCTL = (41, 198), (56, 220), (16, 29)
_NEW_NAMESPACES = 0x7E020000
"""The flags of `clone` for namespaces."""

_TERMINAL = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX, which type into a terminal."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_KILL, _ERROR, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_X32 = 0x40000000

Instruction = tuple[int, int, int, int]


def has_filter() -> bool:
    """Return True if this machine's architecture has a table here."""
    return platform.machine() in _ARCHITECTURES


def filter_program(*, network: bool, modes: bool) -> bytes:
    """Return the seccomp program; `modes` permits changes to the modes of files."""
    column, architecture = _ARCHITECTURES[platform.machine()]
    allowed = (socket.AF_INET, socket.AF_INET6) if network else ()
    results = [(KILLED, _KILL), (REFUSED, _error(errno.EPERM)), (UNKNOWN, _error(errno.ENOSYS))]
    if not modes:
        results.append((MODES, _error(0)))
    made: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
    ]  # fmt: skip
    if column == 0:
        made += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _KILL)]
    for calls, result in results:
        for number in _numbers(calls, column):
            made += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, result)]
    for calls, argument in ((OF_ITSELF, 0), (OF_ITSELF_SECOND, 1)):
        for number in _numbers(calls, column):
            made += _judge(number, argument, [(_EQUAL, 1, 0, 0), (_RETURN, 0, 0, _error(errno.EPERM))])
    made += _judge(_CLONE[column], 0, [(_ANY_BIT, 0, 1, _NEW_NAMESPACES), (_RETURN, 0, 0, _error(errno.EPERM))])
    for code in _TERMINAL:
        made += _judge(_IOCTL[column], 1, [(_EQUAL, 0, 1, code), (_RETURN, 0, 0, _error(errno.EPERM))])
    families = [(_EQUAL, len(allowed) - each, 0, family) for each, family in enumerate(allowed)]
    made += _judge(_SOCKET[column], 0, [*families, (_RETURN, 0, 0, _error(errno.ENETDOWN))])
    return b"".join(struct.pack("=HBBI", *each) for each in [*made, (_RETURN, 0, 0, _ALLOW)])


def _numbers(calls: Calls, column: int) -> Iterable[int]:
    return (number for each in calls.values() if (number := each[column]) is not None)


def _judge(number: int, argument: int, checks: list[Instruction]) -> list[Instruction]:
    """Return the instructions for a call that depends on an argument; calls that pass the checks are permitted."""
    inside = [(_LOAD, 0, 0, _ARGUMENTS_AT + 8 * argument), *checks, (_LOAD, 0, 0, _NUMBER_AT)]
    return [(_EQUAL, 0, len(inside), number), *inside]


def _error(code: int) -> int:
    return _ERROR | code
