"""Shells in both guests for a person at a terminal."""

import contextlib
import os
import select
import termios
import tty

from .pair import ROLES, Pair

SWITCH = b"\x1d"  # Ctrl-]


def shell(*, out, nics=1, cold=False, pcap=None, ueid="XSMC-TEST"):
    """Connects the terminal to a shell in one guest; Ctrl-] changes to the other. The end of either shell ends both."""
    with Pair(out, nics, cold, pcap) as pair:
        pair.start(ueid=ueid, interactive=1)
        terminals = {role: pair.machines[role].terminal() for role in ROLES}
        try:
            with _raw_terminal():
                _talk(pair, terminals)
        finally:
            for terminal in terminals.values():
                terminal.close()


@contextlib.contextmanager
def _raw_terminal():
    if not os.isatty(0):
        yield
        return
    before = termios.tcgetattr(0)
    tty.setraw(0)
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


def _say(text):
    os.write(1, f"\r\n[lab: {text}]\r\n".encode())


def _talk(pair, terminals):
    current, other = ROLES
    kept = {role: b"" for role in ROLES}  # what the guest in the background printed
    _say(f"{current}; Ctrl-] changes to the {other}, `exit` ends the lab; $OUT is {pair.out}")
    sources = [0, *terminals.values()]
    while not any((pair.out / role / "status").exists() for role in ROLES):
        pair.serve()
        for source in select.select(sources, [], [], 0.05)[0]:
            if source == 0:
                typed = os.read(0, 4096)
                if not typed:
                    sources.remove(0)
                before, switch, after = typed.partition(SWITCH)
                terminals[current].sendall(before)
                if switch:
                    current, other = other, current
                    _say(current)
                    os.write(1, kept[current])
                    kept[current] = b""
                    terminals[current].sendall(after)
                continue
            role = next(role for role in ROLES if terminals[role] is source)
            printed = source.recv(4096)
            if not printed:
                sources.remove(source)
                _say(f"the {role} is gone")
            elif role == current:
                os.write(1, printed)
            else:
                kept[role] = (kept[role] + printed)[-65536:]
