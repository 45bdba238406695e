//! The data path of a link group: one queue pair, the connections on it, and whoever happens to serve them.
//!
//! To the stream code a group looks like a peer process on the other side of a shared segment: it takes the
//! place that such a process has in the connection blocks. What a program thread changes in a block, the group
//! tells the real peer by RDMA WRITE and CDC message; what CDC messages say, the group stores into the block.
//!
//! **Who does the work.** No thread is the group's own. A program thread that has changed something sets the
//! connection's bit in the segment's `pending` map and tries the lock ([`Group::kick`]); whoever holds the lock takes
//! the bits out. It looks once more after giving the lock back: either it sees a bit that came in between,
//! or the thread that set it finds the lock free. Threads that wait look at the completion queue
//! ([`Group::poll`]); before they sleep they arm it ([`Group::arm`]), and the engine waits on its channel. So a busy
//! connection costs no hand-over between threads, and an idle one no CPU. A thread that sleeps often for short waits
//! on the channel itself, and takes the engine's watch away for as long ([`Group::doze`]).
//!
//! **Signal handlers.** A handler that interrupted the lock's holder doesn't get the lock: it leaves its bit, and
//! the holder finds it. Nothing here allocates, but what the engine does.
//!
//! **Ends.** A failed queue pair marks the link dead; all its connections see a reset. The engine buries the group.

use core::cell::UnsafeCell;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use core::sync::atomic::{AtomicBool, AtomicU64, fence};
use std::sync::Arc;

use super::conn::{Changes, Immediate, Local, Outgoing, Violation};
use super::state::{Entry, Flight, State};
use crate::bitmap::Bitmap;
use crate::engine::COUNTERS;
use crate::fabric::shm::{SLOTS, TX_ABORT, TX_BLOCKED, TX_CLOSED, TX_DONE};
use crate::fabric::verbs::{Completion, Event, Failure, Queue, QueuePair, Region, Wake, Write};
use crate::lock::Lock;
use crate::node::{self, Link};
use crate::observe::Reason;
use crate::stream::Owner;
use crate::sys::{self, NoCancel};
use crate::wire::cdc::{self, Cdc};

/// Token of LLC messages' work requests: no flight has this index.
const LLC: u32 = u32::MAX;

/// A thread that sleeps again within this time takes the engine's watch away. (The clock for it is coarse.)
const OFTEN_NS: u64 = 10_000_000;

/// See the module comment.
pub struct Group {
    lock: Lock,
    state: UnsafeCell<State>,
    link: &'static Link,
    qp: Arc<QueuePair>,
    queue: Arc<Queue>,
    /// The engine's epoll instance, in which the channel is watched,
    epfd: i32,
    /// unless a program thread has taken that over.
    watched: AtomicBool,
    /// Guards changes of that.
    watching: Lock,
    /// When a program thread last went to sleep on the channel, ns.
    dozed: AtomicU64,
    /// The engine is wanted: an LLC message came, a connection has ended, or the queue pair has failed.
    attention: AtomicBool,
    /// Connections to which urgent data has come, whose owners have not been sent SIGURG.
    urgent: Bitmap,
}

// SAFETY: `state` is only touched under `lock`; the rest is Sync by itself.
unsafe impl Sync for Group {}
// SAFETY: as above.
unsafe impl Send for Group {}

impl Group {
    /// A group over a queue pair whose completions go to `queue`, for the connections of `link`.
    pub fn new(
        link: &'static Link,
        qp: Arc<QueuePair>,
        queue: Arc<Queue>,
        epfd: i32,
    ) -> Box<Group> {
        Box::new(Group {
            lock: Lock::new(),
            state: UnsafeCell::new(State::new()),
            link,
            qp,
            queue,
            epfd,
            watched: AtomicBool::new(false),
            watching: Lock::new(),
            dozed: AtomicU64::new(0),
            attention: AtomicBool::new(false),
            urgent: Bitmap::new(),
        })
    }

    /// The queue pair.
    pub fn qp(&self) -> &Arc<QueuePair> {
        &self.qp
    }

    /// Its completion queue.
    pub fn queue(&self) -> &Queue {
        &self.queue
    }

