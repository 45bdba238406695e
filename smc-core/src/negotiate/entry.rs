//! The lock-free protocol of one directory entry.
//!
//! An entry is a group of 64-bit words in memory that several processes share. Two words steer it:
//!
//! - `node`: 0, or the id of the node that holds the entry. It is the *claim*: whoever changes it from 0 to its own
//!   id by compare-and-swap may write the rest. Claim and owner are one word, so there is no moment at which an
//!   entry is taken but nobody knows by whom.
//! - `state`: a generation (upper 63 bits) and VALID (lowest bit).
//!
//! | status | node | state      |                                                      |
//! |--------|------|------------|------------------------------------------------------|
//! | EMPTY  | 0    | g          | anybody may claim it                                 |
//! | BUSY   | n    | g          | n is writing the fields, or has begun to withdraw it |
//! | VALID  | n    | g \| VALID | may be found                                         |
//!
//! Publish (only the claimer): (1) swap `node` 0 -> n, (2) write the fields, (3) swap `state` g -> g|VALID.
//! Withdraw (owner, or a sweeper of a dead owner): (4) swap `state` g|VALID -> g+1, (5) swap `node` n -> 0. Of
//! several that try at once one wins (4), and only it goes on to (5).
//! Clear (a sweeper; the owner n is dead): read `state`, check `node` = n, (6) swap a VALID `state` to g+1,
//! (7) swap `node` n -> 0.
//!
//! A crash leaves, after (1) or (2): BUSY with the owner's id; nobody finds it, a clear of n frees it. After (3):
//! VALID, points to a dead node; the finder fails to reach it, and a clear frees it. After (4) or (6): BUSY, a clear
//! frees it. After (5) or (7): EMPTY. No step waits for another party, so a stopped process blocks nobody.
//!
//! Why a late clear never harms a new owner: it read `state` = s before it saw `node` = n. If somebody else frees
//! the entry meanwhile, then either s was VALID and has been replaced by the next generation before `node` became
//! 0, so swap (6) fails; or s was not VALID, and (6) isn't done. Swap (7) fails because `node` isn't n any more: node
//! ids aren't used twice.
//!
//! Readers run as in a seqlock: read `state` (acquire), go on only when VALID, read the fields, acquire fence, read
//! `state` again; different means the entry was withdrawn in between, and it is skipped. Writers write fields only
//! after their claim, which comes after the release at (5), and they put a release fence before the first field. So a
//! reader that saw any field of a later owner sees a later generation at its second look.
//!
//! Why of two racing publishers at least one finds the other: each does its step (3), then a SeqCst fence, then
//! reads all entries of the bucket. Fences have one order; say A's comes before B's. Then B's reads, which follow
//! B's fence, see what A wrote before A's fence: A's entry VALID, or something later. "Later" means that A (or
//! a sweeper of A) withdrew it, or a third node took it over, so there was nothing left to find. The same argument
//! covers the bit that marks a bucket as used, which is set before (3). If an entry that was read changes during
//! the read, its new owner's fence comes after ours (otherwise the first look had seen it), so that owner finds us.

use super::atomic::{AtomicU64, Ordering, fence};

/// Lowest bit of `state`: the fields may be read.
const VALID: u64 = 1;
/// One step of the generation.
const STEP: u64 = 2;

/// One entry with `N` words of payload, whose meaning is the directory's business.
#[repr(C, align(128))]
pub(super) struct Entry<const N: usize> {
    state: AtomicU64,
    node: AtomicU64,
    fields: [AtomicU64; N],
}

/// A consistent copy of a VALID entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Snapshot<const N: usize> {
    pub(super) generation: u64,
    pub(super) node: u64,
    pub(super) fields: [u64; N],
}

impl<const N: usize> Entry<N> {
    /// An entry in its first generation, as fresh pages of the file hold.
    #[cfg(all(test, loom))]
    #[allow(dead_code)] // The model uses it, in its own copy of this module.
    pub(super) fn empty() -> Self {
        Entry {
            state: AtomicU64::new(0),
            node: AtomicU64::new(0),
            fields: std::array::from_fn(|_| AtomicU64::new(0)),
        }
    }

