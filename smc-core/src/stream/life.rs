//! A stream's way through its states: publication, a place on a link, leaving it, and the end.

use core::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use core::sync::atomic::{AtomicU64, fence};

use super::{F_INHERITED, F_LEFT, F_LISTENER, F_TCP_ONLY, FREE, MANAGED, PLAIN, PUBLISHED, Sock};
use crate::fabric::shm::TX_CLOSED;
use crate::negotiate::EntryRef;
use crate::node::Link;
use crate::observe::Reason;
use crate::ready::{self, RegRef};
use crate::ring::Ring;
use crate::{engine, fds, sys};

impl Sock {
    /// Records the directory entry of a connection that is still the one of `generation`. False: it
    /// has been closed meanwhile. Engine.
    pub fn published(&self, entry: EntryRef, generation: u32) -> bool {
        let Some(_g) = self.watch.lock() else {
            return false;
        };
        if self.generation.load(SeqCst) != generation
            || self
                .state
                .compare_exchange(PLAIN, PUBLISHED, SeqCst, Relaxed)
                .is_err()
        {
            return false;
        }
        // SAFETY: under `watch`.
        unsafe { *self.entry.get() = Some(entry) };
        true
    }

    /// Takes the directory entry out, to withdraw it.
    pub fn take_entry(&self) -> Option<EntryRef> {
        let _g = self.watch.lock()?;
        // SAFETY: under `watch`.
        unsafe { (*self.entry.get()).take() }
    }

    /// Attaches to a slot of a link. Engine only; both direction locks are held; not managed before.
    pub fn attach(&self, link: &'static Link, slot: u32, tx_ring: Ring, rx_ring: Ring) {
        self.link.store((link as *const Link).cast_mut(), Relaxed);
        self.slot.store(slot, Relaxed);
        // SAFETY: not managed, so nobody reads the rings.
        unsafe {
            *self.tx_ring.get() = tx_ring;
            *self.rx_ring.get() = rx_ring;
        }
        self.tx.switches.store(0, Relaxed);
        self.tx.cons.store(0, Relaxed);
        self.tx.last_up.store(0, Relaxed);
        self.tx.full.store(1, Relaxed);
        self.rx.passed.store(0, Relaxed);
        self.rx.hint.store(1, Relaxed);
        self.rx.frozen.store(0, Relaxed);
        for (now, before) in [
            (&self.tx.rmb, &self.tx.rmb_before),
            (&self.rx.rmb, &self.rx.rmb_before),
        ] {
            before.fetch_add(now.swap(0, Relaxed), Relaxed);
        }
        self.inc().rx.cons.store(self.rx.off(), Relaxed);
        if self.pinned.load(Relaxed) == 0 {
            // It said why there was no place on a link.
            self.reason.store(0, Relaxed);
        }
        link.slots[slot as usize].store((self as *const Sock).cast_mut(), Release);
        link.used.fetch_add(1, SeqCst);
        self.state.store(MANAGED, SeqCst);
        // Pairs with the fence in `downgrade`: it sees us managed, or we see its pin.
        fence(SeqCst);
    }

    /// Second part of attaching, without the direction locks: takes the epoll registrations over.
    pub fn attached(&self) {
        for r in &self.regs {
            if let Some(r) = RegRef::unpack(r.load(SeqCst)) {
                ready::manage(r, self);
            }
        }
        {
            let _g = self.watch.lock();
            self.renotify();
        }
        self.on_event();
    }

    /// Leaves the link: the connection is plain TCP from here. Both direction locks are held and
    /// both directions are on TCP with nothing left in the ring, or the socket is being closed.
    pub(crate) fn detach(&self) {
        if !self.managed() {
            return;
        }
        let (link, slot) = (self.link(), self.slot.load(Relaxed));
        {
            // No `renotify` may be half-way: the slot's next user has wishes of its own.
            let _w = self.watch.lock();
            self.inc().rx.notify.store(0, SeqCst);
            self.state.store(PLAIN, SeqCst);
        }
        engine::withdraw(self);
        // The peer learns that we have gone. Only then may the slot be used again, by whom it may be.
        self.out().tx.flags.fetch_or(TX_CLOSED, SeqCst);
        self.tell_peer();
        link.vacate(slot, self);
        self.ops.store(0, Relaxed);
        engine::slot_released(link);
    }

    /// Leaves the link when both directions have ended on TCP because the peer left it. Called without
    /// locks; returns whether the connection is plain now.
    pub(crate) fn try_detach(&self) -> bool {
        self.leave_if(|s| s.peer_left() || s.has(F_TCP_ONLY))
    }

