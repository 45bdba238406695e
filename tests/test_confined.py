"""Processes that put themselves under a seccomp filter which kills them for any system call but their own, as sshd does."""

import platform

import pytest


@pytest.mark.parametrize("mode", ["prctl", "all", "epoll", "fork"])
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the filter is written for x86_64")
def test_confined(xsmc, program, mode):
    """The conversation goes on, on TCP, and the reason is counted."""
    server = xsmc.start([program("confined"), "server", mode])
    client = xsmc.start([program("confined"), "client", server.wait_line("port ")])
    with xsmc.watch(0.03) as watch:
        xsmc.finish(client, server)
    assert "ok" in server.out and client.out == "ok\n"
    if not xsmc.not_asserted("bytes by RMB before, and why not after"):
        assert watch.rmb, f"no bytes went through RMBs: {watch}"
        totals = xsmc.status()["totals"][0]
        reasons = {entry["name"] for entry in totals["fallbacks"]}
        # A child that has had no upgrade yet has nowhere to count.
        assert "confined" in reasons or mode == "fork", totals
