//! What the engine does with the links of a group.

use core::sync::atomic::Ordering::{Relaxed, SeqCst};

use crate::fabric::shm::{RX_ANY_ROOM, SLOTS};
use crate::fabric::verbs::{Failure, PostError, Region};
use crate::link::pair::{self, Pair};
use crate::link::{Group, Lane};
use crate::sys;
use crate::wire::Rtoken;

/// Token of LLC messages' work requests: no flight has this index.
const LLC: u32 = u32::MAX;

impl Group {
    /// Gives a link its queue pair. Engine.
    pub fn add_pair(&self, lane: Lane, pair: Pair) -> sys::Result<()> {
        self.channels.add(&pair.queue)?;
        self.with_pairs(|pairs, state| {
            state.failures[lane] = None;
            state.flights[lane] = Default::default();
            pairs[lane] = Some(pair);
        });
        Ok(())
    }

    /// Connections may use the link. Engine.
    pub fn link_up(&self, lane: Lane) {
        self.with(|state| state.up[lane] = state.failures[lane].is_none());
    }

    /// Takes the queue pair of a link out, on which nothing is sent any more. Engine.
    pub fn take_pair(&self, lane: Lane) -> Option<Pair> {
        let pair = self.with_pairs(|pairs, state| {
            state.up[lane] = false;
            state.failures[lane] = None;
            pairs[lane].take()
        });
        let pair = pair.flatten()?;
        self.channels.remove(&pair.queue);
        Some(pair)
    }

    /// Whether a link has the memory of the mirrors in a chunk. Engine.
    pub fn has_mirrors(&self, lane: Lane, chunk: u32) -> bool {
        self.with_pairs(|pairs, _| pair::at(pairs, lane)?.mirror(chunk as usize).map(|_| ()))
            .flatten()
            .is_some()
    }

    /// Gives a link the memory of the mirrors in a chunk. Engine.
    pub fn add_mirrors(&self, lane: Lane, chunk: u32, region: Region) {
        let chunk = chunk as usize;
        self.with_pairs(|pairs, _| {
            if let Some(pair) = &mut pairs[lane] {
                if pair.mirrors.len() <= chunk {
                    pair.mirrors.resize_with(chunk + 1, || None);
                }
                pair.mirrors[chunk] = Some(region);
            }
        });
    }

    /// Moves the connections of one link to another one. The queue pair of the former must be in the error state, lest
    /// it repeats a write that is outdated. `rtoken` knows the peer's RMBs on the latter by their rkeys on the
    /// former. Engine.
    pub fn fail_over(&self, from: Lane, to: Lane, rtoken: impl Fn(u32) -> Option<Rtoken>) {
        self.with_pairs(|pairs, state| {
            // What was acknowledged until now needs no repetition.
            self.poll_locked(pairs, state);
            self.failed(state, from, Failure::Flushed);
            state.flights[from] = Default::default();
            for slot in 0..SLOTS {
                let Some(entry) = state.get(slot).filter(|entry| entry.lane == from) else {
                    continue;
                };
                entry.lane = to;
                let rmb = entry.conn.peer().map(|peer| rtoken(peer.rmb.rkey));
                match rmb {
                    Some(Some(rmb)) => {
                        let addr = rmb.addr.wrapping_add(entry.element);
                        entry.conn.fail_over(Rtoken { addr, ..rmb });
                        self.send_due(pairs, state, slot);
                    }
                    // There is no way to its RMB.
                    Some(None) => {
                        entry.conn.abort();
                        self.break_off(pairs, state, slot);
                    }
                    None => {}
                }
            }
        });
    }

    /// Has programs write a byte more to peers that don't say how far they have read since a change of links (see
    /// [`super::conn`]). Whether there are any. Engine.
    pub fn inquire(&self) -> bool {
        self.with(|state| {
            let mut any = false;
            for slot in 0..SLOTS {
                if state.get(slot).is_some_and(|e| e.conn.is_inquiring()) {
                    any = true;
                    let line = &self.link.block(slot).dir[0].rx;
                    let spare = line.spare.load(Relaxed);
                    line.spare.store(spare.saturating_sub(1), Relaxed);
                    line.flags.fetch_or(RX_ANY_ROOM, SeqCst);
                    self.tell_program(slot);
                }
            }
            any
        })
        .unwrap_or(true)
    }

    /// Sends an LLC message. False: the send queue is full. Engine.
    pub fn send_llc(&self, lane: Lane, bytes: &[u8]) -> bool {
        let sent = self.with_pairs(|pairs, state| {
            let works = state.failures.get(lane) == Some(&None);
            let Some(pair) = pair::at(pairs, lane).filter(|_| works) else {
                return true;
            };
            match pair.qp.send(&[], bytes, LLC) {
                Err(PostError::Full) => return false,
                Err(e) => log::warn!("LLC message not sent: {e}"),
                Ok(()) => {}
            }
            true
        });
        sent.unwrap_or(false)
    }

    /// Sends an abort on each connection. Engine.
    pub fn abort_all(&self) {
        self.with_pairs(|pairs, state| {
            for slot in 0..SLOTS {
                if let Some(Some(entry)) = state.entries.get_mut(slot as usize) {
                    entry.conn.abort();
                    self.send_due(pairs, state, slot);
                }
            }
        });
    }

    /// Breaks a link: for what the engine finds out. Engine.
    pub fn fail(&self, lane: Lane, failure: Failure) {
        self.with(|state| self.failed(state, lane, failure));
    }
}
