"""Checks of the SMC option of TCP: syn_option.py NAME CGROUP runs check_NAME.

Runs as root: makes a network namespace of its own, joins the control group, opens raw sockets, and otherwise acts as an
unprivileged user, as whom it uses the option. Segments come from segments.py.
"""

import contextlib
import ctypes
import errno
import os
import re
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

from segments import ACK, OPTION, SYN, Capture, Raw, root

NUMBERS = (Path(__file__).parents[2] / "smc-core/src/negotiate/option.rs").read_text(encoding="utf-8")


def number(name):
    """A constant of the process's side, which is what these programs must agree with."""
    return int(re.search(rf"pub const {name}: \w+ = (\w+);", NUMBERS)[1].replace("_", ""), 0)


SOL_XSMC, WANT, STATE = number("SOL_XSMC"), number("XSMC_OPT_WANT"), number("XSMC_OPT_STATE")
WANTED, PEER = number("STATE_WANTED"), number("STATE_PEER")
CLIENTS = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}
NOBODY = 65534
BPF = {"x86_64": 321, "aarch64": 280}[os.uname().machine]  # the system call
MSG_FASTOPEN, TCP_FASTOPEN = 0x20000000, 23


libc = ctypes.CDLL(None, use_errno=True)


def get(sock, level, name, size, question=b""):
    """getsockopt with a buffer of any size and content, which Python's own limits."""
    value, length = ctypes.create_string_buffer(question, max(size, len(question), 1)), ctypes.c_uint(size)
    if libc.getsockopt(sock.fileno(), level, name, value, ctypes.byref(length)):
        raise OSError(ctypes.get_errno(), f"getsockopt, which says {length.value}")
    return value.raw[:length.value]


def want(sock, value=1):
    sock.setsockopt(SOL_XSMC, WANT, struct.pack("I", value))


def state(sock):
    return struct.unpack("I", sock.getsockopt(SOL_XSMC, STATE, 4))[0]


def tcp(family=socket.AF_INET, marked=False):
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.settimeout(10)
    if marked:
        want(sock)
    return sock


def listener(marked, family=socket.AF_INET, host=None, backlog=64):
    sock = tcp(family, marked)
    sock.bind((host or CLIENTS[family], 0))
    sock.listen(backlog)
    return sock


def pair(listening, marked):
    """A client and what the listener accepted."""
    client = tcp(listening.family, marked)
    client.connect(listening.getsockname())
    return client, listening.accept()[0]


def fails(number, function, *args):
    try:
        value = function(*args)
    except OSError as error:
        assert error.errno == number, f"{error} instead of {errno.errorcode[number]}"
    else:
        raise AssertionError(f"gave {value!r} instead of {errno.errorcode[number]}")


def sysctl(name, value):
    with root():
        Path("/proc/sys/net/ipv4", name).write_text(str(value), encoding="ascii")


def check_combinations():
    """Marked and unmarked clients and servers: bytes of the handshake, and what both ends are told."""
    capture = Capture()
    for family in CLIENTS:
        for client_wants in (False, True):
            for server_wants in (False, True):
                with listener(server_wants, family) as listening:
                    client, server = pair(listening, client_wants)
                    client.sendall(b"ping")
                    assert server.recv(4) == b"ping"
                    server.sendall(b"pong")
                    assert client.recv(4) == b"pong"
                    both = client_wants and server_wants
                    assert capture.handshake() == (client_wants, both)
                    assert state(client) == WANTED * client_wants + PEER * both
                    assert state(server) == WANTED * server_wants + PEER * both
                    assert state(listening) == WANTED * server_wants
                    client.close()
                    server.close()


def check_mapped():
    """An IPv4 client of a dual-stack IPv6 listener."""
    capture = Capture()
    listening = tcp(socket.AF_INET6, True)
    listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    listening.bind(("::", 0))
    listening.listen()
    client = tcp(marked=True)
    client.connect(("127.0.0.1", listening.getsockname()[1]))
    assert (state(client), state(listening.accept()[0])) == (3, 3)
    assert capture.handshake() == (True, True)


