//! Who is woken by what arrives: the watch of the completion channel, and arming the queue.
//!
//! **No arrival is slept over.** The queue is armed for one event, which goes to the channel and wakes all who watch it:
//! the engine, or threads that doze. Who takes it out of there could leave the others asleep with a queue that is not
//! armed. So a dozing thread leaves it there, where it goes on waking watchers, until somebody arms the queue again, under
//! the lock: event out, arm, poll. The engine takes it at once, as it would be woken for ever; it then is awake, and
//! either arms before it sleeps or looks every 20 ms ([`BUSY_LOOK_MS`](crate::link::table::BUSY_LOOK_MS)). A thread
//! that dies or jumps away while it is awake so leaves nothing undone: the event is still in the channel, and the
//! engine, which doesn't sleep for good while it doesn't watch, takes the watch back.
//!
//! Messages that find the send queue full wait for a completion, whatever their sender does next: while there are such,
//! the queue is armed for completions of all kinds before the lock is given back.
//!
//! The model is `tests/loom_watch.rs`.

use core::sync::atomic::Ordering::{Relaxed, SeqCst};
use core::sync::atomic::fence;

use super::{Group, State};
use crate::fabric::verbs::Wake;
use crate::node;
use crate::sys::{self, NoCancel};

/// A thread that sleeps again within this time takes the engine's watch away. (The clock for it is coarse.)
const OFTEN_NS: u64 = 10_000_000;

impl Group {
    /// A program thread is about to arm the queue and to sleep, and will be woken by the descriptor that this returns.
    /// If that has something, call [`Group::wake_up`].
    pub fn doze(&self) -> i32 {
        let fd = self.queue.fd();
        if !self.watched.load(Relaxed) {
            return fd;
        }
        let now = sys::now_coarse_ns();
        let last = self.dozed.swap(now, Relaxed);
        // Waking the engine as well costs more than the message did.
        if now.wrapping_sub(last) < OFTEN_NS
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

    /// The channel had something for the sleeper. It stays there, for other watchers, until somebody arms the queue.
    #[inline]
    pub fn wake_up(&self) {
        self.unread.store(true, SeqCst);
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
            let _ = sys::epoll_ctl(self.epfd, libc::EPOLL_CTL_ADD, self.queue.fd(), Some(&ev));
        }
    }

    /// Whether the engine watches the channel.
    pub fn watched(&self) -> bool {
        self.watched.load(SeqCst)
    }

    /// Has the next arrival wake the engine, and takes what has arrived before.
    pub fn arm(&self) {
        let Some(g) = self.lock.lock() else {
            return;
        };
        // SAFETY: under the lock.
        let state = unsafe { &mut *self.state.get() };
        // Who arms the queue takes the event that has woken somebody.
        if self.unread.load(Relaxed) && self.unread.swap(false, SeqCst) {
            let _c = NoCancel::new();
            if let Err(e) = self.queue.clear_event() {
                log::warn!("{e}");
            }
        }
        if state.failure.is_none() {
            self.arm_locked(state);
        } else {
            self.poll_locked(state);
        }
        drop(g);
        fence(SeqCst);
        self.serve();
    }

    /// Sees to it that connections that wait for a place in the send queue get one, though the thread whose bytes
    /// they hold may never look again: what is done makes room now, and the next completion wakes a watcher.
    #[inline]
    pub(super) fn make_room(&self, state: &mut State) {
        if !state.stalled.any() {
            return;
        }
        while state.stalled.any() && state.armed != Some(Wake::All) && state.failure.is_none() {
            if !self.poll_locked(state) {
                self.arm_locked(state);
            }
        }
        // The caller may hold a stream's lock.
        self.signal_later();
    }

    /// Has the next arrival make the channel readable, or the next completion of any kind if somebody waits for one;
    /// takes what came before.
    fn arm_locked(&self, state: &mut State) {
        let mut armed_now = false;
        loop {
            let wake = state.wake();
            if state.armed < Some(wake) {
                let _c = NoCancel::new();
                if let Err(e) = self.queue.arm(wake) {
                    log::warn!("{e}");
                }
                // (After an error, too: it would repeat itself for ever.)
                state.armed = Some(wake);
                armed_now = true;
            }
            self.poll_locked(state);
            let wake = state.wake();
            // What was found just now was there before, and the queue is still armed; or it came since, and the
            // channel has an event for whoever watches it.
            if state.armed >= Some(wake) || armed_now && wake == Wake::Solicited {
                return;
            }
        }
    }
}
