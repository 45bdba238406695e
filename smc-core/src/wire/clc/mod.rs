//! CLC (connection layer control): the messages on the TCP stream by which two hosts agree on SMC-R
//! (RFC 7609 section 3.2 and SMC version 2.1, as Linux speaks them).
//!
//! | message | from | says |
//! |---|---|---|
//! | [`Proposal`] | client | what I can do |
//! | Accept ([`AcceptConfirm`]) | server | my queue pair and RMB, and what we do |
//! | Confirm ([`AcceptConfirm`]) | client | my queue pair and RMB |
//! | [`Decline`] | either, in place of any other or after a Confirm | we stay on TCP, because of [`Diagnosis`] |
//!
//! Every message has an 8-byte header and a 4-byte trailer:
//!
//! | offset | size | field |
//! |---|---|---|
//! | 0 | 4 | eyecatcher "SMCR" in EBCDIC; "SMCD" is taken too |
//! | 4 | 1 | type: 1 Proposal, 2 Accept, 3 Confirm, 4 Decline |
//! | 5 | 2 | length of the whole message |
//! | 7 | 1 | 0xf0 version; 0x0f depends on the type |
//! | length − 4 | 4 | eyecatcher again |
//!
//! The program's bytes may follow a Decline at once, so a reader must not take a byte more than the message has:
//! [`missing`] tells how many it may take. What is reserved is sent as zero and ignored on receipt. SMC-D parts
//! of a message are passed over.

use super::bytes::{Reader, Writer};
use super::{Error, SystemId};

mod accept;
mod decline;
mod diagnosis;
pub mod fuzzing;
mod list;
mod proposal;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

pub use accept::{AcceptConfirm, ConnEnd, FirstContact, V2Part};
pub use decline::Decline;
pub use diagnosis::Diagnosis;
pub use list::List;
pub use proposal::{Ipv6Prefix, OfferV1, OfferV2, Prefixes, Proposal};

/// Bytes of the header.
pub const HEADER: usize = 8;
/// Bytes of the longest message that [`Message::emit`] writes: a Proposal with all its lists full.
pub const MAX_EMIT: usize = 524;
/// OS type of Linux, as [`FirstContact::os`] and [`Decline::os`] have it.
pub const OS_LINUX: u8 = 2;

const TRAILER: usize = 4;
const SMCR: [u8; 4] = [0xe2, 0xd4, 0xc3, 0xd9];
const SMCD: [u8; 4] = [0xe2, 0xd4, 0xc3, 0xc4];

/// Version of SMC that a message speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Version {
    /// SMC-R of RFC 7609: RoCEv1.
    V1 = 1,
    /// SMC version 2: RoCEv2 and enterprise ids.
    V2 = 2,
}

/// What a message is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Type {
    /// The client's offer.
    Proposal = 1,
    /// The server's answer to it.
    Accept = 2,
    /// The client's answer to that.
    Confirm = 3,
    /// End of the negotiation: the connection stays on TCP.
    Decline = 4,
}

impl Type {
    fn from_code(code: u8) -> Result<Type, Error> {
        Ok(match code {
            1 => Type::Proposal,
            2 => Type::Accept,
            3 => Type::Confirm,
            4 => Type::Decline,
            _ => return Err(Error::Type(code)),
        })
    }
}

/// One CLC message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// The client's offer.
    Proposal(Proposal),
    /// The server's answer to it.
    Accept(AcceptConfirm),
    /// The client's answer to that.
    Confirm(AcceptConfirm),
    /// End of the negotiation: the connection stays on TCP.
    Decline(Decline),
    /// An Accept or Confirm for SMC-D, whose fields are not read.
    SmcD(Type),
}

