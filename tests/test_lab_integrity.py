"""Every byte between two hosts arrives unchanged: messages of random size, and bulk both ways at once, over SMC-R."""

from harness import build, lab as two_hosts, settings


def test_messages_and_bulk(lab, tmp_path):
    program, ours = build.program("integrity"), two_hosts.ours(tmp_path, XSMC_LOG="info")
    messages, size = settings.scaled(150), settings.scaled(10_000_000)
    steps = [("pingpong", "block", f"--count {messages}"), ("pingpong", "epoll", f"--count {messages}"),
             ("pingpong", "vec", f"--count {messages}"), ("bulk", "block", f"--bytes {size}")]
    script = two_hosts.STEPS + f"{settings.SMCTL} enable >/dev/null || exit\n"
    for port, (mode, io, amount) in enumerate(steps, 7100):
        common = f"{ours} {program} {mode} --io {io} {amount} --port {port} --timeout 300"
        script += (f"step '{mode} {io}' {common} --role server --host $OWN"
                   f" -- retry {common} --role client --host $PEER\n")
    seconds = 60 + int(60 * settings.SCALE)
    result = lab.passes(script, script, timeout=seconds)
    for role, by_name in two_hosts.steps(result).items():
        for mode, io, _ in steps:
            step = by_name[f"{mode} {io}"]
            assert step.status == 0 and "\nok " in "\n" + step.output, (role, step.output)
            # All of it rode RDMA: packets carry at most 4 KiB.
            assert step.packets > 1000, (role, mode, io, step.packets)
