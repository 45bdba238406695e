//! Receiving.

use core::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use core::sync::atomic::fence;

use libc::{MSG_DONTWAIT, MSG_PEEK, MSG_TRUNC, MSG_WAITALL, iovec};

use super::beyond::kernel_has;
use super::peek::peek_tcp;
use super::switch::acknowledge;
use super::{F_BROKEN, F_LEFT, F_SHUT_RD, F_URGENT, Sock};
use crate::fabric::shm::{LOG, TX_BLOCKED, TX_CLOSED, TX_DONE};
use crate::observe::Reason;
use crate::ring::iov_len;
use crate::sys::{self, Errno, Result};

/// Empty reads after which the kernel is asked whether the connection has ended.
const ASK_KERNEL_EVERY: u32 = 16;

/// Where the next bytes of a direction are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// So many bytes can be read from the RMB.
    Ring(usize),
    /// Nothing in the RMB, which is the carrier.
    RingEmpty,
    /// TCP is the carrier, up to so many bytes if a switch is known.
    Tcp(Option<u64>),
    /// A recall is under way.
    Frozen,
}

/// What receiving says while a recall is under way. Not for programs.
pub(super) const FROZEN: Errno = Errno::EBUSY;

/// How often, and for how long each time (us), a recall's end is waited for.
const THAW_LOOKS: u32 = 400;
const THAW_US: u64 = 50;

pub(super) enum RingEnd {
    Eof,
    /// TCP holds bytes that should not be there.
    Foreign,
    /// There is something after all.
    Retry,
}

/// Values of [`super::Rx`]'s hint beside 0.
const HINT: u32 = 1;
const LOOKING: u32 = 2;

impl super::Rx {
    /// Has the kernel asked at the next look.
    pub(crate) fn hint_now(&self) {
        self.hint.store(HINT, SeqCst);
    }

    /// The kernel is about to be asked. Others ask it as well meanwhile, as it may have more than this look takes.
    pub(super) fn look(&self) {
        self.hint.store(LOOKING, SeqCst);
    }

    /// It has been asked, and has or may have more, or has nothing: then it need not be asked again, unless it has reported
    /// something since, or somebody has found more.
    pub(super) fn looked(&self, more: bool) {
        if more {
            self.hint.store(HINT, Relaxed);
        } else {
            let _ = self.hint.compare_exchange(LOOKING, 0, SeqCst, Relaxed);
        }
    }
}

impl Sock {
    /// recv(2) on a managed connection.
    ///
    /// # Safety
    /// The list must describe writable memory (unless MSG_TRUNC discards).
    pub unsafe fn recv(&self, fd: i32, iov: &[iovec], flags: i32) -> Result<usize> {
        let total = iov_len(iov).min(sys::MAX_RW_COUNT);
        let nonblock = flags & MSG_DONTWAIT != 0 || self.has(super::F_NONBLOCK);
        // A call that doesn't wait takes what is there at once.
        let all = flags & MSG_WAITALL != 0 && !nonblock;
        let mut done = 0;
        let mut wait = super::wait::Wait::new(self, fd, false);
        if total == 0 {
            return self.recv_nothing(fd, flags);
        }
        if flags & MSG_PEEK != 0 {
            // SAFETY: promised by the caller.
            return unsafe { self.recv_peek(fd, iov, total, flags) };
        }
        loop {
            let r = {
                let Some(_g) = self.rx.lock.lock() else {
                    return Err(Errno::EAGAIN);
                };
                if !crate::fds::is_sock(fd, self) {
                    return if done > 0 {
                        Ok(done)
                    } else {
                        Err(Errno::ESTALE)
                    };
                }
                if !self.managed() {
                    None
                } else if done > 0 && self.no_more(fd) {
                    return Ok(done);
                } else {
                    // SAFETY: promised by the caller.
                    Some(unsafe { self.pull(fd, iov, done, total, flags) })
                }
            };
            let Some(r) = r else {
                if done == 0 {
                    return Err(Errno::ESTALE);
                }
                // MSG_WAITALL, and gone back to plain TCP in the middle. With bytes to tell of the kernel would not look
                // at errors.
                if !kernel_has(fd, 0) && sys::poll_now(fd, libc::POLLRDHUP) != 0 {
                    return Ok(done);
                }
                // SAFETY: promised by the caller.
                match unsafe { self.plain_rest(false, fd, iov, done, total, flags) } {
                    Ok(n) if n > 0 => done += n,
                    Err(Errno::ESTALE) => continue,
                    _ => return Ok(done),
                }
                if done >= total {
                    return Ok(done);
                }
                continue;
            };
            if self.has(F_LEFT | F_URGENT) {
                if self.has(F_LEFT) {
                    self.try_detach();
                }
                self.signal_urgent();
            }
            let Some(r) = self.unless_thawed(r) else {
                continue;
            };
            match r {
                Ok(0) => return Ok(done),
                Ok(n) => {
                    done += n;
                    if done >= total || !all || self.stops_at_mark(0) {
                        return Ok(done);
                    }
                }
                Err(_) if done > 0 && self.stops_at_mark(0) => return Ok(done),
                Err(Errno::EAGAIN) if !nonblock => match wait.sleep() {
                    Ok(()) => {}
                    Err(_) if done > 0 => return Ok(done),
                    Err(e) => return Err(e),
                },
                Err(e) if done > 0 => {
                    self.keep_plain_error(fd, false, e);
                    return Ok(done);
                }
                Err(e) => return Err(e),
            }
        }
    }

