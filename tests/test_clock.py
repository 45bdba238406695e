"""Programs whose clock is not the system's, by a library in front of the C library's."""

import sys

import pytest

from harness import build, settings

PEER = r'''
import select, socket, struct, sys
if sys.argv[1] == "server":
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print("port", listener.getsockname()[1], flush=True)
        end = listener.accept()[0]
else:
    end = socket.create_connection(("127.0.0.1", int(sys.argv[2])))
end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

def talk():
    # Long enough for an upgrade, however busy the machine is.
    for _ in range(20_000):
        if sys.argv[1] == "client":
            end.sendall(b"x" * 100)
        assert end.recv(100, socket.MSG_WAITALL) == b"x" * 100
        if sys.argv[1] == "server":
            end.sendall(b"x" * 100)

talk()
if sys.argv[1] == "server":
    assert end.recv(1) == b"y"
    talk()
else:
    poll, epoll = select.poll(), select.epoll()
    poll.register(end, select.POLLIN)
    epoll.register(end, select.EPOLLIN)
    print("waits", flush=True)
    sys.stdin.readline()
    for _ in range(3):
        assert poll.poll(100) == []
        assert epoll.poll(0.1) == []
        assert select.select([end], [], [], 0.1) == ([], [], [])
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 100000))
    try:
        end.recv(1)
        sys.exit("there was nothing to receive")
    except BlockingIOError:
        pass
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
    end.sendall(b"y")
    talk()
'''


@pytest.mark.parametrize("first", ["clock", "xsmc"])
def test_clock_stands_still(eager, first):
    """What waits for a connection on RMBs comes back when its time is over, whatever the program's clock says."""
    libraries = [build.library("frozen_clock"), *([] if eager.plain else [settings.LIBRARY])]
    order = libraries if first == "clock" else libraries[::-1]
    server = eager.start([sys.executable, "-c", PEER, "server"])
    client = eager.start([sys.executable, "-c", PEER, "client", server.wait_line("port ")], stdin=-1,
                         env={"LD_PRELOAD": ":".join(map(str, order))})
    client.wait_line("waits")
    eager.wait_rmb()
    client.child.stdin.write(b"\n")
    client.child.stdin.flush()
    eager.finish(client, server, seconds=30)
