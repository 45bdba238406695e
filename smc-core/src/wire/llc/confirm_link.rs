//! CONFIRM LINK.

use super::super::{Error, Gid, Mac, Qpn, Reader, Writer};
use super::{RESPONSE, response_flag};

/// Both bits say so: RMBs have no eyecatcher in front of each element.
const NO_EYECATCHER: u8 = 0x03;

/// CONFIRM LINK: the first message on a new queue pair, from the server, and its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConfirmLink {
    /// Answers a request.
    pub response: bool,
    /// The sender's RMBs begin with data. Linux declines a connection without this, and never sends it false.
    pub no_eyecatcher: bool,
    /// Port of the sender.
    pub mac: Mac,
    /// GID of the sender.
    pub gid: Gid,
    /// Queue pair of the sender.
    pub qpn: Qpn,
    /// Number of the link, assigned by the server.
    pub link: u8,
    /// Name of the link for diagnosis.
    pub uid: u32,
    /// Links that the group may have, as negotiated by CLC; 2 before SMC v2.1.
    pub max_links: u8,
    /// Connections that the group may have, as negotiated by CLC; 0 before SMC v2.1.
    pub max_conns: u8,
}

impl ConfirmLink {
    pub(super) fn parse(flags: u8, r: &mut Reader<'_>) -> Result<ConfirmLink, Error> {
        Ok(ConfirmLink {
            response: flags & RESPONSE != 0,
            no_eyecatcher: flags & NO_EYECATCHER == NO_EYECATCHER,
            mac: Mac(r.array()?),
            gid: Gid(r.array()?),
            qpn: Qpn::from_be_bytes(r.array()?),
            link: r.u8()?,
            uid: r.u32()?,
            max_links: r.u8()?,
            max_conns: r.u8()?,
        })
    }

    pub(super) fn flags(&self) -> u8 {
        let eyecatcher = if self.no_eyecatcher { NO_EYECATCHER } else { 0 };
        response_flag(self.response) | eyecatcher
    }

    pub(super) fn emit(&self, w: &mut Writer<'_>) {
        w.put(&self.mac.0);
        w.put(&self.gid.0);
        w.put(&self.qpn.to_be_bytes());
        w.u8(self.link);
        w.u32(self.uid);
        w.u8(self.max_links);
        w.u8(self.max_conns);
    }
}
