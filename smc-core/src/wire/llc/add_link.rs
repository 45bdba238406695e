//! ADD LINK, its continuation in version 1, and REQUEST ADD LINK.

use super::super::{Error, Gid, Mac, Mtu, Psn, Qpn, Reader, Rtoken, Writer};
use super::{LEN, Order, RESPONSE, Version};

const REJECT: u8 = 0x40;
const DIRECT: u8 = 0x80;
/// Where the RMB entries of version 2 begin, in bytes.
const ENTRIES: usize = 72;
/// Where the GIDs of REQUEST ADD LINK begin, in bytes.
const GIDS: usize = 28;

/// ADD LINK: the server proposes one more link, the client answers. A client may suggest it, with queue pair 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddLink<'a> {
    /// Whether it is a request, or which answer.
    pub answer: AddLinkAnswer,
    /// Port of the sender for the new link.
    pub mac: Mac,
    /// GID of the sender for the new link.
    pub gid: Gid,
    /// Queue pair of the sender for the new link.
    pub qpn: Qpn,
    /// Number of the new link, assigned by the server.
    pub link: u8,
    /// Path MTU: the sender's own in a request, the lesser of both in an answer. `None` if the code is none.
    pub mtu: Option<Mtu>,
    /// First packet sequence number of the sender on the new link.
    pub psn: Psn,
    /// What version 2 adds in requests and accepting answers.
    pub extension: Option<AddLinkExtension<'a>>,
}

/// Role of an [`AddLink`] message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddLinkAnswer {
    /// No answer.
    Request,
    /// The link is welcome.
    Accept,
    /// It isn't. The rest repeats the request, without the extension.
    Reject {
        /// Why, 4 bits: 1 no alternate path, 2 invalid MTU (RFC 7609). Version 2 has no place for it.
        reason: u8,
    },
}

/// The second part of ADD LINK in version 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddLinkExtension<'a> {
    /// The sender reaches the other port without a gateway.
    pub direct: bool,
    /// GID of the client that the link shall lead to; Linux repeats the sender's.
    pub target: Gid,
    /// The sender's RMBs in use, each encoded by [`RmbEntry::to_bytes`].
    pub rmbs: &'a [[u8; RmbEntry::LEN]],
}

/// An RMB that gets an RToken for a new link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RmbEntry {
    /// Its rkey on the link that carries the message.
    pub known: u32,
    /// Its RToken on the new link.
    pub token: Rtoken,
}

impl RmbEntry {
    /// Length on the wire in bytes.
    pub const LEN: usize = 16;

    /// Decodes an entry.
    pub fn from_bytes(bytes: [u8; RmbEntry::LEN]) -> RmbEntry {
        let word = u128::from_be_bytes(bytes);
        // Each cast keeps the field's own bits.
        RmbEntry {
            known: (word >> 96) as u32,
            token: Rtoken {
                rkey: (word >> 64) as u32,
                addr: word as u64,
            },
        }
    }

    /// Encodes the entry.
    pub fn to_bytes(self) -> [u8; RmbEntry::LEN] {
        let word = u128::from(self.known) << 96
            | u128::from(self.token.rkey) << 64
            | u128::from(self.token.addr);
        word.to_be_bytes()
    }
}

impl<'a> AddLink<'a> {
    pub(super) fn parse_v1(
        flags: u8,
        reason: u8,
        r: &mut Reader<'a>,
    ) -> Result<AddLink<'a>, Error> {
        let mac = Mac(r.array()?);
        r.skip(2)?;
        Ok(AddLink {
            answer: if flags & RESPONSE == 0 {
                AddLinkAnswer::Request
            } else if flags & REJECT == 0 {
                AddLinkAnswer::Accept
            } else {
                AddLinkAnswer::Reject { reason }
            },
            mac,
            gid: Gid(r.array()?),
            qpn: Qpn::from_be_bytes(r.array()?),
            link: r.u8()?,
            mtu: Mtu::from_code(r.u8()? & 0x0f),
            psn: Psn::from_be_bytes(r.array()?),
            extension: None,
        })
    }

    pub(super) fn parse_v2(
        flags: u8,
        order: Order,
        r: &mut Reader<'a>,
    ) -> Result<AddLink<'a>, Error> {
        let mut message = AddLink::parse_v1(flags, 0, r)?;
        r.skip(8)?;
        let rejected = matches!(message.answer, AddLinkAnswer::Reject { .. });
        if !rejected && r.left() >= ENTRIES - LEN {
            message.extension = Some(AddLinkExtension::parse(order, r)?);
        }
        Ok(message)
    }

    pub(super) fn flags(&self) -> u8 {
        match self.answer {
            AddLinkAnswer::Request => 0,
            AddLinkAnswer::Accept => RESPONSE,
            AddLinkAnswer::Reject { .. } => RESPONSE | REJECT,
        }
    }

    pub(super) fn reject_reason(&self) -> u8 {
        match self.answer {
            AddLinkAnswer::Reject { reason } => reason & 0x0f,
            _ => 0,
        }
    }

    /// What [`AddLink::emit`] writes after the 44 bytes in version 2.
    fn tail(&self) -> Option<&AddLinkExtension<'a>> {
        match self.answer {
            AddLinkAnswer::Reject { .. } => None,
            _ => self.extension.as_ref(),
        }
    }

    pub(super) fn encoded_len(&self) -> usize {
        self.tail()
            .map_or(LEN, |tail| ENTRIES + size_of_val(tail.rmbs))
    }

    pub(super) fn emit(&self, version: Version, w: &mut Writer<'_>) {
        w.put(&self.mac.0);
        w.zeros(2);
        w.put(&self.gid.0);
        w.put(&self.qpn.to_be_bytes());
        w.u8(self.link);
        w.u8(self.mtu.map_or(0, Mtu::code));
        w.put(&self.psn.to_be_bytes());
        w.zeros(8);
        if let (Version::V2, Some(tail)) = (version, self.tail()) {
            tail.emit(w);
        }
    }
}

