//! What the lock of a link group guards beside the queue pairs: its connections, and what is under way.

use super::conn::{Conn, Mark};
use super::{LANES, Lane};
use crate::bitmap::Bitmap;
use crate::fabric::shm::SLOTS;
use crate::fabric::verbs::{Failure, MESSAGES};

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
    /// The link by which we send.
    pub lane: Lane,
    /// Where the peer's element begins in its RMB.
    pub element: u64,
    /// Where the mirror lies, once the peer is known: its chunk, and byte offset there.
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

/// A CDC message, or WRITE with immediate data, under way.
#[derive(Clone, Copy, Default)]
pub(super) struct Flight {
    /// Alert token of the connection.
    pub(super) token: u32,
    /// What its completion acknowledges.
    pub(super) mark: Mark,
}

/// Those of a link, at most [`MESSAGES`], in the order in which they were posted and complete. Of WRITEs only some are
/// signalled: a completion tells that all posted before are done, too.
#[derive(Clone, Copy, Default)]
pub(super) struct Flights {
    /// Number of the oldest one; numbers wrap.
    first: u16,
    /// Number of the next one.
    next: u16,
    /// Those after the last one that is signalled.
    unsignalled: u16,
    all: [Flight; MESSAGES as usize],
}

impl Flights {
    /// Of so many WRITEs in a row the last one is signalled.
    const SIGNAL_EVERY: u16 = MESSAGES as u16 / 4;

    /// The number of the next one; `None`: no more may be under way.
    pub(super) fn number(&self) -> Option<u16> {
        (self.len() < MESSAGES).then_some(self.next)
    }

    /// Whether the next one is to be signalled in any case.
    pub(super) fn must_signal(&self) -> bool {
        self.unsignalled + 1 >= Self::SIGNAL_EVERY
    }

    /// The next one is under way; [`Flights::number`] has said that there is room.
    pub(super) fn begin(&mut self, flight: Flight, signalled: bool) {
        *self.place(self.next) = flight;
        self.next = self.next.wrapping_add(1);
        self.unsignalled = if signalled { 0 } else { self.unsignalled + 1 };
    }

    /// The one of this number has completed. Gives those that have so ended, one at each call.
    pub(super) fn end(&mut self, number: u16) -> Option<Flight> {
        let ended = u32::from(number.wrapping_sub(self.first)) < self.len();
        let flight = *self.place(self.first);
        self.first = self.first.wrapping_add(ended.into());
        self.unsignalled = self.unsignalled.min(self.len() as u16);
        ended.then_some(flight)
    }

    fn place(&mut self, number: u16) -> &mut Flight {
        &mut self.all[usize::from(number) % MESSAGES as usize]
    }

    /// How many are under way.
    pub(super) fn len(&self) -> u32 {
        u32::from(self.next.wrapping_sub(self.first))
    }

    /// Whether the last one completes without a word.
    pub(super) fn is_silent(&self) -> bool {
        self.unsignalled > 0
    }

    /// Those under way.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Flight> {
        let numbers = (0..self.len() as u16).map(|n| self.first.wrapping_add(n));
        numbers.filter_map(|n| self.all.get(usize::from(n) % MESSAGES as usize))
    }
}

/// What the lock guards.
pub struct State {
    /// By slot. The vector never grows after the group was made.
    pub(super) entries: Vec<Option<Box<Entry>>>,
    /// By link.
    pub(super) flights: [Flights; LANES],
    /// Links that connections may use.
    pub(super) up: [bool; LANES],
    /// Why queue pairs are broken, if they are.
    pub(super) failures: [Option<Failure>; LANES],
    /// CDC messages that have come by each link.
    pub(super) heard: [u64; LANES],
    /// Connections that have something to send, and no place in the send queue for it.
    pub(super) stalled: Bitmap,
    /// The next completion wakes a watcher for their sake.
    pub(super) awaits_room: bool,
    /// LLC messages, each after its link (1 byte) and length (2 bytes, native order).
    pub(super) inbox: Vec<u8>,
    /// A message that validates a failover is being looked at: see `Group::received`.
    pub(super) validating: bool,
    /// A peer that forgets how far it has read has moved a connection to another link: it is to be asked now.
    pub moved: bool,
    /// Connections that have ended.
    pub(super) ended: Bitmap,
    pub(super) counts: Counts,
}