def check_many():
    """Many connections of mixed clients wait in one accept queue; each is told of its own client."""
    listening = listener(True, backlog=512)
    clients = {}
    for turn in range(400):
        client = tcp(marked=turn % 3 == 0)
        client.connect(listening.getsockname())
        clients[client.getsockname()] = client
    for _ in range(400):
        server, address = listening.accept()
        client = clients[address]
        assert (state(client), state(server)) in ((3, 3), (0, 1)), (state(client), state(server))
    assert sum(state(client) == 3 for client in clients.values()) == 134
    # The listener is as it was.
    assert state(listening) == WANTED


def check_inherited():
    """Sockets of a listener that other processes share, and copies of descriptors."""
    listening = listener(True)
    client = tcp(marked=True)
    client.connect(listening.getsockname())
    pid = os.fork()
    if pid == 0:
        server = listening.accept()[0]
        os._exit(state(server) * 10 + state(server.dup()))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 33
    # A listener that was marked by its parent serves on in the child, after the parent closed it.
    pid = os.fork()
    if pid == 0:
        time.sleep(0.1)
        server = listening.accept()[0]
        os._exit(state(server))
    address = listening.getsockname()
    listening.close()
    client = tcp(marked=True)
    client.connect(address)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    assert state(client) == 3


def check_reuseport():
    """Two listeners on one port, one marked: each SYN-ACK is as its own listener is."""
    listeners = []
    for marked in (True, False):
        sock = tcp(marked=marked)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(("127.0.0.1", listeners[0].getsockname()[1] if listeners else 0))
        sock.listen(256)
        sock.setblocking(False)
        listeners.append(sock)
    clients = {}
    for _ in range(100):
        client = tcp(marked=True)
        client.connect(listeners[0].getsockname())
        clients[client.getsockname()] = client
    counts = []
    for sock, expected in zip(listeners, ((3, 3), (1, 0))):
        counts.append(0)
        while True:
            try:
                server, address = sock.accept()
            except BlockingIOError:
                break
            assert (state(clients[address]), state(server)) == expected
            counts[-1] += 1
    assert sum(counts) == 100 and min(counts) > 0, counts


def check_late():
    """Only a socket that does nothing yet can be marked; a mark stays."""
    listening = listener(False)
    fails(errno.EPERM, want, listening)
    client, server = pair(listening, False)
    fails(errno.EPERM, want, client)
    fails(errno.EPERM, want, server)
    assert (state(client), state(server), state(listening)) == (0, 0, 0)
    client = tcp(marked=True)
    fails(errno.EPERM, want, client, 0)
    assert state(client) == WANTED
    # Values of another size.
    for value in (b"", b"\1", b"\1\0\0\0\0", bytes(5000)):
        fails(errno.EPERM, tcp().setsockopt, SOL_XSMC, WANT, value)
    fails(errno.EOPNOTSUPP, tcp(marked=True).getsockopt, SOL_XSMC, STATE, 3)
    assert get(tcp(marked=True), SOL_XSMC, STATE, 8192) == struct.pack("I", WANTED)
    # Unknown names of our level.
    fails(errno.ENOPROTOOPT, tcp().setsockopt, SOL_XSMC, 77, 1)
    # A connection that was refused, and another try with the same socket.
    marked = listener(True)
    closed = tcp()
    closed.bind(("127.0.0.1", 0))
    client = tcp(marked=True)
    client.settimeout(None)  # one system call, not one that begins and one that asks
    fails(errno.ECONNREFUSED, client.connect, closed.getsockname())
    assert state(client) == WANTED
    client.connect(marked.getsockname())
    assert state(client) == 3
    # Disconnected (connect to AF_UNSPEC), the socket forgets its peer with the next connection.
    assert libc.connect(client.fileno(), bytes(16), 16) == 0
    client.connect(listening.getsockname())
    assert state(client) == WANTED


def check_self():
    """A socket that connects to itself: both ends send a SYN, and no one is promised anything."""
    client = tcp(marked=True)
    client.bind(("127.0.0.1", 0))
    client.connect(client.getsockname())
    client.sendall(b"me")
    assert client.recv(2) == b"me"
    assert state(client) == WANTED


