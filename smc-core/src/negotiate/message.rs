//! The datagrams of a link socket (Unix, SEQPACKET): one message each, fixed layouts, little-endian.
//!
//! | offset | size | header                         |
//! |--------|------|--------------------------------|
//! | 0      | 1    | type                           |
//! | 1      | 1    | 0                              |
//! | 2      | 2    | length of the whole message    |
//!
//! The fields follow in the order in which the [`Message`] variant declares them, without padding. Parts:
//! an endpoint is netns u64, local 16, peer 16, local port u16, peer port u16 (44 bytes); an RMB token is chunk,
//! offset, size, each u32 (12 bytes). Any change of a layout, and any new type, needs a new
//! [`VERSION`].
//!
//! Decoding checks the exact length, and the range of each field that has one without knowing the link. Whether a
//! slot, a chunk or a generation exists is for the receiver. Descriptors travel beside the bytes (SCM_RIGHTS);
//! [`Message::fds`] says how many, and a receiver must drop a message that has another number.

use super::endpoint::Endpoint;
use super::runtime::NodeId;

#[cfg(test)]
mod tests;

/// Version of the layouts. Nodes of different versions don't link.
pub const VERSION: u16 = 2;
/// No message is longer than this, in bytes.
pub const MAX: usize = 128;
/// Smallest RMB, in bytes.
pub const RMB_MIN: u32 = 16 << 10;
/// Largest chunk, and so largest RMB, in bytes.
pub const CHUNK_MAX: u32 = 4 << 20;
/// Offsets of RMBs, and sizes of chunks, are multiples of this many bytes.
pub const PAGE: u32 = 4096;

const HEADER: usize = 4;

/// Where an RMB lies in the chunks that its owner announced on this link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RmbToken {
    /// Index of the chunk, as in [`Message::Chunk`].
    pub chunk: u32,
    /// Where in the chunk it begins, in bytes; a multiple of [`PAGE`].
    pub offset: u32,
    /// Its size in bytes: a power of two, from [`RMB_MIN`] to [`CHUNK_MAX`].
    pub size: u32,
}

/// Who a node is: the body of [`Message::Hello`] and [`Message::HelloAck`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Greeting {
    /// [`VERSION`] of the sender.
    pub version: u16,
    /// Index of this link in the sender's bell page.
    pub link_index: u16,
    /// Process id of the sender, 1 to `i32::MAX`. Only for people: trust SO_PEERCRED.
    pub pid: u32,
    /// The sender.
    pub node: NodeId,
    /// Name of the sender's program, cut to 16 bytes, filled up with zeroes.
    pub program: [u8; 16],
}

