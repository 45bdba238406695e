//! DELETE LINK.

use super::super::{Error, Reader, Writer};
use super::{RESPONSE, response_flag};

const ALL: u8 = 0x40;
const ORDERLY: u8 = 0x20;

/// DELETE LINK: ends one link, or all links of a group and the group with them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeleteLink {
    /// Answers a request.
    pub response: bool,
    /// All links; `link` is 0 then.
    pub all: bool,
    /// An orderly end, not one at once.
    pub orderly: bool,
    /// Number of the link.
    pub link: u8,
    /// Why.
    pub reason: DeleteReason,
}

/// Reason code of DELETE LINK.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeleteReason(pub u32);

impl DeleteReason {
    /// The path is lost.
    pub const LOST_PATH: DeleteReason = DeleteReason(0x0001_0000);
    /// An operator ended it.
    pub const OPERATOR: DeleteReason = DeleteReason(0x0002_0000);
    /// The program ended it; among others, because the group was unused for long.
    pub const PROGRAM: DeleteReason = DeleteReason(0x0003_0000);
    /// The other side broke the protocol.
    pub const PROTOCOL_VIOLATION: DeleteReason = DeleteReason(0x0004_0000);
    /// An asymmetric link is no longer needed.
    pub const ASYMMETRIC_UNNEEDED: DeleteReason = DeleteReason(0x0005_0000);
    /// Response: the link is unknown.
    pub const UNKNOWN_LINK: DeleteReason = DeleteReason(0x0010_0000);
    /// Response: the link group is unknown.
    pub const UNKNOWN_GROUP: DeleteReason = DeleteReason(0x0020_0000);
}

impl DeleteLink {
    pub(super) fn parse(flags: u8, r: &mut Reader<'_>) -> Result<DeleteLink, Error> {
        Ok(DeleteLink {
            response: flags & RESPONSE != 0,
            all: flags & ALL != 0,
            orderly: flags & ORDERLY != 0,
            link: r.u8()?,
            reason: DeleteReason(r.u32()?),
        })
    }

    pub(super) fn flags(&self) -> u8 {
        let all = if self.all { ALL } else { 0 };
        let orderly = if self.orderly { ORDERLY } else { 0 };
        response_flag(self.response) | all | orderly
    }

    pub(super) fn emit(&self, w: &mut Writer<'_>) {
        w.u8(self.link);
        w.u32(self.reason.0);
    }
}