def check_syncookies():
    """SYN cookies can't remember the option: it isn't answered."""
    sysctl("tcp_syncookies", 2)
    capture = Capture()
    client, server = pair(listener(True), True)
    assert capture.handshake() == (True, False)
    assert (state(client), state(server)) == (1, 1)


def check_fast_open():
    """Bytes in the SYN: no option, no promise, no byte lost."""
    sysctl("tcp_fastopen", 0x4 | 0x200 | 0x3)  # data in SYN without a cookie, both ways
    capture = Capture()
    listening = tcp(marked=True)
    listening.setsockopt(socket.IPPROTO_TCP, TCP_FASTOPEN, 16)
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    client = tcp(marked=True)
    client.sendto(b"early", MSG_FASTOPEN, listening.getsockname())
    server = listening.accept()[0]
    assert server.recv(5) == b"early"
    server.sendall(b"late")
    assert client.recv(4) == b"late"
    segments = capture.segments()
    syn = next(one for one in segments if one.flags & (SYN | ACK) == SYN)
    assert syn.data == b"early", "no data in the SYN: this check shows nothing"
    assert not any(one.has() for one in segments)
    assert (state(client), state(server)) == (1, 1)
    # Without data in the SYN, that listener answers as any other.
    client, server = pair(listening, True)
    assert (state(client), state(server)) == (3, 3)
    assert capture.handshake() == (True, True)
    # A server without Fast Open: the client's bytes come after the handshake, in which there was no option.
    plain = listener(True)
    client = tcp(marked=True)
    client.sendto(b"early", MSG_FASTOPEN, plain.getsockname())
    server = plain.accept()[0]
    assert server.recv(5) == b"early"
    assert (state(client), state(server)) == (1, 1)
    # A peer that sends both, which it shouldn't.
    raw = Raw()
    wide = tcp(marked=True)
    wide.setsockopt(socket.IPPROTO_TCP, TCP_FASTOPEN, 16)
    wide.bind(("0.0.0.0", 0))
    wide.listen()
    answered, server = raw.connect(wide, b"\2\4\5\xb4" + OPTION, 4000, data=b"both")
    assert server.recv(4) == b"both", "no Fast Open: this check shows nothing"
    assert not answered and state(server) == WANTED


def check_raw_clients():
    """Odd options, and SYN-ACKs that are sent again."""
    raw = Raw()
    listening, plain = listener(True, host="0.0.0.0"), listener(False, host="0.0.0.0")
    mss = b"\2\4\5\xb4"
    # As Linux's SMC takes it: any even length from 6 on.
    for turn, (options, right) in enumerate((
            (OPTION, True),
            (b"\1\1" + OPTION, True),
            (OPTION + b"\1\1" + mss, True),
            (b"\xfe\x08" + OPTION[2:] + b"xy", True),
            (b"\xfe\x07" + OPTION[2:] + b"x", False),
            (b"\xfe\x04\xe2\xd4", False),
            (b"\xfe\x06\xe2\xd4\xc3\xc4", False),
            (b"\xfd" + OPTION[1:], False),
            (mss, False),
    )):
        answered, server = raw.connect(listening, options, 5000 + turn)
        assert answered == right, options.hex()
        assert state(server) == WANTED + PEER * right, options.hex()
        answered, server = raw.connect(plain, options, 6000 + turn)
        assert not answered and state(server) == 0
    # The kernel sends it again after a second; the SYN itself is gone by then.
    answered, server = raw.connect(listening, OPTION, 7000, answers=2)
    assert answered and state(server) == 3
    answered, server = raw.connect(listening, mss, 7001, answers=2)
    assert not answered and state(server) == WANTED


def check_saved_syn():
    """A program that has SYNs saved itself, with Ethernet header, still gets them so, and isn't offered the option."""
    save, saved = 27, 28
    raw = Raw()
    listening = tcp(marked=True)
    listening.setsockopt(socket.IPPROTO_TCP, save, 2)
    listening.bind(("0.0.0.0", 0))
    listening.listen()
    assert listening.getsockopt(socket.IPPROTO_TCP, save) == 2
    answered, server = raw.connect(listening, OPTION, 5000)
    assert not answered and state(server) == WANTED
    assert server.getsockopt(socket.IPPROTO_TCP, saved, 200)[12:14] == b"\x08\x00"


