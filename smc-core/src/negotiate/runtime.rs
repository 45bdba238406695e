//! The runtime directory, the files that stand for a live node, and the sweep of dead ones.
//!
//! | file           | content                                                                              |
//! |----------------|--------------------------------------------------------------------------------------|
//! | `node-<id>`    | text about the process; its write lock (OFD) is held as long as the node lives        |
//! | `node-<id>.sock` | the node's Unix socket; bound after the node file exists, removed before it          |
//! | `directory`    | table of endpoints                                                                   |
//! | `new-<id>`     | a file being made: created, locked, filled, then linked to its real name              |
//!
//! A file gets its real name only when it is locked. So a node file whose lock is free belongs to a dead node, for
//! ever, as ids aren't used twice. A `new-` file may be met in the moment between its creation and its lock; its
//! maker then finds the name gone when it wants to link it, and begins again.
//!
//! An OFD lock belongs to the open file description. A child by `fork` shares it and would keep its dead parent's
//! node alive: the child must close the inherited descriptor first of all. `exec` closes it by itself.
//!
//! Where the directory is and who may use it: all files in it belong to one user, as a process could be crashed by
//! another that truncates what it has mapped. A directory that several users may write (sticky, as `/tmp` is) is
//! used by way of a subdirectory for each user id.

use std::ffi::OsStr;
use std::fmt;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::num::NonZeroU64;
use std::os::fd::{IntoRawFd, RawFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::raw;

#[cfg(test)]
pub(super) mod tests;

/// The longest path, without its NUL, that fits in a `sockaddr_un`.
const SOCK_PATH_MAX: usize = 107;
const NODE: &str = "node-";
const NEW: &str = "new-";
const SOCK: &str = ".sock";

/// Why there is no usable runtime directory, or something in it can't be used.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    /// A system call failed.
    #[error("cannot {what} {}: {source}", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// On what.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The runtime directory can't be trusted or used.
    #[error("runtime directory {}: {why}", path.display())]
    Unusable {
        /// The directory.
        path: PathBuf,
        /// What is wrong with it.
        why: &'static str,
    },
    /// A Unix socket in the runtime directory would have too long a name.
    #[error("the path {} is too long for a Unix socket (limit {SOCK_PATH_MAX} bytes)", .0.display())]
    PathTooLong(PathBuf),
    /// The shared directory file exists and is no good.
    #[error("{}: {why}", path.display())]
    BadDirectory {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: &'static str,
    },
    /// The kernel gives no random numbers.
    #[error("no random number for a node id: {0}")]
    NoRandom(io::Error),
}

impl RuntimeError {
    pub(super) fn io(what: &'static str, path: &Path, source: io::Error) -> RuntimeError {
        RuntimeError::Io {
            what,
            path: path.to_owned(),
            source,
        }
    }

    fn unusable(path: &Path, why: &'static str) -> RuntimeError {
        RuntimeError::Unusable {
            path: path.to_owned(),
            why,
        }
    }
}

/// Names one node: non-zero, random, never used twice. Shown as 16 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(NonZeroU64);

impl NodeId {
    /// A new id.
    ///
    /// # Errors
    /// [`RuntimeError::NoRandom`] when `getrandom` is refused.
    pub fn random() -> Result<NodeId, RuntimeError> {
        loop {
            let value = raw::random_u64().map_err(|e| RuntimeError::NoRandom(e.into()))?;
            if let Some(id) = NodeId::from_raw(value) {
                return Ok(id);
            }
        }
    }

    /// The id of this number, unless that is 0.
    pub fn from_raw(value: u64) -> Option<NodeId> {
        NonZeroU64::new(value).map(NodeId)
    }

    /// The number.
    pub fn get(self) -> u64 {
        self.0.get()
    }

    /// Reads exactly what `Display` writes: 16 lower-case hexadecimal digits.
    pub fn parse(text: &str) -> Option<NodeId> {
        let digit = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
        let good = text.len() == 16 && text.bytes().all(digit);
        good.then(|| u64::from_str_radix(text, 16).ok())
            .flatten()
            .and_then(NodeId::from_raw)
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.get())
    }
}

impl fmt::Debug for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NodeId({self})")
    }
}

/// A runtime directory that has been checked: it is this user's own and nobody else may write in it.
#[derive(Clone, Debug)]
pub struct RuntimeDir {
    path: PathBuf,
}

