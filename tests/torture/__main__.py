"""The command behind scripts/torture: chooses what is done, has it done, and holds every answer against the model.

Things are chosen in rounds, each from the seed and the model alone, so that a seed brings the same rounds again. Within a
round processes act at the same time.
"""

import argparse
import json
import os
import pathlib
import random
import resource
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from harness import settings  # noqa: E402  (needs the path)
from torture import model  # noqa: E402

ACTOR = pathlib.Path(__file__).with_name("actor.py")
PYTHON = "/usr/bin/python3"
PATIENCE = 40  # seconds for an answer; the calls themselves give up after less


class Mismatch(Exception):
    """The processes are not as the model says."""


class Master:
    def __init__(self, seed, flip_us, directory):
        self.rng, self.flip_us, self.directory = random.Random(seed), flip_us, directory
        self.runtime = directory / "runtime"
        self.runtime.mkdir()
        self.processes, self.connections, self.number, self.rounds = [], [], 0, 0
        self.history, self.done = [], {}
        self.child_of = {}
        self.log = open(directory / "actors.log", "wb")

    # --- talking to processes

    def spawn(self):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        loaded = self.rng.random() < 0.85
        env = {key: value for key, value in os.environ.items() if key == "XSMC_LOG" or not key.startswith(("XSMC_", "LD_PRELOAD"))}
        env |= {"XSMC_RUNTIME_DIR": str(self.runtime), "XSMC_UPGRADE": self.rng.choice(("eager", "eager", "default")),
                "XSMC_TEST_FLIP_US": str(self.rng.choice((0, self.flip_us))), "TORTURE_LIBRARY": str(settings.LIBRARY)}
        if loaded:
            env["LD_PRELOAD"] = str(settings.LIBRARY)
        child = subprocess.Popen([PYTHON, "-B", str(ACTOR), str(theirs.fileno())], env=env, pass_fds=[theirs.fileno()],
                                 stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)
        theirs.close()
        process = self.enter(child.pid, ours, loaded)
        self.child_of[process] = child
        return process

    def enter(self, pid, control, loaded):
        self.number += 1
        control.settimeout(PATIENCE)
        process = model.Process(self.number, pid, control, loaded)
        self.processes.append(process)
        return process

    def say(self, process, do, fds=(), **arguments):
        self.history.append(f"{self.rounds}: p{process.number} {do} {arguments}")
        message = [json.dumps({"do": do, **arguments}).encode()]
        if fds:
            socket.send_fds(process.control, message, list(fds))
        else:
            process.control.send(message[0])

    def answer(self, process):
        try:
            message, fds, _, _ = socket.recv_fds(process.control, 65536, 4)
        except TimeoutError:
            raise Mismatch(f"p{process.number} (pid {process.pid}) hangs") from None
        except ConnectionError:
            message, fds = b"", []
        if not message:
            raise Mismatch(f"p{process.number} (pid {process.pid}) is gone")
        answer = json.loads(message)
        if "wrong" in answer:
            raise Mismatch(f"p{process.number}: {answer['wrong']}")
        return (answer, fds) if fds else answer

    def ask(self, process, do, **arguments):
        self.say(process, do, **arguments)
        return self.answer(process)

    def together(self, commands):
        """Runs tasks (generators that yield when they wait for a process) side by side, until all are done."""
        with selectors.DefaultSelector() as selector:
            for task in commands:
                self.advance(selector, task, None)
            while selector.get_map():
                events = selector.select(PATIENCE)
                if not events:
                    waiting = [key.data[0].number for key in selector.get_map().values()]
                    raise Mismatch(f"no answer from processes {waiting} in {PATIENCE} s")
                for key, _ in events:
                    selector.unregister(key.fileobj)
                    process, task = key.data
                    self.advance(selector, task, self.answer(process))

    @staticmethod
    def advance(selector, task, value):
        try:
            process = task.send(value)
        except StopIteration:
            return
        selector.register(process.control, selectors.EVENT_READ, (process, task))

    # --- what is done; each gives its tasks, and says which processes it needs

    def do_connect(self, free):
        client, server = self.rng.choice(free), self.rng.choice(free)
        if len(self.connections) > 60:
            return [], []
        self.number += 1
        a = model.connection(self.number, client, server)
        late = self.rng.random() < 0.3

        def task():
            if not server.address:
                self.say(server, "listen")
                server.address = (yield server)["address"]
            self.say(client, "connect", end=a.name, address=server.address, late=late)
            port = (yield client).get("port")
            self.say(server, "accept", end=a.other.name)
            self.expect((yield server).get("port") == port, "another connection was accepted")
            self.connections.append(a)
        return [task()], {client, server}

    def do_transfer(self, free):
        """One end sends while the other receives; where one process has both, one after the other."""
        end = self.pick(free, lambda e: e.may_send and e.other.owner in free)
        if not end:
            return [], []
        same = end.owner is end.other.owner
        most = model.IN_FLIGHT - end.other.unread if same else 400_000
        size = min(most, int(2 ** self.rng.uniform(0, 18.5)))
        if size <= 0:
            return [], []
        return [*self.sending(end, size, wait=same), *([] if same else self.receiving(end.other, end.other.unread + size))], \
            {end.owner, end.other.owner}

    def do_push(self, free):
        end = self.pick(free, lambda e: e.may_send and e.other.unread < model.IN_FLIGHT)
        if not end:
            return [], []
        size = min(model.IN_FLIGHT - end.other.unread, int(2 ** self.rng.uniform(0, 15.5)))
        return self.sending(end, size), {end.owner}

    def do_pull(self, free):
        end = self.pick(free, lambda e: e.unread and not e.reset)
        if not end:
            return [], []
        return self.receiving(end, self.rng.choice((end.unread, self.rng.randint(1, end.unread)))), {end.owner}

    def do_drain(self, free):
        """Everything that is left, and the end."""
        end = self.pick(free, lambda e: e.ends_after and not e.seen_end)
        if not end:
            return [], []
        return [self.draining(end)], {end.owner}

    def do_look(self, free):
        """Readiness, as the model has it."""
        end = self.pick(free, lambda e: not e.reset and not e.other.reset and (not e.other.open or e.other.owner in free))
        if not end:
            return [], []
        expected = bool(end.unread or end.ends_after)

        def task():
            self.say(end.owner, "readable", end=end.name, seconds=5 if expected else 0.02)
            answers = yield end.owner
            self.expect(all(said == expected for said in answers.values()), f"{end}: readable {expected}, but {answers}")
        return [task()], {end.owner, end.other.owner}

    def do_shutdown(self, free):
        end = self.pick(free, lambda e: e.may_send)
        if not end or self.rng.random() < 0.5:
            return [], []

        def task():
            self.say(end.owner, "shutdown", end=end.name)
            self.expect(not (yield end.owner).get("error"), f"{end}: shutdown failed")
            end.finished = True
        return [task()], {end.owner}

    def do_close(self, free):
        return self.ending(free, "close", False)

    def do_abort(self, free):
        return self.ending(free, "abort", True)

    def do_dup(self, free):
        end = self.pick(free, lambda e: True)
        if not end:
            return [], []

        def task():
            self.say(end.owner, "dup", end=end.name)
            yield end.owner
        return [task()], {end.owner}

    def do_pass(self, free):
        """By SCM_RIGHTS, through this process."""
        end, to = self.pick(free, lambda e: self.movable(e, free)), self.rng.choice(free)
        if not end or to is end.owner:
            return [], []

        def task(giver):
            self.say(giver, "give", end=end.name)
            _, fds = yield giver
            self.say(to, "take", fds=fds, end=end.name)
            os.close(fds[0])
            yield to
            end.move(to)
        return [task(end.owner)], {end.owner, end.other.owner, to}

    def do_fork(self, free):
        parent = self.rng.choice(free)
        if len(self.processes) >= 10:
            return [], []
        moved = [end for end in sorted(parent.ends, key=lambda e: e.name) if self.movable(end, free) and self.rng.random() < 0.5]

        def task():
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.say(parent, "fork", fds=[theirs.fileno()], moved=[end.name for end in moved])
            theirs.close()
            yield parent
            child = self.enter(0, ours, parent.loaded)
            child.pid = (yield child)["pid"]
            for end in moved:
                end.move(child)
        return [task()], {parent, *(end.other.owner for end in moved)}

    def do_exec(self, free):
        process, loaded = self.rng.choice(free), self.rng.random() < 0.85
        if not all(self.movable(end, free) for end in process.ends):
            return [], []

        def task():
            self.say(process, "exec", loaded=loaded)
            yield process
            process.loaded, process.address = loaded, None
            self.say(process, "count")
            yield process
        return [task()], {process, *(end.other.owner for end in process.ends)}

    def do_kill(self, free):
        if len(self.processes) < 5 or len(free) < len(self.processes):
            return [], []
        process = self.rng.choice(free)
        self.history.append(f"{self.rounds}: p{process.number} is killed")
        os.kill(process.pid, signal.SIGKILL)
        self.forget(process)
        for end in list(process.ends):
            end.gone(False)
        return [], set(free)

    def do_count(self, free):
        process = self.rng.choice(free)

        def task():
            expected = 4 + len(process.ends) + bool(process.address)
            for _ in range(20):
                # The library's own have a low number for a moment when they are made.
                self.say(process, "count")
                found = (yield process)["descriptors"]
                if found == expected:
                    break
                time.sleep(0.05)
            self.expect(found == expected, f"p{process.number} has {found} descriptors, not {expected}")
        return [task()], {process}

    # --- parts of the above

    def movable(self, end, free):
        """Whether another process image may get this end, while nothing happens to the other. Unread bytes in an RMB can't go back
        to TCP if others, or a FIN, are behind them there, as when carriers are changed by force: such a connection is reset (see
        README)."""
        if end.other.open and end.other.owner not in free:
            return False
        return not end.unread or end.reset or not (self.flip_us or end.ends_after)

    def pick(self, free, which):
        ends = [end for a in self.connections for end in (a, a.other) if end.open and end.owner in free and which(end)]
        return self.rng.choice(ends) if ends else None

    @staticmethod
    def expect(true, what):
        if not true:
            raise Mismatch(what)

    def sending(self, end, size, wait=False):
        seed = self.rng.randrange(1 << 30)

        def task():
            self.say(end.owner, "send", end=end.name, key=end.key, offset=end.sent, size=size, seed=seed)
            answer = yield end.owner
            self.expect(answer == {"bytes": size}, f"{end}: of {size} bytes sent: {answer}")
            end.sent += size
            if wait:
                yield from self.receiving(end.other, end.other.unread)[0]
        return [task()]

    def receiving(self, end, size):
        seed = self.rng.randrange(1 << 30)

        def task():
            self.say(end.owner, "recv", end=end.name, key=end.other.key, offset=end.received, size=size, seed=seed,
                     until_end=False)
            answer = yield end.owner
            self.expect(answer == {"bytes": size}, f"{end}: of {size} bytes received: {answer}")
            end.received += size
        return [task()]

    def draining(self, end):
        seed, owner = self.rng.randrange(1 << 30), end.owner

        def task():
            self.say(owner, "recv", end=end.name, key=end.other.key, offset=end.received, size=end.unread, seed=seed,
                     until_end=True)
            answer = yield owner
            whole = {"bytes": end.unread, "end": True}
            if end.reset:
                good = answer["bytes"] <= end.unread and (answer.get("end") or answer.get("error") in ("ECONNRESET", "EPIPE"))
            else:
                good = answer == whole
            self.expect(good, f"{end}: {answer}, not {whole}")
            end.received += answer["bytes"]
            end.seen_end = True
            if end.reset or not end.other.open:
                self.say(owner, "close", end=end.name)
                yield owner
                end.move(None)
        return task()

    def ending(self, free, how, abrupt):
        end = self.pick(free, lambda e: not e.other.open or e.other.owner in free)
        if not end or self.rng.random() < 0.5:
            return [], []

        def task(owner):
            self.say(owner, how, end=end.name)
            yield owner
            end.gone(abrupt)
        return [task(end.owner)], {end.owner, end.other.owner}

    def forget(self, process):
        process.control.close()
        self.processes.remove(process)
        if child := self.child_of.pop(process, None):
            child.wait(10)

    # --- the whole

    WEIGHTS = {"transfer": 30, "push": 14, "pull": 14, "drain": 8, "look": 8, "connect": 9, "shutdown": 3, "close": 4, "abort": 2,
               "dup": 3, "pass": 4, "fork": 3, "exec": 5, "kill": 0.7, "count": 1}

    def round(self):
        self.rounds += 1
        while len(self.processes) < 4:
            self.spawn()
        if len(self.processes) < 8 and self.rng.random() < 0.03:
            self.spawn()
        free, tasks = list(self.processes), []
        for _ in range(6):
            if not free:
                break
            name = self.rng.choices(*zip(*self.WEIGHTS.items()))[0]
            more, used = getattr(self, f"do_{name}")(free)
            tasks += more
            if used:
                self.done[name] = self.done.get(name, 0) + 1
            free = [process for process in free if process not in used and process in self.processes]
        self.together(tasks)
        self.connections = [a for a in self.connections if a.open or a.other.open]

    def finish(self):
        """Ends everything in order; nothing may be left."""
        for a in list(self.connections):
            for end in (a, a.other):
                if end.open and not end.seen_end:
                    if not end.ends_after:
                        other = end.other
                        self.ask(other.owner, "shutdown", end=other.name)
                        other.finished = True
                    self.together([self.draining(end)])
        for process in self.processes:
            for end in sorted(process.ends, key=lambda e: e.name):
                self.ask(process, "close", end=end.name)
            process.ends.clear()
            self.together(self.do_count([process])[0])
        for process in list(self.processes):
            self.forget(process)
        deadline = time.monotonic() + 10
        while left := [name for name in os.listdir(self.runtime) if name.startswith("node-")]:
            # Those of killed processes are removed by the next that comes.
            if time.monotonic() > deadline:
                raise Mismatch(f"left in the runtime directory: {left}")
            self.spawn_and_use()
            time.sleep(0.2)

    def spawn_and_use(self):
        """A program that sweeps. It stays for a moment: one that exits while its engine starts leaves a file of its own."""
        code = ("import socket, time\nl = socket.create_server(('127.0.0.1', 0))\na = socket.create_connection(l.getsockname())\n"
                "b = l.accept()[0]\nfor _ in range(100):\n a.sendall(b'12345678')\n b.recv(8)\ntime.sleep(0.3)\n")
        env = os.environ | {"LD_PRELOAD": str(settings.LIBRARY), "XSMC_RUNTIME_DIR": str(self.runtime), "XSMC_UPGRADE": "eager"}
        subprocess.run([PYTHON, "-c", code], env=env, timeout=30, check=True)

    def kill_all(self):
        for process in self.processes:
            if process.pid:
                try:
                    os.kill(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        for child in self.child_of.values():
            child.wait(10)

    def describe(self):
        """For people who look for the defect: what was done last, and stacks."""
        for process in self.processes:
            try:
                os.kill(process.pid, signal.SIGUSR1)
            except (ProcessLookupError, PermissionError):
                pass
        time.sleep(0.5)
        lines = ["last commands:", *self.history[-80:], "connections:"]
        lines += [f"  {end} at p{end.owner.number if end.owner else '-'}" for a in self.connections for end in (a, a.other)]
        lines += ["processes:", *(f"  p{p.number} pid {p.pid} {'loaded' if p.loaded else 'plain'}" for p in self.processes)]
        lines += ["their output:", (self.directory / "actors.log").read_text(errors="replace")[-6000:]]
        lines += ["status:", self.status()]
        return "\n".join(lines)

    def status(self, *options):
        done = subprocess.run([str(settings.SMCTL), "status", "--runtime-dir", str(self.runtime), *options], check=False,
                              capture_output=True, text=True, timeout=30)
        return done.stdout + done.stderr


def main():
    parser = argparse.ArgumentParser(prog="scripts/torture", description="Has processes connect, send, fork, exec, pass "
                                     "descriptors, close, reset and be killed at random, while connections go to RMBs and back, "
                                     "and checks every byte, every end and every descriptor.")
    parser.add_argument("--minutes", type=float, default=1, help="how long (default 1)")
    parser.add_argument("--rounds", type=int, help="how many rounds instead")
    parser.add_argument("--seed", type=int, default=settings.SEED, help="of the choices (default: another one each time)")
    parser.add_argument("--flip-us", type=int, default=2000, help="how often carriers are changed, microseconds; 0: never")
    asked = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(20000, resource.getrlimit(resource.RLIMIT_NOFILE)[1]),) * 2)
    directory = pathlib.Path(tempfile.mkdtemp(prefix="xsmc-torture-"))
    master = Master(asked.seed, asked.flip_us, directory)
    began = told = time.monotonic()
    try:
        while (master.rounds < asked.rounds) if asked.rounds else (time.monotonic() - began < asked.minutes * 60):
            master.round()
            if time.monotonic() - told > 30:
                told = time.monotonic()
                print(f"{told - began:.0f} s, {master.rounds} rounds, {len(master.connections)} connections", file=sys.stderr, flush=True)
        master.finish()
    except (Mismatch, AssertionError, OSError, subprocess.SubprocessError) as failure:
        print(master.describe())
        print(f"FAILED in round {master.rounds}: {failure}")
        print(f"again: scripts/torture --seed {asked.seed} --rounds {master.rounds} --flip-us {asked.flip_us}", flush=True)
        return 1
    finally:
        totals = json.loads(master.status("--json")).get("totals") or [{}]
        master.kill_all()
        shutil.rmtree(directory, ignore_errors=True)
    counters = totals[0].get("counters", {})
    done = ", ".join(f"{count} {name}" for name, count in sorted(master.done.items()))
    print(f"ok: seed {asked.seed}, {master.rounds} rounds in {time.monotonic() - began:.0f} s: {done}; "
          f"{counters.get('rmb_received')} bytes by RMB, {counters.get('upgrades')} upgrades, "
          f"{counters.get('downgrades')} downgrades")
    return 0


sys.exit(main())
