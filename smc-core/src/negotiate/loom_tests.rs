//! Model checks of the entry protocol, over the interleavings and the stale values that loom explores.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test -p smc-core --lib loom_tests`, best with a target directory of its own.

use loom::sync::Arc;
use loom::thread;

mod atomic {
    pub(super) use loom::sync::atomic::{AtomicU64, Ordering, fence};
}
#[allow(dead_code)] // Listing the owners needs no model.
#[path = "entry.rs"]
mod entry;

use atomic::{Ordering, fence};

const FIELDS: usize = 2;
type Entry = entry::Entry<FIELDS>;

fn bucket() -> Arc<[Entry; 2]> {
    Arc::new([Entry::empty(), Entry::empty()])
}

/// Publishes `key` for `node`; returns where, and with which generation.
fn publish(bucket: &[Entry; 2], node: u64, key: u64) -> Option<(usize, u64)> {
    let at = bucket.iter().position(|entry| entry.claim(node))?;
    Some((at, bucket[at].fill(node, &[key, key])?))
}

/// Looks for `key`, as the directory does.
fn find(bucket: &[Entry; 2], key: u64) -> Option<u64> {
    fence(Ordering::SeqCst);
    bucket.iter().find_map(|entry| {
        let snapshot = entry.read(|fields| fields[0] == key)?;
        assert_eq!(snapshot.fields[0], snapshot.fields[1], "torn entry");
        Some(snapshot.node)
    })
}

#[test]
fn of_two_racing_publishers_one_finds_the_other() {
    loom::model(|| {
        let bucket = bucket();
        let other = bucket.clone();
        let thread = thread::spawn(move || {
            publish(&other, 2, 20).expect("two entries for two nodes");
            find(&other, 10)
        });
        publish(&bucket, 1, 10).expect("two entries for two nodes");
        let mine = find(&bucket, 20);
        let theirs = thread.join().expect("the thread");
        assert!(mine == Some(2) || theirs == Some(1));
        assert!(mine.is_none_or(|n| n == 2) && theirs.is_none_or(|n| n == 1));
    });
}

#[test]
fn a_reader_never_sees_a_mix_of_two_owners() {
    loom::model(|| {
        let entry = Arc::new(Entry::empty());
        entry.claim(1);
        let generation = entry.fill(1, &[10, 10]).expect("it is ours");
        let writer = entry.clone();
        let thread = thread::spawn(move || {
            assert!(writer.withdraw(1, generation));
            assert!(writer.claim(2));
            assert!(writer.fill(2, &[20, 20]).is_some());
        });
        if let Some(seen) = entry.read(|_| true) {
            let whole = [(1, [10, 10]), (2, [20, 20])];
            assert!(whole.contains(&(seen.node, seen.fields)), "{seen:?}");
        }
        thread.join().expect("the thread");
    });
}

#[test]
fn a_late_sweeper_never_harms_a_new_owner() {
    for filled in [false, true] {
        loom::model(move || {
            let entry = Arc::new(Entry::empty());
            entry.claim(1);
            if filled {
                entry.fill(1, &[10, 10]);
            }
            let other = entry.clone();
            let thread = thread::spawn(move || other.clear(1));
            let mine = entry.clear(1);
            // A new owner takes the entry as soon as it is free.
            let new = entry.claim(2).then(|| entry.fill(2, &[20, 20]));
            let theirs = thread.join().expect("the thread");
            assert!(mine ^ theirs, "exactly one frees it");
            if let Some(generation) = new {
                assert!(entry.holds(2, generation.expect("it is ours")));
                let seen = entry.read(|_| true).expect("it is VALID");
                assert_eq!((seen.node, seen.fields), (2, [20, 20]));
            } else {
                assert!(entry.claim(3), "it is EMPTY");
            }
        });
    }
}

/// A claim orders its owner after all owners before, so no generation is used twice.
#[test]
fn every_owner_has_a_generation_of_its_own() {
    loom::model(|| {
        let entry = Arc::new(Entry::empty());
        entry.claim(1);
        let first = entry.fill(1, &[10, 10]).expect("it is ours");
        let other = entry.clone();
        let thread = thread::spawn(move || {
            assert!(other.withdraw(1, first));
            if !other.claim(3) {
                return None;
            }
            let third = other.fill(3, &[30, 30]).expect("it is ours");
            assert!(other.withdraw(3, third));
            Some(third)
        });
        let second = entry
            .claim(2)
            .then(|| entry.fill(2, &[20, 20]).expect("it is ours"));
        let third = thread.join().expect("the thread");
        assert!(second.is_none_or(|second| second != first && Some(second) != third));
        assert_ne!(third, Some(first));
    });
}

#[test]
fn of_two_withdrawals_one_wins_and_a_new_owner_stays() {
    loom::model(|| {
        let entry = Arc::new(Entry::empty());
        entry.claim(1);
        let generation = entry.fill(1, &[10, 10]).expect("it is ours");
        let other = entry.clone();
        let thread = thread::spawn(move || other.withdraw(1, generation));
        let mine = entry.withdraw(1, generation);
        let again = entry.claim(1).then(|| entry.fill(1, &[11, 11]));
        let theirs = thread.join().expect("the thread");
        assert!(mine ^ theirs);
        if let Some(new) = again {
            assert!(entry.holds(1, new.expect("it is ours")));
        }
    });
}
