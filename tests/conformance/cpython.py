"""CPython's own tests, of Debian's libpython3.11-testsuite."""

import xml.etree.ElementTree

from .suite import Suite

# Those that use sockets, processes, descriptors or signals, and the seconds that each takes at most.
TESTS = {"test_socket": 300, "test_select": 60, "test_selectors": 120, "test_epoll": 60, "test_poll": 120, "test_asyncio": 600,
         "test_socketserver": 60, "test_asyncore": 60, "test_asynchat": 60, "test_ssl": 200, "test_ftplib": 100,
         "test_smtplib": 60, "test_smtpd": 60, "test_poplib": 100, "test_imaplib": 200, "test_httplib": 60,
         "test_httpservers": 60, "test_urllib2_localnet": 60, "test_xmlrpc": 150, "test_multiprocessing_spawn": 900,
         "test_multiprocessing_fork": 600, "test_multiprocessing_forkserver": 900, "test_subprocess": 200, "test_os": 100,
         "test_signal": 250, "test_threading": 150, "test_fork1": 100, "test_logging": 150, "test_io": 300, "test_mmap": 60,
         "test_posix": 60}
# These have no TCP connections, or none with both ends in processes that live long enough.
NO_BYTES = {"test_select", "test_poll", "test_subprocess", "test_signal", "test_threading", "test_fork1", "test_io", "test_mmap",
            "test_posix", "test_smtpd", "test_multiprocessing_spawn", "test_multiprocessing_fork",
            "test_multiprocessing_forkserver", "test_asyncore", "test_httplib", "test_os", "test_selectors", "test_epoll"}


def suites():
    return [Suite(name, lambda way, name=name, limit=limit: run(way, name, limit), ("libpython3.11-testsuite",),
                  name not in NO_BYTES, limit // 3) for name, limit in TESTS.items()]


def run(way, name, limit):
    """The outcome of each test. The VSOCK ones hang, plain as well, where the kernel has no loopback for them."""
    report = way.directory / "report.xml"
    status, output = way.command(["/usr/bin/python3", "-m", "test", "-u", "network", "-i", "*VSOCK*", "--junit-xml", report, name],
                                 limit)
    if status is None:
        return {"in time": "failed"}
    if not report.exists():
        raise RuntimeError(f"no report: {output[-2000:]}")
    outcomes = {}
    for case in xml.etree.ElementTree.parse(report).getroot().iter("testcase"):
        failed = case.find("failure") is not None or case.find("error") is not None
        skipped = case.get("result") == "skipped" or case.find("skipped") is not None
        # Some tests run several times under one name.
        name, times = case.get("name"), 1
        while f"{name} #{times}" in outcomes:
            times += 1
        outcomes[f"{name} #{times}"] = "failed" if failed else "skipped" if skipped else "passed"
    outcomes["exit status"] = "passed" if status == 0 else "failed"
    return outcomes
