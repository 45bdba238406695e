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
//! - `life`: publication, attachment to a link, the end; `idle`: giving the buffers of an idle connection back;
//! - `tx`: sending; `full`: into a ring that stays full; `rx`: receiving; `beyond`: over a switch; `peek`: looking ahead;
//!   `copy`: both for sendfile and splice; `switch`: evidence, upgrade, downgrade;
//! - `urgent`: urgent data of SMC-R connections;
//! - `due`: errors that are to be told later;
//! - `wait`: blocking; `signals`: what interrupts a sleep; `mask`: readiness; `notify`: who is told of changes.

mod beyond;
mod copy;
mod due;
mod fixed;
mod full;
mod idle;
mod life;
mod mask;
mod notify;
mod peek;
mod rx;
mod signals;
mod switch;
mod tx;
mod urgent;
mod wait;

use core::cell::UnsafeCell;
use core::sync::atomic::Ordering::{Relaxed, Release, SeqCst};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU8, AtomicU32, AtomicU64};

use crate::engine;
use crate::fabric::shm::{ConnBlock, Direction};
use crate::lock::Lock;
use crate::negotiate::EntryRef;
use crate::node::Link;
use crate::observe::Reason;
use crate::policy::Role;
use crate::pool::{Pool, Pooled};
use crate::ring::Ring;

pub(crate) use beyond::kernel_has;
pub use rx::Want;
pub use signals::{after_fork_child, handlers_changed};
pub use switch::Downgrade;
pub use urgent::Owner;
pub use wait::{Wait, spin, wait_for};

/// Not in use.
pub const FREE: u32 = 0;
/// A TCP socket on libc's calls.
pub const PLAIN: u32 = 1;
/// As PLAIN, published in the directory.
pub const PUBLISHED: u32 = 2;
/// Attached to a link.
pub const MANAGED: u32 = 3;

/// So many reads in vain, one after another, are no accident: the program waits by trying again.
const DRY_READS: u32 = 8;

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
/// SO_RCVTIMEO or SO_SNDTIMEO was set, or may have been.
pub const F_TIMEOUT: u32 = 2048;
/// A listener whose SYN-ACKs offer SMC-R.
pub const F_OFFERS: u32 = 1024;
/// There is an urgent mark that reading has not passed (see `urgent`).
const F_URGENT: u32 = 4096;
/// An epoll registration could not be taken over: the connection must go back to TCP.
const F_CANT_SERVE: u32 = 256;
/// The upgrade waits until a one-shot registration is armed.
const F_ONESHOT: u32 = 512;
/// The program was seen to wait for it: by epoll, poll or select, in a read, or by trying again and again.
const F_AWAITED: u32 = 8192;

/// An option is set, or was on the listener, that only the kernel's TCP honours: pinned, and it leaves its link as soon as
/// both directions are on TCP.
pub const F_TCP_ONLY: u32 = 16384;
/// An error is due at the next call, or was (see `due`).
pub const F_ERROR: u32 = 65536;
/// SO_RCVTIMEO was set to less than nothing, which reads as 0: a receiving call never waits.
pub const F_RX_NEVER_WAITS: u32 = 131_072;
/// The same of SO_SNDTIMEO, for sending.
pub const F_TX_NEVER_WAITS: u32 = 262_144;