    /// Claims an EMPTY entry for `node` (step 1). False: it isn't EMPTY.
    pub(super) fn claim(&self, node: u64) -> bool {
        self.node.load(Ordering::Relaxed) == 0
            && self
                .node
                .compare_exchange(0, node, Ordering::SeqCst, Ordering::Relaxed)
                .is_ok()
    }

    /// Writes the fields of an entry that this thread has claimed for `node`, and makes it VALID (steps 2 and 3).
    /// Returns the generation, or `None` when the entry was taken from us, as a wrong sweep would do.
    pub(super) fn fill(&self, node: u64, fields: &[u64; N]) -> Option<u64> {
        let mut state = self.state.load(Ordering::Acquire);
        if state & VALID != 0 {
            // Can't be, unless somebody scribbles: start a new generation.
            state = next(state);
            self.state.store(state, Ordering::Release);
        }
        fence(Ordering::Release);
        for (word, value) in self.fields.iter().zip(fields) {
            word.store(*value, Ordering::Relaxed);
        }
        let filled =
            self.state
                .compare_exchange(state, state | VALID, Ordering::SeqCst, Ordering::Relaxed);
        let ours = filled.is_ok() && self.node.load(Ordering::Relaxed) == node;
        ours.then_some(state | VALID)
    }

    /// A copy of the entry if it is VALID and `wanted` accepts its fields.
    pub(super) fn read(&self, wanted: impl FnOnce(&[u64; N]) -> bool) -> Option<Snapshot<N>> {
        let generation = self.state.load(Ordering::Acquire);
        if generation & VALID == 0 {
            return None;
        }
        let node = self.node.load(Ordering::Relaxed);
        let fields = std::array::from_fn(|i| self.fields[i].load(Ordering::Relaxed));
        if node == 0 || !wanted(&fields) {
            return None;
        }
        fence(Ordering::Acquire);
        let same = self.state.load(Ordering::Relaxed) == generation;
        same.then_some(Snapshot {
            generation,
            node,
            fields,
        })
    }

    /// Withdraws what `node` published as `generation` (steps 4 and 5). False: it wasn't there any more.
    pub(super) fn withdraw(&self, node: u64, generation: u64) -> bool {
        if generation & VALID == 0 || self.node.load(Ordering::Relaxed) != node {
            return false;
        }
        let empty = next(generation);
        let swap =
            self.state
                .compare_exchange(generation, empty, Ordering::SeqCst, Ordering::Relaxed);
        swap.is_ok() && self.release(node)
    }

    /// Frees the entry if the dead `node` holds it in whatever status (steps 6 and 7).
    pub(super) fn clear(&self, node: u64) -> bool {
        let state = self.state.load(Ordering::Acquire);
        if self.node.load(Ordering::Acquire) != node {
            return false;
        }
        if state & VALID != 0 {
            let swap = self.state.compare_exchange(
                state,
                next(state),
                Ordering::SeqCst,
                Ordering::Relaxed,
            );
            if swap.is_err() {
                return false;
            }
        }
        self.release(node)
    }

    /// The owner's id, 0 if there is none.
    pub(super) fn owner(&self) -> u64 {
        self.node.load(Ordering::Relaxed)
    }

    /// Whether `generation` of `node` is still what can be found here.
    pub(super) fn holds(&self, node: u64, generation: u64) -> bool {
        generation & VALID != 0
            && self.state.load(Ordering::Acquire) == generation
            && self.node.load(Ordering::Relaxed) == node
    }

    fn release(&self, node: u64) -> bool {
        self.node
            .compare_exchange(node, 0, Ordering::SeqCst, Ordering::Relaxed)
            .is_ok()
    }
}

/// The state EMPTY of the generation after `state`.
fn next(state: u64) -> u64 {
    (state & !VALID).wrapping_add(STEP)
}
