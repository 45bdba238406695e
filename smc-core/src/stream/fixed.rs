//! SMC-R connections: what differs where a stream can't go back to TCP.
//!
//! Such a connection is on RMBs from its first byte to its last, as the protocol wants it. Before that, while it is
//! being negotiated, it is in *limbo*: attached to a link of its own kind, without rings, so that nothing can be
//! sent or received and nobody is told that it could. The TCP socket then only carries the handshake, and
//! afterwards nothing: that a direction has ended is said by CDC flags, not by FIN, and readiness comes from
//! the rings alone.
//!
//! A [`super::Downgrade`] of a connection in limbo gives the negotiation up; later it fails.

use core::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};

use libc::{POLLERR, POLLHUP, POLLPRI, POLLRDHUP};

use super::mask::{IN, OUT};
use super::rx::RingEnd;
use super::{F_BROKEN, F_SHUT_RD, F_SHUT_WR, PLAIN, Sock, Want};
use crate::fabric::shm::{TX_ABORT, TX_CLOSED, TX_DONE};
use crate::node::Link;
use crate::ready::{self, RegRef};
use crate::ring::Ring;
use crate::sys::{self, Errno, Result};

impl Sock {
    /// Attaches with both directions on the RMB from their first byte, for good: SMC-R, or limbo while it is
    /// being negotiated (no rings). Both direction locks are held; not managed before, or in limbo.
    pub fn attach_fixed(&self, link: &'static Link, slot: u32, tx_ring: Ring, rx_ring: Ring) {
        let limbo = self
            .managed()
            .then(|| (self.link(), self.slot.load(Relaxed)));
        // What was exchanged on TCP before was not the program's.
        for count in [&self.tx.tcp, &self.rx.tcp] {
            count.store(0, Relaxed);
        }
        for d in &link.block(slot).dir {
            d.log[0].store(0, Relaxed);
            d.tx.switches.store(1, Relaxed);
            d.rx.passed.store(1, Relaxed);
        }
        self.rx.urgent.reset();
        self.attach(link, slot, tx_ring, rx_ring);
        self.tx.switches.store(1, Relaxed);
        self.rx.passed.store(1, Relaxed);
        if let Some((link, slot)) = limbo {
            link.vacate(slot, self);
        }
        self.urgent_came_before();
    }

    /// Puts a connection into limbo, whose epoll registrations are taken over. False: it is closed, or not plain.
    pub(crate) fn enter_limbo(&self, limbo: &'static Link) -> bool {
        {
            let (Some(_t), Some(_r)) = (self.tx.lock.lock(), self.rx.lock.lock()) else {
                return false;
            };
            if self.state.load(Relaxed) != PLAIN {
                return false;
            }
            self.attach_fixed(limbo, 0, Ring::NONE, Ring::NONE);
        }
        self.attached();
        true
    }

    /// The handshake has ended without SMC-R: the connection is plain TCP from here or, with an error, reset.
    pub(crate) fn leave_limbo(&self, error: Option<Errno>) {
        if let Some(e) = error {
            self.flags.fetch_or(F_BROKEN, Relaxed);
            self.rx.error.store(e.into_raw() as u32, Relaxed);
        }
        {
            let (Some(_t), Some(_r)) = (self.tx.lock.lock(), self.rx.lock.lock()) else {
                return;
            };
            if !self.limbo() && error.is_none() {
                return;
            }
            self.with_fd(|fd| match error {
                Some(_) => drop(sys::disconnect(fd)),
                None => self.shut_down_late(fd),
            });
            self.detach();
        }
        for r in &self.regs {
            if let Some(r) = RegRef::unpack(r.load(Acquire)) {
                ready::unmanage(r, self);
            }
        }
        self.on_event();
    }

