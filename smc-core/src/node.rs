//! What the threads of this process share: bells, live links, and the dispatch of peers' events.
//!
//! **Bells.** A bell is an eventfd with a sleep flag in the node's [`BellPage`]. Bell 0 is the engine's.
//! Others belong to an epoll set or to a thread for as long as it lives. A sleeper sets its flag to a number that no
//! earlier nap had, executes a `SeqCst` fence, looks once more and then sleeps in the kernel; a waker changes something,
//! executes a `SeqCst` fence, and if it reads the flag as set writes the eventfd, and then changes the flag from the number
//! it read to 0. One of the two sees the other. The flag goes down after the eventfd is written, as a waker may be killed or
//! interrupted by a signal handler that is a waker itself: until then everybody else rings, too. A bell that a peer does not
//! know yet is answered by the engine's, and the engine dispatches on the sleeper's behalf.
//!
//! **Dispatch.** Events of peers arrive as bits in shared bitmaps. Whichever thread is awake takes
//! them out and routes each to the epoll sets and waiting threads of its connection. Taking happens
//! under one lock, so that the engine can unmap a link's memory once nobody is inside.

use core::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicU64, fence};

use crate::bitmap::Bitmap;
use crate::fabric::shm::{BELL_PAGE_LEN, BELLS, BellPage, ConnBlock, SLOTS, Segment};
use crate::link::{Group, table};
use crate::lock::{Lock, tid};
use crate::pool::{Pool, Pooled};
use crate::stream::Sock;
use crate::{sys, thread};

/// The engine's bell.
pub const ENGINE_BELL: u32 = 0;

/// Most links of one node.
pub const LINKS: usize = 1024;

/// Why a connection on a link can't go back to TCP, if it can't.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Kind {
    /// Shared memory: each direction may change its carrier at any time.
    Shm = 0,
    /// RDMA, as SMC-R: once on the RMB, a connection stays there.
    Rdma = 1,
    /// No link yet: the handshake of an SMC-R connection is under way. No bytes move.
    Limbo = 2,
}

/// A live channel to one peer, as the data path sees it. The engine keeps the rest.
#[repr(C)]
pub struct Link {
    free: core::cell::UnsafeCell<u32>,
    /// Shared with the peer.
    seg: AtomicPtr<Segment>,
    /// The peer node's wake-up hints.
    peer_bells: AtomicPtr<BellPage>,
    /// A [`Kind`].
    kind: AtomicU32,
    /// The link group behind an RDMA link: the other side of the segment.
    group: AtomicPtr<Group>,
    /// Our number in the segment: we send direction `side`.
    pub side: AtomicU32,
    /// Index of this link in the peer's bell page.
    pub peer_index: AtomicU32,
    /// The peer's bells; 0 where not (yet) announced, else descriptor + 1.
    pub bell_fds: [AtomicI32; BELLS],
    /// The peer process is gone.
    pub dead: AtomicBool,
    /// Our end of the link socket, for messages that must not wait for the engine.
    pub sock_fd: AtomicI32,
    /// The other end, where the peer is this very process.
    pub twin: AtomicPtr<Link>,
    /// The link is being given up: nothing more goes by its rings.
    pub leaving: AtomicBool,
    /// Our connections on it.
    pub used: AtomicU32,
    /// Our connections by slot.
    pub slots: [AtomicPtr<Sock>; SLOTS as usize],
}

// SAFETY: all fields are atomics but `free`, which the pool guards; all-zero is valid.
unsafe impl Pooled for Link {
    fn link(&self) -> &core::cell::UnsafeCell<u32> {
        &self.free
    }
}
// SAFETY: as above.
unsafe impl Sync for Link {}

impl Link {
    /// The shared segment. Valid while the link has slots in use or is in the table.
    #[inline]
    pub fn seg(&self) -> &Segment {
        // SAFETY: set before the link is published; unmapped only after all connections have been
        // detached under their locks and the link left the dispatch table under its lock.
        unsafe { &*self.seg.load(Relaxed) }
    }

    /// Completes the link: the peer's bell page, and our index in it.
    pub fn set_bells(&self, peer_bells: *mut BellPage, peer_index: u32) {
        self.peer_index.store(peer_index, Relaxed);
        self.peer_bells.store(peer_bells, Release);
    }

    fn peer_bells(&self) -> &BellPage {
        // SAFETY: as for `seg`.
        unsafe { &*self.peer_bells.load(Relaxed) }
    }

