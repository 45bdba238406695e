//! poll(2) and select(2).
//!
//! While none of the descriptors is managed, the kernel's call is used, and the streams among them are
//! marked as being in a plain call, so that no direction is upgraded under a sleeping thread.

use core::sync::atomic::Ordering::{Relaxed, SeqCst};

use libc::{
    POLLERR, POLLHUP, POLLIN, POLLNVAL, POLLOUT, POLLPRI, POLLRDHUP, fd_set, pollfd, sigset_t,
    timespec, timeval,
};

use crate::stream::{Sock, spin};
use crate::sys::{self, Errno};
use crate::{engine, fds, node};

const RD: i16 = POLLIN | libc::POLLRDNORM | libc::POLLRDBAND;
const WR: i16 = POLLOUT | libc::POLLWRNORM | libc::POLLWRBAND;
const STACK: usize = 64;

/// poll(2) and ppoll(2); `timeout` null waits for ever.
///
/// # Safety
/// As ppoll(2).
pub unsafe fn poll(
    fds: *mut pollfd,
    nfds: libc::nfds_t,
    timeout: *const timespec,
    sigmask: *const sigset_t,
    real: impl FnOnce() -> i32,
) -> i32 {
    let nfds = nfds as usize;
    if (fds as usize) < 4096 || nfds == 0 || nfds > fds::MAX_FD {
        return real();
    }
    // SAFETY: `fds` has `nfds` elements, as the kernel would require.
    let list = unsafe { core::slice::from_raw_parts_mut(fds, nfds) };
    // SAFETY: null or readable.
    let limit =
        unsafe { timeout.as_ref() }.map(|t| t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64);
    let (mut known, mut managed) = (false, false);
    for p in list.iter() {
        match fds::lookup(p.fd) {
            Some(fds::Entry::Sock(s)) => {
                known = true;
                s.awaited();
                managed |= s.managed();
            }
            Some(fds::Entry::Set(s)) if s.touched() => (known, managed) = (true, true),
            _ => {}
        }
    }
    if !known || limit == Some(0) && !managed || nfds > STACK && too_many(nfds) {
        return real();
    }
    if !managed && let Some(_p) = Plain::enter(list) {
        return real();
    }
    // SAFETY: `sigmask` is as promised.
    match unsafe { wait(list, limit, sigmask) } {
        Ok(n) => n as i32,
        Err(e) => {
            sys::set_errno(e);
            -1
        }
    }
}

/// Marks streams as being in a plain call for as long as it lives.
struct Plain<'a>(&'a [pollfd]);

impl<'a> Plain<'a> {
    /// `None`: one of them has become managed meanwhile.
    fn enter(list: &'a [pollfd]) -> Option<Plain<'a>> {
        each_sock(list, |s, ev| {
            if ev & WR != 0 {
                s.plain_tx.fetch_add(1, SeqCst);
            }
            s.plain_rx.fetch_add(1, SeqCst);
        });
        let p = Plain(list);
        let mut ok = true;
        each_sock(list, |s, _| ok &= !s.managed());
        ok.then_some(p)
    }
}

impl Drop for Plain<'_> {
    fn drop(&mut self) {
        each_sock(self.0, |s, ev| {
            // A number may have changed hands meanwhile. Never below zero; a mark too many or too few on
            // a program that does that keeps a connection on TCP, or is made good by the look
            // at the kernel's counters.
            let down = |a: &core::sync::atomic::AtomicU32| {
                let _ = a.fetch_update(SeqCst, Relaxed, |v| v.checked_sub(1));
            };
            if ev & WR != 0 {
                down(&s.plain_tx);
            }
            down(&s.plain_rx);
        });
    }
}