// Each flag has a bit of its own.
const _: () = {
    const ALL: [u32; 18] = [
        F_NONBLOCK,
        F_LISTENER,
        F_INHERITED,
        F_SHUT_WR,
        F_SHUT_RD,
        F_BROKEN,
        F_ACCEPTED,
        F_LEFT,
        F_TIMEOUT,
        F_OFFERS,
        F_URGENT,
        F_CANT_SERVE,
        F_ONESHOT,
        F_AWAITED,
        F_TCP_ONLY,
        F_ERROR,
        F_RX_NEVER_WAITS,
        F_TX_NEVER_WAITS,
    ];
    let (mut seen, mut i) = (0, 0);
    while i < ALL.len() {
        assert!(ALL[i].is_power_of_two() && seen & ALL[i] == 0);
        seen |= ALL[i];
        i += 1;
    }
};

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
    /// The TCP socket's buffer may be full: it has got bytes, or was full, since the kernel was last asked.
    full: AtomicU32,
    /// The engine looks whether the ring stays full.
    watched: AtomicU32,
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
    /// See [`Rx::kept`].
    kept: AtomicBool,
    /// Ticket of the last recall that the peer has answered.
    pub(crate) recall_done: AtomicU32,
    /// Not 0: the kernel may have something to say: FIN, RST, bytes. See [`Rx::look`].
    hint: AtomicU32,
    /// Empty reads since the kernel was last asked.
    empty: AtomicU32,
    /// An error of the kernel's that is due when the ring has been drained, or at the next send.
    error: AtomicU32,
    /// The reset of a connection that can't go back to TCP has been reported: once, as TCP does.
    reset_told: AtomicU32,
    urgent: urgent::Mark,
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

    /// A recall begins; `readable`: there are bytes in the RMB. Under the lock.
    fn freeze(&self, readable: bool) {
        let first = self.frozen.fetch_add(1, SeqCst) == 0;
        if first || readable {
            self.kept.store(readable, Relaxed);
        }
    }

    /// Whether recalls are under way and, since the first of them, there are bytes to read that were in the RMB. Under
    /// the lock.
    fn kept(&self) -> bool {
        self.frozen.load(Relaxed) != 0 && self.kept.load(Relaxed)
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
    /// Diagnosis of the SMC-R handshake's Decline, 0 if there was none.
    pub diagnosis: AtomicU32,
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
    /// Epoll registrations ([`crate::ready::RegRef`] bits, 0 = none).
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
    /// Plain reads one after another that found nothing.
    dry: AtomicU32,
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
        if s.has(F_TCP_ONLY) {
            s.pin(Reason::UnsupportedOption);
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
            &self.tx.watched,
            &self.rx.passed,
            &self.rx.error,
            &self.rx.reset_told,
            &self.spin_ns,
            &self.hold,
            &self.dry,
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
        self.diagnosis.store(0, Relaxed);
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

    /// How this process came to the connection, as policy rules distinguish it.
    pub fn role(&self) -> Role {
        if self.has(F_ACCEPTED) {
            Role::Listen
        } else {
            Role::Connect
        }
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

    /// Runs `f` on a descriptor of this stream, from a thread that is not the program's. Closing waits for
    /// it: otherwise a system call of ours could keep the open file, and with it epoll registrations, alive
    /// a moment longer than the program's close. `None`: closed.
    pub fn with_fd<T>(&self, f: impl FnOnce(i32) -> T) -> Option<T> {
        let _g = self.watch.lock()?;
        let fd = self.fd.load(Relaxed);
        crate::fds::is_sock(fd, self).then(|| f(fd))
    }

    /// The program waits for this stream, by a call that we see.
    pub fn awaited(&self) {
        if !self.has(F_AWAITED) {
            self.flags.fetch_or(F_AWAITED, Relaxed);
            if self.limbo() {
                // The handshake may wait for this.
                crate::node::call_engine();
            }
        }
    }

    /// A read that may wait is about to be called, on TCP. Whoever waits by other calls reads when there is something.
    #[inline]
    pub fn may_wait_in_read(&self) {
        // (One that stays on TCP for good is not asked at each read.)
        if !self.has(F_AWAITED | F_NONBLOCK) && self.pinned.load(Relaxed) == 0 {
            self.look_whether_it_waits();
        }
    }

    #[cold]
    fn look_whether_it_waits(&self) {
        if crate::sys::ioctl_int(self.fd.load(Relaxed), libc::FIONREAD) == Ok(0) {
            self.awaited();
        }
    }

    /// A call has read nothing, without waiting for something.
    pub fn read_nothing(&self) {
        if self.dry.fetch_add(1, Relaxed) >= DRY_READS {
            self.awaited();
        }
    }

    /// Whether the program would notice bytes in an RMB. It would not if it waited for them by io_uring, or by epoll_wait
    /// as a raw system call, while its reads went through us. Not to be asked about a closed one. (One that blocks has yet
    /// to show that it waits in its reads: until then, what it receives stays on TCP.)
    pub fn waits_are_seen(&self) -> bool {
        // What the kernel says: that may have been set by a raw call, too.
        let flags = self.with_fd(|fd| crate::sys::fcntl(fd, libc::F_GETFL, 0));
        let Some(Ok(flags)) = flags else { return false };
        let nonblock = flags & libc::O_NONBLOCK != 0;
        nonblock == self.has(F_NONBLOCK) && (!nonblock || self.has(F_AWAITED))
    }

    /// Counts bytes that a plain call moved, and looks whether the connection is worth upgrading.
    pub fn count_plain(&self, tx: bool, n: u64) {
        let tcp = if tx { &self.tx.tcp } else { &self.rx.tcp };
        tcp.fetch_add(n, Relaxed);
        if !tx {
            self.dry.store(0, Relaxed);
        }
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

    /// Why the connection is not on RMBs, where something was noted.
    pub fn noted(&self) -> Option<Reason> {
        Reason::from_code(self.reason.load(Relaxed))
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
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The object is used again for another socket, of which nothing is known.
    #[test]
    fn empty_reads_of_another_socket_do_not_count() {
        let s = Sock::default();
        (0..DRY_READS).for_each(|_| s.read_nothing());
        assert!(!s.has(F_AWAITED));
        s.reset(0);
        s.read_nothing();
        assert!(!s.has(F_AWAITED));
        (0..DRY_READS).for_each(|_| s.read_nothing());
        assert!(s.has(F_AWAITED));
    }
}