    /// What a receiving call goes on with: `None` if it found a recall under way ([`FROZEN`]) that has ended now, so that it
    /// has to look again. Without locks.
    #[inline]
    pub(super) fn unless_thawed(&self, r: Result<usize>) -> Option<Result<usize>> {
        match r {
            Err(FROZEN) if self.thaws() => None,
            Err(FROZEN) => Some(Err(Errno::EAGAIN)),
            r => Some(r),
        }
    }

    /// Waits for the end of a recall, without locks. TCP has what it has announced, so a call that doesn't wait waits for
    /// this as well: microseconds, while the peer answers. False: it takes too long, or this is a signal handler that
    /// has interrupted who recalls.
    #[cold]
    fn thaws(&self) -> bool {
        soon(|| self.rx.frozen.load(Relaxed) == 0)
    }

    /// recv(2) of no bytes: waits for some as any other, and says what there is to say of the connection. Where it had to
    /// wait, whatever ended that is nothing to tell of: the kernel doesn't look again.
    #[cold]
    fn recv_nothing(&self, fd: i32, flags: i32) -> Result<usize> {
        let v = iovec {
            iov_base: core::ptr::null_mut(),
            iov_len: 1,
        };
        let waits = flags & MSG_DONTWAIT == 0 && !self.has(super::F_NONBLOCK);
        let flags = flags & MSG_DONTWAIT | MSG_PEEK | MSG_TRUNC;
        // SAFETY: nothing is written with MSG_TRUNC.
        match unsafe { self.recv(fd, &[v], flags) } {
            Ok(_) => Ok(0),
            Err(Errno::EAGAIN | Errno::EINTR) if waits => Ok(0),
            Err(e) => Err(e),
        }
    }

    /// Takes what is there, on both sides of a switch if it comes to one: a program that gets less than
    /// it asked for may take the stream for drained (epoll(7)). Under `rx.lock`, managed. `Ok(0)`: end of stream.
    ///
    /// # Safety
    /// The list must describe writable memory (unless MSG_TRUNC discards).
    unsafe fn pull(
        &self,
        fd: i32,
        iov: &[iovec],
        skip: usize,
        total: usize,
        flags: i32,
    ) -> Result<usize> {
        let mut got = 0;
        loop {
            // SAFETY: promised by the caller.
            match unsafe { self.pull_once(fd, iov, skip + got, total, flags) } {
                Ok(n) => {
                    got += n;
                    if n == 0 || skip + got >= total || !self.at_switch(fd) || !self.more_beyond(fd)
                    {
                        return Ok(got);
                    }
                }
                Err(e) if got > 0 => {
                    self.keep_error(false, e);
                    return Ok(got);
                }
                Err(e) => return Err(e),
            }
        }
    }

