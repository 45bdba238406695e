"""Urgent data (MSG_OOB) between two hosts: with the kernel's SMC in both roles, and the same as TCP's between two of ours."""

import subprocess

from harness import build, capture, lab as two_hosts, settings

POLICY = '[smc-r]\\nueid = "XSMC-TEST"\\n[[rule]]\\naction = "smc"\\n'
SETUP = f"""
    {settings.SMCTL} enable >/dev/null || exit
    printf '{POLICY}' >/tmp/policy
    ours() {{ XSMC_CONFIG=/tmp/policy LD_PRELOAD={settings.LIBRARY} "$@"; }}
"""
LOOKS = """\
0: pri select1 epoll2 mark00 has2 'ab' mark11 has0 'X' 'X' EINVAL mark11 -+in select0 epoll0 'cd' mark00 signals1
1: pri+in 'e' EINVAL - signals1
2: 'fg' mark11 'hi' signals1
3: pri 1X! 'jkl' 'jkl' 'm' signals1
4: pri 'n' EINVAL mark11 'Xo' - mark00 signals1
5: 'p' EINVAL signals1
6: pri 'X' pri 'Y' 'q' signals2
7: 'r' 's' taken X signals1
8: 't' mark11 'X' '' EINVAL signals1
done
"""


def writes(pcap):
    """RDMA WRITE packets of the run: none if TCP carried the bytes."""
    counts = two_hosts.roce_opcodes(pcap)
    return sum(counts[opcode] for opcode in two_hosts.WRITES)


def test_tcp_looks_so():
    """What `urgent` says where TCP carries the bytes."""
    program = build.program("urgent")
    with subprocess.Popen([program, "serve", "7790"], stdout=subprocess.PIPE, text=True) as server:
        client = subprocess.run([program, "connect", "127.0.0.1", "7790"], stdout=subprocess.PIPE, text=True, check=False)
        assert (client.stdout, server.communicate()[0]) == (LOOKS, LOOKS)


def test_ours_as_tcp(lab):
    program = build.program("urgent")
    result = lab.passes(f"{SETUP} ours {program} serve 5000", f"{SETUP} ours {program} connect $PEER 5000", pcap=True)
    assert (result.server.output, result.client.output) == (LOOKS, LOOKS), result.report()
    assert writes(result.pcap) > 20


def test_with_the_kernel_in_both_roles(lab):
    program = two_hosts.peer()
    result = lab.passes(f"""{SETUP}
        ours {program} -f tcp -p 5001 serve urgent && {program} -p 5002 serve urgent
    """, f"""{SETUP}
        {program} -p 5001 connect $PEER urgent && ours {program} -f tcp -p 5002 connect $PEER urgent
    """, pcap=True)
    for end in (result.server, result.client):
        assert sorted(end.output.split("\n")) == ["", "done", "done", "path plain", "path smcr"], result.report()
    # The byte before the producer cursor is urgent; nothing follows until the receiver's cursor is behind it.
    messages = capture.Capture(result.pcap).cdc
    for port in (5001, 5002):
        said = [message for message in messages if message.port == port and not message.state & capture.ABORT]
        sent = [message for message in said if message.role == "client"]
        urgent = [message for message in sent if message.flags]
        assert [(message.producer, message.flags) for message in urgent] == [
            ((0, 3), capture.URGENT_PENDING | capture.URGENT)], said
        answers = [message for message in said if message.role == "server"]
        assert [message.consumer for message in answers] == [(0, 3), (0, 5)], said
        later = next(message for message in sent if message.producer > (0, 3))
        assert said.index(urgent[0]) < said.index(answers[0]) < said.index(later), said
