//! Changing the carrier: evidence, upgrade, downgrade, recall.
//!
//! **Log.** The sender of a direction appends (offset) to the log; entry n is a switch to the RMB
//! when n is even, to TCP when n is odd, counted from 0. It writes the entry, then `switches`
//! (Release). Killed between the two, it has not switched. The receiver reads up to the offset, then
//! passes the entry. A switch to the RMB waits until the receiver has passed all before it, so the ring
//! holds nothing older than the last one, and there is always room for the next.
//!
//! **Bounds.** While a direction is on TCP the receiver may be in a read that no known switch
//! bounds. If the sender went to the RMB and came back to TCP during that one read, bytes from
//! before and after the stay could be returned together. So the receiver flags such reads
//! (`unbounded`), and the sender goes back to TCP only when it sees the flag clear. Flag and `switches`
//! are written before a fence and the other's is read after it: either the sender sees the flag,
//! or the receiver sees the switch and bounds its read.
//!
//! **Recall.** A receiver that needs its direction on TCP *now* (fork, exec, passing the descriptor)
//! freezes its reading and asks the sender's engine. Under the sender's lock the engine takes the ring's unread
//! bytes back, logs the switch at the receiver's cursor, and sends those bytes over TCP before anything
//! else. Afterwards the kernel alone holds the stream.

use core::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use core::sync::atomic::fence;

use super::rx::soon;
use super::{F_AWAITED, F_INHERITED, F_SHUT_WR, Sock, Want};
use crate::fabric::shm::{LOG, RX_PINNED, RX_READY, TX_CLOSED, TX_DONE};
use crate::observe::Reason;
use crate::sys::{self, TcpInfo};
use crate::{engine, lock};

/// In place of a recall's offset: go to TCP, but leave in the ring what is there.
const LEAVE_RING: u64 = u64::MAX;

/// How long a downgrade waits for the peer's engine.
const RECALL_TIMEOUT_NS: u64 = 3_000_000_000;

/// How long a recall waits for the receiver's read to end. Who asks has stopped reading before, so its
/// flag should not stand at all; and the engine has others to serve.
const RECALL_PATIENCE_NS: u64 = 2_000_000;

/// A downgrade of both directions in progress.
pub struct Downgrade {
    sock: &'static Sock,
    /// The peer's acknowledgement to wait for; 0 when none is needed.
    ticket: u32,
    generation: u32,
    until: u64,
    /// The stream's `hold` is raised.
    holds: bool,
    /// Our direction as well, not only the other.
    both: bool,
    /// Nothing may stay in the rings.
    empty: bool,
    /// The connection can't go back to TCP,
    fixed: bool,
    /// except that it is still being negotiated, which is given up now.
    limbo: bool,
}

impl Sock {
    /// Appends a switch at `at`. Under `tx.lock`. False: the receiver is in an unbounded TCP read
    /// and must be waited for.
    pub(super) fn tx_log(&self, at: u64) -> bool {
        let dir = self.out();
        let head = self.tx.switches.load(Relaxed);
        let to_tcp = head & 1 == 1;
        if to_tcp && !self.peer_left() {
            fence(SeqCst);
            if dir.rx.unbounded.load(SeqCst) != 0 {
                return false;
            }
            if head.wrapping_sub(dir.rx.passed.load(Acquire)) as usize >= LOG {
                return false;
            }
        }
        if !to_tcp {
            self.tx.last_up.store(at, Relaxed);
            dir.tx.prod.store(at, Relaxed);
            engine::COUNTERS.upgrades.fetch_add(1, Relaxed);
        } else {
            engine::COUNTERS.downgrades.fetch_add(1, Relaxed);
        }
        dir.log[head as usize % LOG].store(at, Relaxed);
        self.tx.switches.store(head.wrapping_add(1), Relaxed);
        dir.tx.switches.store(head.wrapping_add(1), SeqCst);
        self.tell_peer();
        if to_tcp {
            // A second thread of ours may be waiting for room in the ring.
            self.on_event();
        }
        true
    }

