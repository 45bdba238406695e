//! Type-stable objects: memory that once held a `T` holds a `T` for ever.
//!
//! A thread may still hold a reference to an object that another thread has just given back (a close
//! racing with a read). With type-stable memory that is a logical error it can detect, by looking again
//! under the object's lock, and never an access to freed memory. Objects come from mmap, not from the
//! program's allocator, so that hooks may run inside an allocator or a signal handler.

use core::cell::UnsafeCell;
use core::mem::size_of;
use core::ptr::null_mut;
use core::sync::atomic::AtomicPtr;
use core::sync::atomic::Ordering::{Acquire, Release};

use crate::lock::Lock;
use crate::sys;

const PER_CHUNK: usize = 256;
const CHUNKS: usize = 1024;

/// An object that can live in a [`Pool`].
///
/// # Safety
/// All-zero bytes must be a valid value.
pub unsafe trait Pooled: Sync + 'static {
    /// Where the pool keeps the index of the next free object.
    fn link(&self) -> &UnsafeCell<u32>;
}

/// See the module comment.
pub struct Pool<T: Pooled> {
    lock: Lock,
    /// Head of the free list (index + 1) and number of objects ever made; under the lock.
    state: UnsafeCell<(u32, u32)>,
    chunks: [AtomicPtr<T>; CHUNKS],
}

// SAFETY: `state` is only touched under `lock`; T is Sync.
unsafe impl<T: Pooled> Sync for Pool<T> {}

impl<T: Pooled> Pool<T> {
    /// An empty pool.
    #[allow(clippy::declare_interior_mutable_const)]
    pub const fn new() -> Self {
        const fn null<T>() -> AtomicPtr<T> {
            AtomicPtr::new(null_mut())
        }
        Pool {
            lock: Lock::new(),
            state: UnsafeCell::new((0, 0)),
            chunks: [const { null() }; CHUNKS],
        }
    }

    /// The object with index `i`, if it was ever made.
    pub fn get(&self, i: u32) -> Option<&'static T> {
        let p = self.chunks.get(i as usize / PER_CHUNK)?.load(Acquire);
        if p.is_null() {
            return None;
        }
        // SAFETY: chunks hold PER_CHUNK valid objects and are never unmapped.
        Some(unsafe { &*p.add(i as usize % PER_CHUNK) })
    }

    /// Takes an object: zeroed, or as its last user left it. `None` when memory is short, or inside
    /// a signal handler that interrupted this very function.
    pub fn alloc(&self) -> Option<(u32, &'static T)> {
        let _g = self.lock.lock()?;
        // SAFETY: under the lock.
        let state = unsafe { &mut *self.state.get() };
        if state.0 != 0 {
            let i = state.0 - 1;
            let t = self.get(i)?;
            // SAFETY: under the lock, and the object is free: nobody else uses its link.
            state.0 = unsafe { *t.link().get() };
            return Some((i, t));
        }
        let i = state.1;
        let chunk = self.chunks.get(i as usize / PER_CHUNK)?;
        if (i as usize).is_multiple_of(PER_CHUNK) && chunk.load(Acquire).is_null() {
            chunk.store(
                sys::map(-1, PER_CHUNK * size_of::<T>()).ok()?.cast(),
                Release,
            );
        }
        state.1 += 1;
        Some((i, self.get(i)?))
    }

    /// Gives object `i` back.
    pub fn free(&self, i: u32) {
        let (Some(t), Some(_g)) = (self.get(i), self.lock.lock()) else {
            return;
        };
        // SAFETY: under the lock; the object is no longer in use by its owner.
        unsafe {
            let state = &mut *self.state.get();
            *t.link().get() = state.0;
            state.0 = i + 1;
        }
    }

    /// Calls `f` for every object ever made, free ones included.
    pub fn each(&self, mut f: impl FnMut(u32, &'static T)) {
        let n = {
            let _g = self.lock.lock();
            // SAFETY: under the lock, or in a handler that interrupted it: then the count may be one off.
            unsafe { (*self.state.get()).1 }
        };
        for i in 0..n {
            if let Some(t) = self.get(i) {
                f(i, t);
            }
        }
    }

    /// The pool's lock: fork takes it, so that the child finds the list whole.
    pub fn guard(&self) -> &Lock {
        &self.lock
    }
}

impl<T: Pooled> Default for Pool<T> {
    fn default() -> Self {
        Self::new()
    }
}
