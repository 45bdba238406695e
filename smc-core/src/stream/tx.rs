//! Sending.

use core::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use core::sync::atomic::fence;

use libc::{MSG_DONTWAIT, MSG_MORE, MSG_NOSIGNAL, MSG_OOB, iovec};

use super::{F_BROKEN, F_ERROR, F_LEFT, F_SHUT_WR, Sock};
use crate::fabric::shm::{RX_ANY_ROOM, TX_BLOCKED, TX_CLOSED};
use crate::observe::Reason;
use crate::ring::iov_len;
use crate::sys::{self, Errno, Result};

/// A blocked sender whose receiver reads nothing for this long puts its bytes into the TCP socket
/// instead, so that a connection never holds less than TCP's own buffers would.
///
/// Long enough for a reader that merely lost its core for a while.
const SPILL_AFTER_NS: u64 = 20_000_000;
/// The same within one process, where the reader may be the very thread that waits.
const SPILL_AFTER_OWN_NS: u64 = 1_000_000;

impl Sock {
    /// send(2) on a managed connection. `Err(EPIPE)`: the caller raises SIGPIPE unless told not to.
    ///
    /// # Safety
    /// The list must describe readable memory.
    pub unsafe fn send(&self, fd: i32, iov: &[iovec], flags: i32) -> Result<usize> {
        let total = iov_len(iov).min(sys::MAX_RW_COUNT);
        // A program that we don't see waiting would miss the end of the handshake, as the kernel has told it already
        // that it may send. So it waits here.
        let nonblock = (flags & MSG_DONTWAIT != 0 || self.has(super::F_NONBLOCK))
            && (!self.limbo() || self.has(super::F_AWAITED));
        let mut done = 0;
        let mut wait = super::wait::Wait::new(self, fd, true);
        loop {
            let r = {
                let Some(_g) = self.tx.lock.lock() else {
                    return Err(Errno::EAGAIN);
                };
                if !crate::fds::is_sock(fd, self) {
                    return if done > 0 {
                        Ok(done)
                    } else {
                        Err(Errno::ESTALE)
                    };
                }
                if self.managed() {
                    // SAFETY: promised by the caller.
                    Some(unsafe { self.push(fd, iov, done, total, flags, wait.spill()) })
                } else {
                    None
                }
            };
            let Some(r) = r else {
                if done == 0 {
                    return Err(Errno::ESTALE);
                }
                // Gone back to plain TCP in the middle: the rest goes the kernel's way.
                // SAFETY: promised by the caller.
                match unsafe { self.plain_rest(true, fd, iov, done, total, flags) } {
                    Ok(n) => done += n,
                    Err(Errno::ESTALE) => continue,
                    Err(_) => return Ok(done),
                }
                if done >= total || nonblock {
                    return Ok(done);
                }
                continue;
            };
            if self.has(F_LEFT) {
                self.try_detach();
            }
            match r {
                Ok(n) => {
                    done += n;
                    if done >= total {
                        return Ok(done);
                    }
                }
                Err(Errno::EAGAIN) if !nonblock => match wait.sleep() {
                    Ok(()) => {}
                    Err(_) if done > 0 => return Ok(done),
                    Err(e) => return Err(e),
                },
                Err(e) if done > 0 => {
                    self.keep_plain_error(fd, true, e);
                    return Ok(done);
                }
                Err(e) => return Err(e),
            }
            if nonblock && done > 0 && r.is_err() {
                return Ok(done);
            }
        }
    }

