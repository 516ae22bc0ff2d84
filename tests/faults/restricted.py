"""Runs a Python program in this process, for which the kernel refuses what it refuses in some containers.

python restricted.py REFUSED PROGRAM ARGUMENTS, where REFUSED is a system call of SYSTEM_CALLS, "read" for all that copy
the memory of other processes, or "being-read": without CAP_SYS_PTRACE, others may not access this process.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import runpy
import struct
import sys

SYSTEM_CALLS = {
    "x86_64": {"process_vm_readv": 310, "process_vm_writev": 311, "memfd_create": 319},
    "aarch64": {"process_vm_readv": 270, "process_vm_writev": 271, "memfd_create": 279},
}

SET_DUMPABLE, SET_SECCOMP, SET_NO_NEW_PRIVILEGES, FILTER = 4, 22, 38, 2
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def refuse(*names: str) -> None:
    """Have the kernel refuse these system calls to this process, with EPERM, as a container's seccomp profile does."""
    numbers = [SYSTEM_CALLS[platform.machine()][name] for name in names]
    instructions = [struct.pack("HBBI", LOAD, 0, 0, 0)]  # the number of the system call
    for call in numbers:
        instructions += [struct.pack("HBBI", EQUAL, 0, 1, call), struct.pack("HBBI", RETURN, 0, 0, REFUSE)]
    instructions.append(struct.pack("HBBI", RETURN, 0, 0, ALLOW))
    program = _Program(len(instructions), b"".join(instructions))
    _prctl(SET_NO_NEW_PRIVILEGES, 1)
    _prctl(SET_SECCOMP, FILTER, ctypes.byref(program))


def _prctl(*arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(*arguments, *[0] * (5 - len(arguments))) != 0:
        raise OSError(ctypes.get_errno(), f"prctl{arguments}")


if __name__ == "__main__":
    refused, program, *arguments = sys.argv[1:]
    if refused == "being-read":
        _prctl(SET_DUMPABLE, 0)
    else:
        refuse(*(("process_vm_readv", "process_vm_writev") if refused == "read" else (refused,)))
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")
