//! Finds runtime directories and the sockets of nodes in them.

use std::ffi::OsStr;
use std::fs::{self, DirEntry};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Where everything is looked for; tests use other roots than the real ones.
pub(super) struct Roots {
    pub(super) run: PathBuf,
    pub(super) shm: PathBuf,
}

impl Default for Roots {
    fn default() -> Self {
        Roots {
            run: "/run/xsmc".into(),
            shm: "/dev/shm".into(),
        }
    }
}

/// Directories to look into. With a `named` one it is the only one. Else the system's, the one of
/// user `uid`, and for root those of all users, as far as they exist.
pub(super) fn directories(named: Option<PathBuf>, uid: u32, roots: &Roots) -> Vec<PathBuf> {
    if let Some(named) = named {
        return vec![named];
    }
    let mut found = Vec::new();
    if roots.run.is_dir() {
        found.push(roots.run.clone());
    }
    let mut users: Vec<u32> = Vec::new();
    if uid == 0 {
        let entries = fs::read_dir(&roots.shm).into_iter().flatten().flatten();
        users.extend(entries.filter_map(|entry| user_of(&entry.file_name())));
        users.sort_unstable();
    } else {
        users.push(uid);
    }
    for user in users {
        let dir = roots.shm.join(format!("xsmc-{user}"));
        // Anybody may create names in /dev/shm: only a directory of the user it is named after
        // is what it seems.
        if fs::symlink_metadata(&dir).is_ok_and(|m| m.is_dir() && m.uid() == user) {
            found.push(dir);
        }
    }
    found
}

/// The user id in `xsmc-<uid>`.
fn user_of(name: &OsStr) -> Option<u32> {
    let digits = name.to_str()?.strip_prefix("xsmc-")?;
    let canonical = digits == "0" || !digits.starts_with('0');
    (canonical && digits.bytes().all(|b| b.is_ascii_digit())).then(|| digits.parse().ok())?
}

/// The sockets of nodes in `dir`, sorted by name.
pub(super) fn sockets(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if is_node_socket(&entry) {
            found.push(entry.path());
        }
    }
    found.sort_unstable();
    Ok(found)
}

fn is_node_socket(entry: &DirEntry) -> bool {
    let name = entry.file_name();
    let named = name
        .to_str()
        .and_then(|name| name.strip_prefix("node-")?.strip_suffix(".sock"))
        .is_some_and(|id| !id.is_empty());
    // The entry's own type: a symbolic link is not followed.
    named && entry.file_type().is_ok_and(|kind| kind.is_socket())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn only_real_sockets_of_nodes() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let _b = UnixListener::bind(at("node-b.sock")).unwrap();
        let _a = UnixListener::bind(at("node-a.sock")).unwrap();
        let _other = UnixListener::bind(at("other.sock")).unwrap();
        let _empty = UnixListener::bind(at("node-.sock")).unwrap();
        fs::write(at("node-c.sock"), "").unwrap();
        std::os::unix::fs::symlink(at("other.sock"), at("node-d.sock")).unwrap();
        assert_eq!(
            sockets(dir.path()).unwrap(),
            [at("node-a.sock"), at("node-b.sock")]
        );
        assert!(sockets(&at("absent")).is_err());
    }

    #[test]
    fn directories_by_user() {
        let dir = tempfile::tempdir().unwrap();
        let roots = Roots {
            run: dir.path().join("run"),
            shm: dir.path().join("shm"),
        };
        // SAFETY: no arguments, no failure.
        let me = unsafe { libc::geteuid() };
        let mine = roots.shm.join(format!("xsmc-{me}"));
        fs::create_dir_all(&mine).unwrap();
        // Named after a user that it doesn't belong to.
        fs::create_dir(roots.shm.join("xsmc-54321")).unwrap();
        fs::create_dir(roots.shm.join("xsmc-")).unwrap();
        fs::create_dir(roots.shm.join("xsmc-007")).unwrap();
        assert_eq!(directories(None, me, &roots), std::slice::from_ref(&mine));
        assert!(directories(None, 54321, &roots).is_empty());
        if me == 0 {
            let theirs = roots.shm.join("xsmc-54322");
            fs::create_dir(&theirs).unwrap();
            std::os::unix::fs::chown(&theirs, Some(54322), None).unwrap();
            assert_eq!(directories(None, 0, &roots), [mine.clone(), theirs.clone()]);
            assert_eq!(directories(None, 54322, &roots), [theirs]);
        }
        fs::create_dir(&roots.run).unwrap();
        assert_eq!(directories(None, me, &roots)[0], roots.run);
        assert_eq!(
            directories(Some("/x".into()), me, &roots),
            [PathBuf::from("/x")]
        );
    }
}