def check_again():
    """A listener that is shut down, and listens again on its port or on another one."""
    capture = Capture()
    for bound in (True, False):
        listening = tcp(marked=True)
        if bound:
            listening.bind(("127.0.0.1", 0))
        for _ in range(3):
            listening.listen()
            client, server = pair(listening, True)
            assert (state(client), state(server)) == (3, 3)
            assert capture.handshake() == (True, True)
            client.close()
            server.close()
            listening.shutdown(socket.SHUT_RD)


def check_opening():
    """Clients that come at the very moment at which a listener opens: both ends are told the same."""
    address = ("127.0.0.1", 9999)  # no port that a client gets: it could connect to itself
    stop = time.monotonic() + 2
    child = os.fork()
    if child == 0:
        while time.monotonic() < stop + 1:
            listening = tcp(marked=True)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen()
            with listening, contextlib.suppress(OSError), listening.accept()[0] as server:
                server.sendall(bytes([state(server)]))
                server.recv(1)
        os._exit(0)
    told = {}
    while time.monotonic() < stop:
        with tcp(marked=True) as client:
            client.settimeout(0.02)  # a SYN that meets a listener being closed is dropped, and sent again a second later
            try:
                client.connect(address)
                theirs = client.recv(1)
            except OSError:  # too early, or too late
                continue
            if theirs:
                ends = (state(client), theirs[0])
                told[ends] = told.get(ends, 0) + 1
    os.kill(child, 9)
    os.waitpid(child, 0)
    assert told.keys() <= {(WANTED, WANTED), (3, 3)} and told[3, 3] > 20, told


def check_raw_servers():
    """SYNs that are sent again; SYN-ACKs with and without the option, asked for or not."""
    raw = Raw()
    for turn, (marked, options, expected) in enumerate((
            (True, OPTION, 3), (True, b"", 1), (False, OPTION, 0), (True, b"\xfe\x07" + OPTION[2:] + b"x", 1))):
        client = tcp(marked=marked)
        client.setblocking(False)
        fails(errno.EINPROGRESS, client.connect, (raw.THERE, 80 + turn))
        seen = [raw.receive(SYN) for _ in range(2)]
        assert [one.has() for one in seen] == [marked, marked]
        raw.send(80 + turn, seen[0].sport, SYN | ACK, 2000, seen[0].seq + 1, options)
        raw.receive(ACK)
        client.settimeout(5)
        client.sendall(b"x")
        assert state(client) == expected, options.hex()


def check_crossing():
    """Both ends connect to each other at once. This end can't tell later what the other one's SYN had: no promise."""
    raw = Raw()
    client = tcp(marked=True)
    client.setblocking(False)
    fails(errno.EINPROGRESS, client.connect, (raw.THERE, 80))
    syn = raw.receive(SYN)
    assert syn.has()
    raw.send(80, syn.sport, SYN, 2000, options=OPTION)
    answer = raw.receive(SYN | ACK)
    assert answer.ack == 2001 and not answer.has()
    raw.send(80, syn.sport, ACK, 2001, syn.seq + 1)
    client.settimeout(5)
    client.sendall(b"x")
    assert raw.receive(ACK).data == b"x"
    assert state(client) == WANTED


# BPF_SOCK_OPS_TCP_LISTEN_CB and BPF_SOCK_OPS_HDR_OPT_LEN_CB, with what another program does then: asks to be called for
# header options (bpf_sock_ops_cb_flags_set), or takes 20 bytes of room for some (bpf_reserve_hdr_opt).
NOSY, GREEDY = (11, 59, 64), (14, 144, 20)


