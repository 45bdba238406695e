//! Where control groups and eBPF links live: the cgroup2 hierarchy and the bpf file system.

use super::error::EnableError;
use std::ffi::{CString, OsString};
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// Where the bpf file system is mounted; systemd does so at boot.
pub(super) const BPF_FS: &str = "/sys/fs/bpf";

// statfs(2) types, from linux/magic.h.
const CGROUP2_SUPER_MAGIC: libc::c_long = 0x6367_7270;
const BPF_FS_MAGIC: libc::c_long = 0xcafe_4a11;

/// The control group to attach to: the one named, else the root of the hierarchy. Gives its path and
/// its folder, opened.
pub(super) fn cgroup(named: Option<&Path>) -> Result<(PathBuf, File), EnableError> {
    let path = match named {
        Some(path) => std::path::absolute(path)
            .map_err(|e| EnableError::io(format!("find {}", path.display()), e))?,
        None => hierarchy()?,
    };
    let doing = || format!("open control group {}", path.display());
    let kind = filesystem(&path).map_err(|e| EnableError::io(doing(), e))?;
    if kind != CGROUP2_SUPER_MAGIC || !path.is_dir() {
        return Err(EnableError::NotCgroup { path });
    }
    let folder = File::open(&path).map_err(|e| EnableError::io(doing(), e))?;
    Ok((path, folder))
}

/// The first cgroup2 mount of /proc/mounts.
fn hierarchy() -> Result<PathBuf, EnableError> {
    let mounts =
        std::fs::read("/proc/mounts").map_err(|e| EnableError::io("read /proc/mounts", e))?;
    mount_point(&mounts, b"cgroup2").ok_or(EnableError::NoHierarchy)
}

/// The first mount point of that type in a table like /proc/mounts (fields as in fstab(5)).
fn mount_point(mounts: &[u8], kind: &[u8]) -> Option<PathBuf> {
    mounts.split(|&b| b == b'\n').find_map(|line| {
        let mut fields = line.split(|&b| b == b' ').skip(1);
        let path = fields.next()?;
        (fields.next()? == kind).then(|| OsString::from_vec(unescape(path)).into())
    })
}

/// Undoes the octal escapes (`\040` for a blank) of /proc/mounts.
fn unescape(text: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&byte, tail)) = rest.split_first() {
        rest = tail;
        let digits = tail.get(..3).and_then(|d| std::str::from_utf8(d).ok());
        match digits.and_then(|d| u8::from_str_radix(d, 8).ok()) {
            Some(value) if byte == b'\\' => {
                out.push(value);
                rest = tail.get(3..).unwrap_or_default();
            }
            _ => out.push(byte),
        }
    }
    out
}

/// Checks that a bpf file system is mounted at [`BPF_FS`].
pub(super) fn bpf_fs() -> Result<(), EnableError> {
    let path = PathBuf::from(BPF_FS);
    match filesystem(&path) {
        Ok(BPF_FS_MAGIC) => Ok(()),
        Ok(_) => Err(EnableError::NoBpfFs { path }),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Err(EnableError::NoBpfFs { path }),
        Err(e) => Err(EnableError::io(format!("look at {BPF_FS}"), e)),
    }
}

/// The type of the file system that holds `path`.
fn filesystem(path: &Path) -> io::Result<libc::c_long> {
    let name = CString::new(path.as_os_str().as_bytes())?;
    let mut stat = MaybeUninit::<libc::statfs>::zeroed();
    // SAFETY: `name` is NUL-terminated, `stat` is writable, and both live until the call returns.
    if unsafe { libc::statfs(name.as_ptr(), stat.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: integers only, zeroed and then filled in by the kernel.
    Ok(unsafe { stat.assume_init() }.f_type)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts() {
        let table = b"cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n\
            none /a\\040b\\134c cgroup2 rw 0 0\n\
            none /second cgroup2 rw 0 0\n";
        let found = mount_point(table, b"cgroup2");
        assert_eq!(found, Some("/a b\\c".into()));
        assert_eq!(mount_point(table, b"bpf"), None);
        assert_eq!(mount_point(b"", b"bpf"), None);
        assert_eq!(mount_point(b"broken\n\nline", b"bpf"), None);
    }

    #[test]
    fn escapes() {
        for (text, plain) in [
            (&b"/plain"[..], &b"/plain"[..]),
            (b"\\040", b" "),
            (b"a\\", b"a\\"),
            (b"\\04", b"\\04"),
            (b"\\999", b"\\999"),
        ] {
            assert_eq!(unescape(text), plain);
        }
    }

    #[test]
    fn other_folders_are_no_control_groups() {
        let dir = tempfile::tempdir().unwrap();
        let error = cgroup(Some(dir.path())).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("not a control group"), "{text}");
        assert!(text.contains(&*dir.path().to_string_lossy()), "{text}");
        let error = cgroup(Some(&dir.path().join("absent"))).unwrap_err();
        assert!(error.to_string().contains("absent: "), "{error}");
    }
}
