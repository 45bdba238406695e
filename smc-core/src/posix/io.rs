//! Reading and writing. Messages (recvmsg and its relatives) are in `message`.

use core::sync::atomic::Ordering::{Relaxed, SeqCst};

use libc::{
    MSG_DONTWAIT, MSG_ERRQUEUE, MSG_NOSIGNAL, MSG_OOB, MSG_PEEK, c_int, c_void, iovec, sockaddr,
    socklen_t,
};

use super::{fail, give, pin};
use crate::fds::Entry;
use crate::observe::Reason;
use crate::stream::{F_BROKEN, F_ERROR, F_INHERITED, Sock};
use crate::sys::{self, Errno};

/// The kernel's UIO_MAXIOV.
const IOV_MAX: usize = 1024;

/// Which way bytes go.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Way {
    In,
    Out,
}

/// Runs `call` marked as a plain call of a direction, so that no upgrade happens under it, unless the
/// connection is managed; `call` returns the bytes it moved, which are counted.
pub(super) fn plain_call(s: &'static Sock, tx: bool, call: impl FnOnce() -> u64) {
    let generation = s.generation.load(Relaxed);
    let inside = if tx { &s.plain_tx } else { &s.plain_rx };
    inside.fetch_add(1, SeqCst);
    if !s.managed() {
        let n = call();
        if n > 0 && s.generation.load(Relaxed) == generation {
            let before = sys::errno();
            s.count_plain(tx, n);
            sys::set_errno(Errno::new(before));
        } else if n == 0 && !tx {
            s.read_nothing();
        }
    }
    // Counted before it ends. And if the object has got a new life meanwhile (the socket was closed under
    // the call), the mark is gone already.
    if s.generation.load(Relaxed) == generation {
        let _ = inside.fetch_update(SeqCst, Relaxed, |n| n.checked_sub(1));
    }
}

/// Runs a call on a connection that rides TCP alone. `None`: it does not (any more).
#[inline]
pub(super) fn plain(
    s: &'static Sock,
    way: Way,
    real: &mut Option<impl FnOnce() -> isize>,
    count: bool,
    flags: c_int,
) -> Option<isize> {
    if s.has(F_INHERITED | F_BROKEN | F_ERROR) {
        if !s.managed()
            && let Some(e) = error_due(s)
        {
            return Some(match way {
                Way::In => fail(e),
                Way::Out => fail_to_send(e, flags),
            });
        }
        s.claim_inherited();
    }
    let mut r = None;
    plain_call(s, way == Way::Out, || {
        let n = real.take().map_or(-1, |f| f());
        r = Some(n);
        if count { n.max(0) as u64 } else { 0 }
    });
    r
}

/// What a call on a connection that is on TCP says instead of asking the kernel.
#[cold]
fn error_due(s: &Sock) -> Option<Errno> {
    if s.has(F_BROKEN) {
        return Some(Errno::ECONNRESET);
    }
    s.take_error()
}

/// As [`fail`], for sending with these flags: EPIPE comes with a signal.
fn fail_to_send(e: Errno, flags: c_int) -> isize {
    if e == Errno::EPIPE && flags & MSG_NOSIGNAL == 0 {
        sys::raise_thread(libc::SIGPIPE);
    }
    fail(e)
}

/// Checks a list as the kernel would.
pub(super) fn check(
    iov: *const iovec,
    n: usize,
    too_many: Errno,
) -> Result<&'static [iovec], Errno> {
    if n > IOV_MAX {
        return Err(too_many);
    }
    if n == 0 {
        return Ok(&[]);
    }
    if (iov as usize) < 4096 {
        return Err(Errno::EFAULT);
    }
    // SAFETY: the caller's list of `n` elements, which the kernel would read as well.
    let list = unsafe { core::slice::from_raw_parts(iov, n) };
    if list
        .iter()
        .any(|v| v.iov_len > 0 && (v.iov_base as usize) < 4096)
    {
        return Err(Errno::EFAULT);
    }
    if list
        .iter()
        .try_fold(0isize, |a, v| a.checked_add_unsigned(v.iov_len))
        .is_none()
    {
        return Err(Errno::EINVAL);
    }
    Ok(list)
}

