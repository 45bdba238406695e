//! How much memory the RMBs of this process may take.
//!
//! Speed must not cost a program its life: with rings for each of its connections a server could run into the limit of
//! its control group, or its host out of memory, where plain TCP would not have. So before a chunk is made, the engine
//! looks at the memory of the host and of each control group (v1 and v2) that this process is in. RMBs take a quarter of
//! it at most, and never what is nearly used up by others; connections beyond that stay on TCP. An administrator may set
//! a limit in the policy file instead of the quarter.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::path::{Path, PathBuf};

use super::CHUNK;
use crate::sys;

/// Bytes of the chunks that exist. Written by the engine, and in the child of a fork.
static TAKEN: AtomicU64 = AtomicU64::new(0);
/// The administrator's limit in bytes; `u64::MAX`: none.
static LIMIT: AtomicU64 = AtomicU64::new(u64::MAX);
/// When to look again after a refusal, in [`sys::now_ns`].
static LOOK_AGAIN: AtomicU64 = AtomicU64::new(0);

/// Looking costs some system calls, and many connections may ask at once.
const PAUSE_NS: u64 = 100_000_000;
/// What must stay free: an eighth, but no more than this.
const RESERVE: u64 = 256 << 20;

/// Memory of the host or of a control group, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Memory {
    total: u64,
    /// What is unused, or is used for files that can be read again.
    free: u64,
}

impl Memory {
    /// May RMBs that take `taken` bytes take one chunk more?
    fn has_room(&self, taken: u64, quarter: bool) -> bool {
        let more = u64::from(CHUNK);
        (!quarter || taken + more <= self.total / 4)
            && self.free >= more + (self.total / 8).min(RESERVE)
    }
}

/// Takes the administrator's limit.
pub fn set_limit(bytes: Option<u64>) {
    LIMIT.store(bytes.unwrap_or(u64::MAX), Relaxed);
}

/// Counts one more chunk, if there may be one. Engine only.
pub fn take() -> sys::Result<()> {
    let (taken, limit, now) = (TAKEN.load(Relaxed), LIMIT.load(Relaxed), sys::now_ns());
    let more = u64::from(CHUNK);
    if now < LOOK_AGAIN.load(Relaxed)
        || taken + more > limit
        || !memories(Path::new("/")).all(|m| m.has_room(taken, limit == u64::MAX))
    {
        LOOK_AGAIN.store(now + PAUSE_NS, Relaxed);
        return Err(sys::Errno::ENOMEM);
    }
    TAKEN.fetch_add(more, Relaxed);
    Ok(())
}

/// A chunk has been given up. Engine only.
pub fn give_back() {
    TAKEN.fetch_sub(u64::from(CHUNK), Relaxed);
    LOOK_AGAIN.store(0, Relaxed);
}

/// In the child of a fork, whose engine will have chunks of its own.
pub fn after_fork_child() {
    TAKEN.store(0, Relaxed);
    LOOK_AGAIN.store(0, Relaxed);
}

/// The memory of the host, and of each control group of this process that has a limit. What can't be read is left out.
fn memories(root: &Path) -> impl Iterator<Item = Memory> {
    let host = read(&root.join("proc/meminfo")).and_then(|text| {
        Some(Memory {
            total: field(&text, "MemTotal:")? << 10,
            free: field(&text, "MemAvailable:")? << 10,
        })
    });
    let groups = read(&root.join("proc/self/cgroup")).unwrap_or_default();
    let mounts = root.join("sys/fs/cgroup");
    let groups: Vec<Memory> = groups
        .lines()
        .filter_map(|line| {
            let mut parts = line.splitn(3, ':').skip(1);
            match (parts.next()?, parts.next()?) {
                ("", path) => Some((mounts.clone(), path.to_owned(), &V2)),
                (controllers, path) => controllers
                    .split(',')
                    .any(|name| name == "memory")
                    .then(|| (mounts.join("memory"), path.to_owned(), &V1)),
            }
        })
        .flat_map(|(mount, path, files)| {
            let own = mount.join(path.trim_start_matches('/'));
            let within: Vec<PathBuf> = own
                .ancestors()
                .take_while(|p| p.starts_with(&mount))
                .map(Path::to_owned)
                .collect();
            within.into_iter().filter_map(|group| files.memory(&group))
        })
        .collect();
    host.into_iter().chain(groups)
}

