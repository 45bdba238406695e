//! Making, closing and duplicating descriptors; connecting; ends of streams.

use core::sync::atomic::Ordering::{Relaxed, SeqCst};

use libc::{c_int, c_uint, sockaddr, socklen_t};

use super::option::{OPTIONS, unknown_options};
use super::{fail, pin};
use crate::engine;
use crate::fabric::shm::TX_DONE;
use crate::fds::{self, Entry};
use crate::negotiate::{option, remote};
use crate::observe::Reason;
use crate::ready::Set;
use crate::stream::{F_ACCEPTED, F_LISTENER, F_NONBLOCK, F_OFFERS, F_SHUT_RD, F_SHUT_WR, Sock};
use crate::sys::{self, Errno};

fn is_tcp(domain: c_int, ty: c_int, proto: c_int) -> bool {
    (domain == libc::AF_INET || domain == libc::AF_INET6)
        && ty & 0xf == libc::SOCK_STREAM
        && (proto == 0 || proto == libc::IPPROTO_TCP)
}

/// A number that the kernel has just given out can't still be what our table says.
fn fresh(fd: c_int) {
    if let Some(e) = fds::lookup(fd) {
        // Closed by a raw system call.
        fds::clear(fd);
        release(e, fd);
    }
}

fn nonblock(flags: c_int) -> u32 {
    if flags & libc::SOCK_NONBLOCK != 0 {
        F_NONBLOCK
    } else {
        0
    }
}

/// Runs `f` with `errno` preserved.
fn quietly(f: impl FnOnce()) {
    let before = sys::errno();
    f();
    sys::set_errno(Errno::new(before));
}

/// socket(2).
pub fn socket(domain: c_int, ty: c_int, proto: c_int, real: impl FnOnce() -> c_int) -> c_int {
    let fd = real();
    if fd >= 0 {
        quietly(|| {
            fresh(fd);
            if is_tcp(domain, ty, proto) {
                Sock::create(fd, nonblock(ty));
            }
        });
    }
    fd
}

/// accept(2) and accept4(2).
pub fn accept(lfd: c_int, e: Option<Entry>, flags: c_int, real: impl FnOnce() -> c_int) -> c_int {
    if matches!(e, Some(Entry::Private)) {
        return fail(Errno::EBADF) as c_int;
    }
    let fd = real();
    if fd >= 0 && !fds::given_up() {
        quietly(|| {
            fresh(fd);
            let known = match e {
                Some(Entry::Sock(_)) => true,
                _ => {
                    sys::getsockopt::<c_int>(lfd, libc::SOL_SOCKET, libc::SO_PROTOCOL)
                        == Ok(libc::IPPROTO_TCP)
                }
            };
            // Unknown listeners may have set what we then don't know of.
            let (offers, options) = match e {
                Some(Entry::Sock(l)) => (l.has(F_OFFERS), l.flags.load(Relaxed) & OPTIONS),
                _ if known => (false, unknown_options(fd)),
                _ => (false, 0),
            };
            let flags = F_ACCEPTED | nonblock(flags) | options;
            if known
                && let Some(s) = Sock::create(fd, flags)
                && offers
                && option::peer_has_it(fd).unwrap_or(false)
            {
                engine::negotiate(s);
                if !matches!(e, Some(Entry::Sock(l)) if l.waits_are_seen()) {
                    // What it waits for its listener by, it will wait for this one by.
                    s.note(Reason::UnseenWait);
                    engine::decline(s);
                }
            }
        });
    }
    fd
}

/// connect(2).
///
/// # Safety
/// As connect(2).
pub unsafe fn connect(
    e: Entry,
    fd: c_int,
    addr: *const sockaddr,
    len: socklen_t,
    real: impl FnOnce() -> c_int,
) -> c_int {
    let s = match e {
        Entry::Private => return fail(Errno::EBADF) as c_int,
        // The kernel would say that the connection stands, but it is still being negotiated.
        Entry::Sock(s) if s.limbo() => return fail(Errno::EALREADY) as c_int,
        Entry::Sock(s) => s,
        Entry::Set(_) => return real(),
    };
    if s.managed() {
        // SAFETY: readable, as connect(2) requires, if it is long enough for a family.
        let unspec =
            !addr.is_null() && len >= 2 && unsafe { (*addr).sa_family } == libc::AF_UNSPEC as u16;
        if unspec {
            pin(s, Reason::Closed);
        }
    }
    // SAFETY: as above.
    let peer = unsafe { sys::socket_address(addr, len) };
    if !peer.is_some_and(|peer| remote::offer_connect(s, fd, peer)) {
        return real();
    }
    let r = real();
    let errno = Errno::new(sys::errno());
    match r {
        0 if !option::peer_has_it(fd).unwrap_or(false) => {
            log::debug!("the other host does not offer SMC-R");
            s.note(Reason::NoSmcOption);
        }
        0 => {
            engine::negotiate(s);
            return connected(s, fd);
        }
        // Goes on in the background.
        _ if matches!(errno, Errno::EINPROGRESS | Errno::EINTR) => {
            engine::negotiate(s);
        }
        _ => {}
    }
    sys::set_errno(errno);
    r
}

