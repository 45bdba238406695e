//! Links of eBPF programs to control groups: bpf(2), as far as aya has no function for it.

use std::ffi::CString;
use std::io;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Where in the kernel a program is called: `enum bpf_attach_type` of linux/bpf.h.
#[derive(Clone, Copy, Debug)]
#[repr(u32)]
pub(super) enum Hook {
    /// BPF_CGROUP_SOCK_OPS
    SockOps = 3,
    /// BPF_CGROUP_GETSOCKOPT
    GetSockOpt = 21,
    /// BPF_CGROUP_SETSOCKOPT
    SetSockOpt = 22,
}

// enum bpf_cmd of linux/bpf.h.
const BPF_OBJ_PIN: libc::c_int = 6;
const BPF_OBJ_GET: libc::c_int = 7;
const BPF_OBJ_GET_INFO_BY_FD: libc::c_int = 15;
const BPF_LINK_CREATE: libc::c_int = 28;
const BPF_LINK_DETACH: libc::c_int = 34;

/// BPF_LINK_TYPE_CGROUP of `enum bpf_link_type`.
const LINK_TYPE_CGROUP: u32 = 3;

/// A link: while it exists and isn't detached, its program runs for its control group and those below.
#[derive(Debug)]
pub(super) struct Link(OwnedFd);

/// The beginning of `struct bpf_link_info` for a link to a control group.
#[repr(C)]
#[derive(Clone, Copy)]
struct RawInfo {
    kind: u32,
    id: u32,
    program: u32,
    _unused: u32,
    cgroup: u64,
    attach_type: u32,
    _end: u32,
}

impl Link {
    /// Attaches a loaded program to a control group. Other programs there stay.
    pub(super) fn new(program: &impl AsFd, cgroup: &impl AsFd, hook: Hook) -> io::Result<Link> {
        let attributes = [
            program.as_fd().as_raw_fd() as u32,
            cgroup.as_fd().as_raw_fd() as u32,
            hook as u32,
            0, // flags; a link always lets other programs be
        ];
        // SAFETY: BPF_LINK_CREATE reads these four numbers and no memory besides.
        unsafe { bpf_fd(BPF_LINK_CREATE, &attributes) }.map(Link)
    }

    /// Opens a link by its name in a bpf file system.
    pub(super) fn open(path: &Path) -> io::Result<Link> {
        let name = CString::new(path.as_os_str().as_bytes())?;
        let attributes = PathAttributes {
            path: name.as_ptr().addr() as u64,
            fd: 0,
            flags: 0,
        };
        // SAFETY: `name` is a NUL-terminated string that lives until the call returns.
        unsafe { bpf_fd(BPF_OBJ_GET, &attributes) }.map(Link)
    }

    /// Gives the link a name in a bpf file system, where it outlives this process.
    pub(super) fn pin(&self, path: &Path) -> io::Result<()> {
        let name = CString::new(path.as_os_str().as_bytes())?;
        let attributes = PathAttributes {
            path: name.as_ptr().addr() as u64,
            fd: self.0.as_raw_fd() as u32,
            flags: 0,
        };
        // SAFETY: as in `open`.
        unsafe { bpf(BPF_OBJ_PIN, &attributes) }.map(drop)
    }

    /// Takes the program away from the control group, whoever else holds the link.
    pub(super) fn detach(&self) -> io::Result<()> {
        // SAFETY: BPF_LINK_DETACH reads one number.
        unsafe { bpf(BPF_LINK_DETACH, &[self.0.as_raw_fd() as u32]) }.map(drop)
    }

    /// The control group's id, which is the inode of its folder. `None`: the link is detached, as
    /// the control group was removed.
    pub(super) fn cgroup(&self) -> io::Result<Option<u64>> {
        let mut info = MaybeUninit::<RawInfo>::zeroed();
        let attributes = InfoAttributes {
            fd: self.0.as_raw_fd() as u32,
            len: size_of::<RawInfo>() as u32,
            info: info.as_mut_ptr().addr() as u64,
        };
        // The kernel finds the buffer by a number.
        info.as_mut_ptr().expose_provenance();
        // SAFETY: the kernel writes at most `len` bytes to `info`, which lives until the call returns.
        unsafe { bpf(BPF_OBJ_GET_INFO_BY_FD, &attributes) }?;
        // SAFETY: integers only, zeroed before the kernel wrote to them.
        let info = unsafe { info.assume_init() };
        if info.kind != LINK_TYPE_CGROUP {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "not a link to a control group",
            ));
        }
        Ok((info.cgroup != 0).then_some(info.cgroup))
    }
}

/// What BPF_OBJ_PIN and BPF_OBJ_GET read.
#[repr(C)]
struct PathAttributes {
    path: u64,
    fd: u32,
    flags: u32,
}

/// What BPF_OBJ_GET_INFO_BY_FD reads.
#[repr(C)]
struct InfoAttributes {
    fd: u32,
    len: u32,
    info: u64,
}

/// bpf(2). The kernel takes attributes beyond the size given as zero.
///
/// # Safety
/// `T` is what the command reads, and the addresses in it are valid for what the command does.
unsafe fn bpf<T>(command: libc::c_int, attributes: &T) -> io::Result<libc::c_int> {
    let attributes: *const T = attributes;
    // SAFETY: the kernel reads size_of::<T>() bytes, and the caller vouches for the addresses in them.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, attributes, size_of::<T>()) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(result as libc::c_int)
}

/// bpf(2) with a command that answers with a new descriptor.
///
/// # Safety
/// As [`bpf`].
unsafe fn bpf_fd<T>(command: libc::c_int, attributes: &T) -> io::Result<OwnedFd> {
    // SAFETY: the caller vouches for it.
    let fd = unsafe { bpf(command, attributes) }?;
    // SAFETY: the kernel has just made this descriptor (close-on-exec) for us alone.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
