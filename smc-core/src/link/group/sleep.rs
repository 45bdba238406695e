//! Who waits for completions: the engine, or a program thread that sleeps often for short.

use core::sync::atomic::Ordering::{Relaxed, SeqCst};
use core::sync::atomic::fence;

use crate::link::Group;
use crate::node;
use crate::sys::{self, NoCancel};

/// A thread that sleeps again within this time takes the engine's watch away. (The clock for it is coarse.)
const OFTEN_NS: u64 = 10_000_000;

impl Group {
    /// A program thread is about to sleep, and will be woken by the descriptor that this returns. Undo with
    /// [`Group::wake_up`].
    pub fn doze(&self) -> i32 {
        let (fd, now) = (self.channels.fd(), sys::now_coarse_ns());
        let last = self.dozed.swap(now, Relaxed);
        // Waking the engine as well costs more than the message did.
        if now.wrapping_sub(last) < OFTEN_NS
            && self.watched.load(Relaxed)
            && let Some(_g) = self.watching.try_lock()
            && self.watched.swap(false, Relaxed)
        {
            let _ = sys::epoll_ctl(self.epfd, libc::EPOLL_CTL_DEL, fd, None);
            // It takes the watch back when threads no longer look; so it must not be asleep for good. Either it is
            // asleep already, or it finds that it doesn't watch.
            fence(SeqCst);
            node::ring_own(node::ENGINE_BELL);
        }
        fd
    }

    /// A channel had something for the sleeper. Who takes the event has to see to it that the next arrival makes another
    /// one, and this thread may not sleep here again. Where the engine doesn't watch, it looks and arms soon anyway. Where it
    /// does, it may find the channel empty and sleep on, so it is rung: either it is asleep, or it arms before it is.
    pub fn wake_up(&self) {
        let _c = NoCancel::new();
        let mut taken = false;
        self.with_pairs(|pairs, _| {
            for pair in pairs.iter().flatten() {
                match pair.queue.clear_event() {
                    Ok(one) => taken |= one,
                    Err(e) => log::warn!("{e}"),
                }
            }
        });
        if taken && self.watched() {
            fence(SeqCst);
            node::ring_own(node::ENGINE_BELL);
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