    /// The handshake has ended with SMC-R: the connection, if it is still the one of `generation`, moves on to a
    /// slot of a link group.
    pub(crate) fn leave_limbo_for(
        &self,
        generation: u32,
        link: &'static Link,
        slot: u32,
        tx_ring: Ring,
        rx_ring: Ring,
    ) -> bool {
        let mut owner = None;
        {
            let (Some(_t), Some(_r)) = (self.tx.lock.lock(), self.rx.lock.lock()) else {
                return false;
            };
            if self.generation.load(Relaxed) != generation || !self.limbo() {
                return false;
            }
            self.attach_fixed(link, slot, tx_ring, rx_ring);
            if self.has(F_SHUT_WR) {
                self.out().tx.flags.fetch_or(TX_DONE, SeqCst);
                self.tell_peer();
            }
            self.with_fd(|fd| self.shut_down_late(fd));
            let _w = self.watch.lock();
            self.renotify();
            self.owner_due(&mut owner);
        }
        if let Some(owner) = owner {
            owner.send_sigurg();
        }
        self.on_event();
        true
    }

    /// Does on the TCP connection what was put off during the handshake.
    fn shut_down_late(&self, fd: i32) {
        let how = match (self.has(F_SHUT_WR), self.has(F_SHUT_RD)) {
            (true, true) => libc::SHUT_RDWR,
            (true, false) => libc::SHUT_WR,
            (false, true) => libc::SHUT_RD,
            (false, false) => return,
        };
        let _ = sys::shutdown(fd, how);
    }

    /// The TCP connection of an SMC-R one was reset: so is that, once what has come is read. Engine.
    pub(crate) fn rdma_reset(&self) {
        if let Some(_g) = self.rx.lock.lock()
            && self.fixed()
            && !self.limbo()
        {
            self.inc().tx.flags.fetch_or(TX_ABORT | TX_CLOSED, SeqCst);
        }
        self.on_event();
    }

    /// Resets the TCP connection of one that was on `link`, a link that is dead. Engine.
    pub(crate) fn reset_tcp(&self, link: &Link) {
        self.with_fd(|fd| {
            if self.fixed() && core::ptr::eq(self.link(), link) {
                let _ = sys::disconnect(fd);
            }
        });
    }

    /// As [`Sock::reset_tcp`], by a program that closes its descriptor before the engine has come to that.
    pub(crate) fn reset_if_dead(&self, fd: i32) {
        if self.link().is_dead() {
            let _ = sys::disconnect(fd);
        }
    }

    /// Whether what the program sends and receives can only go by RMBs (see [`crate::node::Kind`]).
    #[inline]
    pub(crate) fn fixed(&self) -> bool {
        self.managed() && self.link().fixed()
    }

    /// Whether the shutdown waits for the end of the handshake, which still needs the TCP connection.
    pub(crate) fn defer_shutdown(&self, wr: bool, rd: bool) -> bool {
        let (Some(_t), Some(_r)) = (self.tx.lock.lock(), self.rx.lock.lock()) else {
            return false;
        };
        let f = if wr { F_SHUT_WR } else { 0 } | if rd { F_SHUT_RD } else { 0 };
        let limbo = self.limbo();
        if limbo {
            self.flags.fetch_or(f, SeqCst);
        }
        limbo
    }

    /// Has the close that follows reset the connection.
    pub(crate) fn abort_on_detach(&self) {
        if let Some(_g) = self.tx.lock.lock()
            && self.fixed()
        {
            self.out().tx.flags.fetch_or(TX_ABORT, SeqCst);
        }
    }

    /// Resets the connection, for both ends. Whoever else uses the socket finds it unconnected: the end of a stream
    /// would be a lie.
    pub(super) fn break_off(&self, fd: i32) {
        let _w = self.watch.lock();
        if !self.fixed() {
            return;
        }
        self.out().tx.flags.fetch_or(TX_ABORT | TX_CLOSED, SeqCst);
        self.tell_peer();
        if crate::fds::is_sock(fd, self) {
            let _ = sys::disconnect(fd);
        }
    }

    /// Bytes sent that the peer's host does not have yet, as far as is known: those that TCP would count as not
    /// acknowledged (tcp(7), SIOCOUTQ).
    pub(crate) fn undelivered(&self) -> usize {
        let Some(_g) = self.tx.lock.lock() else {
            return 0;
        };
        if !self.fixed() || self.limbo() {
            return 0;
        }
        let delivered = self.link().delivered(self.slot.load(Relaxed));
        let left = delivered.map_or(0, |at| self.tx.off().saturating_sub(at));
        usize::try_from(left).unwrap_or(0)
    }