    /// Sets up a link object taken from the pool.
    pub fn init(
        &self,
        seg: *mut Segment,
        peer_bells: *mut BellPage,
        side: u32,
        peer_index: u32,
        sock_fd: i32,
    ) {
        self.seg.store(seg, Relaxed);
        self.peer_bells.store(peer_bells, Relaxed);
        self.side.store(side, Relaxed);
        self.peer_index.store(peer_index, Relaxed);
        self.sock_fd.store(sock_fd, Relaxed);
        self.kind.store(Kind::Shm as u32, Relaxed);
        self.group.store(core::ptr::null_mut(), Relaxed);
        self.dead.store(false, Relaxed);
        self.twin.store(core::ptr::null_mut(), Relaxed);
        self.leaving.store(false, Relaxed);
        self.used.store(0, Relaxed);
        for f in &self.bell_fds {
            f.store(0, Relaxed);
        }
        for s in &self.slots {
            s.store(core::ptr::null_mut(), Relaxed);
        }
    }

    /// Sets up a link object taken from the pool for RDMA, or as limbo (`group` null). `seg` is memory of this
    /// process alone; what a peer process would do there, the group does.
    pub fn init_fixed(&self, seg: *mut Segment, group: *mut Group) {
        self.init(seg, (&raw const NO_PAGE).cast_mut(), 0, 0, -1);
        let kind = if group.is_null() {
            Kind::Limbo
        } else {
            Kind::Rdma
        };
        self.group.store(group, Relaxed);
        self.kind.store(kind as u32, Release);
    }

    /// Whether its connections can't go back to TCP.
    #[inline]
    pub fn fixed(&self) -> bool {
        self.kind.load(Relaxed) != Kind::Shm as u32
    }

    /// See [`Group::doze`]; `None` where there is no channel.
    pub(crate) fn doze(&self) -> Option<i32> {
        self.group().map(Group::doze)
    }

    /// See [`Group::wake_up`].
    pub(crate) fn wake_up(&self) {
        if let Some(g) = self.group() {
            g.wake_up();
        }
    }

    /// Whether the handshake is still under way.
    pub fn limbo(&self) -> bool {
        self.kind.load(Relaxed) == Kind::Limbo as u32
    }

    /// The link group of an RDMA link. Valid as `seg` is.
    #[inline]
    fn group(&self) -> Option<&Group> {
        // SAFETY: null, or a group that outlives the link's place in the table and its last connection.
        unsafe { self.group.load(Relaxed).as_ref() }
    }

    /// On an RDMA link, the stream offset up to which the peer's host has what we sent on `slot`.
    pub fn delivered(&self, slot: u32) -> Option<u64> {
        self.group()?.delivered(slot)
    }

    /// Our connection at `slot`, if there is one; any number may be asked for.
    #[inline]
    pub fn sock(&self, slot: u32) -> Option<&'static Sock> {
        let s = self.slots.get(slot as usize)?.load(Acquire);
        // SAFETY: null, or a stream of the type-stable pool.
        unsafe { s.as_ref() }
    }

    /// `s` is no longer at `slot`.
    pub(crate) fn vacate(&self, slot: u32, s: &Sock) {
        let s = (s as *const Sock).cast_mut();
        if let Some(place) = self.slots.get(slot as usize) {
            let _ = place.compare_exchange(s, core::ptr::null_mut(), SeqCst, Relaxed);
        }
    }

    /// Connection block of a slot.
    #[inline]
    pub fn block(&self, slot: u32) -> &ConnBlock {
        &self.seg().conns[(slot % SLOTS) as usize]
    }

    /// Whether the peer process is gone.
    #[inline]
    pub fn is_dead(&self) -> bool {
        self.dead.load(Acquire)
    }

    /// Tells the peer that something changed on `slot`. `notify` is the peer's wish, as read after
    /// the change and a `SeqCst` fence.
    #[inline]
    pub fn tell(&self, slot: u32, notify: u32) {
        if notify == 0 {
            return;
        }
        if self.fixed() {
            return self.tell_group(slot);
        }
        let peer_side = 1 - (self.side.load(Relaxed) & 1);
        self.seg().pending[peer_side as usize].set(slot);
        let page = self.peer_bells();
        page.links.set(self.peer_index.load(Relaxed));
        self.ring(page, notify - 1);
    }

    fn tell_group(&self, slot: u32) {
        if let Some(g) = self.group() {
            g.kick(slot);
        }
    }

    #[inline]
    fn ring(&self, page: &BellPage, bell: u32) {
        let mut b = bell as usize % BELLS;
        let mut nap = page.sleep[b].0.load(SeqCst);
        if nap == 0 {
            return;
        }
        let mut fd = self.bell_fds[b].load(Relaxed);
        if fd == 0 {
            b = ENGINE_BELL as usize;
            fd = self.bell_fds[b].load(Relaxed);
            nap = page.sleep[b].0.load(SeqCst);
            if fd == 0 || nap == 0 {
                return;
            }
        }
        COUNTERS.bells_rung.fetch_add(1, Relaxed);
        sys::eventfd_ring(fd - 1);
        rung(&page.sleep[b].0, nap);
    }
}

