"""The two processes of a check: `runner.py here MODULE FUNCTION` and `runner.py peer MODULE`.

Their standard input and output are connected crosswise by pipes and carry pickled commands and answers, so that neither
holds other descriptors than the check's own. Output of the check goes to standard error.
"""

import ast
import faulthandler
import importlib.util
import os
import pickle
import sys
import time
import traceback

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.dirname(HERE)]
sys.path = [entry for entry in sys.path if os.path.abspath(entry or ".") != HERE]

from harness import net  # noqa: E402  (needs the path)


def _send(message):
    data = pickle.dumps(message)
    data = len(data).to_bytes(4, "little") + data
    while data:
        data = data[os.write(1, data):]


def _read(size):
    data = b""
    while len(data) < size:
        part = os.read(0, size - len(data))
        if not part:
            return None
        data += part
    return data


def _receive():
    head = _read(4)
    data = head and _read(int.from_bytes(head, "little"))
    return pickle.loads(data) if data else None


def load(path):
    """The module in a file."""
    spec = importlib.util.spec_from_file_location(os.path.basename(path)[:-3], path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class Check:
    """What a check gets as `t`."""

    def __init__(self):
        self.mode = os.environ["CHECK_MODE"]
        self.both = self.mode == "both"
        self.here_loaded = self.mode in ("both", "local")
        self.peer_loaded = self.mode in ("both", "peer")
        self.loaded = self.mode != "plain"
        self.seconds = float(os.environ["CHECK_SECONDS"])
        self.scale = float(os.environ["XSMC_TEST_SCALE"])
        self._number = 0
        self._open = 0

    def start(self, code, **values):
        """Lets the peer execute a snippet; join() waits for it. The peer does one after another."""
        _send((code, values))
        self._open += 1

    def join(self):
        """The value of the oldest snippet that was started and not joined; its error is raised here."""
        self._open -= 1
        answer = _receive()
        assert answer is not None, "the peer process has ended"
        good, value = answer
        assert good, f"in the peer:\n{value}"
        return value

    def peer(self, code, **values):
        """Executes a snippet in the peer and gives its value."""
        while self._open:
            self.join()
        self.start(code, **values)
        return self.join()

    def kill_peer(self, number=9):
        os.kill(self.peer("os.getpid()"), number)

    def pair(self, name="c", warm=True, listener="peer"):
        """A connection: gives this end, the peer's end gets the name. `listener`: which side listens ("here" or "peer").

        With `warm`, bytes are exchanged; in mode "both" until both directions ride RMBs.
        """
        self._number += 1
        if listener == "peer":
            sock = net.connect(self.peer("warm_l = listen()\nwarm_l.getsockname()"))
            self.peer(f"{name} = warm_l.accept()[0]\nwarm_l.close()")
        else:
            with net.listen() as local:
                self.peer(f"{name} = connect(address)", address=local.getsockname())
                sock = local.accept()[0]
        if warm:
            self.warm(sock, name)
        return sock

    def warm(self, sock, name):
        """Warms up a connection whose far end the peer knows by this name. Both ends must be blocking."""
        self._until_rmb(sock, lambda: self.start(f"warm_echo({name})"), self.join)

    def pair_here(self, warm=True):
        """A connection with both ends in this process: (connecting end, accepted end)."""
        with net.listen() as listener:
            one = net.connect(listener.getsockname())
            two = listener.accept()[0]
        if warm:
            thread = []
            self._until_rmb(one, lambda: thread.append(net.bg(net.warm_echo, two)), lambda: thread.pop().join(), "local")
        return one, two

    def _until_rmb(self, sock, start, join, *more):
        end = time.monotonic() + 8
        known = None
        while True:
            start()
            net.warm_exchange(sock, 40)
            join()
            if not (self.both or (more and self.here_loaded)):
                return
            known = net.carriers(sock)
            if known and known[:2] == ("rmb", "rmb"):
                return
            assert time.monotonic() < end, f"the connection was not upgraded within 8 s: (tx, rx, reason) {known}"
            time.sleep(0.01)

    def on_rmb(self, sock):
        """Whether both directions ride RMBs now."""
        known = net.carriers(sock)
        return bool(known) and known[:2] == ("rmb", "rmb")

    def skip(self, why):
        raise net.Skip(why)


def serve(module):
    """Executes the snippets that come, in the name space of a module, until there are no more."""
    space = module.__dict__
    space.update({key: value for key, value in net.__dict__.items() if not key.startswith("__")})
    while True:
        command = _receive()
        if command is None:
            return
        code, values = command
        try:
            space.update(values)
            tree = ast.parse(code)
            value = None
            if tree.body and isinstance(tree.body[-1], ast.Expr):
                last = ast.Expression(tree.body.pop().value)
                exec(compile(tree, "<peer>", "exec"), space)
                value = eval(compile(last, "<peer>", "eval"), space)
            else:
                exec(compile(tree, "<peer>", "exec"), space)
            try:
                answer = pickle.dumps((True, value))
            except Exception:
                answer = None
            _send((True, value if answer else repr(value)))
        except BaseException:
            _send((False, f"{traceback.format_exc()}in: {code}"))


def main():
    seconds = float(os.environ["CHECK_SECONDS"])
    faulthandler.enable()
    faulthandler.dump_traceback_later(seconds, exit=True)
    module = load(sys.argv[2])
    if sys.argv[1] == "peer":
        serve(module)
        return
    module.__dict__.update({key: value for key, value in net.__dict__.items() if not key.startswith("__")})
    try:
        module.__dict__[sys.argv[3]](Check())
    except net.Skip as why:
        print(f"skipped: {why}", file=sys.stderr)
        sys.exit(77)
    # Threads that a check has left behind must not keep the process.
    sys.stderr.flush()
    faulthandler.cancel_dump_traceback_later()
    sys.stdin.close()
    os._exit(0)


if __name__ == "__main__":
    main()
