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

mod control;
mod sleep;

use core::cell::UnsafeCell;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use core::sync::atomic::{AtomicBool, AtomicU64, fence};

use super::conn::{Changes, Immediate, Local, Outgoing, SPARE, Violation};
use super::pair::{self, Channels, Pair, Pairs};
use super::state::{Entry, Flight, Flights, State};
use super::{LANES, Lane};
use crate::bitmap::Bitmap;
use crate::engine::COUNTERS;
use crate::fabric::shm::{RX_ANY_ROOM, SLOTS, TX_ABORT, TX_BLOCKED, TX_CLOSED, TX_DONE};
use crate::fabric::verbs::{Completion, Event, Failure, POLL_BATCH, Wake, Write};
use crate::lock::Lock;
use crate::node::{self, Link};
use crate::observe::Reason;
use crate::stream::Owner;
use crate::sys::{self, NoCancel};
use crate::wire::cdc::{self, Cdc};

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

    /// Something changed in the block of `slot`. The caller has executed a `SeqCst` fence since.
    pub fn kick(&self, slot: u32) {
        let _c = NoCancel::new();
        if let Some(g) = self.lock.try_lock() {
            // SAFETY: under the lock.
            let (pairs, state) = unsafe { &mut *self.guarded.get() };
            self.send_due(pairs, state, slot);
            self.make_room(pairs, state);
            drop(g);
            fence(SeqCst);
        } else {
            self.link.seg().pending[1].set(slot);
        }
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
            let (pairs, state) = unsafe { &mut *self.guarded.get() };
            self.serve_pending(pairs, state);
            drop(_g);
            fence(SeqCst);
        }
    }

    fn serve_pending(&self, pairs: &Pairs, state: &mut State) {
        self.link.seg().pending[1].drain(|slot| self.send_due(pairs, state, slot));
        self.make_room(pairs, state);
    }

    /// Sees to it that connections that wait for a place in the send queue get one, though the thread whose bytes they hold
    /// may never look again: completions that have come make room, and else the next one wakes a watcher.
    fn make_room(&self, pairs: &Pairs, state: &mut State) {
        if !state.stalled.any() {
            return;
        }
        while state.stalled.any() && !state.is_dead() && !self.poll_locked(pairs, state) {
            if core::mem::replace(&mut state.awaits_room, true) {
                break;
            }
            pair::arm(pairs, Wake::All);
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
        self.look(|state| {
            state.is_dead()
                || !self.link.seg().pending[1].any()
                    && !state.stalled.any()
                    && state.flights.iter().all(|f| f.len() == 0)
                    && !state.entries.iter().flatten().any(|e| e.conn.withholds())
        })
    }

    /// Whether it has no connections.
    pub fn is_empty(&self) -> bool {
        self.look(State::is_empty)
    }

    /// Whether no queue pair is of any use any more.
    pub fn is_down(&self) -> bool {
        self.look(State::is_dead)
    }

    /// Whether all that was posted has completed.
    pub fn is_quiet(&self) -> bool {
        let outstanding = |pairs: &Pairs| pairs.iter().flatten().any(|p| p.qp.outstanding() != 0);
        self.with_pairs(|pairs, _| !outstanding(pairs))
            .unwrap_or(false)
    }

    /// False while another thread holds the lock.
    fn look(&self, f: impl FnOnce(&State) -> bool) -> bool {
        let Some(_g) = self.lock.try_lock() else {
            return false;
        };
        // SAFETY: under the lock.
        f(unsafe { &(*self.guarded.get()).1 })
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

    fn completed(
        &self,
        pairs: &Pairs,
        state: &mut State,
        (lane, pair): (Lane, &Pair),
        completion: Completion,
    ) {
        match pair.qp.complete(completion) {
            Some(Event::Received(message)) => {
                let bytes = message.bytes();
                if bytes.first() == Some(&cdc::TYPE) {
                    if let Ok(m) = Cdc::parse(bytes) {
                        self.received(pairs, state, lane, &m);
                    }
                } else {
                    state.deposit(lane, bytes);
                    self.call_engine();
                }
            }
            Some(Event::Immediate { data, length }) => {
                self.written(pairs, state, lane, data, length);
            }
            Some(Event::Sent(index) | Event::Written(index)) => {
                let flights = state.flights.get_mut(lane);
                if let Some(flight) = flights.and_then(|f| f.end(index as usize)) {
                    self.acked(state, flight);
                }
            }
            None => {}
            Some(Event::Failed(failure, _)) => self.failed(state, lane, failure),
        }
    }

    fn received(&self, pairs: &Pairs, state: &mut State, lane: Lane, m: &Cdc) {
        self.note_cdc(state, lane);
        if m.flags.failover_validation && !state.validating {
            self.left_by_peer(pairs, state, lane, m.token);
        }
        let Some((slot, entry)) = state.entry(m.token) else {
            return;
        };
        let changes = entry.conn.received(m, lane);
        if m.flags.failover_validation && entry.conn.is_inquiring() {
            state.moved = true;
            self.call_engine();
        }
        self.take(pairs, state, slot, changes);
    }

    /// The peer has moved a connection to link `lane`, and says so there.
    #[cold]
    fn left_by_peer(&self, pairs: &Pairs, state: &mut State, lane: Lane, token: u32) {
        // What it knows to be here may lie in the queue of the other link.
        state.validating = true;
        for other in (0..LANES).filter(|other| *other != lane) {
            self.poll_lane(pairs, state, other);
        }
        state.validating = false;
        let from = state.entry(token).map(|(_, e)| e.conn.peer_lane());
        if let Some(from) = from.filter(|from| *from != lane)
            && let Some(pair) = pair::at(pairs, from)
        {
            // What the peer's device still has to do there would be outdated.
            if let Err(e) = pair.qp.to_error() {
                log::debug!("{e}");
            }
            // The peer uses the other one: it works, though the engine may not have heard of that.
            state.up[lane] = state.failures[lane].is_none();
            self.failed(state, from, Failure::Flushed);
        }
    }

    fn note_cdc(&self, state: &mut State, lane: Lane) {
        state.counts.cdc_received += 1;
        if let Some(heard) = state.heard.get_mut(lane) {
            *heard += 1;
        }
    }

    fn written(&self, pairs: &Pairs, state: &mut State, lane: Lane, data: u32, length: u32) {
        self.note_cdc(state, lane);
        let i = Immediate::unpack(data);
        if let Some(Some(entry)) = state.entries.get_mut(i.slot as usize) {
            let changes = entry.conn.written(length, i.consumed, lane);
            self.take(pairs, state, i.slot, changes);
        }
    }

    /// Carries out what the peer has said about the connection at `slot`.
    fn take(
        &self,
        pairs: &Pairs,
        state: &mut State,
        slot: u32,
        changes: Result<Changes, Violation>,
    ) {
        let Some(Some(entry)) = state.entries.get(slot as usize) else {
            return;
        };
        match changes {
            Ok(changes) => {
                let over = entry.conn.over();
                let look = self.publish(slot, &changes);
                if changes.resume || look {
                    self.send_due(pairs, state, slot);
                }
                if over {
                    self.end(state, slot);
                }
            }
            Err(_) => {
                log::info!("the peer broke the protocol of connection {slot} of a link group");
                match self.link.sock(slot) {
                    Some(s) => s.note(Reason::PeerViolation),
                    None => COUNTERS.count(Reason::PeerViolation),
                }
                self.break_off(pairs, state, slot);
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

    /// Stores what the peer said into the block. True: what the program has read so far may make a message due. (It had not
    /// been asked to say so. It moves its cursor, then looks whether it is asked; here it is the other way round.)
    fn publish(&self, slot: u32, c: &Changes) -> bool {
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
        if !c.inquiring && out.rx.flags.load(Relaxed) & RX_ANY_ROOM != 0 {
            out.rx.flags.fetch_and(!RX_ANY_ROOM, Relaxed);
            out.rx.spare.store(SPARE, Relaxed);
        }
        if c.flags != 0 {
            inc.tx.flags.fetch_or(c.flags, Release);
        }
        let asked = inc.tx.flags.load(Relaxed) & TX_BLOCKED != 0;
        match (c.heeds_reading, asked) {
            (true, false) => inc.tx.flags.fetch_or(TX_BLOCKED, SeqCst),
            (false, true) => inc.tx.flags.fetch_and(!TX_BLOCKED, Relaxed),
            _ => 0,
        };
        if c.news {
            self.tell_program(slot);
        }
        let look = c.heeds_reading && !asked;
        if look {
            fence(SeqCst);
        }
        look
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
        let cons = entry.conn.acked(f.mark);
        if entry.conn.is_inquiring() && entry.conn.withholds() {
            state.stalled.set(slot);
        }
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
        node::call_engine();
    }

    /// Sends what is due for the connection at `slot`.
    fn send_due(&self, pairs: &Pairs, state: &mut State, slot: u32) {
        if state.is_dead() {
            // The connections are reset, whatever a queue pair may still carry: a close would be a lie.
            return;
        }
        let Some(Some(entry)) = state.entries.get_mut(slot as usize) else {
            return;
        };
        let lane = entry.lane;
        let place = state.flights.get(lane).and_then(Flights::free);
        let works = state.failures.get(lane) == Some(&None);
        let pair = pair::at(pairs, lane).filter(|pair| works && pair.qp.has_room());
        let (Some(flight), Some(pair)) = (place, pair) else {
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
        // A message that validates a failover is followed at once by what it is about, and that by what is withheld in
        // vain.
        let more = due.cdc.flags.failover_validation
            || entry.conn.is_inquiring() && entry.conn.withholds();
        let posted = post(pair, entry, &due, flight as u32);
        let (token, mark) = (entry.token, due.mark);
        state.flights[lane].begin(flight, Flight { token, mark });
        state.counts.cdc_sent += 1;
        let written = due.writes.iter().map(|w| u64::from(w.len)).sum::<u64>();
        state.counts.bytes_written += written;
        if !posted {
            self.failed(state, lane, Failure::LocalProtection);
        } else if more {
            self.send_due(pairs, state, slot);
        } else if over {
            self.end(state, slot);
        }
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

/// Posts WRITEs and message in one go. False: the device refused.
fn post(pair: &Pair, entry: &Entry, due: &Outgoing, index: u32) -> bool {
    let Some(region) = pair.mirror(entry.mirror.0) else {
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
        Some(data) => pair.qp.write_immediate(write(a, 0), data, index),
        None => pair.qp.send(
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
