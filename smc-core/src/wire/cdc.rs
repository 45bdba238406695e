//! CDC: the message that tells the state of one connection, 44 bytes, the same in SMC-R v1 and v2.
//!
//! | offset | size | field |
//! |---|---|---|
//! | 0 | 1 | type 0xfe |
//! | 1 | 1 | length 44 |
//! | 2 | 2 | sequence number |
//! | 4 | 4 | alert token |
//! | 8 | 2 | reserved |
//! | 10 | 6 | producer cursor: wrap 2, count 4 |
//! | 16 | 2 | reserved |
//! | 18 | 6 | consumer cursor: wrap 2, count 4 |
//! | 24 | 1 | producer flags |
//! | 25 | 1 | connection state flags |
//! | 26 | 18 | reserved |
//!
//! Each message carries the whole state, so that a lost or repeated one does no harm.

use super::cursor::Cursor;
use super::{Error, Reader, Writer};

/// Length of a CDC message in bytes.
pub const LEN: usize = 44;
/// Its type code, by which a receiver tells it from LLC messages.
pub const TYPE: u8 = 0xfe;

/// A CDC message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cdc {
    /// Number of the message in its direction of the connection; the first has 1. Wraps.
    pub seq: u16,
    /// Alert token of the receiver. 0 in the abort of a connection that never learned it: to be ignored.
    pub token: u32,
    /// Next byte that the sender will write into the *receiver's* RMB.
    pub producer: Cursor,
    /// Next byte that the sender will read from its *own* RMB.
    pub consumer: Cursor,
    /// What goes with the producer cursor.
    pub flags: ProducerFlags,
    /// How far the sender has closed the connection.
    pub state: StateFlags,
}

/// Producer flags (byte 24).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProducerFlags {
    /// 0x80: the sender has more data than free space.
    pub write_blocked: bool,
    /// 0x40: the sender's socket holds urgent data.
    pub urgent_pending: bool,
    /// 0x20: the byte before the producer cursor is the urgent one.
    pub urgent_present: bool,
    /// 0x10: the receiver shall send its consumer cursor.
    pub update_requested: bool,
    /// 0x08: sent after a failover to another link. Only `seq` has a meaning: the last message that the sender knows
    /// to have arrived. Cursors and state must not be applied.
    pub failover_validation: bool,
}

impl ProducerFlags {
    fn from_bits(bits: u8) -> ProducerFlags {
        ProducerFlags {
            write_blocked: bits & 0x80 != 0,
            urgent_pending: bits & 0x40 != 0,
            urgent_present: bits & 0x20 != 0,
            update_requested: bits & 0x10 != 0,
            failover_validation: bits & 0x08 != 0,
        }
    }

    fn bits(self) -> u8 {
        u8::from(self.write_blocked) << 7
            | u8::from(self.urgent_pending) << 6
            | u8::from(self.urgent_present) << 5
            | u8::from(self.update_requested) << 4
            | u8::from(self.failover_validation) << 3
    }
}

/// Connection state flags (byte 25). Once sent, a flag stays set in all later messages of that direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StateFlags {
    /// 0x80: the sender won't write any more, as after `shutdown(SHUT_WR)`.
    pub done: bool,
    /// 0x40: the sender has closed both directions.
    pub closed: bool,
    /// 0x20: abnormal end.
    pub abort: bool,
}

impl StateFlags {
    fn from_bits(bits: u8) -> StateFlags {
        StateFlags {
            done: bits & 0x80 != 0,
            closed: bits & 0x40 != 0,
            abort: bits & 0x20 != 0,
        }
    }

    fn bits(self) -> u8 {
        u8::from(self.done) << 7 | u8::from(self.closed) << 6 | u8::from(self.abort) << 5
    }
}

impl Cdc {
    /// Decodes a received message.
    ///
    /// Like Linux it is content with the 26 bytes that have a meaning, and ignores reserved bits and bytes. The
    /// cursors are as the peer sent them: see [`Cursor::offset`].
    ///
    /// # Errors
    /// [`Error::Type`], [`Error::Length`] (length byte isn't 44), [`Error::Truncated`].
    pub fn parse(bytes: &[u8]) -> Result<Cdc, Error> {
        let mut r = Reader::new(bytes);
        match r.u8()? {
            TYPE => (),
            other => return Err(Error::Type(other)),
        }
        if usize::from(r.u8()?) != LEN {
            return Err(Error::Length);
        }
        let seq = r.u16()?;
        let token = r.u32()?;
        let producer = cursor(&mut r)?;
        let consumer = cursor(&mut r)?;
        Ok(Cdc {
            seq,
            token,
            producer,
            consumer,
            flags: ProducerFlags::from_bits(r.u8()?),
            state: StateFlags::from_bits(r.u8()?),
        })
    }

