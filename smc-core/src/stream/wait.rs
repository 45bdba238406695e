//! Blocking: look, spin, sleep.

use core::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};
use core::sync::atomic::{AtomicU64, fence};

use libc::{POLLIN, POLLOUT, pollfd, timespec, timeval};

use super::Sock;
use super::signals::Taking;
use crate::fabric::shm::{TX_CLOSED, TX_DONE};
use crate::sys::{Errno, Result};
use crate::{engine, node, sys};

/// Longest sleep of a thread for which no bell is left.
const SLICE_NS: u64 = 2_000_000;

/// Spinning goes on for this long before the core is offered to others. Where both ends share a core this bounds
/// what spinning costs; where they don't, the answer of a quick peer is there before.
const YIELD_AFTER_NS: u64 = 1_000;

/// A yield that takes so long has given the core to somebody who doesn't give it back: ns.
const LONG_YIELD_NS: u64 = 500_000;
/// Where fewer spins than this have come between two of those, they cost more than spinning wins.
const SPINS_APART: u64 = 64;
/// For so many times what the last one took nobody yields then: so the next one costs a twentieth at most.
const PAUSE: u64 = 20;
/// How long is spun meanwhile, ns.
const CONTENDED_SPIN_NS: u64 = 3_000;

/// Until when cores are taken to be busy with others, ns.
static CONTENDED: AtomicU64 = AtomicU64::new(0);
/// Count of spins at the last long yield.
static SPINS_BEFORE: AtomicU64 = AtomicU64::new(0);

/// One blocking call's waiting.
pub struct Wait<'a> {
    sock: &'a Sock,
    fd: i32,
    tx: bool,
    /// When the present lack of progress began; 0: not yet.
    since: u64,
    /// SO_RCVTIMEO or SO_SNDTIMEO: `Some(None)` once known to be absent, else the deadline.
    deadline: Option<Option<u64>>,
    last_off: u64,
}

impl<'a> Wait<'a> {
    /// For a call that sends (`tx`) or receives.
    pub fn new(sock: &'a Sock, fd: i32, tx: bool) -> Self {
        Wait {
            sock,
            fd,
            tx,
            since: 0,
            deadline: None,
            last_off: 0,
        }
    }

    /// Whether a sender has waited so long that its bytes should go over TCP.
    pub fn spill(&self) -> bool {
        self.since != 0 && sys::now_ns() - self.since >= self.sock.spill_after_ns()
    }

    /// Waits until there may be something to do. `Err(EAGAIN)`: the socket's timeout is over, or
    /// another process made it non-blocking; `Err(EINTR)`: a signal.
    pub fn sleep(&mut self) -> Result<()> {
        let s = self.sock;
        if !self.tx {
            s.awaited();
        }
        let cons = if self.tx && s.managed() {
            s.out().rx.cons.load(Relaxed)
        } else {
            0
        };
        let (max, fixed) = (engine::spin_ns(), s.fixed());
        // Reading the clock is a system call on some machines: not where nothing depends on it.
        let timed = max > 0 || self.tx && !fixed || s.has(super::F_TIMEOUT);
        let start = if timed { sys::now_ns() } else { 1 };
        if self.since == 0 || self.tx && cons != self.last_off {
            self.since = start;
            self.last_off = cons;
        }
        let budget = u64::from(s.spin_ns.load(Relaxed)).min(max);
        if spin(start, budget, || self.ready()) {
            return Ok(());
        }
        let deadline = self.deadline(start);
        if deadline.is_some_and(|d| d <= start) {
            return Err(Errno::EAGAIN);
        }
        // Another process that shares the socket may have made it non-blocking; none shares a fixed one.
        let nonblocking = |f: i32| f & libc::O_NONBLOCK != 0;
        if !fixed && sys::fcntl(self.fd, libc::F_GETFL, 0).is_ok_and(nonblocking) {
            return Err(Errno::EAGAIN);
        }
        let r = self.sleep_in_kernel(deadline, self.deadline_of_spill(start));
        if max == 0 {
            return r;
        }
        let slept = sys::now_ns() - start;
        // As KVM's halt polling: a short sleep says that spinning would have been right.
        let next = if slept < 4 * max { max } else { budget / 2 };
        s.spin_ns.store(next as u32, Relaxed);
        r
    }

    /// As [`Wait::sleep`], for a peek that wants more bytes than there are.
    pub(super) fn sleep_for_more(&mut self) -> Result<()> {
        let start = sys::now_ns();
        let deadline = self.deadline(start);
        if deadline.is_some_and(|d| d <= start) || self.sock.ended() {
            return Err(Errno::EAGAIN);
        }
        // Level-triggered waiting would return at once for the bytes already there.
        self.sleep_slice(1_000_000)
    }

