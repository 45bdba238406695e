//! Idle connections: one that has moved nothing for a while leaves its link, so that its RMBs and its slot can
//! serve others. Traffic earns it a new upgrade. All of this is for the engine.

use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::Relaxed;

use libc::{POLLIN, POLLPRI, POLLRDHUP};

use super::Sock;
use crate::observe::Reason;
use crate::{engine, sys};

/// In place of the time of the last traffic: nothing more is tried until there is some.
const TRIED: u64 = u64::MAX;

/// What the engine knows of a connection's traffic.
#[derive(Default)]
pub(super) struct Idle {
    /// Time without traffic after which the connection leaves its link, ns; 0: never.
    after: AtomicU64,
    /// Bytes that both directions had moved at the last look.
    moved: AtomicU64,
    /// When a look last found that some had moved, ns, or [`TRIED`].
    since: AtomicU64,
    /// Bytes that had gone over TCP when the connection last left a link for being idle: they earn nothing more.
    spent: AtomicU64,
}

impl Idle {
    pub(super) fn reset(&self) {
        for a in [&self.after, &self.moved, &self.since, &self.spent] {
            a.store(0, Relaxed);
        }
    }
}

impl Sock {
    /// Sets the idle time, in ns; 0: never.
    pub(crate) fn set_idle_after(&self, ns: u64) {
        self.idle.after.store(ns, Relaxed);
    }

    /// Starts to watch for traffic. Returns the idle time, in ns; `None`: never.
    pub(crate) fn watch_idle(&self) -> Option<u64> {
        self.idle.since.store(0, Relaxed);
        self.idle_after()
    }

    /// The idle time of a managed connection, in ns.
    pub(crate) fn idle_after(&self) -> Option<u64> {
        let after = self.idle.after.load(Relaxed);
        (after != 0 && self.managed()).then_some(after)
    }

    /// Looks for traffic at `now` (ns) and tells whether there has been none for the idle time, with nothing
    /// left unread. Once it has said so it does not again before there is traffic.
    pub(crate) fn is_idle(&self, now: u64) -> bool {
        let Some(after) = self.idle_after() else {
            return false;
        };
        let idle = &self.idle;
        let moved = self.tx.off().wrapping_add(self.rx.off());
        if idle.since.load(Relaxed) == 0 || idle.moved.swap(moved, Relaxed) != moved {
            idle.since.store(now, Relaxed);
            return false;
        }
        let yes = now >= idle.since.load(Relaxed).saturating_add(after)
            && self.nothing_unread()
            && self.unread_by_peer() == 0;
        if yes {
            idle.since.store(TRIED, Relaxed);
        }
        yes
    }

    /// Whether the program has read all that has come, the end of the stream included. Where it has not, giving
    /// edge-triggered registrations back to the kernel would report it a second time.
    fn nothing_unread(&self) -> bool {
        let kernel = || self.with_fd(|fd| sys::poll_now(fd, POLLIN | POLLPRI | POLLRDHUP));
        self.unread_by_us() == 0 && kernel() == Some(0)
    }

    /// Leaves the link for being idle. False: not everything is on TCP, or not read from the ring.
    pub(crate) fn leave_idle(&self) -> bool {
        let left = self.leave_if(|_| true);
        if left {
            self.left_idle();
        }
        left
    }

    /// Follows a peer that has left the link for being idle. False: it has not, or we can't yet; then we
    /// leave when what is in the ring has been read.
    pub(crate) fn follow_idle(&self) -> bool {
        let left = {
            let Some(_g) = self.rx.lock.lock() else {
                return false;
            };
            // Passes a switch that nobody has read up to.
            self.managed() && self.peer_left() && self.locate().is_ok()
        };
        let left = left && self.nothing_unread() && self.try_detach();
        if left {
            self.left_idle();
        }
        left
    }

    fn left_idle(&self) {
        engine::COUNTERS.count(Reason::Idle);
        if self.pinned.load(Relaxed) == 0 {
            self.reason.store(Reason::Idle.code(), Relaxed);
        }
        let spent = self.tx.tcp.load(Relaxed) + self.rx.tcp.load(Relaxed);
        self.idle.spent.store(spent, Relaxed);
        self.idle.since.store(0, Relaxed);
        let (ops, bytes) = engine::thresholds();
        self.set_thresholds(ops, bytes);
        // Whoever sleeps on the stream goes on with the kernel's calls.
        self.on_event();
    }

    /// Bytes of TCP traffic that count for an upgrade.
    pub(crate) fn earned(&self) -> u64 {
        let moved = self.tx.tcp.load(Relaxed) + self.rx.tcp.load(Relaxed);
        moved.saturating_sub(self.idle.spent.load(Relaxed))
    }

    /// Sets the calls and bytes after which the connection is a candidate.
    pub(crate) fn set_thresholds(&self, ops: u32, bytes: u64) {
        self.after_ops.store(ops, Relaxed);
        let spent = self.idle.spent.load(Relaxed);
        self.after_bytes.store(spent.saturating_add(bytes), Relaxed);
    }
}