impl RuntimeDir {
    /// Finds the runtime directory: `$XSMC_RUNTIME_DIR` (created if missing), else `/run/xsmc` if it exists and is
    /// ours to write, else `/dev/shm/xsmc-<euid>` (created if missing). The variable is ignored in a set-user-id
    /// program.
    ///
    /// # Errors
    /// [`RuntimeError::Unusable`] when the directory is writable by others, or belongs to somebody else;
    /// [`RuntimeError::Io`] when it can't be created or looked at.
    pub fn open() -> Result<RuntimeDir, RuntimeError> {
        let named = crate::env::get("XSMC_RUNTIME_DIR").filter(|name| !name.is_empty());
        RuntimeDir::choose(
            named.as_deref().filter(|_| !raw::secure_execution()),
            Path::new("/run/xsmc"),
            Path::new("/dev/shm"),
        )
    }

    /// Uses `path`, creating it (its parent must exist).
    ///
    /// # Errors
    /// As for [`RuntimeDir::open`].
    pub fn at(path: &Path) -> Result<RuntimeDir, RuntimeError> {
        make_dir(path)?;
        // Absolute, because the program may change its working directory.
        let path = fs::canonicalize(path).map_err(|e| RuntimeError::io("resolve", path, e))?;
        RuntimeDir::shared_or_own(&path)
    }

    fn choose(
        named: Option<&OsStr>,
        system: &Path,
        shm: &Path,
    ) -> Result<RuntimeDir, RuntimeError> {
        if let Some(named) = named {
            return RuntimeDir::at(Path::new(named));
        }
        if system.is_dir()
            && raw::can_write_in(system)
            && let Ok(dir) = RuntimeDir::shared_or_own(system)
        {
            return Ok(dir);
        }
        let path = shm.join(format!("xsmc-{}", raw::euid()));
        make_dir(&path)?;
        RuntimeDir::own(path)
    }

    /// `path` itself if it is ours alone, else our subdirectory of it if it is safe to have one.
    fn shared_or_own(path: &Path) -> Result<RuntimeDir, RuntimeError> {
        let meta = fs::metadata(path).map_err(|e| RuntimeError::io("stat", path, e))?;
        if !meta.is_dir() {
            return Err(RuntimeError::unusable(path, "it isn't a directory"));
        }
        let euid = raw::euid();
        let others_write = meta.mode() & 0o022 != 0;
        if meta.uid() == euid && !others_write {
            return RuntimeDir::own(path.to_owned());
        }
        if meta.uid() != euid && meta.uid() != 0 {
            return Err(RuntimeError::unusable(path, "it belongs to another user"));
        }
        if others_write && meta.mode() & libc::S_ISVTX == 0 {
            let why = "others may write in it (wanted: mode 0700, or the sticky bit)";
            return Err(RuntimeError::unusable(path, why));
        }
        let sub = path.join(euid.to_string());
        make_dir(&sub)?;
        RuntimeDir::own(sub)
    }

    fn own(path: PathBuf) -> Result<RuntimeDir, RuntimeError> {
        let meta = fs::symlink_metadata(&path).map_err(|e| RuntimeError::io("stat", &path, e))?;
        if meta.is_symlink() {
            return Err(RuntimeError::unusable(&path, "it is a symbolic link"));
        }
        if !meta.is_dir() {
            return Err(RuntimeError::unusable(&path, "it isn't a directory"));
        }
        if meta.uid() != raw::euid() {
            return Err(RuntimeError::unusable(&path, "it belongs to another user"));
        }
        if meta.mode() & 0o022 != 0 {
            return Err(RuntimeError::unusable(
                &path,
                "others may write in it (wanted: mode 0700)",
            ));
        }
        if !raw::can_write_in(&path) {
            return Err(RuntimeError::unusable(
                &path,
                "no permission to create files in it",
            ));
        }
        Ok(RuntimeDir { path })
    }

    /// The directory, absolute.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Path of a node's file.
    pub fn node_path(&self, id: NodeId) -> PathBuf {
        self.file(&format!("{NODE}{id}"))
    }

    /// Path of a node's socket.
    ///
    /// # Errors
    /// [`RuntimeError::PathTooLong`] when it doesn't fit in a socket address.
    pub fn sock_path(&self, id: NodeId) -> Result<PathBuf, RuntimeError> {
        let path = self.file(&format!("{NODE}{id}{SOCK}"));
        if path.as_os_str().len() > SOCK_PATH_MAX {
            return Err(RuntimeError::PathTooLong(path));
        }
        Ok(path)
    }

