//! Bodies of the fuzz targets, here so that ordinary tests run them too. Each takes any bytes and panics when it
//! finds a bug.

use super::directory::{Directory, ENTRIES};
use super::endpoint::{Endpoint, mix};
use super::message::{MAX, Message};
use super::runtime::NodeId;

/// What decodes must encode to the same bytes.
pub fn message(data: &[u8]) {
    let Ok(message) = Message::decode(data) else {
        return;
    };
    let mut out = [0u8; MAX];
    let len = message.encode(&mut out);
    assert_eq!(&out[..len], data, "{message:?}");
}

/// Runs operations on a table that holds `data` in the places where they look.
///
/// Nothing is asserted about the answers: on such a table they may be anything, but there must be answers.
pub fn directory(data: &[u8]) {
    let Ok(table) = Directory::anonymous() else {
        return;
    };
    let words = |data: &[u8]| -> Vec<u64> {
        data.chunks(8)
            .map(|chunk| {
                let mut bytes = [0u8; 8];
                bytes[..chunk.len()].copy_from_slice(chunk);
                u64::from_le_bytes(bytes)
            })
            .collect()
    };
    let words = words(data);
    let Some((&seed, rest)) = words.split_first() else {
        return;
    };
    let endpoint = endpoint(seed);
    let node = NodeId::from_raw(seed | 1);
    let other = NodeId::from_raw(mix(seed) | 1);
    let (Some(node), Some(other)) = (node, other) else {
        return;
    };
    // The bucket of the endpoint, and the map of used buckets (word 128 on), which decides what a clear visits.
    let bucket = Directory::bucket_word(&endpoint);
    for (at, word) in rest.iter().enumerate() {
        // Seldom-hit values are put in by hand: owner ids, keys, VALID generations.
        let word = match word & 7 {
            0 => node.get(),
            1 => other.get(),
            2 => seed,
            _ => *word,
        };
        table.scribble(bucket + at % 256, word);
        if at % 16 == 0 {
            table.scribble(128 + at / 16 % 64, word & mix(word));
        }
    }
    for round in 0..3u32 {
        let published = table.publish(&endpoint, node, round, round);
        let mirror = table.publish(&endpoint.mirror(), other, round, round);
        let _ = table.find_same(&endpoint, other);
        let found = table.find_mirror(&endpoint);
        for entry in published
            .iter()
            .chain(&mirror)
            .map(|p| p.entry)
            .chain(found.map(|f| f.entry))
        {
            let _ = table.is_current(entry);
            let _ = table.withdraw(entry);
            let _ = table.withdraw(entry);
        }
    }
    let mut count = 0;
    table.for_each(|_, _| count += 1);
    assert!(count <= ENTRIES && table.owners().len() <= ENTRIES);
    let _ = table.clear_node(node);
    let _ = table.clear_node(other);
}

/// Some endpoint, derived from a number.
fn endpoint(seed: u64) -> Endpoint {
    let mut local = [0u8; 16];
    let mut peer = [0u8; 16];
    local[8..].copy_from_slice(&mix(seed).to_le_bytes());
    peer[8..].copy_from_slice(&mix(seed.rotate_left(17)).to_le_bytes());
    let ports = mix(!seed);
    Endpoint {
        netns: seed,
        local,
        peer,
        local_port: ports as u16,
        peer_port: (ports >> 16) as u16,
    }
}