/// One message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// First message, from the one that connected. Descriptors: the control segment if `control`, then the bell
    /// page.
    Hello {
        /// Who connects.
        greeting: Greeting,
        /// The control segment comes with it.
        control: bool,
    },
    /// Answer to `Hello`. Descriptor: the bell page.
    HelloAck {
        /// Who answers.
        greeting: Greeting,
    },
    /// A doorbell of the sender. Descriptor: the eventfd.
    Bell {
        /// Its index from now on.
        index: u16,
    },
    /// A chunk of the sender's memory that the receiver may write RMBs in. Descriptor: the memfd.
    Chunk {
        /// Its index from now on.
        index: u32,
        /// Size in bytes: a multiple of [`PAGE`], from [`RMB_MIN`] to [`CHUNK_MAX`].
        len: u32,
    },
    /// Asks for the upgrade of a connection.
    Open {
        /// Slot of the link that the connection shall have.
        slot: u32,
        /// The connection as the receiver of this message sees it (`local` is the receiver's).
        endpoint: Endpoint,
        /// The receiver's number for the socket, as it published it.
        acceptor_slot: u32,
        /// Generation of `acceptor_slot`.
        acceptor_gen: u32,
        /// The sender's number for its socket.
        opener_sock: u32,
        /// The sender's RMB.
        rmb: RmbToken,
    },
    /// Agrees to `Open`.
    Accept {
        /// Slot of the link.
        slot: u32,
        /// The sender's RMB.
        rmb: RmbToken,
    },
    /// Refuses `Open`.
    Decline {
        /// Slot of the link.
        slot: u32,
        /// Reason code.
        reason: u8,
    },
    /// Asks for, or tells, that a connection goes back to TCP.
    Downgrade {
        /// Slot of the link.
        slot: u32,
        /// Generation of the slot.
        generation: u32,
        /// 0: it may be upgraded again. Else the reason code why it must not.
        pin: u8,
    },
    /// Takes back what the sender wrote to a carrier from a stream offset on.
    Recall {
        /// Slot of the link.
        slot: u32,
        /// Generation of the slot.
        generation: u32,
        /// Stream offset in bytes.
        at: u64,
    },
    /// The sender's end, which was idle, has left its slot. The receiver's does the same if it can.
    Left {
        /// Slot of the link.
        slot: u32,
    },
    /// Refuses what a message about a slot asked for.
    Nack {
        /// Slot of the link.
        slot: u32,
        /// Generation of the slot.
        generation: u32,
        /// What is refused.
        what: u8,
    },
    /// Reports that what a message about a slot asked for has been done.
    Done {
        /// Slot of the link.
        slot: u32,
        /// Generation of the slot.
        generation: u32,
        /// What is done.
        what: u8,
    },
    /// Asks for a `Pong`.
    Ping {
        /// To be repeated in the answer.
        seq: u32,
    },
    /// Answer to `Ping`.
    Pong {
        /// From the `Ping`.
        seq: u32,
    },
    /// Another process uses an end that the receiver has published: downgrade that connection and pin it to TCP.
    PinEnd {
        /// The connection as the receiver of this message sees it.
        endpoint: Endpoint,
        /// Reason code.
        reason: u8,
    },
}

/// Why bytes are not a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// Shorter or longer than its type says.
    #[error("wrong length of a link message")]
    Length,
    /// No such type.
    #[error("unknown link message type {0}")]
    Type(u8),
    /// The sender speaks another version.
    #[error("link protocol version {0}, not {VERSION}")]
    Version(u16),
    /// A field is outside of its range.
    #[error("bad {0} in a link message")]
    Field(&'static str),
}

/// Writes fields one after the other. Every variant fits in [`MAX`], which a test checks.
struct Writer<'a> {
    out: &'a mut [u8; MAX],
    at: usize,
}

impl Writer<'_> {
    fn put(&mut self, bytes: &[u8]) {
        let end = self.at + bytes.len();
        if let Some(place) = self.out.get_mut(self.at..end) {
            place.copy_from_slice(bytes);
        }
        self.at = end;
    }

    fn u16(&mut self, value: u16) {
        self.put(&value.to_le_bytes());
    }

    fn u32(&mut self, value: u32) {
        self.put(&value.to_le_bytes());
    }

    fn u64(&mut self, value: u64) {
        self.put(&value.to_le_bytes());
    }

    fn greeting(&mut self, greeting: &Greeting) {
        self.u16(greeting.version);
        self.u16(greeting.link_index);
        self.u32(greeting.pid);
        self.u64(greeting.node.get());
        self.put(&greeting.program);
    }

    fn endpoint(&mut self, endpoint: &Endpoint) {
        self.u64(endpoint.netns);
        self.put(&endpoint.local);
        self.put(&endpoint.peer);
        self.u16(endpoint.local_port);
        self.u16(endpoint.peer_port);
    }

    fn rmb(&mut self, rmb: &RmbToken) {
        self.u32(rmb.chunk);
        self.u32(rmb.offset);
        self.u32(rmb.size);
    }
}