    fn deadline_of_spill(&self, now: u64) -> Option<u64> {
        if !self.tx || self.sock.fixed() {
            return None;
        }
        let after = self.sock.spill_after_ns();
        // A receiver that has not allowed it in time is asked again after the same time.
        let at = match self.since + after {
            past if past <= now => now + after,
            at => at,
        };
        (self.sock.tx.switches.load(Relaxed) & 1 == 1).then_some(at)
    }

    fn deadline(&mut self, start: u64) -> Option<u64> {
        if !self.sock.has(super::F_TIMEOUT) {
            return None;
        }
        let (tx, fd) = (self.tx, self.fd);
        let never = if tx {
            super::F_TX_NEVER_WAITS
        } else {
            super::F_RX_NEVER_WAITS
        };
        if self.sock.has(never) {
            return Some(start);
        }
        *self.deadline.get_or_insert_with(|| {
            let name = if tx {
                libc::SO_SNDTIMEO
            } else {
                libc::SO_RCVTIMEO
            };
            let t: timeval = sys::getsockopt(fd, libc::SOL_SOCKET, name).ok()?;
            let ns = (t.tv_sec as u64)
                .saturating_mul(1_000_000_000)
                .saturating_add(t.tv_usec as u64 * 1000);
            (ns > 0).then(|| start.saturating_add(ns))
        })
    }

    /// A look without locks; a wrong answer costs one turn.
    fn ready(&self) -> bool {
        let s = self.sock;
        if !s.managed() {
            return true;
        }
        if self.tx {
            return s.tx.switches.load(Relaxed) & 1 == 1 && s.tx_writable(false);
        }
        s.rx_news()
    }

    fn sleep_slice(&self, ns: u64) -> Result<()> {
        let mut none: [pollfd; 0] = [];
        let ts = timespec {
            tv_sec: 0,
            tv_nsec: ns as i64,
        };
        sys::ppoll(&mut none, Some(ts), None).map(drop)
    }

    fn sleep_in_kernel(&self, deadline: Option<u64>, spill: Option<u64>) -> Result<()> {
        let s = self.sock;
        let fixed = s.fixed();
        let bell = node::thread_bell();
        let seat = bell.and_then(|b| s.take_seat(b));
        let none = pollfd {
            fd: -1,
            events: POLLIN,
            revents: 0,
        };
        let mut fds = [
            pollfd {
                // Where TCP carries nothing, it has nothing to say either.
                fd: if fixed { -1 } else { self.fd },
                events: 0,
                revents: 0,
            },
            none,
            none,
        ];
        if fixed {
            fds[0].fd = s.doze().unwrap_or(-1);
        }
        let signals = Taking::now(deadline.is_some());
        fds[2].fd = signals.fd;
        let (mut limit, mut slice) = (deadline, false);
        let on_rmb = if self.tx {
            s.tx.switches.load(Relaxed) & 1 == 1
        } else {
            s.rx.passed.load(Relaxed) & 1 == 1
        };
        fds[0].events = match (self.tx, on_rmb) {
            _ if fixed => POLLIN,
            (true, true) => 0,
            (true, false) => POLLOUT,
            (false, _) if s.rx.frozen.load(Relaxed) != 0 => 0,
            (false, _) => POLLIN,
        };
        if let Some(at) = spill {
            limit = Some(limit.map_or(at, |l| l.min(at)));
            slice = true;
        }
        if seat.is_none() {
            let at = sys::now_ns() + SLICE_NS;
            limit = Some(limit.map_or(at, |l| l.min(at)));
            slice = true;
        }
        if let (Some(b), Some(_)) = (bell, seat) {
            fds[1].fd = node::bell_fd(b).unwrap_or(-1);
            node::about_to_sleep(b);
        }
        let asleep = if self.tx && on_rmb {
            s.managed() && !s.tx_writable(true)
        } else {
            !self.ready()
        };
        let r = if asleep {
            let timeout = limit.map(|l| {
                let ns = l.saturating_sub(sys::now_ns());
                timespec {
                    tv_sec: (ns / 1_000_000_000) as i64,
                    tv_nsec: (ns % 1_000_000_000) as i64,
                }
            });
            sys::ppoll(&mut fds, timeout, signals.mask.as_ref())
        } else {
            Ok(1)
        };
        if let (Some(b), Some(_)) = (bell, seat) {
            node::awake(b);
            s.leave_bell(b);
            if fds[1].revents != 0 {
                sys::eventfd_drain(fds[1].fd);
            }
        }
        if bell.is_some() {
            node::end_use();
        }
        if fds[0].revents != 0 {
            if fixed {
                s.wake_up();
            } else {
                s.rx.hint.store(1, SeqCst);
            }
        }
        match r {
            Ok(0) if slice => Ok(()),
            Ok(0) => Err(Errno::EAGAIN),
            Ok(_) => Ok(()),
            Err(Errno::EINTR) if !signals.interrupts => Ok(()),
            Err(e) => Err(e),
        }
    }
}

