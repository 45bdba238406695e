//! Asks one node for its status over its socket.

use smc_core::observe::status::{NodeStatus, STATUS_QUERY};
use socket2::{Domain, SockAddr, Socket, Type};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long a node may be silent.
pub(super) const PATIENCE: Duration = Duration::from_secs(1);
/// How long a whole answer may take.
const ANSWER_MAX: Duration = Duration::from_secs(5);
/// Largest answer; some 100,000 connections.
const BYTES_MAX: usize = 64 << 20;
/// Largest single message; Unix sockets carry far less with default buffers.
const MESSAGE_MAX: usize = 1 << 20;

/// Why there is no status.
#[derive(Debug, thiserror::Error)]
pub(super) enum QueryError {
    /// Nobody listens there any more, or the socket is gone: no node, nothing to report.
    #[error("the node is gone")]
    Gone,
    #[error("can't connect: {0}{hint}", hint = if .0.kind() == io::ErrorKind::PermissionDenied {
        "; run smctl as the same user or as root" } else { "" })]
    Connect(io::Error),
    #[error("{by} does not answer within {PATIENCE:?}; it may be stopped, or short of CPU",
            by = process(.0))]
    Silent(Option<u32>),
    #[error("{by} closed the connection without an answer; it answers only its own user and root",
            by = process(.0))]
    Refused(Option<u32>),
    #[error("the connection broke: {1} ({by})", by = process(.0))]
    Broken(Option<u32>, io::Error),
    #[error("{by} sent no valid status: {1}; it may run another version of xsmc", by = process(.0))]
    Nonsense(Option<u32>, String),
}

impl QueryError {
    /// The process behind the socket, where known.
    pub(super) fn pid(&self) -> Option<u32> {
        match self {
            QueryError::Gone | QueryError::Connect(_) => None,
            QueryError::Silent(pid)
            | QueryError::Refused(pid)
            | QueryError::Broken(pid, _)
            | QueryError::Nonsense(pid, _) => *pid,
        }
    }
}

fn process(pid: &Option<u32>) -> String {
    pid.map_or("the process".into(), |pid| format!("process {pid}"))
}

/// Asks the node at `path`.
pub(super) fn query(path: &Path) -> Result<NodeStatus, QueryError> {
    let socket = connect(path)?;
    let pid = peer_pid(&socket);
    let answer = match exchange(&socket, pid) {
        // A process that ended meanwhile is no problem to report.
        Err(QueryError::Refused(_)) if matches!(connect(path), Err(QueryError::Gone)) => {
            return Err(QueryError::Gone);
        }
        answer => answer?,
    };
    let mut status: NodeStatus = serde_json::from_slice(&answer)
        .map_err(|e| QueryError::Nonsense(pid, format!("{e} ({} bytes)", answer.len())))?;
    status.connections.sort_by_key(|c| (c.fd, c.local));
    Ok(status)
}

fn connect(path: &Path) -> Result<Socket, QueryError> {
    let gone = |e: io::Error| match e.kind() {
        io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound => QueryError::Gone,
        // The queue of the listener is full and nobody accepts.
        io::ErrorKind::WouldBlock => QueryError::Silent(None),
        _ => QueryError::Connect(e),
    };
    let socket = Socket::new(Domain::UNIX, Type::SEQPACKET, None).map_err(QueryError::Connect)?;
    socket
        .set_write_timeout(Some(PATIENCE))
        .map_err(QueryError::Connect)?;
    let (address, _dir) = address(path).map_err(gone)?;
    socket.connect(&address).map_err(gone)?;
    Ok(socket)
}

/// The address of a socket file. A path that is too long for one goes by way of its directory,
/// which must stay open until the connection stands.
fn address(path: &Path) -> io::Result<(SockAddr, Option<File>)> {
    if let Ok(address) = SockAddr::unix(path) {
        return Ok((address, None));
    }
    let (Some(dir), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let dir = File::open(dir)?;
    let short = Path::new("/proc/self/fd")
        .join(dir.as_raw_fd().to_string())
        .join(name);
    Ok((SockAddr::unix(short)?, Some(dir)))
}

/// Sends the query and reads messages until the node closes.
fn exchange(socket: &Socket, pid: Option<u32>) -> Result<Vec<u8>, QueryError> {
    let broken = |e: io::Error| match e.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => QueryError::Silent(pid),
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => QueryError::Refused(pid),
        _ => QueryError::Broken(pid, e),
    };
    let end = Instant::now() + ANSWER_MAX;
    socket.send(STATUS_QUERY).map_err(broken)?;
    let mut answer = Vec::new();
    let mut message = vec![0; MESSAGE_MAX];
    loop {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(QueryError::Silent(pid));
        }
        socket
            .set_read_timeout(Some(left.min(PATIENCE)))
            .map_err(broken)?;
        let len = match (&mut &*socket).read(&mut message) {
            Ok(0) if answer.is_empty() => return Err(QueryError::Refused(pid)),
            Ok(0) => return Ok(answer),
            Ok(len) => len,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) => return Err(broken(e)),
        };
        answer.extend_from_slice(&message[..len]);
        if answer.len() > BYTES_MAX {
            return Err(QueryError::Nonsense(pid, "the answer has no end".into()));
        }
    }
}