    /// Takes what is there on one carrier.
    ///
    /// # Safety
    /// As for `pull`.
    #[inline(always)]
    pub(super) unsafe fn pull_once(
        &self,
        fd: i32,
        iov: &[iovec],
        skip: usize,
        total: usize,
        flags: i32,
    ) -> Result<usize> {
        loop {
            let mut want = self.locate()?;
            let special = self.has(F_BROKEN | F_URGENT);
            if special {
                if self.has(F_BROKEN) {
                    return Err(Errno::ECONNRESET);
                }
                want = self.locate_before_mark()?;
                if skip > 0 && self.stops_at_mark(0) {
                    return Err(Errno::EAGAIN);
                }
            }
            match want {
                Want::Frozen => return Err(FROZEN),
                Want::Ring(avail) => {
                    let n = avail.min(total - skip);
                    let pos = self.rx.off();
                    if flags & MSG_TRUNC == 0 {
                        // SAFETY: `n` bytes at `pos` have been published by the sender, which does not
                        // touch them until the cursor moves; the list is as promised.
                        unsafe { self.rx_ring().read(pos, iov, skip, n) };
                    }
                    if flags & MSG_PEEK == 0 {
                        self.consume(pos, n);
                        if special {
                            self.mind_mark();
                        }
                    }
                    return Ok(n);
                }
                Want::RingEmpty => match self.ring_ended(fd)? {
                    RingEnd::Retry => continue,
                    RingEnd::Eof => return Ok(0),
                    RingEnd::Foreign => {
                        // Foreign bytes: somebody wrote to the TCP socket behind the sender's back.
                        // SAFETY: the caller's list.
                        let n = unsafe { self.recv_tcp(fd, iov, skip, total, total, flags) }?;
                        self.pin(Reason::BehindOurBack);
                        return Ok(n);
                    }
                },
                Want::Tcp(bound) => {
                    // SAFETY: promised by the caller.
                    match unsafe { self.pull_tcp(fd, iov, skip, total, flags, bound) } {
                        Err(Errno::EINPROGRESS) => continue,
                        r => return r,
                    }
                }
            }
        }
    }

    /// Finds where the next byte is, passing switches that have been reached. Under `rx.lock`.
    pub(super) fn locate(&self) -> Result<Want> {
        if self.rx.frozen.load(Relaxed) != 0 {
            return Ok(Want::Frozen);
        }
        self.locate_now()
    }

    /// As [`Sock::locate`], recall or not.
    pub(super) fn locate_now(&self) -> Result<Want> {
        let dir = self.inc();
        let pos = self.rx.off();
        loop {
            // The cursor before the log: a cursor that belongs to a later stay on the RMB is never
            // seen without the switches that led to it.
            let prod = dir.tx.prod.load(Acquire);
            let head = dir.tx.switches.load(Acquire);
            let passed = self.rx.passed.load(Relaxed);
            let ahead = head.wrapping_sub(passed);
            if ahead as usize > LOG {
                return Err(self.violation());
            }
            let bound = (ahead > 0).then(|| dir.log[passed as usize % LOG].load(Relaxed));
            match bound {
                Some(b) if b < pos => return Err(self.violation()),
                Some(b) if b == pos => {
                    self.rx.passed.store(passed.wrapping_add(1), Relaxed);
                    dir.rx.passed.store(passed.wrapping_add(1), Release);
                    continue;
                }
                _ => {}
            }
            if passed & 1 == 0 {
                return Ok(Want::Tcp(bound.map(|b| b - pos)));
            }
            let end = prod.min(bound.unwrap_or(u64::MAX));
            if end < pos || end - pos > u64::from(self.rx_ring().size()) {
                return Err(self.violation());
            }
            if end > pos {
                return Ok(Want::Ring((end - pos) as usize));
            }
            if bound.is_some() {
                // A known switch further on, and nothing written before it: it cannot be so, unless the cursor,
                // which was read first, has moved meanwhile.
                if dir.tx.prod.load(Acquire) == prod {
                    return Err(self.violation());
                }
                continue;
            }
            if self.link().is_dead() && !self.link().fixed() {
                // The sender died while this direction was on the RMB, and all it published has been
                // read (the cursor was loaded before; look again now that it can't move any more).
                if dir.tx.prod.load(Acquire) == prod && dir.tx.switches.load(Acquire) == head {
                    self.rx.passed.store(passed.wrapping_add(1), Relaxed);
                    dir.tx.switches.store(passed.wrapping_add(1), Relaxed);
                    return Ok(Want::Tcp(None));
                }
                continue;
            }
            return Ok(Want::RingEmpty);
        }
    }

