//! Who waits for completions: the engine, or a program thread that sleeps often for short.
//!
//! **No arrival is slept over.** A queue is armed for one event, which goes to its channel and wakes all who watch that:
//! the engine, or threads that doze. Who takes it out of there could leave the others asleep with a queue that is not
//! armed. So a dozing thread leaves it there, where it goes on waking watchers, until somebody arms the queue again
//! ([`Group::arm`]), under the lock: event out, arm, poll. That is before its next sleep, behind its program's answer. The
//! engine takes it at once, as it would be woken for ever; it then is awake, and either arms before it sleeps or looks every
//! 20 ms. A thread that dies or jumps away while it is awake so leaves nothing undone: the event is still in the
//! channel, and the engine, which doesn't sleep for good while it doesn't watch, takes the watch back.
//!
//! The model is `tests/loom_watch.rs`.

use core::sync::atomic::Ordering::{Relaxed, SeqCst};
use core::sync::atomic::fence;

use crate::link::Group;
use crate::link::pair::Pairs;
use crate::node;
use crate::sys;

/// A thread that sleeps again within this time takes the engine's watch away. (The clock for it is coarse.)
const OFTEN_NS: u64 = 10_000_000;

impl Group {
    /// A program thread is about to sleep, and will be woken by the descriptor that this returns. Undo with
    /// [`Group::wake_up`].
    pub fn doze(&self) -> i32 {
        let now = sys::now_coarse_ns();
        let last = self.dozed.swap(now, Relaxed);
        // Waking the engine as well costs more than the message did.
        if now.wrapping_sub(last) < OFTEN_NS
            && self.watched.load(Relaxed)
            && let Some(_g) = self.watching.try_lock()
            && self.watched.swap(false, Relaxed)
        {
            let _ = sys::epoll_ctl(self.epfd, libc::EPOLL_CTL_DEL, self.channels.fd(), None);
            // It takes the watch back when threads no longer look; so it must not be asleep for good. Either it is
            // asleep already, or it finds that it doesn't watch.
            fence(SeqCst);
            node::ring_own(node::ENGINE_BELL);
        }
        self.channels.nearest()
    }

    /// A channel had something for the sleeper. It stays there until somebody arms the queues.
    #[inline]
    pub fn wake_up(&self) {
        self.unread.store(true, SeqCst);
    }

    /// Takes what has woken sleepers out of the channels. Under the lock, by whoever arms the queues then.
    pub(super) fn take_read(&self, pairs: &Pairs) {
        if self.unread.load(Relaxed) && self.unread.swap(false, SeqCst) {
            for pair in pairs.iter().flatten() {
                if let Err(e) = pair.queue.clear_event() {
                    log::warn!("{e}");
                }
            }
        }
    }

    /// Takes the events of the channels. Engine.
    pub fn clear_events(&self) {
        self.with_pairs(|pairs, _| {
            for pair in pairs.iter().flatten() {
                if let Err(e) = pair.queue.clear_events() {
                    log::warn!("{e}");
                }
            }
        });
    }

    /// The engine watches the channel (again). `data`: what its epoll instance reports. Engine.
    pub fn watch(&self, data: u64) {
        if let Some(_g) = self.watching.lock()
            && !self.watched.swap(true, Relaxed)
        {
            let ev = libc::epoll_event {
                events: libc::EPOLLIN as u32,
                u64: data,
            };
            let _ = sys::epoll_ctl(
                self.epfd,
                libc::EPOLL_CTL_ADD,
                self.channels.fd(),
                Some(&ev),
            );
        }
    }

    /// Whether the engine watches the channel.
    pub fn watched(&self) -> bool {
        self.watched.load(SeqCst)
    }
}
