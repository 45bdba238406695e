//! Registrations: epoll_ctl(2), and taking a registration over from the kernel and giving it back.

use core::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};

use libc::{
    EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, EPOLLEXCLUSIVE, EPOLLONESHOT, epoll_event,
};

use super::{R_DISARMED, R_MANAGED, R_PARKED, R_USED, RegRef, Set};
use crate::observe::Reason;
use crate::stream::Sock;
use crate::sys::{self, Errno};
use crate::{fds, node};

/// What a managed connection's kernel registration asks for: every change, once.
const KERNEL_MASK: u32 =
    (libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP | libc::EPOLLPRI | libc::EPOLLET) as u32;

/// Upper half of our own event data: not a canonical address, and no number a program is likely to use.
const TAG: u64 = 0xe5b1_c6a7;
/// Data of a set's bell.
pub(super) const BELL_DATA: u64 = TAG << 32 | 0xffff_ffff;

fn cookie(reg: u32) -> u64 {
    TAG << 32 | u64::from(reg)
}

/// The registration that event data stands for, if it is ours.
pub(super) fn reg_of_cookie(data: u64) -> Option<u32> {
    (data >> 32 == TAG && data != BELL_DATA).then_some(data as u32)
}

/// epoll_ctl(2) where the instance and the descriptor may both be known to us.
///
/// # Safety
/// As epoll_ctl(2): `ev` null or readable.
pub unsafe fn ctl(
    epfd: i32,
    op: i32,
    fd: i32,
    ev: *mut epoll_event,
    real: impl FnOnce() -> i32,
) -> i32 {
    let Some(set) = fds::set(epfd) else {
        return real();
    };
    if (ev as usize) < 4096 && op != EPOLL_CTL_DEL {
        return real();
    }
    let s = match fds::lookup(fd) {
        Some(fds::Entry::Sock(s)) => s,
        // SAFETY: `ev` is as promised.
        Some(fds::Entry::Set(child)) => return unsafe { set.ctl_child(op, fd, child, ev, real) },
        Some(fds::Entry::Private) => {
            sys::set_errno(Errno::EBADF);
            return -1;
        }
        None => return real(),
    };
    s.awaited();
    // SAFETY: as promised; non-null for ADD.
    if op == EPOLL_CTL_ADD && unsafe { (*ev).events } & EPOLLEXCLUSIVE as u32 != 0 {
        pin(s, Reason::Exclusive);
        return real();
    }
    // SAFETY: as promised.
    let r = unsafe { ctl_sock(set, op, fd, s, ev, real) };
    if let Some(reason) = s.cant_serve() {
        pin(s, reason);
    }
    r
}

/// Puts a connection on TCP for good: the kernel alone serves its registrations.
fn pin(s: &'static Sock, reason: Reason) {
    let before = sys::errno();
    // The kernel alone is to report readiness, so nothing may stay in the ring.
    let d = s.downgrade(Some(reason));
    d.wait();
    d.finish();
    sys::set_errno(Errno::new(before));
}

