//! Reading and writing messages: recvmsg, sendmsg and their forms for several at once.

use core::sync::atomic::Ordering::Relaxed;

use libc::{MSG_DONTWAIT, MSG_OOB, c_int, c_uint, mmsghdr, msghdr, timespec};

use super::check::{received_message, sent_message};
use super::give;
use super::io::{Way, input, output, plain_call};
use crate::fds::Entry;
use crate::stream::Sock;
use crate::sys::{self, Errno};

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
    let _ = timeout;
    let mut flags = flags;
    // SAFETY: the caller's list; a failing kernel call is made by hand, with the same meaning.
    unsafe {
        each_message(e, Way::In, vec, n, real, |m| {
            let (m, now) = (&raw mut *m, flags & !libc::MSG_WAITFORONE);
            if flags & libc::MSG_WAITFORONE != 0 {
                flags |= MSG_DONTWAIT;
            }
            recvmsg(e, fd, m, now, || give(sys::recvmsg(fd, &mut *m, now)))
        })
    }
}

/// Moves the messages of a list one after the other by `one`, unless the kernel can do it at once. Returns how many, or
/// -1 if the first fails.
///
/// # Safety
/// The list has `n` elements, as recvmmsg(2) and sendmmsg(2) take it.
unsafe fn each_message(
    e: Entry,
    way: Way,
    vec: *mut mmsghdr,
    n: c_uint,
    real: impl FnOnce() -> c_int,
    mut one: impl FnMut(&mut msghdr) -> isize,
) -> c_int {
    let Entry::Sock(s) = e else { return real() };
    if n == 0 || (vec as usize) < 4096 {
        return real();
    }
    if let Some(r) = uncounted(s, way, &mut Some(real)) {
        return r;
    }
    for i in 0..n as usize {
        // SAFETY: element i < n of the caller's list.
        let m = unsafe { &mut *vec.add(i) };
        let r = one(&mut m.msg_hdr);
        if r < 0 {
            return if i > 0 { i as c_int } else { -1 };
        }
        m.msg_len = r as c_uint;
    }
    n as c_int
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
    // SAFETY: the caller's list; a failing kernel call is made by hand, with the same meaning.
    unsafe {
        each_message(e, Way::Out, vec, n, real, |m| {
            sendmsg(e, fd, m, flags, || give(sys::sendmsg(fd, m, flags)))
        })
    }
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