    /// The nodes that have a file here, dead ones that nobody has swept yet included. Empty on errors.
    pub fn nodes(&self) -> Vec<NodeId> {
        let ids = self
            .names()
            .into_iter()
            .filter_map(|name| match classify(&name) {
                Name::Node(id) => Some(id),
                _ => None,
            });
        ids.collect()
    }

    /// Whether the node's file is there and locked. True as well when that can't be found out, as without a free
    /// descriptor: who takes a live node for dead does harm.
    pub fn is_alive(&self, id: NodeId) -> bool {
        let state = lock_state(&self.node_path(id));
        matches!(state, LockState::Held | LockState::Unknown)
    }

    /// What a node's file says. `None` when there is no such file, or it makes no sense.
    pub fn info(&self, id: NodeId) -> Option<NodeInfo> {
        let mut text = String::new();
        let file = open_plain(&self.node_path(id)).ok()?;
        file.take(4096).read_to_string(&mut text).ok()?;
        NodeInfo::parse(&text)
    }

    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Makes file `name` appear at once, filled by `fill` and locked, unless it is there: `None` then.
    pub(super) fn create_file(
        &self,
        name: &str,
        fill: impl Fn(&File) -> io::Result<()>,
    ) -> Result<Option<File>, RuntimeError> {
        let path = self.file(name);
        // A sweep may take the temporary file away before it is locked; hardly ever twice.
        for _ in 0..8 {
            let new = self.file(&format!("{NEW}{}", NodeId::random()?));
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(&new)
                .map_err(|e| RuntimeError::io("create", &new, e))?;
            let linked = raw::ofd_lock(&file)
                .map_err(io::Error::from)
                .and_then(|()| fill(&file))
                .and_then(|()| fs::hard_link(&new, &path));
            let _ = fs::remove_file(&new);
            match linked {
                Ok(()) => return Ok(Some(file)),
                Err(e) if e.kind() == ErrorKind::AlreadyExists => return Ok(None),
                Err(e) if e.kind() == ErrorKind::NotFound => continue,
                Err(e) => return Err(RuntimeError::io("create", &path, e)),
            }
        }
        Err(RuntimeError::io(
            "create",
            &path,
            ErrorKind::NotFound.into(),
        ))
    }

    fn names(&self) -> Vec<String> {
        let Ok(entries) = fs::read_dir(&self.path) else {
            return Vec::new();
        };
        entries
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .collect()
    }
}

/// What a node's file says about its process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeInfo {
    /// Process id, in the process's own pid namespace.
    pub pid: u32,
    /// Start time of the process in clock ticks since boot, as in field 22 of `/proc/<pid>/stat`.
    pub start: u64,
    /// File name of the program.
    pub program: String,
}

impl NodeInfo {
    /// About this process.
    pub fn of_self() -> NodeInfo {
        let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
        // The name in parentheses may hold anything; after it come fields 3 and on.
        let rest = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
        let start = rest
            .split_ascii_whitespace()
            .nth(19)
            .and_then(|s| s.parse().ok())
            .unwrap_or(0);
        let exe = fs::read_link("/proc/self/exe").unwrap_or_default();
        let name = exe
            .file_name()
            .map(OsStr::to_string_lossy)
            .unwrap_or_default();
        let program = name
            .chars()
            .map(|c| if c.is_control() { '?' } else { c })
            .collect();
        NodeInfo {
            pid: std::process::id(),
            start,
            program,
        }
    }

    fn parse(text: &str) -> Option<NodeInfo> {
        let field = |name: &str| {
            text.lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))
        };
        Some(NodeInfo {
            pid: field("pid")?.parse().ok()?,
            start: field("start")?.parse().ok()?,
            program: field("program")?.to_owned(),
        })
    }
}

impl fmt::Display for NodeInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "pid {}\nstart {}\nprogram {}\n",
            self.pid, self.start, self.program
        )
    }
}

/// The files of this process's node. They stay when the value is dropped: see [`NodeFiles::remove`].
#[derive(Clone, Debug)]
pub struct NodeFiles {
    id: NodeId,
    file: PathBuf,
    sock: PathBuf,
}