def other_program(folder, on, helper, argument):
    """Another sock_ops program, attached to a control group while the descriptor given is open."""
    def instruction(code, registers=0, offset=0, value=0):
        return struct.pack("BBhi", code, registers, offset, value)

    code = b"".join((
        instruction(0x61, 0x12),  # r2 = ops->op
        instruction(0x55, 0x02, 3, on),  # else to the end
        instruction(0xb7, 0x02, 0, argument), instruction(0xb7, 0x03), instruction(0x85, 0, 0, helper),
        instruction(0xb7, 0x00, 0, 1), instruction(0x95),  # return 1
    ))
    code, licence = ctypes.create_string_buffer(code, len(code)), ctypes.create_string_buffer(b"MIT")
    load = struct.pack("IIQQ48x", 13, len(code) // 8, ctypes.addressof(code), ctypes.addressof(licence))
    with root():
        program = bpf(5, load)
        return bpf(28, struct.pack("IIII", program, os.open(folder, os.O_DIRECTORY), 3, 0))


def bpf(command, attributes):
    descriptor = libc.syscall(BPF, command, attributes, len(attributes))
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "bpf")
    return descriptor


def check_nosy(cgroup):
    """Another program has itself called for the options of all listeners: only the marked ones get ours."""
    marked, plain = listener(True), None
    link = other_program(cgroup, *NOSY)
    capture = Capture()
    plain = listener(False)
    client, server = pair(plain, True)
    assert capture.handshake() == (True, False)
    assert (state(client), state(server)) == (1, 0)
    for listening in (marked, listener(True)):
        client, server = pair(listening, True)
        assert (state(client), state(server)) == (3, 3)
    assert capture.handshake() == (True, True)
    os.close(link)


def check_greedy(cgroup):
    """Another program takes the room for options, so that ours has none: both ends know."""
    inner = cgroup / f"greedy-{os.getpid()}"
    with root():
        inner.mkdir()
    try:
        server_side = listener(True)
        move_to(inner)
        raw = Raw()
        # No room in SYNs, at first or only when sent again. An answer that nobody asked for is no answer.
        for early in (True, False):
            link = other_program(inner, *GREEDY) if early else None  # further down, so it comes first
            client = tcp(marked=True)
            client.setblocking(False)
            fails(errno.EINPROGRESS, client.connect, (raw.THERE, 80 + early))
            first = raw.receive(SYN)
            link = link or other_program(inner, *GREEDY)
            assert (first.has(), raw.receive(SYN).has()) == (not early, False)
            raw.send(80 + early, first.sport, SYN | ACK, 2000, first.seq + 1, OPTION)
            client.settimeout(5)
            client.sendall(b"x")
            assert state(client) == (WANTED if early else WANTED | PEER)
            if early:
                os.close(link)
        # No room in SYN-ACKs, neither in the first nor later.
        cramped = listener(True, host="0.0.0.0")
        cramped_address = ("127.0.0.1", cramped.getsockname()[1])
        mss, scale, times = b"\2\4\5\xb4", b"\1\3\3\7", b"\4\2\x08\x0a" + bytes(8)
        for answers in (1, 2):
            answered, server = raw.connect(cramped, mss + times + scale + OPTION, 5000 + answers, answers)
            assert not answered and state(server) == WANTED
        # Sockets keep the control group they were made in.
        move_to(cgroup)
        client = tcp(marked=True)
        client.connect(cramped_address)
        assert (state(client), state(cramped.accept()[0])) == (1, 1)
        client, server = pair(server_side, True)
        assert (state(client), state(server)) == (3, 3)
        os.close(link)
    finally:
        move_to(cgroup)
        with root():
            inner.rmdir()


def move_to(cgroup):
    with root():
        Path(cgroup, "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")


