"""Rust's libraries for asynchronous networking: tokio's own tests, and programs of ours on mio, tokio and hyper."""

import json
import re

from harness import settings

from .suite import Suite

PROGRAM = settings.TESTS / "programs" / "rust_net"
# The crate as it is published, and the other version of tokio in its lock file, that of the crates its tests use.
TOKIO, LOCKED = "1.54.1", "1.54.0"
# Those of its tests that are about sockets, readiness, signals, processes, and how the runtime waits.
TESTS = """
    buffered io_async_fd io_copy_bidirectional io_driver io_driver_drop io_split net_bind_resource net_lookup_host net_panic
    net_quickack net_unix_pipe process_arg0 process_change_of_runtime process_issue_2174 process_issue_42 process_issue_7144
    process_issue_8042 process_kill_after_wait process_kill_on_drop process_smoke rt_basic rt_busy_tick rt_common
    rt_handle_block_on rt_panic rt_shutdown_err rt_threaded signal_ctrl_c signal_drop_recv signal_drop_rt signal_drop_signal
    signal_multi_rt signal_no_rt signal_notify_both signal_panic signal_realtime signal_twice signal_usr1 task_blocking tcp_accept
    tcp_accept_ready tcp_connect tcp_echo tcp_into_split tcp_into_std tcp_peek tcp_shutdown tcp_socket tcp_split tcp_stream
    time_interval time_panic time_pause time_rt time_sleep time_timeout udp uds_cred uds_datagram uds_socket uds_split uds_stream
    unix_shutdown
""".split()
WORDS = {"ok": "passed", "FAILED": "failed", "ignored": "skipped"}

ECHOES = ("bulk", "select", "many", "abort")
CASES = {
    "mio": [*(f"{port}-{case}" for port in ("once", "anew") for case in ECHOES), "edges", "deregister", "until-would-block", "waker"],
    "tokio": [*(f"{port}-{case}" for port in ("echo", "proxy") for case in ECHOES), "other-runtime"],
    "hyper": ["http1-keep-alive", "http1-chunked", "http1-big", "http1-upgrade", "http1-graceful", "http2-streams", "http2-chunked",
              "http2-big", "http2-graceful"],
}


def suites():
    return [Suite("tokio", tokio, takes=120, build=build_tokio),
            *(Suite(f"rust-{library}", lambda way, library=library: program(way, library), takes=30, all_pass=True,
                    build=build_program) for library in CASES)]


def cargo(way, target, command, *words, **options):
    """Runs cargo, which makes debug builds without debug information; gives its output."""
    env = {"CARGO_TARGET_DIR": str(target), "CARGO_PROFILE_DEV_DEBUG": "0", "CARGO_INCREMENTAL": "0"}
    return way.run(["cargo", command, "--quiet", *words], 900, env=env, **options)


def build_tokio(way):
    """Gives its folder, and the programs of its tests by name."""
    (way.directory / "src").mkdir()
    (way.directory / "src" / "lib.rs").touch()
    (way.directory / "Cargo.toml").write_text(f'[package]\nname = "fetch"\n[dependencies]\ntokio = "={TOKIO}"\n')
    cargo(way, way.directory, "vendor")
    crate, target = way.directory / "vendor" / "tokio", way.directory / "target"
    with open(crate / "Cargo.toml", "a") as manifest:
        # The crates that its tests use must use it, too, and not another tokio.
        manifest.write('\n[workspace]\n[patch.crates-io]\ntokio = { path = "." }\n')
    cargo(way, target, "update", f"tokio@{LOCKED}", cwd=crate)
    tests = [word for name in TESTS for word in ("--test", name)]
    output = cargo(way, target, "test", "--no-run", "--locked", "--features", "full", "--message-format", "json", *tests, cwd=crate)
    messages = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    programs = {message["target"]["name"]: message["executable"] for message in messages if message.get("executable")}
    assert sorted(programs) == sorted(TESTS), f"built {sorted(programs)}"
    return crate, programs


def tokio(way):
    """The outcome of each test function, and the status of each program. As by cargo, they run in the crate's folder."""
    crate, programs = way.built
    for name, executable in programs.items():
        status, output = way.command([executable], 120, cwd=crate)
        for case, word in re.findall(r"^test (\S+)(?: - should panic)? \.\.\. (ok|FAILED|ignored)", output, re.MULTILINE):
            way.outcomes[f"{name}::{case}"] = WORDS[word]
        way.outcomes[f"{name}: exit status"] = "passed" if status == 0 else "failed"
        way.details[f"{name}: exit status"] = f"status {status}: {output[-1500:]}"
    return way.outcomes


def build_program(way):
    """It stays in the folder of the other builds, so that it is built once for all that use it."""
    target = settings.TARGET / "rust_net"
    cargo(way, target, "build", "--locked", "--manifest-path", PROGRAM / "Cargo.toml")
    return target / "debug" / "rust_net"


def program(way, library):
    server = way.start([way.built, library, "server"])
    ports = way.wait_line(server, "ports ").split()
    _, output = way.command([way.built, library, "client", *ports], 240)
    way.lines(output, CASES[library])
    way.case("server-lives", way.stop, server)
    return way.outcomes
