//! The descriptor table: which number is a stream, an epoll set or one of our own descriptors.
//!
//! One word a number, 0 for everything we don't care about: the hooks' fast path is a bounds check,
//! a load and a compare. Objects are type-stable, so a stale entry is never a dangling pointer, and
//! the data path looks here again once it holds the object's lock.

use core::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, fence};

use crate::lock::Lock;
use crate::ready::Set;
use crate::stream::Sock;
use crate::{sys, thread};

/// Numbers above this are never accelerated.
pub const MAX_FD: usize = 1 << 18;

static TABLE: [AtomicUsize; MAX_FD] = [const { AtomicUsize::new(0) }; MAX_FD];

const SOCK: usize = 1;
const SET: usize = 2;
const PRIVATE: usize = 3;

/// What a number stands for.
#[derive(Clone, Copy)]
pub enum Entry {
    /// A TCP socket.
    Sock(&'static Sock),
    /// An epoll instance.
    Set(&'static Set),
    /// A descriptor of the library itself.
    Private,
}

/// Looks `fd` up. `None`: not ours.
#[inline]
pub fn lookup(fd: i32) -> Option<Entry> {
    let w = TABLE.get(fd as usize)?.load(Acquire);
    if w == 0 { None } else { decode(w) }
}

#[inline]
fn decode(w: usize) -> Option<Entry> {
    let p = w & !3;
    // SAFETY: only `set_sock` and `set_set` store tagged pointers, to objects that live for ever.
    unsafe {
        match w & 3 {
            SOCK => Some(Entry::Sock(&*(p as *const Sock))),
            SET => Some(Entry::Set(&*(p as *const Set))),
            PRIVATE => (!thread::with(|w| w.trusted.get())).then_some(Entry::Private),
            _ => None,
        }
    }
}

/// Runs a call into a library that works on descriptors of ours. Its system calls come back through the
/// hooks, which would treat it as a program that uses a number it doesn't own.
#[inline]
pub fn trusted<T>(f: impl FnOnce() -> T) -> T {
    let before = thread::with(|w| w.trusted.replace(true));
    let result = f();
    thread::with(|w| w.trusted.set(before));
    result
}

/// The stream at `fd`, if it is one.
#[inline]
pub fn sock(fd: i32) -> Option<&'static Sock> {
    match lookup(fd) {
        Some(Entry::Sock(s)) => Some(s),
        _ => None,
    }
}

/// The epoll set at `fd`, if it is one.
#[inline]
pub fn set(fd: i32) -> Option<&'static Set> {
    match lookup(fd) {
        Some(Entry::Set(s)) => Some(s),
        _ => None,
    }
}

/// Whether `fd` still stands for `s`.
#[inline]
pub fn is_sock(fd: i32, s: &Sock) -> bool {
    TABLE
        .get(fd as usize)
        .is_some_and(|t| t.load(Acquire) == s as *const Sock as usize | SOCK)
}

/// The table takes no more streams and sets.
static GIVEN_UP: AtomicBool = AtomicBool::new(false);

/// From now on no stream and no epoll set becomes known: see `posix::confine`.
pub fn give_up() {
    GIVEN_UP.store(true, SeqCst);
}

/// Whether [`give_up`] was called.
pub fn given_up() -> bool {
    GIVEN_UP.load(Relaxed)
}

fn store(fd: i32, w: usize) -> bool {
    if w > PRIVATE && given_up() {
        return false;
    }
    match TABLE.get(fd as usize) {
        Some(t) => {
            t.store(w, Release);
            if w != 0 {
                HIGHEST.fetch_max(fd as usize, Relaxed);
            }
            true
        }
        None => false,
    }
}

static HIGHEST: AtomicUsize = AtomicUsize::new(0);

/// Enters a stream. False: the number is too high.
pub fn set_sock(fd: i32, s: &'static Sock) -> bool {
    store(fd, s as *const Sock as usize | SOCK)
}

/// Enters an epoll set. False: the number is too high.
pub fn set_set(fd: i32, s: &'static Set) -> bool {
    store(fd, s as *const Set as usize | SET)
}

/// Forgets a number.
pub fn clear(fd: i32) {
    store(fd, 0);
}

/// Held while a descriptor of ours is being made: see [`make_private`].
static MAKING: Lock = Lock::new();
/// Non-zero while it is held.
static WINDOW: AtomicU32 = AtomicU32::new(0);
/// Program threads inside a call that closes numbers.
static CLOSING: AtomicU32 = AtomicU32::new(0);

/// Makes descriptors of our own by `f`, which hands each to the function it gets and goes on with what that
/// returns: the descriptor at a high number, protected from the program's close, dup2 and close_range.
///
/// A new descriptor first has the lowest free number. A program that closes numbers it does not own (every
/// daemon does), or duplicates onto one it believes free, must not hit it there: such calls and this
/// window exclude each other, as does fork.
pub fn make_private<T>(f: impl FnOnce(&dyn Fn(i32) -> i32) -> T) -> T {
    let _g = MAKING.lock();
    WINDOW.store(1, SeqCst);
    fence(SeqCst);
    // Bounded: a thread may have been cancelled inside.
    for _ in 0..1000 {
        if CLOSING.load(SeqCst) == 0 {
            break;
        }
        sys::sched_yield();
    }
    let r = f(&|fd| {
        let high = sys::move_high(fd);
        store(high, PRIVATE);
        high
    });
    WINDOW.store(0, SeqCst);
    r
}

/// Runs a call of the program's that closes numbers outside the window of [`make_private`].
#[inline]
pub fn closing<T>(real: impl FnOnce() -> T) -> T {
    CLOSING.fetch_add(1, SeqCst);
    let mut turns = 0;
    // (The window's own thread closes files, too.)
    while WINDOW.load(SeqCst) != 0 && !MAKING.is_mine() && turns < 1000 {
        CLOSING.fetch_sub(1, SeqCst);
        sys::sched_yield();
        CLOSING.fetch_add(1, SeqCst);
        turns += 1;
    }
    let r = real();
    CLOSING.fetch_sub(1, SeqCst);
    r
}

/// The lock of [`make_private`], for fork.
pub fn making_lock() -> &'static Lock {
    &MAKING
}

/// Closes one of our own descriptors.
pub fn close_private(fd: i32) {
    if fd >= 0 {
        clear(fd);
        sys::close(fd);
    }
}

/// Calls `f` for each entry in `first..=last`.
pub fn each(first: u32, last: u32, mut f: impl FnMut(i32, Entry)) {
    let end = (last as usize).min(HIGHEST.load(Relaxed));
    for fd in first as usize..=end {
        if let Some(e) = lookup(fd as i32) {
            f(fd as i32, e);
        }
    }
}

/// In the child of a fork: our own descriptors belong to the parent's engine; close the copies.
pub fn after_fork_child() {
    MAKING.reset();
    WINDOW.store(0, Relaxed);
    CLOSING.store(0, Relaxed);
    each(0, u32::MAX, |fd, e| {
        if matches!(e, Entry::Private) {
            close_private(fd);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trusted_calls_reach_private_descriptors() {
        let fd = make_private(|keep| sys::eventfd().map(keep)).unwrap();
        assert!(matches!(lookup(fd), Some(Entry::Private)));
        trusted(|| {
            assert!(lookup(fd).is_none());
            trusted(|| ());
            assert!(lookup(fd).is_none(), "the inner call ended the outer one");
        });
        assert!(matches!(lookup(fd), Some(Entry::Private)));
        close_private(fd);
    }
}
