"""The system calls that a sandbox forbids, as a seccomp program for this machine's architecture.

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

import errno
import platform
import socket
import struct
from collections.abc import Iterable

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


def is_supported() -> bool:
    """Return True if this machine's architecture has a table here."""
    return platform.machine() in _ARCHITECTURES


def program(*, network: bool, modes: bool) -> bytes:
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
