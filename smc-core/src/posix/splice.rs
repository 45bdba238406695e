//! splice(2) on managed connections.

use libc::{POLLERR, POLLIN, POLLOUT, c_int, c_uint, loff_t};

use super::io::{self, Way};
use super::{fail, give};
use crate::fds::{self, Entry};
use crate::stream::{F_NONBLOCK, Sock, Wait, kernel_has, wait_for};
use crate::sys::{self, Errno, Result};

/// A writable pipe takes so many bytes without waiting, as long as nobody else writes to it (pipe(7), PIPE_BUF).
const PIECE: usize = 4096;

/// The flags that there are.
const FLAGS: c_uint =
    libc::SPLICE_F_MOVE | libc::SPLICE_F_NONBLOCK | libc::SPLICE_F_MORE | libc::SPLICE_F_GIFT;

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
    let (s, way) = match (fds::lookup(fd_in), fds::lookup(fd_out)) {
        (Some(Entry::Private), _) | (_, Some(Entry::Private)) => return fail(Errno::EBADF),
        (_, Some(Entry::Sock(s))) => (s, Way::Out),
        (Some(Entry::Sock(s)), _) => (s, Way::In),
        _ => return real(),
    };
    let mut real = Some(real);
    loop {
        if let Some(r) = io::plain(s, way, &mut real, true, 0) {
            return r;
        }
        let (fd, pipe) = match way {
            Way::Out => (fd_out, fd_in),
            Way::In => (fd_in, fd_out),
        };
        let whole = len > 0 && flags & !FLAGS == 0 && off_in.is_null() && off_out.is_null();
        let Some(nowait) = may_splice(pipe, fd, way).filter(|_| whole) else {
            // The kernel says what is wrong, or that nothing is to be done.
            return real.take().map_or(-1, |f| f());
        };
        if isize::try_from(len).is_err() {
            return fail(Errno::EINVAL);
        }
        let nowait = nowait || flags & libc::SPLICE_F_NONBLOCK != 0;
        let r = match way {
            Way::Out => pipe_to_stream(s, pipe, fd, len, nowait),
            Way::In => stream_to_pipe(s, fd, pipe, len, nowait),
        };
        match r {
            Err(Errno::ESTALE) if fds::is_sock(fd, s) => {}
            Err(Errno::ESTALE) => return real.take().map_or(-1, |f| f()),
            Err(Errno::EPIPE) if way == Way::Out => {
                sys::raise_thread(libc::SIGPIPE);
                return fail(Errno::EPIPE);
            }
            r => return give(r),
        }
    }
}

/// Whether the pipe is one that the kernel would let bytes through to or from a socket; if so, whether it must not be
/// waited for.
fn may_splice(pipe: c_int, socket: c_int, way: Way) -> Option<bool> {
    if !sys::is_pipe(pipe) {
        return None;
    }
    let mode = sys::fcntl(pipe, libc::F_GETFL, 0).ok()?;
    let wrong = match way {
        Way::Out => libc::O_WRONLY,
        Way::In => libc::O_RDONLY,
    };
    if mode & libc::O_ACCMODE == wrong || mode & libc::O_PATH != 0 {
        return None;
    }
    if way == Way::Out && sys::fcntl(socket, libc::F_GETFL, 0).ok()? & libc::O_APPEND != 0 {
        return None;
    }
    Some(mode & libc::O_NONBLOCK != 0)
}

/// Bytes that a pipe has; `Ok(0)`: its end.
fn held(pipe: c_int, nowait: bool) -> Result<usize> {
    loop {
        let ready = sys::poll_now(pipe, POLLIN);
        if ready != 0 {
            let n = sys::ioctl_int(pipe, libc::FIONREAD)?.max(0) as usize;
            // There may have been some that somebody else has read meanwhile.
            if n > 0 || ready & POLLIN == 0 {
                return Ok(n);
            }
        }
        if nowait {
            return Err(Errno::EAGAIN);
        }
        wait_for(pipe, POLLIN)?;
    }
}

