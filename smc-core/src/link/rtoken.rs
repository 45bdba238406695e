//! The peer's RMBs that this side of a link may write, by their rkeys.
//!
//! The peer announces an RMB in CLC (Accept, Confirm) or by CONFIRM RKEY, and takes it back by DELETE RKEY. RDMA
//! with an rkey that isn't here must not be tried: the peer's adapter would end the link with all its connections.

use std::collections::HashMap;

use crate::wire::Rtoken;

/// Most RMBs of the peer that a link group knows, as in Linux.
pub const MAX: usize = 255;

/// [`RtokenTable::insert`] on a full table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the table of RTokens is full")]
pub struct Full;

/// RTokens of the peer's RMBs on one link, at most [`MAX`].
#[derive(Debug, Default)]
pub struct RtokenTable {
    addresses: HashMap<u32, u64>,
}

impl RtokenTable {
    /// Adds an RMB. One with the same rkey is replaced: the peer used it again.
    ///
    /// # Errors
    /// [`Full`]. The table is as before.
    pub fn insert(&mut self, token: Rtoken) -> Result<(), Full> {
        if self.addresses.len() >= MAX && !self.addresses.contains_key(&token.rkey) {
            return Err(Full);
        }
        self.addresses.insert(token.rkey, token.addr);
        Ok(())
    }

    /// The RToken with this rkey.
    pub fn get(&self, rkey: u32) -> Option<Rtoken> {
        let addr = *self.addresses.get(&rkey)?;
        Some(Rtoken { rkey, addr })
    }

    /// Forgets an RMB; whether it was there.
    pub fn remove(&mut self, rkey: u32) -> bool {
        self.addresses.remove(&rkey).is_some()
    }

    /// Whether one more RMB fits.
    pub fn has_room(&self) -> bool {
        self.addresses.len() < MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(rkey: u32, addr: u64) -> Rtoken {
        Rtoken { rkey, addr }
    }

    #[test]
    fn rmbs_come_and_go() {
        let mut table = RtokenTable::default();
        table.insert(token(7, 0x1000)).unwrap();
        table.insert(token(0, 0)).unwrap();
        assert_eq!(table.get(7), Some(token(7, 0x1000)));
        assert_eq!(table.get(0), Some(token(0, 0)));
        table.insert(token(7, 0x2000)).unwrap();
        assert_eq!(table.get(7), Some(token(7, 0x2000)));
        assert!(table.remove(7));
        assert!(!table.remove(7));
        assert_eq!(table.get(7), None);
    }

    #[test]
    fn a_full_table_takes_known_rkeys_only() {
        let mut table = RtokenTable::default();
        for rkey in 0..255 {
            assert!(table.has_room());
            table.insert(token(rkey, 0)).unwrap();
        }
        assert!(!table.has_room());
        assert_eq!(table.insert(token(255, 1)), Err(Full));
        assert_eq!(table.get(255), None);
        table.insert(token(254, 1)).unwrap();
        assert_eq!(table.get(254), Some(token(254, 1)));
        table.remove(3);
        table.insert(token(255, 1)).unwrap();
    }
}
