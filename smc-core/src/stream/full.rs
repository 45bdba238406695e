//! A ring that stays full.
//!
//! TCP has room for megabytes on their way, more than a ring, and programs count on that without knowing it: two that
//! both write before they read. So when nobody reads from a full ring for a while, its sender goes on by TCP. A blocked
//! sender does that by itself (`wait`); for those that poll, or do something else meanwhile, the engine looks. The kernel's
//! TCP_USER_TIMEOUT then counts as well, for bytes that it has: a ring is the peer's memory, and what is in it has arrived.

use core::sync::atomic::Ordering::{Relaxed, SeqCst};

use super::{F_SHUT_WR, Sock};
use crate::engine;
use crate::fabric::shm::TX_BLOCKED;

impl Sock {
    /// The sender has asked to be told of room in the ring: the engine shall see whether it comes. It looks some time
    /// later, so that a sender which often waits for short calls it seldom.
    #[inline]
    pub(super) fn asked_for_room(&self) {
        if self.tx.watched.load(Relaxed) == 0 && !self.fixed() {
            self.watch_full();
        }
    }

    #[cold]
    fn watch_full(&self) {
        if self.managed() && self.tx.watched.swap(1, SeqCst) == 0 {
            engine::watch_full(self);
        }
    }

    /// Up to where the ring is read, if its sender waits for room. Engine.
    pub(crate) fn full_at(&self) -> Option<u64> {
        let _g = self.tx.lock.lock()?;
        self.full_at_locked()
    }

    /// Looks at the ring of a sender that waits for room. If nobody has read from it since it was read up to `before`,
    /// the sender goes on by TCP. Says how far it is read; `None`: nobody waits any more. Engine.
    pub(crate) fn tend_full(&self, before: Option<u64>) -> Option<u64> {
        let _g = self.tx.lock.lock()?;
        let read = self
            .full_at_locked()
            .filter(|at| before != Some(*at) || !self.spill_tx());
        self.tx.watched.store(u32::from(read.is_some()), SeqCst);
        read
    }

    /// As [`Sock::full_at`], under `tx.lock`.
    fn full_at_locked(&self) -> Option<u64> {
        let on_rmb = self.managed() && !self.fixed() && self.tx.switches.load(Relaxed) & 1 == 1;
        if !on_rmb || self.has(F_SHUT_WR) || self.peer_left() {
            return None;
        }
        let waits = self.out().tx.flags.load(Relaxed) & TX_BLOCKED != 0;
        (waits && !self.tx_writable(false)).then(|| self.out().rx.cons.load(Relaxed))
    }
}
