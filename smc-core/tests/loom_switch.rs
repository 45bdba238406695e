//! Model checks of changing the carrier under a receiver: the order of the accesses to the shared words in
//!
//! - `src/stream/switch.rs`: `tx_log`, and the condition of `try_upgrade_tx` on `passed`; `recalled`;
//! - `src/stream/rx.rs`: `locate` and `pull_tcp` with its `unbounded` flag; `consume`;
//! - `src/stream/tx.rs`: `commit_tx`.
//!
//! TCP is a queue under a mutex. One read takes byte after byte, so that, as in the kernel, bytes that come in
//! during the read are taken by it. The RMB is an array whose bytes loom guards against races.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test --release -p smc-core --test loom_switch`, best with a target
//! directory of its own.
#![cfg(loom)]

mod model;

use std::collections::VecDeque;
use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::{Condvar, Mutex};
use loom::thread;

use model::Ordering::{Acquire, Relaxed, Release, SeqCst};
use model::{AtomicU32, AtomicU64, check, fence};

const LOG: usize = 4;
const RING: usize = 8;

/// `fabric::shm::Direction`, the two carriers, and the messages of a recall.
struct Direction {
    prod: AtomicU64,
    switches: AtomicU32,
    log: [AtomicU64; LOG],
    passed: AtomicU32,
    unbounded: AtomicU32,
    ring: [UnsafeCell<u8>; RING],
    tcp: Mutex<VecDeque<u8>>,
    tx: Mutex<Tx>,
    /// (asked to recall from this offset, answered)
    recall: Mutex<(Option<u64>, bool)>,
    news: Condvar,
}

// SAFETY: the ring's bytes are ordered by the cursors, which is what loom checks here.
unsafe impl Sync for Direction {}

/// What the sender keeps for itself, under `tx.lock`.
#[derive(Default)]
struct Tx {
    off: u64,
    head: u32,
    last_up: u64,
}

impl Direction {
    fn new() -> Arc<Self> {
        Arc::new(Direction {
            prod: AtomicU64::of(0),
            switches: AtomicU32::of(0),
            log: [(); LOG].map(|()| AtomicU64::of(0)),
            passed: AtomicU32::of(0),
            unbounded: AtomicU32::of(0),
            ring: [(); RING].map(|()| UnsafeCell::new(0xff)),
            tcp: Mutex::default(),
            tx: Mutex::default(),
            recall: Mutex::default(),
            news: Condvar::new(),
        })
    }

    fn tx_log(&self, tx: &mut Tx, at: u64, mind_the_reader: bool) -> bool {
        let to_tcp = tx.head & 1 == 1;
        if to_tcp {
            fence(SeqCst);
            if mind_the_reader && self.unbounded.load(SeqCst) != 0 {
                return false;
            }
        } else {
            tx.last_up = at;
            self.prod.store(at, Relaxed);
        }
        assert!(((tx.head - self.passed.load(Acquire)) as usize) < LOG);
        self.log[tx.head as usize % LOG].store(at, Relaxed);
        tx.head += 1;
        self.switches.store(tx.head, SeqCst);
        true
    }

    fn upgrade(&self) {
        let tx = &mut *self.tx.lock().expect("unpoisoned");
        if tx.head & 1 == 0 && tx.head == self.passed.load(Acquire) {
            let at = tx.off;
            self.tx_log(tx, at, true);
        }
    }

    fn downgrade(&self, mind_the_reader: bool) {
        let tx = &mut *self.tx.lock().expect("unpoisoned");
        if tx.head & 1 == 1 {
            let at = tx.off;
            self.tx_log(tx, at, mind_the_reader);
        }
    }

    /// Sends the next byte, whose value is its offset.
    fn send(&self) {
        let tx = &mut *self.tx.lock().expect("unpoisoned");
        let byte = tx.off as u8;
        if tx.head & 1 == 1 {
            // SAFETY: the receiver does not read here before it has seen the cursor.
            self.ring[tx.off as usize % RING].with_mut(|p| unsafe { *p = byte });
            tx.off += 1;
            self.prod.store(tx.off, Release);
        } else {
            self.tcp.lock().expect("unpoisoned").push_back(byte);
            tx.off += 1;
        }
    }

    /// The engine of the sender's process: waits for a recall and answers it.
    fn answer_recall(&self) {
        let mut r = self.recall.lock().expect("unpoisoned");
        while r.0.is_none() {
            r = self.news.wait(r).expect("unpoisoned");
        }
        let at = r.0.expect("set");
        drop(r);
        let mut tx = self.tx.lock().expect("unpoisoned");
        if tx.head & 1 == 1 {
            let from = at.max(tx.last_up);
            let back: Vec<u8> = (from..tx.off)
                // SAFETY: under the sender's lock, and the receiver only reads.
                .map(|o| self.ring[o as usize % RING].with(|p| unsafe { *p }))
                .collect();
            // The receiver is frozen, so it is in no read.
            assert!(self.tx_log(&mut tx, from, true));
            self.tcp.lock().expect("unpoisoned").extend(back);
        }
        drop(tx);
        self.recall.lock().expect("unpoisoned").1 = true;
        self.news.notify_all();
    }
}