/// The sleeper of nap number `nap` has been called: others need not call it again. A later nap stands.
#[inline]
fn rung(sleep: &AtomicU32, nap: u32) {
    let _ = sleep.compare_exchange(nap, 0, SeqCst, Relaxed);
}

/// Counters of the node that are touched by the data path.
#[allow(missing_docs)]
pub struct NodeCounters {
    pub bells_rung: AtomicU64,
    pub sleeps: AtomicU64,
    pub spins: AtomicU64,
}

/// The node's counters.
pub static COUNTERS: NodeCounters = NodeCounters {
    bells_rung: AtomicU64::new(0),
    sleeps: AtomicU64::new(0),
    spins: AtomicU64::new(0),
};

/// All link objects.
pub static LINK_POOL: Pool<Link> = Pool::new();

struct Bell {
    /// eventfd + 1; 0 while the bell does not exist.
    fd: AtomicI32,
    /// Thread id of a thread's bell, `SET_OWNED` for an epoll set's, 0 when free.
    owner: AtomicU32,
}

const SET_OWNED: u32 = u32::MAX;

#[allow(clippy::declare_interior_mutable_const)]
const NO_BELL: Bell = Bell {
    fd: AtomicI32::new(0),
    owner: AtomicU32::new(0),
};
static BELL_TABLE: [Bell; BELLS] = [NO_BELL; BELLS];

/// Used until the real page exists, so that the data path needs no null check.
static NO_PAGE: BellPage = BellPage {
    links: Bitmap::new(),
    sleep: [const { crate::fabric::shm::Sleep(AtomicU32::new(0)) }; BELLS],
};
static PAGE: AtomicPtr<BellPage> = AtomicPtr::new((&raw const NO_PAGE).cast_mut());
static PAGE_FD: AtomicI32 = AtomicI32::new(-1);

static DISPATCH: Lock = Lock::new();
static TABLE: [AtomicPtr<Link>; LINKS] = [const { AtomicPtr::new(core::ptr::null_mut()) }; LINKS];

/// The node's own bell page.
#[inline]
pub fn page() -> &'static BellPage {
    // SAFETY: points to NO_PAGE or to a mapping that is never unmapped.
    unsafe { &*PAGE.load(Acquire) }
}

/// Creates the bell page and the engine's bell, within [`crate::fds::make_private`]. Returns the page's
/// memfd and the engine's eventfd.
pub fn create_page(keep: &dyn Fn(i32) -> i32) -> sys::Result<(i32, i32)> {
    let fd = keep(sys::memfd_sealed(c"xsmc-bells", BELL_PAGE_LEN)?);
    let p = sys::map(fd, BELL_PAGE_LEN)?;
    let ev = keep(sys::eventfd()?);
    // The first bells too, so that a program's first set or sleeping thread costs no new descriptor later.
    for bell in &BELL_TABLE[1..3] {
        bell.fd.store(keep(sys::eventfd()?) + 1, Release);
    }
    PAGE_FD.store(fd, Relaxed);
    BELL_TABLE[0].fd.store(ev + 1, Release);
    PAGE.store(p.cast(), Release);
    Ok((fd, ev))
}

fn new_bell() -> sys::Result<i32> {
    crate::fds::make_private(|keep| sys::eventfd().map(keep))
}

/// The eventfd of bell `b`, if it exists.
pub fn bell_fd(b: u32) -> Option<i32> {
    match BELL_TABLE[b as usize % BELLS].fd.load(Acquire) {
        0 => None,
        fd => Some(fd - 1),
    }
}

/// Calls `f` with number and eventfd of each bell.
pub fn each_bell(mut f: impl FnMut(u32, i32)) {
    for b in 0..BELLS as u32 {
        if let Some(fd) = bell_fd(b) {
            f(b, fd);
        }
    }
}

