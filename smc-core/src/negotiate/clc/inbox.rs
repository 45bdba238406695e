//! Takes CLC messages off a stream, and not a byte more.

use crate::wire::Error;
use crate::wire::clc::{Message, missing};

/// The beginning of a message.
#[derive(Default)]
pub(super) struct Inbox {
    bytes: Vec<u8>,
}

impl Inbox {
    /// Whether no byte of a message has come yet.
    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// How many bytes may be read now: never beyond the message.
    pub(super) fn want(&self) -> usize {
        missing(&self.bytes).unwrap_or(0)
    }

    /// Takes bytes off the front of `bytes` until a message is complete. Returns how many, and the message, or why
    /// it isn't one.
    pub(super) fn push(&mut self, bytes: &[u8]) -> (usize, Option<Result<Message, Error>>) {
        let mut taken = 0;
        loop {
            let more = match missing(&self.bytes) {
                Ok(more) => more,
                Err(e) => return (taken, Some(Err(e))),
            };
            if more == 0 {
                let message = Message::parse(&self.bytes);
                self.bytes.clear();
                return (taken, Some(message));
            }
            let rest = bytes.get(taken..).unwrap_or_default();
            let part = rest.get(..more).unwrap_or(rest);
            if part.is_empty() {
                return (taken, None);
            }
            self.bytes.extend_from_slice(part);
            taken += part.len();
        }
    }
}