impl State {
    /// No connections, nothing under way.
    pub(super) fn new() -> State {
        State {
            entries: (0..SLOTS).map(|_| None).collect(),
            flights: [Flights::default(); LANES],
            up: [false; LANES],
            failures: [None; LANES],
            heard: [0; LANES],
            stalled: Bitmap::new(),
            awaits_room: false,
            inbox: Vec::with_capacity(INBOX),
            validating: false,
            moved: false,
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

    /// Whether somebody waits for completions of our own messages.
    pub(super) fn waits_for_completions(&self) -> bool {
        let waits = |f: &Flight| {
            let entry = self.entries.get(slot(f.token) as usize);
            let entry = entry.and_then(|e| e.as_deref());
            entry.is_some_and(|e| e.token == f.token && e.conn.waits_for_completion())
        };
        self.stalled.any()
            || self
                .flights
                .iter()
                .any(|flights| flights.len() > MESSAGES / 2 || flights.iter().any(waits))
    }

    /// Whether there is no link left that connections may use.
    pub(super) fn is_dead(&self) -> bool {
        !self.up.contains(&true)
    }

    /// Keeps an LLC message for the engine. If it is behind by that much, the message is lost, and the peer's timer
    /// takes care of it.
    pub(super) fn deposit(&mut self, lane: Lane, bytes: &[u8]) {
        let Ok(len) = u16::try_from(bytes.len()) else {
            return;
        };
        if self.inbox.len() + 3 + bytes.len() <= INBOX {
            self.inbox.push(lane as u8);
            self.inbox.extend_from_slice(&len.to_ne_bytes());
            self.inbox.extend_from_slice(bytes);
        }
    }

    /// Hands over the LLC messages that have come. Engine.
    pub fn take_llc(&mut self, mut f: impl FnMut(Lane, &[u8])) {
        let mut rest = self.inbox.as_slice();
        while let Some(([lane, len @ ..], tail)) = rest.split_first_chunk::<3>() {
            let Some((message, tail)) = tail.split_at_checked(u16::from_ne_bytes(*len).into())
            else {
                break;
            };
            f((*lane).into(), message);
            rest = tail;
        }
        self.inbox.clear();
    }

    /// The connections that have ended since the last call. Engine.
    pub fn take_ended(&mut self, f: impl FnMut(u32)) {
        self.ended.drain(f);
    }

    /// Why the queue pair of each link is broken, if it is. That it was flushed is an answer only until a better one is
    /// known.
    pub fn failures(&self) -> [Option<Failure>; LANES] {
        self.failures
    }

    /// CDC messages that have come by each link.
    pub fn heard(&self) -> [u64; LANES] {
        self.heard
    }

    /// Notes that the queue pair of a link is broken. False: nothing is new. A device may report what it flushes before the
    /// request that failed.
    pub(super) fn note_failure(&mut self, lane: Lane, failure: Failure) -> bool {
        let Some(place) = self.failures.get_mut(lane) else {
            return false;
        };
        let known = match place {
            None => false,
            Some(Failure::Flushed) => failure == Failure::Flushed,
            Some(_) => true,
        };
        if !known {
            *place = Some(failure);
        }
        !known
    }

    /// What the group has done so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// How many connections send by each link.
    pub fn senders(&self) -> [u32; LANES] {
        let mut count = [0; LANES];
        for entry in self.entries.iter().flatten() {
            count[entry.lane] += 1;
        }
        count
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
        let mut flights = self.flights.iter().flat_map(Flights::iter);
        flights.all(|f| f.token != token)
    }

    /// How many there are, unless no link works any more: then nothing more comes of them.
    pub fn open(&self) -> usize {
        let broken = self.is_dead();
        self.entries
            .iter()
            .filter(|e| e.is_some() && !broken)
            .count()
    }

    /// Whether there are none. Engine.
    pub fn is_empty(&self) -> bool {
        self.entries.iter().all(Option::is_none)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flight(token: u32) -> Flight {
        let mark = Mark::default();
        Flight { token, mark }
    }

    #[test]
    fn a_completion_ends_the_flights_before_it_in_order() {
        // Numbers wrap meanwhile.
        let mut flights = Flights {
            first: u16::MAX - 1,
            next: u16::MAX - 1,
            ..Flights::default()
        };
        let mut last = 0;
        for token in 1..=MESSAGES {
            last = flights.number().unwrap();
            flights.begin(flight(token), token == MESSAGES);
        }
        assert_eq!((flights.number(), flights.len()), (None, MESSAGES));
        let third = u16::MAX.wrapping_add(1);
        for token in 1..=3 {
            assert_eq!(flights.end(third).map(|f| f.token), Some(token));
        }
        assert!(flights.end(third).is_none(), "it has ended already");
        assert!(flights.end(last.wrapping_add(1)).is_none(), "not begun");
        let tokens: Vec<_> = flights.iter().map(|f| f.token).collect();
        assert_eq!(tokens, (4..=MESSAGES).collect::<Vec<_>>());
        while flights.end(last).is_some() {}
        assert_eq!(flights.len(), 0);
    }

    #[test]
    fn one_in_four_writes_is_signalled() {
        let mut flights = Flights::default();
        let mut signals = Vec::new();
        for n in 0..8 {
            let signal = flights.must_signal();
            flights.begin(flight(n), signal);
            assert_eq!(flights.is_silent(), !signal);
            signals.push(signal);
        }
        let one = [false, false, false, true];
        assert_eq!(signals, [one, one].concat());
        // A message is signalled always.
        flights.begin(flight(8), false);
        flights.begin(flight(9), true);
        assert!(!flights.is_silent() && !flights.must_signal());
    }

    #[test]
    fn the_first_failure_that_is_a_cause_counts() {
        let mut state = State::new();
        assert!(state.note_failure(1, Failure::Flushed));
        assert!(!state.note_failure(1, Failure::Flushed));
        assert!(state.note_failure(1, Failure::RemoteAccess));
        assert!(!state.note_failure(1, Failure::Flushed));
        assert!(!state.note_failure(1, Failure::RetryExceeded));
        assert_eq!(state.failures(), [None, Some(Failure::RemoteAccess)]);
    }
}