    /// Moves the consumer cursor over `n` bytes of the ring.
    #[inline(always)]
    pub(super) fn consume(&self, pos: u64, n: usize) {
        let dir = self.inc();
        let pos = pos + n as u64;
        self.rx.rmb.fetch_add(n as u64, Relaxed);
        self.rx.empty.store(0, Relaxed);
        dir.rx.cons.store(pos, Release);
        fence(SeqCst);
        if dir.tx.flags.load(Relaxed) & TX_BLOCKED != 0 {
            let used = dir.tx.prod.load(Relaxed).wrapping_sub(pos);
            if used.saturating_mul(4) <= 3 * u64::from(self.rx_ring().size()) {
                self.tell_peer();
            }
        }
    }

    /// The ring is empty and is the carrier: asks the kernel, if there is a reason to, whether the
    /// connection has ended. `Err(EAGAIN)`: nothing yet.
    pub(super) fn ring_ended(&self, fd: i32) -> Result<RingEnd> {
        if self.fixed() {
            return self.fixed_ended();
        }
        let told = self.inc().tx.flags.load(Acquire) & (TX_DONE | TX_CLOSED) != 0;
        let ask = told
            || self.rx.hint.load(Relaxed) != 0
            || self.rx.error.load(Relaxed) != 0
            || self.has(F_SHUT_RD)
            || self.rx.empty.fetch_add(1, Relaxed) >= ASK_KERNEL_EVERY;
        if !ask {
            return Err(Errno::EAGAIN);
        }
        self.rx.empty.store(0, Relaxed);
        self.rx.look();
        let mut byte = 0u8;
        let v = iovec {
            iov_base: (&raw mut byte).cast(),
            iov_len: 1,
        };
        let r = match self.take_error() {
            // SAFETY: one writable byte.
            None => unsafe { sys::recv(fd, &[v], MSG_PEEK | MSG_DONTWAIT) },
            Some(e) => Err(e),
        };
        self.rx.looked(r.is_ok());
        // What the peer did before it ended the connection may have come after our look at the ring.
        let still = self.locate()? == Want::RingEmpty;
        match r {
            Err(Errno::EAGAIN) if still => Err(Errno::EAGAIN),
            Err(Errno::EAGAIN) => Ok(RingEnd::Retry),
            Err(e) if still => Err(e),
            Err(e) => {
                // The kernel reports an error once; it is due when the ring has been drained.
                self.owe_error(e);
                Ok(RingEnd::Retry)
            }
            Ok(n) => Ok(match (still, n) {
                (false, _) => RingEnd::Retry,
                (true, 0) => RingEnd::Eof,
                (true, _) => RingEnd::Foreign,
            }),
        }
    }

    /// # Safety
    /// As for `pull`.
    unsafe fn pull_tcp(
        &self,
        fd: i32,
        iov: &[iovec],
        skip: usize,
        total: usize,
        flags: i32,
        bound: Option<u64>,
    ) -> Result<usize> {
        let dir = self.inc();
        if self.peer_left() {
            self.flags.fetch_or(F_LEFT, Relaxed);
        }
        if bound.is_none()
            && self.rx.error.load(Relaxed) != 0
            && let Some(e) = self.take_error()
        {
            return Err(e);
        }
        let mut want = total - skip;
        match bound {
            Some(b) => want = want.min(usize::try_from(b).unwrap_or(usize::MAX)),
            None => {
                self.try_ready_rx(fd);
                // No switch is known: the sender must not leave TCP and come back to it during this
                // read (see `Sock::tx_log`). It sees the flag, or we see its switch.
                dir.rx.unbounded.store(1, SeqCst);
                fence(SeqCst);
                if dir.tx.switches.load(SeqCst) != self.rx.passed.load(Relaxed) {
                    dir.rx.unbounded.store(0, Release);
                    return Err(Errno::EINPROGRESS);
                }
            }
        }
        self.rx.look();
        // SAFETY: the caller's list.
        let r = unsafe { self.recv_tcp(fd, iov, skip, skip + want, total, flags) };
        dir.rx.unbounded.store(0, Release);
        self.rx.looked(r != Err(Errno::EAGAIN));
        match r {
            Ok(n) if n > 0 && flags & (MSG_PEEK | libc::MSG_OOB) != 0 => {}
            Ok(n) if n > 0 => {
                self.dry.store(0, Relaxed);
                self.rx.tcp.fetch_add(n as u64, Relaxed);
                dir.rx.cons.store(self.rx.off(), Release);
                if bound.is_none() {
                    self.try_ready_rx(fd);
                    if self.tx.switches.load(Relaxed) & 1 == 1 {
                        acknowledge(fd);
                    }
                }
            }
            // Nothing, the end, or an error; but the sender may have gone to the RMB before it.
            _ if bound.is_none()
                && dir.tx.switches.load(Acquire) != self.rx.passed.load(Relaxed) =>
            {
                if let Err(e) = r
                    && e != Errno::EAGAIN
                {
                    self.owe_error(e);
                }
                return Err(Errno::EINPROGRESS);
            }
            Err(Errno::EAGAIN) => self.read_nothing(),
            _ => {}
        }
        r
    }

