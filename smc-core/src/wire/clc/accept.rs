//! The Accept and Confirm messages for SMC-R, which share their layout.
//!
//! | offset | size | field |
//! |---|---|---|
//! | 0 | 8 | header; low nibble of byte 7: 0x08 first contact, 0x03 path (0) |
//! | 8 | 8 | system id of the sender |
//! | 16 | 16 | GID |
//! | 32 | 6 | MAC |
//! | 38 | 3 | queue pair number |
//! | 41 | 4 | rkey of the RMB |
//! | 45 | 1 | index of the element in the RMB, from 1 |
//! | 46 | 4 | alert token |
//! | 50 | 1 | 0xf0 size code of the RMB, 0x0f MTU code |
//! | 51 | 1 | reserved |
//! | 52 | 8 | address of the RMB |
//! | 60 | 1 | reserved |
//! | 61 | 3 | initial packet sequence number |
//! | 64 | 32 | version 2: enterprise id |
//! | 96 | 8 | reserved |
//!
//! With the first-contact flag, version 2 continues with the first-contact extension:
//!
//! | offset | size | field |
//! |---|---|---|
//! | 104 | 1 | 0x80 no gateway between the sender and the peer |
//! | 105 | 1 | 0xf0 OS type, 0x0f release |
//! | 108 | 32 | host name |
//! | 140 | 1 | max_conns; from here to 155 absent from release-0 senders older than Linux 6.6 |
//! | 141 | 1 | max_links |
//! | 142 | 2 | feature mask |
//! | 144 | 4 | vendor's options |
//! | 156 | 4 | Confirm only: number of GIDs n (1), reserved (3) |
//! | 160 | 16·n | Confirm only: GIDs of the sender |
//!
//! A version 1 message has exactly 68 bytes. One of version 2 has at least 108, and Linux tolerates more.

use super::super::bytes::{Reader, Writer};
use super::super::{Eid, Error, Gid, Mac, Mtu, Psn, Qpn, RmbSize, Rtoken};
use super::{Header, List, SystemId, TRAILER, Type, Version};

const FIRST_CONTACT: u8 = 0x08;
const DIRECT: u8 = 0x80;
const LEN_V1: usize = 68;
const LEN_V2: usize = 108;
const EXTENSION: usize = 52;
/// The extension before v2.1.
const EXTENSION_SHORT: usize = 36;
const GIDS_HEAD: usize = 4;
const GID: usize = 16;

/// An Accept or a Confirm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AcceptConfirm {
    /// Who sends it; always filled.
    pub system_id: SystemId,
    /// The connection begins a new link group. Else it joins an old one, on the link that [`ConnEnd::qpn`] names.
    pub first_contact: bool,
    /// The sender's end of the connection.
    pub end: ConnEnd,
    /// What version 2 adds; `None` in a message of version 1.
    pub v2: Option<V2Part>,
}

/// One end of a connection: the queue pair of its link, and its RMB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnEnd {
    /// Address of the RoCE port.
    pub gid: Gid,
    /// MAC of the RoCE port.
    pub mac: Mac,
    /// The queue pair. In subsequent contact, that of an existing link.
    pub qpn: Qpn,
    /// First sequence number of the queue pair. In subsequent contact a memory of the past: not to be applied.
    pub psn: Psn,
    /// Accept: the server's path MTU. Confirm: the smaller one of both.
    pub mtu: Mtu,
    /// The RMB, for writes over this link.
    pub rtoken: Rtoken,
    /// Size of the RMB element.
    pub rmb_size: RmbSize,
    /// Which element of the RMB, 1 or more; 1 from Linux.
    pub rmb_index: u8,
    /// What CDC messages to this end carry; not 0.
    pub alert_token: u32,
}

