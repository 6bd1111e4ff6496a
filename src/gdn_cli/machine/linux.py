"""What Linux can keep processes of one user from doing to each other. On other systems
these functions do nothing.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import sys

_PDEATHSIG, _DUMPABLE, _NO_NEW_PRIVS = 1, 4, 38  # prctl
# Landlock's system calls, on every architecture
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION = 1  # LANDLOCK_CREATE_RULESET_VERSION
_SCOPE_SIGNAL = 1 << 1
_FS_REFER = 1 << 13
_PATH_BENEATH = 1


def end_with_parent(parent: int = 0) -> None:
    """Let this process be killed when its parent dies; at once, if that is not `parent`
    any more (0: not asked).
    """
    _prctl(_PDEATHSIG, signal.SIGKILL)
    if parent and os.getppid() != parent:
        os._exit(1)


def hide_memory() -> None:
    """Keep this user's other processes out of this one's memory and descriptors. Root's
    can still read them.
    """
    _prctl(_DUMPABLE, 0)


def confine() -> bool:
    """Keep this process, and all that it will start, out of the memory and descriptors
    of processes outside; root's too. Returns whether this Linux can: it has Landlock
    since 5.19.

    Landlock forbids a confined process to trace others, and reading another's memory or
    descriptors counts as that. The rules themselves forbid almost nothing: signals to
    processes outside since 6.12, and before that nothing but what any set of rules
    does, mounts.
    """
    if not sys.platform.startswith("linux"):
        return False
    version = _syscall(_CREATE_RULESET, None, 0, _VERSION)
    if version >= 6:
        rules = struct.pack("QQQ", 0, 0, _SCOPE_SIGNAL)
    elif version >= 2:
        # allowed everywhere below; an older Landlock forbids it in any case
        rules = struct.pack("Q", _FS_REFER)
    else:
        return False
    ruleset = _syscall(_CREATE_RULESET, rules, len(rules), 0)
    if ruleset < 0:
        return False
    try:
        if version < 6 and not _allow_everywhere(ruleset, _FS_REFER):
            return False
        if _prctl(_NO_NEW_PRIVS, 1) != 0:
            return False
        return _syscall(_RESTRICT_SELF, ruleset, 0) == 0
    finally:
        os.close(ruleset)


def _allow_everywhere(ruleset: int, access: int) -> bool:
    root = os.open("/", os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", access, root)
        return _syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0) == 0
    finally:
        os.close(root)


def _prctl(option: int, value: int) -> int:
    if not sys.platform.startswith("linux"):
        return 0
    return ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _syscall(number: int, *arguments: int | bytes | None) -> int:
    as_long = (ctypes.c_long(x) if isinstance(x, int) else x for x in arguments)
    return ctypes.CDLL(None).syscall(number, *as_long)
