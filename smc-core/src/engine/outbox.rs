//! LLC messages that wait for room in the send queue.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::link::Lane;

/// More don't wait: a peer that asks without end, and takes no answers, doesn't fill our memory. What is dropped was
/// an answer, which such a peer has to ask for again, or a request of ours, which fails in time.
const MAX: usize = 64;
/// A link that takes no message for so long is broken, as for Linux.
const STUCK: Duration = Duration::from_secs(10);

/// See the module comment.
#[derive(Default)]
pub(super) struct Outbox {
    messages: VecDeque<(Lane, Vec<u8>)>,
    /// Since when the first of them has waited.
    since: Option<Instant>,
}

impl Outbox {
    /// Adds a message for a link.
    pub(super) fn push(&mut self, lane: Lane, message: Vec<u8>) {
        if self.messages.len() < MAX {
            self.messages.push_back((lane, message));
        }
    }

    /// Drops what waits for a link.
    pub(super) fn forget(&mut self, lane: Lane) {
        if self.messages.front().is_some_and(|(at, _)| *at == lane) {
            self.since = None;
        }
        self.messages.retain(|(at, _)| *at != lane);
    }

    /// Sends them, in order, until `send` says that there is no room.
    pub(super) fn send(&mut self, now: Instant, mut send: impl FnMut(Lane, &[u8]) -> bool) {
        while let Some((lane, message)) = self.messages.front() {
            if !send(*lane, message) {
                self.since.get_or_insert(now);
                return;
            }
            self.messages.pop_front();
            self.since = None;
        }
    }

    /// Whether none waits.
    pub(super) fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// The link that is broken, if one is.
    pub(super) fn stuck(&self, now: Instant) -> Option<Lane> {
        self.since.filter(|since| now >= *since + STUCK)?;
        self.messages.front().map(|(lane, _)| *lane)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbered(n: u8) -> Vec<u8> {
        vec![n; 44]
    }

    #[test]
    fn messages_go_in_order_as_far_as_there_is_room() {
        let (mut outbox, now) = (Outbox::default(), Instant::now());
        (0..5).for_each(|n| outbox.push(0, numbered(n)));
        let (mut sent, mut room) = (Vec::new(), 3);
        let mut send = |_: Lane, message: &[u8]| {
            if room > 0 {
                room -= 1;
                sent.push(message[0]);
                true
            } else {
                false
            }
        };
        outbox.send(now, &mut send);
        assert!(!outbox.is_empty());
        outbox.send(now, |_, _| true);
        assert!(outbox.is_empty());
        assert_eq!(sent, [0, 1, 2]);
    }

    #[test]
    fn what_waits_for_a_link_goes_with_it() {
        let (mut outbox, now) = (Outbox::default(), Instant::now());
        for (lane, n) in [(1, 1), (0, 2), (1, 3), (0, 4)] {
            outbox.push(lane, numbered(n));
        }
        outbox.send(now, |_, _| false);
        outbox.forget(1);
        assert_eq!(outbox.stuck(now + STUCK), None);
        let mut sent = Vec::new();
        outbox.send(now, |lane, message| {
            sent.push((lane, message[0]));
            true
        });
        assert_eq!(sent, [(0, 2), (0, 4)]);
    }

    #[test]
    fn a_flood_does_not_fill_memory() {
        let mut outbox = Outbox::default();
        for _ in 0..100_000 {
            outbox.push(0, numbered(7));
            outbox.send(Instant::now(), |_, _| false);
        }
        assert!(outbox.messages.len() <= MAX);
    }

    #[test]
    fn a_link_that_takes_nothing_is_broken() {
        let (mut outbox, now) = (Outbox::default(), Instant::now());
        outbox.push(0, numbered(1));
        outbox.push(0, numbered(2));
        outbox.send(now, |_, _| false);
        assert_eq!(outbox.stuck(now + STUCK / 2), None);
        assert_eq!(outbox.stuck(now + STUCK), Some(0));
        // Every message that goes begins the time anew.
        let mut room = true;
        outbox.send(now + STUCK, |_, _| core::mem::take(&mut room));
        assert_eq!(outbox.stuck(now + STUCK), None);
        outbox.send(now + STUCK, |_, _| true);
        assert_eq!(outbox.stuck(now + STUCK * 9), None);
    }
}
