//! The data path of a link group: its queue pairs, the connections on them, and whoever happens to serve them.
//!
//! To the stream code a group looks like a peer process on the other side of a shared segment: it takes the
//! place that such a process has in the connection blocks. What a program thread changes in a block, the group
//! tells the real peer by RDMA WRITE and CDC message; what CDC messages say, the group stores into the block.
//!
//! **Who does the work.** No thread is the group's own. A program thread that has changed something tries the lock, and
//! sends what is due ([`Group::kick`]). Where another thread has the lock, it sets the connection's bit in the segment's
//! `pending` map and tries again; whoever holds the lock looks for such bits after giving it back: either it sees
//! one that came in between, or the thread that set it finds the lock free. Threads that wait look at the completion queue
//! ([`Group::poll`]); before they sleep they arm it ([`Group::arm`]), and the engine waits on its channel. So a busy
//! connection costs no hand-over between threads, and an idle one no CPU. A thread that sleeps often for short waits
//! on the channel itself, and takes the engine's watch away for as long ([`Group::doze`]).
//!
//! **Signal handlers.** A handler that interrupted the lock's holder doesn't get the lock: it leaves its bit, and
//! the holder finds it. Nothing here allocates, but what the engine does.
//!
//! **Ends.** When a queue pair fails, and another link works, its connections stand still until the engine has moved
//! them there ([`Group::fail_over`]). When the last one fails, all connections see a reset. The engine buries the
//! group.
//!
//! What goes out is in `send`, what comes in in `receive`, who waits for it in `sleep`, and what the engine does with links
//! in `control`.

mod control;
mod receive;
mod send;
mod sleep;

use core::cell::UnsafeCell;
use core::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};
use core::sync::atomic::{AtomicBool, AtomicU64, fence};

use super::pair::{self, Channels, Pairs};
use super::state::State;
use super::{LANES, Lane};
use crate::bitmap::Bitmap;
use crate::fabric::shm::{SLOTS, TX_ABORT, TX_CLOSED};
use crate::fabric::verbs::{Failure, POLL_BATCH, Wake};
use crate::lock::Lock;
use crate::node::{self, Link};
use crate::stream::Owner;
use crate::sys::{self, NoCancel};

/// See the module comment.
pub struct Group {
    lock: Lock,
    guarded: UnsafeCell<(Pairs, State)>,
    link: &'static Link,
    channels: Channels,
    /// The engine's epoll instance, in which the channels are watched,
    epfd: i32,
    /// unless a program thread has taken that over.
    watched: AtomicBool,
    /// Guards changes of that.
    watching: Lock,
    /// When a program thread last went to sleep on the channel, ns.
    dozed: AtomicU64,
    /// An event of a channel has woken somebody, and lies there still.
    unread: AtomicBool,
    /// The engine is wanted: an LLC message came, a connection has ended, or the queue pair has failed.
    attention: AtomicBool,
    /// Connections to which urgent data has come, whose owners have not been sent SIGURG.
    urgent: Bitmap,
}

// SAFETY: `guarded` is only touched under `lock`; the rest is Sync by itself.
unsafe impl Sync for Group {}
// SAFETY: as above.
unsafe impl Send for Group {}

impl Group {
    /// A group for the connections of `link`, without queue pairs. `epfd`: the engine's.
    pub fn new(link: &'static Link, epfd: i32) -> sys::Result<Box<Group>> {
        Ok(Box::new(Group {
            lock: Lock::new(),
            guarded: UnsafeCell::new(([const { None }; LANES], State::new())),
            link,
            channels: Channels::new()?,
            epfd,
            watched: AtomicBool::new(false),
            watching: Lock::new(),
            dozed: AtomicU64::new(0),
            unread: AtomicBool::new(false),
            attention: AtomicBool::new(false),
            urgent: Bitmap::new(),
        }))
    }