/// # Safety
/// As `ctl`; `ev` non-null unless `op` is DEL.
unsafe fn ctl_sock(
    set: &'static Set,
    op: i32,
    fd: i32,
    s: &'static Sock,
    ev: *mut epoll_event,
    real: impl FnOnce() -> i32,
) -> i32 {
    let Some(_g) = set.lock.lock() else {
        s.set_cant_serve();
        return real();
    };
    let found = set.find(s, fd);
    let parked = found.is_some_and(|(_, r)| r.state.load(Relaxed) & R_PARKED != 0);
    match (op, found) {
        (EPOLL_CTL_ADD, None) => {
            // SAFETY: non-null, and the kernel would read it too.
            let event = unsafe { *ev };
            let r = real();
            if r == 0 {
                set.add(s, fd, event);
            }
            r
        }
        (EPOLL_CTL_ADD, Some((i, reg))) if parked => {
            // SAFETY: as above.
            let event = unsafe { *ev };
            if event.events & EPOLLEXCLUSIVE as u32 != 0 {
                sys::set_errno(Errno::EINVAL);
                return -1;
            }
            set.arm(i, reg, event);
            0
        }
        (EPOLL_CTL_MOD, Some((i, reg))) if !parked => {
            // SAFETY: as above.
            let event = unsafe { *ev };
            if reg.state.load(Relaxed) & R_MANAGED == 0 {
                if event.events & EPOLLONESHOT as u32 != 0
                    && s.wants_oneshot()
                    && set.take_over_armed(i, reg, s, event)
                {
                    return 0;
                }
                let r = real();
                if r == 0 {
                    reg.events.store(event.events, Relaxed);
                    reg.data.store(event.u64, Relaxed);
                }
                return r;
            }
            if event.events & EPOLLEXCLUSIVE as u32 != 0 {
                sys::set_errno(Errno::EINVAL);
                return -1;
            }
            set.arm(i, reg, event);
            0
        }
        (EPOLL_CTL_DEL, Some((_, reg))) if !parked && reg.state.load(Relaxed) & R_MANAGED != 0 => {
            reg.state.store(R_MANAGED | R_PARKED, SeqCst);
            0
        }
        (EPOLL_CTL_DEL, Some((i, _))) if !parked => {
            let r = real();
            if r == 0 {
                set.remove(i);
                set.unlink(s, i);
            }
            r
        }
        (EPOLL_CTL_MOD | EPOLL_CTL_DEL, Some(_)) => {
            sys::set_errno(Errno::ENOENT);
            -1
        }
        _ => real(),
    }
}

impl Set {
    fn find(&self, s: &Sock, fd: i32) -> Option<(u32, &super::Reg)> {
        let me = self.index.load(Relaxed);
        s.regs.iter().find_map(|w| {
            let r = RegRef::unpack(w.load(Relaxed)).filter(|r| r.set == me)?;
            let reg = self.reg(r.reg)?;
            (reg.fd.load(Relaxed) == fd && reg.state.load(Relaxed) & (R_USED | R_PARKED) != 0)
                .then_some((r.reg, reg))
        })
    }

    /// (Re-)arms a managed registration: what is ready now is reported at the next wait.
    fn arm(&self, i: u32, reg: &super::Reg, event: epoll_event) {
        reg.events.store(event.events, Relaxed);
        reg.data.store(event.u64, Relaxed);
        reg.state.store(R_USED | R_MANAGED, SeqCst);
        self.ready.set(i);
        if self.sleepers.load(SeqCst) != 0 {
            self.wake();
        }
    }

    /// Records a registration that the kernel has accepted.
    fn add(&self, s: &'static Sock, fd: i32, event: epoll_event) {
        let Some((i, reg)) = self.alloc_reg() else {
            s.set_cant_serve();
            return;
        };
        reg.sock.store((s as *const Sock).cast_mut(), Relaxed);
        reg.fd.store(fd, Relaxed);
        reg.events.store(event.events, Relaxed);
        reg.data.store(event.u64, Relaxed);
        reg.state.store(R_USED, Relaxed);
        let me = RegRef {
            set: self.index.load(Relaxed),
            reg: i,
        };
        let placed = {
            let _w = s.watch.lock();
            let free = s.regs.iter().find(|r| r.load(Relaxed) == 0);
            free.inspect(|r| r.store(me.pack(), SeqCst)).is_some()
        };
        if !placed {
            reg.state.store(0, Relaxed);
            s.set_cant_serve();
            return;
        }
        if s.managed() {
            if !self.ensure_bell() || !self.take_over(i, s) {
                s.set_cant_serve();
            }
            let _w = s.watch.lock();
            s.renotify();
        }
    }

    fn remove(&self, i: u32) {
        if let Some(reg) = self.reg(i)
            && reg.state.swap(0, SeqCst) & R_MANAGED != 0
        {
            self.managed.fetch_sub(1, Relaxed);
        }
    }