    /// One plain call for what is left of a managed one, counted as any plain call. `Err(ESTALE)`: the
    /// connection is managed again. Another error is told by the next call, as this one has bytes to tell of.
    ///
    /// # Safety
    /// The list must describe readable memory to send (`tx`), writable memory to receive.
    pub(super) unsafe fn plain_rest(
        &self,
        tx: bool,
        fd: i32,
        iov: &[iovec],
        skip: usize,
        total: usize,
        flags: i32,
    ) -> Result<usize> {
        let inside = if tx { &self.plain_tx } else { &self.plain_rx };
        inside.fetch_add(1, SeqCst);
        let r = if self.managed() {
            Err(Errno::ESTALE)
        } else {
            self.in_pieces(fd, tx, iov, skip, total - skip, |list| match tx {
                // SAFETY: part of the caller's list.
                true => unsafe { sys::send(fd, list, flags | MSG_NOSIGNAL) },
                // SAFETY: part of the caller's list.
                false => unsafe { sys::recv(fd, list, flags) },
            })
        };
        self.count_plain(tx, r.unwrap_or(0) as u64);
        inside.fetch_sub(1, SeqCst);
        if let Err(e) = r {
            self.keep_plain_error(fd, tx, e);
        }
        r
    }

    /// Makes a call of the kernel's for the part of a list from `skip` on, `want` bytes long. One call where the
    /// part has few elements, or is all the rest of the list; else it takes several, as long as each moves all it gets.
    pub(super) fn in_pieces(
        &self,
        fd: i32,
        tx: bool,
        iov: &[iovec],
        skip: usize,
        want: usize,
        call: impl Fn(&[iovec]) -> Result<usize>,
    ) -> Result<usize> {
        let mut done = 0;
        loop {
            let (list, n) = sub_list(iov, skip + done, want - done);
            let mut list = &list[..n];
            let mut len = iov_len(list);
            if len < want - done
                && let Some(rest) = rest_from(iov, skip + done, want - done)
            {
                (list, len) = (rest, want - done);
            }
            match call(list) {
                Ok(n) => {
                    done += n;
                    if n < len || done >= want {
                        return Ok(done);
                    }
                }
                Err(e) if done > 0 => {
                    self.keep_plain_error(fd, tx, e);
                    return Ok(done);
                }
                Err(e) => return Err(e),
            }
        }
    }

    /// Moves as much as goes at once. Under `tx.lock`, managed.
    ///
    /// # Safety
    /// The list must describe readable memory.
    unsafe fn push(
        &self,
        fd: i32,
        iov: &[iovec],
        skip: usize,
        total: usize,
        flags: i32,
        spill: bool,
    ) -> Result<usize> {
        loop {
            if self.has(F_BROKEN | F_ERROR)
                && let Some(e) = self.error_of_send()
            {
                return Err(e);
            }
            if self.tx.switches.load(Relaxed) & 1 == 0 {
                if self.try_upgrade_tx(fd) {
                    continue;
                }
                // SAFETY: promised by the caller.
                return unsafe { self.push_tcp(fd, iov, skip, total, flags) };
            }
            if self.has(F_SHUT_WR) {
                if self.fixed() {
                    // While the handshake goes on the TCP socket is not shut down, and carries that.
                    return Err(Errno::EPIPE);
                }
                // SAFETY: promised by the caller. The kernel answers EPIPE.
                return unsafe { self.push_tcp(fd, iov, skip, total, flags) };
            }
            if self.fixed() && self.peer_left() {
                return Err(self.ended_send());
            }
            if self.peer_left() {
                // Nobody reads the ring any more: the kernel gives TCP's answer.
                self.tx_log(self.tx.off());
                continue;
            }
            if total == 0 {
                return Ok(0);
            }
            let room = self.room()?;
            if room == 0 {
                if self.fixed() {
                    return Err(Errno::EAGAIN);
                }
                if spill && self.spill_tx() {
                    continue;
                }
                if self.hung_up(fd) {
                    // SAFETY: promised by the caller. The kernel gives the error.
                    return unsafe { self.push_tcp(fd, iov, skip, total, flags) };
                }
                return Err(Errno::EAGAIN);
            }
            let off = self.tx.off();
            let n = room.min(total - skip);
            // SAFETY: `n` bytes fit between the cursors, where the receiver does not read; the list
            // is as promised.
            unsafe { self.tx_ring().write(off, iov, skip, n) };
            if flags & MSG_OOB != 0 {
                self.mark_urgent(off + n as u64, n == total - skip, flags);
            }
            self.commit_tx(off, n);
            return Ok(n);
        }
    }

