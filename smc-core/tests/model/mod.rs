//! What the model checks share: atomics with loom's behaviour, and how a model is run.
//!
//! loom takes a `SeqCst` access for an `AcqRel` one; only its `SeqCst` fences are in one total order. So here a
//! `SeqCst` access is an access with a fence, and each model runs twice: with all fences before the accesses, then
//! with all behind. Both are correct ways to compile; what is between the accesses is ordered by neither.
#![allow(dead_code, unreachable_pub)]

use std::cell::Cell;
use std::sync::OnceLock;

pub use loom::sync::atomic::{Ordering, fence};

std::thread_local! {
    /// Where the fences go. (All threads of a model are fibres of one thread.)
    static BEFORE: Cell<bool> = const { Cell::new(true) };
}

/// Makes an access of order `o`, for which `weaker` stands where a fence does the rest.
fn access<T>(o: Ordering, weaker: Ordering, f: impl FnOnce(Ordering) -> T) -> T {
    if o != Ordering::SeqCst {
        return f(o);
    }
    let before = BEFORE.with(Cell::get);
    if before {
        fence(Ordering::SeqCst);
    }
    let r = f(weaker);
    if !before {
        fence(Ordering::SeqCst);
    }
    r
}

macro_rules! atomic {
    ($name:ident, $int:ty) => {
        /// Stands for core's type of the same name.
        #[derive(Default)]
        pub struct $name(OnceLock<(loom::sync::atomic::$name, loom::sync::atomic::AtomicU32)>);

        impl $name {
            /// A zero that loom gets to know on first use, as its objects can't be made in constants.
            /// That use must come before all uses by other threads.
            pub const fn new(v: $int) -> Self {
                assert!(v == 0);
                $name(OnceLock::new())
            }
            /// A value that loom knows at once.
            pub fn of(v: $int) -> Self {
                let new = $name::new(0);
                new.0.get_or_init(|| Self::make(v));
                new
            }
            fn make(v: $int) -> (loom::sync::atomic::$name, loom::sync::atomic::AtomicU32) {
                (
                    loom::sync::atomic::$name::new(v),
                    loom::sync::atomic::AtomicU32::new(0),
                )
            }
            /// loom remembers only the last access when it looks for accesses to try the other way
            /// round: a load hides another thread's load before it, so that "exchange unless it
            /// reads as clear" is never tried before that. So each access also counts up: it
            /// conflicts with every other, and orders nothing.
            fn inner(&self) -> &loom::sync::atomic::$name {
                let (word, step) = self.0.get_or_init(|| Self::make(0));
                step.fetch_add(1, Ordering::Relaxed);
                word
            }
            pub fn load(&self, o: Ordering) -> $int {
                access(o, Ordering::Acquire, |o| self.inner().load(o))
            }
            pub fn store(&self, v: $int, o: Ordering) {
                access(o, Ordering::Release, |o| self.inner().store(v, o))
            }
            /// A `SeqCst` store to a word that others exchange. An exchange comes right after the store that
            /// it read, so before the next store; loom does not know. As an exchange that acquires
            /// nothing, the store is in its place and orders no more than a store.
            pub fn put(&self, v: $int) {
                access(Ordering::SeqCst, Ordering::Release, |o| {
                    self.inner().swap(v, o)
                });
            }
            pub fn swap(&self, v: $int, o: Ordering) -> $int {
                access(o, Ordering::AcqRel, |o| self.inner().swap(v, o))
            }
            /// Whether it has been exchanged.
            pub fn exchange(&self, from: $int, to: $int) -> bool {
                access(Ordering::SeqCst, Ordering::AcqRel, |o| {
                    let r = self
                        .inner()
                        .compare_exchange(from, to, o, Ordering::Relaxed);
                    r.is_ok()
                })
            }
            pub fn fetch_add(&self, v: $int, o: Ordering) -> $int {
                access(o, Ordering::AcqRel, |o| self.inner().fetch_add(v, o))
            }
            pub fn fetch_sub(&self, v: $int, o: Ordering) -> $int {
                access(o, Ordering::AcqRel, |o| self.inner().fetch_sub(v, o))
            }
            pub fn fetch_or(&self, v: $int, o: Ordering) -> $int {
                access(o, Ordering::AcqRel, |o| self.inner().fetch_or(v, o))
            }
            pub fn fetch_and(&self, v: $int, o: Ordering) -> $int {
                access(o, Ordering::AcqRel, |o| self.inner().fetch_and(v, o))
            }
        }
    };
}

atomic!(AtomicU32, u32);
atomic!(AtomicU64, u64);

/// Runs `f` in all ways that need at most `preemptions` unforced changes of thread.
pub fn check(preemptions: usize, f: impl Fn() + Sync + Send + 'static) {
    let f = std::sync::Arc::new(f);
    for before in [true, false] {
        BEFORE.with(|b| b.set(before));
        let mut m = loom::model::Builder::new();
        m.preemption_bound = Some(preemptions);
        let f = f.clone();
        m.check(move || f());
    }
}

/// A bell: its sleep flag (`fabric::shm::Sleep`) and its eventfd, here a flag under a mutex.
pub struct Bell {
    flag: AtomicU32,
    naps: AtomicU32,
    rung: loom::sync::Mutex<bool>,
    wake: loom::sync::Condvar,
}

impl Bell {
    pub fn new() -> Self {
        Bell {
            flag: AtomicU32::of(0),
            naps: AtomicU32::of(0),
            rung: loom::sync::Mutex::new(false),
            wake: loom::sync::Condvar::new(),
        }
    }
    /// `node::about_to_sleep`.
    pub fn about_to_sleep(&self) {
        let nap = self.naps.fetch_add(1, Ordering::Relaxed) + 1;
        self.flag.put(nap);
        fence(Ordering::SeqCst);
    }
    /// `node::awake`.
    pub fn awake(&self) {
        self.flag.put(0);
    }
    /// `Link::ring` and `node::ring_own`.
    pub fn ring(&self) {
        self.ring_until(2);
    }
    /// The same by a waker that is killed, or interrupted, after so many steps.
    pub fn ring_until(&self, steps: u32) {
        let nap = self.flag.load(Ordering::SeqCst);
        if nap != 0 && steps > 0 {
            *self.rung.lock().expect("unpoisoned") = true;
            self.wake.notify_one();
            if steps > 1 {
                self.flag.exchange(nap, 0);
            }
        }
    }
    /// The kernel's sleep on the eventfd, which is drained afterwards. Never rung: a deadlock, which loom
    /// reports.
    pub fn sleep(&self) {
        let mut rung = self.rung.lock().expect("unpoisoned");
        while !*rung {
            rung = self.wake.wait(rung).expect("unpoisoned");
        }
        *rung = false;
    }
}
