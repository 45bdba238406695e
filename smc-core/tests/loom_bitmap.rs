//! Model checks of the pending bitmap, over interleavings and stale values. They run the real `src/bitmap.rs`
//! with loom's atomics in place of core's.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test --release -p smc-core --test loom_bitmap`, best with a target
//! directory of its own.
#![cfg(loom)]

use std::sync::Arc;

use loom::thread;

mod model;

/// What `bitmap.rs` gets for core's atomics.
mod atomic {
    pub(super) use crate::model::{AtomicU64, Ordering, fence};
}
#[allow(dead_code, unreachable_pub)]
#[path = "../src/bitmap.rs"]
mod bitmap;

use bitmap::Bitmap;
use model::Ordering::{Relaxed, SeqCst};
use model::{AtomicU64, check, fence};

/// A bitmap whose words for `used` exist before any other thread does.
fn bitmap(used: &[u32]) -> Bitmap {
    let b = Bitmap::new();
    for &i in used {
        b.set(i);
    }
    b.drain(|_| {});
    b
}

/// What a producer does: change, fence, set.
fn change(object: &AtomicU64, v: u64, b: &Bitmap, i: u32) {
    object.store(v, Relaxed);
    fence(SeqCst);
    b.set(i);
}

/// The second change may find the bit of the first one still set: the consumer must see both.
#[test]
fn a_change_under_a_set_bit_is_seen() {
    check(3, || {
        let shared = Arc::new((bitmap(&[5]), AtomicU64::of(0)));
        let theirs = shared.clone();
        let producer = thread::spawn(move || {
            change(&theirs.1, 1, &theirs.0, 5);
            change(&theirs.1, 2, &theirs.0, 5);
        });
        let mut seen = 0;
        for _ in 0..2 {
            shared.0.drain(|i| {
                assert_eq!(i, 5);
                seen = shared.1.load(Relaxed);
            });
        }
        producer.join().expect("the producer");
        shared.0.drain(|_| seen = shared.1.load(Relaxed));
        assert_eq!(seen, 2);
    });
}

/// Two producers, in one word or in two.
#[test]
fn producers_do_not_hide_each_other() {
    for other in [6, 70] {
        check(3, move || {
            let shared = Arc::new((bitmap(&[5, other]), [AtomicU64::of(0), AtomicU64::of(0)]));
            let producers = [(0, 5), (1, other)].map(|(k, i)| {
                let theirs = shared.clone();
                thread::spawn(move || change(&theirs.1[k], 1, &theirs.0, i))
            });
            let mut seen = [0; 2];
            let mut look = || {
                shared.0.drain(|i| {
                    let k = usize::from(i != 5);
                    seen[k] = shared.1[k].load(Relaxed);
                });
            };
            look();
            for p in producers {
                p.join().expect("a producer");
            }
            look();
            assert_eq!(seen, [1, 1]);
        });
    }
}

/// A consumer that begins in the middle of a word, and may stop halfway, keeps the rest, also where a producer
/// adds to it meanwhile.
#[test]
fn a_partial_harvest_keeps_the_rest() {
    for (at_once, most) in [(true, 1), (true, 9), (false, 9)] {
        check(3, move || {
            let shared = Arc::new((bitmap(&[5, 6]), [AtomicU64::of(0), AtomicU64::of(0)]));
            if at_once {
                change(&shared.1[0], 1, &shared.0, 5);
            }
            change(&shared.1[1], 1, &shared.0, 6);
            let theirs = shared.clone();
            let producer = thread::spawn(move || change(&theirs.1[1], 2, &theirs.0, 6));
            let mut seen = [0; 2];
            let mut harvest = |start, most| {
                let mut n = 0;
                shared.0.drain_from(start, |i| {
                    n += 1;
                    if n <= most {
                        let k = i as usize - 5;
                        seen[k] = shared.1[k].load(Relaxed);
                    }
                    n <= most
                })
            };
            let next = harvest(6, most);
            producer.join().expect("the producer");
            harvest(next, 9);
            assert_eq!(seen, [u64::from(at_once), 2]);
        });
    }
}

/// As an event travels: a bit for the connection, then a bit for the link.
#[test]
fn two_stages_lose_nothing() {
    check(3, || {
        let shared = Arc::new((bitmap(&[3]), bitmap(&[9]), AtomicU64::of(0)));
        let theirs = shared.clone();
        let producer = thread::spawn(move || {
            for v in 1..=2 {
                change(&theirs.2, v, &theirs.0, 3);
                theirs.1.set(9);
            }
        });
        let mut seen = 0;
        let mut look = || {
            shared.1.drain(|link| {
                assert_eq!(link, 9);
                shared.0.drain(|_| seen = shared.2.load(Relaxed));
            });
        };
        look();
        producer.join().expect("the producer");
        look();
        assert_eq!(seen, 2);
    });
}

/// The link's bit is set already, by another connection or for nothing.
#[test]
fn a_bit_of_the_second_stage_that_is_set_already_will_do() {
    check(3, || {
        let shared = Arc::new((bitmap(&[3]), bitmap(&[9]), AtomicU64::of(0)));
        shared.1.set(9);
        let theirs = shared.clone();
        let producer = thread::spawn(move || {
            change(&theirs.2, 1, &theirs.0, 3);
            theirs.1.set(9);
        });
        let mut seen = 0;
        let mut look = || {
            shared
                .1
                .drain(|_| shared.0.drain(|_| seen = shared.2.load(Relaxed)));
        };
        look();
        producer.join().expect("the producer");
        look();
        assert_eq!(seen, 1);
    });
}
