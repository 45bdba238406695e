//! Thin wrappers over the system calls of this module that std has no function for; others are in [`crate::sys`].
//!
//! They go straight to the kernel: a libc name such as `fcntl` would resolve to our own hook when this code runs
//! inside the preloaded library.

use std::os::fd::AsRawFd;
use std::path::Path;

use syscalls::{Errno, Sysno, syscall};

fn whole_file(kind: libc::c_int) -> libc::flock {
    // SAFETY: flock is a plain C struct of integers, for which all zeroes is a valid value.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock
}

/// Takes the write lock of the whole file for this open file description. Never waits.
pub(super) fn ofd_lock(fd: &impl AsRawFd) -> Result<(), Errno> {
    let lock = whole_file(libc::F_WRLCK);
    // SAFETY: `lock` is a valid flock structure that lives until the call returns.
    unsafe {
        syscall!(
            Sysno::fcntl,
            fd.as_raw_fd(),
            libc::F_OFD_SETLK,
            &raw const lock
        )
    }?;
    Ok(())
}

/// Whether another open file description holds a lock on the file.
pub(super) fn ofd_is_locked(fd: &impl AsRawFd) -> Result<bool, Errno> {
    let mut lock = whole_file(libc::F_WRLCK);
    // SAFETY: `lock` is a valid flock structure, writable, that lives until the call returns.
    unsafe {
        syscall!(
            Sysno::fcntl,
            fd.as_raw_fd(),
            libc::F_OFD_GETLK,
            &raw mut lock
        )
    }?;
    Ok(i32::from(lock.l_type) != libc::F_UNLCK)
}

/// Eight random bytes.
pub(super) fn random_u64() -> Result<u64, Errno> {
    let mut bytes = [0u8; 8];
    // SAFETY: the kernel writes at most 8 bytes into the array of 8.
    let n = unsafe { syscall!(Sysno::getrandom, bytes.as_mut_ptr(), bytes.len(), 0) }?;
    if n == bytes.len() {
        Ok(u64::from_ne_bytes(bytes))
    } else {
        Err(Errno::EIO)
    }
}

/// The effective user id.
pub(super) fn euid() -> u32 {
    // SAFETY: geteuid takes no arguments and touches no memory of ours.
    unsafe { syscall!(Sysno::geteuid) }.unwrap_or(0) as u32
}

/// Whether the kernel lets us create files in directory `path`.
pub(super) fn can_write_in(path: &Path) -> bool {
    use std::os::unix::ffi::OsStrExt;
    let Ok(name) = std::ffi::CString::new(path.as_os_str().as_bytes()) else {
        return false;
    };
    let mode = libc::W_OK | libc::X_OK;
    // SAFETY: `name` is a NUL-terminated string that lives until the call returns. faccessat2 asks for the
    // effective ids; kernels without it (before 5.8) answer ENOSYS.
    let new = unsafe {
        syscall!(
            Sysno::faccessat2,
            libc::AT_FDCWD,
            name.as_ptr(),
            mode,
            libc::AT_EACCESS
        )
    };
    match new {
        Err(Errno::ENOSYS | Errno::EPERM) => {
            // SAFETY: as above.
            unsafe { syscall!(Sysno::faccessat, libc::AT_FDCWD, name.as_ptr(), mode) }.is_ok()
        }
        other => other.is_ok(),
    }
}

/// Unmaps what [`crate::sys::map`] returned.
///
/// # Safety
/// `address` and `len` are those of one such call, and nothing refers into the mapping any more.
pub(super) unsafe fn unmap(address: *mut u8, len: usize) {
    // SAFETY: the caller vouches that the range is a mapping of its own that is out of use.
    let _ = unsafe { syscall!(Sysno::munmap, address, len) };
}

/// Makes the pages of a range exist, so that touching them can't raise SIGBUS on a full file system.
///
/// EINVAL: the kernel (before 5.14) doesn't know this request.
///
/// # Safety
/// The range lies in a mapping that lives until the call returns.
pub(super) unsafe fn populate(address: *mut u8, len: usize) -> Result<(), Errno> {
    const MADV_POPULATE_WRITE: usize = 23;
    // SAFETY: populating changes no contents; the caller vouches for the range.
    unsafe { syscall!(Sysno::madvise, address, len, MADV_POPULATE_WRITE) }?;
    Ok(())
}

/// Allocates the blocks of a file from 0 to `len`.
pub(super) fn allocate(fd: &impl AsRawFd, len: usize) -> Result<(), Errno> {
    // SAFETY: no memory of ours is involved.
    unsafe { syscall!(Sysno::fallocate, fd.as_raw_fd(), 0, 0, len) }?;
    Ok(())
}

/// Whether the process runs with more rights than its user has, so that its environment isn't to be trusted.
pub(super) fn secure_execution() -> bool {
    // SAFETY: getauxval only reads the vector that the kernel set up at exec.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}
