//! What can go wrong: each message says what failed, on which object, and what to do.

use std::io;
use std::path::PathBuf;

/// Why `smctl enable` or `smctl disable` didn't do it.
#[derive(Debug, thiserror::Error)]
pub(super) enum EnableError {
    #[error(
        "no cgroup v2 hierarchy is mounted (/proc/mounts lists none): mount -t cgroup2 none \
         /sys/fs/cgroup, or boot with cgroup v2"
    )]
    NoHierarchy,
    #[error("{path}: not a control group of cgroup v2: name a folder of the cgroup2 file system")]
    NotCgroup { path: PathBuf },
    #[error("no bpf file system is mounted at {path}: mount -t bpf bpf {path}")]
    NoBpfFs { path: PathBuf },
    #[error("already enabled{} (links in {links}): to change it, run smctl disable first",
            on(.cgroup))]
    Already {
        cgroup: Option<PathBuf>,
        links: PathBuf,
    },
    #[error("{path} is no folder of root's, but user {uid}'s: look at it and remove it")]
    NotOurs { path: PathBuf, uid: u32 },
    #[error("not permitted to {doing}: run smctl as root (CAP_BPF and CAP_NET_ADMIN)")]
    NotPermitted { doing: String },
    #[error(
        "the kernel refused {what}: {why}; Linux 5.15 or later with CONFIG_CGROUP_BPF is needed, this \
         is {kernel}"
    )]
    Refused {
        what: String,
        why: String,
        kernel: String,
    },
    #[error("can't {doing}: {error}")]
    Io { doing: String, error: io::Error },
}

impl EnableError {
    /// An error of the system while `doing` something ("open /some/path").
    pub(super) fn io(doing: impl Into<String>, error: io::Error) -> EnableError {
        let doing = doing.into();
        if error.kind() == io::ErrorKind::PermissionDenied {
            EnableError::NotPermitted { doing }
        } else {
            EnableError::Io { doing, error }
        }
    }
}

fn on(cgroup: &Option<PathBuf>) -> String {
    cgroup
        .as_ref()
        .map_or_else(String::new, |path| format!(" on {}", path.display()))
}
