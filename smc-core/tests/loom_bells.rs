//! Model checks of sleeping and waking: the order of the accesses to the shared words in
//!
//! - `src/node.rs`: `Link::tell` and `ring`, `ring_own`, `about_to_sleep`, `awake`, `dispatch`;
//! - `src/stream/wait.rs`: `sleep_in_kernel` (take a seat, announce sleep, look, sleep, leave);
//! - `src/stream/mod.rs`: `on_event`, as the engine calls it for sleepers that share a connection;
//! - `src/ready/wait.rs` and `nested.rs`: `Set::wait`, `sleep`, `arm_bell`, `disarm`, with several threads on one
//!   bell.
//!
//! A lost wake-up is a deadlock, which loom reports. Tests that should panic show that the model sees the fault.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test --release -p smc-core --test loom_bells`, best with a target
//! directory of its own.
#![cfg(loom)]

mod model;

use std::sync::Arc;

use loom::sync::Mutex;
use loom::thread;

use model::Ordering::{Acquire, Relaxed, Release, SeqCst};
use model::{AtomicU32, Bell, check, fence};

/// One direction of a connection, as far as waking goes.
struct Direction {
    cursor: AtomicU32,
    /// The receiver's wish: 0, or bell + 1.
    notify: AtomicU32,
    bells: [Bell; 2],
}

impl Direction {
    fn new() -> Arc<Self> {
        Arc::new(Direction {
            cursor: AtomicU32::of(0),
            notify: AtomicU32::of(0),
            bells: [Bell::new(), Bell::new()],
        })
    }

    /// `commit_tx` and `tell_peer`.
    fn commit(&self, end: u32, fenced: bool) {
        self.cursor.store(end, Release);
        if fenced {
            fence(SeqCst);
        }
        let wish = self.notify.load(Relaxed);
        if wish != 0 {
            self.bells[wish as usize - 1].ring();
        }
    }

    /// Blocks until the cursor has reached `end`.
    fn wait(&self, bell: usize, end: u32) {
        while self.cursor.load(Acquire) < end {
            self.notify.store(bell as u32 + 1, SeqCst);
            fence(SeqCst);
            self.bells[bell].about_to_sleep();
            if self.cursor.load(Acquire) < end {
                self.bells[bell].sleep();
            }
            self.bells[bell].awake();
            self.notify.store(0, SeqCst);
        }
    }
}

#[test]
fn a_sleeper_is_woken() {
    check(3, || {
        let d = Direction::new();
        let theirs = d.clone();
        let sender = thread::spawn(move || {
            theirs.commit(1, true);
            theirs.commit(2, true);
        });
        d.wait(0, 2);
        sender.join().expect("the sender");
    });
}

/// A waker that goes no further, at whatever step, leaves the bell to others: it may have been killed, or wait in a signal
/// handler for what the other brings.
#[test]
fn a_waker_that_stops_hides_no_other() {
    for steps in 0..2 {
        check(3, move || {
            let d = Direction::new();
            let (killed, theirs) = (d.clone(), d.clone());
            let first = thread::spawn(move || killed.bells[0].ring_until(steps));
            let second = thread::spawn(move || theirs.commit(1, true));
            d.wait(0, 1);
            first.join().expect("the first");
            second.join().expect("the second");
        });
    }
}

/// The wish changes from one bell to another between two sleeps: a late ring of the first does no harm.
#[test]
fn a_sleeper_with_another_bell_is_woken() {
    check(3, || {
        let d = Direction::new();
        let theirs = d.clone();
        let sender = thread::spawn(move || {
            theirs.commit(1, true);
            theirs.commit(2, true);
        });
        d.wait(0, 1);
        d.wait(1, 2);
        sender.join().expect("the sender");
    });
}

#[test]
#[should_panic(expected = "deadlock")]
fn without_the_wakers_fence_a_wake_up_is_lost() {
    check(3, || {
        let d = Direction::new();
        let theirs = d.clone();
        let sender = thread::spawn(move || theirs.commit(1, false));
        d.wait(0, 1);
        sender.join().expect("the sender");
    });
}

