//! Epoll sets that are watched themselves: by poll, by select, or by another epoll set.
//!
//! The kernel finds an epoll instance readable when it holds an event; ours may hold only a bell's, and may
//! not hold those of rings. So whoever watches a set asks [`Set::peek`], and arms the set's bell while
//! it sleeps: a ring makes the instance readable for the kernel.

use core::cell::UnsafeCell;
use core::sync::atomic::AtomicU32;
use core::sync::atomic::Ordering::{Relaxed, SeqCst};
use core::sync::atomic::fence;

use libc::{EPOLLIN, POLLIN, epoll_event};

use super::{POOL, R_DISARMED, R_MANAGED, R_USED, Reg, Set};
use crate::{node, sys};

const STASH: usize = 8;

/// A few events, under the set's lock.
#[derive(Default)]
pub(super) struct Stash {
    used: AtomicU32,
    events: UnsafeCell<[(u32, u64); STASH]>,
}

impl Stash {
    pub(super) fn clear(&self) {
        self.used.store(0, Relaxed);
    }
}

impl Reg {
    /// The epoll set that this registration watches, if it is one.
    pub(super) fn child(&self) -> Option<&'static Set> {
        match self.child.load(Relaxed) {
            0 => None,
            i => POOL.get(i - 1),
        }
    }
}

impl Set {
    /// Whether epoll_wait would report something now. Takes nothing away.
    pub(super) fn peek(&self) -> bool {
        node::dispatch();
        let epfd = self.epfd.load(Relaxed);
        if !self.touched() {
            return sys::poll_now(epfd, POLLIN) != 0;
        }
        // Not waited for: a watching set's lock is held, and fork takes all of them. A look too many is harmless.
        let Some(_g) = self.lock.try_lock() else {
            return true;
        };
        if self.stash.used.load(Relaxed) == 0 && sys::poll_now(epfd, POLLIN) != 0 {
            // Perhaps only news of our own: sort them out. The program's events are kept for it.
            let mut evs = [epoll_event { events: 0, u64: 0 }; STASH];
            // SAFETY: STASH writable events, of which the kernel writes `k`.
            let n = unsafe {
                let k = sys::epoll_poll(epfd, evs.as_mut_ptr(), STASH as i32).unwrap_or(0);
                self.translate(evs.as_mut_ptr(), k)
            };
            // SAFETY: under the lock.
            let kept = unsafe { &mut *self.stash.events.get() };
            for (to, ev) in kept.iter_mut().zip(&evs[..n]) {
                *to = (ev.events, ev.u64);
            }
            self.stash.used.store(n as u32, Relaxed);
        }
        let mut found = self.stash.used.load(Relaxed) > 0;
        if !found {
            self.ready.drain_from(self.next.load(Relaxed), |i| {
                let Some(reg) = self.reg(i) else { return true };
                let live = reg.state.load(Relaxed) & (R_USED | R_MANAGED | R_DISARMED)
                    == R_USED | R_MANAGED;
                found = live && reg.ready_for() != 0;
                !found
            });
        }
        found
    }

    /// Hands stashed events out.
    ///
    /// # Safety
    /// `evs` must be writable for `max` events.
    pub(super) unsafe fn unstash(&self, evs: *mut epoll_event, max: usize) -> usize {
        if self.stash.used.load(Relaxed) == 0 {
            return 0;
        }
        let Some(_g) = self.lock.lock() else { return 0 };
        let n = (self.stash.used.load(Relaxed) as usize).min(max);
        // SAFETY: under the lock.
        let kept = unsafe { &mut *self.stash.events.get() };
        for (i, (events, data)) in kept.iter().take(n).enumerate() {
            // SAFETY: i < n <= max.
            unsafe {
                *evs.add(i) = epoll_event {
                    events: *events,
                    u64: *data,
                }
            };
        }
        kept.rotate_left(n);
        self.stash.used.fetch_sub(n as u32, Relaxed);
        n
    }

    /// Announces a sleeper, of this set or of one that watches it; returns the bell (+ 1), to be
    /// given to [`Set::disarm`]. Look once more after this.
    pub(super) fn arm_bell(&self) -> u32 {
        self.sleepers.fetch_add(1, SeqCst);
        let bell = self.bell.load(Relaxed);
        if bell != 0 {
            node::about_to_sleep(bell - 1);
        }
        self.each_child(&mut |c| {
            c.arm_bell();
        });
        fence(SeqCst);
        bell
    }

    /// A sleeper is awake.
    pub(super) fn disarm(&self, bell: u32) {
        self.sleepers.fetch_sub(1, SeqCst);
        if bell != 0 {
            node::awake(bell - 1);
            fence(SeqCst);
            if self.sleepers.load(SeqCst) > 0 {
                // Others sleep on: the flag is theirs as well, and what came while it was down is for them.
                node::about_to_sleep(bell - 1);
                node::dispatch();
                if self.ready.any() {
                    self.wake();
                }
            }
        }
        self.each_child(&mut |c| c.disarm(c.bell.load(Relaxed)));
    }

    fn each_child(&self, f: &mut dyn FnMut(&'static Set)) {
        if self.children.load(Relaxed) == 0 {
            return;
        }
        for i in 0..self.used.load(Relaxed) {
            if let Some(reg) = self.reg(i)
                && reg.state.load(Relaxed) & R_USED != 0
                && let Some(c) = reg.child()
            {
                f(c);
            }
        }
    }

    /// Whether a watched set has something to report.
    pub(super) fn child_ready(&self) -> bool {
        let mut any = false;
        self.each_child(&mut |c| any |= c.peek());
        any
    }

    /// Marks watched sets for a look: their state is not pushed to us.
    pub(super) fn push_children(&self) {
        if self.children.load(Relaxed) == 0 {
            return;
        }
        for i in 0..self.used.load(Relaxed) {
            if self
                .reg(i)
                .is_some_and(|r| r.state.load(Relaxed) & R_USED != 0 && r.child.load(Relaxed) != 0)
            {
                self.ready.set(i);
            }
        }
    }
}

/// The event mask of a set that watches a set, for the kernel.
pub(super) const CHILD_MASK: u32 = (EPOLLIN | libc::EPOLLET) as u32;
