//! Reading and writing messages: recvmsg, sendmsg and their forms for several at once.

use core::sync::atomic::Ordering::Relaxed;

use libc::{MSG_DONTWAIT, MSG_OOB, c_int, c_uint, mmsghdr, msghdr, timespec};

use super::check::{IOV_MAX, many, received_message, sent_message};
use super::io::{Way, error_due, input, output, plain_call};
use super::{fail, give};
use crate::fds::Entry;
use crate::stream::{F_BROKEN, F_ERROR, Sock};
use crate::sys::{self, Errno, Result};

/// recvmsg(2).
///
/// # Safety
/// As recvmsg(2).
pub unsafe fn recvmsg(
    e: Entry,
    fd: c_int,
    msg: *mut msghdr,
    flags: c_int,
    real: impl FnOnce() -> isize,
) -> isize {
    if (msg as usize) < 4096 {
        return real();
    }
    // SAFETY: the kernel would read it as well.
    let m = unsafe { &mut *msg };
    let mut by_kernel = false;
    // SAFETY: promised by the caller.
    let r = unsafe {
        let list = |_: &Sock| Ok(received_message(m, flags)?);
        input(e, fd, list, flags, || {
            by_kernel = true;
            real()
        })
    };
    if r >= 0 && !by_kernel {
        m.msg_flags = flags & (MSG_OOB | libc::MSG_CMSG_CLOEXEC);
        m.msg_controllen = 0;
        if !m.msg_name.is_null() {
            m.msg_namelen = 0;
        }
    }
    r
}

/// recvmmsg(2).
///
/// # Safety
/// As recvmmsg(2).
pub unsafe fn recvmmsg(
    e: Entry,
    fd: c_int,
    vec: *mut mmsghdr,
    n: c_uint,
    flags: c_int,
    timeout: *mut timespec,
    real: impl FnOnce() -> c_int,
) -> c_int {
    let (s, n) = match several(e, Way::In, vec, n, real) {
        Ok(r) => return r,
        Err(managed) => managed,
    };
    // SAFETY: null, or as recvmmsg(2) requires.
    let mut time = match unsafe { Time::new(timeout) } {
        Ok(time) => time,
        Err(e) => return fail(e) as c_int,
    };
    // As the kernel does, before any message.
    if flags & libc::MSG_ERRQUEUE == 0
        && let Some(e) = error_now(s, fd)
    {
        return fail(e) as c_int;
    }
    let before = sys::errno();
    let mut now = flags & !libc::MSG_WAITFORONE;
    for i in 0..n as usize {
        // SAFETY: element i < n of the caller's list.
        let m = unsafe { &mut *vec.add(i) };
        let header = &raw mut m.msg_hdr;
        // SAFETY: the caller's message; a call of the kernel's has the same meaning.
        let r = unsafe {
            recvmsg(e, fd, header, now, || {
                give(sys::recvmsg(fd, &mut *header, now))
            })
        };
        if r < 0 && i == 0 {
            return -1;
        }
        if r < 0 {
            // As the kernel does, whatever error it is.
            let error = Errno::new(sys::errno());
            if error != Errno::EAGAIN && !s.fixed() {
                s.owe_error(error);
            }
            sys::set_errno(Errno::new(before));
            return i as c_int;
        }
        m.msg_len = r as c_uint;
        if flags & libc::MSG_WAITFORONE != 0 {
            now |= MSG_DONTWAIT;
        }
        if time.is_over() || m.msg_hdr.msg_flags & MSG_OOB != 0 {
            return i as c_int + 1;
        }
    }
    n as c_int
}

/// The time-out of recvmmsg(2), which is looked at after each message only.
struct Time<'a>(Option<(&'a mut timespec, u64)>);

impl Time<'_> {
    /// # Safety
    /// Null, or valid and the caller's.
    unsafe fn new(timeout: *mut timespec) -> Result<Self> {
        if timeout.is_null() {
            return Ok(Time(None));
        }
        if (timeout as usize) < 4096 {
            return Err(Errno::EFAULT);
        }
        // SAFETY: promised by the caller.
        let left = unsafe { &mut *timeout };
        if left.tv_sec < 0 || !(0..1_000_000_000).contains(&left.tv_nsec) {
            return Err(Errno::EINVAL);
        }
        let ns = (left.tv_sec as u64)
            .saturating_mul(1_000_000_000)
            .saturating_add(left.tv_nsec as u64);
        Ok(Time(Some((left, sys::now_ns().saturating_add(ns)))))
    }

    /// Stores what is left; whether it is over.
    fn is_over(&mut self) -> bool {
        let Some((left, end)) = &mut self.0 else {
            return false;
        };
        let ns = end.saturating_sub(sys::now_ns());
        left.tv_sec = (ns / 1_000_000_000) as i64;
        left.tv_nsec = (ns % 1_000_000_000) as i64;
        ns == 0
    }
}

