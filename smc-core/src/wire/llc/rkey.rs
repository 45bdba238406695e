//! CONFIRM RKEY and DELETE RKEY.

use super::super::{Error, Reader, Rtoken, Writer};
use super::{RESPONSE, response_flag};

const NEGATIVE: u8 = 0x20;
const RETRY: u8 = 0x10;

/// An RToken of a link other than the one that carries the message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkRtoken {
    /// Number of the link.
    pub link: u8,
    /// RToken of the RMB on that link.
    pub token: Rtoken,
}

/// CONFIRM RKEY: the sender announces an RMB of its own. The answer repeats the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConfirmRkey {
    /// Answers a request.
    pub response: bool,
    /// Response: the RToken couldn't be stored.
    pub negative: bool,
    /// Version 1, response: it may be tried again.
    pub retry: bool,
    /// RToken on the link that carries the message.
    pub token: Rtoken,
    /// RTokens of the same RMB on the other links of the group, from the front.
    pub others: [Option<LinkRtoken>; 2],
}

impl ConfirmRkey {
    pub(super) fn parse(flags: u8, r: &mut Reader<'_>) -> Result<ConfirmRkey, Error> {
        let count = r.u8()?;
        if count > 2 {
            return Err(Error::Field("number of further RTokens"));
        }
        let token = read_token(r)?;
        let mut others = [None; 2];
        for other in others.iter_mut().take(count.into()) {
            *other = Some(LinkRtoken {
                link: r.u8()?,
                token: read_token(r)?,
            });
        }
        Ok(ConfirmRkey {
            response: flags & RESPONSE != 0,
            negative: flags & NEGATIVE != 0,
            retry: flags & RETRY != 0,
            token,
            others,
        })
    }

    pub(super) fn flags(&self) -> u8 {
        let negative = if self.negative { NEGATIVE } else { 0 };
        let retry = if self.retry { RETRY } else { 0 };
        response_flag(self.response) | negative | retry
    }

    pub(super) fn emit(&self, w: &mut Writer<'_>) {
        let others = self.others.iter().flatten();
        w.u8(others.clone().count() as u8);
        write_token(w, self.token);
        for other in others {
            w.u8(other.link);
            write_token(w, other.token);
        }
    }
}

fn read_token(r: &mut Reader<'_>) -> Result<Rtoken, Error> {
    Ok(Rtoken {
        rkey: r.u32()?,
        addr: r.u64()?,
    })
}

fn write_token(w: &mut Writer<'_>, token: Rtoken) {
    w.u32(token.rkey);
    w.u64(token.addr);
}

/// One to eight rkeys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rkeys {
    count: u8,
    keys: [u32; 8],
}

impl Rkeys {
    /// These; `None` if they are none, or more than eight.
    pub fn new(rkeys: &[u32]) -> Option<Rkeys> {
        let mut keys = [0; 8];
        if rkeys.is_empty() {
            return None;
        }
        keys.get_mut(..rkeys.len())?.copy_from_slice(rkeys);
        Some(Rkeys {
            count: rkeys.len() as u8,
            keys,
        })
    }

    /// A single one.
    pub fn one(rkey: u32) -> Rkeys {
        Rkeys {
            count: 1,
            keys: [rkey, 0, 0, 0, 0, 0, 0, 0],
        }
    }

    /// As many zeros: what the response of version 2 carries.
    pub fn blank(self) -> Rkeys {
        Rkeys {
            keys: [0; 8],
            ..self
        }
    }

    /// The rkeys.
    pub fn as_slice(&self) -> &[u32] {
        self.keys.get(..self.count.into()).unwrap_or_default()
    }
}

/// DELETE RKEY: the sender takes RMBs of its own back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeleteRkey {
    /// Answers a request.
    pub response: bool,
    /// Response: some rkeys were unknown.
    pub negative: bool,
    /// Response, version 1: bit 0x80 for the first rkey if it was unknown, 0x40 for the second, and so on. Version 2:
    /// the number of unknown ones.
    pub errors: u8,
    /// The rkeys, valid on the link that carries the message.
    pub rkeys: Rkeys,
}

impl DeleteRkey {
    pub(super) fn parse(flags: u8, r: &mut Reader<'_>) -> Result<DeleteRkey, Error> {
        let count = r.u8()?;
        if !(1..=8).contains(&count) {
            return Err(Error::Field("number of rkeys"));
        }
        let errors = r.u8()?;
        r.skip(2)?;
        let mut keys = [0; 8];
        for key in keys.iter_mut().take(count.into()) {
            *key = r.u32()?;
        }
        Ok(DeleteRkey {
            response: flags & RESPONSE != 0,
            negative: flags & NEGATIVE != 0,
            errors,
            rkeys: Rkeys { count, keys },
        })
    }

    pub(super) fn flags(&self) -> u8 {
        let negative = if self.negative { NEGATIVE } else { 0 };
        response_flag(self.response) | negative
    }

    pub(super) fn emit(&self, w: &mut Writer<'_>) {
        w.u8(self.rkeys.count);
        w.u8(self.errors);
        w.zeros(2);
        for key in self.rkeys.keys {
            w.u32(key);
        }
    }
}