    /// Makes sure that peers can wake a sleeper of this set. Under the lock.
    fn ensure_bell(&self) -> bool {
        if let b @ 1.. = self.bell.load(Relaxed) {
            if self.sleepers.load(SeqCst) > 0 {
                node::about_to_sleep(b - 1);
            }
            return true;
        }
        let Some(b) = node::set_bell() else {
            return false;
        };
        let Some(fd) = node::bell_fd(b) else {
            return false;
        };
        let ev = epoll_event {
            events: (libc::EPOLLIN | libc::EPOLLET) as u32,
            u64: BELL_DATA,
        };
        if sys::epoll_ctl(self.epfd.load(Relaxed), EPOLL_CTL_ADD, fd, Some(&ev)).is_err() {
            node::release_bell(b);
            return false;
        }
        self.bell.store(b + 1, SeqCst);
        // A thread may already be asleep in the kernel: the first event must ring.
        node::about_to_sleep(b);
        true
    }

    /// Re-arms the kernel registration with our cookie. Under the lock.
    fn take_over(&self, i: u32, s: &Sock) -> bool {
        let Some(reg) = self.reg(i) else { return true };
        if reg.state.load(Relaxed) & (R_USED | R_MANAGED) != R_USED {
            return true;
        }
        let ev = epoll_event {
            events: KERNEL_MASK,
            u64: cookie(i),
        };
        let (epfd, fd) = (self.epfd.load(Relaxed), reg.fd.load(Relaxed));
        if sys::epoll_ctl(epfd, EPOLL_CTL_MOD, fd, Some(&ev)).is_ok() {
            reg.state.fetch_or(R_MANAGED, Relaxed);
            self.managed.fetch_add(1, SeqCst);
            s.rx_hint();
            self.ready.set(i);
            self.wake();
            return true;
        }
        false
    }

    /// The program arms a one-shot registration of a connection that may be upgraded. Only now is it known to
    /// be armed (that it has fired, only the kernel knows), so this is the moment to take it over.
    fn take_over_armed(
        &self,
        i: u32,
        reg: &super::Reg,
        s: &'static Sock,
        event: epoll_event,
    ) -> bool {
        if !self.ensure_bell() || !self.take_over(i, s) {
            return false;
        }
        self.arm(i, reg, event);
        s.oneshot_armed();
        true
    }

    /// epoll_ctl(2) for an epoll set `child` at `fd`.
    ///
    /// # Safety
    /// `ev` non-null unless `op` is DEL.
    unsafe fn ctl_child(
        &'static self,
        op: i32,
        fd: i32,
        child: &'static Set,
        ev: *mut epoll_event,
        real: impl FnOnce() -> i32,
    ) -> i32 {
        let Some(_g) = self.lock.lock() else {
            return real();
        };
        let found = (0..self.used.load(Relaxed)).find_map(|i| {
            let reg = self.reg(i)?;
            (reg.state.load(Relaxed) & R_USED != 0
                && reg.child().is_some()
                && reg.fd.load(Relaxed) == fd)
                .then_some((i, reg))
        });
        // The kernel checks (loops, depth, duplicates) and keeps the program's own registration; we re-arm it.
        let r = real();
        if r != 0 {
            return r;
        }
        let slot = match (op, found) {
            (EPOLL_CTL_DEL, Some((i, reg))) => {
                reg.child.store(0, Relaxed);
                self.remove(i);
                self.children.fetch_sub(1, SeqCst);
                return r;
            }
            (_, Some(slot)) => Some(slot),
            (EPOLL_CTL_ADD, None) => self.alloc_reg(),
            _ => None,
        };
        let Some((i, reg)) = slot else { return r };
        // SAFETY: non-null, and the kernel has read it.
        let event = unsafe { *ev };
        let kernel = epoll_event {
            events: super::nested::CHILD_MASK,
            u64: cookie(i),
        };
        let epfd = self.epfd.load(Relaxed);
        if sys::epoll_ctl(epfd, EPOLL_CTL_MOD, fd, Some(&kernel)).is_err() {
            return r;
        }
        if found.is_none() {
            reg.sock.store(core::ptr::null_mut(), Relaxed);
            reg.fd.store(fd, Relaxed);
            reg.child.store(child.index.load(Relaxed) + 1, Relaxed);
            self.managed.fetch_add(1, SeqCst);
            self.children.fetch_add(1, SeqCst);
        }
        self.arm(i, reg, event);
        r
    }
}

impl Sock {
    /// Has the kernel asked at the next look.
    pub(crate) fn rx_hint(&self) {
        self.rx.hint_now();
    }
}

