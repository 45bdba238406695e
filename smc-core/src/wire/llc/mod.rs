//! LLC: the messages that set up, watch and end the links of a link group.
//!
//! | offset | size | version 2 | version 1 |
//! |---|---|---|---|
//! | 0 | 1 | 0x20 + message number | message number |
//! | 1 | 2 | length, **host order** | byte 1: length 44; byte 2: reject reason of ADD LINK in the low nibble |
//! | 3 | 1 | flags: 0x80 response, others per message | the same |
//!
//! Integers are big-endian, but for two fields of version 2: the length, and the number of RMB entries of ADD LINK.
//! Linux sends these in the byte order of its machine. Here both orders are understood, and little-endian is sent, as
//! Linux on x86-64 and arm64 does.
//!
//! Messages are 44 bytes long, except ADD LINK and REQUEST ADD LINK of version 2, which may have up to [`MAX`].
//! Fields that repeat are borrowed from the received bytes. CONFIRM RKEY CONTINUATION isn't here: three RTokens fit
//! CONFIRM RKEY, so Linux never sends it, and drops it on receipt.

mod add_link;
mod confirm_link;
mod delete_link;
mod rkey;
#[cfg(test)]
mod tests;

use super::{Error, Reader, Writer};

pub use add_link::{
    AddLink, AddLinkAnswer, AddLinkContinuation, AddLinkExtension, RequestAddLink, RmbEntry,
};
pub use confirm_link::ConfirmLink;
pub use delete_link::{DeleteLink, DeleteReason};
pub use rkey::{ConfirmRkey, DeleteRkey, LinkRtoken, Rkeys};

/// Length in bytes of most messages, and least length of all.
pub const LEN: usize = 44;
/// No message is longer than this, in bytes.
pub const MAX: usize = 8192;

/// Bit 0x80 of the flags: the message answers one of the other side.
const RESPONSE: u8 = 0x80;

/// Form of a message's header. A request is answered in its own form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// SMC-R version 1.
    V1,
    /// SMC version 2.
    V2,
}

/// An LLC message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message<'a> {
    /// Form of the header.
    pub version: Version,
    /// The rest.
    pub body: Body<'a>,
}

/// What the messages say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body<'a> {
    /// Number 1: proves that a new link works. The server asks.
    ConfirmLink(ConfirmLink),
    /// Number 2: proposes one more link.
    AddLink(AddLink<'a>),
    /// Number 3, version 1 only: RTokens for a link that is being added.
    AddLinkContinuation(AddLinkContinuation),
    /// Number 4: ends a link, or all of a group.
    DeleteLink(DeleteLink),
    /// Number 5, version 2 only: the client asks the server to add a link.
    RequestAddLink(RequestAddLink<'a>),
    /// Number 6: announces an RMB to the peer.
    ConfirmRkey(ConfirmRkey),
    /// Number 7: asks whether the link is alive.
    TestLink(TestLink),
    /// Number 9: takes RMBs back.
    DeleteRkey(DeleteRkey),
}

/// TEST LINK.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TestLink {
    /// Answers a request.
    pub response: bool,
    /// Bytes of the one who asks; the answer repeats them. Linux sends zeros.
    pub data: [u8; 16],
}

impl TestLink {
    fn parse(flags: u8, r: &mut Reader<'_>) -> Result<TestLink, Error> {
        Ok(TestLink {
            response: flags & RESPONSE != 0,
            data: r.array()?,
        })
    }
}

/// Byte order of the length and the number of RMB entries, as found in the length.
#[derive(Clone, Copy)]
enum Order {
    Little,
    Big,
}

impl Order {
    fn u16(self, bytes: [u8; 2]) -> u16 {
        match self {
            Order::Little => u16::from_le_bytes(bytes),
            Order::Big => u16::from_be_bytes(bytes),
        }
    }

    /// The order in which `field` is a length of at least [`LEN`] and at most `max`, and that length.
    fn of_length(field: [u8; 2], max: usize) -> Result<(Order, usize), Error> {
        [Order::Little, Order::Big]
            .into_iter()
            .map(|order| (order, usize::from(order.u16(field))))
            .find(|(_, len)| (LEN..=max).contains(len))
            .ok_or(Error::Length)
    }
}