/// Least depth of a signal handler's stack below what it interrupts: the kernel stores the registers in between.
const HANDLER_DEPTH: usize = 1024;

/// The calling thread's bell, made on first use; give it back with [`end_use`]. `None`: there are no more, or
/// it is in use by what this signal handler has interrupted; sleep in short slices.
pub fn thread_bell() -> Option<u32> {
    let known = thread::with(|w| w.bell.get());
    if known != 0 && BELL_TABLE[known as usize].owner.load(Relaxed) == tid() {
        return Some(known).filter(|_| begin_use());
    }
    let b = claim_bell(tid())?;
    thread::with(|w| w.bell.set(b));
    Some(b).filter(|_| begin_use())
}

/// False: this is a signal handler that interrupted the use of the bell by this thread.
///
/// A handler that leaves by a long jump leaves the bell in use. It is taken over by the next call that isn't deeper on
/// the stack, as a handler's would be. One on a stack of its own may look like that: hence [`end_use`].
fn begin_use() -> bool {
    let mark = 0u8;
    let here = (&raw const mark).addr();
    let held = thread::with(|w| w.bell_in_use.get());
    if held > here + HANDLER_DEPTH {
        return false;
    }
    if held != 0 {
        thread::with(|w| w.bell_taken_over.set(true));
    }
    thread::with(|w| w.bell_in_use.set(here));
    true
}

/// The thread's bell is no longer in use. If it was taken over, it is rung, lest who had it before sleeps on.
pub fn end_use() {
    thread::with(|w| w.bell_in_use.set(0));
    if thread::with(|w| w.bell_taken_over.replace(false))
        && let Some(fd) = bell_fd(thread::with(|w| w.bell.get()))
    {
        sys::eventfd_ring(fd);
    }
}

/// A bell for an epoll set.
pub fn set_bell() -> Option<u32> {
    claim_bell(SET_OWNED)
}

/// Gives a set's bell back. The eventfd stays, for the bell's next owner.
pub fn release_bell(b: u32) {
    let bell = &BELL_TABLE[b as usize % BELLS];
    page().sleep[b as usize % BELLS].0.store(0, SeqCst);
    // A peer could have made the eventfd a blocking one.
    if let Some(fd) = bell_fd(b)
        && sys::poll_now(fd, libc::POLLIN) != 0
    {
        sys::eventfd_drain(fd);
    }
    bell.owner.store(0, Release);
}

fn claim_bell(owner: u32) -> Option<u32> {
    if PAGE_FD.load(Relaxed) < 0 {
        return None;
    }
    for pass in 0..2 {
        for (b, bell) in BELL_TABLE.iter().enumerate().skip(1) {
            let now = bell.owner.load(Relaxed);
            let free = now == 0 || pass == 1 && now != SET_OWNED && !sys::thread_alive(now);
            if !free
                || bell
                    .owner
                    .compare_exchange(now, owner, Acquire, Relaxed)
                    .is_err()
            {
                continue;
            }
            if bell.fd.load(Relaxed) == 0 {
                let Ok(fd) = new_bell() else {
                    bell.owner.store(0, Release);
                    return None;
                };
                bell.fd.store(fd + 1, Release);
                crate::engine::announce_bell(b as u32);
            }
            page().sleep[b].0.store(0, SeqCst);
            return Some(b as u32);
        }
    }
    None
}

/// Rings a bell of our own node, if its owner sleeps. The caller has changed something and
/// executed a `SeqCst` fence.
#[inline]
pub fn ring_own(b: u32) {
    let s = &page().sleep[b as usize % BELLS].0;
    let nap = s.load(SeqCst);
    if nap != 0
        && let Some(fd) = bell_fd(b)
    {
        sys::eventfd_ring(fd);
        rung(s, nap);
    }
}

/// The engine has been called and has not looked yet.
static CALLED: AtomicBool = AtomicBool::new(false);

/// Has the engine look after what it looks after, though it may be awake and just past it. The caller has changed
/// something.
pub fn call_engine() {
    CALLED.store(true, SeqCst);
    fence(SeqCst);
    ring_own(ENGINE_BELL);
}

/// Whether the engine has been called since it last asked. Engine, once its sleep flag is set: a later call rings.
pub fn engine_called() -> bool {
    CALLED.load(SeqCst) && CALLED.swap(false, SeqCst)
}

/// Announces that the owner of bell `b` is about to sleep. Look once more after this.
#[inline]
pub fn about_to_sleep(b: u32) {
    set_sleep_flag(b);
    table::arm();
}

