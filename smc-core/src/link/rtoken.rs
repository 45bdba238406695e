//! The peer's RMBs that this side of a link group may write, by their rkeys.
//!
//! The peer announces an RMB in CLC (Accept, Confirm) or by CONFIRM RKEY, and takes it back by DELETE RKEY. Each RMB has an
//! RToken for each link; ADD LINK brings those for the new one. RDMA with an rkey that isn't here must not be tried:
//! the peer's adapter would end the link with all its connections.

use super::{LANES, Lane};
use crate::wire::Rtoken;

/// Most RMBs of the peer that a link group knows, as in Linux.
pub const MAX: usize = 255;

/// The RTokens of one RMB, by link.
pub type Rtokens = [Option<Rtoken>; LANES];

/// [`RtokenTable::insert`] on a full table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the table of RTokens is full")]
pub struct Full;

/// RTokens of the peer's RMBs, of at most [`MAX`].
#[derive(Debug, Default)]
pub struct RtokenTable {
    rmbs: Vec<Rtokens>,
}

impl RtokenTable {
    /// Adds an RMB, or RTokens of a known one: one that has the same RToken on some link. Where only the rkey is the
    /// same, the peer used that again, for another RMB.
    ///
    /// # Errors
    /// [`Full`]. The table is as before.
    pub fn insert(&mut self, tokens: Rtokens) -> Result<(), Full> {
        let known = |rmb: &Rtokens| rmb.iter().zip(&tokens).any(|(a, b)| a.is_some() && a == b);
        if let Some(rmb) = self.rmbs.iter_mut().find(|rmb| known(rmb)) {
            for (place, token) in rmb.iter_mut().zip(tokens) {
                *place = token.or(*place);
            }
            return Ok(());
        }
        for (lane, token) in tokens.iter().enumerate() {
            if let Some(token) = token {
                self.remove(lane, token.rkey);
            }
        }
        if self.rmbs.len() >= MAX {
            return Err(Full);
        }
        self.rmbs.push(tokens);
        Ok(())
    }

    /// Adds the RToken for `lane` to the RMB that has this rkey on `known`; whether there is one.
    pub fn extend(&mut self, known: (Lane, u32), lane: Lane, token: Rtoken) -> bool {
        let rmb = self
            .at(known.0, known.1)
            .and_then(|at| self.rmbs.get_mut(at));
        match rmb.and_then(|rmb| rmb.get_mut(lane)) {
            Some(place) => {
                *place = Some(token);
                true
            }
            None => false,
        }
    }

    /// The RTokens of the RMB that has this rkey on this link.
    pub fn get(&self, lane: Lane, rkey: u32) -> Option<&Rtokens> {
        self.rmbs.get(self.at(lane, rkey)?)
    }

    /// Forgets an RMB; whether it was there.
    pub fn remove(&mut self, lane: Lane, rkey: u32) -> bool {
        let at = self.at(lane, rkey);
        at.map(|at| self.rmbs.swap_remove(at)).is_some()
    }

    /// Forgets the RTokens for a link.
    pub fn clear(&mut self, lane: Lane) {
        for rmb in &mut self.rmbs {
            if let Some(place) = rmb.get_mut(lane) {
                *place = None;
            }
        }
        self.rmbs.retain(|rmb| rmb.iter().any(Option::is_some));
    }

    fn at(&self, lane: Lane, rkey: u32) -> Option<usize> {
        self.rmbs.iter().position(|rmb| {
            let token = rmb.get(lane).copied().flatten();
            token.is_some_and(|token| token.rkey == rkey)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(rkey: u32, addr: u64) -> Option<Rtoken> {
        Some(Rtoken { rkey, addr })
    }

    #[test]
    fn rmbs_come_and_go() {
        let mut table = RtokenTable::default();
        table.insert([token(7, 0x1000), None]).unwrap();
        table.insert([token(0, 0), None]).unwrap();
        assert_eq!(table.get(0, 7), Some(&[token(7, 0x1000), None]));
        assert_eq!(table.get(0, 0), Some(&[token(0, 0), None]));
        assert_eq!(table.get(1, 7), None);
        table.insert([token(7, 0x2000), None]).unwrap();
        assert_eq!(table.get(0, 7), Some(&[token(7, 0x2000), None]));
        assert!(table.remove(0, 7));
        assert!(!table.remove(0, 7));
        assert_eq!(table.get(0, 7), None);
    }

    #[test]
    fn an_rmb_has_an_rtoken_for_each_link() {
        let mut table = RtokenTable::default();
        table.insert([token(1, 0x1000), None]).unwrap();
        table.insert([token(2, 0x2000), token(1, 0x2000)]).unwrap();
        assert!(table.extend((0, 1), 1, token(9, 0x1001).unwrap()));
        assert!(!table.extend((0, 3), 1, token(9, 0x1001).unwrap()));
        assert_eq!(table.get(1, 9), Some(&[token(1, 0x1000), token(9, 0x1001)]));
        // What CLC says of one link leaves the others.
        table.insert([None, token(9, 0x1001)]).unwrap();
        assert_eq!(table.get(0, 1), Some(&[token(1, 0x1000), token(9, 0x1001)]));
        // Used again for another RMB.
        table.insert([None, token(9, 0x3000)]).unwrap();
        assert_eq!(table.get(0, 1), None);
        table.clear(0);
        assert_eq!(table.get(1, 1), Some(&[None, token(1, 0x2000)]));
        table.clear(1);
        assert_eq!(table.get(1, 1), None);
    }

    #[test]
    fn a_full_table_takes_known_rmbs_only() {
        let mut table = RtokenTable::default();
        for rkey in 0..255 {
            table.insert([token(rkey, 0), None]).unwrap();
        }
        assert_eq!(table.insert([token(255, 1), None]), Err(Full));
        assert_eq!(table.get(0, 255), None);
        table.insert([token(254, 1), None]).unwrap();
        assert_eq!(table.get(0, 254), Some(&[token(254, 1), None]));
        table.remove(0, 3);
        table.insert([token(255, 1), None]).unwrap();
    }
}
