"""Reading `smctl status --json`, and watching it while something runs.

The functions find the nodes (dicts with "connections" and "pid") wherever they are in the document.
"""

import threading
import time


def nodes(status):
    """All nodes of a status document."""
    if isinstance(status, list):
        return [node for entry in status for node in nodes(entry)]
    if isinstance(status, dict):
        if "connections" in status and "pid" in status:
            return [status]
        return [node for value in status.values() for node in nodes(value)]
    return []


def connections(status):
    return [connection for node in nodes(status) for connection in node["connections"]]


def rmb_bytes(status):
    """(bytes that went through RMBs, bytes that went over TCP), counted at every end that is in the document."""
    ways = [connection[way] for connection in connections(status) for way in ("tx", "rx")]
    return sum(way["bytes_rmb"] for way in ways), sum(way["bytes_tcp"] for way in ways)


def on_rmb(status):
    """Number of directions whose carrier is an RMB."""
    return sum(connection[way]["carrier"] == "rmb" for connection in connections(status) for way in ("tx", "rx"))


def reasons(status):
    """Fallback reasons of the connections and in the nodes' counters."""
    names = {connection.get("reason") for connection in connections(status)}
    names |= {entry["name"] for node in nodes(status) for entry in node.get("fallbacks", []) if entry.get("count")}
    return names - {None}


def find(status, local, peer):
    """The connection with these (host, port) addresses, or None."""
    for connection in connections(status):
        if _port(connection["local"]) == local[1] and _port(connection["peer"]) == peer[1]:
            return connection
    return None


def _port(address):
    return int(str(address).rsplit(":", 1)[1])


class Watch:
    """Reads the status again and again while a block runs, and keeps the most that was seen of each connection."""

    def __init__(self, read, every=0.1):
        self._read, self._every = read, every
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._bytes = {}
        self.most_on_rmb = 0
        self.reasons = set()
        self.upgrades = {}
        self._switches = {}
        self.programs = set()
        self.samples = 0
        self.error = None

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join(30)
        self._sample()

    def _run(self):
        while not self._stop.is_set():
            self._sample()
            self._stop.wait(self._every)

    def _sample(self):
        try:
            status = self._read()
        except Exception as error:  # shown by the assertion that misses its numbers
            self.error = error
            return
        self.samples += 1
        self.most_on_rmb = max(self.most_on_rmb, on_rmb(status))
        self.reasons |= reasons(status)
        for node in nodes(status):
            self.programs.add(node.get("program"))
            self.upgrades[node["node"]] = max(
                self.upgrades.get(node["node"], 0), node.get("counters", {}).get("upgrades", 0))
            for connection in node["connections"]:
                for way in ("tx", "rx"):
                    key = (node["node"], connection["local"], connection["peer"], way)
                    now = connection[way]
                    old = self._bytes.get(key, (0, 0))
                    self._switches[key] = max(self._switches.get(key, 0), now.get("switches", 0))
                    self._bytes[key] = (max(old[0], now["bytes_rmb"]), max(old[1], now["bytes_tcp"]))

    @property
    def rmb(self):
        """Bytes seen going through RMBs, at all ends."""
        return sum(pair[0] for pair in self._bytes.values())

    @property
    def tcp(self):
        """Bytes seen going over TCP, at all ends."""
        return sum(pair[1] for pair in self._bytes.values())

    @property
    def switches(self):
        """Changes of carrier seen, at all ends."""
        return sum(self._switches.values())

    def __str__(self):
        return (f"{self.samples} samples: {self.rmb} bytes by RMB, {self.tcp} by TCP, at most {self.most_on_rmb} directions "
                f"on RMBs, upgrades {sum(self.upgrades.values())}, switches {self.switches}, reasons {sorted(self.reasons)}, "
                f"programs {sorted(map(str, self.programs))}, last error {self.error}")


def wait_until(condition, seconds, what, every=0.02):
    """Polls until condition() is true and gives its value; fails after `seconds`."""
    end = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end, f"not within {seconds} s: {what() if callable(what) else what}"
        time.sleep(every)
