"""What smctl status gives as the reason for a connection's carrier."""

import sys

from harness.status import connections, wait_until

PEER = r'''
import socket, sys, time
if sys.argv[1] == "server":
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print("port", listener.getsockname()[1], flush=True)
        end = listener.accept()[0]
else:
    end = socket.create_connection(("127.0.0.1", int(sys.argv[2])))
end.settimeout(30)
end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

def talk():
    for _ in range(200):
        if sys.argv[1] == "client":
            end.sendall(b"x")
        assert end.recv(1) == b"x"
        if sys.argv[1] == "server":
            end.sendall(b"x")
        else:
            time.sleep(0.001)

talk()
if sys.argv[1] == "client":
    print("on", flush=True)
    sys.stdin.readline()
    # Only TCP can honour this.
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 2)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
talk()
if sys.argv[1] == "client":
    print("off", flush=True)
    sys.stdin.readline()
talk()
if sys.argv[1] == "client":
    print("still off", flush=True)
    sys.stdin.readline()
else:
    assert end.recv(1) == b""
'''


def test_reason_of_either_end(eager):
    """On RMBs there is none; when one end needs TCP, it says why, and the other that the peer asked for it."""
    server = eager.start([sys.executable, "-c", PEER, "server"])
    client = eager.start([sys.executable, "-c", PEER, "client", server.wait_line("port ")], stdin=-1)
    client.wait_line("on")
    if not eager.not_asserted("carriers and reasons"):
        eager.wait_rmb()
        assert {c.get("reason") for c in connections(eager.status())} == {None}
    for line in ("off", "still off"):
        client.child.stdin.write(b"\n")
        client.child.stdin.flush()
        client.wait_line(line)
        if not eager.not_asserted("carriers and reasons"):
            wanted = {"unsupported-option", "peer-request"}
            wait_until(lambda: {c.get("reason") for c in connections(eager.status())} == wanted, 10,
                       lambda: f"reasons {wanted}: {connections(eager.status())}")
    client.child.stdin.write(b"\n")
    client.child.stdin.flush()
    eager.finish(client, server)
