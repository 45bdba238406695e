//! The link groups of this process, and looking at them.
//!
//! Whoever waits for something looks at the completion queues of all groups: program threads while they spin, the
//! engine when a completion channel says so. Before a thread sleeps it arms them. A group leaves the table under the
//! dispatch lock, which everybody who looks holds, so it can be freed afterwards.

use core::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32};

use super::Group;
use crate::stream::Owner;
use crate::{node, sys};

/// Most link groups of one node.
pub const GROUPS: usize = 64;

static TABLE: [AtomicPtr<Group>; GROUPS] =
    [const { AtomicPtr::new(core::ptr::null_mut()) }; GROUPS];
/// Entries of the table that may be in use: the first so many.
static COUNT: AtomicU32 = AtomicU32::new(0);
/// Looks at completion queues by threads other than the engine's; lets the engine see that it is not needed.
static POLLS: AtomicU32 = AtomicU32::new(0);

/// Something was posted since devices were last let work.
static POSTED: AtomicBool = AtomicBool::new(false);

/// Notes that something was posted.
pub(super) fn posted() {
    POSTED.store(true, Relaxed);
}

/// The calling thread is about to sleep, on the only core. A device that is made of software (soft-RoCE) sends by a kernel
/// thread, which could not run until then: it goes first, and what prepares the sleep is done while the peer is at work.
pub fn let_devices_work() {
    if POSTED.load(Relaxed) && POSTED.swap(false, Relaxed) {
        sys::sched_yield();
    }
}

/// Looks at the completion queues of all link groups, and routes what has arrived; signals may be sent. One load
/// when there are none. True: something has. Not under a stream's locks: see [`poll_inside`].
#[inline]
pub fn poll() -> bool {
    if COUNT.load(Relaxed) == 0 {
        return false;
    }
    poll_all(Group::urgent_owner)
}

/// As [`poll`], under a stream's lock: the engine sends the signals.
pub fn poll_inside() -> bool {
    poll_all(|g, _| g.signal_later())
}

#[cold]
fn poll_all(signal: impl Fn(&Group, &mut Option<Owner>)) -> bool {
    POLLS.fetch_add(1, Relaxed);
    let Some(locked) = node::dispatch_lock().try_lock() else {
        return false;
    };
    let (mut news, mut owner) = (false, None);
    each(|g| {
        news |= g.poll();
        signal(g, &mut owner);
    });
    drop(locked);
    // Now: a handler of this thread may run here.
    if let Some(owner) = owner {
        owner.send_sigurg();
    }
    news
}

/// Calls `f` for each link group. Under the dispatch lock, or by the engine.
fn each(mut f: impl FnMut(&Group)) {
    for t in TABLE.iter().take(COUNT.load(Acquire) as usize) {
        // SAFETY: a group leaves the table, under the dispatch lock and by the engine, before it is freed.
        if let Some(g) = unsafe { t.load(Acquire).as_ref() } {
            f(g);
        }
    }
}

/// How long an exiting process waits for peers to have what it has sent, ns.
const FLUSH_NS: u64 = 1_000_000_000;
/// How long it then waits for peers to close another of their ends, ns. A peer that doesn't has got the end of the stream
/// all the same; but with the queue pair gone, its host will be slow to clean up, and Linux may never get rid of those that
/// it was about to close.
const PARTING_NS: u64 = 250_000_000;
/// And how long altogether, ns: a host that closes hundreds needs milliseconds for each.
const PARTINGS_NS: u64 = 2_000_000_000;
/// How long the last messages of link groups may take, ns.
const LAST_WORDS_NS: u64 = 100_000_000;

/// The process exits, and its queue pairs with it: waits, shortly, until peers have everything and know that
/// link groups without connections end. `end` has the engine end them.
pub fn linger(end: impl FnOnce()) {
    if COUNT.load(Relaxed) == 0 {
        return;
    }
    flush();
    wait_for_partings();
    end();
    wait_for(LAST_WORDS_NS, |g| {
        !g.is_empty() || g.is_down() && g.is_quiet()
    });
}

/// Waits, shortly, until peers have everything that was sent.
pub fn flush() {
    if COUNT.load(Relaxed) != 0 {
        wait_for(FLUSH_NS, Group::is_flushed);
    }
}

/// Waits until peers have closed their ends of all connections, or close no more of them.
fn wait_for_partings() {
    let limit = sys::now_ns() + PARTINGS_NS;
    let (mut least, mut until) = (usize::MAX, 0);
    loop {
        let mut open = 0;
        {
            let Some(_g) = node::dispatch_lock().lock() else {
                return;
            };
            each(|g| {
                g.poll();
                open += g.with(|state| state.open()).unwrap_or(0);
            });
        }
        let now = sys::now_ns();
        if open < least {
            (least, until) = (open, limit.min(now + PARTING_NS));
        }
        if open == 0 || now > until {
            return;
        }
        sys::sleep_us(100);
    }
}

/// Waits until all groups are `ready`, at most `ns`.
fn wait_for(ns: u64, ready: impl Fn(&Group) -> bool) {
    let until = sys::now_ns() + ns;
    loop {
        let mut done = true;
        {
            let Some(_g) = node::dispatch_lock().lock() else {
                return;
            };
            each(|g| {
                g.poll();
                done &= ready(g);
            });
        }
        if done || sys::now_ns() > until {
            return;
        }
        sys::sleep_us(100);
    }
}

/// Has link groups looked at by whoever waits. False: there are too many. Engine.
pub fn add(g: &Group) -> bool {
    let Some(_g) = node::dispatch_lock().lock() else {
        return false;
    };
    let Some(i) = TABLE.iter().position(|t| t.load(Relaxed).is_null()) else {
        return false;
    };
    TABLE[i].store((g as *const Group).cast_mut(), Release);
    let count = COUNT.load(Relaxed).max(i as u32 + 1);
    COUNT.store(count, Release);
    true
}

/// Nobody looks at the group any more once this has returned. Engine.
pub fn remove(g: &Group) {
    let _g = node::dispatch_lock().lock();
    for t in &TABLE {
        if core::ptr::eq(t.load(Relaxed), g) {
            t.store(core::ptr::null_mut(), Release);
        }
    }
    let last = TABLE.iter().rposition(|t| !t.load(Relaxed).is_null());
    COUNT.store(last.map_or(0, |i| i as u32 + 1), Release);
}

/// Has arrivals wake the engine, which rings the bells; what has arrived before is routed now.
#[inline]
pub fn arm() {
    if COUNT.load(Relaxed) != 0 {
        arm_all();
    }
}

#[cold]
fn arm_all() {
    let mut owner = None;
    if let Some(_g) = node::dispatch_lock().lock() {
        each(|g| {
            g.arm();
            g.urgent_owner(&mut owner);
        });
    }
    if let Some(owner) = owner {
        owner.send_sigurg();
    }
}

/// How often the engine looks after link groups whose completion queues are looked at by others, milliseconds.
pub const BUSY_LOOK_MS: i32 = 20;

/// How often threads have looked at the completion queues.
pub fn polls() -> u32 {
    POLLS.load(Relaxed)
}

/// In the child of a fork: none.
pub fn after_fork_child() {
    for t in &TABLE {
        t.store(core::ptr::null_mut(), Relaxed);
    }
    COUNT.store(0, Relaxed);
}
