//! A set of up to 4096 pending numbers in two levels, for many producers and one consumer at a time.
//!
//! This is how "something changed on connection n" travels: from a peer process (in a link's shared
//! segment), from link to node, and from connection to epoll set. Adding is idempotent and wait-free,
//! so there is no overflow and no half-done state: a producer that dies between its two steps leaves
//! at worst a bit without its summary bit, and its link's death makes the consumer look at everything.
//!
//! Protocol. A producer changes the object, executes a `SeqCst` fence, then calls [`Bitmap::set`],
//! which sets the word's bit first and the summary bit second, each only if it reads as clear. The
//! consumer takes the summary with a swap, then each flagged word with a swap, then executes a
//! `SeqCst` fence, then looks at the objects. If a producer finds its bit already set, the consumer's
//! swap of that word comes later in the word's modification order than the producer's read; with
//! the two fences the consumer's look at the object sees the producer's change. If the producer finds
//! the bit set but the summary bit clear, it sets the latter itself. Nothing is lost; a bit may be
//! delivered for an object in which there is nothing new.

// Not core's own: the model check in tests/loom_bitmap.rs includes this file with loom's atomics.
use super::atomic::Ordering::SeqCst;
use super::atomic::{AtomicU64, fence};

/// Capacity of a [`Bitmap`].
pub const BITS: usize = 4096;

/// See the module comment. All-zero memory is an empty bitmap.
#[repr(C)]
pub struct Bitmap {
    summary: AtomicU64,
    words: [AtomicU64; 64],
}

impl Bitmap {
    /// An empty bitmap.
    #[allow(clippy::declare_interior_mutable_const)]
    pub const fn new() -> Self {
        const ZERO: AtomicU64 = AtomicU64::new(0);
        Bitmap {
            summary: ZERO,
            words: [ZERO; 64],
        }
    }

    /// Adds `i` (taken modulo 4096). The caller has executed a `SeqCst` fence since its change.
    #[inline]
    pub fn set(&self, i: u32) {
        let (w, b) = ((i as usize >> 6) & 63, 1u64 << (i & 63));
        if self.words[w].load(SeqCst) & b == 0 {
            self.words[w].fetch_or(b, SeqCst);
        }
        let s = 1u64 << w;
        if self.summary.load(SeqCst) & s == 0 {
            self.summary.fetch_or(s, SeqCst);
        }
    }

    /// Whether there may be something to take: one load.
    #[inline]
    pub fn any(&self) -> bool {
        self.summary.load(SeqCst) != 0
    }

    /// Takes every number out and hands each to `f`.
    #[inline]
    pub fn drain(&self, mut f: impl FnMut(u32)) {
        if !self.any() {
            return;
        }
        let mut s = self.summary.swap(0, SeqCst);
        while s != 0 {
            let w = s.trailing_zeros() as usize;
            s &= s - 1;
            let mut bits = self.words[w].swap(0, SeqCst);
            fence(SeqCst);
            while bits != 0 {
                let b = bits.trailing_zeros();
                bits &= bits - 1;
                f((w as u32) << 6 | b);
            }
        }
    }

    /// Takes numbers out, beginning at `start` and going round, until `f` says stop by `false`.
    /// The number on which it stops, and those not reached, stay in. Returns the first number not
    /// reached: the next `start`.
    pub fn drain_from(&self, start: u32, mut f: impl FnMut(u32) -> bool) -> u32 {
        let s = self.summary.load(SeqCst);
        if s == 0 {
            return start;
        }
        let first = (start as usize >> 6) & 63;
        // The word of `start` comes twice: its upper part first, its lower part last.
        for k in 0..=64 {
            let w = (first + k) & 63;
            if s >> w & 1 == 0 {
                continue;
            }
            self.summary.fetch_and(!(1 << w), SeqCst);
            let part = match k {
                0 => u64::MAX << (start & 63),
                64 => !(u64::MAX << (start & 63)),
                _ => u64::MAX,
            };
            let mut bits = self.words[w].fetch_and(!part, SeqCst) & part;
            fence(SeqCst);
            while bits != 0 {
                let b = bits.trailing_zeros();
                let i = (w as u32) << 6 | b;
                if !f(i) {
                    self.words[w].fetch_or(bits, SeqCst);
                    self.summary.fetch_or(1 << w, SeqCst);
                    return i;
                }
                bits &= bits - 1;
            }
            if self.words[w].load(SeqCst) != 0 {
                self.summary.fetch_or(1 << w, SeqCst);
            }
        }
        start
    }
}

impl Default for Bitmap {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;
    use std::sync::Arc;
    use std::sync::atomic::AtomicU32;
    use std::sync::atomic::Ordering::Relaxed;

    proptest! {
        #[test]
        fn drains_what_was_set(ns in proptest::collection::vec(0u32..4096, 0..200)) {
            let b = Bitmap::new();
            for &n in &ns { b.set(n); }
            let mut got = BTreeSet::new();
            b.drain(|i| { assert!(got.insert(i)); });
            prop_assert_eq!(got, ns.into_iter().collect::<BTreeSet<_>>());
            prop_assert!(!b.any());
        }

        #[test]
        fn drain_from_goes_round_and_keeps_the_rest(
            ns in proptest::collection::btree_set(0u32..4096, 0..200), start in 0u32..4096, most in 0usize..250,
        ) {
            let b = Bitmap::new();
            for &n in &ns { b.set(n); }
            let mut got = Vec::new();
            b.drain_from(start, |i| { if got.len() == most { return false } got.push(i); true });
            let mut expect: Vec<u32> = ns.iter().copied().filter(|&n| n >= start).collect();
            expect.extend(ns.iter().copied().filter(|&n| n < start));
            let rest: BTreeSet<u32> = expect.iter().copied().skip(most).collect();
            expect.truncate(most);
            prop_assert_eq!(got, expect);
            let mut left = BTreeSet::new();
            b.drain(|i| { left.insert(i); });
            prop_assert_eq!(left, rest);
        }
    }

    /// Producers raise counters and set bits; the consumer must never go idle with a counter unseen.
    #[test]
    fn no_change_is_lost() {
        let b = Arc::new(Bitmap::new());
        let c: Arc<Vec<AtomicU32>> = Arc::new((0..128).map(|_| AtomicU32::new(0)).collect());
        let producers: Vec<_> = (0..2)
            .map(|p| {
                let (b, c) = (b.clone(), c.clone());
                std::thread::spawn(move || {
                    for n in 0..200_000u32 {
                        let i = (n * 7 + p * 64) % 128;
                        c[i as usize].fetch_add(1, Relaxed);
                        fence(SeqCst);
                        b.set(i);
                    }
                })
            })
            .collect();
        let mut seen = vec![0u32; 128];
        loop {
            let done = producers.iter().all(|p| p.is_finished());
            b.drain(|i| seen[i as usize] = c[i as usize].load(Relaxed));
            if done {
                break;
            }
        }
        b.drain(|i| seen[i as usize] = c[i as usize].load(Relaxed));
        let now: Vec<u32> = c.iter().map(|x| x.load(Relaxed)).collect();
        assert_eq!(seen, now);
    }
}
