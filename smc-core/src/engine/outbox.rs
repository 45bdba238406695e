//! LLC messages that wait for room in the send queue.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::wire::llc::LEN;

/// More don't wait: a peer that asks without end, and takes no answers, doesn't fill our memory. What is dropped was
/// an answer, which such a peer has to ask for again, or a request of ours, which fails in time.
const MAX: usize = 64;
/// A link that takes no message for so long is broken, as for Linux.
const STUCK: Duration = Duration::from_secs(10);

/// See the module comment.
#[derive(Default)]
pub(super) struct Outbox {
    messages: VecDeque<[u8; LEN]>,
    /// Since when the first of them has waited.
    since: Option<Instant>,
}

impl Outbox {
    /// Adds a message.
    pub(super) fn push(&mut self, message: [u8; LEN]) {
        if self.messages.len() < MAX {
            self.messages.push_back(message);
        }
    }

    /// Sends them, in order, until `send` says that there is no room.
    pub(super) fn send(&mut self, now: Instant, mut send: impl FnMut(&[u8]) -> bool) {
        while let Some(message) = self.messages.front() {
            if !send(message) {
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

    /// Whether the link is broken.
    pub(super) fn is_stuck(&self, now: Instant) -> bool {
        self.since.is_some_and(|since| now >= since + STUCK)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbered(n: u8) -> [u8; LEN] {
        [n; LEN]
    }

    #[test]
    fn messages_go_in_order_as_far_as_there_is_room() {
        let (mut outbox, now) = (Outbox::default(), Instant::now());
        (0..5).for_each(|n| outbox.push(numbered(n)));
        let (mut sent, mut room) = (Vec::new(), 3);
        let mut send = |message: &[u8]| {
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
        outbox.send(now, |_| true);
        assert!(outbox.is_empty());
        assert_eq!(sent, [0, 1, 2]);
    }

    #[test]
    fn a_flood_does_not_fill_memory() {
        let mut outbox = Outbox::default();
        for _ in 0..100_000 {
            outbox.push(numbered(7));
            outbox.send(Instant::now(), |_| false);
        }
        assert!(outbox.messages.len() <= MAX);
    }

    #[test]
    fn a_link_that_takes_nothing_is_broken() {
        let (mut outbox, now) = (Outbox::default(), Instant::now());
        outbox.push(numbered(1));
        outbox.push(numbered(2));
        outbox.send(now, |_| false);
        assert!(!outbox.is_stuck(now + STUCK / 2));
        assert!(outbox.is_stuck(now + STUCK));
        // Every message that goes begins the time anew.
        let mut room = true;
        outbox.send(now + STUCK, |_| core::mem::take(&mut room));
        assert!(!outbox.is_stuck(now + STUCK));
        outbox.send(now + STUCK, |_| true);
        assert!(!outbox.is_stuck(now + STUCK * 9));
    }
}