/// A connection with several sleepers names the engine's bell; the engine takes the event out of the bitmap
/// (here one bit) and rings those who have a seat.
#[test]
fn the_engine_relays_to_seats() {
    struct Shared {
        cursor: AtomicU32,
        pending: AtomicU32,
        seat: AtomicU32,
        stop: AtomicU32,
        engine: Bell,
        mine: Bell,
    }
    fn dispatch(s: &Shared) {
        if s.pending.load(SeqCst) != 0 && s.pending.swap(0, SeqCst) != 0 {
            fence(SeqCst);
            // `on_event`
            fence(SeqCst);
            if s.seat.load(Relaxed) != 0 {
                s.mine.ring();
            }
        }
    }
    check(2, || {
        let s = Arc::new(Shared {
            cursor: AtomicU32::of(0),
            pending: AtomicU32::of(0),
            seat: AtomicU32::of(0),
            stop: AtomicU32::of(0),
            engine: Bell::new(),
            mine: Bell::new(),
        });
        let (a, b) = (s.clone(), s.clone());
        let engine = thread::spawn(move || {
            loop {
                a.engine.about_to_sleep();
                dispatch(&a);
                if a.stop.load(Acquire) != 0 {
                    return;
                }
                a.engine.sleep();
                a.engine.awake();
                dispatch(&a);
            }
        });
        let sender = thread::spawn(move || {
            b.cursor.store(1, Release);
            fence(SeqCst);
            if b.pending.load(SeqCst) == 0 {
                b.pending.fetch_or(1, SeqCst);
            }
            b.engine.ring();
        });
        while s.cursor.load(Acquire) < 1 {
            s.seat.store(1, SeqCst);
            fence(SeqCst);
            s.mine.about_to_sleep();
            if s.cursor.load(Acquire) < 1 {
                s.mine.sleep();
            }
            s.mine.awake();
            s.seat.store(0, SeqCst);
        }
        sender.join().expect("the sender");
        s.stop.store(1, Release);
        fence(SeqCst);
        s.engine.ring();
        engine.join().expect("the engine");
    });
}

/// An epoll set with several threads in epoll_wait: one bell for all.
struct Set {
    /// Registrations in the ready bitmap.
    ready: AtomicU32,
    sleepers: AtomicU32,
    bell: Bell,
    /// Guards harvests.
    lock: Mutex<()>,
}

impl Set {
    fn new() -> Self {
        Set {
            ready: AtomicU32::of(0),
            sleepers: AtomicU32::of(0),
            bell: Bell::new(),
            lock: Mutex::new(()),
        }
    }

    /// `ready::push`.
    fn push(&self) {
        fence(SeqCst);
        self.ready.fetch_add(1, SeqCst);
        self.bell.ring();
    }

    fn harvest(&self) -> bool {
        if self.ready.load(SeqCst) == 0 {
            return false;
        }
        let _g = self.lock.lock().expect("unpoisoned");
        let any = self.ready.load(SeqCst) > 0;
        if any {
            self.ready.fetch_sub(1, SeqCst);
        }
        any
    }

    /// Takes one event; afterwards the thread is away for good, as one that is busy with the event is.
    /// False: `times_out`, and there was none.
    fn wait(&self, times_out: bool, look_after_others: bool) -> bool {
        let mut slept = false;
        loop {
            if self.harvest() {
                if self.sleepers.load(SeqCst) > 0 && self.ready.load(SeqCst) > 0 {
                    self.bell.ring();
                }
                return true;
            }
            if slept && times_out {
                return false;
            }
            slept = true;
            self.sleepers.fetch_add(1, SeqCst);
            self.bell.about_to_sleep();
            fence(SeqCst);
            if self.ready.load(SeqCst) == 0 && !times_out {
                self.bell.sleep();
            }
            let others = self.sleepers.fetch_sub(1, SeqCst) > 1;
            if !others {
                self.bell.awake();
                fence(SeqCst);
            }
            if others || look_after_others && self.sleepers.load(SeqCst) > 0 {
                self.bell.about_to_sleep();
                if look_after_others && self.ready.load(SeqCst) > 0 {
                    self.bell.ring();
                }
            }
        }
    }
}

/// One thread's epoll_wait times out while another's begins; then there is an event.
fn one_leaves_one_comes(look_after_others: bool) {
    check(2, move || {
        let set = Arc::new(Set::new());
        let (a, b) = (set.clone(), set.clone());
        let leaves = thread::spawn(move || a.wait(true, look_after_others));
        let stays = thread::spawn(move || b.wait(false, look_after_others));
        set.push();
        if leaves.join().expect("a thread") {
            // It got the event after all; here is one for the other.
            set.push();
        }
        assert!(stays.join().expect("a thread"));
    });
}

#[test]
fn each_thread_of_a_set_gets_its_event() {
    check(2, move || {
        let set = Arc::new(Set::new());
        let workers = [(); 2].map(|()| {
            let set = set.clone();
            thread::spawn(move || set.wait(false, true))
        });
        set.push();
        set.push();
        for w in workers {
            assert!(w.join().expect("a worker"));
        }
    });
}

/// Whoever stops sleeping looks once more whether others do, and whether there is something for them.
#[test]
fn a_leaving_thread_leaves_the_flag_to_the_others() {
    one_leaves_one_comes(true);
}

/// Clearing the flag on waking can clear it for a thread that has just gone to sleep.
#[test]
#[should_panic(expected = "deadlock")]
fn a_leaving_thread_that_only_clears_the_flag_strands_another() {
    one_leaves_one_comes(false);
}
