//! Peeking (MSG_PEEK): a look at what the next reads would take, on both sides of switches.
//!
//! At most two switches lie ahead, as a sender goes to the RMB only when the receiver has passed all switches before.
//! So the bytes are TCP's, then the ring's, then TCP's again, or the ring's and then TCP's. What TCP has on both sides
//! of a stay on the RMB, the kernel has in one piece.

use core::sync::atomic::Ordering::{Acquire, Relaxed};

use libc::{MSG_DONTWAIT, MSG_PEEK, MSG_TRUNC, MSG_WAITALL, iovec};

use super::beyond::{has_mark, kernel_has};
use super::wait::Wait;
use super::{F_LEFT, F_NONBLOCK, F_URGENT, Sock};
use crate::fabric::shm::LOG;
use crate::sys::{self, Errno, Result};

/// Most elements of a list that are filled by one look at TCP next to a switch.
const PARTS: usize = 64;

/// A list made of parts of the caller's.
struct Parts {
    list: [iovec; PARTS],
    count: usize,
    bytes: usize,
}

impl Parts {
    fn new() -> Self {
        let none = iovec {
            iov_base: core::ptr::null_mut(),
            iov_len: 0,
        };
        Parts {
            list: [none; PARTS],
            count: 0,
            bytes: 0,
        }
    }

    /// Appends the part of a list from `skip` on, at most `want` bytes and as many elements as there is room for.
    fn add(&mut self, iov: &[iovec], mut skip: usize, mut want: usize) {
        for v in iov {
            if want == 0 || self.count == PARTS {
                return;
            }
            if skip >= v.iov_len {
                skip -= v.iov_len;
                continue;
            }
            let len = (v.iov_len - skip).min(want);
            self.list[self.count] = iovec {
                // The kernel alone uses it; with MSG_TRUNC it may be any address.
                iov_base: v.iov_base.wrapping_byte_add(skip),
                iov_len: len,
            };
            self.count += 1;
            self.bytes += len;
            want -= len;
            skip = 0;
        }
    }

    /// # Safety
    /// What was added must be writable memory (unless MSG_TRUNC discards).
    unsafe fn peek(&self, fd: i32, flags: i32) -> Result<usize> {
        let flags = flags & !MSG_WAITALL | MSG_DONTWAIT;
        // SAFETY: promised by the caller.
        unsafe { sys::recv(fd, &self.list[..self.count], flags) }
    }
}

/// Looks at the first `want` bytes that the kernel has.
///
/// # Safety
/// The list must describe writable memory (unless MSG_TRUNC discards), `total` bytes.
pub(super) unsafe fn peek_tcp(
    fd: i32,
    iov: &[iovec],
    want: usize,
    total: usize,
    flags: i32,
) -> Result<usize> {
    if want >= total {
        // SAFETY: the caller's list.
        return unsafe { sys::recv(fd, iov, flags & !MSG_WAITALL | MSG_DONTWAIT) };
    }
    let mut parts = Parts::new();
    parts.add(iov, 0, want);
    // SAFETY: part of the caller's list.
    unsafe { parts.peek(fd, flags) }
}

impl Sock {
    /// recv(2) with MSG_PEEK on a managed connection. Each look starts over; MSG_WAITALL wants it long enough, if that can be.
    ///
    /// # Safety
    /// The list must describe writable memory (unless MSG_TRUNC discards), `total` bytes.
    #[inline(never)]
    pub(super) unsafe fn recv_peek(
        &self,
        fd: i32,
        iov: &[iovec],
        total: usize,
        flags: i32,
    ) -> Result<usize> {
        let nonblock = flags & MSG_DONTWAIT != 0 || self.has(F_NONBLOCK);
        let all = flags & MSG_WAITALL != 0;
        let mut wait = Wait::new(self, fd, false);
        let mut last = false;
        loop {
            let r = {
                let Some(_g) = self.rx.lock.lock() else {
                    return Err(Errno::EAGAIN);
                };
                if !crate::fds::is_sock(fd, self) || !self.managed() {
                    return Err(Errno::ESTALE);
                }
                // SAFETY: promised by the caller.
                unsafe { self.peek(fd, iov, total, flags) }
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
                Ok(0) => return Ok(0),
                Ok(n) => {
                    let most = total.min(self.rx_ring().size() as usize);
                    if !all || nonblock || last || n >= most || self.stops_at_mark(n) {
                        return Ok(n);
                    }
                    if iov.len() > PARTS && self.readable_bytes(fd).is_ok_and(|all| all > n) {
                        // There are more, but not for this list.
                        return Ok(n);
                    }
                    // One more look: bytes may have come with what ends the wait.
                    last = wait.sleep_for_more().is_err();
                }
                Err(Errno::EAGAIN) if !nonblock => wait.sleep()?,
                Err(e) => return Err(e),
            }
        }
    }

