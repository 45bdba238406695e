//! epoll_wait(2).

use core::sync::atomic::Ordering::{Relaxed, SeqCst};

use libc::{EPOLLERR, EPOLLET, EPOLLHUP, EPOLLONESHOT, EPOLLOUT, epoll_event, sigset_t, timespec};

use super::epoll::{BELL_DATA, reg_of_cookie};
use super::{R_DISARMED, R_MANAGED, R_USED, Reg, Set};
use crate::fds;
use crate::stream::spin;
use crate::sys::{self, Errno};
use crate::{engine, node};

/// Kernel descriptors of a set are looked at at least this often while rings are busy.
const LOOK_EVERY_NS: u64 = 100_000;

/// epoll_wait(2) and its relatives; `timeout` null waits for ever.
///
/// # Safety
/// As epoll_pwait2(2).
pub unsafe fn epoll_wait(
    set: &'static Set,
    epfd: i32,
    evs: *mut epoll_event,
    max: i32,
    timeout: *const timespec,
    sigmask: *const sigset_t,
    real: impl FnOnce() -> i32,
) -> i32 {
    // SAFETY: null or readable, as the kernel would require.
    let limit =
        unsafe { timeout.as_ref() }.map(|t| t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64);
    let mut deadline = None;
    if (evs as usize) < 4096 && max > 0 && set.touched() && set.peek() {
        sys::set_errno(Errno::EFAULT);
        return -1;
    }
    if !set.touched() || max <= 0 || (evs as usize) < 4096 {
        let started = if limit.is_some_and(|l| l > 0) {
            sys::now_ns()
        } else {
            0
        };
        set.sleepers.fetch_add(1, SeqCst);
        let r = real();
        set.sleepers.fetch_sub(1, SeqCst);
        if r <= 0 || !set.touched() {
            return r;
        }
        // SAFETY: the kernel has written `r` events.
        let n = unsafe { set.translate(evs, r as usize) };
        if n > 0 {
            set.pass_on();
            return n as i32;
        }
        // Only news of our own: go on waiting, the set is managed now.
        deadline = limit.map(|l| started.saturating_add(l));
    } else if let Some(l) = limit {
        deadline = Some(if l == 0 {
            0
        } else {
            sys::now_ns().saturating_add(l)
        });
    }
    // SAFETY: as promised.
    match unsafe { set.wait(epfd, evs, max as usize, deadline, sigmask) } {
        Ok(n) => n as i32,
        Err(e) => {
            sys::set_errno(e);
            -1
        }
    }
}

impl Reg {
    /// What the program would be told of this registration now, in epoll bits.
    pub(super) fn ready_for(&self) -> u32 {
        let want = self.events.load(Relaxed) | (EPOLLERR | EPOLLHUP) as u32;
        if let Some(child) = self.child() {
            return if child.peek() {
                libc::EPOLLIN as u32 & want
            } else {
                0
            };
        }
        // SAFETY: streams are type-stable.
        let Some(s) = (unsafe { self.sock.load(Relaxed).as_ref() }) else {
            return 0;
        };
        let fd = self.fd.load(Relaxed);
        let fd = if fds::is_sock(fd, s) {
            fd
        } else {
            s.fd.load(Relaxed)
        };
        u32::from(s.mask(fd, want & EPOLLOUT as u32 != 0, false) as u16) & want
    }
}

impl Set {
    /// Filters our own events out of what the kernel reported, turning them into pushes; returns how
    /// many of the program's remain.
    ///
    /// # Safety
    /// `evs` must hold `n` events.
    pub(super) unsafe fn translate(&self, evs: *mut epoll_event, n: usize) -> usize {
        let mut kept = 0;
        for k in 0..n {
            // SAFETY: k < n.
            let ev = unsafe { *evs.add(k) };
            let data = ev.u64;
            if data == BELL_DATA {
                continue;
            }
            if let Some(i) = reg_of_cookie(data)
                && let Some(reg) = self.reg(i)
            {
                // SAFETY: streams are type-stable.
                if let Some(s) = unsafe { reg.sock.load(Relaxed).as_ref() } {
                    s.rx_hint();
                }
                self.ready.set(i);
                continue;
            }
            // SAFETY: kept <= k < n.
            unsafe { *evs.add(kept) = ev };
            kept += 1;
        }
        kept
    }