pub(super) unsafe fn input(
    e: Entry,
    fd: c_int,
    iov: &[iovec],
    flags: c_int,
    real: impl FnOnce() -> isize,
) -> isize {
    let s = match e {
        Entry::Sock(s) => s,
        Entry::Set(_) => return real(),
        Entry::Private => return fail(Errno::EBADF),
    };
    let mut real = Some(real);
    loop {
        if flags & MSG_OOB != 0 {
            // SAFETY: the caller's list.
            match unsafe { urgent_input(s, fd, iov, flags) } {
                Some(Err(Errno::ESTALE)) if crate::fds::is_sock(fd, s) => continue,
                Some(Err(Errno::ESTALE)) => return real.take().map_or(-1, |f| f()),
                Some(r) => return give(r),
                None => {}
            }
        }
        let count = flags & (MSG_PEEK | MSG_OOB | MSG_ERRQUEUE) == 0;
        if let Some(r) = plain(s, Way::In, &mut real, count, flags) {
            return r;
        }
        if flags & (MSG_OOB | MSG_ERRQUEUE) != 0 {
            return real.take().map_or(-1, |f| f());
        }
        // SAFETY: the caller's list.
        match unsafe { s.recv(fd, iov, flags) } {
            // No longer the managed connection it was: once more from the start.
            Err(Errno::ESTALE) if crate::fds::is_sock(fd, s) => {}
            Err(Errno::ESTALE) => return real.take().map_or(-1, |f| f()),
            r => return give(r),
        }
    }
}

/// recv(2) with MSG_OOB on an SMC-R connection. `None`: it is another, and now on TCP.
///
/// # Safety
/// The list must describe writable memory (unless MSG_TRUNC discards).
#[cold]
unsafe fn urgent_input(
    s: &'static Sock,
    fd: c_int,
    iov: &[iovec],
    flags: c_int,
) -> Option<sys::Result<usize>> {
    if s.fixed() {
        // SAFETY: promised by the caller.
        return Some(unsafe { s.recv_urgent(fd, iov, flags) });
    }
    pin(s, Reason::Urgent);
    None
}

pub(super) unsafe fn output(
    e: Entry,
    fd: c_int,
    iov: &[iovec],
    flags: c_int,
    real: impl FnOnce() -> isize,
) -> isize {
    let s = match e {
        Entry::Sock(s) => s,
        Entry::Set(_) => return real(),
        Entry::Private => return fail(Errno::EBADF),
    };
    let mut real = Some(real);
    loop {
        if flags & MSG_OOB != 0 && !s.fixed() {
            pin(s, Reason::Urgent);
        }
        if let Some(r) = plain(s, Way::Out, &mut real, true, flags) {
            return r;
        }
        // SAFETY: the caller's list.
        match unsafe { s.send(fd, iov, flags) } {
            Err(Errno::ESTALE) if crate::fds::is_sock(fd, s) => {}
            Err(Errno::ESTALE) => return real.take().map_or(-1, |f| f()),
            Ok(n) => return n as isize,
            Err(e) => return fail_to_send(e, flags),
        }
    }
}

/// A buffer that can't be one.
fn bad_pointer(e: Entry, real: impl FnOnce() -> isize) -> isize {
    match e {
        Entry::Sock(s) if s.managed() => fail(Errno::EFAULT),
        _ => real(),
    }
}

fn one(buf: *const c_void, len: usize) -> [iovec; 1] {
    [iovec {
        iov_base: buf.cast_mut(),
        iov_len: len.min(0x7fff_f000),
    }]
}

macro_rules! list {
    ($iov:expr, $n:expr, $too_many:expr) => {
        match $crate::posix::io::check($iov, $n, $too_many) {
            Ok(l) => l,
            Err(e) => return $crate::posix::fail(e) as _,
        }
    };
}
pub(super) use list;

/// read(2).
///
/// # Safety
/// As read(2).
pub unsafe fn read(
    e: Entry,
    fd: c_int,
    buf: *mut c_void,
    len: usize,
    real: impl FnOnce() -> isize,
) -> isize {
    // SAFETY: promised by the caller.
    unsafe { recv(e, fd, buf, len, 0, real) }
}

/// recv(2).
///
/// # Safety
/// As recv(2).
pub unsafe fn recv(
    e: Entry,
    fd: c_int,
    buf: *mut c_void,
    len: usize,
    flags: c_int,
    real: impl FnOnce() -> isize,
) -> isize {
    let v = one(buf, len);
    if (buf as usize) < 4096 && len > 0 && flags & libc::MSG_TRUNC == 0 {
        return bad_pointer(e, real);
    }
    // SAFETY: promised by the caller.
    unsafe { input(e, fd, &v, flags, real) }
}

