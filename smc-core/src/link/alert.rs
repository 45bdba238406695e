//! Alert tokens: the 32-bit ids that CDC messages carry to name a connection of the receiver.
//!
//! Each side of a link group chooses the tokens that its peer has to use. A token isn't given out again before all
//! others have been, so that a late message of a closed connection doesn't reach a new one.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

/// The tokens of one link group, each with the key of its connection.
#[derive(Debug)]
pub struct AlertTokens<K> {
    connections: HashMap<u32, K>,
    last: u32,
}

impl<K> Default for AlertTokens<K> {
    fn default() -> AlertTokens<K> {
        AlertTokens {
            connections: HashMap::new(),
            last: 0,
        }
    }
}

impl<K> AlertTokens<K> {
    /// Gives a connection its token: not 0, and different from all others in use.
    pub fn insert(&mut self, connection: K) -> u32 {
        loop {
            // 0 is what a peer sends that doesn't know the token.
            self.last = self.last.checked_add(1).unwrap_or(1);
            if let Entry::Vacant(place) = self.connections.entry(self.last) {
                place.insert(connection);
                return self.last;
            }
        }
    }

    /// The connection with this token. A peer may name any number.
    pub fn get(&self, token: u32) -> Option<&K> {
        self.connections.get(&token)
    }

    /// Ends the use of a token.
    pub fn remove(&mut self, token: u32) -> Option<K> {
        self.connections.remove(&token)
    }

    /// The tokens in use and their connections, in no order.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &K)> {
        self.connections.iter().map(|(token, key)| (*token, key))
    }

    /// Number of tokens in use.
    pub fn len(&self) -> usize {
        self.connections.len()
    }

    /// Whether no token is in use.
    pub fn is_empty(&self) -> bool {
        self.connections.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_name_connections() {
        let mut tokens = AlertTokens::default();
        assert_eq!(tokens.insert("a"), 1);
        assert_eq!(tokens.insert("b"), 2);
        assert_eq!((tokens.get(1), tokens.get(2)), (Some(&"a"), Some(&"b")));
        assert_eq!((tokens.get(0), tokens.get(3)), (None, None));
        assert_eq!(tokens.remove(1), Some("a"));
        assert_eq!(tokens.get(1), None);
        assert_eq!(tokens.remove(1), None);
        assert_eq!(tokens.insert("c"), 3);
        let mut all: Vec<_> = tokens.iter().collect();
        all.sort();
        assert_eq!(all, [(2, &"b"), (3, &"c")]);
        assert_eq!(tokens.len(), 2);
        assert!(!tokens.is_empty());
    }

    #[test]
    fn zero_and_tokens_in_use_are_skipped() {
        let mut tokens = AlertTokens::default();
        assert_eq!(tokens.insert('a'), 1);
        assert_eq!(tokens.insert('b'), 2);
        tokens.remove(2);
        tokens.last = u32::MAX - 1;
        assert_eq!(tokens.insert('c'), u32::MAX);
        assert_eq!(tokens.insert('d'), 2);
        assert_eq!(tokens.insert('e'), 3);
    }
}