    /// Reports what pushed registrations are ready for, after the `told` events that the kernel has reported; returns how
    /// many it has added. Under no lock.
    ///
    /// # Safety
    /// `evs` must be writable for `max` events, and hold `told`.
    unsafe fn harvest(&self, evs: *mut epoll_event, told: usize, max: usize) -> usize {
        let mut n = told;
        self.push_children();
        if !self.ready.any() {
            return 0;
        }
        if n >= max {
            self.rings_first.store(true, Relaxed);
            return 0;
        }
        let Some(_g) = self.lock.lock() else { return 0 };
        let next = self.ready.drain_from(self.next.load(Relaxed), |i| {
            if n == max {
                return false;
            }
            let Some(reg) = self.reg(i) else { return true };
            if reg.state.load(Relaxed) & (R_USED | R_MANAGED | R_DISARMED) != R_USED | R_MANAGED {
                return true;
            }
            let (events, data) = (reg.events.load(Relaxed), reg.data.load(Relaxed));
            // A connection that was taken over after the kernel had reported it: not twice in one answer.
            // SAFETY: the caller's events.
            if (0..told).any(|k| unsafe { *evs.add(k) }.u64 == data) {
                self.ready.set(i);
                self.rings_first.store(true, Relaxed);
                return true;
            }
            let got = reg.ready_for();
            if got == 0 {
                return true;
            }
            let ev = epoll_event {
                events: got,
                u64: data,
            };
            // SAFETY: n < max.
            unsafe { *evs.add(n) = ev };
            n += 1;
            if events & EPOLLONESHOT as u32 != 0 {
                reg.state.fetch_or(R_DISARMED, Relaxed);
            } else if events & EPOLLET as u32 == 0 {
                // Level-triggered: stays until it is found not ready.
                self.ready.set(i);
            }
            true
        });
        self.next.store(next, Relaxed);
        n - told
    }

    /// # Safety
    /// As `harvest`.
    unsafe fn look(&self, epfd: i32, evs: *mut epoll_event, max: usize) -> Result<usize, Errno> {
        // SAFETY: as promised.
        let k = unsafe { sys::epoll_poll(epfd, evs, max as i32) }?;
        // SAFETY: the kernel has written k events.
        Ok(unsafe { self.translate(evs, k) })
    }

    /// Waits while the set has managed registrations. `deadline`: 0 does not wait, `None` for ever.
    ///
    /// # Safety
    /// As `harvest`; `sigmask` null or valid.
    unsafe fn wait(
        &self,
        epfd: i32,
        evs: *mut epoll_event,
        max: usize,
        deadline: Option<u64>,
        sigmask: *const sigset_t,
    ) -> Result<usize, Errno> {
        loop {
            node::dispatch();
            // SAFETY: as promised.
            let stashed = unsafe { self.unstash(evs, max) };
            if stashed > 0 {
                return Ok(stashed);
            }
            let start = sys::now_ns();
            let given_back = self.given_back.load(Relaxed);
            // Whoever has left no room for the others comes after them the next time.
            let due = start.saturating_sub(self.looked.load(Relaxed)) >= LOOK_EVERY_NS
                && !self.rings_first.swap(false, Relaxed);
            let mut n = 0;
            if !due {
                // SAFETY: as promised.
                n = unsafe { self.harvest(evs, 0, max) };
            }
            if n == 0 {
                self.looked.store(start, Relaxed);
                // SAFETY: as promised.
                unsafe {
                    n = self.look(epfd, evs, max)?;
                    n += self.harvest(evs, n, max);
                }
            }
            if n > 0 {
                self.pass_on();
                return Ok(n);
            }
            if deadline.is_some_and(|d| d <= start) {
                // A registration may have gone back to the kernel after the kernel was asked. (The harvest saw it gone
                // under the lock.)
                if self.given_back.load(Relaxed) != given_back {
                    continue;
                }
                return Ok(0);
            }
            let budget = u64::from(self.spin_ns.load(Relaxed)).min(engine::spin_ns());
            let budget = deadline.map_or(budget, |d| budget.min(d - start));
            if spin(start, budget, || {
                self.ready.any() || node::page().links.any()
            }) {
                continue;
            }
            // SAFETY: as promised.
            let n = unsafe { self.sleep(epfd, evs, max, deadline, sigmask) }?;
            let slept = sys::now_ns() - start;
            let most = engine::spin_ns();
            self.spin_ns.store(
                if slept < 4 * most { most } else { budget / 2 } as u32,
                Relaxed,
            );
            if n > 0 {
                self.pass_on();
                return Ok(n);
            }
        }
    }

    /// # Safety
    /// As `wait`.
    unsafe fn sleep(
        &self,
        epfd: i32,
        evs: *mut epoll_event,
        max: usize,
        deadline: Option<u64>,
        sigmask: *const sigset_t,
    ) -> Result<usize, Errno> {
        let bell = self.arm_bell();
        node::dispatch();
        let r = if self.ready.any() || self.child_ready() {
            Ok(0)
        } else {
            let ms = match deadline {
                None => -1,
                Some(d) => i32::try_from(d.saturating_sub(sys::now_ns()).div_ceil(1_000_000))
                    .unwrap_or(i32::MAX),
            };
            // SAFETY: as promised.
            unsafe { sys::epoll_pwait(epfd, evs, max as i32, ms, sigmask) }
        };
        self.disarm(bell);
        self.looked.store(sys::now_ns(), Relaxed);
        // SAFETY: the kernel has written that many events.
        r.map(|k| unsafe { self.translate(evs, k) })
    }
}