/// readv(2).
///
/// # Safety
/// As readv(2).
pub unsafe fn readv(
    e: Entry,
    fd: c_int,
    iov: *const iovec,
    n: c_int,
    real: impl FnOnce() -> isize,
) -> isize {
    let l = list!(iov, n as usize, Errno::EINVAL);
    // SAFETY: promised by the caller.
    unsafe { input(e, fd, l, 0, real) }
}

/// What the flags of preadv2(2) and pwritev2(2) mean to recv(2) and send(2).
fn message_flags(rwf: c_int) -> c_int {
    if rwf & libc::RWF_NOWAIT != 0 {
        MSG_DONTWAIT
    } else {
        0
    }
}

/// preadv2(2) with offset -1.
///
/// # Safety
/// As preadv2(2).
pub unsafe fn preadv2(
    e: Entry,
    fd: c_int,
    iov: *const iovec,
    n: c_int,
    flags: c_int,
    real: impl FnOnce() -> isize,
) -> isize {
    let l = list!(iov, n as usize, Errno::EINVAL);
    // SAFETY: promised by the caller.
    unsafe { input(e, fd, l, message_flags(flags), real) }
}

/// recvfrom(2).
///
/// # Safety
/// As recvfrom(2).
#[allow(clippy::too_many_arguments)]
pub unsafe fn recvfrom(
    e: Entry,
    fd: c_int,
    buf: *mut c_void,
    len: usize,
    flags: c_int,
    addr: *mut sockaddr,
    alen: *mut socklen_t,
    real: impl FnOnce() -> isize,
) -> isize {
    // SAFETY: promised by the caller.
    let r = unsafe { recv(e, fd, buf, len, flags, real) };
    if r >= 0 && !addr.is_null() && !alen.is_null() && matches!(e, Entry::Sock(s) if s.managed()) {
        // A stream gives no source address.
        // SAFETY: non-null, as recvfrom(2) requires it writable.
        unsafe { *alen = 0 };
    }
    r
}

/// write(2).
///
/// # Safety
/// As write(2).
pub unsafe fn write(
    e: Entry,
    fd: c_int,
    buf: *const c_void,
    len: usize,
    real: impl FnOnce() -> isize,
) -> isize {
    // SAFETY: promised by the caller.
    unsafe { send(e, fd, buf, len, 0, real) }
}

/// send(2).
///
/// # Safety
/// As send(2).
pub unsafe fn send(
    e: Entry,
    fd: c_int,
    buf: *const c_void,
    len: usize,
    flags: c_int,
    real: impl FnOnce() -> isize,
) -> isize {
    if (buf as usize) < 4096 && len > 0 {
        return bad_pointer(e, real);
    }
    // SAFETY: promised by the caller.
    unsafe { output(e, fd, &one(buf, len), flags, real) }
}

/// sendto(2).
///
/// # Safety
/// As sendto(2).
#[allow(clippy::too_many_arguments)]
pub unsafe fn sendto(
    e: Entry,
    fd: c_int,
    buf: *const c_void,
    len: usize,
    flags: c_int,
    addr: *const sockaddr,
    alen: socklen_t,
    real: impl FnOnce() -> isize,
) -> isize {
    let _ = (addr, alen);
    // SAFETY: promised by the caller. A connected stream ignores the address.
    unsafe { send(e, fd, buf, len, flags, real) }
}

/// writev(2).
///
/// # Safety
/// As writev(2).
pub unsafe fn writev(
    e: Entry,
    fd: c_int,
    iov: *const iovec,
    n: c_int,
    real: impl FnOnce() -> isize,
) -> isize {
    // SAFETY: promised by the caller.
    unsafe { pwritev2(e, fd, iov, n, 0, real) }
}

/// pwritev2(2) with offset -1.
///
/// # Safety
/// As pwritev2(2).
pub unsafe fn pwritev2(
    e: Entry,
    fd: c_int,
    iov: *const iovec,
    n: c_int,
    flags: c_int,
    real: impl FnOnce() -> isize,
) -> isize {
    let l = list!(iov, n as usize, Errno::EINVAL);
    // The kernel doesn't ask the socket.
    if matches!(e, Entry::Sock(_)) && crate::ring::iov_len(l) == 0 {
        return real();
    }
    // SAFETY: promised by the caller.
    unsafe { output(e, fd, l, message_flags(flags), real) }
}
