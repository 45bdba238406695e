//! What comes in: completions, and what the peer says with them.

use core::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use core::sync::atomic::fence;

use crate::engine::COUNTERS;
use crate::fabric::shm::{RX_ANY_ROOM, TX_BLOCKED, TX_CLOSED, TX_DONE};
use crate::fabric::verbs::{Completion, Event, Failure};
use crate::link::conn::{Changes, Immediate, SPARE, Violation};
use crate::link::pair::{self, Pair, Pairs};
use crate::link::state::{Flight, State};
use crate::link::{Group, LANES, Lane};
use crate::observe::Reason;
use crate::wire::cdc::{self, Cdc};

impl Group {
    pub(super) fn completed(
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
            Some(Event::Sent(number) | Event::Written(number)) => {
                // LLC messages have other numbers.
                if let Ok(number) = u16::try_from(number) {
                    let ended = |state: &mut State| state.flights.get_mut(lane)?.end(number);
                    while let Some(flight) = ended(state) {
                        acked(state, flight);
                    }
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

    /// Stores what the peer said into the block. True: what the program has read so far may make a message due. (It had not
    /// been asked to say so. It moves its cursor, then looks whether it is asked; here it is the other way round.)
    fn publish(&self, slot: u32, c: &Changes) -> bool {
        let [out, inc] = &self.link.block(slot).dir;
        let prod = inc.tx.prod.load(Relaxed);
        // Only the group writes them.
        let before = inc.tx.flags.load(Relaxed);
        let (ended, asked) = (
            before & (TX_DONE | TX_CLOSED) != 0,
            before & TX_BLOCKED != 0,
        );
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
}

/// The peer's host has what was under way.
fn acked(state: &mut State, f: Flight) {
    if let Some((slot, entry)) = state.entry(f.token) {
        entry.conn.acked(f.mark);
        if entry.conn.is_inquiring() && entry.conn.withholds() {
            state.stalled.set(slot);
        }
    }
}
