//! Model checks of `src/link/group/sleep.rs`: who takes the event of a completion channel, and who arms the queue.
//!
//! Two threads wait for a message each, the engine watches the channel: one thread dozes on the channel as well and goes
//! away for good once it has its message, the other can be woken only by its bell. (That bells are not missed is checked
//! in `loom_bells.rs`; here they are counted by the kernel.) A lost wake-up is a deadlock, which loom reports.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test --release -p smc-core --test loom_watch`, best with a target
//! directory of its own.
#![cfg(loom)]

mod model;

use std::sync::Arc;

use loom::sync::{Condvar, Mutex};
use loom::thread;

use model::Ordering::SeqCst;
use model::{AtomicU32, check};

/// The threads that wait for messages.
const DOZER: usize = 0;
const OTHER: usize = 1;

/// What the kernel and the device keep.
#[derive(Default)]
struct Kernel {
    /// Messages in the completion queue, by whom they are for.
    queued: [bool; 2],
    armed: bool,
    /// Events in the channel.
    events: u32,
    bells: [bool; 2],
    end: bool,
}

/// What the group's lock guards.
#[derive(Default)]
struct State {
    arrived: [bool; 2],
}

struct Model {
    kernel: Mutex<Kernel>,
    changed: Condvar,
    state: Mutex<State>,
    unread: AtomicU32,
    /// The fault: a dozing thread takes the event as it wakes.
    hasty: bool,
}

impl Model {
    fn new(hasty: bool) -> Arc<Self> {
        Arc::new(Model {
            kernel: Mutex::new(Kernel::default()),
            changed: Condvar::new(),
            state: Mutex::new(State::default()),
            unread: AtomicU32::of(0),
            hasty,
        })
    }

    /// The device receives a message.
    fn deliver(&self, whose: usize) {
        let mut k = self.kernel.lock().unwrap();
        k.queued[whose] = true;
        if std::mem::take(&mut k.armed) {
            k.events += 1;
            self.changed.notify_all();
        }
    }

    /// `poll_locked` and what it routes.
    fn poll(&self, state: &mut State) {
        let mut k = self.kernel.lock().unwrap();
        for whose in [DOZER, OTHER] {
            if std::mem::take(&mut k.queued[whose]) {
                state.arrived[whose] = true;
                k.bells[whose] = true;
                self.changed.notify_all();
            }
        }
    }

    /// `arm`. Gives whether the message has come.
    fn arm(&self, whose: usize) -> bool {
        let mut state = self.state.lock().unwrap();
        if self.unread.swap(0, SeqCst) != 0 {
            let mut k = self.kernel.lock().unwrap();
            k.events = k.events.saturating_sub(1);
        }
        self.kernel.lock().unwrap().armed = true;
        self.poll(&mut state);
        state.arrived[whose]
    }

    /// Sleeps until `over`.
    fn sleep(&self, over: impl Fn(&Kernel) -> bool) -> loom::sync::MutexGuard<'_, Kernel> {
        let mut k = self.kernel.lock().unwrap();
        while !over(&k) {
            k = self.changed.wait(k).unwrap();
        }
        k
    }

    /// A thread that dozes until its message has come, and never sleeps again.
    fn doze(&self) {
        while !self.arm(DOZER) {
            let mut k = self.sleep(|k| k.events > 0 || k.bells[DOZER]);
            k.bells[DOZER] = false;
            if k.events > 0 && self.hasty {
                k.events -= 1;
            } else if k.events > 0 {
                self.unread.swap(1, SeqCst);
            }
            drop(k);
            if self.state.lock().unwrap().arrived[DOZER] {
                return;
            }
        }
    }

    /// A thread that only its bell wakes.
    fn wait(&self) {
        while !self.arm(OTHER) {
            self.sleep(|k| k.bells[OTHER]).bells[OTHER] = false;
        }
    }

    /// The engine, while it watches the channel.
    fn watch(&self) {
        loop {
            self.arm(OTHER);
            let mut k = self.sleep(|k| k.events > 0 || k.end);
            if k.end {
                return;
            }
            k.events -= 1;
            drop(k);
            // (A look that finds the lock taken finds nothing.)
            if let Ok(mut state) = self.state.try_lock() {
                self.poll(&mut state);
            }
        }
    }
}

fn run(hasty: bool) {
    let m = Model::new(hasty);
    let start = |f: fn(&Model)| {
        let m = m.clone();
        thread::spawn(move || f(&m))
    };
    let (dozer, other, engine) = (start(Model::doze), start(Model::wait), start(Model::watch));
    m.deliver(DOZER);
    m.deliver(OTHER);
    dozer.join().expect("the thread that dozes");
    other.join().expect("the other thread");
    m.kernel.lock().unwrap().end = true;
    m.changed.notify_all();
    engine.join().expect("the engine");
}

#[test]
fn an_event_that_one_thread_leaves_wakes_the_others() {
    check(2, || run(false));
}

#[test]
#[should_panic(expected = "deadlock")]
fn an_event_taken_without_arming_is_slept_over() {
    check(2, || run(true));
}
