//! One TCP connection as this process sees it: a [`Sock`].
//!
//! States: `PLAIN` (libc's calls, counted), `PUBLISHED` (the same, with an endpoint in the directory) and
//! `MANAGED` (attached to a slot of a link; each direction rides TCP or an RMB). A direction is changed
//! only by its sender, under the sender's private lock, by an entry in the switch log; the receiver
//! follows the log. Nobody ever waits for a lock of the other process.
//!
//! A stream offset is the number of bytes that the direction has put on TCP since the connection was
//! made plus the number it has put on the RMB since it was attached. Both ends agree on it whatever
//! happened before: the first part is the kernel's own count. While `MANAGED`, the two counts only
//! change under the direction's lock; calls that began before the connection became managed (`plain_tx`,
//! `plain_rx`) may add to the first as well, and keep their direction on TCP until they end.
//!
//! - `tx`: sending; `rx`: receiving; `signals`: what interrupts a sleep; `switch`: evidence, upgrade, downgrade; `wait`: blocking;
//!   `mask`: readiness; `idle`: giving the buffers of an idle connection back.

mod idle;
mod mask;
mod rx;
mod signals;
mod switch;
mod tx;
mod wait;

use core::cell::UnsafeCell;
use core::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use core::sync::atomic::{AtomicI32, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, fence};

use crate::engine;
use crate::fabric::shm::{ConnBlock, Direction, TX_CLOSED};
use crate::lock::Lock;
use crate::negotiate::EntryRef;
use crate::node::{self, Link};
use crate::observe::Reason;
use crate::pool::{Pool, Pooled};
use crate::ready::{self, RegRef};
use crate::ring::Ring;

pub use rx::Want;
pub use signals::after_fork_child;
pub use switch::Downgrade;
pub use wait::spin;

/// Not in use.
pub const FREE: u32 = 0;
/// A TCP socket on libc's calls.
pub const PLAIN: u32 = 1;
/// As PLAIN, published in the directory.
pub const PUBLISHED: u32 = 2;
/// Attached to a link.
pub const MANAGED: u32 = 3;

/// The program set O_NONBLOCK.
pub const F_NONBLOCK: u32 = 1;
/// A listener.
pub const F_LISTENER: u32 = 2;
/// Came to this process by fork, exec or SCM_RIGHTS and has not been used here yet.
pub const F_INHERITED: u32 = 4;
/// shutdown(SHUT_WR) was called.
pub const F_SHUT_WR: u32 = 8;
/// shutdown(SHUT_RD) was called.
pub const F_SHUT_RD: u32 = 16;
/// Reset because the peer broke the rules of the shared memory.
pub const F_BROKEN: u32 = 32;
/// The connection was accepted (else: connected).
pub const F_ACCEPTED: u32 = 64;
/// The peer has left the link: look whether we can, too.
pub const F_LEFT: u32 = 128;
/// An epoll registration could not be taken over: the connection must go back to TCP.
const F_CANT_SERVE: u32 = 256;
/// The upgrade waits until a one-shot registration is armed.
const F_ONESHOT: u32 = 512;

/// Epoll registrations of one stream that can be served; more pin it to TCP.
pub const REGS: usize = 4;
/// Threads that can sleep on one stream with a bell; more sleep in short slices.
pub const WAITERS: usize = 6;

/// Sender's half.
#[derive(Default)]
pub struct Tx {
    pub(crate) lock: Lock,
    /// Payload bytes put into the TCP socket.
    pub tcp: AtomicU64,
    /// Bytes written to the RMB since the connection was attached, less those taken back.
    pub rmb: AtomicU64,
    /// Bytes written to RMBs before that.
    pub rmb_before: AtomicU64,
    /// Switches logged; odd: on the RMB.
    pub switches: AtomicU32,
    /// Last seen consumer cursor.
    cons: AtomicU64,
    /// Offset of the last switch to the RMB.
    last_up: AtomicU64,
    /// Bytes recalled by the receiver that must go over TCP before anything else; malloc'ed.
    backlog: AtomicPtr<u8>,
    backlog_len: AtomicU64,
    backlog_done: AtomicU64,
    /// The TCP socket's buffer was full at the last try.
    full: AtomicU32,
}