def other_options():
    """Answers to options that are none of ours: sizes from small to more than a page, errors, other families."""
    answers = []

    def ask(what, function, *args):
        try:
            answers.append((what, function(*args)))
        except OSError as error:
            answers.append((what, error.errno, error.strerror))

    for family in CLIENTS:
        sock = tcp(family)
        for size in (1, 4, 64, 4096, 4097, 70000):
            padding = bytes(max(0, size - 4))
            ask(("set", size), sock.setsockopt, socket.SOL_SOCKET, socket.SO_RCVBUF, struct.pack("i", 9000)[:size] + padding)
            ask(("get", size), get, sock, socket.SOL_SOCKET, socket.SO_RCVBUF, size)
            ask(("cc", size), sock.setsockopt, socket.IPPROTO_TCP, socket.TCP_CONGESTION, (b"reno\0" + bytes(size))[:size])
            ask(("cc?", size), get, sock, socket.IPPROTO_TCP, socket.TCP_CONGESTION, size)
            ask(("info", size), lambda n: len(get(sock, socket.IPPROTO_TCP, socket.TCP_INFO, n)), size)
            for level in (0x777, SOL_XSMC - 1, socket.IPPROTO_IP, socket.IPPROTO_IPV6, socket.IPPROTO_TCP):
                ask((level, size), sock.setsockopt, level, 999, bytes(size))
                ask((level, size), get, sock, level, 999, size)
            # The tables of iptables: more than a page in, or an error.
            ask(("ipt", size), sock.setsockopt, socket.IPPROTO_IP, 64, bytes(size))
            ask(("ipt?", size), get, sock, socket.IPPROTO_IP, 64, size)
            ask(("ipt6", size), get, sock, socket.IPPROTO_IPV6, 64, size)
        # A socket filter: a structure that points to more.
        code = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0xffff) * 3)
        program = struct.pack("HxxxxxxP", 3, ctypes.addressof(code))
        for size in (0, 5000):
            ask(("filter", size), sock.setsockopt, socket.SOL_SOCKET, 26, program + bytes(size))
    # What the kernel really reads and writes, in the same buffer, also beyond a page: a list of sources (IP_MSFILTER).
    sysctl("igmp_max_msf", 2000)
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    group, here = socket.inet_aton("239.1.2.3"), socket.inet_aton("127.0.0.1")
    udp.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group + here)
    for count in (10, 1500):
        question = group + here + struct.pack("II", 1, count)
        sources = b"".join(struct.pack("!I", 0x0a000001 + n) for n in range(count))
        udp.setsockopt(socket.IPPROTO_IP, 41, question + sources)
        for size in (16 + 4 * count, 9000):
            assert get(udp, socket.IPPROTO_IP, 41, size, question) == question + sources
    ask("groups", get, socket.socketpair()[0], socket.SOL_SOCKET, 59, 0)  # SO_PEERGROUPS
    assert answers[-1] == ("groups", errno.ERANGE, "getsockopt, which says 4"), answers[-1]
    # No place for an answer.
    sock = tcp()
    for address in (None, 8):
        length = ctypes.c_uint(4)
        result = libc.getsockopt(sock.fileno(), socket.SOL_SOCKET, socket.SO_TYPE, address, ctypes.byref(length))
        answers.append(("nowhere", result, ctypes.get_errno()))
        assert answers[-1] == ("nowhere", -1, errno.EFAULT), answers[-1]
    return answers


def check_others(before):
    """Options of others are answered as before the process joined the control group; only TCP sockets have ours."""
    after = other_options()
    assert len(after) == len(before) > 200
    for old, new in zip(before, after):
        assert old == new, f"{new} instead of {old}"
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    fails(errno.ENOPROTOOPT, want, udp)
    fails(errno.EOPNOTSUPP, want, socket.socket(socket.AF_UNIX))


def check_disabled():
    """Without the programs, the kernel knows nothing of the option."""
    for family in CLIENTS:
        fails(errno.ENOPROTOOPT, want, tcp(family))
        try:
            state(tcp(family))
        except OSError as error:
            # The kernel's IPv4 and IPv6 differ here.
            assert error.errno in (errno.ENOPROTOOPT, errno.EOPNOTSUPP)
        else:
            raise AssertionError("the option is still known")
    capture = Capture()
    pair(listener(False), False)
    assert capture.handshake() == (False, False)


def check_survivor():
    """A marked listener lives on while the programs go away: it is an ordinary listener then."""
    listening = listener(True)
    print("marked", flush=True)
    sys.stdin.readline()
    capture = Capture()
    client = tcp()
    client.connect(listening.getsockname())
    server = listening.accept()[0]
    client.sendall(b"x")
    assert server.recv(1) == b"x"
    assert capture.handshake() == (False, False)


def main(name, cgroup):
    if libc.unshare(0x40000000):  # CLONE_NEWNET
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    os.setgroups([NOBODY])
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    before = [other_options()] if name == "others" else []
    move_to(cgroup)
    if name in ("nosy", "greedy"):
        before = [Path(cgroup)]
    globals()[f"check_{name}"](*before)
    print("ok")


if __name__ == "__main__":
    main(*sys.argv[1:])