    /// As [`Sock::tx_log`] to TCP, waiting for the receiver's read to end until `until` (ns). Without
    /// locks. True: our direction is on TCP.
    fn tx_to_tcp(&self, until: u64) -> bool {
        loop {
            {
                let Some(_g) = self.tx.lock.lock() else {
                    return false;
                };
                if !self.managed()
                    || self.tx.switches.load(Relaxed) & 1 == 0
                    || self.tx_log(self.tx.off())
                {
                    return true;
                }
            }
            if sys::now_ns() > until {
                return false;
            }
            sys::sleep_us(50);
        }
    }

    /// Puts our direction on the RMB if the receiver agrees and the evidence holds. Under `tx.lock`,
    /// on TCP. Two loads when nothing has changed.
    pub(super) fn try_upgrade_tx(&self, fd: i32) -> bool {
        let dir = self.out();
        let wish = dir.rx.flags.load(Acquire);
        if wish & (RX_READY | RX_PINNED) != RX_READY || self.pinned.load(Relaxed) != 0 {
            return false;
        }
        let head = self.tx.switches.load(Relaxed);
        if self.tx.tcp.load(Relaxed) == 0
            || self.plain_tx.load(SeqCst) != 0
            || self.hold.load(SeqCst) != 0
            || !self.tx.backlog.load(Relaxed).is_null()
            // The receiver has read all that was ever in the ring: the ring is free.
            || head != dir.rx.passed.load(Acquire)
            || self.peer_left()
            || self.link().leaving.load(Acquire)
            || self.has(F_SHUT_WR)
        {
            return false;
        }
        let Ok(info) = TcpInfo::of(fd) else {
            return false;
        };
        if !info.established() {
            return false;
        }
        if info.sent_total() != self.tx.tcp.load(Relaxed) {
            self.pin(Reason::BehindOurBack);
            return false;
        }
        // After the evidence: a plain call that ended meanwhile has counted its bytes by now.
        let up = self.tx_log(self.tx.off());
        if up {
            acknowledge(fd);
        }
        up
    }

    /// Whether the peer wants what we send on TCP, for now or for good. Engine, while managed.
    pub(crate) fn peer_pins(&self) -> bool {
        self.out().rx.flags.load(Acquire) & RX_PINNED != 0
    }

    /// Agrees to the RMB for what we receive, once the evidence holds. Under `rx.lock`, on TCP.
    pub(super) fn try_ready_rx(&self, fd: i32) {
        let line = &self.inc().rx;
        if line.flags.load(Relaxed) & (RX_READY | RX_PINNED) != 0
            || self.pinned.load(Relaxed) != 0
            // Who waits for a blocking socket by calls that we don't see would not notice bytes in the ring.
            || !self.has(F_AWAITED)
            || self.rx.tcp.load(Relaxed) == 0
            || self.plain_rx.load(SeqCst) != 0
        {
            return;
        }
        for _ in 0..3 {
            let (Ok(unread), Ok(info), Ok(again)) = (
                sys::ioctl_int(fd, libc::FIONREAD),
                TcpInfo::of(fd),
                sys::ioctl_int(fd, libc::FIONREAD),
            ) else {
                return;
            };
            if !info.established() {
                return;
            }
            if unread != again {
                continue;
            }
            if info.bytes_received.wrapping_sub(unread as u64) == self.rx.tcp.load(Relaxed) {
                line.cons.store(self.rx.off(), Release);
                line.flags.fetch_or(RX_READY, SeqCst);
            } else {
                self.pin(Reason::BehindOurBack);
                line.flags.fetch_or(RX_PINNED, SeqCst);
            }
            return;
        }
    }

    /// Puts our direction back on TCP, if the receiver allows it now. Under `tx.lock`.
    pub(super) fn spill_tx(&self) -> bool {
        let ok = self.tx_log(self.tx.off());
        if ok {
            engine::COUNTERS.count(Reason::Spilled);
        }
        ok
    }

    /// Starts to put both directions on TCP so that the kernel holds all of them: ours at once if the ring is
    /// empty, else by having the receiver recall what is in it; the other by a recall of our own. Reading
    /// stops until [`Downgrade::finish`].
    pub fn downgrade(&'static self, pin: Option<Reason>) -> Downgrade {
        self.start_downgrade(pin, true, true)
    }

    /// Starts to put both directions on TCP while only this process goes on using the stream: what lies in
    /// the rings stays there and is read from there first.
    pub fn downgrade_here(&'static self, pin: Option<Reason>) -> Downgrade {
        self.start_downgrade(pin, true, false)
    }

