//! The Proposal message: fixed part, IP prefix area (version 1) and version 2 extension.
//!
//! Fixed part:
//!
//! | offset | size | field |
//! |---|---|---|
//! | 0 | 8 | header; byte 7: 0x0c type of offer by version 2, 0x03 by version 1 (0 R, 1 D, 2 none, 3 both) |
//! | 8 | 8 | system id of the sender |
//! | 16 | 16 | RoCEv1 GID |
//! | 32 | 6 | MAC |
//! | 38 | 2 | offset of the prefix area, from byte 40 |
//! | 40 | 10 | SMC-D; zero, as Linux reads byte 47 as a count when there is no prefix area |
//! | 50 | 2 | offset of the version 2 extension, from byte 52 |
//! | 52 | 8 | vendor OUI and options |
//! | 60 | 20 | reserved |
//!
//! IP prefix area (only if version 1 is offered): IPv4 subnet (4), its prefix length (1), reserved (2), number of
//! IPv6 prefixes n (1), n × (prefix 16, length 1).
//!
//! Version 2 extension (only if version 2 is offered), offsets from its beginning:
//!
//! | offset | size | field |
//! |---|---|---|
//! | 0 | 1 | number of UEIDs e |
//! | 1 | 1 | number of SMC-D GIDs g |
//! | 3 | 1 | 0xf0 release, 0x01 SMC-D |
//! | 6 | 2 | SMC-D |
//! | 8 | 16 | RoCEv2 GID |
//! | 24 | 1 | max_conns |
//! | 25 | 1 | max_links |
//! | 26 | 2 | feature mask |
//! | 40 | 32·e | UEIDs |
//!
//! Linux requires that the length is exactly the sum of the parts, and so does [`Proposal::parse`].

use core::net::{Ipv4Addr, Ipv6Addr};

use super::super::bytes::{Reader, Writer};
use super::super::{Eid, Error, Gid, Mac, SystemId};
use super::{Header, List, TRAILER, Type, Version};

const FIXED: usize = 80;
/// What the two offsets in the fixed part count from.
const PREFIX_BASE: usize = 40;
const V2_BASE: usize = 52;
/// Prefix area without IPv6 prefixes, and one of these.
const PREFIXES: usize = 8;
const IPV6_PREFIX: usize = 17;
/// Version 2 extension without UEIDs, and one of these.
const V2_EXT: usize = 40;
const EID: usize = 32;
/// SMC-D version 2 extension without GIDs, and one of these.
const SMCD_EXT: usize = 48;
const SMCD_GID: usize = 10;
const SMCD_GIDS_MAX: u8 = 8;
const RELEASE_SHIFT: u8 = 4;

/// Types of offer.
const TYPE_R: u8 = 0;
const TYPE_D: u8 = 1;
const TYPE_NONE: u8 = 2;
const TYPE_BOTH: u8 = 3;

/// The client's offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Proposal {
    /// Highest version that the sender speaks. A Decline has to have the form of this version.
    pub version: Version,
    /// Who offers. Zero from a Linux host that offers version 2 only.
    pub system_id: SystemId,
    /// Vendor OUI (3 bytes) and vendor's options (5 bytes); zero without a vendor's extension.
    pub vendor: [u8; 8],
    /// SMC-R by version 1.
    pub v1: Option<OfferV1>,
    /// SMC-R by version 2. Sent only if `version` is [`Version::V2`].
    pub v2: Option<OfferV2>,
}

/// What a Proposal says about SMC-R version 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OfferV1 {
    /// RoCEv1 GID.
    pub gid: Gid,
    /// MAC of its port.
    pub mac: Mac,
    /// The client's IP subnets, one of which the server must share.
    pub prefixes: Prefixes,
}

/// IP subnets of the client's interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefixes {
    /// IPv4 subnet; 0.0.0.0 on an IPv6 connection.
    pub ipv4: Ipv4Addr,
    /// Length of its mask in bits. Not checked.
    pub ipv4_len: u8,
    /// IPv6 subnets.
    pub ipv6: List<Ipv6Prefix>,
}

