//! The Decline message.
//!
//! | offset | size | field |
//! |---|---|---|
//! | 0 | 8 | header; low nibble of byte 7: 0x08 out of sync, 0x03 path |
//! | 8 | 8 | system id of the sender |
//! | 16 | 4 | peer diagnosis |
//! | 20 | 1 | 0xf0 OS type; zero in version 1 |
//! | 21 | 3 | reserved |
//! | 24 | 16 | version 2 only: four further diagnoses, zero from Linux and from us |
//! | 24 or 40 | 4 | trailer |

use super::super::bytes::{Reader, Writer};
use super::super::{Error, SystemId};
use super::{Diagnosis, Header, TRAILER, Type, Version};

const OUT_OF_SYNC: u8 = 0x08;
const LEN_V1: usize = 28;
const LEN_V2: usize = 44;

/// "We stay on TCP."
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decline {
    /// Form of the message. Linux takes either at any time.
    pub version: Version,
    /// The Accept named a link that the client doesn't know. The receiver has to end the whole link group.
    pub out_of_sync: bool,
    /// Who declines.
    pub system_id: SystemId,
    /// Why.
    pub diagnosis: Diagnosis,
    /// OS type, 0 to 15: 1 z/OS, 2 Linux, 3 AIX. Not sent in version 1.
    pub os: u8,
}

impl Decline {
    pub(super) fn parse(header: Header, body: &[u8]) -> Result<Decline, Error> {
        let length = match header.version {
            Version::V1 => LEN_V1,
            Version::V2 => LEN_V2,
        };
        if header.length != length {
            return Err(Error::Length);
        }
        if header.bits & 3 > 1 {
            return Err(Error::Version(header.bits));
        }
        let mut reader = Reader::new(body);
        reader.skip(super::HEADER)?;
        Ok(Decline {
            version: header.version,
            out_of_sync: header.bits & OUT_OF_SYNC != 0,
            system_id: SystemId(reader.array()?),
            diagnosis: Diagnosis::from(reader.u32()?),
            os: match header.version {
                Version::V1 => 0,
                Version::V2 => reader.u8()? >> 4,
            },
        })
    }

    pub(super) fn emit(&self, out: &mut Writer<'_>) {
        let (length, os, rest) = match self.version {
            Version::V1 => (LEN_V1, 0, 0),
            Version::V2 => (LEN_V2, self.os << 4, LEN_V2 - LEN_V1),
        };
        Header {
            kind: Type::Decline,
            length,
            version: self.version,
            bits: if self.out_of_sync { OUT_OF_SYNC } else { 0 },
        }
        .emit(out);
        out.put(&self.system_id.0);
        out.u32(self.diagnosis.into());
        out.u8(os);
        out.zeros(3 + rest);
    }
}

const _: () = assert!(LEN_V1 == 24 + TRAILER);
