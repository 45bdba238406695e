//! A victim process, and the questions it must always be able to answer.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

use smc_core::negotiate::{Endpoint, NodeId};
use smc_core::observe::Reason;
use smc_core::observe::status::{NodeStatus, STATUS_QUERY};

use crate::fake::{connect, echo_tcp};
use crate::link::{PATIENCE, until};
use crate::net;
use crate::rng::Rng;

/// A private runtime directory, removed with the value.
struct TempDir(PathBuf);

impl TempDir {
    fn new() -> TempDir {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let n = NUMBER.fetch_add(1, Relaxed);
        let name = format!("xsmc-hostile-{}-{n}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).expect("temporary directory");
        TempDir(path)
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Starts this test binary again in another role.
fn spawn(role: &str, runtime: &Path) -> Child {
    Command::new(std::env::current_exe().expect("own path"))
        .args(["another_role", "--exact", "--nocapture", "--test-threads=1"])
        .env(crate::victim::ROLE, role)
        .env("XSMC_RUNTIME_DIR", runtime)
        .env("XSMC_CONFIG", runtime.join("policy.toml"))
        .env("XSMC_UPGRADE", "eager")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("spawn")
}

/// See the module comment.
pub(crate) struct Victim {
    child: Child,
    out: BufReader<std::process::ChildStdout>,
    /// Ports: a blocking thread each connection, and one epoll loop.
    pub(crate) ports: [u16; 2],
    runtime: TempDir,
    /// The engine's socket.
    pub(crate) sock: PathBuf,
    pub(crate) id: NodeId,
    violations: u64,
    rng: Rng,
}

impl Victim {
    /// Starts one, and waits until its engine runs.
    pub(crate) fn start() -> Victim {
        let runtime = TempDir::new();
        std::fs::write(runtime.0.join("policy.toml"), "").expect("policy");
        let mut child = spawn("server", &runtime.0);
        let mut out = BufReader::new(child.stdout.take().expect("stdout"));
        let line = wait_line(&mut out, "READY ");
        let ports: Vec<u16> = line.split(' ').flat_map(str::parse).collect();
        let mut v = Victim {
            child,
            out,
            ports: [ports[0], ports[1]],
            runtime,
            sock: PathBuf::new(),
            id: NodeId::from_raw(1).expect("not 0"),
            violations: 0,
            rng: Rng::new(u64::from(ports[0])),
        };
        v.plain_echo(0);
        (v.id, v.sock) = until("the engine", || {
            std::fs::read_dir(v.dir()).ok()?.find_map(|f| {
                let path = f.ok()?.path();
                let name = path.file_name()?.to_str()?;
                let id = NodeId::parse(name.strip_prefix("node-")?.strip_suffix(".sock")?)?;
                net::connect(&path).is_ok().then_some((id, path))
            })
        });
        v
    }

    /// The runtime directory.
    pub(crate) fn dir(&self) -> &Path {
        &self.runtime.0
    }

    /// Its process id.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Panics if the process has ended.
    pub(crate) fn alive(&mut self) {
        if let Ok(Some(status)) = self.child.try_wait() {
            panic!("the victim died: {status}");
        }
    }

    /// Asks the engine for the status document.
    pub(crate) fn status(&mut self) -> NodeStatus {
        let start = Instant::now();
        let s = until("the engine to take a connection", || {
            net::connect(&self.sock).ok()
        });
        net::send(&s, STATUS_QUERY, &[]).expect("query");
        let mut text = Vec::new();
        loop {
            let left = PATIENCE.saturating_sub(start.elapsed());
            if !net::wait_readable(&s, left) {
                self.alive();
                panic!("no status within {PATIENCE:?}");
            }
            match net::recv(&s) {
                Ok(Some((piece, _))) => text.extend(piece),
                _ => break,
            }
        }
        self.alive();
        serde_json::from_slice(&text).expect("a status document")
    }

    /// Whether rules were broken since the last question.
    pub(crate) fn violated(&mut self) -> bool {
        let codes = [Reason::PeerViolation, Reason::Version].map(Reason::code);
        let list = self.status().fallbacks.into_iter();
        let now = list
            .filter(|r| codes.contains(&r.code))
            .map(|r| r.count)
            .sum();
        let before = std::mem::replace(&mut self.violations, now);
        now > before
    }

    /// A fresh TCP connection must work, whatever has happened to others.
    pub(crate) fn plain_echo(&mut self, which: usize) {
        let (mut tcp, _) = connect(self.ports[which]);
        let data = self.rng.bytes(1000);
        for part in data.chunks(400) {
            if let Err(e) = echo_tcp(&mut tcp, part) {
                self.alive();
                panic!("a fresh connection fails: {e}");
            }
        }
    }

    /// Mappings and descriptors.
    pub(crate) fn resources(&self) -> (usize, usize) {
        let proc = PathBuf::from(format!("/proc/{}", self.pid()));
        let maps = std::fs::read_to_string(proc.join("maps")).expect("maps");
        let fds = std::fs::read_dir(proc.join("fd")).expect("fd");
        (maps.lines().count(), fds.count())
    }

    /// CPU time used so far.
    pub(crate) fn cpu(&self) -> Duration {
        let (mut clock, mut t) = (
            0,
            libc::timespec {
                tv_sec: 0,
                tv_nsec: 0,
            },
        );
        // SAFETY: both calls write what they are given.
        unsafe {
            libc::clock_getcpuclockid(self.pid() as i32, &mut clock);
            libc::clock_gettime(clock, &mut t);
        }
        Duration::new(t.tv_sec as u64, t.tv_nsec as u32)
    }

    /// Panics if the process burns CPU while nobody asks it for anything.
    pub(crate) fn calm(&mut self) {
        let used = |ms: u64| {
            let before = self.cpu();
            std::thread::sleep(Duration::from_millis(ms));
            (self.cpu() - before).as_secs_f64() * 1000.0 / ms as f64
        };
        if used(12) > 0.5 {
            let share = used(400);
            assert!(share < 0.25, "the victim burns {:.0} % CPU", share * 100.0);
        }
        self.alive();
    }

    /// Waits until the victim has closed its end of the connection that is `end` for us. (By both ports: our own
    /// may be in use by somebody else, to another port of the victim.)
    pub(crate) fn gone(&mut self, end: &Endpoint) {
        let start = Instant::now();
        let ports = (end.peer_port, end.local_port);
        loop {
            let list = self.status().connections;
            let Some(c) = list
                .iter()
                .find(|c| (c.local.port(), c.peer.port()) == ports)
            else {
                return;
            };
            assert!(
                start.elapsed() < PATIENCE,
                "the victim still serves a dead connection: {c:?}"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Has the victim fork; how long that took.
    pub(crate) fn fork(&mut self) -> Duration {
        let stdin = self.child.stdin.as_mut().expect("stdin");
        writeln!(stdin, "fork").expect("stdin");
        let ms = wait_line(&mut self.out, "FORKED ");
        Duration::from_millis(ms.parse().expect("a number"))
    }

    /// Starts an honest client of one of the victim's ports.
    pub(crate) fn client(&self, which: usize) -> Client {
        let mut child = spawn(&format!("client {}", self.ports[which]), self.dir());
        let out = BufReader::new(child.stdout.take().expect("stdout"));
        Client { child, out }
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A well-behaved peer of the victim, which checks its streams.
pub(crate) struct Client {
    child: Child,
    out: BufReader<std::process::ChildStdout>,
}

impl Client {
    /// Waits for its end; how many echoes it had.
    pub(crate) fn finish(mut self) -> u64 {
        let n = wait_line(&mut self.out, "HONEST ");
        assert!(self.child.wait().expect("client").success());
        n.parse().expect("a number")
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The rest of the next line that begins with `start`.
fn wait_line(out: &mut impl BufRead, start: &str) -> String {
    let mut line = String::new();
    loop {
        line.clear();
        let n = out.read_line(&mut line).expect("a child's output");
        assert!(n > 0, "a child ended instead of saying {start}");
        if let Some(rest) = line.trim_end().strip_prefix(start) {
            return rest.to_owned();
        }
    }
}