    /// The link through which the stream code sees it.
    pub fn link(&self) -> &'static Link {
        self.link
    }

    /// Something changed in the block of `slot`. The caller has executed a `SeqCst` fence since.
    pub fn kick(&self, slot: u32) {
        self.link.seg().pending[1].set(slot);
        self.serve();
    }

    /// Sends what is due for connections whose bits are set, unless another thread is at it.
    fn serve(&self) {
        if !self.link.seg().pending[1].any() {
            return;
        }
        let _c = NoCancel::new();
        while self.link.seg().pending[1].any() {
            let Some(_g) = self.lock.try_lock() else {
                return;
            };
            // SAFETY: under the lock.
            let state = unsafe { &mut *self.state.get() };
            self.serve_pending(state);
            drop(_g);
            fence(SeqCst);
        }
    }

    fn serve_pending(&self, state: &mut State) {
        self.link.seg().pending[1].drain(|slot| self.send_due(state, slot));
        self.make_room(state);
    }

    /// Sees to it that connections that wait for a place in the send queue get one, though the thread whose bytes they hold
    /// may never look again: completions that have come make room, and else the next one wakes a watcher.
    fn make_room(&self, state: &mut State) {
        if !state.stalled.any() {
            return;
        }
        while state.stalled.any() && state.failure.is_none() && !self.poll_locked(state) {
            if core::mem::replace(&mut state.awaits_room, true) {
                break;
            }
            if let Err(e) = self.queue.arm(Wake::All) {
                log::warn!("{e}");
            }
        }
        // The caller may hold a stream's lock.
        self.signal_later();
    }

    /// Takes what has completed. True: there was something. By any thread.
    pub fn poll(&self) -> bool {
        let _c = NoCancel::new();
        let Some(g) = self.lock.try_lock() else {
            return false;
        };
        // SAFETY: under the lock.
        let state = unsafe { &mut *self.state.get() };
        let news = self.poll_locked(state);
        self.make_room(state);
        drop(g);
        fence(SeqCst);
        self.serve();
        news
    }

    /// A program thread is about to sleep, and will be woken by the descriptor that this returns. Undo with
    /// [`Group::wake_up`].
    pub fn doze(&self) -> i32 {
        let (fd, now) = (self.queue.fd(), sys::now_coarse_ns());
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

    /// The channel had something for the sleeper. Who takes the event has to see to it that the next arrival makes another
    /// one, and this thread may not sleep here again. Where the engine doesn't watch, it looks and arms soon anyway. Where it
    /// does, it may find the channel empty and sleep on, so it is rung: either it is asleep, or it arms before it is.
    pub fn wake_up(&self) {
        let _c = NoCancel::new();
        match self.queue.clear_event() {
            Ok(taken) => {
                if taken && self.watched() {
                    fence(SeqCst);
                    node::ring_own(node::ENGINE_BELL);
                }
            }
            Err(e) => log::warn!("{e}"),
        }
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

    /// Whether everything is sent and acknowledged, or never will be.
    pub fn is_flushed(&self) -> bool {
        self.look(|state| {
            state.failure.is_some()
                || !self.link.seg().pending[1].any()
                    && !state.stalled.any()
                    && state.flights.iter().all(|f| f.token == 0)
                    && !state.entries.iter().flatten().any(|e| e.conn.withholds())
        })
    }

    /// Whether it has no connections.
    pub fn is_empty(&self) -> bool {
        self.look(State::is_empty)
    }

    /// Whether the queue pair is of no use any more.
    pub fn is_down(&self) -> bool {
        self.look(|state| state.failure.is_some())
    }

    /// False while another thread holds the lock.
    fn look(&self, f: impl FnOnce(&State) -> bool) -> bool {
        let Some(_g) = self.lock.try_lock() else {
            return false;
        };
        // SAFETY: under the lock.
        f(unsafe { &*self.state.get() })
    }

    /// Stream offset up to which the peer's host has the bytes of the connection at `slot`, as far as is known.
    pub fn delivered(&self, slot: u32) -> Option<u64> {
        self.poll();
        let _c = NoCancel::new();
        self.with(|state| state.get(slot).map(|e| e.conn.delivered()))?
    }

    /// Has the next arrival wake the engine, and takes what has arrived before.
    pub fn arm(&self) {
        let _c = NoCancel::new();
        let Some(g) = self.lock.lock() else {
            return;
        };
        // SAFETY: under the lock.
        let state = unsafe { &mut *self.state.get() };
        self.poll_locked(state);
        if state.failure.is_none() {
            // Completions of our own messages matter only to whoever waits for them.
            let wake = if state.waits_for_completions() {
                Wake::All
            } else {
                Wake::Solicited
            };
            if let Err(e) = self.queue.arm(wake) {
                log::warn!("{e}");
            }
            self.poll_locked(state);
        }
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

    fn poll_locked(&self, state: &mut State) -> bool {
        let mut news = false;
        loop {
            let found = self.queue.poll(|c| self.completed(state, c));
            news |= matches!(found, Ok(1..));
            if !matches!(found, Ok(crate::fabric::verbs::POLL_BATCH)) {
                break;
            }
        }
        if news {
            state.awaits_room = false;
            let mut again = Bitmap::new();
            core::mem::swap(&mut again, &mut state.stalled);
            again.drain(|slot| self.send_due(state, slot));
        }
        news
    }

    fn completed(&self, state: &mut State, completion: Completion) {
        match self.qp.complete(completion) {
            Some(Event::Received(message)) => {
                let bytes = message.bytes();
                if bytes.first() == Some(&cdc::TYPE) {
                    if let Ok(m) = Cdc::parse(bytes) {
                        self.received(state, &m);
                    }
                } else {
                    state.deposit(bytes);
                    self.call_engine();
                }
            }
            Some(Event::Immediate { data, length }) => self.written(state, data, length),
            Some(Event::Sent(index) | Event::Written(index)) => {
                if let Some(f) = state.flights.get_mut(index as usize) {
                    let flight = core::mem::take(f);
                    self.acked(state, flight);
                }
            }
            None => {}
            Some(Event::Failed(failure, _)) => self.failed(state, failure),
        }
    }

    fn received(&self, state: &mut State, m: &Cdc) {
        state.counts.cdc_received += 1;
        let Some((slot, entry)) = state.entry(m.token) else {
            return;
        };
        let changes = entry.conn.received(m);
        self.take(state, slot, changes);
    }

    fn written(&self, state: &mut State, data: u32, length: u32) {
        state.counts.cdc_received += 1;
        let i = Immediate::unpack(data);
        if let Some(Some(entry)) = state.entries.get_mut(i.slot as usize) {
            let changes = entry.conn.written(length, i.consumed);
            self.take(state, i.slot, changes);
        }
    }

    /// Carries out what the peer has said about the connection at `slot`.
    fn take(&self, state: &mut State, slot: u32, changes: Result<Changes, Violation>) {
        let Some(Some(entry)) = state.entries.get(slot as usize) else {
            return;
        };
        match changes {
            Ok(changes) => {
                let over = entry.conn.over();
                self.publish(slot, &changes);
                if changes.resume {
                    self.send_due(state, slot);
                }
                if over {
                    self.end(state, slot);
                }
            }
            Err(_) => {
                log::info!(
                    "link group {}: the peer broke the protocol of connection {slot}",
                    self.qp.number()
                );
                match self.link.sock(slot) {
                    Some(s) => s.note(Reason::PeerViolation),
                    None => COUNTERS.count(Reason::PeerViolation),
                }
                let flags = &self.link.block(slot).dir[1].tx.flags;
                flags.fetch_or(TX_ABORT | TX_CLOSED, SeqCst);
                self.tell_program(slot);
                self.send_due(state, slot);
            }
        }
    }

    /// Stores what the peer said into the block.
    fn publish(&self, slot: u32, c: &Changes) {
        let [out, inc] = &self.link.block(slot).dir;
        let prod = inc.tx.prod.load(Relaxed);
        let ended = inc.tx.flags.load(Relaxed) & (TX_DONE | TX_CLOSED) != 0;
        // A program that has read to the end has been told so: what comes behind it is no part of the stream.
        let over = ended && inc.rx.cons.load(Acquire) == prod;
        if inc.tx.urgent.load(Relaxed) != c.urgent && !over {
            inc.tx.urgent.store(c.urgent, SeqCst);
            fence(SeqCst);
            if let Some(s) = self.link.sock(slot) {
                s.urgent_comes();
            }
            self.urgent.set(slot);
        }
        inc.tx.prod.store(if over { prod } else { c.prod }, Release);
        out.rx.cons.store(c.cons, Release);
        if c.flags != 0 {
            inc.tx.flags.fetch_or(c.flags, Release);
        }
        if c.news {
            self.tell_program(slot);
        }
    }

    fn tell_program(&self, slot: u32) {
        fence(SeqCst);
        if let Some(s) = self.link.sock(slot) {
            s.on_event();
        }
    }

    fn acked(&self, state: &mut State, f: Flight) {
        let Some((slot, entry)) = state.entry(f.token) else {
            return;
        };
        let cons = entry.conn.acked(f.prod);
        let out = &self.link.block(slot).dir[0];
        if out.rx.cons.swap(cons, SeqCst) != cons && out.tx.flags.load(Relaxed) & TX_BLOCKED != 0 {
            self.tell_program(slot);
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
        fence(SeqCst);
        node::ring_own(node::ENGINE_BELL);
    }

    /// Sends what is due for the connection at `slot`.
    fn send_due(&self, state: &mut State, slot: u32) {
        if state.failure.is_some() {
            // The connections are reset, whatever the queue pair may still carry: a close would be a lie.
            return;
        }
        let Some(Some(entry)) = state.entries.get_mut(slot as usize) else {
            return;
        };
        let free = state.flights.iter().position(|f| f.token == 0);
        let (Some(flight), true) = (free, self.qp.has_room()) else {
            state.stalled.set(slot);
            return;
        };
        let [out, inc] = &self.link.block(slot).dir;
        // The flags before the cursor: one that says "no more" covers all bytes written before it.
        let flags = out.tx.flags.load(Acquire);
        let local = Local {
            prod: out.tx.prod.load(Acquire),
            cons: inc.rx.cons.load(Acquire),
            urgent: out.tx.urgent.load(Acquire),
            flags,
        };
        let Some(due) = entry.conn.next(local) else {
            if entry.conn.over() {
                self.end(state, slot);
            }
            return;
        };
        let over = entry.conn.over();
        let posted = post(&self.qp, &state.regions, entry, &due, flight as u32);
        state.flights[flight] = Flight {
            token: entry.token,
            prod: due.prod,
        };
        state.counts.cdc_sent += 1;
        let written = due.writes.iter().map(|w| u64::from(w.len)).sum::<u64>();
        state.counts.bytes_written += written;
        if !posted {
            self.failed(state, Failure::LocalProtection);
        } else if over {
            self.end(state, slot);
        }
    }

    /// The queue pair is broken: all connections are reset.
    #[cold]
    fn failed(&self, state: &mut State, failure: Failure) {
        let first = state.failure.is_none();
        if !state.note_failure(failure) {
            return;
        }
        if first {
            self.link.dead.store(true, SeqCst);
            for slot in 0..SLOTS {
                self.tell_program(slot);
            }
        }
        self.call_engine();
    }

    /// Runs `f` on the state.
    pub fn with<T>(&self, f: impl FnOnce(&mut State) -> T) -> Option<T> {
        let g = self.lock.lock()?;
        // SAFETY: under the lock.
        let state = unsafe { &mut *self.state.get() };
        let r = f(state);
        self.make_room(state);
        drop(g);
        fence(SeqCst);
        self.serve();
        Some(r)
    }

    /// Whether the engine is wanted; clears it. Engine.
    pub fn take_attention(&self) -> bool {
        self.attention.load(Relaxed) && self.attention.swap(false, SeqCst)
    }

    /// Sends an LLC message. False: the send queue is full. Engine.
    pub fn send_llc(&self, bytes: &[u8]) -> bool {
        let sent = self.with(|state| {
            if state.failure.is_some() {
                return true;
            }
            if !self.qp.has_room() {
                return false;
            }
            if let Err(e) = self.qp.send(&[], bytes, LLC) {
                log::warn!("LLC message not sent: {e}");
            }
            true
        });
        sent.unwrap_or(false)
    }

    /// Sends an abort on each connection. Engine.
    pub fn abort_all(&self) {
        self.with(|state| {
            for slot in 0..SLOTS {
                if let Some(Some(entry)) = state.entries.get_mut(slot as usize) {
                    entry.conn.abort();
                    self.send_due(state, slot);
                }
            }
        });
    }

    /// Breaks the link: for what the engine finds out. Engine.
    pub fn fail(&self, failure: Failure) {
        self.with(|state| self.failed(state, failure));
    }
}

/// Posts WRITEs and message in one go. False: the device refused.
fn post(qp: &QueuePair, regions: &[Region], entry: &Entry, due: &Outgoing, index: u32) -> bool {
    let Some(region) = regions.get(entry.mirror.0) else {
        return false;
    };
    let Some(peer) = entry.conn.peer() else {
        return false;
    };
    let piece = |i: usize| {
        let w = due.writes.get(i).filter(|w| w.len > 0)?;
        region.piece(entry.mirror.1 + w.from as usize, w.len as usize)
    };
    let pieces = [piece(0), piece(1)];
    let (a, b) = (pieces[0].as_slice(), pieces[1].as_slice());
    let write = |local, i: usize| Write {
        local,
        address: due.writes.get(i).map_or(0, |w| w.to),
        rkey: peer.rmb.rkey,
    };
    let writes = [write(a, 0), write(b, 1)];
    let count = pieces.iter().flatten().count();
    let posted = match due.immediate {
        Some(data) => qp.write_immediate(write(a, 0), data, index),
        None => qp.send(
            writes.get(..count).unwrap_or(&[]),
            &due.cdc.to_bytes(),
            index,
        ),
    };
    match posted {
        Ok(()) => true,
        Err(e) => {
            log::warn!("{e}");
            false
        }
    }
}
