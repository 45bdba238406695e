//! A small futex lock for process-private state.
//!
//! Unlike `std::sync::Mutex` it knows its owner, so that three things can be told apart: another
//! thread holds it (wait), this thread holds it (we are in a signal handler that interrupted the
//! holder: waiting would never end), or the owner is gone (cancelled asynchronously, or not copied
//! by fork: the lock is taken over).
//!
//! Word: 0 free; otherwise the owner's thread id, with the top bit set once somebody waits.

use core::sync::atomic::AtomicU32;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use crate::{sys, thread};

const WAITERS: u32 = 1 << 31;

/// The calling thread's kernel id, cached.
#[inline]
pub fn tid() -> u32 {
    thread::with(|w| {
        if w.tid.get() == 0 {
            w.tid.set(sys::gettid());
        }
        w.tid.get()
    })
}

/// Forgets the cached id: for the child of a fork.
pub fn forget_tid() {
    thread::with(|w| w.tid.set(0));
}

/// See the module comment.
#[repr(transparent)]
pub struct Lock(AtomicU32);

/// Holds the lock until dropped.
pub struct Guard<'a>(&'a Lock);

impl Lock {
    /// A free lock.
    pub const fn new() -> Self {
        Lock(AtomicU32::new(0))
    }

    /// Takes the lock. `None`: this thread holds it already.
    #[inline]
    pub fn lock(&self) -> Option<Guard<'_>> {
        let me = tid();
        if self.0.compare_exchange(0, me, Acquire, Relaxed).is_ok() {
            return Some(Guard(self));
        }
        self.lock_slow(me)
    }

    /// Whether this thread holds the lock.
    pub fn is_mine(&self) -> bool {
        self.0.load(Relaxed) & !WAITERS == tid()
    }

    /// Takes the lock if it is free.
    #[inline]
    pub fn try_lock(&self) -> Option<Guard<'_>> {
        self.0
            .compare_exchange(0, tid(), Acquire, Relaxed)
            .ok()
            .map(|_| Guard(self))
    }

    #[cold]
    fn lock_slow(&self, me: u32) -> Option<Guard<'_>> {
        let mut spins = 0;
        loop {
            let w = self.0.load(Relaxed);
            if w & !WAITERS == me {
                return None;
            }
            if w == 0 {
                // Others may be waiting: keep their bit, so that our unlock wakes one.
                let mine = if spins > 100 { me | WAITERS } else { me };
                if self.0.compare_exchange(0, mine, Acquire, Relaxed).is_ok() {
                    return Some(Guard(self));
                }
                continue;
            }
            spins += 1;
            if spins < 100 {
                core::hint::spin_loop();
                continue;
            }
            let waiting = w | WAITERS;
            if w == waiting
                || self
                    .0
                    .compare_exchange(w, waiting, Relaxed, Relaxed)
                    .is_ok()
            {
                sys::futex_wait(&self.0, waiting, 100);
                let owner = w & !WAITERS;
                if self.0.load(Relaxed) == waiting
                    && !sys::thread_alive(owner)
                    && self
                        .0
                        .compare_exchange(waiting, me | WAITERS, Acquire, Relaxed)
                        .is_ok()
                {
                    return Some(Guard(self));
                }
            }
        }
    }

    /// Makes the lock free whoever held it: for the child of a fork, which has no other threads.
    pub fn reset(&self) {
        self.0.store(0, Relaxed);
    }

    /// Takes the lock for good (paired with [`Lock::unlock`]): for code whose critical section
    /// spans fork. False: this thread holds it already.
    pub fn acquire(&self) -> bool {
        self.lock().map(core::mem::forget).is_some()
    }

    /// Frees a lock taken by [`Lock::acquire`].
    pub fn unlock(&self) {
        if self.0.swap(0, Release) & WAITERS != 0 {
            sys::futex_wake(&self.0);
        }
    }
}

impl Default for Lock {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Guard<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.unlock();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn excludes_and_wakes() {
        struct Shared(Lock, core::cell::UnsafeCell<u64>);
        // SAFETY: the cell is only touched under the lock; that is what the test checks.
        unsafe impl Sync for Shared {}
        let s = Arc::new(Shared(Lock::new(), core::cell::UnsafeCell::new(0)));
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let s = s.clone();
                std::thread::spawn(move || {
                    for _ in 0..20_000 {
                        let _g = s.0.lock().unwrap();
                        // SAFETY: under the lock.
                        unsafe { *s.1.get() += 1 };
                    }
                })
            })
            .collect();
        for t in threads {
            t.join().unwrap();
        }
        // SAFETY: all threads have ended.
        assert_eq!(unsafe { *s.1.get() }, 80_000);
    }

    #[test]
    fn own_lock_is_told() {
        let l = Lock::new();
        let g = l.lock().unwrap();
        assert!(l.lock().is_none());
        drop(g);
        assert!(l.lock().is_some());
    }

    #[test]
    fn dead_owner_is_replaced() {
        let l = Arc::new(Lock::new());
        let l2 = l.clone();
        std::thread::spawn(move || core::mem::forget(l2.lock().unwrap()))
            .join()
            .unwrap();
        assert!(l.lock().is_some());
    }
}
