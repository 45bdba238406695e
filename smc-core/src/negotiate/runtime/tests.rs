use std::collections::HashSet;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;

/// A directory of mode 0700 that goes away with the value.
pub(crate) struct TempDir(PathBuf);

impl TempDir {
    pub(crate) fn new() -> TempDir {
        let id = NodeId::random().expect("random numbers");
        let path = std::env::temp_dir().join(format!("xsmc-test-{id}"));
        DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .expect("a temporary directory");
        TempDir(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    fn set_mode(&self, name: &str, mode: u32) -> PathBuf {
        let path = self.0.join(name);
        fs::create_dir_all(&path).expect("a directory");
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("chmod");
        path
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn id() -> NodeId {
    NodeId::random().expect("random numbers")
}

/// A node whose lock is held by the descriptor.
fn live(dir: &RuntimeDir) -> (NodeFiles, OwnedFd) {
    let (files, fd) = NodeFiles::create(dir, id()).expect("a node");
    // SAFETY: create gave us the descriptor, and nobody else has it.
    (files, unsafe { OwnedFd::from_raw_fd(fd) })
}

fn names(dir: &RuntimeDir) -> Vec<String> {
    let mut names = dir.names();
    names.sort();
    names
}

#[test]
fn ids_print_and_parse() {
    let id = NodeId::from_raw(0xabc).expect("not 0");
    assert_eq!(id.to_string(), "0000000000000abc");
    assert_eq!(NodeId::parse("0000000000000abc"), Some(id));
    for bad in [
        "",
        "abc",
        "0000000000000ABC",
        "0000000000000000",
        "+000000000000abc",
        "00000000000000abc",
    ] {
        assert_eq!(NodeId::parse(bad), None, "{bad}");
    }
    assert_eq!(NodeId::from_raw(0), None);
}

#[test]
fn the_variable_wins_and_the_directory_is_made() {
    let tmp = TempDir::new();
    let wanted = tmp.path().join("run");
    let nothing = tmp.path().join("nothing");
    let dir =
        RuntimeDir::choose(Some(wanted.as_os_str()), &nothing, &nothing).expect("a directory");
    assert_eq!(dir.path(), fs::canonicalize(&wanted).expect("it exists"));
    assert_eq!(
        fs::metadata(&wanted).expect("it exists").mode() & 0o7777,
        0o700
    );
    assert!(RuntimeDir::choose(Some(wanted.join("a/b").as_os_str()), &nothing, &nothing).is_err());
}

#[test]
fn then_the_system_directory_then_shm() {
    let tmp = TempDir::new();
    let system = tmp.path().join("system");
    let euid = raw::euid();
    let choose = || RuntimeDir::choose(None, &system, tmp.path());
    let shm = tmp.path().join(format!("xsmc-{euid}"));

    assert_eq!(choose().expect("shm").path(), shm);
    assert_eq!(
        fs::metadata(&shm).expect("it exists").mode() & 0o7777,
        0o700
    );
    tmp.set_mode("system", 0o755);
    assert_eq!(choose().expect("system").path(), system);
    // Many users share it: each has a directory of its own there.
    tmp.set_mode("system", 0o1777);
    assert_eq!(
        choose().expect("system").path(),
        system.join(euid.to_string())
    );
    // Anybody could rename our files there.
    tmp.set_mode("system", 0o777);
    assert_eq!(choose().expect("shm").path(), shm);
}

#[test]
fn unsafe_directories_are_refused() {
    let tmp = TempDir::new();
    let name = format!("xsmc-{}", raw::euid());
    let nothing = tmp.path().join("nothing");
    let why = || match RuntimeDir::choose(None, &nothing, tmp.path()) {
        Err(RuntimeError::Unusable { why, .. }) => why,
        other => panic!("{other:?}"),
    };
    let path = tmp.set_mode(&name, 0o770);
    assert!(why().contains("others may write"));
    fs::remove_dir(&path).expect("it is empty");
    symlink(tmp.set_mode("elsewhere", 0o700), &path).expect("a link");
    assert!(why().contains("symbolic link"));
    fs::remove_file(&path).expect("a link");
    fs::write(&path, "").expect("a file");
    assert!(why().contains("isn't a directory"));
    fs::remove_file(&path).expect("a file");
    // Only root can make a directory of somebody else.
    if raw::euid() == 0 {
        let path = tmp.set_mode(&name, 0o700);
        std::os::unix::fs::chown(&path, Some(12345), None).expect("chown");
        assert!(why().contains("another user"));
        let open = RuntimeDir::at(&path);
        assert!(
            matches!(open, Err(RuntimeError::Unusable { .. })),
            "{open:?}"
        );
    }
}

#[test]
fn a_node_lives_as_long_as_its_lock() {
    let tmp = TempDir::new();
    let dir = RuntimeDir::at(tmp.path()).expect("a directory");
    let (files, lock) = live(&dir);
    let id = files.id();
    fs::write(files.sock_path(), "").expect("a stand-in for the socket");
    assert_eq!(
        names(&dir),
        [format!("node-{id}"), format!("node-{id}.sock")]
    );
    assert_eq!(dir.nodes(), [id]);
    assert_eq!(dir.info(id), Some(NodeInfo::of_self()));
    assert!(dir.is_alive(id));
    assert!(sweep(&dir).is_empty());

    // The lock moves with a duplicate of its descriptor.
    let moved = lock.try_clone().expect("a duplicate");
    drop(lock);
    assert!(dir.is_alive(id) && sweep(&dir).is_empty());
    drop(moved);
    assert!(!dir.is_alive(id));
    let mut buried = Vec::new();
    assert_eq!(sweep_with(&dir, |id| buried.push((id, dir.nodes()))), [id]);
    assert_eq!(buried, [(id, vec![id])]);
    assert!(names(&dir).is_empty());
    assert!(!dir.is_alive(id) && dir.info(id).is_none());
}

#[test]
fn what_cannot_be_looked_at_counts_as_alive() {
    let tmp = TempDir::new();
    let dir = RuntimeDir::at(tmp.path()).expect("a directory");
    // Opening a symbolic link fails, and not with ENOENT.
    let id = id();
    symlink("/dev/null", dir.node_path(id)).expect("a link");
    assert!(dir.is_alive(id) && sweep(&dir).is_empty());
    assert!(dir.node_path(id).is_symlink());
}

#[test]
fn removing_is_complete_and_an_id_is_used_once() {
    let tmp = TempDir::new();
    let dir = RuntimeDir::at(tmp.path()).expect("a directory");
    let (files, _lock) = live(&dir);
    let again = NodeFiles::create(&dir, files.id());
    assert!(
        matches!(&again, Err(RuntimeError::Io { source, .. }) if source.kind() == ErrorKind::AlreadyExists)
    );
    fs::write(files.sock_path(), "").expect("a stand-in for the socket");
    files.remove();
    files.remove();
    assert!(names(&dir).is_empty());
}

#[test]
fn leftovers_go_and_other_files_stay() {
    let tmp = TempDir::new();
    let dir = RuntimeDir::at(tmp.path()).expect("a directory");
    let (files, _lock) = live(&dir);
    fs::write(files.sock_path(), "").expect("a stand-in for the socket");
    let (orphan, crashed) = (id(), id());
    fs::write(dir.sock_path(orphan).expect("short"), "").expect("a file");
    fs::write(dir.file(&format!("new-{crashed}")), "").expect("a file");
    for other in ["directory", "node-xyz", "node-12.sock", "new-", "notes"] {
        fs::write(dir.file(other), "").expect("a file");
    }
    let before = names(&dir).len();
    assert!(sweep(&dir).is_empty());
    let after = names(&dir);
    assert_eq!(after.len(), before - 2);
    assert!(!after.iter().any(|name| name.contains(&orphan.to_string())));
    assert!(
        !after
            .iter()
            .any(|name| name.starts_with("new-0") || name.len() == 20)
    );
}

#[test]
fn a_path_too_long_for_a_socket_is_an_error() {
    let tmp = TempDir::new();
    let long = tmp
        .path()
        .join("x".repeat(107 - 28 - tmp.path().as_os_str().len()));
    let dir = RuntimeDir::at(&long).expect("a directory");
    let path = dir.sock_path(id()).expect("it fits exactly");
    assert_eq!(path.as_os_str().len(), 107);
    std::os::unix::net::UnixListener::bind(&path).expect("the kernel agrees");
    let dir = RuntimeDir::at(&tmp.path().join("y".repeat(100))).expect("a directory");
    let error = NodeFiles::create(&dir, id()).expect_err("one byte too long");
    assert!(matches!(error, RuntimeError::PathTooLong(_)));
    assert!(names(&dir).is_empty());
}

#[test]
fn sweeping_never_takes_a_node_that_is_being_created() {
    let tmp = TempDir::new();
    let dir = RuntimeDir::at(tmp.path()).expect("a directory");
    let stop = AtomicBool::new(false);
    // Ids from before their creation until after their removal, with the lock still held.
    let living = Mutex::new(HashSet::new());
    let living = || living.lock().expect("no panic");
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let dead =
                        sweep_with(&dir, |id| assert!(!living().contains(&id), "{id} lives"));
                    assert!(dead.is_empty(), "all were removed in good order");
                }
            });
        }
        for _ in 0..2000 {
            let id = id();
            living().insert(id);
            let (files, fd) = NodeFiles::create(&dir, id).expect("a node");
            assert!(files.file_path().exists() && dir.is_alive(id));
            files.remove();
            living().remove(&id);
            // SAFETY: create gave us the descriptor, and nobody else has it.
            drop(unsafe { OwnedFd::from_raw_fd(fd) });
        }
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn text_about_the_process() {
    let info = NodeInfo::of_self();
    assert_eq!(info.pid, std::process::id());
    assert!(info.start > 0 && !info.program.is_empty());
    assert_eq!(NodeInfo::parse(&info.to_string()), Some(info));
    for bad in [
        "",
        "pid 1\nstart 2\n",
        "pid -1\nstart 2\nprogram x\n",
        "pid1\nstart 2\nprogram x",
    ] {
        assert_eq!(NodeInfo::parse(bad), None, "{bad}");
    }
}