impl Default for Prefixes {
    fn default() -> Prefixes {
        Prefixes {
            ipv4: Ipv4Addr::UNSPECIFIED,
            ipv4_len: 0,
            ipv6: List::new(),
        }
    }
}

/// One IPv6 subnet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ipv6Prefix {
    /// The subnet.
    pub addr: Ipv6Addr,
    /// Length of its mask in bits. Not checked.
    pub len: u8,
}

/// What a Proposal says about SMC-R version 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OfferV2 {
    /// Highest release of version 2, 0 to 15: 1 is "v2.1".
    pub release: u8,
    /// RoCEv2 GID that the server has to connect its queue pair to.
    pub gid: Gid,
    /// Most connections in a link group, 16 to 255; 0 in release 0.
    pub max_conns: u8,
    /// Most links in a link group, 1 or 2; 0 in release 0.
    pub max_links: u8,
    /// Feature mask; 0 in release 0.
    pub features: u16,
    /// The client's enterprise ids, best first.
    pub eids: List<Eid>,
}

impl Proposal {
    /// `body` is the message without its trailer.
    pub(super) fn parse(header: Header, body: &[u8]) -> Result<Proposal, Error> {
        let version = header.version;
        // Version 1 has no such field: its first senders left it zero, later ones write "none by version 2".
        let (type_v1, type_v2) = match version {
            Version::V1 if header.bits & 3 == TYPE_NONE => return Err(Error::Version(header.bits)),
            Version::V1 => (header.bits & 3, TYPE_NONE),
            Version::V2 => (header.bits & 3, header.bits >> 2),
        };
        let mut reader = Reader::new(body);
        reader.skip(super::HEADER)?;
        let system_id = SystemId(reader.array()?);
        let gid = Gid(reader.array()?);
        let mac = Mac(reader.array()?);
        let prefix_offset = usize::from(reader.u16()?);

        let (vendor, v2_offset, mut length) = match version {
            // The rest of the fixed part came with version 2: the prefix area may begin here.
            Version::V1 => ([0; 8], 0, PREFIX_BASE + prefix_offset),
            Version::V2 => {
                reader.skip(10)?;
                let offset = usize::from(reader.u16()?);
                (reader.array()?, offset, FIXED)
            }
        };
        let mut v1 = None;
        if type_v1 != TYPE_NONE {
            let prefixes = Prefixes::parse(tail(body, PREFIX_BASE + prefix_offset)?)?;
            length += prefixes.len();
            if matches!(type_v1, TYPE_R | TYPE_BOTH) {
                v1 = Some(OfferV1 { gid, mac, prefixes });
            }
        }
        let mut v2 = None;
        if type_v2 != TYPE_NONE {
            let at = V2_BASE + v2_offset;
            if at < FIXED {
                return Err(Error::Length);
            }
            let (offer, smcd_gids) = OfferV2::parse(tail(body, at)?)?;
            length += offer.len();
            if matches!(type_v2, TYPE_D | TYPE_BOTH) {
                length += SMCD_EXT + SMCD_GID * usize::from(smcd_gids);
            }
            if matches!(type_v2, TYPE_R | TYPE_BOTH) {
                v2 = Some(offer);
            }
        }
        if body.len() != length {
            return Err(Error::Length);
        }
        Ok(Proposal {
            version,
            system_id,
            vendor,
            v1,
            v2,
        })
    }