/// The process that listens at the other end; `None` if it is in another pid namespace.
fn peer_pid(socket: &Socket) -> Option<u32> {
    let mut cred = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: `cred` and `len` are ours, and `len` tells the size of `cred`.
    let asked = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut cred).cast(),
            &raw mut len,
        )
    };
    (asked == 0 && cred.pid > 0).then_some(cred.pid as u32)
}

#[cfg(test)]
mod tests {
    use super::super::fake::{FakeNode, sample};
    use super::*;
    use std::fs;

    #[test]
    fn asks_and_gets_an_answer_in_pieces() {
        let dir = tempfile::tempdir().unwrap();
        let json = serde_json::to_vec(&sample(7)).unwrap();
        for piece in [1, 100, json.len()] {
            let path = dir.path().join(format!("node-{piece}.sock"));
            let pieces = json.chunks(piece).map(<[u8]>::to_vec).collect();
            let node = FakeNode::answering(&path, pieces);
            assert_eq!(query(&path).unwrap(), sample(7));
            node.join();
        }
    }

    #[test]
    fn stale_and_absent_sockets_are_gone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("node-1.sock");
        assert!(matches!(query(&path), Err(QueryError::Gone)));
        drop(FakeNode::listener(&path));
        assert!(path.exists());
        assert!(matches!(query(&path), Err(QueryError::Gone)));
    }

    #[test]
    fn a_stopped_node_is_given_up_in_time() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("node-1.sock");
        let _listener = FakeNode::listener(&path);
        let start = Instant::now();
        let error = query(&path).unwrap_err();
        assert!(start.elapsed() < PATIENCE * 3);
        assert_eq!(error.pid(), Some(std::process::id()));
        let expected = format!(
            "process {} does not answer within 1s; it may be stopped",
            std::process::id()
        );
        assert!(error.to_string().starts_with(&expected), "{error}");
    }

    #[test]
    fn a_full_queue_is_given_up_in_time() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("node-1.sock");
        let listener = FakeNode::listener(&path);
        listener.listen(0).unwrap();
        let waiting: Vec<_> = (0..64)
            .map_while(|_| {
                let socket = Socket::new(Domain::UNIX, Type::SEQPACKET, None).ok()?;
                socket.set_nonblocking(true).ok()?;
                socket
                    .connect(&SockAddr::unix(&path).ok()?)
                    .ok()
                    .map(|()| socket)
            })
            .collect();
        assert!(!waiting.is_empty());
        assert!(matches!(query(&path), Err(QueryError::Silent(None))));
    }

    #[test]
    fn nonsense_is_named() {
        let dir = tempfile::tempdir().unwrap();
        for (name, answer) in [("a", b"{\"version\":1}".to_vec()), ("b", b"\xff".to_vec())] {
            let path = dir.path().join(name);
            let node = FakeNode::answering(&path, vec![answer]);
            let error = query(&path).unwrap_err().to_string();
            assert!(error.contains("sent no valid status: "), "{error}");
            node.join();
        }
    }

    #[test]
    fn refusing_is_not_ending() {
        let dir = tempfile::tempdir().unwrap();
        for ends in [true, false] {
            let path = dir.path().join(ends.to_string());
            let listener = FakeNode::listener(&path);
            let node = std::thread::spawn(move || {
                let (client, _) = listener.accept().unwrap();
                let stays = (!ends).then_some(listener);
                drop(client);
                stays
            });
            let error = query(&path).unwrap_err();
            if ends {
                assert!(matches!(error, QueryError::Gone), "{error}");
            } else {
                let text = error.to_string();
                assert!(
                    text.contains("closed the connection without an answer"),
                    "{text}"
                );
            }
            node.join().unwrap();
        }
    }

    #[test]
    fn long_paths_work() {
        let dir = tempfile::tempdir().unwrap();
        let deep = dir.path().join("d".repeat(100)).join("e".repeat(100));
        fs::create_dir_all(&deep).unwrap();
        let short = dir.path().join("node-1.sock");
        let json = serde_json::to_vec(&sample(1)).unwrap();
        let node = FakeNode::answering(&short, vec![json]);
        let long = deep.join("node-1.sock");
        fs::rename(&short, &long).unwrap();
        assert_eq!(query(&long).unwrap(), sample(1));
        node.join();
        assert!(matches!(
            query(&deep.join("node-2.sock")),
            Err(QueryError::Gone)
        ));
    }
}