impl NodeFiles {
    /// Creates `node-<id>`. The descriptor that comes with it holds the lock, is CLOEXEC, and is the caller's to
    /// keep: the node counts as dead when it, and every duplicate of it, is closed. A child by `fork` must close it.
    ///
    /// # Errors
    /// [`RuntimeError::PathTooLong`] when the socket's path wouldn't fit; [`RuntimeError::Io`] when the file can't
    /// be made, with `AlreadyExists` when the id is taken.
    pub fn create(dir: &RuntimeDir, id: NodeId) -> Result<(NodeFiles, RawFd), RuntimeError> {
        let sock = dir.sock_path(id)?;
        let text = NodeInfo::of_self().to_string();
        let name = format!("{NODE}{id}");
        let file = dir.create_file(&name, |mut file| file.write_all(text.as_bytes()))?;
        let path = dir.file(&name);
        match file {
            Some(file) => Ok((
                NodeFiles {
                    id,
                    file: path,
                    sock,
                },
                file.into_raw_fd(),
            )),
            None => Err(RuntimeError::io(
                "create",
                &path,
                ErrorKind::AlreadyExists.into(),
            )),
        }
    }

    /// The node.
    pub fn id(&self) -> NodeId {
        self.id
    }

    /// Where the node's socket has to be bound. At most 107 bytes.
    pub fn sock_path(&self) -> &Path {
        &self.sock
    }

    /// Path of the node file.
    pub fn file_path(&self) -> &Path {
        &self.file
    }

    /// Removes the socket and the file. The lock goes when its descriptor is closed.
    pub fn remove(&self) {
        let _ = fs::remove_file(&self.sock);
        let _ = fs::remove_file(&self.file);
    }
}

/// Removes the files of dead nodes, and returns these nodes. Entries of theirs in the directory are for the caller
/// to clear; better use [`sweep_with`].
pub fn sweep(dir: &RuntimeDir) -> Vec<NodeId> {
    sweep_with(dir, |_| ())
}

/// Removes the files of dead nodes, and returns these nodes. `bury` is called for each *before* its file goes, so
/// that if this process dies in between, the next sweep does it again.
pub fn sweep_with(dir: &RuntimeDir, mut bury: impl FnMut(NodeId)) -> Vec<NodeId> {
    let mut dead = Vec::new();
    for name in dir.names() {
        let path = dir.file(&name);
        match classify(&name) {
            Name::Node(id) => {
                if matches!(lock_state(&path), LockState::Free) {
                    bury(id);
                    let _ = fs::remove_file(dir.file(&format!("{NODE}{id}{SOCK}")));
                    // Fails if another sweeper was quicker, or if the node has just removed it in good order.
                    if fs::remove_file(&path).is_ok() {
                        dead.push(id);
                    }
                }
            }
            // The node file is there before the socket, so a socket without one is left over.
            Name::Sock(id) => {
                if matches!(lock_state(&dir.node_path(id)), LockState::Gone) {
                    let _ = fs::remove_file(&path);
                }
            }
            Name::New => {
                if matches!(lock_state(&path), LockState::Free) {
                    let _ = fs::remove_file(&path);
                }
            }
            Name::Other => {}
        }
    }
    dead
}

enum Name {
    Node(NodeId),
    Sock(NodeId),
    New,
    Other,
}

fn classify(name: &str) -> Name {
    if let Some(rest) = name.strip_prefix(NODE) {
        let (id, kind): (&str, fn(NodeId) -> Name) = match rest.strip_suffix(SOCK) {
            Some(id) => (id, Name::Sock),
            None => (rest, Name::Node),
        };
        return NodeId::parse(id).map_or(Name::Other, kind);
    }
    let new = name.strip_prefix(NEW).and_then(NodeId::parse);
    new.map_or(Name::Other, |_| Name::New)
}

enum LockState {
    Held,
    Free,
    Gone,
    Unknown,
}

fn lock_state(path: &Path) -> LockState {
    match open_plain(path) {
        Ok(file) => match raw::ofd_is_locked(&file) {
            Ok(true) => LockState::Held,
            Ok(false) => LockState::Free,
            Err(_) => LockState::Unknown,
        },
        Err(e) if e.kind() == ErrorKind::NotFound => LockState::Gone,
        Err(_) => LockState::Unknown,
    }
}

/// Opens for reading, but never follows a link or waits for a FIFO's writer.
fn open_plain(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path)
}

/// Creates a directory for this user only. It is all right if it exists.
fn make_dir(path: &Path) -> Result<(), RuntimeError> {
    match DirBuilder::new().mode(0o700).create(path) {
        Err(e) if e.kind() != ErrorKind::AlreadyExists => Err(RuntimeError::io("create", path, e)),
        _ => Ok(()),
    }
}
