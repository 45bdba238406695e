"""What is true of each connection and each process, whatever the carrier."""

import dataclasses

IN_FLIGHT = 60_000  # most bytes that are sent without being received: TCP's own buffers hold them


@dataclasses.dataclass
class Process:
    """An actor as its master sees it."""

    number: int
    pid: int
    control: object
    loaded: bool
    address: list = None  # of its listener
    ends: set = dataclasses.field(default_factory=set)

    def __hash__(self):
        return self.number


@dataclasses.dataclass
class End:
    """One end of a connection; `owner` None: it has been closed."""

    name: str
    owner: Process
    key: int  # of what it sends
    sent: int = 0
    received: int = 0  # of what the other has sent
    finished: bool = False  # has sent its FIN
    seen_end: bool = False  # has read the other's
    reset: bool = False  # what comes next need not be complete
    other: "End" = None

    @property
    def open(self):
        return self.owner is not None

    @property
    def unread(self):
        """Bytes that wait for this end."""
        return self.other.sent - self.received

    @property
    def may_send(self):
        return self.open and self.other.open and not self.finished and not self.reset

    @property
    def ends_after(self):
        """Whether the end of the stream follows what is unread."""
        return self.other.finished or not self.other.open

    def move(self, to):
        self.owner.ends.discard(self)
        self.owner = to
        if to:
            to.ends.add(self)

    def gone(self, abrupt):
        """This end is closed, or its process was killed. The other gets a reset if bytes were unread, or if asked for."""
        if abrupt or self.unread:
            self.other.reset = True
        self.move(None)

    def __hash__(self):
        return hash(self.name)

    def __str__(self):
        state = "open" if self.open else "closed"
        extra = [word for word in ("finished", "seen_end", "reset") if getattr(self, word)]
        return f"{self.name} {state} sent {self.sent} received {self.received} {' '.join(extra)}"


def connection(number, owner, other):
    a = End(f"c{number}a", owner, 2 * number)
    b = End(f"c{number}b", other, 2 * number + 1)
    a.other, b.other = b, a
    owner.ends.add(a)
    other.ends.add(b)
    return a