fn each_sock(list: &[pollfd], mut f: impl FnMut(&'static Sock, i16)) {
    for p in list {
        if let Some(s) = fds::sock(p.fd) {
            f(s, p.events);
        }
    }
}

/// # Safety
/// `sigmask` null or valid.
unsafe fn wait(
    list: &mut [pollfd],
    limit: Option<u64>,
    sigmask: *const sigset_t,
) -> Result<usize, Errno> {
    let mut small = [pollfd {
        fd: -1,
        events: 0,
        revents: 0,
    }; STACK + 1];
    let mut large;
    let kernel: &mut [pollfd] = if list.len() <= STACK {
        &mut small[..=list.len()]
    } else {
        large = vec![small[0]; list.len() + 1];
        &mut large
    };
    let deadline = limit.map(|l| {
        if l == 0 {
            0
        } else {
            sys::now_ns().saturating_add(l)
        }
    });
    let mut first = true;
    loop {
        let start = sys::now_ns();
        let mut n = look(list, kernel, first)?;
        first = false;
        if n > 0 {
            return Ok(n);
        }
        if deadline.is_some_and(|d| d <= start) {
            if deadline == Some(0) {
                // SAFETY: as promised.
                unsafe { take_signals(sigmask) }?;
            }
            return Ok(0);
        }
        let budget = deadline
            .map_or(u64::MAX, |d| d - start)
            .min(engine::spin_ns() / 4);
        if spin(start, budget, || {
            list.iter().any(|p| match fds::lookup(p.fd) {
                Some(fds::Entry::Sock(s)) => s.managed() && s.news(),
                Some(fds::Entry::Set(s)) => s.touched() && s.news(),
                _ => false,
            })
        }) {
            n = look(list, kernel, false)?;
            if n > 0 {
                return Ok(n);
            }
        }
        // SAFETY: as promised.
        unsafe { sleep(list, kernel, deadline, sigmask) }?;
    }
}

/// Whether the kernel refuses so many entries.
#[cold]
fn too_many(nfds: usize) -> bool {
    sys::descriptor_limit().is_some_and(|limit| nfds as u64 > limit)
}

/// Takes a pending signal that the mask of a call lets in, as the kernel's poll does even if it is not to wait:
/// `Err(EINTR)`.
///
/// # Safety
/// `sigmask` null or valid.
unsafe fn take_signals(sigmask: *const sigset_t) -> Result<(), Errno> {
    // SAFETY: promised by the caller.
    let Some(mask) = (unsafe { sigmask.as_ref() }) else {
        return Ok(());
    };
    let now = timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    sys::ppoll(&mut [], Some(now), Some(mask)).map(drop)
}

/// Fills in revents; returns how many descriptors have some.
fn look(list: &mut [pollfd], kernel: &mut [pollfd], force: bool) -> Result<usize, Errno> {
    let mut any_kernel = false;
    for (p, k) in list.iter_mut().zip(kernel.iter_mut()) {
        *k = pollfd {
            fd: -1,
            events: p.events,
            revents: 0,
        };
        p.revents = 0;
        match fds::sock(p.fd) {
            Some(s) if s.managed() => {
                let m = s.mask(p.fd, p.events & WR != 0, force);
                p.revents = m & (p.events | POLLERR | POLLHUP | POLLNVAL);
            }
            _ => match fds::set(p.fd) {
                Some(set) if set.touched() => {
                    if set.peek() {
                        p.revents = p.events & RD;
                    }
                }
                _ => {
                    k.fd = p.fd;
                    any_kernel |= p.fd >= 0;
                }
            },
        }
    }
    if any_kernel {
        let n = list.len();
        sys::poll_many(&mut kernel[..n])?;
        for (p, k) in list.iter_mut().zip(kernel.iter()) {
            p.revents |= k.revents;
        }
    }
    Ok(list.iter().filter(|p| p.revents != 0).count())
}

/// Sleeps until something may have changed.
///
/// # Safety
/// `sigmask` null or valid.
unsafe fn sleep(
    list: &mut [pollfd],
    kernel: &mut [pollfd],
    deadline: Option<u64>,
    sigmask: *const sigset_t,
) -> Result<(), Errno> {
    let bell = node::thread_bell();
    let mut seated = bell.is_some();
    for (p, k) in list.iter().zip(kernel.iter_mut()) {
        *k = *p;
        match fds::lookup(p.fd) {
            // Plain ones too: they may become managed under us.
            Some(fds::Entry::Sock(s)) => {
                seated &= bell.is_some_and(|b| s.take_seat(b).is_some());
                if s.fixed() {
                    k.fd = -1;
                } else if s.managed() {
                    k.events = s.kernel_interest(p.events);
                }
            }
            Some(fds::Entry::Set(s)) if s.touched() => {
                s.arm_bell();
            }
            _ => {}
        }
    }
    let n = list.len();
    kernel[n] = pollfd {
        fd: bell.and_then(node::bell_fd).unwrap_or(-1),
        events: POLLIN,
        revents: 0,
    };
    if let Some(b) = bell {
        node::about_to_sleep(b);
    }
    let ready = list.iter().any(|p| match fds::lookup(p.fd) {
        Some(fds::Entry::Sock(s)) => s.managed() && s.ready_for(p.fd, p.events),
        Some(fds::Entry::Set(s)) => s.touched() && p.events & RD != 0 && s.peek(),
        _ => false,
    });
    let r = if ready {
        Ok(1)
    } else {
        let left = deadline.map(|d| d.saturating_sub(sys::now_ns()));
        let left = if seated {
            left
        } else {
            Some(left.unwrap_or(u64::MAX).min(2_000_000))
        };
        let ts = left.map(|ns| timespec {
            tv_sec: (ns / 1_000_000_000) as i64,
            tv_nsec: (ns % 1_000_000_000) as i64,
        });
        // SAFETY: null or valid, as promised.
        sys::ppoll(kernel, ts, unsafe { sigmask.as_ref() })
    };
    if let Some(b) = bell {
        node::awake(b);
        if kernel[n].revents != 0 {
            sys::eventfd_drain(kernel[n].fd);
        }
    }
    for (p, k) in list.iter().zip(kernel.iter()) {
        match fds::lookup(p.fd) {
            Some(fds::Entry::Sock(s)) => {
                if let Some(b) = bell {
                    s.leave_bell(b);
                }
                if k.revents != 0 {
                    s.rx_hint();
                }
            }
            Some(fds::Entry::Set(s)) if s.touched() => s.disarm(s.bell()),
            _ => {}
        }
    }
    if bell.is_some() {
        node::end_use();
    }
    r.map(drop)
}

/// select(2) and pselect(2). `remaining`: select's timeout, to be updated; null for pselect.
///
/// # Safety
/// As pselect(2).
#[allow(clippy::too_many_arguments)]
pub unsafe fn select(
    nfds: i32,
    r: *mut fd_set,
    w: *mut fd_set,
    x: *mut fd_set,
    timeout: *const timespec,
    remaining: *mut timeval,
    sigmask: *const sigset_t,
    real: impl FnOnce() -> i32,
) -> i32 {
    let n = usize::try_from(nfds).unwrap_or(0).min(libc::FD_SETSIZE);
    let bad = |s: *mut fd_set| !s.is_null() && (s as usize) < 4096;
    if n == 0 || nfds as usize > libc::FD_SETSIZE || bad(r) || bad(w) || bad(x) {
        return real();
    }
    // SAFETY: null or sets of at least `nfds` bits.
    let has = |s: *mut fd_set, fd: usize| !s.is_null() && unsafe { libc::FD_ISSET(fd as i32, s) };
    let mut list = [pollfd {
        fd: -1,
        events: 0,
        revents: 0,
    }; libc::FD_SETSIZE];
    let (mut len, mut known) = (0, false);
    for fd in 0..n {
        let ev = (i16::from(has(r, fd)) * RD)
            | (i16::from(has(w, fd)) * WR)
            | (i16::from(has(x, fd)) * POLLPRI);
        if ev != 0 {
            list[len] = pollfd {
                fd: fd as i32,
                events: ev,
                revents: 0,
            };
            len += 1;
            known |= fds::lookup(fd as i32).is_some();
        }
    }
    if !known {
        return real();
    }
    let list = &mut list[..len];
    let mut managed = list
        .iter()
        .any(|p| fds::set(p.fd).is_some_and(|s| s.touched()));
    each_sock(list, |s, _| {
        s.awaited();
        managed |= s.managed();
    });
    // SAFETY: null or readable.
    let limit =
        unsafe { timeout.as_ref() }.map(|t| t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64);
    if !managed {
        if limit == Some(0) {
            return real();
        }
        if let Some(_p) = Plain::enter(list) {
            return real();
        }
    }
    let start = sys::now_ns();
    // SAFETY: as promised.
    let got = unsafe { wait(list, limit, sigmask) };
    // SAFETY: null or writable, as select(2) requires.
    if let (Some(t), Some(l)) = (unsafe { remaining.as_mut() }, limit) {
        let left = l.saturating_sub(sys::now_ns() - start);
        t.tv_sec = (left / 1_000_000_000) as i64;
        t.tv_usec = (left % 1_000_000_000 / 1000) as i64;
    }
    let bad = list.iter().any(|p| p.revents & POLLNVAL != 0);
    if got.is_err() || bad {
        sys::set_errno(got.err().unwrap_or(Errno::EBADF));
        return -1;
    }
    let mut count = 0;
    for p in list.iter() {
        let mut one = |set: *mut fd_set, asked: i16, on: i16| {
            if !set.is_null() && p.events & asked != 0 {
                if p.revents & on != 0 {
                    count += 1;
                } else {
                    // SAFETY: as above.
                    unsafe { libc::FD_CLR(p.fd, set) };
                }
            }
        };
        one(r, RD, RD | POLLHUP | POLLERR);
        one(w, WR, WR | POLLERR);
        one(x, POLLPRI, POLLPRI);
    }
    if got == Ok(0) {
        return 0;
    }
    count
}

impl Sock {
    /// What a sleeping poll asks of the kernel for a managed connection.
    fn kernel_interest(&self, events: i16) -> i16 {
        let mut k = events & (POLLPRI | POLLRDHUP);
        if self.rx_wakes() {
            k |= events & RD;
        }
        if self.tx.switches.load(Relaxed) & 1 == 0 {
            k |= events & WR;
        }
        k
    }

    /// Whether a poll for `events` would report something, without asking the kernel needlessly.
    fn ready_for(&self, fd: i32, events: i16) -> bool {
        self.mask(fd, events & WR != 0, false) & (events | POLLERR | POLLHUP) != 0
    }
}