/// Takes fields one after the other; every step checks that there are enough bytes.
struct Reader<'a> {
    rest: &'a [u8],
}

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        let (bytes, rest) = self
            .rest
            .split_first_chunk::<N>()
            .ok_or(DecodeError::Length)?;
        self.rest = rest;
        Ok(*bytes)
    }

    fn u8(&mut self) -> Result<u8, DecodeError> {
        self.take().map(u8::from_le_bytes)
    }

    fn u16(&mut self) -> Result<u16, DecodeError> {
        self.take().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32, DecodeError> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, DecodeError> {
        self.take().map(u64::from_le_bytes)
    }

    fn flag(&mut self, name: &'static str) -> Result<bool, DecodeError> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(DecodeError::Field(name)),
        }
    }

    fn greeting(&mut self) -> Result<Greeting, DecodeError> {
        let version = self.u16()?;
        if version != VERSION {
            return Err(DecodeError::Version(version));
        }
        let link_index = self.u16()?;
        let pid = self.u32()?;
        if pid == 0 || pid > i32::MAX as u32 {
            return Err(DecodeError::Field("pid"));
        }
        let node = NodeId::from_raw(self.u64()?).ok_or(DecodeError::Field("node"))?;
        Ok(Greeting {
            version,
            link_index,
            pid,
            node,
            program: self.take()?,
        })
    }

    fn endpoint(&mut self) -> Result<Endpoint, DecodeError> {
        let endpoint = Endpoint {
            netns: self.u64()?,
            local: self.take()?,
            peer: self.take()?,
            local_port: self.u16()?,
            peer_port: self.u16()?,
        };
        if endpoint.local_port == 0 || endpoint.peer_port == 0 {
            return Err(DecodeError::Field("port"));
        }
        Ok(endpoint)
    }

    fn rmb(&mut self) -> Result<RmbToken, DecodeError> {
        let rmb = RmbToken {
            chunk: self.u32()?,
            offset: self.u32()?,
            size: self.u32()?,
        };
        if !rmb.size.is_power_of_two() || !(RMB_MIN..=CHUNK_MAX).contains(&rmb.size) {
            return Err(DecodeError::Field("RMB size"));
        }
        if !rmb.offset.is_multiple_of(PAGE) || rmb.offset > CHUNK_MAX - rmb.size {
            return Err(DecodeError::Field("RMB offset"));
        }
        Ok(rmb)
    }
}

impl Message {
    /// How many file descriptors come with the message.
    pub fn fds(&self) -> usize {
        match self {
            Message::Hello { control: true, .. } => 2,
            Message::Hello { control: false, .. }
            | Message::HelloAck { .. }
            | Message::Bell { .. }
            | Message::Chunk { .. } => 1,
            _ => 0,
        }
    }

    /// Writes the message to the front of `out`, and returns its length. The values are not checked.
    pub fn encode(&self, out: &mut [u8; MAX]) -> usize {
        let mut w = Writer { out, at: HEADER };
        match self {
            Message::Hello { greeting, control } => {
                w.greeting(greeting);
                w.put(&[u8::from(*control)]);
            }
            Message::HelloAck { greeting } => w.greeting(greeting),
            Message::Bell { index } => w.u16(*index),
            Message::Chunk { index, len } => {
                w.u32(*index);
                w.u32(*len);
            }
            Message::Open {
                slot,
                endpoint,
                acceptor_slot,
                acceptor_gen,
                opener_sock,
                rmb,
            } => {
                w.u32(*slot);
                w.endpoint(endpoint);
                w.u32(*acceptor_slot);
                w.u32(*acceptor_gen);
                w.u32(*opener_sock);
                w.rmb(rmb);
            }
            Message::Accept { slot, rmb } => {
                w.u32(*slot);
                w.rmb(rmb);
            }
            Message::Decline { slot, reason } => {
                w.u32(*slot);
                w.put(&[*reason]);
            }
            Message::Downgrade {
                slot,
                generation,
                pin: code,
            }
            | Message::Nack {
                slot,
                generation,
                what: code,
            }
            | Message::Done {
                slot,
                generation,
                what: code,
            } => {
                w.u32(*slot);
                w.u32(*generation);
                w.put(&[*code]);
            }
            Message::Recall {
                slot,
                generation,
                at,
            } => {
                w.u32(*slot);
                w.u32(*generation);
                w.u64(*at);
            }
            Message::Left { slot } => w.u32(*slot),
            Message::Ping { seq } | Message::Pong { seq } => w.u32(*seq),
            Message::PinEnd { endpoint, reason } => {
                w.endpoint(endpoint);
                w.put(&[*reason]);
            }
        }
        let len = w.at;
        w.at = 0;
        w.put(&[self.code(), 0]);
        w.u16(len as u16);
        len
    }

