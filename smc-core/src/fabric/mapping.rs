//! Mappings that threads may still look at after they have been given up.
//!
//! Spinning and polling threads look at a link's memory without a lock, and may be preempted in between for
//! any time. So the address range of a segment or chunk is never unmapped: it is given up by putting private
//! zero pages in its place, and used again for the next mapping of the same length. A late look reads
//! zeros, or another connection's cursors: a wrong hint, corrected under the lock.

use std::sync::Mutex;

use syscalls::{Sysno, syscall};

use crate::sys::{self, Errno, Result};

struct Range(*mut u8, usize);

// SAFETY: an address is not bound to a thread.
unsafe impl Send for Range {}

static SPARE: Mutex<Vec<Range>> = Mutex::new(Vec::new());

/// Maps `len` bytes of `fd`, shared. Engine only.
pub fn map(fd: i32, len: usize) -> Result<*mut u8> {
    let spare = SPARE.lock().ok().and_then(|mut s| {
        let i = s.iter().position(|r| r.1 == len)?;
        Some(s.swap_remove(i).0)
    });
    let Some(p) = spare else {
        return sys::map(fd, len);
    };
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: replaces a range that `retire` has put aside and nobody else hands out.
    unsafe {
        syscall!(
            Sysno::mmap,
            p,
            len,
            prot,
            libc::MAP_SHARED | libc::MAP_FIXED,
            fd,
            0
        )
    }
    .map(|p| p as *mut u8)
}

/// Maps `len` bytes of a memfd that came from a peer, after checking that it can't shrink under us.
pub fn map_sealed(fd: i32, len: usize) -> Result<*mut u8> {
    let seals = sys::fcntl(fd, libc::F_GET_SEALS, 0)?;
    if seals & libc::F_SEAL_SHRINK == 0 {
        return Err(Errno::EPERM);
    }
    if sys::file_size(fd)? < len as u64 {
        return Err(Errno::EINVAL);
    }
    // Huge pages can be taken away again, and an access then faults. Such files, unlike the others that can
    // be sealed, refuse even an empty write.
    // SAFETY: no bytes are read.
    unsafe { sys::write_raw(fd, core::ptr::NonNull::dangling().as_ptr(), 0) }?;
    map(fd, len)
}

/// Gives a mapping up: its memory goes back to the system, its address range is kept.
pub fn retire(p: *mut u8, len: usize) {
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // SAFETY: the range is a mapping of ours; what still looks at it accepts any contents.
    let r = unsafe { syscall!(Sysno::mmap, p, len, prot, flags, usize::MAX, 0) };
    if r.is_ok()
        && let Ok(mut s) = SPARE.lock()
    {
        s.push(Range(p, len));
    }
}
