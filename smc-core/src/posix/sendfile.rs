//! sendfile(2) on managed connections.

use libc::{c_int, iovec, off_t};

use super::{fail, give};
use crate::fds::{self, Entry};
use crate::stream::{F_NONBLOCK, Sock};
use crate::sys::{self, Errno, Result};

/// Bytes that go through the stack at a time while a direction is on TCP.
pub(super) const PIECE: usize = 4096;

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
    if let Some(r) = kernel(s, true, real) {
        return r;
    }
    if fds::sock(in_fd).is_some() {
        return fail(Errno::EINVAL);
    }
    // SAFETY: null or readable and writable, as sendfile(2) requires.
    let at = unsafe { offset.as_mut() };
    let mut pos = at.as_deref().copied();
    let r = file_to_stream(s, out_fd, in_fd, &mut pos, count.min(0x7fff_f000));
    if let (Some(a), Some(p)) = (at, pos) {
        *a = p;
    }
    finish(r)
}

pub(super) fn finish(r: Result<usize>) -> isize {
    if r == Err(Errno::EPIPE) {
        sys::raise_thread(libc::SIGPIPE);
    }
    give(r)
}

/// The kernel's call on a connection that rides TCP alone; its bytes count as ours. `None`: it does not.
pub(super) fn kernel(s: &'static Sock, tx: bool, real: impl FnOnce() -> isize) -> Option<isize> {
    let mut r = None;
    super::io::plain_call(s, tx, || {
        let n = real();
        r = Some(n);
        n.max(0) as u64
    });
    r
}

fn file_to_stream(
    s: &'static Sock,
    fd: c_int,
    file: c_int,
    pos: &mut Option<off_t>,
    count: usize,
) -> Result<usize> {
    let mut done = 0;
    while done < count {
        let mut eof = false;
        let r = s.send_fill(fd, count - done, |p, k| {
            // SAFETY: `k` writable bytes at `p`, in the ring.
            let n = unsafe { read_at(file, p, k, pos) }?;
            eof = n == 0;
            Ok(n)
        });
        let r = match r {
            Ok(Some(n)) => Ok(n),
            Ok(None) => through_stack(s, fd, file, pos, (count - done).min(PIECE))
                .inspect(|&n| eof = n == 0),
            Err(e) => Err(e),
        };
        match r {
            Ok(n) => {
                done += n;
                if eof || n == 0 {
                    return Ok(done);
                }
            }
            Err(Errno::EAGAIN) if !s.has(F_NONBLOCK) => match s.block(fd, true) {
                Ok(()) => {}
                Err(_) if done > 0 => return Ok(done),
                Err(e) => return Err(e),
            },
            Err(_) if done > 0 => return Ok(done),
            Err(e) => return Err(e),
        }
    }
    Ok(done)
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

fn through_stack(
    s: &'static Sock,
    fd: c_int,
    file: c_int,
    pos: &mut Option<off_t>,
    want: usize,
) -> Result<usize> {
    let mut buf = [0u8; PIECE];
    // SAFETY: `want <= PIECE` writable bytes.
    let n = unsafe { read_at(file, buf.as_mut_ptr(), want, pos) }?;
    if n == 0 {
        return Ok(0);
    }
    let v = [iovec {
        iov_base: buf.as_mut_ptr().cast(),
        iov_len: n,
    }];
    // SAFETY: `n` readable bytes.
    let sent = unsafe { send_any(s, fd, &v) };
    let back = (n - sent.unwrap_or(0)) as off_t;
    if back > 0 {
        match pos {
            Some(at) => *at -= back,
            None => sys::seek_back(file, back),
        }
    }
    sent
}

/// Sends whichever way the connection goes now: it may go back to plain TCP at any moment.
///
/// # Safety
/// The list must describe readable memory.
pub(super) unsafe fn send_any(s: &'static Sock, fd: c_int, v: &[iovec]) -> Result<usize> {
    loop {
        // SAFETY: promised by the caller.
        match unsafe { s.send(fd, v, 0) } {
            Err(Errno::ESTALE) => {}
            r => return r,
        }
        // SAFETY: promised by the caller.
        let send = || unsafe { sys::send(fd, v, libc::MSG_NOSIGNAL) };
        if let Some(r) = plainly(s, fd, true, send) {
            return r;
        }
    }
}

/// A plain call on a connection that was not managed a moment ago. `None`: it is managed again.
pub(super) fn plainly(
    s: &'static Sock,
    fd: c_int,
    tx: bool,
    call: impl FnOnce() -> Result<usize>,
) -> Option<Result<usize>> {
    if !fds::is_sock(fd, s) {
        return Some(Err(Errno::EBADF));
    }
    let mut r = None;
    super::io::plain_call(s, tx, || {
        let n = call();
        r = Some(n);
        n.unwrap_or(0) as u64
    });
    r
}
