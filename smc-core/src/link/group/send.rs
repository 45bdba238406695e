//! What goes out: connections' bytes and messages, as far as the send queue has room.

use core::sync::atomic::Ordering::{Acquire, SeqCst};
use core::sync::atomic::fence;

use crate::fabric::verbs::{Failure, Wake, Write};
use crate::link::conn::{Local, Outgoing};
use crate::link::pair::{self, Pair, Pairs};
use crate::link::state::{Entry, Flight, State};
use crate::link::{Group, table};
use crate::sys::NoCancel;

impl Group {
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
    pub(super) fn serve(&self) {
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

    /// Has the completion come of what is under way, where it would not by itself: by a WRITE of nothing.
    pub(super) fn have_told(&self, pairs: &Pairs, state: &mut State) {
        for (lane, flights) in state.flights.iter_mut().enumerate() {
            let works = state.failures.get(lane) == Some(&None) && flights.is_silent();
            if let Some(pair) = pair::at(pairs, lane).filter(|_| works)
                && let Some(number) = flights.number()
            {
                let nothing = Write {
                    local: &[],
                    address: 0,
                    rkey: 0,
                };
                // Where the queue is full, there is something to complete.
                if pair.qp.write(&[nothing], number.into(), true).is_ok() {
                    flights.begin(Flight::default(), true);
                }
            }
        }
    }

    /// Sees to it that connections that wait for a place in the send queue get one, though the thread whose bytes they hold
    /// may never look again: completions that have come make room, and else the next one wakes a watcher.
    pub(super) fn make_room(&self, pairs: &Pairs, state: &mut State) {
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

    /// Sends what is due for the connection at `slot`.
    pub(super) fn send_due(&self, pairs: &Pairs, state: &mut State, slot: u32) {
        if state.is_dead() {
            // The connections are reset, whatever a queue pair may still carry: a close would be a lie.
            return;
        }
        let Some(Some(entry)) = state.entries.get_mut(slot as usize) else {
            return;
        };
        let lane = entry.lane;
        let flights = state.flights.get(lane);
        let place = flights.and_then(|f| Some((f.number()?, f.must_signal())));
        let works = state.failures.get(lane) == Some(&None);
        let pair = pair::at(pairs, lane).filter(|pair| works && pair.qp.has_room());
        let (Some((number, must_signal)), Some(pair)) = (place, pair) else {
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
        let signal = must_signal || due.immediate.is_none();
        let posted = post(pair, entry, &due, number.into(), signal);
        table::posted();
        let (token, mark) = (entry.token, due.mark);
        state.flights[lane].begin(Flight { token, mark }, signal);
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
}

/// Posts WRITEs and message in one go. `number` comes back with the completion, if there is one (`signal`; a message's
/// always comes). False: the device refused.
fn post(pair: &Pair, entry: &Entry, due: &Outgoing, number: u32, signal: bool) -> bool {
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
        Some(data) => pair.qp.write_immediate(write(a, 0), data, number, signal),
        None => pair.qp.send(
            writes.get(..count).unwrap_or(&[]),
            &due.cdc.to_bytes(),
            number,
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
