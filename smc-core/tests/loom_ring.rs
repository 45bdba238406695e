//! Model checks of the RMB's cursors and of "write blocked": the order of the accesses to the shared words in
//!
//! - `src/stream/tx.rs`: `room`, `free`, `commit_tx`, `tx_writable`; `src/stream/mask.rs`: the part about room;
//! - `src/stream/rx.rs`: `locate` on the RMB, `consume`;
//! - `src/stream/wait.rs`: `sleep_in_kernel`.
//!
//! loom guards the ring's bytes against races; a lost wake-up is a deadlock, which it reports.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test --release -p smc-core --test loom_ring`, best with a target
//! directory of its own.
#![cfg(loom)]

mod model;

use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::sync::Mutex;
use loom::thread;

use model::Ordering::{Acquire, Relaxed, Release, SeqCst};
use model::{AtomicU32, AtomicU64, Bell, check, fence};

const TX_BLOCKED: u32 = 1;

/// What a sender does about a request to be told of room, which may be another thread's.
#[derive(Clone, Copy, PartialEq)]
enum Clearing {
    /// Takes it back whenever it sends.
    Always,
    /// Takes it back once there is room.
    WithRoom,
    /// And wakes those who made it: the receiver may have made the room, but not yet looked for the request.
    WithRoomAndWake,
}

struct Stream<const SIZE: usize> {
    prod: AtomicU64,
    flags: AtomicU32,
    cons: AtomicU64,
    ring: [UnsafeCell<u8>; SIZE],
    /// Offset of the next byte to be sent; under `tx.lock`.
    off: Mutex<u64>,
    /// Free bytes from which on a sleeper is told of room.
    enough: u64,
    sender: Bell,
    receiver: Bell,
}

// SAFETY: the ring's bytes are ordered by the cursors, which is what loom checks here.
unsafe impl<const SIZE: usize> Sync for Stream<SIZE> {}

impl<const SIZE: usize> Stream<SIZE> {
    fn new(enough: u64) -> Self {
        Stream {
            prod: AtomicU64::of(0),
            flags: AtomicU32::of(0),
            cons: AtomicU64::of(0),
            ring: [(); SIZE].map(|()| UnsafeCell::new(0xff)),
            off: Mutex::new(0),
            enough,
            sender: Bell::new(),
            receiver: Bell::new(),
        }
    }

    fn free(&self, off: u64) -> u64 {
        let cons = self.cons.load(Acquire);
        assert!(cons <= off, "a wrong cursor");
        SIZE as u64 - (off - cons)
    }

    /// Free bytes, or at least `least` of them or the request to be told.
    fn free_or_armed(&self, off: u64, least: u64) -> u64 {
        let free = self.free(off);
        if free >= least {
            return free;
        }
        self.flags.fetch_or(TX_BLOCKED, SeqCst);
        fence(SeqCst);
        self.free(off)
    }

    /// `push` of one byte. False: there is no room.
    fn push(&self, clearing: Clearing) -> bool {
        let mut off = self.off.lock().expect("unpoisoned");
        if self.free_or_armed(*off, 1) == 0 {
            return false;
        }
        // SAFETY: there is room, so the receiver does not read this byte.
        self.ring[*off as usize % SIZE].with_mut(|p| unsafe { *p = *off as u8 });
        *off += 1;
        self.prod.store(*off, Release);
        if self.flags.load(Relaxed) & TX_BLOCKED != 0
            && (clearing == Clearing::Always || self.free(*off) >= self.enough)
        {
            self.flags.fetch_and(!TX_BLOCKED, Relaxed);
            if clearing == Clearing::WithRoomAndWake {
                // `on_event`
                fence(SeqCst);
                self.sender.ring();
            }
        }
        fence(SeqCst);
        self.receiver.ring();
        true
    }

    /// `mask` with an interest in room.
    fn writable(&self) -> bool {
        let off = self.off.lock().expect("unpoisoned");
        self.free_or_armed(*off, self.enough) >= self.enough
    }

    /// Reads what there is; returns the new position.
    fn pull(&self, pos: u64) -> u64 {
        let end = self.prod.load(Acquire);
        assert!(end >= pos && end - pos <= SIZE as u64, "a wrong cursor");
        if end == pos {
            return pos;
        }
        for o in pos..end {
            // SAFETY: published by the sender.
            let byte = self.ring[o as usize % SIZE].with(|p| unsafe { *p });
            assert_eq!(u64::from(byte), o);
        }
        self.cons.store(end, Release);
        fence(SeqCst);
        if self.flags.load(Relaxed) & TX_BLOCKED != 0 {
            let used = self.prod.load(Relaxed).wrapping_sub(end);
            if used <= SIZE as u64 - self.enough {
                self.sender.ring();
            }
        }
        end
    }

    /// Sends one byte, waiting for room.
    fn send(&self) {
        while !self.push(Clearing::WithRoomAndWake) {
            self.sender.about_to_sleep();
            let off = *self.off.lock().expect("unpoisoned");
            if self.free_or_armed(off, self.enough) < self.enough {
                self.sender.sleep();
            }
            self.sender.awake();
        }
    }

    /// Receives until position `end`.
    fn receive(&self, mut pos: u64, end: u64) {
        while pos < end {
            let now = self.pull(pos);
            if now == pos {
                self.receiver.about_to_sleep();
                if self.prod.load(Acquire) == pos {
                    self.receiver.sleep();
                }
                self.receiver.awake();
            }
            pos = now;
        }
    }
}

/// Both sides sleep when they have to, and both are woken.
#[test]
fn a_full_ring_is_drained_and_filled_again() {
    check(2, || {
        let s = Arc::new(Stream::<1>::new(1));
        let theirs = s.clone();
        let sender = thread::spawn(move || {
            for _ in 0..3 {
                theirs.send();
            }
        });
        s.receive(0, 3);
        sender.join().expect("the sender");
    });
}

#[test]
fn a_ring_of_two_is_drained_and_filled_again() {
    check(2, || {
        let s = Arc::new(Stream::<2>::new(2));
        let theirs = s.clone();
        let sender = thread::spawn(move || {
            for _ in 0..4 {
                theirs.send();
            }
        });
        s.receive(0, 4);
        sender.join().expect("the sender");
    });
}

/// One thread polls for room while another sends into what little there is.
fn poller_and_sender(clearing: Clearing) {
    check(2, move || {
        let s = Arc::new(Stream::<4>::new(2));
        for _ in 0..3 {
            assert!(s.push(clearing));
        }
        let (a, b) = (s.clone(), s.clone());
        let poller = thread::spawn(move || {
            while !a.writable() {
                a.sender.about_to_sleep();
                if !a.writable() {
                    a.sender.sleep();
                }
                a.sender.awake();
            }
        });
        let sender = thread::spawn(move || b.push(clearing));
        let pos = s.pull(0);
        assert!(sender.join().expect("the sender"));
        s.pull(pos);
        poller.join().expect("the poller");
    });
}

#[test]
fn a_poller_hears_of_room() {
    poller_and_sender(Clearing::WithRoomAndWake);
}

#[test]
#[should_panic(expected = "deadlock")]
fn taking_the_request_back_with_each_byte_strands_a_poller() {
    poller_and_sender(Clearing::Always);
}

#[test]
#[should_panic(expected = "deadlock")]
fn taking_the_request_back_in_silence_strands_a_poller() {
    poller_and_sender(Clearing::WithRoom);
}