    /// Reads a message.
    ///
    /// # Errors
    /// See [`DecodeError`]. Any bytes are answered, none makes it panic.
    pub fn decode(bytes: &[u8]) -> Result<Message, DecodeError> {
        let mut r = Reader { rest: bytes };
        let code = r.u8()?;
        let zero = r.u8()?;
        if usize::from(r.u16()?) != bytes.len() {
            return Err(DecodeError::Length);
        }
        if zero != 0 {
            return Err(DecodeError::Field("header"));
        }
        let message = match code {
            1 => Message::Hello {
                greeting: r.greeting()?,
                control: r.flag("control")?,
            },
            2 => Message::HelloAck {
                greeting: r.greeting()?,
            },
            3 => Message::Bell { index: r.u16()? },
            4 => {
                let (index, len) = (r.u32()?, r.u32()?);
                if !len.is_multiple_of(PAGE) || !(RMB_MIN..=CHUNK_MAX).contains(&len) {
                    return Err(DecodeError::Field("chunk length"));
                }
                Message::Chunk { index, len }
            }
            5 => Message::Open {
                slot: r.u32()?,
                endpoint: r.endpoint()?,
                acceptor_slot: r.u32()?,
                acceptor_gen: r.u32()?,
                opener_sock: r.u32()?,
                rmb: r.rmb()?,
            },
            6 => Message::Accept {
                slot: r.u32()?,
                rmb: r.rmb()?,
            },
            7 => Message::Decline {
                slot: r.u32()?,
                reason: r.u8()?,
            },
            8 => Message::Downgrade {
                slot: r.u32()?,
                generation: r.u32()?,
                pin: r.u8()?,
            },
            9 => Message::Recall {
                slot: r.u32()?,
                generation: r.u32()?,
                at: r.u64()?,
            },
            10 => Message::Nack {
                slot: r.u32()?,
                generation: r.u32()?,
                what: r.u8()?,
            },
            11 => Message::Done {
                slot: r.u32()?,
                generation: r.u32()?,
                what: r.u8()?,
            },
            12 => Message::Ping { seq: r.u32()? },
            13 => Message::Pong { seq: r.u32()? },
            14 => Message::PinEnd {
                endpoint: r.endpoint()?,
                reason: r.u8()?,
            },
            15 => Message::Left { slot: r.u32()? },
            other => return Err(DecodeError::Type(other)),
        };
        if r.rest.is_empty() {
            Ok(message)
        } else {
            Err(DecodeError::Length)
        }
    }

    fn code(&self) -> u8 {
        match self {
            Message::Hello { .. } => 1,
            Message::HelloAck { .. } => 2,
            Message::Bell { .. } => 3,
            Message::Chunk { .. } => 4,
            Message::Open { .. } => 5,
            Message::Accept { .. } => 6,
            Message::Decline { .. } => 7,
            Message::Downgrade { .. } => 8,
            Message::Recall { .. } => 9,
            Message::Nack { .. } => 10,
            Message::Done { .. } => 11,
            Message::Ping { .. } => 12,
            Message::Pong { .. } => 13,
            Message::PinEnd { .. } => 14,
            Message::Left { .. } => 15,
        }
    }
}