    /// The link through which the stream code sees it.
    pub fn link(&self) -> &'static Link {
        self.link
    }

    /// Takes what has completed. True: there was something. By any thread.
    pub fn poll(&self) -> bool {
        let _c = NoCancel::new();
        let Some(g) = self.lock.try_lock() else {
            return false;
        };
        // SAFETY: under the lock.
        let (pairs, state) = unsafe { &mut *self.guarded.get() };
        let news = self.poll_locked(pairs, state);
        self.make_room(pairs, state);
        drop(g);
        fence(SeqCst);
        self.serve();
        news
    }

    /// Whether everything is sent and acknowledged, or never will be.
    pub fn is_flushed(&self) -> bool {
        let _c = NoCancel::new();
        self.look(|pairs, state| {
            self.have_told(pairs, state);
            state.is_dead()
                || !self.link.seg().pending[1].any()
                    && !state.stalled.any()
                    && state.flights.iter().all(|f| f.len() == 0)
                    && !state.entries.iter().flatten().any(|e| e.conn.withholds())
        })
    }

    /// Whether it has no connections.
    pub fn is_empty(&self) -> bool {
        self.look(|_, state| state.is_empty())
    }

    /// Whether no queue pair is of any use any more.
    pub fn is_down(&self) -> bool {
        self.look(|_, state| state.is_dead())
    }

    /// Whether all that was posted has completed.
    pub fn is_quiet(&self) -> bool {
        let outstanding = |pairs: &Pairs| pairs.iter().flatten().any(|p| p.qp.outstanding() != 0);
        self.with_pairs(|pairs, _| !outstanding(pairs))
            .unwrap_or(false)
    }

    /// False while another thread holds the lock.
    fn look(&self, f: impl FnOnce(&Pairs, &mut State) -> bool) -> bool {
        let Some(_g) = self.lock.try_lock() else {
            return false;
        };
        // SAFETY: under the lock.
        let (pairs, state) = unsafe { &mut *self.guarded.get() };
        f(pairs, state)
    }

    /// Stream offset up to which the peer's host has the bytes of the connection at `slot`, as far as is known.
    pub fn delivered(&self, slot: u32) -> Option<u64> {
        self.poll();
        let _c = NoCancel::new();
        self.with_pairs(|pairs, state| {
            self.have_told(pairs, state);
            state.get(slot).map(|e| e.conn.delivered())
        })?
    }

    /// Has the next arrival wake the engine, and takes what has arrived before.
    pub fn arm(&self) {
        let _c = NoCancel::new();
        let Some(g) = self.lock.lock() else {
            return;
        };
        // SAFETY: under the lock.
        let (pairs, state) = unsafe { &mut *self.guarded.get() };
        self.take_read(pairs);
        if !state.is_dead() {
            // Completions of our own messages matter only to whoever waits for them.
            let wake = if state.waits_for_completions() {
                Wake::All
            } else {
                Wake::Solicited
            };
            pair::arm(pairs, wake);
        }
        self.poll_locked(pairs, state);
        self.make_room(pairs, state);
        drop(g);
        fence(SeqCst);
        self.serve();
    }

    /// Has the engine send the signals that are due: the caller holds a lock that a handler might want.
    pub fn signal_later(&self) {
        if self.urgent.any() {
            self.call_engine();
        }
    }

    /// Finds out whom to send a SIGURG that is due, into `owner`. Where that is another than was found before, or
    /// nothing can be found out now, the engine is called to try again.
    pub fn urgent_owner(&self, owner: &mut Option<Owner>) {
        if !self.urgent.any() {
            return;
        }
        let left = Bitmap::new();
        self.urgent.drain(|slot| {
            if self.link.sock(slot).is_some_and(|s| !s.urgent_owner(owner)) {
                left.set(slot);
            }
        });
        if left.any() {
            left.drain(|slot| self.urgent.set(slot));
            self.call_engine();
        }
    }

    fn poll_locked(&self, pairs: &Pairs, state: &mut State) -> bool {
        let mut news = false;
        for lane in 0..LANES {
            news |= self.poll_lane(pairs, state, lane);
        }
        if news {
            state.awaits_room = false;
            if state.stalled.any() {
                let mut again = Bitmap::new();
                core::mem::swap(&mut again, &mut state.stalled);
                again.drain(|slot| self.send_due(pairs, state, slot));
            }
        }
        news
    }

    fn poll_lane(&self, pairs: &Pairs, state: &mut State, lane: Lane) -> bool {
        let Some(pair) = pair::at(pairs, lane) else {
            return false;
        };
        let mut news = false;
        loop {
            let found = pair
                .queue
                .poll(|c| self.completed(pairs, state, (lane, pair), c));
            news |= matches!(found, Ok(1..));
            if !matches!(found, Ok(POLL_BATCH)) {
                return news;
            }
        }
    }

    /// Ends a connection: the program sees a reset, and the peer an abort.
    fn break_off(&self, pairs: &Pairs, state: &mut State, slot: u32) {
        let flags = &self.link.block(slot).dir[1].tx.flags;
        flags.fetch_or(TX_ABORT | TX_CLOSED, SeqCst);
        self.tell_program(slot);
        self.send_due(pairs, state, slot);
    }

    fn tell_program(&self, slot: u32) {
        fence(SeqCst);
        if let Some(s) = self.link.sock(slot) {
            s.on_event();
        }
    }

    /// Both sides have closed: the engine takes the buffers back, once the program has left, too.
    fn end(&self, state: &State, slot: u32) {
        if self.link.block(slot).dir[0].tx.flags.load(Acquire) & TX_CLOSED != 0 {
            state.ended.set(slot);
            self.call_engine();
        }
    }

    fn call_engine(&self) {
        self.attention.store(true, SeqCst);
        node::call_engine();
    }

    /// The queue pair of a link is broken. If it was the last, all connections are reset.
    #[cold]
    fn failed(&self, state: &mut State, lane: Lane, failure: Failure) {
        if !state.note_failure(lane, failure) {
            return;
        }
        let used = state.up.get_mut(lane).is_some_and(core::mem::take);
        if used && state.is_dead() {
            self.link.dead.store(true, SeqCst);
            for slot in 0..SLOTS {
                self.tell_program(slot);
            }
        }
        self.call_engine();
    }

    /// Runs `f` on the state.
    pub fn with<T>(&self, f: impl FnOnce(&mut State) -> T) -> Option<T> {
        self.with_pairs(|_, state| f(state))
    }

    fn with_pairs<T>(&self, f: impl FnOnce(&mut Pairs, &mut State) -> T) -> Option<T> {
        let g = self.lock.lock()?;
        // SAFETY: under the lock.
        let (pairs, state) = unsafe { &mut *self.guarded.get() };
        let r = f(pairs, state);
        self.make_room(pairs, state);
        drop(g);
        fence(SeqCst);
        self.serve();
        Some(r)
    }

    /// Whether the engine is wanted; clears it. Engine.
    pub fn take_attention(&self) -> bool {
        self.attention.load(Relaxed) && self.attention.swap(false, SeqCst)
    }
}