/// The receiver's private half.
#[derive(Default)]
struct Rx {
    pos: u64,
    passed: u32,
}

impl Rx {
    /// One read of the program; checks what it returns.
    fn read(&mut self, d: &Direction, most: u64) {
        loop {
            let prod = d.prod.load(Acquire);
            let head = d.switches.load(Acquire);
            let bound =
                (head != self.passed).then(|| d.log[self.passed as usize % LOG].load(Relaxed));
            if let Some(b) = bound {
                assert!(b >= self.pos, "a switch behind us");
                if b == self.pos {
                    self.passed += 1;
                    d.passed.store(self.passed, Release);
                    continue;
                }
            }
            if self.passed & 1 == 1 {
                let end = prod.min(bound.unwrap_or(u64::MAX));
                assert!(
                    end >= self.pos && end - self.pos <= RING as u64,
                    "a wrong cursor"
                );
                let n = (end - self.pos).min(most);
                for _ in 0..n {
                    // SAFETY: published by the sender.
                    let byte = d.ring[self.pos as usize % RING].with(|p| unsafe { *p });
                    self.take(byte);
                }
                return;
            }
            if self.pull_tcp(d, most, bound) {
                return;
            }
        }
    }

    /// False: look again where the next byte is.
    fn pull_tcp(&mut self, d: &Direction, most: u64, bound: Option<u64>) -> bool {
        let mut want = most;
        match bound {
            Some(b) => want = want.min(b - self.pos),
            None => {
                d.unbounded.store(1, SeqCst);
                fence(SeqCst);
                if d.switches.load(SeqCst) != self.passed {
                    d.unbounded.store(0, Release);
                    return false;
                }
            }
        }
        let mut got = Vec::new();
        while (got.len() as u64) < want {
            match d.tcp.lock().expect("unpoisoned").pop_front() {
                Some(b) => got.push(b),
                None => break,
            }
        }
        d.unbounded.store(0, Release);
        let nothing = got.is_empty();
        for b in got {
            self.take(b);
        }
        !(nothing && bound.is_none() && d.switches.load(Acquire) != self.passed)
    }

    fn take(&mut self, byte: u8) {
        assert_eq!(u64::from(byte), self.pos, "out of order");
        self.pos += 1;
    }
}

fn there_and_back(preemptions: usize, mind_the_reader: bool, again: bool) {
    check(preemptions, move || {
        let d = Direction::new();
        let theirs = d.clone();
        let sender = thread::spawn(move || {
            theirs.send();
            theirs.upgrade();
            theirs.send();
            theirs.downgrade(mind_the_reader);
            theirs.send();
            if again {
                theirs.upgrade();
                theirs.send();
            }
            theirs.tx.lock().expect("unpoisoned").off
        });
        let mut rx = Rx::default();
        for _ in 0..2 {
            rx.read(&d, 8);
        }
        let sent = sender.join().expect("the sender");
        while rx.pos < sent {
            rx.read(&d, 8);
        }
    });
}

/// The sender goes to the RMB and back while the receiver reads without a bound.
#[test]
fn a_stay_on_the_rmb_does_not_mix_bytes() {
    there_and_back(3, true, false);
}

/// As before, and to the RMB a second time: cursor and log of the first stay must not be taken for its own.
#[test]
fn a_second_stay_is_not_the_first() {
    there_and_back(2, true, true);
}

#[test]
#[should_panic(expected = "out of order")]
fn without_the_flag_bytes_are_mixed() {
    there_and_back(3, false, false);
}

/// The receiver has its direction put back on TCP, unread bytes included, while the program goes on sending.
#[test]
fn a_recall_keeps_the_order() {
    check(2, || {
        let d = Direction::new();
        let (a, b) = (d.clone(), d.clone());
        let engine = thread::spawn(move || a.answer_recall());
        d.upgrade();
        let sender = thread::spawn(move || {
            b.send();
            b.send();
        });
        let mut rx = Rx::default();
        rx.read(&d, 1);
        // Frozen: no reads from here on.
        d.recall.lock().expect("unpoisoned").0 = Some(rx.pos);
        d.news.notify_all();
        let mut r = d.recall.lock().expect("unpoisoned");
        while !r.1 {
            r = d.news.wait(r).expect("unpoisoned");
        }
        drop(r);
        rx.read(&d, 1);
        engine.join().expect("the engine");
        sender.join().expect("the sender");
        while rx.pos < 2 {
            rx.read(&d, 1);
        }
        assert_eq!(rx.passed, d.switches.load(Relaxed));
        assert_eq!(rx.passed & 1, 0, "the stream is on TCP");
    });
}