/// What the files of a control group's memory controller are called.
struct Files {
    limit: &'static str,
    usage: &'static str,
    /// Fields of `memory.stat`: files in memory that are not shared memory.
    reclaimable: [&'static str; 2],
}

const V1: Files = Files {
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    reclaimable: ["total_active_file", "total_inactive_file"],
};
const V2: Files = Files {
    limit: "memory.max",
    usage: "memory.current",
    reclaimable: ["active_file", "inactive_file"],
};

impl Files {
    /// The memory of a control group; `None` if it has no limit.
    fn memory(&self, group: &Path) -> Option<Memory> {
        let number = |name| read(&group.join(name))?.trim().parse::<u64>().ok();
        // Version 1 has a very large number for "no limit".
        let total = number(self.limit).filter(|&n| n < 1 << 60)?;
        let usage = number(self.usage)?;
        let stat = read(&group.join("memory.stat")).unwrap_or_default();
        let reclaimable: u64 = self
            .reclaimable
            .iter()
            .filter_map(|name| field(&stat, name))
            .sum();
        Some(Memory {
            total,
            free: total.saturating_sub(usage.saturating_sub(reclaimable)),
        })
    }
}

fn read(path: &Path) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

/// The number after `name` at the beginning of a line.
fn field(text: &str, name: &str) -> Option<u64> {
    text.lines()
        .find_map(|line| {
            let mut words = line.split_ascii_whitespace();
            (words.next()? == name).then(|| words.next())?
        })?
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn lay(root: &Path, files: &[(&str, &str)]) {
        for (name, text) in files {
            let path = root.join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
    }

    #[test]
    fn a_quarter_and_what_is_free() {
        let memory = |total, free| Memory {
            total: total * MIB,
            free: free * MIB,
        };
        assert!(memory(64, 32).has_room(12 * MIB, true));
        assert!(!memory(64, 32).has_room(13 * MIB, true));
        assert!(memory(64, 32).has_room(60 * MIB, false));
        assert!(memory(64, 12).has_room(0, true));
        assert!(!memory(64, 11).has_room(0, false));
        // Large hosts keep no more than the reserve.
        assert!(memory(1 << 20, 260).has_room(0, true));
        assert!(!memory(1 << 20, 259).has_room(0, true));
    }

    #[test]
    fn host_and_groups() {
        let root = std::env::temp_dir().join(format!("xsmc-budget-{}", std::process::id()));
        lay(
            &root,
            &[
                (
                    "proc/meminfo",
                    "MemTotal:  1000 kB\nMemFree: 1 kB\nMemAvailable:  400 kB\n",
                ),
                ("proc/self/cgroup", "4:cpu,memory:/a/b\n1:cpu:/x\n0::/c/d\n"),
                ("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "5000\n"),
                ("sys/fs/cgroup/memory/a/memory.usage_in_bytes", "3000\n"),
                (
                    "sys/fs/cgroup/memory/a/memory.stat",
                    "cache 9\ntotal_active_file 100\ntotal_inactive_file 20\n",
                ),
                (
                    "sys/fs/cgroup/memory/memory.limit_in_bytes",
                    "9223372036854771712\n",
                ),
                ("sys/fs/cgroup/c/d/memory.max", "max\n"),
                ("sys/fs/cgroup/c/memory.max", "7000\n"),
                ("sys/fs/cgroup/c/memory.current", "8000\n"),
            ],
        );
        let found: Vec<Memory> = memories(&root).collect();
        std::fs::remove_dir_all(&root).unwrap();
        assert_eq!(
            found,
            [
                Memory {
                    total: 1000 << 10,
                    free: 400 << 10
                },
                Memory {
                    total: 5000,
                    free: 2120
                },
                Memory {
                    total: 7000,
                    free: 0
                },
            ]
        );
        assert!(memories(Path::new("/")).next().is_some());
    }
}