/// Waits for the end of a handshake, as a blocking connect(2) does.
fn connected(s: &'static Sock, fd: c_int) -> c_int {
    while s.limbo() {
        match s.block(fd, true) {
            Ok(()) => {}
            // SO_SNDTIMEO is over.
            Err(Errno::EAGAIN) => return fail(Errno::EINPROGRESS) as c_int,
            Err(e) => return fail(e) as c_int,
        }
    }
    match s.take_error() {
        Some(e) => fail(e) as c_int,
        None => 0,
    }
}

/// listen(2).
pub fn listen(e: Entry, fd: c_int, backlog: c_int, real: impl FnOnce() -> c_int) -> c_int {
    let _ = backlog;
    let Entry::Sock(s) = e else { return real() };
    // Before the first SYN can come.
    let mut offers = 0;
    quietly(|| {
        if !s.has(F_LISTENER) && remote::offer_listen(s, fd) {
            offers = F_OFFERS;
        }
    });
    let r = real();
    if r == 0 {
        s.flags.fetch_or(F_LISTENER | offers, Relaxed);
    }
    r
}

/// bind(2).
pub fn bind(
    e: Entry,
    fd: c_int,
    addr: *const sockaddr,
    len: socklen_t,
    real: impl FnOnce() -> c_int,
) -> c_int {
    let _ = (fd, addr, len);
    match e {
        Entry::Private => fail(Errno::EBADF) as c_int,
        _ => real(),
    }
}

/// shutdown(2).
pub fn shutdown(e: Entry, fd: c_int, how: c_int, real: impl FnOnce() -> c_int) -> c_int {
    let _ = fd;
    let s = match e {
        Entry::Private => return fail(Errno::EBADF) as c_int,
        Entry::Sock(s) if !s.has(F_LISTENER) => s,
        _ => return real(),
    };
    let wr = how == libc::SHUT_WR || how == libc::SHUT_RDWR;
    if s.limbo() && s.defer_shutdown(wr, how != libc::SHUT_WR) {
        return 0;
    }
    if wr {
        s.drain_backlog();
    }
    let done = if wr { F_SHUT_WR } else { 0 } | if how != libc::SHUT_WR { F_SHUT_RD } else { 0 };
    const BOTH: u32 = F_SHUT_RD | F_SHUT_WR;
    if s.managed() && !s.fixed() && (s.flags.load(Relaxed) | done) & BOTH == BOTH {
        s.leave_reading();
    }
    let r = {
        // No send of this direction may be under way: FIN comes after all its bytes.
        let _g = wr.then(|| s.tx.lock.lock());
        let r = real();
        if r == 0 {
            s.flags.fetch_or(done, SeqCst);
            if wr && s.managed() {
                s.out().tx.flags.fetch_or(TX_DONE, SeqCst);
                s.tell_peer();
            }
        }
        r
    };
    if r == 0 && s.managed() {
        s.rx_hint();
        s.on_event();
    }
    r
}

/// What must happen while the descriptor is still open.
fn before_close(e: Entry, fd: c_int) {
    if let Entry::Sock(s) = e
        && s.refs.load(SeqCst) == 1
        && s.managed()
    {
        s.drain_backlog();
        let unread = s.unread_rmb();
        if s.fixed() {
            s.reset_if_dead(fd);
            let lingers = sys::getsockopt::<libc::linger>(fd, libc::SOL_SOCKET, libc::SO_LINGER);
            if unread || lingers.is_ok_and(|l| l.l_onoff != 0 && l.l_linger == 0) {
                s.abort_on_detach();
            }
        } else if unread {
            // TCP resets when unread bytes are thrown away.
            let linger = libc::linger {
                l_onoff: 1,
                l_linger: 0,
            };
            let _ = sys::setsockopt(fd, libc::SOL_SOCKET, libc::SO_LINGER, &linger);
        }
    }
}

/// Takes a number out of the table. For a stream under the locks that the engine holds when it uses the
/// number (see [`Sock::with_fd`]).
pub(super) fn forget_number(e: Entry, fd: c_int) {
    let _locks = match e {
        Entry::Sock(s) => (s.managed().then(|| s.tx.lock.lock()), s.watch.lock()),
        _ => (None, None),
    };
    fds::clear(fd);
}

/// Drops one descriptor's reference. The number has left the table.
pub(super) fn release(e: Entry, fd: c_int) {
    // Where a copy stays, it stands for the object from now on.
    let other = |same: &dyn Fn(Entry) -> bool| {
        let mut found = None;
        fds::each(0, u32::MAX, |n, e| {
            if same(e) {
                found = found.or(Some(n));
            }
        });
        found
    };
    match e {
        Entry::Sock(s) => {
            if s.refs.fetch_sub(1, SeqCst) == 1 {
                s.closed();
            } else if s.fd.load(Relaxed) == fd
                && let Some(n) = other(&|e| matches!(e, Entry::Sock(x) if core::ptr::eq(x, s)))
            {
                s.fd.store(n, Relaxed);
            }
        }
        Entry::Set(s) => {
            if s.refs.fetch_sub(1, SeqCst) == 1 {
                s.closed();
            } else if s.epfd.load(Relaxed) == fd
                && let Some(n) = other(&|e| matches!(e, Entry::Set(x) if core::ptr::eq(x, s)))
            {
                s.epfd.store(n, Relaxed);
            }
        }
        Entry::Private => {}
    }
}