impl Sock {
    /// Waits as a blocking call would until the socket may be written (`tx`) or read. Errors as
    /// for `send` and `recv`; EAGAIN at once on a non-blocking socket.
    pub fn block(&self, fd: i32, tx: bool) -> Result<()> {
        if self.has(super::F_NONBLOCK) {
            return Err(Errno::EAGAIN);
        }
        Wait::new(self, fd, tx).sleep()
    }

    /// Whether the receiving side may have news. Without locks.
    pub(super) fn rx_news(&self) -> bool {
        let dir = self.inc();
        let passed = self.rx.passed.load(Relaxed);
        if dir.tx.switches.load(Relaxed) != passed {
            // News unless it only says "later, on the RMB": the TCP part is the kernel's to report.
            return passed & 1 == 1
                || dir.log[passed as usize % crate::fabric::shm::LOG].load(Relaxed)
                    == self.rx.off();
        }
        passed & 1 == 1
            && (dir.tx.prod.load(Acquire) != self.rx.off()
                || dir.tx.flags.load(Relaxed) & (TX_DONE | TX_CLOSED) != 0
                    && (self.rx.hint.load(Relaxed) != 0 || self.link().fixed())
                || self.link().is_dead())
    }

    fn ended(&self) -> bool {
        !self.managed()
            || self.link().is_dead()
            || self.inc().tx.flags.load(Relaxed) & (TX_DONE | TX_CLOSED) != 0
    }

    /// Enters a bell to be rung on changes. Leave with [`Sock::leave_bell`].
    pub fn take_seat(&self, bell: u32) -> Option<usize> {
        let _g = self.watch.lock()?;
        let i = self
            .waiters
            .iter()
            .position(|w| w.load(Relaxed) == 0 || w.load(Relaxed) == bell + 1)?;
        self.waiters[i].store(bell + 1, SeqCst);
        self.renotify();
        fence(SeqCst);
        Some(i)
    }

    /// Leaves the seat of a bell, if it has one. (By bell, not by position: the object may have been
    /// reused while we slept, and the position be somebody else's.)
    pub fn leave_bell(&self, bell: u32) {
        let _g = self.watch.lock();
        for w in &self.waiters {
            if w.load(Relaxed) == bell + 1 {
                w.store(0, SeqCst);
            }
        }
        self.renotify();
    }
}

/// Waits for another descriptor, as a call that sleeps on that would.
pub fn wait_for(fd: i32, events: i16) -> Result<()> {
    loop {
        let signals = Taking::now(false);
        let one = |fd, events| pollfd {
            fd,
            events,
            revents: 0,
        };
        let mut fds = [one(fd, events), one(signals.fd, POLLIN)];
        match sys::ppoll(&mut fds, None, signals.mask.as_ref()) {
            Ok(_) if fds[0].revents != 0 => return Ok(()),
            Err(e) if e != Errno::EINTR || signals.interrupts => return Err(e),
            _ => {}
        }
    }
}

/// Spins until `ready`, at most `budget` ns. Yields now and then, so that a peer on the same core runs. Where others keep
/// the core when they get it, nobody yields: a thread that is woken runs soon, as with TCP, but one that yields only in its
/// turn, milliseconds later. Then it spins for as long as the answer of a peer takes that is just running, and sleeps.
/// Where spinning is never worth anything, as there is one core, only what a device has to send is let go first.
pub fn spin(start: u64, budget: u64, ready: impl Fn() -> bool) -> bool {
    if budget == 0 {
        if engine::spin_ns() == 0 {
            crate::link::table::let_devices_work();
        }
        return ready();
    }
    let contended = start < CONTENDED.load(Relaxed);
    let budget = if contended {
        budget.min(CONTENDED_SPIN_NS)
    } else {
        budget
    };
    node::COUNTERS.spins.fetch_add(1, Relaxed);
    let mut next_yield = start + YIELD_AFTER_NS;
    loop {
        crate::link::table::poll();
        for _ in 0..32 {
            if ready() {
                return true;
            }
            core::hint::spin_loop();
        }
        let now = sys::now_ns();
        if now - start >= budget {
            return ready();
        }
        if now >= next_yield && !contended {
            sys::sched_yield();
            let after = sys::now_ns();
            if after - now > LONG_YIELD_NS {
                let spins = node::COUNTERS.spins.load(Relaxed);
                if spins - SPINS_BEFORE.swap(spins, Relaxed).min(spins) < SPINS_APART {
                    CONTENDED.store(after + PAUSE * (after - now), Relaxed);
                }
                return ready();
            }
            next_yield = after + YIELD_AFTER_NS;
        }
    }
}
