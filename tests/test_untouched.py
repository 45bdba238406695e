"""Descriptors that are no TCP connections work as ever under the library: UDP, Unix sockets, pipes, files, terminals.

Programs that use only such descriptors get no engine thread, no runtime files, no extra descriptors.
"""

import os
import sys

import pytest


CHECK = r'''
import hashlib, os, random, select, socket, sys, threading

def copy(source, sink, read, write):
    data = random.Random(3).randbytes(3_000_000)
    got = []
    def reader():
        while part := read(source):
            got.append(part)
    thread = threading.Thread(target=reader)
    thread.start()
    at = 0
    while at < len(data):
        at += write(sink, data[at:at + random.randrange(1, 100_000)])
    return thread, lambda: b"".join(got) == data

# pipes
r, w = os.pipe()
thread, right = copy(r, w, lambda fd: os.read(fd, 50_000), os.write)
os.close(w); thread.join(); assert right()

# Unix streams
a, b = socket.socketpair()
thread, right = copy(a, b, lambda s: s.recv(70_000), lambda s, data: s.send(data))
b.close(); thread.join(); assert right()

# Unix seqpacket and datagrams keep their borders
for kind in (socket.SOCK_SEQPACKET, socket.SOCK_DGRAM):
    a, b = socket.socketpair(socket.AF_UNIX, kind)
    for size in (1, 1000, 0, 30_000):
        a.send(bytes(size)); assert len(b.recv(65536)) == size

# descriptors over Unix sockets
a, b = socket.socketpair()
r, w = os.pipe()
socket.send_fds(a, [b"x"], [r])
fd = socket.recv_fds(b, 1, 1)[1][0]
os.write(w, b"through"); assert os.read(fd, 10) == b"through"

# UDP on both families
for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
    try:
        one = socket.socket(family, socket.SOCK_DGRAM); one.bind((host, 0))
    except OSError:
        continue
    two = socket.socket(family, socket.SOCK_DGRAM)
    for size in (0, 1, 1400, 40_000):
        two.sendto(bytes(size), one.getsockname()); assert len(one.recv(65536)) == size
    two.connect(one.getsockname())
    two.send(b"abcdef"); assert one.recv(3) == b"abc"
    one.settimeout(0.05)
    try:
        one.recv(10); raise AssertionError("truncated datagram left something")
    except TimeoutError:
        pass
    assert two.getpeername()[:2] == one.getsockname()[:2]

# epoll, poll, select over them
r, w = os.pipe()
epoll = select.epoll(); epoll.register(r, select.EPOLLIN | select.EPOLLET)
os.write(w, b"1"); assert epoll.poll(1) == [(r, select.EPOLLIN)] and epoll.poll(0) == []
assert select.select([r], [w], [], 0) == ([r], [w], [])
event = os.eventfd(0); epoll.register(event, select.EPOLLIN); os.eventfd_write(event, 3)
assert epoll.poll(1) == [(event, select.EPOLLIN)] and os.eventfd_read(event) == 3

# files
import tempfile
with tempfile.TemporaryFile() as file:
    file.write(b"hello" * 1000); file.flush()
    assert os.pread(file.fileno(), 5, 4995) == b"hello"
    assert os.sendfile(w, file.fileno(), 0, 100) == 100
assert threading.active_count() == 1
print(len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")))
'''


@pytest.mark.parametrize("loaded", [True, False])
def test_other_descriptors(eager, loaded):
    """Correct, and with the same number of threads and descriptors as without the library."""
    outputs = [eager.run([sys.executable, "-B", "-c", CHECK], state).out for state in (loaded, False)]
    assert outputs[0] == outputs[1]
    if loaded and not eager.not_asserted("no runtime files"):
        left = [name for name in os.listdir(eager.runtime) if name.startswith("node-")]
        assert not left, left


def test_programs_without_sockets(eager):
    """Pipelines, archives, shells: same output with and without."""
    commands = ["seq 20000 | sort -r | sha256sum", "tar cf - -C /usr/include . 2>/dev/null | head -c 3000000 | gzip -1 | gzip -d "
                "| sha256sum", "printf 'b\\na\\n' | sort | tee /dev/stderr 2>/dev/null", "awk 'BEGIN{while(i++<99999)s+=i;print s}'"]
    for command in commands:
        outputs = {eager.run(["sh", "-c", command], state, env={"LC_ALL": "C"}).out for state in (True, False)}
        assert len(outputs) == 1 and outputs != {""}, (command, outputs)


def test_subprocesses_of_subprocesses(eager):
    """Preloaded programs start others in all the usual ways."""
    code = ("import os, subprocess\n"
            "assert subprocess.run(['sh', '-c', 'echo $((6*7)) | cat'], capture_output=True).stdout == b'42\\n'\n"
            "assert os.system('exit 3') >> 8 == 3\n"
            "assert os.popen('echo popen').read() == 'popen\\n'\n"
            "pid = os.posix_spawn('/bin/sh', ['sh', '-c', 'exit 4'], os.environ)\n"
            "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 4\n"
            "pid = os.fork()\n"
            "if not pid: os.execvp('sh', ['sh', '-c', 'exit 5'])\n"
            "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5\n"
            "print('ok')")
    assert eager.run([sys.executable, "-c", code]).out == "ok\n"