impl Message {
    /// Decodes a whole message, as [`missing`] delimits it.
    ///
    /// # Errors
    ///
    /// [`Error::Field`] when the message is well-formed, but a value in it is one that nobody may send; any other
    /// error when it isn't well-formed. Linux closes the connection on the latter.
    pub fn parse(bytes: &[u8]) -> Result<Message, Error> {
        let header = Header::parse(bytes)?;
        if header.length != bytes.len() {
            return Err(Error::Length);
        }
        let (body, trailer) = bytes.split_last_chunk().ok_or(Error::Truncated)?;
        // Linux doesn't look at the trailer of a Decline.
        if header.kind != Type::Decline && *trailer != SMCR && *trailer != SMCD {
            return Err(Error::Trailer);
        }
        match header.kind {
            Type::Proposal => Proposal::parse(header, body).map(Message::Proposal),
            Type::Decline => Decline::parse(header, body).map(Message::Decline),
            Type::Accept | Type::Confirm => match header.bits & 3 {
                0 => {
                    let message = AcceptConfirm::parse(header, body)?;
                    Ok(match header.kind {
                        Type::Accept => Message::Accept(message),
                        _ => Message::Confirm(message),
                    })
                }
                1 => Ok(Message::SmcD(header.kind)),
                _ => Err(Error::Version(header.bits)),
            },
        }
    }

    /// Writes the message to the front of `buf` and returns its length in bytes.
    ///
    /// `None` if `buf` is too short ([`MAX_EMIT`] bytes always suffice), and for [`Message::SmcD`].
    pub fn emit(&self, buf: &mut [u8]) -> Option<usize> {
        let mut out = Writer::new(buf);
        match self {
            Message::Proposal(message) => message.emit(&mut out),
            Message::Accept(message) => message.emit(Type::Accept, &mut out),
            Message::Confirm(message) => message.emit(Type::Confirm, &mut out),
            Message::Decline(message) => message.emit(&mut out),
            Message::SmcD(_) => return None,
        }
        out.put(&SMCR);
        out.finish()
    }
}

/// How many bytes have to follow `bytes`, the beginning of a stream, until they hold a header or, once they do,
/// the whole message. 0: the message is complete.
///
/// A reader that asks before each read, and reads at most so many bytes, never takes one that follows the message.
///
/// # Errors
///
/// The stream doesn't begin with a CLC message. This shows with the first wrong byte.
pub fn missing(bytes: &[u8]) -> Result<usize, Error> {
    if bytes.len() < HEADER {
        let start = bytes.get(..4).unwrap_or(bytes);
        if SMCR.starts_with(start) || SMCD.starts_with(start) {
            return Ok(HEADER - bytes.len());
        }
        return Err(Error::Eyecatcher);
    }
    let header = Header::parse(bytes)?;
    Ok(header.length.saturating_sub(bytes.len()))
}

/// The header, with its constant fields checked.
#[derive(Clone, Copy)]
struct Header {
    kind: Type,
    /// Bytes of the whole message.
    length: usize,
    /// What the sender speaks at most; higher ones than ours count as ours.
    version: Version,
    /// Byte 7, low nibble.
    bits: u8,
}

impl Header {
    fn parse(bytes: &[u8]) -> Result<Header, Error> {
        let mut reader = Reader::new(bytes);
        let eyecatcher = reader.array()?;
        if eyecatcher != SMCR && eyecatcher != SMCD {
            return Err(Error::Eyecatcher);
        }
        let kind = Type::from_code(reader.u8()?)?;
        let length = usize::from(reader.u16()?);
        if length < HEADER + TRAILER {
            return Err(Error::Length);
        }
        let byte = reader.u8()?;
        let version = match (byte >> 4, kind) {
            (1, _) => Version::V1,
            (2, _) => Version::V2,
            // A Proposal names the highest version its sender knows, the others the one in use.
            (3.., Type::Proposal) => Version::V2,
            (version, _) => return Err(Error::Version(version)),
        };
        Ok(Header {
            kind,
            length,
            version,
            bits: byte & 0x0f,
        })
    }

    fn emit(self, out: &mut Writer<'_>) {
        out.put(&SMCR);
        out.u8(self.kind as u8);
        // No message is near this limit.
        out.u16(u16::try_from(self.length).unwrap_or(u16::MAX));
        out.u8((self.version as u8) << 4 | self.bits);
    }
}