    /// The same for what we receive only: the sender has asked for it.
    pub fn downgrade_rx(&'static self) -> Downgrade {
        self.start_downgrade(None, false, true)
    }

    /// Puts what we receive on TCP, as this end is about to be shut down in both directions: the kernel resets a connection on
    /// which more comes then (RFC 1122, 4.2.2.13). What lies in the ring can be read. Waits for the peer, but not for one
    /// that stands still.
    pub fn leave_reading(&'static self) {
        let d = self.start_downgrade(Some(Reason::Closed), false, false);
        let _ = d.done().is_some() || soon(|| d.done().is_some());
        d.finish();
    }

    fn start_downgrade(&'static self, pin: Option<Reason>, both: bool, empty: bool) -> Downgrade {
        let until = sys::now_ns() + RECALL_TIMEOUT_NS;
        let mut d = Downgrade {
            sock: self,
            ticket: 0,
            generation: self.generation.load(Relaxed),
            until,
            holds: false,
            both,
            empty,
            fixed: self.fixed(),
            limbo: self.limbo(),
        };
        if d.fixed {
            if d.limbo {
                engine::decline(self);
            }
            return d;
        }
        if let Some(r) = pin {
            self.pin(r);
            fence(SeqCst);
        }
        if !self.managed() {
            return d;
        }
        self.hold.fetch_add(1, SeqCst);
        d.holds = true;
        if both && !self.tx_home(if empty { until } else { 0 }) && empty {
            // Comes back as a recall; `done` waits for it.
            engine::ask_recall(self);
        }
        let (link, slot, at);
        {
            let Some(_g) = self.rx.lock.lock() else {
                return d;
            };
            if !self.managed() {
                return d;
            }
            let dir = self.inc();
            let was = dir.rx.flags.swap(RX_PINNED, SeqCst);
            // Only a direction that was ever agreed to can be, or be about to be, on the RMB.
            let used = was & RX_READY != 0 || dir.tx.switches.load(SeqCst) != 0;
            if !used || self.link().is_dead() {
                return d;
            }
            self.rx
                .freeze(matches!(self.locate_now(), Ok(Want::Ring(_))));
            at = if empty { self.rx.off() } else { LEAVE_RING };
            (link, slot) = (self.link(), self.slot.load(Relaxed));
            if link.twin.load(Acquire).is_null() {
                d.ticket = engine::recall(self, link, slot, at);
                return d;
            }
        }
        // Both ends are in this process: not under our lock, for the other end takes its own.
        d.ticket = engine::recall(self, link, slot, at);
        d
    }

    /// Whether the kernel holds all that we have sent, doing what can be done for it now: with nothing in the ring
    /// the carrier is switched, and what was recalled is sent. After `patience` (ns) the bytes in the
    /// ring are left there.
    fn tx_home(&self, patience: u64) -> bool {
        let Some(_g) = self.tx.lock.lock() else {
            return false;
        };
        if !self.managed() {
            return true;
        }
        if self.tx.switches.load(Relaxed) & 1 == 1 {
            let off = self.tx.off();
            let empty = self.in_ring(off, self.out().rx.cons.load(Acquire)) == 0;
            let give_up = self.peer_left() || sys::now_ns() > patience;
            if !(empty || give_up) || !self.tx_log(off) {
                return false;
            }
        }
        !matches!(self.flush_backlog(self.fd.load(Relaxed)), Ok(false))
    }