impl<'a> AddLinkExtension<'a> {
    fn parse(order: Order, r: &mut Reader<'a>) -> Result<AddLinkExtension<'a>, Error> {
        let direct = r.u8()? & DIRECT != 0;
        r.skip(1)?;
        let target = Gid(r.array()?);
        r.skip(8)?;
        let count = order.u16(r.array()?);
        Ok(AddLinkExtension {
            direct,
            target,
            rmbs: r.arrays(count.into()).map_err(|_| Error::Length)?,
        })
    }

    fn emit(&self, w: &mut Writer<'_>) {
        w.u8(if self.direct { DIRECT } else { 0 });
        w.zeros(1);
        w.put(&self.target.0);
        w.zeros(8);
        // A message that can be sent has less than MAX / 16 entries.
        w.put(&(self.rmbs.len() as u16).to_le_bytes());
        w.put(self.rmbs.as_flattened());
    }

    /// The sender's RMBs in use.
    pub fn entries(&self) -> impl Iterator<Item = RmbEntry> + use<'a> {
        self.rmbs.iter().copied().map(RmbEntry::from_bytes)
    }
}

/// ADD LINK CONTINUATION: two RMB entries, in version 1. Both sides send as many as they need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddLinkContinuation {
    /// Answers a request.
    pub response: bool,
    /// Number of the new link.
    pub link: u8,
    /// How many RMB entries the sender has left.
    pub left: u8,
    /// The entries.
    pub rmbs: [RmbEntry; 2],
}

impl AddLinkContinuation {
    pub(super) fn parse(flags: u8, r: &mut Reader<'_>) -> Result<AddLinkContinuation, Error> {
        let link = r.u8()?;
        let left = r.u8()?;
        r.skip(2)?;
        Ok(AddLinkContinuation {
            response: flags & RESPONSE != 0,
            link,
            left,
            rmbs: [
                RmbEntry::from_bytes(r.array()?),
                RmbEntry::from_bytes(r.array()?),
            ],
        })
    }

    pub(super) fn emit(&self, w: &mut Writer<'_>) {
        w.u8(self.link);
        w.u8(self.left);
        w.zeros(2);
        for entry in self.rmbs {
            w.put(&entry.to_bytes());
        }
    }
}

/// REQUEST ADD LINK: the client has one more port. The server answers with ADD LINK, or refuses with a response
/// without GIDs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestAddLink<'a> {
    /// Answers a request.
    pub response: bool,
    /// GIDs that the client can use, at most 255.
    pub gids: &'a [[u8; 16]],
}

impl<'a> RequestAddLink<'a> {
    pub(super) fn parse(flags: u8, r: &mut Reader<'a>) -> Result<RequestAddLink<'a>, Error> {
        r.skip(20)?;
        let count = r.u8()?;
        r.skip(3)?;
        Ok(RequestAddLink {
            response: flags & RESPONSE != 0,
            gids: r.arrays(count.into()).map_err(|_| Error::Length)?,
        })
    }

    fn listed(&self) -> &'a [[u8; 16]] {
        self.gids
            .get(..self.gids.len().min(255))
            .unwrap_or_default()
    }

    pub(super) fn encoded_len(&self) -> usize {
        GIDS + size_of_val(self.listed())
    }

    pub(super) fn emit(&self, w: &mut Writer<'_>) {
        let gids = self.listed();
        w.zeros(20);
        w.u8(gids.len() as u8);
        w.zeros(3);
        w.put(gids.as_flattened());
    }
}
