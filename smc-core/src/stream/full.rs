//! A ring that stays full, where TCP_USER_TIMEOUT is set.
//!
//! The option ends a connection whose peer takes nothing of what is sent for so long. The kernel does that for bytes that
//! it has. A ring is the peer's memory: what is in it has arrived. When it stays full, the sender goes on by TCP, as a
//! blocked one does in any case, and the kernel's time begins.

use core::sync::atomic::Ordering::{Relaxed, SeqCst};

use super::{F_SHUT_WR, F_USER_TIMEOUT, Sock};
use crate::engine;
use crate::fabric::shm::TX_BLOCKED;

impl Sock {
    /// The sender has asked to be told of room in the ring: the engine shall see whether it comes.
    #[inline]
    pub(super) fn asked_for_room(&self) {
        if self.has(F_USER_TIMEOUT) {
            self.watch_full();
        }
    }

    /// The engine shall see whether the ring stays full, if it is.
    #[cold]
    pub fn watch_full(&self) {
        if self.managed() && !self.fixed() && self.tx.watched.swap(1, SeqCst) == 0 {
            engine::watch_full(self);
        }
    }

    /// Looks at the ring of a sender that waits for room. If nobody has read from it since it was read up to `before`,
    /// the sender goes on by TCP. Says how far it is read; `None`: nobody waits any more. Engine.
    pub(crate) fn tend_full(&self, before: Option<u64>) -> Option<u64> {
        let _g = self.tx.lock.lock()?;
        let read = self
            .full_at()
            .filter(|at| before != Some(*at) || !self.spill_tx());
        self.tx.watched.store(u32::from(read.is_some()), SeqCst);
        read
    }

    /// Up to where a ring that has too little room for a waiting sender is read. Under `tx.lock`.
    fn full_at(&self) -> Option<u64> {
        let on_rmb = self.managed() && !self.fixed() && self.tx.switches.load(Relaxed) & 1 == 1;
        if !on_rmb || self.has(F_SHUT_WR) || self.peer_left() {
            return None;
        }
        let waits = self.out().tx.flags.load(Relaxed) & TX_BLOCKED != 0;
        (waits && !self.tx_writable(false)).then(|| self.out().rx.cons.load(Relaxed))
    }
}