/// close(2).
pub fn close(e: Option<Entry>, fd: c_int, real: impl FnOnce() -> c_int) -> c_int {
    match e {
        None => fds::closing(real),
        Some(Entry::Private) => fail(Errno::EBADF) as c_int,
        Some(e) => {
            quietly(|| before_close(e, fd));
            // Out of the table first: from the real call on, the number may belong to somebody else.
            forget_number(e, fd);
            let r = real();
            quietly(|| release(e, fd));
            r
        }
    }
}

/// close_range(2). Our own descriptors in the range stay.
pub fn close_range(
    first: c_uint,
    last: c_uint,
    flags: c_int,
    mut real: impl FnMut(c_uint, c_uint, c_int) -> c_int,
) -> c_int {
    if first > last || flags & libc::CLOSE_RANGE_CLOEXEC as c_int != 0 {
        return real(first, last, flags);
    }
    let mut from = first;
    let mut result = 0;
    let mut real = |first, last| fds::closing(|| real(first, last, flags));
    fds::each(first, last, |fd, e| {
        if matches!(e, Entry::Private) {
            if from < fd as c_uint {
                result = result.min(real(from, fd as c_uint - 1));
            }
            from = fd as c_uint + 1;
        } else {
            close(Some(e), fd, || {
                sys::close(fd);
                0
            });
        }
    });
    if from <= last {
        result = result.min(real(from, last));
    }
    result
}

/// closefrom(3).
pub fn closefrom(first: c_int, real: impl FnMut(c_uint, c_uint, c_int) -> c_int) {
    close_range(first.max(0) as c_uint, c_uint::MAX, 0, real);
}

/// Enters a copy of `e` at `fd`.
pub(super) fn copied(e: Entry, fd: c_int) {
    match e {
        Entry::Sock(s) => {
            if fds::set_sock(fd, s) {
                s.refs.fetch_add(1, SeqCst);
            } else {
                pin(s, Reason::UnsupportedCall);
            }
        }
        Entry::Set(s) => {
            if fds::set_set(fd, s) {
                s.refs.fetch_add(1, SeqCst);
            }
        }
        Entry::Private => {}
    }
}

/// dup(2), and fcntl's F_DUPFD.
pub fn dup(e: Entry, fd: c_int, real: impl FnOnce() -> c_int) -> c_int {
    let _ = fd;
    if matches!(e, Entry::Private) {
        return fail(Errno::EBADF) as c_int;
    }
    let new = real();
    if new >= 0 {
        quietly(|| {
            fresh(new);
            copied(e, new);
        });
    }
    new
}

/// dup2(2).
pub fn dup2(old: c_int, new: c_int, real: impl FnOnce() -> c_int) -> c_int {
    if old == new {
        return real();
    }
    let (from, to) = (fds::lookup(old), fds::lookup(new));
    if matches!(from, Some(Entry::Private)) || matches!(to, Some(Entry::Private)) {
        return fail(Errno::EBADF) as c_int;
    }
    if sys::fcntl(old, libc::F_GETFD, 0).is_err() {
        return real();
    }
    if let Some(e) = to {
        quietly(|| before_close(e, new));
        forget_number(e, new);
    }
    let r = if to.is_some() {
        real()
    } else {
        fds::closing(real)
    };
    quietly(|| {
        if let Some(e) = to {
            if r >= 0 {
                release(e, new)
            } else {
                copied_back(e, new)
            }
        }
        if let (Some(e), true) = (from, r >= 0) {
            copied(e, new);
        }
    });
    r
}

fn copied_back(e: Entry, fd: c_int) {
    match e {
        Entry::Sock(s) => drop(fds::set_sock(fd, s)),
        Entry::Set(s) => drop(fds::set_set(fd, s)),
        Entry::Private => {}
    }
}

/// dup3(2).
pub fn dup3(old: c_int, new: c_int, flags: c_int, real: impl FnOnce() -> c_int) -> c_int {
    let _ = flags;
    dup2(old, new, real)
}

/// Before fdopen(3): stdio's reads and writes are libc's own, so the stream stays on TCP.
pub fn fdopen(e: Entry, fd: c_int) {
    let _ = fd;
    if let Entry::Sock(s) = e {
        quietly(|| pin(s, Reason::Stdio));
    }
}

/// epoll_create(2) and epoll_create1(2).
pub fn epoll_create(real: impl FnOnce() -> c_int) -> c_int {
    let fd = real();
    if fd >= 0 {
        quietly(|| {
            fresh(fd);
            Set::create(fd);
        });
    }
    fd
}
