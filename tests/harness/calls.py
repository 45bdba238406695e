"""What checks of what calls say use, over harness/net.py."""

import ctypes

from harness.net import *

BAD = 8  # no address
SIZE = ctypes.c_size_t


for _name in ("read", "write", "readv", "writev", "sendmsg", "recvmsg", "recv", "send", "sendto", "recvfrom", "sendfile",
              "splice", "preadv2", "pwritev2"):
    getattr(libc, _name).restype = ctypes.c_ssize_t


def said(name, *args):
    """What a call says: its value, or the name of its error."""
    ctypes.set_errno(0)
    value = getattr(libc, name)(*args)
    return value if value >= 0 else errno.errorcode[ctypes.get_errno()]


def space(size):
    return ctypes.create_string_buffer(size)


def differences(pairs):
    """Asserts that what calls said is what they should say; names all that don't."""
    wrong = [f"{what}: {got!r}, not {want!r}" for what, got, want in pairs if got != want]
    assert not wrong, "\n".join(wrong)


def mixed(t):
    """A connection with unread bytes at this end, of which the first came by TCP and the others by an RMB: (c, bytes)."""
    c, read = tcp_then_rmb(t)
    t.peer("c.sendall(b'R' * 100)")
    whole = b"T" * (500 - read) + b"R" * (read + 100)
    arrived(c, len(whole))
    return c, whole
