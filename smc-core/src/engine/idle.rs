//! Idle connections give their buffers back.
//!
//! The engine looks at its managed connections a few times per idle time, and only while there are some. One that
//! has moved nothing is put on TCP by an ordinary downgrade; when that is done and nothing has come in between it
//! leaves its slot, and the peer is told to do the same. Both ends may begin at the same time.

use core::sync::atomic::Ordering::Relaxed;

use super::ipc;
use super::run::{Engine, Then};
use crate::negotiate::Message;
use crate::node::Link;
use crate::stream::{self, Downgrade, Sock};
use crate::sys;

/// Looks per idle time.
const LOOKS: u64 = 4;
/// Shortest time between two looks, ns.
const SHORTEST_NS: u64 = 1_000_000;
/// Most downgrades in progress at a time; those left over are next.
const MOST: usize = 32;

impl Engine {
    /// A connection has been attached: there will be looks.
    pub(super) fn watch_idle(&mut self, s: &Sock) {
        if let Some(after) = s.watch_idle() {
            let at = sys::now_ns() + step(after);
            self.idle_look = Some(self.idle_look.map_or(at, |t| t.min(at)));
        }
    }

    /// Looks for idle connections, if it is time to. Returns when to look again, in milliseconds; `None`: no need to.
    pub(super) fn tend_idle(&mut self) -> Option<i32> {
        let (at, now) = (self.idle_look?, sys::now_ns());
        if now >= at {
            self.idle_look = self.look_for_idle(now).map(|after| now + step(after));
        }
        let left = self.idle_look?.saturating_sub(now);
        Some(i32::try_from(left.div_ceil(1_000_000)).unwrap_or(i32::MAX))
    }

    /// Begins with connections that are idle now. Returns the shortest idle time of those that are watched.
    fn look_for_idle(&mut self, now: u64) -> Option<u64> {
        let mut shortest = None;
        stream::POOL.each(|_, s| {
            let Some(after) = s.idle_after() else { return };
            if self.leaving.len() >= MOST {
                shortest = Some(0);
                return;
            }
            shortest = Some(shortest.map_or(after, |t: u64| t.min(after)));
            if s.is_idle(now) && !self.follow(s) {
                self.leaving.push((s.downgrade_here(None), Then::Leave));
            }
        });
        shortest
    }

    /// The downgrade of an idle connection has ended; `on_tcp`: well. It leaves, unless traffic has come in between.
    pub(super) fn rest(&mut self, d: Downgrade, on_tcp: bool) {
        let s = d.sock();
        let place = s.place().filter(|_| d.current());
        let left = on_tcp && place.is_some() && s.leave_idle();
        d.finish();
        if let Some((link, slot)) = place.filter(|_| left) {
            log::debug!("slot {slot}: idle");
            self.tell_left(link, slot);
        }
    }

    /// A peer's end of `s` may have left for being idle: ours does, too. False: not (yet).
    pub(super) fn follow(&mut self, s: &Sock) -> bool {
        let Some((link, slot)) = s.place() else {
            return false;
        };
        let left = s.follow_idle();
        if left {
            self.tell_left(link, slot);
        }
        left
    }

    fn tell_left(&mut self, link: &Link, slot: u32) {
        let mut peers = self.peers.iter_mut().flatten();
        if let Some(p) = peers.find(|p| core::ptr::eq(p.link, link)) {
            if !p.gone && !link.leaving.load(Relaxed) {
                let _ = ipc::send(p.fd, &Message::Left { slot }, &[]);
            }
            p.tidy();
        }
    }
}

fn step(after: u64) -> u64 {
    (after / LOOKS).max(SHORTEST_NS)
}