impl<'a> Message<'a> {
    /// Decodes a received message. Bytes after its end, reserved bytes and unknown flags are ignored.
    ///
    /// # Errors
    /// [`Error::Truncated`] for less than [`LEN`] bytes, [`Error::Length`] if a length or count doesn't fit the bytes
    /// there are, [`Error::Type`] for an unknown message (a CDC message among them), [`Error::Field`].
    pub fn parse(bytes: &'a [u8]) -> Result<Message<'a>, Error> {
        if bytes.len() < LEN {
            return Err(Error::Truncated);
        }
        let mut r = Reader::new(bytes);
        let kind = r.u8()?;
        let length: [u8; 2] = r.array()?;
        let (version, number, order, len) = match kind {
            0x01..=0x0f => {
                let [length, _] = length;
                if usize::from(length) != LEN {
                    return Err(Error::Length);
                }
                (Version::V1, kind, Order::Big, LEN)
            }
            0x21..=0x2f => {
                let (order, len) = Order::of_length(length, bytes.len().min(MAX))?;
                (Version::V2, kind & 0x0f, order, len)
            }
            other => return Err(Error::Type(other)),
        };
        let mut r = Reader::new(bytes.get(..len).ok_or(Error::Length)?);
        r.skip(2)?;
        let (reason, flags) = (r.u8()? & 0x0f, r.u8()?);
        let r = &mut r;
        let body = match (version, number) {
            (_, 1) => Body::ConfirmLink(ConfirmLink::parse(flags, r)?),
            (Version::V1, 2) => Body::AddLink(AddLink::parse_v1(flags, reason, r)?),
            (Version::V2, 2) => Body::AddLink(AddLink::parse_v2(flags, order, r)?),
            (Version::V1, 3) => Body::AddLinkContinuation(AddLinkContinuation::parse(flags, r)?),
            (_, 4) => Body::DeleteLink(DeleteLink::parse(flags, r)?),
            (Version::V2, 5) => Body::RequestAddLink(RequestAddLink::parse(flags, r)?),
            (_, 6) => Body::ConfirmRkey(ConfirmRkey::parse(flags, r)?),
            (_, 7) => Body::TestLink(TestLink::parse(flags, r)?),
            (_, 9) => Body::DeleteRkey(DeleteRkey::parse(flags, r)?),
            _ => return Err(Error::Type(kind)),
        };
        Ok(Message { version, body })
    }

    /// Length of the encoded message in bytes, from [`LEN`] up; above [`MAX`] with more RMB entries or GIDs than a
    /// message can carry.
    pub fn encoded_len(&self) -> usize {
        let len = match (&self.body, self.version) {
            (Body::AddLink(add), Version::V2) => add.encoded_len(),
            (Body::RequestAddLink(request), _) => request.encoded_len(),
            _ => LEN,
        };
        len.max(LEN)
    }

    /// Encodes the message at the front of `out` and returns its length; `None` if `out` is shorter than
    /// [`Message::encoded_len`], or that is above [`MAX`].
    ///
    /// What version 1 has no place for (the extension of ADD LINK) is left out there, as is a reject reason in version
    /// 2. A message that the version doesn't have is encoded all the same, and not understood by the receiver.
    pub fn emit(&self, out: &mut [u8]) -> Option<usize> {
        let len = self.encoded_len();
        if len > MAX {
            return None;
        }
        let out = out.get_mut(..len)?;
        out.fill(0);
        let (number, flags) = match &self.body {
            Body::ConfirmLink(message) => (1, message.flags()),
            Body::AddLink(message) => (2, message.flags()),
            Body::AddLinkContinuation(message) => (3, response_flag(message.response)),
            Body::DeleteLink(message) => (4, message.flags()),
            Body::RequestAddLink(message) => (5, response_flag(message.response)),
            Body::ConfirmRkey(message) => (6, message.flags()),
            Body::TestLink(message) => (7, response_flag(message.response)),
            Body::DeleteRkey(message) => (9, message.flags()),
        };
        let mut w = Writer::new(out);
        match self.version {
            Version::V1 => {
                let reason = match &self.body {
                    Body::AddLink(message) => message.reject_reason(),
                    _ => 0,
                };
                w.put(&[number, LEN as u8, reason]);
            }
            Version::V2 => {
                w.u8(0x20 | number);
                // At most MAX, so that it fits.
                w.put(&(len as u16).to_le_bytes());
            }
        }
        w.u8(flags);
        match &self.body {
            Body::ConfirmLink(message) => message.emit(&mut w),
            Body::AddLink(message) => message.emit(self.version, &mut w),
            Body::AddLinkContinuation(message) => message.emit(&mut w),
            Body::DeleteLink(message) => message.emit(&mut w),
            Body::RequestAddLink(message) => message.emit(&mut w),
            Body::ConfirmRkey(message) => message.emit(&mut w),
            Body::TestLink(message) => w.put(&message.data),
            Body::DeleteRkey(message) => message.emit(&mut w),
        }
        w.finish().map(|_| len)
    }

    /// Whether the message answers one of the other side.
    pub fn is_response(&self) -> bool {
        match &self.body {
            Body::ConfirmLink(message) => message.response,
            Body::AddLink(message) => message.answer != AddLinkAnswer::Request,
            Body::AddLinkContinuation(message) => message.response,
            Body::DeleteLink(message) => message.response,
            Body::RequestAddLink(message) => message.response,
            Body::ConfirmRkey(message) => message.response,
            Body::TestLink(message) => message.response,
            Body::DeleteRkey(message) => message.response,
        }
    }
}

fn response_flag(response: bool) -> u8 {
    if response { RESPONSE } else { 0 }
}