    /// Publishes `n` bytes written at `off`.
    pub(super) fn commit_tx(&self, off: u64, n: usize) {
        let line = &self.out().tx;
        let end = off + n as u64;
        self.tx.rmb.fetch_add(n as u64, Relaxed);
        line.prod.store(end, Release);
        // Somebody may be waiting for a good part of the ring to become free: the wish stands until it is.
        if line.flags.load(Relaxed) & TX_BLOCKED != 0
            && self.enough_room(self.tx.cons.load(Relaxed), end)
        {
            line.flags.fetch_and(!TX_BLOCKED, Relaxed);
            // The receiver may have found the flag clear just now. Other threads of ours that wait
            // for room hear of it from us.
            self.on_event();
        }
        self.tell_peer();
    }

    /// Whether the receiver has left the connection or died.
    pub(super) fn peer_left(&self) -> bool {
        self.link().is_dead() || self.inc().tx.flags.load(Relaxed) & TX_CLOSED != 0
    }

    /// Free bytes of the ring we write; asks to be told of room when there is none.
    pub(super) fn room(&self) -> Result<usize> {
        let free = self.free()?;
        if free > 0 {
            return Ok(free);
        }
        self.out().tx.flags.fetch_or(TX_BLOCKED, SeqCst);
        fence(SeqCst);
        self.asked_for_room();
        self.free()
    }

    fn free(&self) -> Result<usize> {
        let (off, seen) = (self.tx.off(), self.tx.cons.load(Relaxed));
        let cons = self.out().rx.cons.load(Acquire);
        if cons < seen || cons > off {
            return Err(self.violation());
        }
        self.tx.cons.store(cons, Relaxed);
        let used = self.in_ring(off, cons) + self.spare();
        Ok(usize::try_from(u64::from(self.tx_ring().size()).saturating_sub(used)).unwrap_or(0))
    }

    /// Bytes of the ring that are left free.
    fn spare(&self) -> u64 {
        self.out().rx.spare.load(Relaxed).into()
    }

    /// Whether the connection is over in both directions, so that nobody will make room in the ring. The
    /// kernel is asked only if it has reported something.
    pub(super) fn hung_up(&self, fd: i32) -> bool {
        self.rx.hint.load(Relaxed) != 0 && sys::poll_now(fd, 0) & libc::POLLHUP != 0
    }

    /// Bytes that lie in the ring: those since the last switch to it that have not been read. (At
    /// that switch the receiver had left the ring, so it holds nothing older.)
    pub(super) fn in_ring(&self, off: u64, cons: u64) -> u64 {
        off.saturating_sub(cons.max(self.tx.last_up.load(Relaxed)))
    }

    /// Bytes of the ring we write that the peer has not read. Under `tx.lock`.
    pub(super) fn unread_in_ring(&self) -> u64 {
        if !self.managed() || self.tx.switches.load(Relaxed) & 1 == 0 {
            return 0;
        }
        let n = self.in_ring(self.tx.off(), self.out().rx.cons.load(Acquire));
        n.min(u64::from(self.tx_ring().size()))
    }

    /// How long a blocked sender waits for a receiver that does not read.
    pub(crate) fn spill_after_ns(&self) -> u64 {
        if self.managed() && !self.link().twin.load(Relaxed).is_null() {
            SPILL_AFTER_OWN_NS
        } else {
            SPILL_AFTER_NS
        }
    }