fn pipe_to_stream(
    s: &'static Sock,
    pipe: c_int,
    fd: c_int,
    len: usize,
    nowait: bool,
) -> Result<usize> {
    let mut wait = Wait::new(s, fd, true);
    let mut done = 0;
    while done < len {
        let have = match held(pipe, nowait || done > 0) {
            Ok(0) => break,
            Ok(n) => n,
            Err(_) if done > 0 => break,
            Err(e) => return Err(e),
        };
        let want = have.min(len - done);
        // What the pipe holds can be read without waiting, as long as nobody else reads it.
        // SAFETY: `k` writable bytes at `p`.
        let r = s.send_fill(fd, want, wait.spill(), |p, k| unsafe {
            sys::read_raw(pipe, p, k)
        });
        let r = match r {
            Err(Errno::EAGAIN) if !s.has(F_NONBLOCK) => match wait.sleep() {
                Ok(()) => continue,
                Err(e) => Err(e),
            },
            r => r,
        };
        match r {
            Ok(n) => done += n,
            Err(Errno::ESTALE) if done > 0 => {
                done += rest(s, Way::Out, fd, pipe, len - done);
                break;
            }
            Err(e) if done > 0 => {
                s.keep_error_of_copy(fd, e);
                break;
            }
            Err(e) => return Err(e),
        }
    }
    Ok(done)
}

/// Moves what is left of a splice whose connection has gone back to plain TCP in the middle, as far as it need not wait: a
/// call of the kernel's, counted as any.
#[cold]
fn rest(s: &'static Sock, way: Way, fd: c_int, pipe: c_int, count: usize) -> usize {
    let (from, to) = match way {
        Way::Out => (pipe, fd),
        Way::In => (fd, pipe),
    };
    let mut r = Ok(0);
    if fds::is_sock(fd, s) && (way == Way::Out || kernel_has(fd, 0)) {
        io::plain_call(s, way == Way::Out, || {
            r = sys::splice(from, to, count, libc::SPLICE_F_NONBLOCK);
            r.unwrap_or(0) as u64
        });
    }
    r.unwrap_or_else(|e| {
        s.keep_error_of_copy(fd, e);
        0
    })
}

/// Waits for room in a pipe.
fn room(pipe: c_int, nowait: bool) -> Result<()> {
    loop {
        let ready = sys::poll_now(pipe, POLLOUT);
        if ready & POLLERR != 0 {
            // Nobody reads it.
            return Err(Errno::EPIPE);
        }
        if ready & POLLOUT != 0 {
            return Ok(());
        }
        if nowait {
            return Err(Errno::EAGAIN);
        }
        wait_for(pipe, POLLOUT)?;
    }
}

fn stream_to_pipe(
    s: &'static Sock,
    fd: c_int,
    pipe: c_int,
    len: usize,
    nowait: bool,
) -> Result<usize> {
    let mut wait = Wait::new(s, fd, false);
    let mut done = 0;
    while done < len {
        match room(pipe, nowait || done > 0) {
            Ok(()) => {}
            Err(_) if done > 0 => break,
            Err(e) => {
                if e == Errno::EPIPE {
                    sys::raise_thread(libc::SIGPIPE);
                }
                return Err(e);
            }
        }
        let r = s.recv_take(fd, PIECE.min(len - done), done > 0, |p, k| {
            // SAFETY: `k` readable bytes at `p`.
            unsafe { sys::write_raw(pipe, p, k) }
        });
        match r {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(Errno::ESTALE) if done > 0 => {
                done += rest(s, Way::In, fd, pipe, len - done);
                break;
            }
            Err(_) if done > 0 => break,
            Err(Errno::EAGAIN) if !s.has(F_NONBLOCK) => wait.sleep()?,
            Err(e) => return Err(e),
        }
    }
    Ok(done)
}