/// Receiver's half.
#[derive(Default)]
pub struct Rx {
    pub(crate) lock: Lock,
    /// Payload bytes read from the TCP socket.
    pub tcp: AtomicU64,
    /// Bytes read from the RMB since the connection was attached.
    pub rmb: AtomicU64,
    /// Bytes read from RMBs before that.
    pub rmb_before: AtomicU64,
    /// Switches passed; odd: reading the RMB.
    pub passed: AtomicU32,
    /// Recalls under way: the RMB must not be read.
    frozen: AtomicU32,
    /// Ticket of the last recall that the peer has answered.
    pub(crate) recall_done: AtomicU32,
    /// The kernel may have something to say: FIN, RST, bytes.
    hint: AtomicU32,
    /// Empty reads since the kernel was last asked.
    empty: AtomicU32,
    /// An error of the kernel's, to be reported when the ring has been drained.
    error: AtomicU32,
}

impl Tx {
    /// Stream offset of the next byte to be sent.
    #[inline]
    pub(crate) fn off(&self) -> u64 {
        self.tcp.load(Relaxed).wrapping_add(self.rmb.load(Relaxed))
    }
}

impl Rx {
    /// Stream offset of the next byte to be received.
    #[inline]
    pub(crate) fn off(&self) -> u64 {
        self.tcp.load(Relaxed).wrapping_add(self.rmb.load(Relaxed))
    }
}

/// See the module comment. All-zero is a free one.
#[derive(Default)]
#[repr(C, align(64))]
pub struct Sock {
    /// One of [`FREE`], [`PLAIN`], [`PUBLISHED`], [`MANAGED`].
    pub state: AtomicU32,
    /// `F_*` flags.
    pub flags: AtomicU32,
    /// Threads inside a plain receiving call or poll.
    pub plain_rx: AtomicU32,
    /// Threads inside a plain sending call or poll.
    pub plain_tx: AtomicU32,
    /// Calls that moved bytes since the last candidacy.
    pub ops: AtomicU32,
    /// A descriptor of this socket.
    pub fd: AtomicI32,
    /// Descriptors of this socket in this process.
    pub refs: AtomicU32,
    /// Counts lives of this object.
    pub generation: AtomicU32,
    /// Position in the pool.
    pub index: AtomicU32,
    /// Why the connection is on TCP: a [`Reason`] code, 0 when there is none.
    pub reason: AtomicU8,
    /// Non-zero: on TCP for good.
    pub pinned: AtomicU8,
    /// Local link of a managed connection.
    link: AtomicPtr<Link>,
    slot: AtomicU32,
    /// Ring that we write.
    tx_ring: UnsafeCell<Ring>,
    /// Ring that we read.
    rx_ring: UnsafeCell<Ring>,
    /// Sending half.
    pub tx: Tx,
    /// Receiving half.
    pub rx: Rx,
    /// Guards changes of `regs` and `waiters`.
    pub watch: Lock,
    /// Epoll registrations ([`RegRef`] bits, 0 = none).
    pub regs: [AtomicU64; REGS],
    /// Bells + 1 of threads that sleep on this stream.
    waiters: [AtomicU32; WAITERS],
    /// Spin budget in nanoseconds, adapting.
    spin_ns: AtomicU32,
    /// Work for the engine (`engine::WORK_*`), and the queue's link.
    pub work: AtomicU32,
    /// Next in the engine's queue (index + 1).
    pub work_next: AtomicU32,
    /// Downgrades in progress: no upgrade of what we send.
    hold: AtomicU32,
    /// Thresholds of candidacy, from the policy.
    pub after_ops: AtomicU32,
    /// In bytes.
    pub after_bytes: AtomicU64,
    idle: idle::Idle,
    /// Our entry in the directory while PUBLISHED; under `watch`.
    entry: UnsafeCell<Option<EntryRef>>,
    free: UnsafeCell<u32>,
}