    /// Whether so much of the ring is free that a waiting sender should hear of it. As with TCP, a full
    /// stream counts as writable again only when a good part of it is free.
    fn enough_room(&self, cons: u64, off: u64) -> bool {
        let size = u64::from(self.tx_ring().size());
        if size == 0 {
            // Being negotiated.
            return false;
        }
        let room = size.saturating_sub(self.in_ring(off, cons) + self.spare());
        // Without the lock the two may not belong together: then look again.
        cons > off
            || room * 4 >= size
            || room > 0 && self.out().rx.flags.load(Relaxed) & RX_ANY_ROOM != 0
    }

    /// Whether a blocked or polling sender should be told that there is room; `arm`: if not, ask for it.
    /// Needs no lock.
    pub(super) fn tx_writable(&self, arm: bool) -> bool {
        let look = || {
            let cons = self.out().rx.cons.load(Acquire);
            self.enough_room(cons, self.tx.off())
        };
        if self.peer_left() || look() {
            return true;
        }
        if arm {
            self.out().tx.flags.fetch_or(TX_BLOCKED, SeqCst);
            fence(SeqCst);
            self.asked_for_room();
            return look();
        }
        false
    }

    /// # Safety
    /// The list must describe readable memory.
    unsafe fn push_tcp(
        &self,
        fd: i32,
        iov: &[iovec],
        skip: usize,
        total: usize,
        flags: i32,
    ) -> Result<usize> {
        if self.peer_left() {
            self.flags.fetch_or(F_LEFT, Relaxed);
        }
        if !self.flush_backlog(fd)? {
            return Err(Errno::EAGAIN);
        }
        let pass = MSG_MORE | MSG_OOB | libc::MSG_DONTROUTE | libc::MSG_ZEROCOPY;
        let flags = (flags & pass) | MSG_DONTWAIT | MSG_NOSIGNAL;
        let r = self.in_pieces(fd, true, iov, skip, total - skip, |list| {
            // SAFETY: part of the caller's list.
            unsafe { sys::send(fd, list, flags) }
        });
        if let Ok(n) = r {
            self.tx.tcp.fetch_add(n as u64, Relaxed);
        }
        self.tx.full.store(1, Relaxed);
        r
    }

    /// Sends recalled bytes. `Ok(true)`: none are left. Under `tx.lock`.
    pub(super) fn flush_backlog(&self, fd: i32) -> Result<bool> {
        let p = self.tx.backlog.load(Relaxed);
        if p.is_null() {
            return Ok(true);
        }
        if !crate::fds::is_sock(fd, self) {
            // Being closed: the number may be somebody else's already.
            return Err(Errno::EBADF);
        }
        loop {
            let (len, done) = (
                self.tx.backlog_len.load(Relaxed),
                self.tx.backlog_done.load(Relaxed),
            );
            if done >= len {
                self.drop_backlog();
                return Ok(true);
            }
            // SAFETY: the backlog has `len` bytes.
            let v = iovec {
                // SAFETY: done < len, within the backlog.
                iov_base: unsafe { p.add(done as usize) }.cast(),
                iov_len: (len - done) as usize,
            };
            self.tx.full.store(1, Relaxed);
            // SAFETY: as above.
            match unsafe { sys::send(fd, &[v], MSG_DONTWAIT | MSG_NOSIGNAL) } {
                Ok(n) => {
                    self.tx.tcp.fetch_add(n as u64, Relaxed);
                    self.tx.backlog_done.fetch_add(n as u64, Relaxed);
                }
                Err(Errno::EAGAIN) => return Ok(false),
                Err(e) => {
                    self.drop_backlog();
                    return Err(e);
                }
            }
        }
    }

    /// Sends what was recalled before the socket is closed or shut down; waits at most two seconds.
    pub fn drain_backlog(&self) {
        for _ in 0..2000 {
            let Some(_g) = self.tx.lock.lock() else {
                return;
            };
            if !self.managed() || !matches!(self.flush_backlog(self.fd.load(Relaxed)), Ok(false)) {
                return;
            }
            drop(_g);
            sys::sleep_us(1000);
        }
    }

