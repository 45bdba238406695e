"""Installs a seccomp filter that refuses special system calls with EPERM, then executes the rest of the command line.

Refused: memfd_create, eventfd, eventfd2, timerfd_create, pidfd_open, pidfd_getfd, process_vm_readv/writev, io_uring_*,
shmget, userfaultfd, membarrier, and opening below /dev/shm can't be told apart, so it stays possible. x86_64 only.
"""

import ctypes
import os
import platform
import struct
import sys

REFUSED = [319, 284, 290, 283, 434, 438, 310, 311, 425, 426, 427, 29, 323, 324]
if platform.machine() != "x86_64":
    sys.exit("the filter is written for x86_64")

LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
code = [struct.pack("HBBI", LOAD, 0, 0, 0)]
for place, number in enumerate(REFUSED):
    code.append(struct.pack("HBBI", EQUAL, len(REFUSED) - place, 0, number))
code.append(struct.pack("HBBI", RETURN, 0, 0, 0x7FFF0000))
code.append(struct.pack("HBBI", RETURN, 0, 0, 0x00050000 | 1))
program = b"".join(code)
buffer = ctypes.create_string_buffer(program, len(program))


class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


libc = ctypes.CDLL(None, use_errno=True)
filter = Filter(len(code), ctypes.addressof(buffer))
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(filter), 0, 0):
    sys.exit(f"no filter: {os.strerror(ctypes.get_errno())}")
os.execvp(sys.argv[1], sys.argv[1:])
