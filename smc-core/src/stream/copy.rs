//! Bytes that go between a stream and another descriptor, without the program's memory: sendfile, splice.

use core::sync::atomic::Ordering::Relaxed;

use libc::{MSG_DONTWAIT, MSG_NOSIGNAL, MSG_PEEK, MSG_TRUNC, POLLOUT, iovec};

use super::rx::{FROZEN, RingEnd};
use super::{F_BROKEN, F_ERROR, F_LEFT, F_SHUT_WR, Sock, Want};
use crate::engine;
use crate::ring::Ring;
use crate::sys::{self, Errno, Result};

/// Bytes that are taken at a time while a direction is on TCP.
const PIECE: usize = 4096;

impl Sock {
    /// Sends bytes that `fill` puts where it is told to, at most as many as it is told, and that can't be put back
    /// where they come from: all of them count as sent. `spill`: see [`super::Wait::spill`]. `Ok(0)`: `fill` had none.
    /// `Err(ESTALE)`: not managed (any more).
    pub fn send_fill(
        &self,
        fd: i32,
        want: usize,
        spill: bool,
        fill: impl FnMut(*mut u8, usize) -> Result<usize>,
    ) -> Result<usize> {
        let r = {
            let Some(_g) = self.tx.lock.lock() else {
                return Err(Errno::EAGAIN);
            };
            if !crate::fds::is_sock(fd, self) || !self.managed() {
                return Err(Errno::ESTALE);
            }
            self.fill_some(fd, want, spill, fill)
        };
        if self.has(F_LEFT) {
            self.try_detach();
        }
        r
    }

    /// A copy that has sent bytes ends with an error. If that is the connection's, and not of where the bytes come from,
    /// the next call tells of it.
    #[cold]
    pub fn keep_error_of_copy(&self, fd: i32, e: Errno) {
        let of_connection = matches!(
            e,
            Errno::ECONNRESET | Errno::ETIMEDOUT | Errno::EHOSTUNREACH | Errno::ENETUNREACH
        );
        if of_connection {
            self.keep_kernel_error(fd, true, e);
        }
    }

    /// Under `tx.lock`, managed.
    fn fill_some(
        &self,
        fd: i32,
        want: usize,
        spill: bool,
        mut fill: impl FnMut(*mut u8, usize) -> Result<usize>,
    ) -> Result<usize> {
        if self.has(F_BROKEN | F_ERROR)
            && let Some(e) = self.error_of_send()
        {
            return Err(e);
        }
        if self.fixed() && self.has(F_SHUT_WR) {
            return Err(Errno::EPIPE);
        }
        if self.fixed() && self.peer_left() {
            return Err(self.ended_send());
        }
        let on_rmb = self.tx.switches.load(Relaxed) & 1 == 1;
        if self.has(F_SHUT_WR) || !on_rmb && !self.try_upgrade_tx(fd) {
            return self.fill_tcp(fd, want, fill);
        }
        if self.peer_left() {
            // Nobody reads the ring any more.
            self.tx_log(self.tx.off());
            return self.fill_tcp(fd, want, fill);
        }
        let room = self.room()?;
        if room == 0 {
            if self.fixed() {
                return Err(Errno::EAGAIN);
            }
            if spill && self.spill_tx() {
                return self.fill_tcp(fd, want, fill);
            }
            if self.hung_up(fd) {
                send_nothing(fd)?;
            }
            return Err(Errno::EAGAIN);
        }
        let off = self.tx.off();
        let (mut done, want) = (0, room.min(want));
        while done < want {
            let (p, k) = Ring::span(&self.tx_ring(), off + done as u64, want - done);
            match fill(p, k) {
                Ok(0) => break,
                Ok(n) => {
                    done += n.min(k);
                    if n < k {
                        break;
                    }
                }
                Err(_) if done > 0 => break,
                Err(e) => return Err(e),
            }
        }
        if done > 0 {
            self.commit_tx(off, done);
        }
        Ok(done)
    }

