//! Reading and writing. Messages (recvmsg and its relatives) are in `message`.

use core::sync::atomic::Ordering::{Relaxed, SeqCst};

use libc::{
    MSG_ERRQUEUE, MSG_FASTOPEN, MSG_NOSIGNAL, MSG_OOB, MSG_PEEK, c_int, c_void, iovec, sockaddr,
    socklen_t,
};

use super::check::{self, Checked, Instead, buffer, many, message_flags, one};
use super::{fail, give, pin};
use crate::fds::Entry;
use crate::observe::Reason;
use crate::stream::{F_BROKEN, F_ERROR, F_INHERITED, Sock};
use crate::sys::{self, Errno};

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
    if way == Way::In && count && flags & libc::MSG_DONTWAIT == 0 {
        s.may_wait_in_read();
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
pub(super) fn error_due(s: &Sock) -> Option<Errno> {
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

/// A receiving call. `list` gives and checks the memory; the kernel, if it gets the call, does that itself.
///
/// # Safety
/// The list must describe writable memory (unless MSG_TRUNC discards).
pub(super) unsafe fn input<'a>(
    e: Entry,
    fd: c_int,
    list: impl Fn(&Sock) -> Checked<'a>,
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
            match unsafe { urgent_input(s, fd, list(s), flags) } {
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
        let list = match list(s) {
            Ok(list) => list,
            Err(instead) => return instead.give(),
        };
        let r = match list.all() {
            // SAFETY: the caller's list.
            Some(iov) => unsafe { s.recv(fd, iov, flags) },
            // SAFETY: as far as it is sound.
            None => unsafe { check::recv_partly(s, fd, list, flags) },
        };
        match r {
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
    list: Checked<'_>,
    flags: c_int,
) -> Option<sys::Result<usize>> {
    if s.fixed() {
        let iov = match list {
            Ok(list) => list.all().ok_or(Errno::EFAULT),
            Err(Instead::Error(e)) => Err(e),
            Err(Instead::Nothing) => Ok(&[][..]),
        };
        // SAFETY: promised by the caller.
        return Some(iov.and_then(|iov| unsafe { s.recv_urgent(fd, iov, flags) }));
    }
    pin(s, Reason::Urgent);
    None
}

/// A sending call, as [`input`].
///
/// # Safety
/// The list must describe readable memory.
pub(super) unsafe fn output<'a>(
    e: Entry,
    fd: c_int,
    list: impl Fn(&Sock) -> Checked<'a>,
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
        if flags & (MSG_OOB | MSG_FASTOPEN) != 0
            && let Some(r) = rare_output(s, flags, &mut real)
        {
            return r;
        }
        if let Some(r) = plain(s, Way::Out, &mut real, true, flags) {
            return r;
        }
        let list = match list(s) {
            Ok(list) => list,
            Err(instead) => return instead.give(),
        };
        let r = match list.all() {
            // SAFETY: the caller's list.
            Some(iov) => unsafe { s.send(fd, iov, flags) },
            // SAFETY: as far as it is sound.
            None => unsafe { check::send_partly(s, fd, list, flags) },
        };
        match r {
            Err(Errno::ESTALE) if crate::fds::is_sock(fd, s) => {}
            Err(Errno::ESTALE) => return real.take().map_or(-1, |f| f()),
            Ok(n) => return n as isize,
            Err(e) => return fail_to_send(e, flags),
        }
    }
}

/// What MSG_OOB and MSG_FASTOPEN need first. `Some`: that was all.
#[cold]
fn rare_output(
    s: &'static Sock,
    flags: c_int,
    real: &mut Option<impl FnOnce() -> isize>,
) -> Option<isize> {
    if flags & MSG_FASTOPEN != 0 && s.managed() {
        // There is a connection: the kernel refuses to make another, and sends nothing. (It would make one from a
        // socket that we have disconnected.)
        return Some(if s.fixed() || s.has(F_BROKEN) {
            fail(Errno::EISCONN)
        } else {
            real.take().map_or(-1, |f| f())
        });
    }
    if flags & MSG_OOB != 0 && !s.fixed() {
        pin(s, Reason::Urgent);
    }
    None
}

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
    let v = buffer(buf, len);
    // SAFETY: promised by the caller.
    unsafe { input(e, fd, |_| one(&v).some(), 0, real) }
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
    let v = buffer(buf, len);
    // SAFETY: promised by the caller.
    unsafe { input(e, fd, |_| Ok(one(&v).receiving(flags)), flags, real) }
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
    // SAFETY: promised by the caller.
    unsafe { preadv2(e, fd, iov, n, 0, real) }
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
    let list = |s: &Sock| {
        // SAFETY: the caller's list.
        let list = unsafe { many(iov, n as usize, Errno::EINVAL) }?.some()?;
        check::rwf(s, fd, false, flags)?;
        Ok(list)
    };
    // SAFETY: promised by the caller.
    unsafe { input(e, fd, list, message_flags(flags), real) }
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
    let mut by_kernel = false;
    // SAFETY: promised by the caller.
    let r = unsafe {
        recv(e, fd, buf, len, flags, || {
            by_kernel = true;
            real()
        })
    };
    if r >= 0 && !by_kernel && !addr.is_null() {
        // SAFETY: promised by the caller.
        return give(unsafe { check::no_source(alen, r as usize) });
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
    // SAFETY: promised by the caller.
    unsafe { sendto(e, fd, buf, len, flags, core::ptr::null(), 0, real) }
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
    let v = buffer(buf, len);
    let list = |_: &Sock| {
        check::destination(addr, alen)?;
        Ok(one(&v))
    };
    // SAFETY: promised by the caller.
    unsafe { output(e, fd, list, flags, real) }
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
    let list = |s: &Sock| {
        // SAFETY: the caller's list.
        let list = unsafe { many(iov, n as usize, Errno::EINVAL) }?.some()?;
        check::rwf(s, fd, true, flags)?;
        Ok(list)
    };
    // SAFETY: promised by the caller.
    unsafe { output(e, fd, list, message_flags(flags), real) }
}