impl ConnEnd {
    /// Address that the peer's first byte has to be written to; `None` if it is beyond the address space.
    pub fn rmb_addr(&self) -> Option<u64> {
        let elements = u64::from(self.rmb_index).checked_sub(1)?;
        let start = self
            .rtoken
            .addr
            .checked_add(elements * u64::from(self.rmb_size.bytes()))?;
        start.checked_add(u64::from(self.rmb_size.bytes()))?;
        Some(start)
    }
}

/// What version 2 adds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct V2Part {
    /// Accept: the server's choice. Confirm: the same.
    pub eid: Eid,
    /// First-contact extension. `None` in subsequent contact, and if the peer left it out although it set the
    /// first-contact flag.
    pub extension: Option<FirstContact>,
}

/// First-contact extension: properties of the new link group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FirstContact {
    /// The sender needs no gateway to reach the peer's GID.
    pub direct: bool,
    /// OS type, 0 to 15: 1 z/OS, 2 Linux, 3 AIX.
    pub os: u8,
    /// Release of version 2 in use, 0 to 15.
    pub release: u8,
    /// Host name, filled up with spaces.
    pub hostname: [u8; 32],
    /// Most connections in the link group; 0 in release 0, where 255 is meant.
    pub max_conns: u8,
    /// Most links in the link group; 0 in release 0, where 2 is meant.
    pub max_links: u8,
    /// Feature mask; 0 in release 0.
    pub features: u16,
    /// Vendor's options; 0 in release 0 and without a vendor's extension.
    pub vendor: u32,
    /// Confirm only: the sender's GIDs that further links may use, its own one first.
    pub gids: List<Gid>,
}

impl AcceptConfirm {
    /// Version of the message.
    pub fn version(&self) -> Version {
        match self.v2 {
            Some(_) => Version::V2,
            None => Version::V1,
        }
    }

    /// `body` is the message without its trailer.
    pub(super) fn parse(header: Header, body: &[u8]) -> Result<AcceptConfirm, Error> {
        let fits = match header.version {
            Version::V1 => header.length == LEN_V1,
            Version::V2 => header.length >= LEN_V2,
        };
        if !fits {
            return Err(Error::Length);
        }
        let mut reader = Reader::new(body);
        reader.skip(super::HEADER)?;
        let system_id = SystemId(reader.array()?);
        let gid = Gid(reader.array()?);
        let mac = Mac(reader.array()?);
        let qpn = Qpn::from_be_bytes(reader.array()?);
        let rkey = reader.u32()?;
        let rmb_index = reader.u8()?;
        let alert_token = reader.u32()?;
        let size_mtu = reader.u8()?;
        reader.skip(1)?;
        let addr = reader.u64()?;
        reader.skip(1)?;
        let psn = Psn::from_be_bytes(reader.array()?);
        if rmb_index == 0 {
            return Err(Error::Field("RMBE index"));
        }
        if alert_token == 0 {
            return Err(Error::Field("alert token"));
        }
        let end = ConnEnd {
            gid,
            mac,
            qpn,
            psn,
            mtu: Mtu::from_code(size_mtu & 0x0f).ok_or(Error::Field("QP MTU"))?,
            rtoken: Rtoken { rkey, addr },
            rmb_size: RmbSize::from_code(size_mtu >> 4).ok_or(Error::Field("RMBE size"))?,
            rmb_index,
            alert_token,
        };
        let first_contact = header.bits & FIRST_CONTACT != 0;
        let v2 = match header.version {
            Version::V1 => None,
            Version::V2 => {
                let eid = Eid(reader.array()?);
                let rest = body.get(LEN_V2 - TRAILER..).unwrap_or_default();
                let extension = if first_contact {
                    FirstContact::parse(header.kind, rest)?
                } else {
                    None
                };
                Some(V2Part { eid, extension })
            }
        };
        Ok(AcceptConfirm {
            system_id,
            first_contact,
            end,
            v2,
        })
    }

