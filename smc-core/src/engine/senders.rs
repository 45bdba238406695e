//! Senders that wait: for the TCP socket to take what was recalled, for room in a ring.

use core::sync::atomic::Ordering::Relaxed;

use super::run::{EV_WRITABLE, Engine, index_of, watch};
use crate::stream::{self, Sock};
use crate::sys;

/// A ring that was too full for its sender (see `stream::full`).
pub(super) struct FullRing {
    index: u32,
    generation: u32,
    /// Up to where it was read at the last look, if its sender waited then.
    read: Option<u64>,
    /// Time of the next look, ns.
    at: u64,
}

impl Engine {
    /// Sends recalled bytes, now and when the TCP socket takes some again. One-shot: the socket may outlive us
    /// elsewhere.
    pub(super) fn send_backlog(&self, s: &Sock) {
        if s.continue_backlog() {
            return;
        }
        let data = EV_WRITABLE | u64::from(index_of(s));
        let _ = watch(
            self.epfd,
            s.fd.load(Relaxed),
            libc::EPOLLOUT | libc::EPOLLONESHOT,
            data,
        );
    }

    /// There will be looks at the ring that `s` writes to.
    pub(super) fn watch_full(&mut self, s: &Sock) {
        let (index, generation) = (index_of(s), s.generation.load(Relaxed));
        let known = |f: &FullRing| f.index == index && f.generation == generation;
        if self.full_rings.iter().any(known) {
            return;
        }
        self.full_rings.push(FullRing {
            index,
            generation,
            read: s.full_at(),
            at: sys::now_ns() + s.spill_after_ns(),
        });
    }

    /// Looks at full rings whose time has come. Returns when to look again, in milliseconds; `None`: no need to.
    pub(super) fn tend_full(&mut self) -> Option<i32> {
        if self.full_rings.is_empty() {
            return None;
        }
        let now = sys::now_ns();
        self.full_rings.retain_mut(|f| {
            if now < f.at {
                return true;
            }
            let Some(s) = stream::POOL.get(f.index) else {
                return false;
            };
            if s.generation.load(Relaxed) != f.generation {
                return false;
            }
            f.read = s.tend_full(f.read);
            f.at = now + s.spill_after_ns();
            f.read.is_some()
        });
        let at = self.full_rings.iter().map(|f| f.at).min()?;
        Some(i32::try_from(at.saturating_sub(now).div_ceil(1_000_000)).unwrap_or(i32::MAX))
    }
}
