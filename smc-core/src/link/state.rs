//! What the lock of a link group guards: its connections, and what is under way.

use super::conn::Conn;
use crate::bitmap::Bitmap;
use crate::fabric::shm::SLOTS;
use crate::fabric::verbs::{Failure, MESSAGES, Region};

/// Bits of an alert token that are the slot's number; the others count the slot's lives, from 1.
const SLOT_BITS: u32 = SLOTS.ilog2();

/// Bytes of LLC messages that wait for the engine: a few of the longest.
const INBOX: usize = 32 << 10;

/// The alert token of life `life` of a slot, never 0.
pub fn token(slot: u32, life: u32) -> u32 {
    (life.max(1) << SLOT_BITS) | slot
}

/// The slot that a token of an xsmc peer stands for.
pub fn slot(token: u32) -> u32 {
    token & (SLOTS - 1)
}

/// One connection of the group.
pub struct Entry {
    /// Its state.
    pub conn: Conn,
    /// Our alert token.
    pub token: u32,
    /// Where the mirror lies, once the peer is known: index of its region, and byte offset there.
    pub mirror: (usize, usize),
}

/// What a group has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// CDC messages sent.
    pub cdc_sent: u64,
    /// CDC messages received.
    pub cdc_received: u64,
    /// Payload bytes written into the peer's RMBs.
    pub bytes_written: u64,
}

/// A CDC message under way.
#[derive(Clone, Copy, Default)]
pub(super) struct Flight {
    /// Alert token of the connection; 0: free.
    pub(super) token: u32,
    /// What it announces.
    pub(super) prod: u64,
}

/// What the lock guards.
pub struct State {
    /// By slot. The vector never grows after the group was made.
    pub(super) entries: Vec<Option<Box<Entry>>>,
    /// Mirrors' memory.
    pub(super) regions: Vec<Region>,
    pub(super) flights: [Flight; MESSAGES as usize],
    /// Connections that have something to send, and no place in the send queue for it.
    pub(super) stalled: Bitmap,
    /// The next completion wakes a watcher for their sake.
    pub(super) awaits_room: bool,
    /// LLC messages, each after its length (2 bytes, native order).
    pub(super) inbox: Vec<u8>,
    pub(super) failure: Option<Failure>,
    /// Connections that have ended.
    pub(super) ended: Bitmap,
    pub(super) counts: Counts,
}

impl State {
    /// No connections, nothing under way.
    pub(super) fn new() -> State {
        State {
            entries: (0..SLOTS).map(|_| None).collect(),
            regions: Vec::new(),
            flights: [Flight::default(); MESSAGES as usize],
            stalled: Bitmap::new(),
            awaits_room: false,
            inbox: Vec::with_capacity(INBOX),
            failure: None,
            ended: Bitmap::new(),
            counts: Counts::default(),
        }
    }

    /// The connection with this alert token of ours.
    pub(super) fn entry(&mut self, token: u32) -> Option<(u32, &mut Entry)> {
        let slot = slot(token);
        let entry = self.entries.get_mut(slot as usize)?.as_deref_mut()?;
        (entry.token == token).then_some((slot, entry))
    }

    pub(super) fn waits_for_completions(&mut self) -> bool {
        let busy = self.flights.iter().filter(|f| f.token != 0).count();
        let flights = self.flights;
        self.stalled.any()
            || busy > flights.len() / 2
            || flights.iter().any(|f| {
                f.token != 0
                    && self
                        .entry(f.token)
                        .is_some_and(|(_, e)| e.conn.waits_for_ack() || e.conn.closed())
            })
    }

    /// Keeps an LLC message for the engine. If it is behind by that much, the message is lost, and the peer's timer
    /// takes care of it.
    pub(super) fn deposit(&mut self, bytes: &[u8]) {
        let Ok(len) = u16::try_from(bytes.len()) else {
            return;
        };
        if self.inbox.len() + 2 + bytes.len() <= INBOX {
            self.inbox.extend_from_slice(&len.to_ne_bytes());
            self.inbox.extend_from_slice(bytes);
        }
    }

    /// Hands over the LLC messages that have come. Engine.
    pub fn take_llc(&mut self, mut f: impl FnMut(&[u8])) {
        let mut rest = self.inbox.as_slice();
        while let Some((len, tail)) = rest.split_first_chunk::<2>() {
            let Some((message, tail)) = tail.split_at_checked(u16::from_ne_bytes(*len).into())
            else {
                break;
            };
            f(message);
            rest = tail;
        }
        self.inbox.clear();
    }

    /// The connections that have ended since the last call. Engine.
    pub fn take_ended(&mut self, f: impl FnMut(u32)) {
        self.ended.drain(f);
    }

    /// Why the queue pair is broken, if it is. That it was flushed is an answer only until a better one is known.
    pub fn failure(&self) -> Option<Failure> {
        self.failure
    }

    /// Notes that the queue pair is broken. False: nothing is new. A device may report what it flushes before the request
    /// that failed.
    pub(super) fn note_failure(&mut self, failure: Failure) -> bool {
        let known = match self.failure {
            None => false,
            Some(Failure::Flushed) => failure == Failure::Flushed,
            Some(_) => true,
        };
        if !known {
            self.failure = Some(failure);
        }
        !known
    }

    /// What the group has done so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Enters a connection; its block has been cleared. Engine.
    pub fn insert(&mut self, slot: u32, entry: Entry) {
        if let Some(place) = self.entries.get_mut(slot as usize) {
            *place = Some(Box::new(entry));
        }
    }

    /// Takes a connection out. Engine.
    pub fn remove(&mut self, slot: u32) -> Option<Box<Entry>> {
        self.entries.get_mut(slot as usize)?.take()
    }

    /// The connection at a slot.
    pub fn get(&mut self, slot: u32) -> Option<&mut Entry> {
        self.entries.get_mut(slot as usize)?.as_deref_mut()
    }

    /// Whether the peer's host knows that the connection at a slot is closed, and its program has not closed it. Engine.
    pub fn awaits_close(&mut self, slot: u32) -> bool {
        let token = match self.get(slot) {
            Some(entry) if entry.conn.awaits_close() => entry.token,
            _ => return false,
        };
        self.flights.iter().all(|f| f.token != token)
    }

    /// How many there are, unless the queue pair is broken: then nothing more comes of them.
    pub fn open(&self) -> usize {
        let broken = self.failure.is_some();
        self.entries
            .iter()
            .filter(|e| e.is_some() && !broken)
            .count()
    }

    /// Whether there are none. Engine.
    pub fn is_empty(&self) -> bool {
        self.entries.iter().all(Option::is_none)
    }

    /// Forgets the mirrors' memory. Engine, when nothing is posted any more.
    pub fn drop_regions(&mut self) {
        self.regions.clear();
    }

    /// Adds memory for mirrors; returns its index. Engine.
    pub fn add_region(&mut self, region: Region) -> usize {
        self.regions.push(region);
        self.regions.len() - 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_failure_that_is_a_cause_counts() {
        let mut state = State::new();
        assert!(state.note_failure(Failure::Flushed));
        assert!(!state.note_failure(Failure::Flushed));
        assert!(state.note_failure(Failure::RemoteAccess));
        assert!(!state.note_failure(Failure::Flushed));
        assert!(!state.note_failure(Failure::RetryExceeded));
        assert_eq!(state.failure(), Some(Failure::RemoteAccess));
    }
}
