//! Readiness: epoll sets, poll and select over kernel descriptors and rings together.
//!
//! - [`Set`] and `epoll`: one epoll instance; `wait`: epoll_wait; `nested`: epoll sets that are watched
//!   themselves;
//! - `poll`: poll and select.
//!
//! A set works like the kernel's: events push registrations into a ready bitmap, and waiting
//! harvests the bitmap, computes what each pushed registration is ready for *now*, and reports that.
//! Cost follows activity. The program's epoll instance keeps its kernel registrations; those of managed
//! connections are re-armed edge-triggered with a cookie, so that the kernel only reports news on the
//! TCP socket (FIN, RST, bytes), which becomes a push like any other.

mod epoll;
mod nested;
mod poll;
mod wait;

use core::cell::UnsafeCell;
use core::ptr::null_mut;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicU64, fence};

use crate::bitmap::{BITS, Bitmap};
use crate::lock::Lock;
use crate::node;
use crate::pool::{Pool, Pooled};
use crate::stream::Sock;

pub use epoll::{ctl, forget, give_back, manage, prepare, unmanage};
pub use poll::{poll, select};
pub use wait::epoll_wait;

const REGS_PER_CHUNK: usize = 64;

/// One descriptor in an epoll set.
#[derive(Default)]
pub(crate) struct Reg {
    sock: AtomicPtr<Sock>,
    /// Pool index + 1 of an epoll set that is watched by this one; 0: a socket is.
    child: AtomicU32,
    fd: AtomicI32,
    /// The program's event mask, flags included.
    events: AtomicU32,
    /// The program's data.
    data: AtomicU64,
    /// `R_*`.
    state: AtomicU32,
}

const R_USED: u32 = 1;
/// The kernel registration is ours; readiness is computed here.
const R_MANAGED: u32 = 2;
/// EPOLLONESHOT has fired.
const R_DISARMED: u32 = 4;
/// The program has deleted it; the kernel registration of the managed connection stays, so that
/// adding it again needs no system call.
const R_PARKED: u32 = 8;

/// An epoll instance. All-zero is a free one.
#[derive(Default)]
pub struct Set {
    free: UnsafeCell<u32>,
    index: AtomicU32,
    /// A descriptor of the instance.
    pub epfd: AtomicI32,
    /// Descriptors of it in this process.
    pub refs: AtomicU32,
    /// Guards registrations and harvests.
    lock: Lock,
    regs: RegTable,
    /// Registrations ever used; the free ones below are found by scanning.
    used: AtomicU32,
    /// Managed registrations.
    managed: AtomicU32,
    /// How many the kernel has got back so far; wraps. Changes under the lock.
    given_back: AtomicU32,
    /// Bell + 1.
    bell: AtomicU32,
    /// Threads asleep in the kernel on this instance.
    sleepers: AtomicU32,
    /// Epoll sets that this one watches.
    children: AtomicU32,
    /// The kernel's instance carries cookies or a bell of the process that we were forked from.
    foreign: AtomicU32,
    ready: Bitmap,
    /// Events taken from the kernel while somebody only looked, to be reported at the next wait.
    stash: nested::Stash,
    /// Where the next harvest begins, for fairness.
    next: AtomicU32,
    /// When the kernel was last looked at, ns.
    looked: AtomicU64,
    /// The next wait asks the rings before the kernel: there was no room for theirs the last time.
    rings_first: AtomicBool,
    spin_ns: AtomicU32,
}

struct RegTable([AtomicPtr<Reg>; BITS / REGS_PER_CHUNK]);

impl Default for RegTable {
    fn default() -> Self {
        RegTable([const { AtomicPtr::new(null_mut()) }; BITS / REGS_PER_CHUNK])
    }
}

// SAFETY: atomics throughout; `free` belongs to the pool.
unsafe impl Sync for Set {}
// SAFETY: all-zero bytes are the default value.
unsafe impl Pooled for Set {
    fn link(&self) -> &UnsafeCell<u32> {
        &self.free
    }
}

/// All epoll instances of this process.
pub static POOL: Pool<Set> = Pool::new();

/// Names a registration: set and position.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RegRef {
    set: u32,
    reg: u32,
}

impl RegRef {
    /// As one word, never 0.
    pub fn pack(self) -> u64 {
        u64::from(self.set) << 32 | u64::from(self.reg) | 1 << 31
    }
    /// The reverse of [`RegRef::pack`].
    pub fn unpack(w: u64) -> Option<RegRef> {
        (w != 0).then_some(RegRef {
            set: (w >> 32) as u32,
            reg: w as u32 & 0x7fff_ffff,
        })
    }
    fn set(self) -> Option<&'static Set> {
        POOL.get(self.set)
    }
}

