//! Who is told of changes on a stream: the peer, by its wish, and the epoll sets and sleeping threads of this process.

use core::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};
use core::sync::atomic::fence;

use super::{F_CANT_SERVE, F_ONESHOT, MANAGED, PUBLISHED, Sock};
use crate::observe::Reason;
use crate::ready::{self, RegRef};
use crate::{engine, node};

impl Sock {
    /// Tells the peer that something changed. Under a direction lock.
    #[inline]
    pub(crate) fn tell_peer(&self) {
        fence(SeqCst);
        // The peer's wish is in the line that the peer writes as receiver of what we send.
        let wish = self.out().rx.notify.load(Relaxed);
        self.link().tell(self.slot.load(Relaxed), wish);
    }

    /// Something changed on the peer's side: wake whoever waits for it here. Any thread.
    pub fn on_event(&self) {
        for r in &self.regs {
            if let Some(r) = RegRef::unpack(r.load(Acquire)) {
                ready::push(r);
            }
        }
        fence(SeqCst);
        for w in &self.waiters {
            let b = w.load(Relaxed);
            if b != 0 {
                node::ring_own(b - 1);
            }
        }
    }

    /// Publishes how this side wants to be told of changes. Under `watch`, or during attach.
    pub(crate) fn renotify(&self) {
        // (A link group is told of everything, see `Group::kick`.)
        if !self.managed() || self.link().fixed() {
            return;
        }
        let mut want = 0;
        let mut add = |bell: u32| {
            want = if want == 0 || want == bell + 1 {
                bell + 1
            } else {
                node::ENGINE_BELL + 1
            }
        };
        for r in &self.regs {
            if let Some(r) = RegRef::unpack(r.load(Relaxed)) {
                add(ready::bell_of(r));
            }
        }
        for w in &self.waiters {
            let b = w.load(Relaxed);
            if b != 0 {
                add(b - 1);
            }
        }
        self.inc().rx.notify.store(want, SeqCst);
    }

    /// An epoll registration could not be taken over.
    pub(crate) fn set_cant_serve(&self) {
        self.flags.fetch_or(F_CANT_SERVE, SeqCst);
    }

    /// Whether the connection must go back to TCP for lack of means to serve its registrations; told
    /// once, for a managed connection.
    pub(crate) fn cant_serve(&self) -> Option<Reason> {
        if !self.has(F_CANT_SERVE) {
            return None;
        }
        self.flags.fetch_and(!F_CANT_SERVE, SeqCst);
        Some(Reason::TooManyWaiters)
    }

    /// The upgrade can go on only once a one-shot registration has been armed.
    pub(crate) fn await_oneshot(&self) {
        self.flags.fetch_or(F_ONESHOT, SeqCst);
    }

    /// Whether a one-shot registration that is being armed should be taken over.
    pub(crate) fn wants_oneshot(&self) -> bool {
        matches!(self.state.load(Relaxed), PUBLISHED | MANAGED)
    }

    /// A one-shot registration has been taken over.
    pub(crate) fn oneshot_armed(&self) {
        if self.flags.fetch_and(!F_ONESHOT, SeqCst) & F_ONESHOT != 0 {
            engine::candidate(self);
        }
    }
}