    pub(super) fn drop_backlog(&self) {
        let p = self.tx.backlog.swap(core::ptr::null_mut(), Relaxed);
        if !p.is_null() {
            let len = self.tx.backlog_len.swap(0, Relaxed) as usize;
            // SAFETY: made by `set_backlog` from a boxed slice of this length.
            drop(unsafe { Box::from_raw(core::ptr::slice_from_raw_parts_mut(p, len)) });
        }
    }

    /// Bytes that TCP would count as not acknowledged, besides the kernel's: recalled ones that it does not have yet, and
    /// those in the ring that do not fit into its one half. A ring stands for the buffers of both ends, and that half
    /// for the receiver's. Under `tx.lock`.
    pub(crate) fn unacknowledged(&self) -> u64 {
        if !self.managed() {
            return 0;
        }
        if self.tx.switches.load(Relaxed) & 1 == 1 {
            let half = u64::from(self.tx_ring().size()) / 2;
            return self.unread_in_ring().saturating_sub(half);
        }
        if self.tx.backlog.load(Relaxed).is_null() {
            return 0;
        }
        let len = self.tx.backlog_len.load(Relaxed);
        len.saturating_sub(self.tx.backlog_done.load(Relaxed))
    }

    pub(super) fn set_backlog(&self, bytes: Box<[u8]>) {
        self.tx.backlog_len.store(bytes.len() as u64, Relaxed);
        self.tx.backlog_done.store(0, Relaxed);
        self.tx.backlog.store(Box::into_raw(bytes).cast(), Relaxed);
    }

    /// The peer broke a rule of the shared memory: this connection ends with a reset.
    #[cold]
    pub(super) fn violation(&self) -> Errno {
        self.violation_of(Reason::PeerViolation)
    }

    /// Ends the connection with a reset, for `reason`.
    #[cold]
    pub(super) fn violation_of(&self, reason: Reason) -> Errno {
        self.flags.fetch_or(F_BROKEN, Relaxed);
        self.pin(reason);
        let fd = self.fd.load(Relaxed);
        if self.fixed() {
            self.break_off(fd);
        } else if crate::fds::is_sock(fd, self) {
            // Another process image may read from it, which must not find what lies behind bytes that only we have.
            match sys::TcpInfo::of(fd) {
                Ok(info) if info.closed() => sys::discard_received(fd),
                _ => {
                    let _ = sys::disconnect(fd);
                }
            }
        }
        Errno::ECONNRESET
    }
}

/// The rest of a list from `skip` on, if it begins with an element and is `want` bytes long.
#[cold]
fn rest_from(iov: &[iovec], mut skip: usize, want: usize) -> Option<&[iovec]> {
    let begins = |v: &iovec| {
        let here = skip == 0;
        skip = skip.saturating_sub(v.iov_len);
        here
    };
    let rest = &iov[iov.iter().position(begins)?..];
    (iov_len(rest) == want).then_some(rest)
}

/// The part of a list from `skip` on, at most `want` bytes and 16 elements.
fn sub_list(iov: &[iovec], mut skip: usize, mut want: usize) -> ([iovec; 16], usize) {
    let mut out = [iovec {
        iov_base: core::ptr::null_mut(),
        iov_len: 0,
    }; 16];
    let mut n = 0;
    for v in iov {
        if skip >= v.iov_len {
            skip -= v.iov_len;
            continue;
        }
        let len = (v.iov_len - skip).min(want);
        // SAFETY: skip <= iov_len.
        out[n] = iovec {
            // SAFETY: skip <= iov_len.
            iov_base: unsafe { v.iov_base.cast::<u8>().add(skip) }.cast(),
            iov_len: len,
        };
        n += 1;
        skip = 0;
        want -= len;
        if n == out.len() || want == 0 {
            break;
        }
    }
    (out, n)
}
