"""Clients that speak SMC-R over a queue pair and then break LLC or CDC, against rdma_victim.py's server under xsmc.

    rdma_clients.py HOST PORT OWN

Each case prints "ok NAME" or what went wrong, and before that "NAME: group N REASON" for each link group of the victim's that
it has ended, or made to end: by that the log of the victim must give the reason. After each case a well-behaved connection
to the same process must work, on a link that is there all the time.
"""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import rdma_cdc
import rdma_llc
from clc_hostile import AT_ONCE, report
from rdma_case import IGNORED, Case, Good


def run(function, address, own, good, shared=None):
    case = Case(function.__name__.removeprefix("client_"), address, own, shared)
    try:
        function(case)
    finally:
        case.close()
    good.works()


def run_all(names, cases, address, own, good):
    """One after the other, on one link."""
    owner = Case("shared", address, own)
    shared = owner.link()
    for name in names:
        report(name, run, cases[name], address, own, good, shared)
    owner.close()


def main(host, port, own):
    address = (host, int(port))
    cases = {name.partition("_")[2]: function for module in (rdma_llc, rdma_cdc) for name, function in vars(module).items()
             if name.startswith("client_")}
    if only := os.environ.get("ONLY"):
        cases = {name: cases[name] for name in only.split(",")}
    good = Good(address, own)
    good.works()
    # Floods leave nothing of the processor for others.
    last = [name for name in cases if "flood" in name]
    first = [name for name, function in cases.items() if function in IGNORED and name not in last]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        pool.submit(run_all, first, cases, address, own, good)
        # Those that wait come first.
        for name in sorted(cases.keys() - {*first, *last}, key=lambda name: "not_confirm" not in name):
            pool.submit(report, name, run, cases[name], address, own, good)
    for name in last:
        report(name, run, cases[name], address, own, good)
    report("quiet", quiet, Case("quiet", address, own))
    good.works()
    good.close()


def quiet(t):
    """With all of that over, the victim has nothing to do."""
    before = float(t.ask("usage")[0])
    time.sleep(2)
    used = float(t.ask("usage")[0]) - before
    assert used < 0.4, f"{used} s of CPU time in 2 s"


if __name__ == "__main__":
    main(*sys.argv[1:])
