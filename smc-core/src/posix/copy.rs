//! sendfile(2) and splice(2) on managed connections.

use libc::{POLLIN, POLLOUT, c_int, c_uint, iovec, loff_t, off_t};

use super::{fail, give};
use crate::fds::{self, Entry};
use crate::stream::{F_NONBLOCK, Sock};
use crate::sys::{self, Errno, Result};

/// Bytes that go through the stack at a time while a direction is on TCP.
const PIECE: usize = 4096;

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

fn finish(r: Result<usize>) -> isize {
    if r == Err(Errno::EPIPE) {
        sys::raise_thread(libc::SIGPIPE);
    }
    give(r)
}

/// The kernel's call on a connection that rides TCP alone; its bytes count as ours. `None`: it does not.
fn kernel(s: &'static Sock, tx: bool, real: impl FnOnce() -> isize) -> Option<isize> {
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
unsafe fn send_any(s: &'static Sock, fd: c_int, v: &[iovec]) -> Result<usize> {
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

/// A plain call on a connection that was not managed a moment ago. `None`: it is managed again.
fn plainly(
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