    /// The sender's engine answers a recall: unread bytes go back to TCP.
    pub fn recalled(&self, at: u64) -> bool {
        let until = sys::now_ns() + RECALL_PATIENCE_NS;
        loop {
            let Some(_g) = self.tx.lock.lock() else {
                return false;
            };
            if !self.managed() {
                return true;
            }
            if self.tx.switches.load(Relaxed) & 1 == 0 {
                return true;
            }
            if self.has(F_SHUT_WR) {
                // FIN is out: TCP takes no more bytes. The receiver keeps what is in the ring.
                return false;
            }
            let off = self.tx.off();
            let from = if at == LEAVE_RING {
                off
            } else {
                at.max(self.tx.last_up.load(Relaxed))
            };
            let ring = self.tx_ring();
            if from > off || off - from > u64::from(ring.size()) {
                self.violation();
                return true;
            }
            let mut bytes = vec![0u8; (off - from) as usize].into_boxed_slice();
            let v = libc::iovec {
                iov_base: bytes.as_mut_ptr().cast(),
                iov_len: bytes.len(),
            };
            // SAFETY: the ring still holds the bytes between the frozen consumer cursor and `off`.
            unsafe { ring.read(from, &[v], 0, bytes.len()) };
            if !self.tx_log(from) {
                drop(_g);
                if sys::now_ns() > until {
                    return false;
                }
                sys::sleep_us(50);
                continue;
            }
            self.tx.rmb.fetch_sub(bytes.len() as u64, Relaxed);
            if !bytes.is_empty() {
                self.set_backlog(bytes);
                let fd = self.fd.load(Relaxed);
                // The receiver waits for these bytes now: Nagle's algorithm must not hold them for an
                // acknowledgement that the receiver's kernel delays. (See `own_nodelay`.)
                let nagle =
                    sys::getsockopt::<i32>(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY) == Ok(0);
                if nagle {
                    let _ = sys::setsockopt(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY, &1i32);
                }
                let left = matches!(self.flush_backlog(fd), Ok(false));
                if nagle {
                    let _ = sys::setsockopt(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY, &0i32);
                }
                if left {
                    engine::want_writable(self);
                }
            }
            return true;
        }
    }

    /// Runs the program's own call on TCP_NODELAY, which must neither see what [`Sock::recalled`] sets for a moment, under
    /// the same lock, nor be undone by it.
    pub(crate) fn own_nodelay<T>(&self, call: impl FnOnce() -> T) -> T {
        // `None`: a signal handler has interrupted this thread's send, so nobody else has it.
        let _g = self.tx.lock.lock();
        call()
    }

    /// Whether all that is still to be read is on TCP. Under `rx.lock`, on TCP. A stay on the RMB may lie ahead, behind
    /// unread bytes on TCP; if a recall has taken back all of it, it begins and ends at one offset.
    fn rest_is_tcp(&self) -> bool {
        let dir = self.inc();
        let passed = self.rx.passed.load(Relaxed);
        let entry = |n: u32| dir.log[passed.wrapping_add(n) as usize % LOG].load(Relaxed);
        match dir.tx.switches.load(Acquire).wrapping_sub(passed) {
            0 => true,
            2 => entry(0) == entry(1),
            _ => false,
        }
    }

    /// Sends more of the recalled bytes; engine. True: none are left.
    pub fn continue_backlog(&self) -> bool {
        let Some(_g) = self.tx.lock.lock() else {
            return false;
        };
        let done =
            !self.managed() || !matches!(self.flush_backlog(self.fd.load(Relaxed)), Ok(false));
        drop(_g);
        if done {
            self.on_event();
        }
        done
    }

    /// The engine's test hook: switches our direction to TCP; the next send earns the RMB again.
    pub fn flip(&'static self) {
        if let Some(_g) = self.tx.lock.lock()
            && self.managed()
            && !self.fixed()
            && self.tx.switches.load(Relaxed) & 1 == 1
            && self.out().rx.passed.load(Acquire).wrapping_add(3) > self.tx.switches.load(Relaxed)
        {
            self.tx_log(self.tx.off());
            engine::COUNTERS.count(Reason::TestFlip);
        }
    }

    /// The link's peer is gone: what we send goes to the kernel from now on. Waits for the receiver until
    /// `until` (ns) at most. Engine.
    pub fn link_lost(&self, until: u64) {
        // A peer that was killed inside a read keeps its flag: then `dead` decides, soon after.
        self.tx_to_tcp(until);
        self.note(Reason::LinkLost);
        self.rx.hint.store(1, SeqCst);
        self.on_event();
    }

    /// Called before a process's first use of a socket that came from another process.
    #[cold]
    pub fn claim_inherited(&'static self) {
        if self.flags.fetch_and(!F_INHERITED, SeqCst) & F_INHERITED != 0 && lock::tid() != 0 {
            engine::claim_end(self);
        }
    }
}