    pub(super) fn emit(&self, out: &mut Writer<'_>) {
        let v2 = self.v2.filter(|_| self.version == Version::V2);
        // A Proposal of version 1 can't do without the area.
        let prefixes = match self.version {
            Version::V1 => Some(self.v1.unwrap_or_default().prefixes),
            Version::V2 => self.v1.map(|v1| v1.prefixes),
        };
        let type_v1 = match (self.v1, self.version) {
            (Some(_), _) => TYPE_R,
            (None, Version::V1) => TYPE_D,
            (None, Version::V2) => TYPE_NONE,
        };
        let prefixes_len = prefixes.map_or(0, |prefixes| prefixes.len());
        let v2_len = v2.map_or(0, |v2| v2.len());
        let v1 = self.v1.unwrap_or_default();
        Header {
            kind: Type::Proposal,
            length: FIXED + prefixes_len + v2_len + TRAILER,
            version: self.version,
            bits: type_v1 | if v2.is_some() { TYPE_R } else { TYPE_NONE } << 2,
        }
        .emit(out);
        out.put(&self.system_id.0);
        out.put(&v1.gid.0);
        out.put(&v1.mac.0);
        out.u16(if prefixes.is_some() {
            (FIXED - PREFIX_BASE) as u16
        } else {
            0
        });
        out.zeros(10);
        out.u16(if v2.is_some() {
            (FIXED - V2_BASE + prefixes_len) as u16
        } else {
            0
        });
        match self.version {
            Version::V1 => out.zeros(8),
            Version::V2 => out.put(&self.vendor),
        }
        out.zeros(20);
        if let Some(prefixes) = prefixes {
            prefixes.emit(out);
        }
        if let Some(v2) = v2 {
            v2.emit(out);
        }
    }
}

/// What of `body` begins at offset `at`.
fn tail(body: &[u8], at: usize) -> Result<&[u8], Error> {
    body.get(at..).ok_or(Error::Length)
}

impl Prefixes {
    fn len(&self) -> usize {
        PREFIXES + IPV6_PREFIX * self.ipv6.len()
    }

    fn parse(area: &[u8]) -> Result<Prefixes, Error> {
        let mut reader = Reader::new(area);
        let ipv4 = Ipv4Addr::from(reader.u32()?);
        let ipv4_len = reader.u8()?;
        reader.skip(2)?;
        let count = reader.u8()?;
        let ipv6 = List::read(count, || {
            Ok(Ipv6Prefix {
                addr: Ipv6Addr::from(reader.array::<16>()?),
                len: reader.u8()?,
            })
        });
        Ok(Prefixes {
            ipv4,
            ipv4_len,
            ipv6: ipv6.ok_or(Error::Length)??,
        })
    }

    fn emit(&self, out: &mut Writer<'_>) {
        out.put(&self.ipv4.octets());
        out.u8(self.ipv4_len);
        out.zeros(2);
        out.u8(self.ipv6.count());
        for prefix in self.ipv6.iter() {
            out.put(&prefix.addr.octets());
            out.u8(prefix.len);
        }
    }
}

impl OfferV2 {
    fn len(&self) -> usize {
        V2_EXT + EID * self.eids.len()
    }

    /// The offer, and the number of SMC-D GIDs that follow in a part of their own.
    fn parse(extension: &[u8]) -> Result<(OfferV2, u8), Error> {
        let mut reader = Reader::new(extension);
        let count = reader.u8()?;
        let smcd_gids = reader.u8()?;
        if smcd_gids > SMCD_GIDS_MAX {
            return Err(Error::Length);
        }
        reader.skip(1)?;
        let release = reader.u8()? >> RELEASE_SHIFT;
        reader.skip(4)?;
        let gid = Gid(reader.array()?);
        let max_conns = reader.u8()?;
        let max_links = reader.u8()?;
        let features = reader.u16()?;
        reader.skip(12)?;
        let eids = List::read(count, || reader.array().map(Eid)).ok_or(Error::Length)??;
        let offer = OfferV2 {
            release,
            gid,
            max_conns,
            max_links,
            features,
            eids,
        };
        Ok((offer, smcd_gids))
    }

    fn emit(&self, out: &mut Writer<'_>) {
        out.u8(self.eids.count());
        out.zeros(2);
        out.u8(self.release << RELEASE_SHIFT);
        out.zeros(4);
        out.put(&self.gid.0);
        out.u8(self.max_conns);
        out.u8(self.max_links);
        out.u16(self.features);
        out.zeros(12);
        for eid in self.eids.iter() {
            out.put(&eid.0);
        }
    }
}