    /// As [`Sock::exiting`]; whether this is such a connection. Nothing is waited for here.
    pub(super) fn exiting_fixed(&self) -> bool {
        let Some(_g) = self.tx.lock.try_lock() else {
            return false;
        };
        if !self.fixed() {
            return false;
        }
        let unread = self.inc().tx.prod.load(Acquire) != self.rx.off();
        let how = if unread {
            TX_ABORT | TX_CLOSED
        } else {
            TX_CLOSED
        };
        self.out().tx.flags.fetch_or(how, SeqCst);
        self.tell_peer();
        true
    }

    /// The descriptor that wakes a thread which sleeps on this connection, besides its bell. `None`: there is none.
    pub(super) fn doze(&self) -> Option<i32> {
        let _g = self.watch.lock();
        self.fixed().then(|| self.link().doze()).flatten()
    }

    /// That descriptor had something.
    pub(super) fn wake_up(&self) {
        let _g = self.watch.lock();
        if self.fixed() {
            self.link().wake_up();
        }
    }

    /// Whether the connection is being negotiated.
    pub(crate) fn limbo(&self) -> bool {
        self.managed() && self.link().limbo()
    }

    /// What a send gets on a connection that can't go back to TCP when the peer has closed or reset it.
    #[cold]
    pub(super) fn ended_send(&self) -> Errno {
        if self.aborted() && self.rx.reset_told.swap(1, Relaxed) == 0 {
            return Errno::ECONNRESET;
        }
        Errno::EPIPE
    }

    /// SO_ERROR of a connection that can't go back to TCP: that it was reset, told once.
    #[cold]
    pub(crate) fn take_reset(&self) -> Option<Errno> {
        let _g = self.rx.lock.lock()?;
        let due = self.fixed() && self.aborted() && self.rx.reset_told.swap(1, Relaxed) == 0;
        due.then_some(Errno::ECONNRESET)
    }

    /// As [`Sock::ring_ended`], where only CDC flags end a direction.
    pub(super) fn fixed_ended(&self) -> Result<RingEnd> {
        // In this order: a reset that comes in between must not be taken for an orderly end.
        let flags = self.inc().tx.flags.load(Acquire);
        let gone = self.aborted();
        if !gone && flags & (TX_DONE | TX_CLOSED) == 0 && !self.has(F_SHUT_RD) {
            // A look at the completion queue costs less than another turn of the caller's.
            if !crate::link::table::poll_inside() || self.locate()? == Want::RingEmpty {
                return Err(Errno::EAGAIN);
            }
            return Ok(RingEnd::Retry);
        }
        // What was written before the end may have come after our look at the ring.
        if self.locate()? != Want::RingEmpty {
            return Ok(RingEnd::Retry);
        }
        if gone && !self.has(F_SHUT_RD) && self.rx.reset_told.swap(1, Relaxed) == 0 {
            return Err(Errno::ECONNRESET);
        }
        Ok(RingEnd::Eof)
    }

    /// Whether a connection that can't go back to TCP was reset: by the peer, or with its link.
    pub(super) fn aborted(&self) -> bool {
        self.link().is_dead() || self.inc().tx.flags.load(Acquire) & TX_ABORT != 0
    }

    /// As [`Sock::mask`], where the kernel's socket says nothing of the connection.
    pub(super) fn fixed_mask(&self, want_out: bool) -> i16 {
        let mut m = 0;
        {
            let Some(_g) = self.rx.lock.lock() else {
                return 0;
            };
            if !self.managed() {
                return 0;
            }
            if matches!(self.locate_data(), Ok(Want::Ring(_))) {
                m |= IN;
            }
            if self.urgent_unread() {
                m |= POLLPRI;
            }
        }
        let flags = self.inc().tx.flags.load(Acquire);
        let (done, gone) = (flags & (TX_DONE | TX_CLOSED) != 0, self.aborted());
        if done || gone || self.has(F_SHUT_RD) {
            m |= IN | POLLRDHUP;
        }
        if gone || done && self.has(F_SHUT_WR) {
            m |= POLLHUP;
        }
        if gone && self.rx.reset_told.load(Relaxed) == 0 {
            m |= POLLERR;
        }
        if want_out && (gone || self.has(F_SHUT_WR) || self.tx_writable(true)) {
            m |= OUT;
        }
        m
    }
}
