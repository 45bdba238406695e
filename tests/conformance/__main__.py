"""The command behind scripts/conformance."""

import argparse
import fnmatch
import json
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

# ruff: noqa: E402  (they need the path)
from conformance import cpython, databases, left_on_tcp, runtimes, rust, servers, stress, suite, tools, transfers

DOMAINS = (cpython, stress, runtimes, rust, servers, transfers, databases, tools, left_on_tcp)
SUITES = [s for domain in DOMAINS for s in domain.suites()]


def arguments():
    parser = argparse.ArgumentParser(prog="scripts/conformance", description="Runs other people's test suites and programs plain "
                                     "and under xsmc, and compares. Exit status 1: something differs, or no byte went by RMB "
                                     "where some should.")
    parser.add_argument("--json", action="store_true", help="print the results as JSON, on standard output")
    parser.add_argument("--list", action="store_true", help="print names and about how many seconds each takes, and end")
    parser.add_argument("--packages", action="store_true", help="print the Debian packages that are needed, and end")
    parser.add_argument("--keep", metavar="DIR", help="leave logs and reports in this directory")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these; * and ? match as in file names")
    return parser.parse_args()


def main():
    asked = arguments()
    chosen = [s for s in SUITES if not asked.names or any(fnmatch.fnmatch(s.name, name) for name in asked.names)]
    if not chosen:
        sys.exit(f"scripts/conformance: no suite is named {' or '.join(asked.names)}; --list shows all")
    if asked.list:
        for s in chosen:
            print(f"{s.takes:5} s  {s.name}")
        return 0
    if asked.packages:
        for package in sorted({package for s in chosen for package in s.packages}):
            print(package)
        return 0
    results = []
    print(f"{'SUITE':32} {'PLAIN':>16} {'XSMC':>16} {'SECONDS':>13} {'BY RMB':>14}   (passed/failed/skipped)", file=sys.stderr)
    for s in chosen:
        print(f"{s.name:32} ", end="", file=sys.stderr, flush=True)
        result = suite.run(s, asked.keep)
        if differing := result.differences():
            print(f"differs in {len(differing)}, once more\n{s.name:32} ", end="", file=sys.stderr, flush=True)
            result = suite.run(s, asked.keep)
        results.append(result)
        ways = ["/".join(str(n) for n in suite.count(outcomes).values()) for outcomes in (result.plain, result.xsmc)]
        seconds = "/".join(f"{n:g}" for n in result.seconds.values())
        print(f"{ways[0]:>16} {ways[1]:>16} {seconds:>13} {result.rmb_bytes:>14}   {result.problem() or 'ok'}", file=sys.stderr,
              flush=True)
    bad = [result.name for result in results if result.problem()]
    print(f"{len(results) - len(bad)} of {len(results)} suites are the same under xsmc as plain"
          + (f"; not {', '.join(bad)}" if bad else ""), file=sys.stderr)
    if asked.json:
        json.dump({"suites": [result.as_json() for result in results]}, sys.stdout, indent=2)
        print()
    return 1 if bad else 0


sys.exit(main())
