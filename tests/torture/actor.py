"""One of the processes, started as `actor.py CONTROL [END=FD...]`: does what the model says, on its ends of connections.

Commands and answers are JSON, one message each, on a Unix socket; a message may carry a descriptor. An answer has what the
call gave ("bytes", "end", "reset"), and "wrong" if a byte was not the expected one.
"""

import errno
import faulthandler
import json
import os
import random
import select
import signal
import socket
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from torture.stream import pattern  # noqa: E402  (needs the path)

PATIENCE = 15  # seconds that any of the calls may take


class Actor:
    def __init__(self, control, ends):
        self.control, self.ends, self.listener = control, ends, None

    def serve(self):
        while True:
            message, fds, _, _ = socket.recv_fds(self.control, 65536, 4)
            if not message:
                return
            command = json.loads(message)
            name = command.pop("do")
            answer = getattr(self, name)(fds=fds, **command) if fds else getattr(self, name)(**command)
            out = answer.pop("fds", []) if answer else []
            if out:
                socket.send_fds(self.control, [json.dumps(answer).encode()], out)
                for fd in out:
                    os.close(fd)
            else:
                self.control.send(json.dumps(answer or {}).encode())

    # --- connections

    def listen(self):
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        return {"address": self.listener.getsockname()}

    def connect(self, end, address, late):
        sock = socket.socket()
        if late:
            sock.setblocking(False)
            if (number := sock.connect_ex(tuple(address))) not in (0, errno.EINPROGRESS):
                return {"error": errno.errorcode[number]}
            select.select([], [sock], [], PATIENCE)
            if number := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                return {"error": errno.errorcode[number]}
            sock.setblocking(True)
        else:
            sock.connect(tuple(address))
        self.ends[end] = sock
        return {"port": sock.getsockname()[1]}

    def accept(self, end):
        self.listener.settimeout(PATIENCE)
        self.ends[end], address = self.listener.accept()
        self.ends[end].setblocking(True)
        return {"port": address[1]}

    # --- bytes

    def send(self, end, key, offset, size, seed):
        """Sends all of it, in pieces, by random calls."""
        sock, rng, done = self.ends[end], random.Random(seed), 0
        data = pattern(key, offset, size)
        deadline = time.monotonic() + PATIENCE
        while done < size:
            piece = memoryview(data)[done:done + rng.choice((1, 7, 100, 1000, 4096, 20000, size))]
            try:
                done += self._send_once(sock, piece, rng.choice(("send", "write", "writev", "sendmsg", "nonblocking", "poll")))
            except BlockingIOError:
                select.select([], [sock], [], 0.05)
            except ConnectionError as error:
                return {"bytes": done, "error": errno.errorcode[error.errno]}
            if time.monotonic() > deadline:
                return {"bytes": done, "error": "time-out"}
        return {"bytes": done}

    @staticmethod
    def _send_once(sock, piece, how):
        match how:
            case "write":
                return os.write(sock.fileno(), piece)
            case "writev":
                half = len(piece) // 2
                return os.writev(sock.fileno(), [piece[:half], piece[half:]])
            case "sendmsg":
                return sock.sendmsg([piece[:1], piece[1:]])
            case "nonblocking":
                return sock.send(piece, socket.MSG_DONTWAIT)
            case "poll":
                poll = select.poll()
                poll.register(sock, select.POLLOUT)
                poll.poll(100)
                return sock.send(piece, socket.MSG_DONTWAIT)
        return sock.send(piece)

    def recv(self, end, key, offset, size, seed, until_end):
        """Receives `size` bytes by random calls; `until_end`: and then the end. Stops early at an end or an error."""
        sock, rng, done = self.ends[end], random.Random(seed), 0
        deadline = time.monotonic() + PATIENCE
        while done < size or until_end:
            ask = rng.choice((1, 10, 1000, 5000, 65536, size))
            ask = max(1, min(ask, size - done)) if not until_end else ask
            how = rng.choice(("recv", "read", "readv", "recvmsg", "peek", "poll", "epoll", "select", "waitall"))
            if how == "waitall" and (until_end or ask > size - done):
                how = "recv"
            if time.monotonic() > deadline:
                return {"bytes": done, "error": "time-out"}
            try:
                data = self._recv_once(sock, ask, how)
            except BlockingIOError:
                continue
            except ConnectionError as error:
                return {"bytes": done, "error": errno.errorcode[error.errno]}
            if not data:
                return {"bytes": done, "end": True}
            expected = pattern(key, offset + done, len(data))
            if data != expected:
                at = next(i for i, (a, b) in enumerate(zip(data, expected)) if a != b)
                return {"bytes": done, "wrong": f"{how}: byte {offset + done + at} is {data[at]}, not {expected[at]}"}
            if how != "peek":
                done += len(data)
        return {"bytes": done}

    @staticmethod
    def _recv_once(sock, size, how):
        match how:
            case "read":
                return os.read(sock.fileno(), size)
            case "readv":
                first, second = bytearray(size - size // 2), bytearray(size // 2)
                count = os.readv(sock.fileno(), [first, second])
                return bytes((first + second)[:count] if count > len(first) else first[:count])
            case "recvmsg":
                return sock.recvmsg(size)[0]
            case "peek":
                return sock.recv(size, socket.MSG_PEEK)
            case "waitall":
                return sock.recv(size, socket.MSG_WAITALL)
            case "poll":
                poll = select.poll()
                poll.register(sock, select.POLLIN)
                poll.poll(PATIENCE * 1000)
                return sock.recv(size, socket.MSG_DONTWAIT)
            case "epoll":
                with select.epoll() as epoll:
                    epoll.register(sock, select.EPOLLIN | select.EPOLLET)
                    epoll.poll(PATIENCE)
                return sock.recv(size, socket.MSG_DONTWAIT)
            case "select":
                select.select([sock], [], [], PATIENCE)
                return sock.recv(size, socket.MSG_DONTWAIT)
        return sock.recv(size)

    def readable(self, end, seconds):
        """What poll, select and epoll say of reading; waits for one to say yes."""
        sock, answers = self.ends[end], {}
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        with select.epoll() as epoll:
            epoll.register(sock, select.EPOLLIN)
            answers["poll"] = bool(poll.poll(seconds * 1000))
            answers["select"] = bool(select.select([sock], [], [], 0)[0])
            answers["epoll"] = bool(epoll.poll(0))
        return answers

    # --- ends

    def shutdown(self, end):
        try:
            self.ends[end].shutdown(socket.SHUT_WR)
        except OSError as error:
            return {"error": errno.errorcode[error.errno]}
        return {}

    def close(self, end):
        self.ends.pop(end).close()

    def abort(self, end):
        sock = self.ends.pop(end)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        sock.close()

    def dup(self, end):
        """Goes on with a copy, and closes what it was."""
        old = self.ends[end]
        self.ends[end] = socket.socket(fileno=os.dup(old.fileno()))
        old.close()

    # --- processes

    def give(self, end):
        """By SCM_RIGHTS."""
        return {"fds": [self.ends.pop(end).detach()]}

    def take(self, end, fds):
        self.ends[end] = socket.socket(fileno=fds[0])

    def fork(self, moved, fds):
        """The child answers on the descriptor that came, and has the ends that move; each closes what is the other's."""
        pid = os.fork()
        if pid == 0:
            self.control.close()
            self.control = socket.socket(fileno=fds[0])
            if self.listener:
                self.listener.close()
                self.listener = None
        else:
            os.close(fds[0])
        for end in list(self.ends):
            if (end in moved) != (pid == 0):
                self.ends.pop(end).close()
        return {"pid": os.getpid()}

    def exec(self, loaded):
        """This process starts anew, with its ends, under xsmc or without."""
        self.control.send(b"{}")
        env = dict(os.environ)
        env["LD_PRELOAD"] = env["TORTURE_LIBRARY"] if loaded else ""
        kept = [f"{end}={sock.fileno()}" for end, sock in self.ends.items()]
        for sock in [self.control, *self.ends.values()]:
            sock.set_inheritable(True)
        os.execve(sys.executable, [sys.executable, "-B", os.path.abspath(__file__), str(self.control.fileno()), *kept], env)

    def count(self):
        """Descriptors, without those above 10,000 or so, where the library has its own."""
        listing = [int(name) for name in os.listdir("/proc/self/fd")]
        return {"descriptors": len([fd for fd in listing if fd < 5000]) - 1}  # less that of the listing


def main():
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    ends = {}
    for word in sys.argv[2:]:
        end, fd = word.split("=")
        ends[end] = socket.socket(fileno=int(fd))
    Actor(socket.socket(fileno=int(sys.argv[1])), ends).serve()


if __name__ == "__main__":
    main()
