//! Reading and writing.

use core::sync::atomic::Ordering::{Relaxed, SeqCst};

use libc::{
    MSG_DONTWAIT, MSG_ERRQUEUE, MSG_NOSIGNAL, MSG_OOB, MSG_PEEK, c_int, c_uint, c_void, iovec,
    mmsghdr, msghdr, sockaddr, socklen_t, timespec,
};

use super::{fail, give, pin};
use crate::fds::Entry;
use crate::observe::Reason;
use crate::stream::{F_BROKEN, F_INHERITED, Sock};
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
) -> Option<isize> {
    if s.has(F_INHERITED | F_BROKEN) {
        if s.has(F_BROKEN) && !s.managed() {
            return Some(fail(Errno::ECONNRESET));
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

/// Checks a list as the kernel would.
fn check(iov: *const iovec, n: usize, too_many: Errno) -> Result<&'static [iovec], Errno> {
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

unsafe fn input(
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
        if let Some(r) = plain(s, Way::In, &mut real, count) {
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

unsafe fn output(
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
        if let Some(r) = plain(s, Way::Out, &mut real, true) {
            return r;
        }
        // SAFETY: the caller's list.
        match unsafe { s.send(fd, iov, flags) } {
            Err(Errno::ESTALE) if crate::fds::is_sock(fd, s) => {}
            Err(Errno::ESTALE) => return real.take().map_or(-1, |f| f()),
            Err(Errno::EPIPE) => {
                if flags & MSG_NOSIGNAL == 0 {
                    sys::raise_thread(libc::SIGPIPE);
                }
                return fail(Errno::EPIPE);
            }
            r => return give(r),
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
        match check($iov, $n, $too_many) {
            Ok(l) => l,
            Err(e) => return fail(e) as _,
        }
    };
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
    let l = list!(m.msg_iov, m.msg_iovlen, Errno::EMSGSIZE);
    let mut by_kernel = false;
    // SAFETY: promised by the caller.
    let r = unsafe {
        input(e, fd, l, flags, || {
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
    let l = list!(m.msg_iov, m.msg_iovlen, Errno::EMSGSIZE);
    // SAFETY: promised by the caller.
    unsafe { output(e, fd, l, flags, real) }
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