    /// Looks at what is there. Under `rx.lock`, managed. `Ok(0)`: end of stream.
    ///
    /// # Safety
    /// The list must describe writable memory (unless MSG_TRUNC discards).
    unsafe fn peek(&self, fd: i32, iov: &[iovec], total: usize, flags: i32) -> Result<usize> {
        // Known here, so that what only reads do is left out.
        let flags = flags | MSG_PEEK;
        // SAFETY: promised by the caller.
        let n = unsafe { self.pull_once(fd, iov, 0, total, flags) }?;
        let switches = self.inc().tx.switches.load(Acquire);
        if n == 0 || n >= total || switches == self.rx.passed.load(Relaxed) {
            return Ok(n);
        }
        // As a read, it doesn't go over an urgent mark.
        if has_mark(fd) {
            return Ok(n);
        }
        // SAFETY: promised by the caller.
        Ok(unsafe { self.peek_beyond(fd, iov, n, total, flags) })
    }

    /// Where the bytes of the stay on the RMB that lies ahead end, as far as they are there. It may be over, and shorter than
    /// the cursor says: what was recalled is TCP's. Under `rx.lock`, on TCP.
    pub(super) fn end_of_stay(&self) -> u64 {
        let (dir, passed) = (self.inc(), self.rx.passed.load(Relaxed));
        // The cursor before the log, as in `locate_now`.
        let prod = dir.tx.prod.load(Acquire);
        if dir.tx.switches.load(Acquire).wrapping_sub(passed) < 2 {
            return prod;
        }
        prod.min(dir.log[passed.wrapping_add(1) as usize % LOG].load(Relaxed))
    }

    /// Goes on where the look at the present carrier has given `n` bytes and a switch is known. Returns how many there
    /// are with those.
    ///
    /// # Safety
    /// As for `peek`.
    #[cold]
    unsafe fn peek_beyond(
        &self,
        fd: i32,
        iov: &[iovec],
        n: usize,
        total: usize,
        flags: i32,
    ) -> usize {
        let dir = self.inc();
        let (pos, passed) = (self.rx.off(), self.rx.passed.load(Relaxed));
        let end = self.end_of_stay();
        let ahead = dir.tx.switches.load(Acquire).wrapping_sub(passed);
        let entry = |n: u32| dir.log[passed.wrapping_add(n) as usize % LOG].load(Relaxed);
        if ahead == 0 || entry(0) != pos + n as u64 {
            return n;
        }
        let mut parts = Parts::new();
        if passed & 1 == 1 {
            if !kernel_has(fd, 0) {
                return n;
            }
            parts.add(iov, n, total - n);
            // SAFETY: part of the caller's list.
            return n + unsafe { parts.peek(fd, flags) }.unwrap_or(0);
        }
        // What a peer has written is checked: here it only ends the look, the next read will find it.
        let start = entry(0);
        let Some(all) = end
            .checked_sub(start)
            .filter(|all| *all <= u64::from(self.rx_ring().size()))
        else {
            return n;
        };
        let some = (all as usize).min(total - n);
        if flags & MSG_TRUNC == 0 {
            // SAFETY: the sender has published these bytes, and does not touch them until the cursor moves; the
            // list is as promised.
            unsafe { self.rx_ring().read(start, iov, n, some) };
        }
        let got = n + some;
        if ahead < 2 || start + some as u64 != entry(1) || got >= total || !kernel_has(fd, n) {
            return got;
        }
        // In front of the bytes behind the stay on the RMB the kernel has those before it: once more to where they are.
        parts.add(iov, 0, n);
        if parts.bytes < n {
            return got;
        }
        parts.add(iov, got, total - got);
        // SAFETY: parts of the caller's list.
        let all = unsafe { parts.peek(fd, flags) }.unwrap_or(0);
        got + all.saturating_sub(n)
    }
}