    /// Leaves the link if both directions have ended on TCP and `may` agrees, under the locks. Called
    /// without locks; returns whether the connection is plain now.
    pub(super) fn leave_if(&self, may: impl FnOnce(&Sock) -> bool) -> bool {
        let (Some(_t), Some(_r)) = (self.tx.lock.lock(), self.rx.lock.lock()) else {
            return false;
        };
        if !self.managed() {
            return true;
        }
        let on_tcp = self.tx.switches.load(Relaxed) & 1 == 0
            && self.rx.passed.load(Relaxed) & 1 == 0
            && self.rx.passed.load(Relaxed) == self.inc().tx.switches.load(Acquire);
        if !on_tcp || !may(self) || !self.tx.backlog.load(Relaxed).is_null() {
            return false;
        }
        self.flags.fetch_and(!F_LEFT, Relaxed);
        if self.noted().is_none() && self.peer_pins() {
            // Nobody can ask the peer once it is off the link.
            self.note(Reason::PeerRequest);
        }
        self.detach();
        drop((_t, _r));
        for r in &self.regs {
            if let Some(r) = RegRef::unpack(r.load(Acquire)) {
                ready::unmanage(r, self);
            }
        }
        true
    }

    /// Leaves the link for good, all being on TCP, whatever the peer does. Called without locks.
    pub(crate) fn leave_link(&self) {
        if self.leave_if(|_| true) {
            // Whoever sleeps on the stream goes on with the kernel's calls.
            self.on_event();
        }
    }

    /// Leaves the link as soon as all is on TCP, as only the kernel can do what the program wants. Called without locks.
    pub(crate) fn leave_soon(&self) {
        self.flags.fetch_or(F_TCP_ONLY | F_LEFT, Relaxed);
        self.leave_link();
    }

    /// The last descriptor of this process has been closed. Gives everything back.
    pub fn closed(&self) {
        for r in &self.regs {
            if let Some(r) = RegRef::unpack(r.swap(0, SeqCst)) {
                ready::forget(r, self);
            }
        }
        {
            let _t = self.tx.lock.lock();
            let _r = self.rx.lock.lock();
            self.detach();
            self.count_bytes();
            self.drop_backlog();
            self.state.store(FREE, SeqCst);
            engine::withdraw(self);
            self.generation.fetch_add(1, Relaxed);
        }
        engine::forget(self);
    }

    /// Bytes sent and received by RMB so far, on this link and those before.
    pub fn rmb_bytes(&self) -> (u64, u64) {
        let sum = |now: &AtomicU64, before: &AtomicU64| now.load(Relaxed) + before.load(Relaxed);
        (
            sum(&self.tx.rmb, &self.tx.rmb_before),
            sum(&self.rx.rmb, &self.rx.rmb_before),
        )
    }

    /// Counts what has gone by RMB, as the connection is over.
    pub(crate) fn count_bytes(&self) {
        let counters = &engine::COUNTERS;
        let (sent, received) = self.rmb_bytes();
        counters.rmb_sent.fetch_add(sent, Relaxed);
        counters.rmb_received.fetch_add(received, Relaxed);
    }

    /// Whether unread bytes wait in the RMB: closing must then reset, as TCP does.
    pub fn unread_rmb(&self) -> bool {
        let Some(_g) = self.rx.lock.lock() else {
            return false;
        };
        self.managed() && self.rx_ring_bytes() > 0
    }

    /// The process exits without closing the socket: unread bytes in the RMB must reset the connection,
    /// as unread bytes in the kernel would.
    pub fn exiting(&self) {
        let fd = self.fd.load(Relaxed);
        if self.exiting_fixed() {
            return;
        }
        if let Some(_g) = self.rx.lock.try_lock()
            && self.managed()
            && fds::is_sock(fd, self)
            && self.rx_ring_bytes() > 0
        {
            let linger = libc::linger {
                l_onoff: 1,
                l_linger: 0,
            };
            let _ = sys::setsockopt(fd, libc::SOL_SOCKET, libc::SO_LINGER, &linger);
        }
    }

    /// In the child of a fork: the link belongs to the parent. All directions are on TCP by now.
    pub fn after_fork_child(&self) {
        for l in [&self.tx.lock, &self.rx.lock, &self.watch] {
            l.reset();
        }
        let st = self.state.load(Relaxed);
        if st == FREE {
            return;
        }
        self.state.store(PLAIN, Relaxed);
        for a in [
            &self.plain_rx,
            &self.plain_tx,
            &self.ops,
            &self.work,
            &self.work_next,
            &self.hold,
            &self.tx.watched,
        ] {
            a.store(0, Relaxed);
        }
        for w in &self.waiters {
            w.store(0, Relaxed);
        }
        // The parent sends what was recalled; this copy of it is leaked, as a forked child must not free.
        self.tx.backlog.store(core::ptr::null_mut(), Relaxed);
        self.rx.frozen.store(0, Relaxed);
        for bytes in [
            &self.tx.rmb,
            &self.tx.rmb_before,
            &self.rx.rmb,
            &self.rx.rmb_before,
        ] {
            bytes.store(0, Relaxed);
        }
        // SAFETY: the child has one thread.
        unsafe { *self.entry.get() = None };
        if !self.has(F_LISTENER) {
            self.flags.fetch_or(F_INHERITED, Relaxed);
        }
    }
}
