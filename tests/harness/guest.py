"""What runs in the guests for hosts.py: `guest.py MODULE FUNCTION...`, the same in both.

The client's guest forks a process for each function, and connects it to one that the server's guest forks at the same
time. The TCP connection between them carries the commands that runner.py describes.
"""

import faulthandler
import json
import os
import select
import socket
import subprocess
import sys
import time
import traceback

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.dirname(HERE)]
sys.path = [entry for entry in sys.path if os.path.abspath(entry or ".") != HERE]

from harness import hosts, net, runner  # noqa: E402  (needs the path)

OUT, OWN, PEER, OWN6, PEER6 = (os.environ[name] for name in ("OUT", "OWN", "PEER", "OWN6", "PEER6"))


class Check(runner.Check):
    """What a check gets as `t`."""

    def __init__(self, seconds, to_driver, from_driver):
        os.environ["CHECK_SECONDS"] = str(seconds)
        super().__init__()
        self._to_driver, self._from_driver = to_driver, from_driver

    def pair(self, name="c", family=socket.AF_INET, listener="peer", smc=True):
        """A connection between the hosts: gives this end, the peer's end gets the name. `smc`: it must be SMC-R."""
        here, there = (OWN, PEER) if family == socket.AF_INET else (OWN6, PEER6)
        if listener == "peer":
            port = self.peer("pair_l = listen(host=host, family=family)\npair_l.getsockname()[1]", host=there, family=family)
            self.start(f"{name} = pair_l.accept()[0]\npair_l.close()")
            sock = socket.create_connection((there, port))
            self.join()
        else:
            with net.listen(host=here, family=family) as local:
                self.start(f"{name} = socket.create_connection(address)", address=(here, local.getsockname()[1]))
                sock = local.accept()[0]
                self.join()
        if smc:
            self.smc(sock)
        return sock

    def kill_peer(self, number=9):
        self.start("os.kill(os.getpid(), number)", number=number)

    def smc(self, sock):
        """Waits until an accepted connection is SMC-R: accept may return before the handshake is over."""
        net.until(lambda: self.on_rmb(sock), 3, lambda: f"not SMC-R: (tx, rx, reason) {net.carriers(sock)}")

    def fault(self, *words):
        """Makes a fault (see scripts/lab), from a process that has no connections."""
        os.write(self._to_driver, json.dumps(words).encode() + b"\n")
        answer = os.read(self._from_driver, 4096).decode()
        assert answer == "ok", answer


def _child(control, function):
    """Forks a process whose standard input and output are the control connection, and runs the function in it."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.dup2(control.fileno(), 0)
        os.dup2(control.fileno(), 1)
        control.close()
        code = function()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _here(function, to_driver, from_driver, error):
    """Runs one check; the text of its failure goes to the descriptor `error`."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(function.seconds, exit=True)
    try:
        function(Check(function.seconds, to_driver, from_driver))
    except BaseException:
        os.write(error, traceback.format_exc().encode())
        return 1
    return 0


def _there(module, seconds):
    faulthandler.enable()
    faulthandler.dump_traceback_later(seconds, exit=True)
    runner.serve(module)
    return 0


def _driver(pid, requests, answers, seconds):
    """Waits for a check's process, and makes the faults that it asks for."""
    end = time.monotonic() + seconds + 2
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            return "no end"
        if select.select([requests], [], [], 0.02)[0] and (words := os.read(requests, 4096)):
            made = subprocess.run(["lab-fault", *json.loads(words)], stdin=subprocess.DEVNULL, capture_output=True, text=True)
            os.write(answers, (made.stderr or "ok").encode())


def client(module, names):
    for name in names:
        print(f"== {name}", file=sys.stderr)
        function = getattr(module, name)
        control = _connect(PEER)
        control.sendall(f"{name}\n".encode())
        requests, answers, errors = os.pipe(), os.pipe(), os.pipe()
        began = time.monotonic()
        pid = _child(control, lambda: _here(function, requests[1], answers[0], errors[1]))
        control.close()
        code = _driver(pid, requests[0], answers[1], function.seconds)
        os.close(errors[1])
        error = os.read(errors[0], 1 << 16).decode() or ("" if code == 0 else f"the process ended with {code}")
        for end in (*requests, *answers, errors[0]):
            os.close(end)
        with open(f"{OUT}/results", "a") as results:
            results.write(json.dumps({"name": name, "error": error, "seconds": time.monotonic() - began}) + "\n")
    # Not by a message: the last fault may have been the end of the link.
    open(f"{OUT}/finished", "w").close()


def _connect(host):
    end = time.monotonic() + 15
    while True:
        try:
            return socket.create_connection((host, hosts.CONTROL_PORT))
        except ConnectionRefusedError:
            assert time.monotonic() < end
            time.sleep(0.05)


def server(module):
    listener = net.listen(host=OWN, port=hosts.CONTROL_PORT)
    while not os.path.exists(f"{OUT}/finished"):
        if not select.select([listener], [], [], 0.3)[0]:
            continue
        control = listener.accept()[0]
        name = b""
        while not name.endswith(b"\n"):
            name += control.recv(1)
        name = name.decode().strip()
        print(f"== {name}", file=sys.stderr)
        _child(control, lambda: (listener.close(), _there(module, getattr(module, name).seconds))[1])
        control.close()


def main():
    module = runner.load(sys.argv[1])
    names = {key: value for key, value in net.__dict__.items() if not key.startswith("__")}
    module.__dict__.update(names, OWN=OWN, PEER=PEER, OWN6=OWN6, PEER6=PEER6, OUT=OUT)
    if os.environ["ROLE"] == "server":
        server(module)
    else:
        client(module, sys.argv[2:])


main()
