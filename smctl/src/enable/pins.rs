//! The folder of a bpf file system that holds what `smctl enable` left behind.
//!
//! It has one file a link, and a symbolic link `cgroup` to the control group. Making the folder is
//! what decides between two who enable at the same time.

use super::error::EnableError;
use super::link::Link;
use super::program::PARTS;
use serde::Serialize;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, symlink};
use std::path::{Path, PathBuf};

/// Name of the symbolic link to the control group.
const CGROUP: &str = "cgroup";

/// What is enabled.
#[derive(Serialize, Debug, PartialEq, Eq)]
pub(super) struct State {
    /// Whether the option works for the processes of the control group.
    pub(super) enabled: bool,
    /// The control group, as it was named.
    pub(super) cgroup: Option<PathBuf>,
    /// The folder of the links.
    pub(super) links: PathBuf,
    /// Why what is there doesn't work.
    pub(super) problem: Option<String>,
}

/// The folder, which may not exist.
#[derive(Debug)]
pub(super) struct Pins(PathBuf);

impl Pins {
    pub(super) fn new(bpf_fs: &Path) -> Pins {
        Pins(bpf_fs.join("xsmc"))
    }

    /// Makes the folder. `Already` if it exists.
    pub(super) fn claim(&self) -> Result<(), EnableError> {
        match DirBuilder::new().mode(0o700).create(&self.0) {
            Ok(()) => Ok(()),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Err(EnableError::Already {
                cgroup: self.state()?.cgroup,
                links: self.0.clone(),
            }),
            Err(e) => Err(EnableError::io(format!("create {}", self.0.display()), e)),
        }
    }

    /// Puts a link into the folder.
    pub(super) fn keep(&self, file: &str, link: &Link) -> Result<(), EnableError> {
        let path = self.0.join(file);
        link.pin(&path)
            .map_err(|e| EnableError::io(format!("create {}", path.display()), e))
    }

    /// Notes the control group.
    pub(super) fn note(&self, cgroup: &Path) -> Result<(), EnableError> {
        let path = self.0.join(CGROUP);
        symlink(cgroup, &path).map_err(|e| EnableError::io(format!("create {}", path.display()), e))
    }

    /// Detaches all programs and removes the folder. `false`: there was nothing to remove.
    pub(super) fn remove(&self) -> Result<bool, EnableError> {
        if !self.exists()? {
            return Ok(false);
        }
        // Marks are refused before what they rely on goes.
        for part in PARTS.iter().rev() {
            let path = self.0.join(part.file);
            if !exists(&path)? {
                continue;
            }
            // By itself the kernel would detach some time after the file is gone.
            Link::open(&path)
                .and_then(|link| link.detach())
                .map_err(|e| EnableError::io(format!("detach {}", path.display()), e))?;
            unlink(&path)?;
        }
        let cgroup = self.0.join(CGROUP);
        if exists(&cgroup)? {
            unlink(&cgroup)?;
        }
        fs::remove_dir(&self.0)
            .map_err(|e| EnableError::io(format!("remove {}", self.0.display()), e))?;
        Ok(true)
    }

    /// Looks at what is there.
    pub(super) fn state(&self) -> Result<State, EnableError> {
        let mut state = State {
            enabled: false,
            cgroup: None,
            links: self.0.clone(),
            problem: None,
        };
        if self.exists()? {
            state.cgroup = fs::read_link(self.0.join(CGROUP)).ok();
            state.problem = self.problem(state.cgroup.as_deref())?;
            state.enabled = state.problem.is_none();
        }
        Ok(state)
    }

    /// Whether the folder exists. An error if it may be somebody else's: a bpf file system can be
    /// writable for all.
    fn exists(&self) -> Result<bool, EnableError> {
        if !exists(&self.0)? {
            return Ok(false);
        }
        let doing = || format!("look at {}", self.0.display());
        let found = self
            .0
            .symlink_metadata()
            .map_err(|e| EnableError::io(doing(), e))?;
        // SAFETY: geteuid has no arguments and no failure.
        let ours = [0, unsafe { libc::geteuid() }].contains(&found.uid());
        if found.is_dir() && ours {
            Ok(true)
        } else {
            Err(EnableError::NotOurs {
                path: self.0.clone(),
                uid: found.uid(),
            })
        }
    }

    /// What keeps the links that should be there from working.
    fn problem(&self, cgroup: Option<&Path>) -> Result<Option<String>, EnableError> {
        let wanted = cgroup.and_then(|path| Some((path, path.metadata().ok()?.ino())));
        for part in &PARTS {
            let path = self.0.join(part.file);
            if !exists(&path)? {
                return Ok(Some(format!("{} is missing", path.display())));
            }
            let attached = Link::open(&path)
                .and_then(|link| link.cgroup())
                .map_err(|e| EnableError::io(format!("read {}", path.display()), e))?;
            let problem = match (attached, wanted) {
                (None, _) | (_, None) => "the control group is gone".into(),
                (Some(id), Some((path, inode))) if id != inode => {
                    format!("{} is another control group now", path.display())
                }
                _ => continue,
            };
            return Ok(Some(problem));
        }
        Ok(None)
    }
}

/// Whether there is something of that name, be it a symbolic link that leads nowhere.
fn exists(path: &Path) -> Result<bool, EnableError> {
    match path.symlink_metadata() {
        Ok(_) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(EnableError::io(format!("look at {}", path.display()), e)),
    }
}

fn unlink(path: &Path) -> Result<(), EnableError> {
    fs::remove_file(path).map_err(|e| EnableError::io(format!("remove {}", path.display()), e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_there_is_not_enabled() {
        let dir = tempfile::tempdir().unwrap();
        let pins = Pins::new(dir.path());
        let state = pins.state().unwrap();
        assert_eq!((state.enabled, state.problem), (false, None));
        assert!(!pins.remove().unwrap());
    }

    #[test]
    fn what_others_put_there_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let pins = Pins::new(dir.path());
        let elsewhere = dir.path().join("elsewhere");
        fs::create_dir(&elsewhere).unwrap();
        fs::write(elsewhere.join(CGROUP), "").unwrap();
        symlink(&elsewhere, &pins.0).unwrap();
        for error in [pins.remove().unwrap_err(), pins.state().unwrap_err()] {
            assert!(matches!(error, EnableError::NotOurs { .. }), "{error}");
        }
        assert!(elsewhere.join(CGROUP).exists());
    }

    #[test]
    fn one_claim_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let pins = Pins::new(dir.path());
        pins.claim().unwrap();
        pins.note(Path::new("/some/group")).unwrap();
        let error = pins.claim().unwrap_err().to_string();
        assert!(error.contains("already enabled on /some/group"), "{error}");
        assert!(error.contains("smctl disable"), "{error}");
        // Nobody got further than that: it is said, and can be cleared away.
        let problem = pins.state().unwrap().problem;
        assert!(problem.unwrap().ends_with("handshake is missing"));
        assert!(pins.remove().unwrap());
        pins.claim().unwrap();
    }
}