    /// The same on TCP. The kernel's own splice may wait for room, which must not be done here.
    #[cold]
    fn fill_tcp(
        &self,
        fd: i32,
        want: usize,
        mut fill: impl FnMut(*mut u8, usize) -> Result<usize>,
    ) -> Result<usize> {
        if self.peer_left() {
            self.flags.fetch_or(F_LEFT, Relaxed);
        }
        if !self.flush_backlog(fd)? {
            return Err(Errno::EAGAIN);
        }
        self.tx.full.store(1, Relaxed);
        // Before anything is taken.
        send_nothing(fd)?;
        if sys::poll_now(fd, POLLOUT) & POLLOUT == 0 {
            return Err(Errno::EAGAIN);
        }
        let mut bytes = [0u8; PIECE];
        let n = fill(bytes.as_mut_ptr(), want.min(PIECE))?.min(PIECE);
        if n == 0 {
            return Ok(0);
        }
        let v = iovec {
            iov_base: bytes.as_mut_ptr().cast(),
            iov_len: n,
        };
        // SAFETY: `n` bytes of the array.
        let sent = match unsafe { sys::send(fd, &[v], MSG_DONTWAIT | MSG_NOSIGNAL) } {
            Ok(sent) => {
                self.tx.tcp.fetch_add(sent as u64, Relaxed);
                sent
            }
            // A reset that comes just now, as it may come just after.
            Err(_) => 0,
        };
        if sent < n {
            self.set_backlog(Box::from(&bytes[sent..n]));
            engine::want_writable(self);
        }
        Ok(n)
    }

    /// Receives bytes by `take`, which gets some that lie together, and says how many it took; all others, or all if it
    /// fails, stay where they are. `more`: only bytes are looked for, as the end of the stream or an error is for another
    /// call to report. `Ok(0)`: end of stream. `Err(ESTALE)`: not managed (any more).
    pub fn recv_take(
        &self,
        fd: i32,
        want: usize,
        more: bool,
        mut take: impl FnMut(*mut u8, usize) -> Result<usize>,
    ) -> Result<usize> {
        let r = loop {
            let r = {
                let Some(_g) = self.rx.lock.lock() else {
                    return Err(Errno::EAGAIN);
                };
                if !crate::fds::is_sock(fd, self) || !self.managed() {
                    return Err(Errno::ESTALE);
                }
                self.take_some(fd, want, more, &mut take)
            };
            if let Some(r) = self.unless_thawed(r) {
                break r;
            }
        };
        if self.has(F_LEFT) {
            self.try_detach();
        }
        r
    }

    /// Under `rx.lock`, managed.
    fn take_some(
        &self,
        fd: i32,
        want: usize,
        more: bool,
        mut take: impl FnMut(*mut u8, usize) -> Result<usize>,
    ) -> Result<usize> {
        if self.has(F_BROKEN) {
            return Err(Errno::ECONNRESET);
        }
        loop {
            match self.locate_data()? {
                Want::Frozen => return Err(FROZEN),
                Want::Tcp(_) if more && sys::ioctl_int(fd, libc::FIONREAD)? == 0 => {
                    return Err(Errno::EAGAIN);
                }
                Want::Tcp(_) => return self.take_tcp(fd, want, take),
                Want::RingEmpty if more => return Err(Errno::EAGAIN),
                Want::RingEmpty => match self.ring_ended(fd)? {
                    RingEnd::Retry => {}
                    RingEnd::Eof => return Ok(0),
                    RingEnd::Foreign => return self.take_tcp(fd, want, take),
                },
                Want::Ring(avail) => {
                    let pos = self.rx.off();
                    let (p, k) = Ring::span(&self.rx_ring(), pos, avail.min(want));
                    let n = take(p, k)?.min(k);
                    self.consume(pos, n);
                    return Ok(n);
                }
            }
        }
    }

    /// The same on TCP: first a look at the bytes, and what was taken of them is received for good.
    #[cold]
    fn take_tcp(
        &self,
        fd: i32,
        want: usize,
        mut take: impl FnMut(*mut u8, usize) -> Result<usize>,
    ) -> Result<usize> {
        let (mut bytes, want) = ([0u8; PIECE], want.min(PIECE));
        let v = iovec {
            iov_base: bytes.as_mut_ptr().cast(),
            iov_len: want,
        };
        // SAFETY: `want` writable bytes of the array.
        let n = unsafe { self.pull_once(fd, &[v], 0, want, MSG_PEEK | MSG_DONTWAIT) }?;
        if n == 0 {
            return Ok(0);
        }
        let n = take(v.iov_base.cast(), n)?.min(n);
        // SAFETY: `n <= want`; nothing is written.
        unsafe { self.pull_once(fd, &[v], 0, n, MSG_TRUNC | MSG_DONTWAIT) }
    }
}

/// Sends nothing, which says what a send of anything would say of the connection.
fn send_nothing(fd: i32) -> Result<()> {
    // SAFETY: an empty list.
    unsafe { sys::send(fd, &[], MSG_DONTWAIT | MSG_NOSIGNAL) }.map(drop)
}
