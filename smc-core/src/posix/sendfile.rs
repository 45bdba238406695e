//! sendfile(2) on managed connections.

use libc::{c_int, off_t};

use super::io::{self, Way};
use super::{fail, give};
use crate::fds::{self, Entry};
use crate::stream::{F_NONBLOCK, Sock, Wait};
use crate::sys::{self, Errno, Result};

/// sendfile(2) to a known descriptor.
///
/// # Safety
/// As sendfile(2).
pub unsafe fn sendfile(
    out: Entry,
    out_fd: c_int,
    in_fd: c_int,
    offset: *mut off_t,
    count: usize,
    real: impl FnOnce() -> isize,
) -> isize {
    let s = match out {
        Entry::Sock(s) => s,
        Entry::Set(_) => return real(),
        Entry::Private => return fail(Errno::EBADF),
    };
    if matches!(fds::lookup(in_fd), Some(Entry::Private)) {
        return fail(Errno::EBADF);
    }
    let mut real = Some(real);
    loop {
        if let Some(r) = io::plain(s, Way::Out, &mut real, true, 0) {
            return r;
        }
        // To send nothing makes the kernel check the descriptors and the pointer.
        // SAFETY: promised by the caller.
        if let Err(e) = unsafe { sys::sendfile(out_fd, in_fd, offset, 0) } {
            return fail(e);
        }
        let mut pos = if offset.is_null() {
            None
        } else {
            // SAFETY: the kernel has just read and written it.
            Some(unsafe { offset.read_unaligned() })
        };
        let r = file_to_stream(s, out_fd, in_fd, &mut pos, count.min(sys::MAX_RW_COUNT));
        if let Some(p) = pos {
            // SAFETY: as above.
            unsafe { offset.write_unaligned(p) };
        }
        match r {
            Err(Errno::ESTALE) if fds::is_sock(out_fd, s) => {}
            Err(Errno::ESTALE) => return real.take().map_or(-1, |f| f()),
            Err(Errno::EPIPE) => {
                sys::raise_thread(libc::SIGPIPE);
                return fail(Errno::EPIPE);
            }
            r => return give(r),
        }
    }
}

fn file_to_stream(
    s: &'static Sock,
    fd: c_int,
    file: c_int,
    pos: &mut Option<off_t>,
    count: usize,
) -> Result<usize> {
    let mut wait = Wait::new(s, fd, true);
    let mut done = 0;
    while done < count {
        let r = s.send_fill(fd, count - done, wait.spill(), |p, k| {
            // SAFETY: `k` writable bytes at `p`.
            match unsafe { read_at(file, p, k, pos) } {
                Err(Errno::EISDIR) => Err(Errno::EINVAL),
                r => r,
            }
        });
        let r = match r {
            Err(Errno::EAGAIN) if !s.has(F_NONBLOCK) => match wait.sleep() {
                Ok(()) => continue,
                Err(e) => Err(e),
            },
            // Gone back to plain TCP in the middle: the rest goes the kernel's way.
            Err(Errno::ESTALE) if done > 0 => rest(s, fd, file, pos, count - done),
            r => r,
        };
        match r {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(Errno::ESTALE) if done > 0 && fds::is_sock(fd, s) => {}
            Err(e) if done > 0 => {
                s.keep_error_of_copy(fd, e);
                break;
            }
            Err(e) => return Err(e),
        }
    }
    Ok(done)
}

/// One plain call, counted as any. `Err(ESTALE)`: the connection is managed again.
#[cold]
fn rest(
    s: &'static Sock,
    fd: c_int,
    file: c_int,
    pos: &mut Option<off_t>,
    count: usize,
) -> Result<usize> {
    let mut r = Err(Errno::ESTALE);
    if fds::is_sock(fd, s) {
        io::plain_call(s, true, || {
            let at = pos
                .as_mut()
                .map_or(core::ptr::null_mut(), |p| p as *mut off_t);
            // SAFETY: null, or an offset of our own.
            r = unsafe { sys::sendfile(fd, file, at, count) };
            r.unwrap_or(0) as u64
        });
    }
    r
}

/// # Safety
/// `k` writable bytes at `p`.
unsafe fn read_at(file: c_int, p: *mut u8, k: usize, pos: &mut Option<off_t>) -> Result<usize> {
    match pos {
        Some(at) => {
            // SAFETY: promised by the caller.
            let n = unsafe { sys::pread_raw(file, p, k, *at) }?;
            *at += n as off_t;
            Ok(n)
        }
        // SAFETY: promised by the caller.
        None => unsafe { sys::read_raw(file, p, k) },
    }
}