impl Default for Ring {
    fn default() -> Self {
        Ring::NONE
    }
}

// SAFETY: the rings are written by the engine before `state` becomes MANAGED (Release) and read after it
// was seen (Acquire), under the direction's lock; `free` belongs to the pool; the rest are atomics.
unsafe impl Sync for Sock {}
// SAFETY: all-zero bytes are the default value.
unsafe impl Pooled for Sock {
    fn link(&self) -> &UnsafeCell<u32> {
        &self.free
    }
}

/// All streams of this process.
pub static POOL: Pool<Sock> = Pool::new();

impl Sock {
    /// A new stream for `fd`, entered in the descriptor table. `None`: it stays unknown, plain TCP.
    pub fn create(fd: i32, flags: u32) -> Option<&'static Sock> {
        let (index, s) = POOL.alloc()?;
        s.reset(index);
        s.fd.store(fd, Relaxed);
        s.flags.store(flags, Relaxed);
        s.refs.store(1, Relaxed);
        s.state.store(PLAIN, Release);
        if !crate::fds::set_sock(fd, s) {
            s.state.store(FREE, Relaxed);
            POOL.free(index);
            return None;
        }
        Some(s)
    }

    fn reset(&self, index: u32) {
        for a in [
            &self.plain_rx,
            &self.plain_tx,
            &self.ops,
            &self.rx.frozen,
            &self.rx.recall_done,
            &self.rx.hint,
            &self.rx.empty,
        ] {
            a.store(0, Relaxed);
        }
        for a in [
            &self.tx.switches,
            &self.tx.full,
            &self.rx.passed,
            &self.rx.error,
            &self.spin_ns,
            &self.hold,
        ] {
            a.store(0, Relaxed);
        }
        for a in [
            &self.tx.tcp,
            &self.tx.rmb,
            &self.tx.rmb_before,
            &self.rx.tcp,
            &self.rx.rmb,
            &self.rx.rmb_before,
        ] {
            a.store(0, Relaxed);
        }
        for a in &self.regs {
            a.store(0, Relaxed);
        }
        for a in &self.waiters {
            a.store(0, Relaxed);
        }
        self.reason.store(0, Relaxed);
        self.pinned.store(0, Relaxed);
        self.index.store(index, Relaxed);
        self.generation.fetch_add(1, Relaxed);
        let (ops, bytes) = engine::thresholds();
        self.after_ops.store(ops, Relaxed);
        self.after_bytes.store(bytes, Relaxed);
        self.idle.reset();
    }

    /// Whether I/O must go through the managed path.
    #[inline]
    pub fn managed(&self) -> bool {
        self.state.load(SeqCst) == MANAGED
    }

    /// Whether all of `f`'s flags are set.
    #[inline]
    pub fn has(&self, f: u32) -> bool {
        self.flags.load(Relaxed) & f != 0
    }

    pub(crate) fn link(&self) -> &'static Link {
        // SAFETY: set at attach to an object of the link pool, which is type-stable; only called
        // while managed, under a direction lock or an epoll set's lock.
        unsafe { &*self.link.load(Relaxed) }
    }

    /// Where a managed connection is attached.
    pub(crate) fn place(&self) -> Option<(&'static Link, u32)> {
        let _g = self.watch.lock();
        self.managed()
            .then(|| (self.link(), self.slot.load(Relaxed)))
    }

    fn conn(&self) -> &ConnBlock {
        self.link().block(self.slot.load(Relaxed))
    }

    fn side(&self) -> usize {
        (self.link().side.load(Relaxed) & 1) as usize
    }

    /// The direction we send.
    pub(crate) fn out(&self) -> &Direction {
        &self.conn().dir[self.side()]
    }

    /// The direction we receive.
    pub(crate) fn inc(&self) -> &Direction {
        &self.conn().dir[1 - self.side()]
    }

    pub(crate) fn tx_ring(&self) -> Ring {
        // SAFETY: see the Sync impl.
        unsafe { *self.tx_ring.get() }
    }

    pub(crate) fn rx_ring(&self) -> Ring {
        // SAFETY: see the Sync impl.
        unsafe { *self.rx_ring.get() }
    }

    /// Tells the peer that something changed. Under a direction lock.
    #[inline]
    pub(crate) fn tell_peer(&self) {
        fence(SeqCst);
        // The peer's wish is in the line that the peer writes as receiver of what we send.
        let wish = self.out().rx.notify.load(Relaxed);
        self.link().tell(self.slot.load(Relaxed), wish);
    }

    /// Records the directory entry of a connection that is still the one of `generation`. False: it
    /// has been closed meanwhile. Engine.
    pub fn published(&self, entry: EntryRef, generation: u32) -> bool {
        let Some(_g) = self.watch.lock() else {
            return false;
        };
        if self.generation.load(SeqCst) != generation
            || self
                .state
                .compare_exchange(PLAIN, PUBLISHED, SeqCst, Relaxed)
                .is_err()
        {
            return false;
        }
        // SAFETY: under `watch`.
        unsafe { *self.entry.get() = Some(entry) };
        true
    }

    /// Takes the directory entry out, to withdraw it.
    pub fn take_entry(&self) -> Option<EntryRef> {
        let _g = self.watch.lock()?;
        // SAFETY: under `watch`.
        unsafe { (*self.entry.get()).take() }
    }

    /// Attaches to a slot of a link. Engine only; both direction locks are held; not managed before.
    pub fn attach(&self, link: &'static Link, slot: u32, tx_ring: Ring, rx_ring: Ring) {
        self.link.store((link as *const Link).cast_mut(), Relaxed);
        self.slot.store(slot, Relaxed);
        // SAFETY: not managed, so nobody reads the rings.
        unsafe {
            *self.tx_ring.get() = tx_ring;
            *self.rx_ring.get() = rx_ring;
        }
        self.tx.switches.store(0, Relaxed);
        self.tx.cons.store(0, Relaxed);
        self.tx.last_up.store(0, Relaxed);
        self.tx.full.store(0, Relaxed);
        self.rx.passed.store(0, Relaxed);
        self.rx.hint.store(1, Relaxed);
        self.rx.frozen.store(0, Relaxed);
        for (now, before) in [
            (&self.tx.rmb, &self.tx.rmb_before),
            (&self.rx.rmb, &self.rx.rmb_before),
        ] {
            before.fetch_add(now.swap(0, Relaxed), Relaxed);
        }
        self.inc().rx.cons.store(self.rx.off(), Relaxed);
        link.slots[slot as usize].store((self as *const Sock).cast_mut(), Release);
        link.used.fetch_add(1, SeqCst);
        self.state.store(MANAGED, SeqCst);
        // Pairs with the fence in `downgrade`: it sees us managed, or we see its pin.
        fence(SeqCst);
    }

    /// Second part of attaching, without the direction locks: takes the epoll registrations over.
    pub fn attached(&self) {
        for r in &self.regs {
            if let Some(r) = RegRef::unpack(r.load(SeqCst)) {
                ready::manage(r, self);
            }
        }
        {
            let _g = self.watch.lock();
            self.renotify();
        }
        self.on_event();
    }

    /// Leaves the link: the connection is plain TCP from here. Both direction locks are held and
    /// both directions are on TCP with nothing left in the ring, or the socket is being closed.
    pub(crate) fn detach(&self) {
        if !self.managed() {
            return;
        }
        let (link, slot) = (self.link(), self.slot.load(Relaxed));
        {
            // No `renotify` may be half-way: the slot's next user has wishes of its own.
            let _w = self.watch.lock();
            self.inc().rx.notify.store(0, SeqCst);
            self.state.store(PLAIN, SeqCst);
        }
        engine::withdraw(self);
        // The peer learns that we have gone. Only then may the slot be used again, by whom it may be.
        self.out().tx.flags.fetch_or(TX_CLOSED, SeqCst);
        self.tell_peer();
        let me = (self as *const Sock).cast_mut();
        let _ =
            link.slots[slot as usize].compare_exchange(me, core::ptr::null_mut(), SeqCst, Relaxed);
        self.ops.store(0, Relaxed);
        engine::slot_released(link);
    }

    /// Leaves the link when both directions have ended on TCP because the peer left it. Called without
    /// locks; returns whether the connection is plain now.
    pub(crate) fn try_detach(&self) -> bool {
        self.leave_if(|s| s.peer_left())
    }

    /// Leaves the link if both directions have ended on TCP and `may` agrees, under the locks. Called
    /// without locks; returns whether the connection is plain now.
    fn leave_if(&self, may: impl FnOnce(&Sock) -> bool) -> bool {
        let (Some(_t), Some(_r)) = (self.tx.lock.lock(), self.rx.lock.lock()) else {
            return false;
        };
        if !self.managed() {
            return true;
        }
        let on_tcp = self.tx.switches.load(Relaxed) & 1 == 0
            && self.rx.passed.load(Relaxed) & 1 == 0
            && self.rx.passed.load(Relaxed) == self.inc().tx.switches.load(Acquire);
        if !on_tcp || !may(self) || !self.tx.backlog.load(Relaxed).is_null() {
            return false;
        }
        self.flags.fetch_and(!F_LEFT, Relaxed);
        self.detach();
        drop((_t, _r));
        for r in &self.regs {
            if let Some(r) = RegRef::unpack(r.load(Acquire)) {
                ready::unmanage(r, self);
            }
        }
        true
    }

    /// Something changed on the peer's side: wake whoever waits for it here. Any thread.
    pub fn on_event(&self) {
        for r in &self.regs {
            if let Some(r) = RegRef::unpack(r.load(Acquire)) {
                ready::push(r);
            }
        }
        fence(SeqCst);
        for w in &self.waiters {
            let b = w.load(Relaxed);
            if b != 0 {
                node::ring_own(b - 1);
            }
        }
    }

    /// Publishes how this side wants to be told of changes. Under `watch`, or during attach.
    pub(crate) fn renotify(&self) {
        if !self.managed() {
            return;
        }
        let mut want = 0;
        let mut add = |bell: u32| {
            want = if want == 0 || want == bell + 1 {
                bell + 1
            } else {
                node::ENGINE_BELL + 1
            }
        };
        for r in &self.regs {
            if let Some(r) = RegRef::unpack(r.load(Relaxed)) {
                add(ready::bell_of(r));
            }
        }
        for w in &self.waiters {
            let b = w.load(Relaxed);
            if b != 0 {
                add(b - 1);
            }
        }
        self.inc().rx.notify.store(want, SeqCst);
    }

    /// An epoll registration could not be taken over.
    pub(crate) fn set_cant_serve(&self) {
        self.flags.fetch_or(F_CANT_SERVE, SeqCst);
    }

    /// Whether the connection must go back to TCP for lack of means to serve its registrations; told
    /// once, for a managed connection.
    pub(crate) fn cant_serve(&self) -> Option<Reason> {
        if !self.has(F_CANT_SERVE) {
            return None;
        }
        self.flags.fetch_and(!F_CANT_SERVE, SeqCst);
        Some(Reason::TooManyWaiters)
    }

    /// The upgrade can go on only once a one-shot registration has been armed.
    pub(crate) fn await_oneshot(&self) {
        self.flags.fetch_or(F_ONESHOT, SeqCst);
    }

    /// Whether a one-shot registration that is being armed should be taken over.
    pub(crate) fn wants_oneshot(&self) -> bool {
        matches!(self.state.load(Relaxed), PUBLISHED | MANAGED)
    }

    /// A one-shot registration has been taken over.
    pub(crate) fn oneshot_armed(&self) {
        if self.flags.fetch_and(!F_ONESHOT, SeqCst) & F_ONESHOT != 0 {
            engine::candidate(self);
        }
    }

    /// Runs `f` on a descriptor of this stream, from a thread that is not the program's. Closing waits for
    /// it: otherwise a system call of ours could keep the open file, and with it epoll registrations, alive
    /// a moment longer than the program's close. `None`: closed.
    pub fn with_fd<T>(&self, f: impl FnOnce(i32) -> T) -> Option<T> {
        let _g = self.watch.lock()?;
        let fd = self.fd.load(Relaxed);
        crate::fds::is_sock(fd, self).then(|| f(fd))
    }

    /// Counts bytes that a plain call moved, and looks whether the connection is worth upgrading.
    pub fn count_plain(&self, tx: bool, n: u64) {
        let tcp = if tx { &self.tx.tcp } else { &self.rx.tcp };
        tcp.fetch_add(n, Relaxed);
        let ops = self.ops.fetch_add(1, Relaxed) + 1;
        if self.state.load(Relaxed) == PLAIN
            && self.pinned.load(Relaxed) == 0
            && (ops >= self.after_ops.load(Relaxed)
                || self.tx.tcp.load(Relaxed) + self.rx.tcp.load(Relaxed)
                    >= self.after_bytes.load(Relaxed))
        {
            engine::candidate(self);
        }
    }

    /// Remembers why the connection is not on RMBs, and counts it once.
    pub fn note(&self, r: Reason) {
        if self.reason.swap(r.code(), Relaxed) != r.code() {
            engine::COUNTERS.count(r);
        }
    }

    /// Keeps the connection on TCP for good. Directions that ride an RMB are not touched here: see
    /// [`Downgrade`].
    pub fn pin(&self, r: Reason) {
        self.pinned.store(1, Relaxed);
        self.note(r);
    }

    /// The last descriptor of this process has been closed. Gives everything back.
    pub fn closed(&self) {
        for r in &self.regs {
            if let Some(r) = RegRef::unpack(r.swap(0, SeqCst)) {
                ready::forget(r, self);
            }
        }
        {
            let _t = self.tx.lock.lock();
            let _r = self.rx.lock.lock();
            self.detach();
            self.drop_backlog();
            self.state.store(FREE, SeqCst);
            engine::withdraw(self);
            self.generation.fetch_add(1, Relaxed);
        }
        engine::forget(self);
    }

    /// Whether unread bytes wait in the RMB: closing must then reset, as TCP does.
    pub fn unread_rmb(&self) -> bool {
        let Some(_g) = self.rx.lock.lock() else {
            return false;
        };
        self.managed() && self.rx_ring_bytes() > 0
    }

    /// The process exits without closing the socket: unread bytes in the RMB must reset the connection,
    /// as unread bytes in the kernel would.
    pub fn exiting(&self) {
        let fd = self.fd.load(Relaxed);
        if let Some(_g) = self.rx.lock.try_lock()
            && self.managed()
            && crate::fds::is_sock(fd, self)
            && self.rx_ring_bytes() > 0
        {
            let linger = libc::linger {
                l_onoff: 1,
                l_linger: 0,
            };
            let _ = crate::sys::setsockopt(fd, libc::SOL_SOCKET, libc::SO_LINGER, &linger);
        }
    }

    /// In the child of a fork: the link belongs to the parent. All directions are on TCP by now.
    pub fn after_fork_child(&self) {
        for l in [&self.tx.lock, &self.rx.lock, &self.watch] {
            l.reset();
        }
        let st = self.state.load(Relaxed);
        if st == FREE {
            return;
        }
        self.state.store(PLAIN, Relaxed);
        for a in [
            &self.plain_rx,
            &self.plain_tx,
            &self.ops,
            &self.work,
            &self.work_next,
            &self.hold,
        ] {
            a.store(0, Relaxed);
        }
        for w in &self.waiters {
            w.store(0, Relaxed);
        }
        // The parent sends what was recalled; this copy of it is leaked, as a forked child must not free.
        self.tx.backlog.store(core::ptr::null_mut(), Relaxed);
        self.rx.frozen.store(0, Relaxed);
        // SAFETY: the child has one thread.
        unsafe { *self.entry.get() = None };
        if !self.has(F_LISTENER) {
            self.flags.fetch_or(F_INHERITED, Relaxed);
        }
    }
}