impl Downgrade {
    /// Whether the kernel holds the whole stream now; `None`: not known yet. False: it does not (the peer did
    /// not answer, or has left with bytes that only we hold).
    pub fn done(&self) -> Option<bool> {
        let s = self.sock;
        if self.limbo && self.current() && s.limbo() {
            return self.given_up();
        }
        if self.fixed {
            return Some(!self.current());
        }
        let patience = if self.empty {
            self.until - RECALL_TIMEOUT_NS / 2
        } else {
            0
        };
        if self.both && self.holds && self.current() && !s.tx_home(patience) {
            return self.given_up();
        }
        let Some(_g) = s.rx.lock.lock() else {
            return Some(false);
        };
        if !self.current() {
            return Some(true);
        }
        let answered = s.rx.recall_done.load(SeqCst).wrapping_sub(self.ticket) as i32 >= 0;
        if self.ticket == 0 || s.link().is_dead() || answered {
            let at = s.locate_now();
            // An empty ring whose sender has left, or sent its FIN, needs no switch: the kernel has the rest.
            let ended = s.inc().tx.flags.load(Acquire) & (TX_DONE | TX_CLOSED) != 0;
            return Some(match at {
                Ok(Want::Tcp(_)) if self.under_way() => return self.given_up(),
                Ok(Want::Tcp(_)) => s.rest_is_tcp(),
                Ok(Want::RingEmpty) => ended,
                Ok(_) => !self.empty,
                Err(_) => true,
            });
        }
        self.given_up()
    }

    /// Whether bytes that were in the ring have been sent by TCP and none of them is there yet: they were readable, and
    /// are to be so when reading goes on. Under `rx.lock`, on TCP.
    fn under_way(&self) -> bool {
        let (s, fd) = (self.sock, self.sock.fd.load(Relaxed));
        s.rx.kept()
            && !s.link().is_dead()
            && sys::ioctl_int(fd, libc::FIONREAD) == Ok(0)
            && sys::poll_now(fd, libc::POLLRDHUP) == 0
    }

    /// What [`Downgrade::done`] says while the peer keeps us waiting.
    fn given_up(&self) -> Option<bool> {
        if sys::now_ns() <= self.until {
            return None;
        }
        self.sock.note(Reason::Timeout);
        Some(false)
    }

    /// Waits for [`Downgrade::done`].
    pub fn wait(&self) -> bool {
        for turn in 0u32.. {
            if let Some(r) = self.done() {
                return r;
            }
            if turn < 20 {
                sys::sched_yield()
            } else {
                sys::sleep_us(100)
            }
        }
        false
    }

    /// The stream.
    pub fn sock(&self) -> &'static Sock {
        self.sock
    }

    /// Called when the kernel could not be made to hold the stream: another process must not read a
    /// stream with a hole, so the connection is reset. `why` is told of one that could not have gone back to TCP.
    pub fn reset(&self, why: Reason) {
        if self.current() {
            let why = if self.fixed { why } else { Reason::Timeout };
            self.sock.violation_of(why);
        }
    }

    /// Whether the stream is still managed, and the one whose downgrade was started.
    pub(crate) fn current(&self) -> bool {
        self.sock.managed() && self.sock.generation.load(Relaxed) == self.generation
    }

    /// Lets the stream be read again, and upgraded again unless it is pinned.
    pub fn finish(self) {
        let s = self.sock;
        {
            let Some(_g) = s.rx.lock.lock() else { return };
            if s.generation.load(Relaxed) != self.generation || !self.holds {
                return;
            }
            let others = s.hold.fetch_sub(1, SeqCst) > 1;
            if self.ticket != 0 {
                let _ =
                    s.rx.frozen
                        .fetch_update(SeqCst, SeqCst, |n| n.checked_sub(1));
            }
            if !self.current() {
                return;
            }
            s.rx.hint.store(1, Relaxed);
            if s.pinned.load(Relaxed) == 0 && !others {
                s.inc().rx.flags.fetch_and(!RX_PINNED, SeqCst);
            }
        }
        s.on_event();
    }
}

/// Has the kernel acknowledge what it has received, for a socket whose own bytes go by an RMB: none of them will take the
/// acknowledgement along, and the sender may wait for it (Nagle).
pub(super) fn acknowledge(fd: i32) {
    let _ = sys::setsockopt(fd, libc::IPPROTO_TCP, libc::TCP_QUICKACK, &1i32);
}