/// Whether all registrations of `s` can be taken over; makes what that needs. Engine, before attach.
pub fn prepare(s: &Sock) -> Result<(), Reason> {
    for w in &s.regs {
        let Some(r) = RegRef::unpack(w.load(Acquire)) else {
            continue;
        };
        let Some(set) = r.set() else { continue };
        let Some(_g) = set.lock.lock() else {
            return Err(Reason::TooManyWaiters);
        };
        let Some(reg) = set.reg(r.reg) else { continue };
        if reg.events.load(Relaxed) & EPOLLONESHOT as u32 != 0
            && reg.state.load(Relaxed) & R_MANAGED == 0
        {
            s.await_oneshot();
            return Err(Reason::Pending);
        }
        if !fds::is_sock(reg.fd.load(Relaxed), s) || !set.ensure_bell() {
            // The number it was registered under is closed, or there is no bell left.
            return Err(Reason::TooManyWaiters);
        }
    }
    Ok(())
}

/// Takes a registration over from the kernel: its connection is managed now.
pub fn manage(r: RegRef, s: &Sock) {
    if let Some(set) = r.set()
        && let Some(_g) = set.lock.lock()
        && (!set.ensure_bell() || !set.take_over(r.reg, s))
    {
        s.set_cant_serve();
    }
}

/// Gives a registration back to the kernel: its connection is plain again.
pub fn unmanage(r: RegRef, s: &Sock) {
    let Some(set) = r.set() else { return };
    let Some(_g) = set.lock.lock() else { return };
    let Some(reg) = set.reg(r.reg) else { return };
    if reg.state.load(Relaxed) & R_MANAGED == 0 {
        return;
    }
    if reg.state.load(Relaxed) & R_PARKED != 0 {
        let (epfd, fd) = (set.epfd.load(Relaxed), reg.fd.load(Relaxed));
        let _ = sys::epoll_ctl(epfd, EPOLL_CTL_DEL, fd, None);
        set.remove(r.reg);
        set.unlink(s, r.reg);
        return;
    }
    let disarmed = reg.state.fetch_and(!(R_MANAGED | R_DISARMED), Relaxed) & R_DISARMED != 0;
    set.given_back.fetch_add(1, Relaxed);
    set.managed.fetch_sub(1, SeqCst);
    if disarmed {
        // The kernel keeps our cookie, which now stands for nothing: it has no mask that means "not armed"
        // for sure. The program's next MOD goes to the kernel and replaces it.
        return;
    }
    let ev = epoll_event {
        events: reg.events.load(Relaxed),
        u64: reg.data.load(Relaxed),
    };
    let _ = sys::epoll_ctl(
        set.epfd.load(Relaxed),
        EPOLL_CTL_MOD,
        reg.fd.load(Relaxed),
        Some(&ev),
    );
}

/// Takes all that is ours out of the kernel's instance, if that can be told: then the kernel's answers need no
/// translation any more. Its connections are plain.
pub fn give_back(set: &Set) -> bool {
    let Some(_g) = set.lock.lock() else {
        return false;
    };
    // A one-shot registration that had fired has kept our cookie.
    let cookies = (0..set.used.load(Relaxed))
        .filter_map(|i| set.reg(i))
        .any(|r| {
            r.state.load(Relaxed) & R_USED != 0 && r.events.load(Relaxed) & EPOLLONESHOT as u32 != 0
        });
    if cookies || set.managed.load(Relaxed) != 0 || set.foreign.load(Relaxed) != 0 {
        return false;
    }
    let bell = set.bell.swap(0, SeqCst);
    if let Some(b) = bell.checked_sub(1) {
        if let Some(fd) = node::bell_fd(b) {
            let _ = sys::epoll_ctl(set.epfd.load(Relaxed), EPOLL_CTL_DEL, fd, None);
        }
        node::release_bell(b);
    }
    true
}

/// Drops a registration whose socket has been closed (the kernel has dropped its own).
pub fn forget(r: RegRef, s: &Sock) {
    if let Some(set) = r.set()
        && let Some(_g) = set.lock.lock()
        && set
            .reg(r.reg)
            .is_some_and(|reg| core::ptr::eq(reg.sock.load(Relaxed), s))
    {
        set.remove(r.reg);
    }
}