    /// Encodes the message.
    pub fn to_bytes(&self) -> [u8; LEN] {
        let mut bytes = [0; LEN];
        let mut w = Writer::new(&mut bytes);
        w.u8(TYPE);
        w.u8(LEN as u8);
        w.u16(self.seq);
        w.u32(self.token);
        for cursor in [self.producer, self.consumer] {
            w.zeros(2);
            w.u16(cursor.wrap);
            w.u32(cursor.count);
        }
        w.u8(self.flags.bits());
        w.u8(self.state.bits());
        bytes
    }

    /// Whether the message is older than the one numbered `last`, and so to be dropped. One with the same number, or
    /// one that jumps ahead, is processed.
    pub fn is_older_than(&self, last: u16) -> bool {
        self.seq.wrapping_sub(last) >= 1 << 15
    }
}

fn cursor(r: &mut Reader<'_>) -> Result<Cursor, Error> {
    r.skip(2)?;
    Ok(Cursor {
        wrap: r.u16()?,
        count: r.u32()?,
    })
}

#[cfg(test)]
mod tests {
    use super::super::vectors;
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn captured_messages_survive() {
        let messages: Vec<_> = vectors::all()
            .filter(|(_, bytes)| bytes.first() == Some(&TYPE))
            .collect();
        assert_eq!(messages.len(), 18);
        for (name, bytes) in messages {
            let cdc = Cdc::parse(&bytes).unwrap();
            assert_eq!(cdc.to_bytes(), *bytes, "{name}");
        }
    }

    fn captured(name: &str) -> Cdc {
        Cdc::parse(&vectors::get(name)).unwrap()
    }

    #[test]
    fn captured_fields() {
        assert_eq!(
            captured("cdc-window-full"),
            Cdc {
                seq: 4,
                token: 1,
                producer: Cursor {
                    wrap: 1,
                    count: 192
                },
                consumer: Cursor {
                    wrap: 0,
                    count: 192
                },
                flags: ProducerFlags {
                    write_blocked: true,
                    ..Default::default()
                },
                state: StateFlags::default(),
            }
        );
        let urgent = captured("cdc-urgent").flags;
        assert!(urgent.urgent_pending && urgent.urgent_present && !urgent.write_blocked);
        let closed = captured("cdc-done-and-closed");
        assert_eq!(
            closed.state,
            StateFlags {
                done: true,
                closed: true,
                abort: false
            }
        );
        assert_eq!(
            closed.producer,
            Cursor {
                wrap: 2,
                count: 0x4ab6
            }
        );
        assert!(captured("cdc-abort").state.abort);
        assert_eq!(captured("cdc-abort-reply").producer.count, 1000);
        let failover = captured("cdc-failover-client");
        assert!(failover.flags.failover_validation);
        assert_eq!((failover.seq, failover.token), (0, 2));
    }

    #[test]
    fn wrong_bytes_are_refused() {
        let bytes = Cdc::default().to_bytes();
        assert_eq!(Cdc::parse(&bytes[..26]), Ok(Cdc::default()));
        assert_eq!(Cdc::parse(&bytes[..25]), Err(Error::Truncated));
        assert_eq!(Cdc::parse(&[]), Err(Error::Truncated));
        let mut wrong = bytes;
        wrong[1] = 45;
        assert_eq!(Cdc::parse(&wrong), Err(Error::Length));
        wrong[0] = 0x27;
        assert_eq!(Cdc::parse(&wrong), Err(Error::Type(0x27)));
    }

    #[test]
    fn sequence_numbers_wrap() {
        let cdc = |seq| Cdc {
            seq,
            ..Default::default()
        };
        assert!(!cdc(101).is_older_than(101));
        assert!(!cdc(201).is_older_than(101));
        assert!(cdc(50).is_older_than(101));
        assert!(!cdc(2).is_older_than(0xffff));
        assert!(cdc(0xffff).is_older_than(2));
        assert!(cdc(0x8001).is_older_than(1));
    }

    prop_compose! {
        fn any_cursor()(wrap: u16, count: u32) -> Cursor {
            Cursor { wrap, count }
        }
    }

    proptest! {
        #[test]
        fn round_trip(
            seq: u16,
            token: u32,
            producer in any_cursor(),
            consumer in any_cursor(),
            flags: u8,
            state: u8,
        ) {
            let flags = ProducerFlags::from_bits(flags);
            let state = StateFlags::from_bits(state);
            let cdc = Cdc { seq, token, producer, consumer, flags, state };
            prop_assert_eq!(Cdc::parse(&cdc.to_bytes()), Ok(cdc));
        }

        #[test]
        fn any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..60)) {
            super::super::fuzzing::cdc(&bytes);
        }
    }
}
