//! splice(2) on managed connections.

use libc::{POLLIN, POLLOUT, c_int, c_uint, iovec, loff_t};

use super::sendfile::{PIECE, finish, kernel, plainly, send_any};
use super::{fail, give};
use crate::fds::{self, Entry};
use crate::stream::{F_NONBLOCK, Sock};
use crate::sys::{self, Errno, Result};

/// splice(2) where one of the two descriptors is known.
///
/// # Safety
/// As splice(2).
pub unsafe fn splice(
    fd_in: c_int,
    off_in: *mut loff_t,
    fd_out: c_int,
    off_out: *mut loff_t,
    len: usize,
    flags: c_uint,
    real: impl FnOnce() -> isize,
) -> isize {
    let _ = (off_in, off_out);
    let nowait = flags & libc::SPLICE_F_NONBLOCK != 0;
    let (from, to) = match (fds::lookup(fd_in), fds::lookup(fd_out)) {
        (Some(Entry::Private), _) | (_, Some(Entry::Private)) => return fail(Errno::EBADF),
        (_, Some(Entry::Sock(s))) => (None, Some(s)),
        (Some(Entry::Sock(s)), _) => (Some(s), None),
        _ => return real(),
    };
    let Some(s) = from.or(to) else { return real() };
    if let Some(r) = kernel(s, to.is_some(), real) {
        return r;
    }
    if to.is_some() {
        finish(pipe_to_stream(s, fd_in, fd_out, len, nowait))
    } else {
        give(stream_to_pipe(s, fd_in, fd_out, len, nowait))
    }
}

/// Waits for a pipe. False: it must not be waited for and is not ready.
fn pipe_ready(fd: c_int, events: i16, nowait: bool) -> Result<bool> {
    let mut p = [libc::pollfd {
        fd,
        events,
        revents: 0,
    }];
    if sys::poll_many(&mut p)? > 0 {
        return Ok(true);
    }
    if nowait || sys::fcntl(fd, libc::F_GETFL, 0)? & libc::O_NONBLOCK != 0 {
        return Ok(false);
    }
    sys::ppoll(&mut p, None, None).map(|_| true)
}

fn pipe_to_stream(
    s: &'static Sock,
    pipe: c_int,
    fd: c_int,
    len: usize,
    nowait: bool,
) -> Result<usize> {
    if !pipe_ready(pipe, POLLIN, nowait)? {
        return Err(Errno::EAGAIN);
    }
    let have = sys::ioctl_int(pipe, libc::FIONREAD)?.max(0) as usize;
    if have == 0 || len == 0 {
        return Ok(0);
    }
    let want = have.min(len);
    loop {
        // What the pipe holds can be read without waiting, as long as nobody else reads it.
        // SAFETY: `k` writable bytes at `p`, in the ring.
        match s.send_fill(fd, want, |p, k| unsafe { sys::read_raw(pipe, p, k) }) {
            Ok(Some(n)) => return Ok(n),
            Ok(None) => {
                if sys::poll_now(fd, POLLOUT) == 0 && (nowait || s.has(F_NONBLOCK)) {
                    return Err(Errno::EAGAIN);
                }
                let mut buf = [0u8; PIECE];
                // SAFETY: `want.min(PIECE)` writable bytes.
                let n = unsafe { sys::read_raw(pipe, buf.as_mut_ptr(), want.min(PIECE)) }?;
                return send_all(s, fd, &mut buf[..n]).map(|()| n);
            }
            Err(Errno::EAGAIN) if !nowait => s.block(fd, true)?,
            Err(e) => return Err(e),
        }
    }
}

/// Sends bytes that can't be put back where they came from.
fn send_all(s: &'static Sock, fd: c_int, bytes: &mut [u8]) -> Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        let v = [iovec {
            iov_base: bytes[done..].as_mut_ptr().cast(),
            iov_len: bytes.len() - done,
        }];
        // SAFETY: the rest of the slice.
        match unsafe { send_any(s, fd, &v) } {
            Ok(n) => done += n,
            Err(Errno::EAGAIN | Errno::EINTR) => {
                let mut p = [libc::pollfd {
                    fd,
                    events: POLLOUT,
                    revents: 0,
                }];
                let slice = libc::timespec {
                    tv_sec: 0,
                    tv_nsec: 1_000_000,
                };
                let _ = sys::ppoll(&mut p, Some(slice), None);
            }
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

fn stream_to_pipe(
    s: &'static Sock,
    fd: c_int,
    pipe: c_int,
    len: usize,
    nowait: bool,
) -> Result<usize> {
    if !pipe_ready(pipe, POLLOUT, nowait)? {
        return Err(Errno::EAGAIN);
    }
    // A writable pipe takes PIPE_BUF bytes without waiting.
    let want = len.min(PIECE);
    loop {
        // SAFETY: `k` readable bytes at `p`, in the ring.
        match s.recv_take(fd, want, |p, k| unsafe { sys::write_raw(pipe, p, k) }) {
            Ok(Ok(n)) => return Ok(n),
            Ok(Err(_)) | Err(Errno::ESTALE) => {
                let mut buf = [0u8; PIECE];
                let v = [iovec {
                    iov_base: buf.as_mut_ptr().cast(),
                    iov_len: want,
                }];
                let flags = if nowait { libc::MSG_DONTWAIT } else { 0 };
                // SAFETY: `want <= PIECE` writable bytes.
                let n = unsafe { recv_any(s, fd, &v, flags) }?;
                let mut done = 0;
                while done < n {
                    // SAFETY: the rest of what was received.
                    done += unsafe { sys::write_raw(pipe, buf[done..].as_ptr(), n - done) }?;
                }
                return Ok(n);
            }
            Err(Errno::EAGAIN) if !nowait => s.block(fd, false)?,
            Err(e) => return Err(e),
        }
    }
}

/// As `send_any`, for receiving.
///
/// # Safety
/// The list must describe writable memory.
unsafe fn recv_any(s: &'static Sock, fd: c_int, v: &[iovec], flags: c_int) -> Result<usize> {
    loop {
        // SAFETY: promised by the caller.
        match unsafe { s.recv(fd, v, flags) } {
            Err(Errno::ESTALE) => {}
            r => return r,
        }
        // SAFETY: promised by the caller.
        if let Some(r) = plainly(s, fd, false, || unsafe { sys::recv(fd, v, flags) }) {
            return r;
        }
    }
}