impl Set {
    /// A new set for `epfd`, entered in the descriptor table. `None`: the instance stays unknown.
    pub fn create(epfd: i32) -> Option<&'static Set> {
        let (index, s) = POOL.alloc()?;
        s.index.store(index, Relaxed);
        s.epfd.store(epfd, Relaxed);
        s.refs.store(1, Relaxed);
        s.used.store(0, Relaxed);
        s.managed.store(0, Relaxed);
        s.bell.store(0, Relaxed);
        s.sleepers.store(0, Relaxed);
        s.foreign.store(0, Relaxed);
        s.stash.clear();
        s.children.store(0, Relaxed);
        s.ready.drain(|_| {});
        if !crate::fds::set_set(epfd, s) {
            POOL.free(index);
            return None;
        }
        Some(s)
    }

    /// The last descriptor has been closed.
    pub fn closed(&self) {
        {
            let _g = self.lock.lock();
            for i in 0..self.used.load(Relaxed) {
                let Some(r) = self.reg(i) else { continue };
                if r.state.swap(0, SeqCst) & (R_USED | R_PARKED) != 0 {
                    // SAFETY: streams are type-stable.
                    if let Some(s) = unsafe { r.sock.load(Acquire).as_ref() } {
                        self.unlink(s, i);
                    }
                }
            }
            let bell = self.bell.swap(0, SeqCst);
            if bell != 0 {
                node::release_bell(bell - 1);
            }
        }
        POOL.free(self.index.load(Relaxed));
    }

    fn unlink(&self, s: &Sock, reg: u32) {
        let me = RegRef {
            set: self.index.load(Relaxed),
            reg,
        }
        .pack();
        let _g = s.watch.lock();
        for r in &s.regs {
            if r.load(Relaxed) == me {
                r.store(0, SeqCst);
            }
        }
        // `renotify` reads bells of sets without their locks, so it may run under ours.
        s.renotify();
    }

    fn reg(&self, i: u32) -> Option<&Reg> {
        let p = self.regs.0.get(i as usize / REGS_PER_CHUNK)?.load(Acquire);
        // SAFETY: chunks hold REGS_PER_CHUNK registrations and are never unmapped.
        (!p.is_null()).then(|| unsafe { &*p.add(i as usize % REGS_PER_CHUNK) })
    }

    /// A free registration. Under the lock.
    fn alloc_reg(&self) -> Option<(u32, &Reg)> {
        let used = self.used.load(Relaxed);
        for i in 0..used {
            if let Some(r) = self.reg(i)
                && r.state.load(Relaxed) == 0
            {
                return Some((i, r));
            }
        }
        let chunk = self.regs.0.get(used as usize / REGS_PER_CHUNK)?;
        if chunk.load(Relaxed).is_null() {
            chunk.store(
                crate::sys::map(-1, REGS_PER_CHUNK * size_of::<Reg>())
                    .ok()?
                    .cast(),
                Release,
            );
        }
        self.used.store(used + 1, Relaxed);
        Some((used, self.reg(used)?))
    }

    fn bell(&self) -> u32 {
        self.bell.load(Relaxed)
    }

    /// Whether a spinning watcher should look again. Without locks.
    fn news(&self) -> bool {
        self.ready.any() || node::page().links.any()
    }

    /// What was pushed and not reported must not be slept over by another thread.
    fn pass_on(&self) {
        fence(SeqCst);
        if self.sleepers.load(SeqCst) > 0 && self.ready.any() {
            self.wake();
        }
    }

    /// Wakes a thread that sleeps on this set. After a push and a `SeqCst` fence.
    fn wake(&self) {
        let b = self.bell.load(Relaxed);
        if b != 0 {
            node::ring_own(b - 1);
        }
    }

    /// The lock, for fork.
    pub fn guard(&self) -> &Lock {
        &self.lock
    }

    /// In the child of a fork: no bell. Managed registrations stay so: the kernel's epoll instance,
    /// with our cookies in it, is shared with the parent and must not be changed under it.
    pub fn after_fork_child(&self) {
        self.lock.reset();
        if self.bell.swap(0, Relaxed) != 0 {
            self.foreign.store(1, Relaxed);
        }
        self.sleepers.store(0, Relaxed);
    }

    /// Whether the kernel may report events of our own.
    fn touched(&self) -> bool {
        self.managed.load(SeqCst) != 0
            || self.bell.load(SeqCst) != 0
            || self.foreign.load(Relaxed) != 0
    }
}

/// Marks a registration as possibly ready, and wakes its set's sleeper. Any thread, no locks.
pub fn push(r: RegRef) {
    if let Some(set) = r.set() {
        fence(SeqCst);
        set.ready.set(r.reg);
        set.wake();
    }
}

/// The bell of a registration's set (the engine's if it has none).
pub fn bell_of(r: RegRef) -> u32 {
    match r.set().map_or(0, |s| s.bell.load(Relaxed)) {
        0 => node::ENGINE_BELL,
        b => b - 1,
    }
}