    /// Takes what the kernel has, for the part of a list from `skip` up to `end`.
    ///
    /// # Safety
    /// The list must describe writable memory (unless MSG_TRUNC discards), `total` bytes.
    #[inline(never)]
    unsafe fn recv_tcp(
        &self,
        fd: i32,
        iov: &[iovec],
        skip: usize,
        end: usize,
        total: usize,
        flags: i32,
    ) -> Result<usize> {
        if flags & MSG_PEEK != 0 {
            // SAFETY: promised by the caller.
            return unsafe { peek_tcp(fd, iov, end, total, flags) };
        }
        let flags = flags & !MSG_WAITALL | MSG_DONTWAIT;
        self.in_pieces(fd, false, iov, skip, end - skip, |list| {
            // SAFETY: part of the caller's list.
            unsafe { sys::recv(fd, list, flags) }
        })
    }

    /// Bytes that can be read from the ring now. Under `rx.lock` or for a rough answer.
    pub(super) fn rx_ring_bytes(&self) -> usize {
        match self.locate() {
            Ok(Want::Ring(n)) => n,
            _ => 0,
        }
    }

    /// What FIONREAD answers.
    pub fn readable_bytes(&self, fd: i32) -> Result<usize> {
        loop {
            let Some(_g) = self.rx.lock.lock() else {
                return Err(Errno::EAGAIN);
            };
            if !self.managed() {
                return Err(Errno::ESTALE);
            }
            if self.has(F_URGENT) {
                return self.readable_to_mark();
            }
            let at = self.locate()?;
            let kernel = sys::ioctl_int(fd, libc::FIONREAD)? as usize;
            return Ok(match at {
                // Bytes behind the next switch: the ring's after TCP's, or TCP's after the ring's. The ring's don't count
                // while some of TCP's are under way.
                Want::Tcp(Some(b)) if (kernel as u64) < b => kernel,
                Want::Tcp(Some(b)) => {
                    let behind = self.end_of_stay().saturating_sub(self.rx.off() + b);
                    kernel + behind.min(u64::from(self.rx_ring().size())) as usize
                }
                Want::Tcp(None) | Want::RingEmpty => kernel,
                Want::Ring(n) => n + kernel,
                Want::Frozen => {
                    // The bytes are on their way from the ring to TCP: a matter of microseconds,
                    // and bounded by the downgrade's own time-out.
                    drop(_g);
                    sys::sleep_us(50);
                    continue;
                }
            });
        }
    }

    /// Bytes in the ring that the program has not read.
    pub fn unread_by_us(&self) -> usize {
        let Some(_g) = self.rx.lock.lock() else {
            return 0;
        };
        if self.managed() {
            self.rx_ring_bytes()
        } else {
            0
        }
    }

    /// Bytes of the ring we write that the peer has not read.
    pub fn unread_by_peer(&self) -> usize {
        let Some(_g) = self.tx.lock.lock() else {
            return 0;
        };
        self.unread_in_ring() as usize
    }
}

/// Waits for what the end of a recall brings about. False: the peer keeps us waiting.
#[cold]
pub(super) fn soon(mut over: impl FnMut() -> bool) -> bool {
    (0..THAW_LOOKS).any(|_| {
        sys::sleep_us(THAW_US);
        over()
    })
}