/// The error of the connection that is to be told, if there is one.
fn error_now(s: &Sock, fd: c_int) -> Option<Errno> {
    s.take_error().or_else(|| {
        let e = sys::getsockopt::<c_int>(fd, libc::SOL_SOCKET, libc::SO_ERROR);
        e.ok().filter(|e| *e != 0 && !s.fixed()).map(Errno::new)
    })
}

/// Has the kernel move the messages of a list at once, if it can. `Err`: they are to be moved one after another, on a
/// managed connection.
fn several(
    e: Entry,
    way: Way,
    vec: *mut mmsghdr,
    n: c_uint,
    real: impl FnOnce() -> c_int,
) -> core::result::Result<c_int, (&'static Sock, c_uint)> {
    let Entry::Sock(s) = e else { return Ok(real()) };
    if s.has(F_BROKEN | F_ERROR)
        && !s.managed()
        && let Some(e) = error_due(s)
    {
        return Ok(fail(e) as c_int);
    }
    if n == 0 || (vec as usize) < 4096 {
        return Ok(real());
    }
    uncounted(s, way, &mut Some(real)).ok_or((s, n))
}

/// A plain call whose bytes are taken from the kernel's counters afterwards. `None`: not plain (any more).
fn uncounted(
    s: &'static Sock,
    way: Way,
    real: &mut Option<impl FnOnce() -> c_int>,
) -> Option<c_int> {
    let mut r = None;
    plain_call(s, way == Way::Out, || {
        let n = real.take().map_or(-1, |f| f());
        r = Some(n);
        if n > 0 {
            let before = sys::errno();
            s.resync(way == Way::Out);
            sys::set_errno(Errno::new(before));
        }
        0
    });
    r
}

/// sendmsg(2).
///
/// # Safety
/// As sendmsg(2).
pub unsafe fn sendmsg(
    e: Entry,
    fd: c_int,
    msg: *const msghdr,
    flags: c_int,
    real: impl FnOnce() -> isize,
) -> isize {
    if (msg as usize) < 4096 {
        return real();
    }
    // SAFETY: the kernel would read it as well.
    let m = unsafe { &*msg };
    // SAFETY: promised by the caller.
    unsafe { output(e, fd, |s| Ok(sent_message(s, fd, m)?), flags, real) }
}

/// sendmmsg(2).
///
/// # Safety
/// As sendmmsg(2).
pub unsafe fn sendmmsg(
    e: Entry,
    fd: c_int,
    vec: *mut mmsghdr,
    n: c_uint,
    flags: c_int,
    real: impl FnOnce() -> c_int,
) -> c_int {
    let n = match several(e, Way::Out, vec, n, real) {
        Ok(r) => return r,
        Err((_, n)) => n.min(IOV_MAX as c_uint),
    };
    let before = sys::errno();
    for i in 0..n as usize {
        // SAFETY: element i < n of the caller's list.
        let m = unsafe { &mut *vec.add(i) };
        let header = &raw const m.msg_hdr;
        // SAFETY: the caller's message; a call of the kernel's has the same meaning.
        let r = unsafe {
            sendmsg(e, fd, header, flags, || {
                give(sys::sendmsg(fd, &*header, flags))
            })
        };
        if r < 0 && i == 0 {
            return -1;
        }
        if r < 0 {
            sys::set_errno(Errno::new(before));
            return i as c_int;
        }
        m.msg_len = r as c_uint;
        // SAFETY: the caller's list, which sendmsg has found to be one.
        if (r as usize) < unsafe { bytes_of(&m.msg_hdr) } {
            // What comes behind a part must not be sent before the rest.
            return i as c_int + 1;
        }
    }
    n as c_int
}

/// Bytes of a message.
///
/// # Safety
/// Its list must be one.
unsafe fn bytes_of(m: &msghdr) -> usize {
    // SAFETY: promised by the caller.
    let list = unsafe { many(m.msg_iov, m.msg_iovlen, Errno::EMSGSIZE) };
    list.map_or(0, |list| list.bytes())
}

impl Sock {
    /// Takes a direction's count of bytes from the kernel: for calls that we don't follow byte by byte.
    pub(super) fn resync(&self, tx: bool) {
        let fd = self.fd.load(Relaxed);
        let Ok(i) = sys::TcpInfo::of(fd) else { return };
        let n = if tx {
            i.sent_total().wrapping_sub(self.tx.tcp.load(Relaxed))
        } else {
            let Ok(unread) = sys::ioctl_int(fd, libc::FIONREAD) else {
                return;
            };
            i.bytes_received
                .wrapping_sub(unread as u64)
                .wrapping_sub(self.rx.tcp.load(Relaxed))
        };
        if n < 1 << 40 {
            self.count_plain(tx, n);
        }
    }
}