/// As [`about_to_sleep`], for the engine. `busy`: other threads look at the completion queues, so the engine
/// need not be woken by what arrives; it must not sleep for longer than [`table::BUSY_LOOK_MS`] then.
pub fn engine_about_to_sleep(busy: bool) {
    set_sleep_flag(ENGINE_BELL);
    if !busy {
        table::arm();
    }
}

fn set_sleep_flag(b: u32) {
    let nap = COUNTERS.sleeps.fetch_add(1, Relaxed).wrapping_add(1) as u32;
    page().sleep[b as usize % BELLS].0.store(nap.max(1), SeqCst);
    fence(SeqCst);
}

/// The owner of bell `b` is awake.
#[inline]
pub fn awake(b: u32) {
    page().sleep[b as usize % BELLS].0.store(0, SeqCst);
}

static LIMBO: AtomicPtr<Link> = AtomicPtr::new(core::ptr::null_mut());

/// The link of all connections that are being negotiated. They share one connection block, in which nothing
/// ever happens.
pub fn limbo() -> sys::Result<&'static Link> {
    // SAFETY: null or an object of the type-stable pool.
    if let Some(l) = unsafe { LIMBO.load(Acquire).as_ref() } {
        return Ok(l);
    }
    let seg = sys::map(-1, crate::fabric::shm::SEGMENT_LEN)?;
    let (_, l) = LINK_POOL.alloc().ok_or(sys::Errno::ENOMEM)?;
    l.init_fixed(seg.cast(), core::ptr::null_mut());
    // Two threads at once: one of the two is leaked.
    LIMBO.store((l as *const Link).cast_mut(), Release);
    Ok(l)
}

/// Enters a link into the table, so that its events are dispatched. Returns its index.
pub fn add_link(l: &'static Link) -> Option<u32> {
    let _g = DISPATCH.lock();
    for (i, t) in TABLE.iter().enumerate() {
        if t.load(Relaxed).is_null() {
            t.store((l as *const Link).cast_mut(), Release);
            return Some(i as u32);
        }
    }
    None
}

/// Calls `f` for each link in the table.
pub fn each_link(mut f: impl FnMut(&'static Link)) {
    for t in &TABLE {
        // SAFETY: links come from the type-stable pool.
        if let Some(l) = unsafe { t.load(Acquire).as_ref() } {
            f(l);
        }
    }
}

/// Takes a link out of the table; `unmap` runs when no dispatcher can be inside it.
pub fn remove_link(i: u32, unmap: impl FnOnce()) {
    let _g = DISPATCH.lock();
    TABLE[i as usize % LINKS].store(core::ptr::null_mut(), Release);
    unmap();
}

/// Takes all news of all links and routes it. Two loads when there is none.
#[inline]
pub fn dispatch() {
    let p = page();
    if p.links.any() {
        dispatch_slow(p);
    }
    table::poll();
}

fn dispatch_slow(p: &'static BellPage) {
    let Some(_g) = DISPATCH.lock() else { return };
    p.links.drain(|i| {
        // SAFETY: links in the table are valid, and removal takes the lock we hold.
        let Some(l) = (unsafe { TABLE[i as usize % LINKS].load(Acquire).as_ref() }) else {
            return;
        };
        l.seg().pending[(l.side.load(Relaxed) & 1) as usize].drain(|slot| {
            // A stale one ignores the event.
            if let Some(s) = l.sock(slot) {
                s.on_event();
            }
        });
    });
}

/// The dispatch lock: fork holds it.
pub fn dispatch_lock() -> &'static Lock {
    &DISPATCH
}

/// In the child of a fork: no links, no bells, no page. The private descriptors are closed by
/// [`crate::fds::after_fork_child`].
pub fn after_fork_child() {
    PAGE.store((&raw const NO_PAGE).cast_mut(), Release);
    PAGE_FD.store(-1, Relaxed);
    for b in &BELL_TABLE {
        b.fd.store(0, Relaxed);
        b.owner.store(0, Relaxed);
    }
    for t in &TABLE {
        t.store(core::ptr::null_mut(), Relaxed);
    }
    table::after_fork_child();
    LIMBO.store(core::ptr::null_mut(), Relaxed);
    thread::with(|w| {
        w.bell.set(0);
        w.bell_in_use.set(0);
        w.bell_taken_over.set(false);
    });
    DISPATCH.reset();
}