    pub(super) fn emit(&self, kind: Type, out: &mut Writer<'_>) {
        let extension = self
            .v2
            .and_then(|v2| v2.extension)
            .filter(|_| self.first_contact);
        let length = match self.v2 {
            None => LEN_V1,
            Some(_) => LEN_V2 + extension.map_or(0, |extension| extension.len(kind)),
        };
        Header {
            kind,
            length,
            version: self.version(),
            bits: if self.first_contact { FIRST_CONTACT } else { 0 },
        }
        .emit(out);
        let end = &self.end;
        out.put(&self.system_id.0);
        out.put(&end.gid.0);
        out.put(&end.mac.0);
        out.put(&end.qpn.to_be_bytes());
        out.u32(end.rtoken.rkey);
        out.u8(end.rmb_index);
        out.u32(end.alert_token);
        out.u8(end.rmb_size.code() << 4 | end.mtu.code());
        out.zeros(1);
        out.u64(end.rtoken.addr);
        out.zeros(1);
        out.put(&end.psn.to_be_bytes());
        if let Some(v2) = self.v2 {
            out.put(&v2.eid.0);
            out.zeros(8);
        }
        if let Some(extension) = extension {
            extension.emit(kind, out);
        }
    }
}

impl FirstContact {
    fn len(&self, kind: Type) -> usize {
        match kind {
            Type::Confirm => EXTENSION + GIDS_HEAD + GID * self.gids.len(),
            _ => EXTENSION,
        }
    }

    /// `rest` is what follows byte 104. `None` if it is too short for an extension.
    fn parse(kind: Type, rest: &[u8]) -> Result<Option<FirstContact>, Error> {
        if rest.len() < EXTENSION_SHORT {
            return Ok(None);
        }
        let mut reader = Reader::new(rest);
        let direct = reader.u8()? & DIRECT != 0;
        let byte = reader.u8()?;
        reader.skip(2)?;
        let mut extension = FirstContact {
            direct,
            os: byte >> 4,
            release: byte & 0x0f,
            hostname: reader.array()?,
            max_conns: 0,
            max_links: 0,
            features: 0,
            vendor: 0,
            gids: List::new(),
        };
        let gids_at = if extension.release > 0 {
            if rest.len() < EXTENSION {
                return Ok(None);
            }
            extension.max_conns = reader.u8()?;
            extension.max_links = reader.u8()?;
            extension.features = reader.u16()?;
            extension.vendor = reader.u32()?;
            EXTENSION
        } else {
            // Release 0 comes in both forms. In the short one the number of GIDs is next, and fits the length; in the
            // long one there is a zero.
            let count = rest
                .get(EXTENSION_SHORT)
                .map_or(0, |count| usize::from(*count));
            if count > 0 && rest.len() == EXTENSION_SHORT + GIDS_HEAD + GID * count {
                EXTENSION_SHORT
            } else {
                EXTENSION
            }
        };
        let gids = rest.get(gids_at..).unwrap_or_default();
        if kind == Type::Confirm && gids.len() >= GIDS_HEAD {
            let mut reader = Reader::new(gids);
            let count = reader.u8()?;
            reader.skip(GIDS_HEAD - 1)?;
            extension.gids =
                List::read(count, || reader.array().map(Gid)).ok_or(Error::Length)??;
        }
        Ok(Some(extension))
    }

    fn emit(&self, kind: Type, out: &mut Writer<'_>) {
        out.u8(if self.direct { DIRECT } else { 0 });
        out.u8(self.os << 4 | self.release & 0x0f);
        out.zeros(2);
        out.put(&self.hostname);
        if self.release > 0 {
            out.u8(self.max_conns);
            out.u8(self.max_links);
            out.u16(self.features);
            out.u32(self.vendor);
        } else {
            out.zeros(8);
        }
        out.zeros(8);
        if kind == Type::Confirm {
            out.u8(self.gids.count());
            out.zeros(GIDS_HEAD - 1);
            for gid in self.gids.iter() {
                out.put(&gid.0);
            }
        }
    }
}

const _: () = assert!(LEN_V1 == 64 + TRAILER && LEN_V2 == 104 + TRAILER);
