//! Urgent data (tcp(7), RFC 6093) of SMC-R connections. Between processes of one host it is TCP's.
//!
//! The sender puts the stream offset behind the urgent byte, the *mark*, into the connection block; CDC flags carry
//! it to the peer's block. Whoever takes it in there sets [`F_URGENT`] on the stream before the byte can be seen, so
//! that a read, which looks at its flags anyway, learns of a mark without looking for one.
//!
//! Reads stop before the urgent byte. Unless the program wants it inline (SO_OOBINLINE), it is then kept aside for
//! MSG_OOB and the cursor steps over it at once, not at the next read: the peer sends nothing more until it hears
//! that, and a program that waits for bytes behind the mark would never begin that read.

use core::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use core::sync::atomic::{AtomicU32, AtomicU64, fence};

use libc::{MSG_DONTWAIT, MSG_PEEK, MSG_TRUNC, c_int, iovec};
use syscalls::{Sysno, syscall};

use super::{F_NONBLOCK, F_URGENT, Sock, Want};
use crate::ring::iov_len;
use crate::sys::{self, Errno, Result};

/// The mark has not been passed.
const AHEAD: u32 = 0x100;
/// The byte has not been read by MSG_OOB.
const UNREAD: u32 = 0x200;
/// The cursor has stepped over the byte, which is kept in the low bits.
const SKIPPED: u32 = 0x400;

/// The mark of the direction we receive. Under `rx.lock`, but for `signalled`.
#[derive(Default)]
pub(super) struct Mark {
    /// Stream offset just behind the urgent byte last heard of, 0 if there was none.
    at: AtomicU64,
    /// [`AHEAD`], [`UNREAD`], [`SKIPPED`] and the byte; 0 once passed.
    state: AtomicU32,
    /// The mark that SIGURG was sent for.
    signalled: AtomicU64,
}

impl Mark {
    /// For a new connection.
    pub(super) fn reset(&self) {
        self.at.store(0, Relaxed);
        self.state.store(0, Relaxed);
        self.signalled.store(0, Relaxed);
    }

    /// Whether reading has got beyond the mark, or there is none.
    fn passed(&self, pos: u64) -> bool {
        let (at, state) = (self.at.load(Relaxed), self.state.load(Relaxed));
        state == 0 || pos > at || pos == at && state & SKIPPED == 0
    }

    /// Whether reading from `pos` is at the mark: before the byte, or behind it if that was stepped over.
    fn reached(&self, pos: u64) -> bool {
        let (at, state) = (self.at.load(Relaxed), self.state.load(Relaxed));
        let byte = u64::from(state & SKIPPED == 0);
        state != 0 && pos + byte == at
    }
}

impl Sock {
    /// A mark has been put into the block; the byte follows. Any thread.
    pub(crate) fn urgent_comes(&self) {
        self.flags.fetch_or(F_URGENT, SeqCst);
    }

    /// As [`Sock::urgent_comes`], for a mark that was there before the stream was. It has just been attached.
    pub(super) fn urgent_came_before(&self) {
        // Pairs with the fence of the thread that stores the mark: it finds the stream, or we find the mark.
        fence(SeqCst);
        if self.inc().tx.urgent.load(SeqCst) != 0 {
            self.urgent_comes();
        }
    }

    /// The byte before `end`, which is about to be published, is urgent: it is the last that send(MSG_OOB) was given
    /// (`last`), or may be the last that it takes.
    #[cold]
    pub(super) fn mark_urgent(&self, end: u64, last: bool, flags: c_int) {
        if last || flags & MSG_DONTWAIT != 0 || self.has(F_NONBLOCK) {
            self.out().tx.urgent.store(end, Release);
        }
    }

    /// As [`Sock::locate`], but not beyond a mark. Under `rx.lock`.
    pub(super) fn locate_data(&self) -> Result<Want> {
        let want = self.locate()?;
        if self.has(F_URGENT) {
            return self.locate_before_mark();
        }
        Ok(want)
    }

    /// As [`Sock::locate_data`], where there may be a mark.
    #[cold]
    pub(super) fn locate_before_mark(&self) -> Result<Want> {
        loop {
            self.mind_mark();
            let want = self.locate()?;
            let Want::Ring(n) = want else {
                return Ok(want);
            };
            let (pos, mark) = (self.rx.off(), &self.rx.urgent);
            let at = mark.at.load(Relaxed);
            if self.inc().tx.urgent.load(Acquire) != at {
                continue;
            }
            match at.checked_sub(pos) {
                Some(1) if !self.wants_inline() => {}
                Some(ahead @ 2..) => return Ok(Want::Ring(n.min((ahead - 1) as usize))),
                _ => return Ok(want),
            }
        }
    }

    /// Takes notice of a new mark, steps over the urgent byte if reading has come to it, and forgets a mark that
    /// reading has passed. Under `rx.lock`, managed.
    #[cold]
    pub(super) fn mind_mark(&self) {
        let mark = &self.rx.urgent;
        loop {
            let (line, pos) = (&self.inc().tx, self.rx.off());
            let at = self.note_mark();
            if mark.passed(pos) {
                mark.state.store(0, Relaxed);
                self.flags.fetch_and(!F_URGENT, SeqCst);
                if line.urgent.load(SeqCst) == at {
                    return;
                }
                self.urgent_comes();
                continue;
            }
            if pos + 1 == at && line.prod.load(Acquire) >= at && !self.wants_inline() {
                mark.state.fetch_or(SKIPPED | self.byte_at(pos), Relaxed);
                self.consume(pos, 1);
            }
            return;
        }
    }

    /// Takes notice of a new mark. Returns the mark.
    fn note_mark(&self) -> u64 {
        let (at, mark) = (self.inc().tx.urgent.load(SeqCst), &self.rx.urgent);
        if mark.at.swap(at, Relaxed) != at {
            mark.state.store(AHEAD | UNREAD, Relaxed);
        }
        at
    }

    /// A byte of the ring that we read, which the peer has written.
    fn byte_at(&self, pos: u64) -> u32 {
        let ring = self.rx_ring();
        if ring.size() == 0 {
            return 0;
        }
        // SAFETY: a position in the ring, where the peer writes nothing before the cursor has passed it.
        u32::from(unsafe { ring.span(pos, 1).0.read_volatile() })
    }

    /// SO_OOBINLINE, which the kernel keeps.
    fn wants_inline(&self) -> bool {
        let fd = self.fd.load(Relaxed);
        crate::fds::is_sock(fd, self)
            && sys::getsockopt::<c_int>(fd, libc::SOL_SOCKET, libc::SO_OOBINLINE)
                .is_ok_and(|on| on != 0)
    }

    /// Whether a read that has got something must be content with it, as a mark is reached `n` bytes ahead.
    pub(super) fn stops_at_mark(&self, n: usize) -> bool {
        self.has(F_URGENT) && self.rx.urgent.reached(self.rx.off() + n as u64)
    }

    /// Whether there is an urgent byte to be had by MSG_OOB or, inline, to be read (POLLPRI). Under `rx.lock`.
    pub(super) fn urgent_unread(&self) -> bool {
        self.has(F_URGENT) && {
            self.mind_mark();
            self.rx.urgent.state.load(Relaxed) & UNREAD != 0
        }
    }

    /// As [`Sock::readable_bytes`], where there may be a mark: as for TCP, FIONREAD counts the bytes before it. Under
    /// `rx.lock`.
    pub(super) fn readable_to_mark(&self) -> Result<usize> {
        let want = self.locate_before_mark()?;
        let (pos, mark) = (self.rx.off(), &self.rx.urgent);
        let all = if mark.reached(pos) && mark.state.load(Relaxed) & SKIPPED != 0 {
            Want::RingEmpty
        } else if mark.state.load(Relaxed) != 0 && self.wants_inline() {
            self.locate()?
        } else {
            want
        };
        Ok(match all {
            Want::Ring(n) => n,
            _ => 0,
        })
    }

    /// SIOCATMARK. `Err(ESTALE)`: not an SMC-R connection. As [`Sock::recv_urgent`] in a signal handler.
    pub fn at_mark(&self) -> Result<bool> {
        crate::link::table::poll();
        let _g = self.rx.lock.lock();
        if !self.fixed() {
            return Err(Errno::ESTALE);
        }
        Ok(self.has(F_URGENT) && {
            self.note_mark();
            self.rx.urgent.reached(self.rx.off())
        })
    }

    /// recv(2) with MSG_OOB: never blocks. EINVAL: there is no urgent byte, it was read before, or it is inline.
    /// `Err(ESTALE)`: not an SMC-R connection.
    ///
    /// SIGURG's handler is where programs call it. One that has interrupted a read of this very thread goes on
    /// without the lock: nothing is done here that the read can't bear, as the cursor stays where it is.
    ///
    /// # Safety
    /// The list must describe writable memory (unless MSG_TRUNC discards).
    pub unsafe fn recv_urgent(&self, fd: i32, iov: &[iovec], flags: c_int) -> Result<usize> {
        crate::link::table::poll();
        let _g = self.rx.lock.lock();
        if !crate::fds::is_sock(fd, self) || !self.fixed() {
            return Err(Errno::ESTALE);
        }
        if !self.has(F_URGENT) || self.wants_inline() {
            return Err(Errno::EINVAL);
        }
        let (at, mark) = (self.note_mark(), &self.rx.urgent);
        let state = mark.state.load(Relaxed);
        if mark.passed(self.rx.off()) || state & UNREAD == 0 {
            return Err(Errno::EINVAL);
        }
        let byte = match state & SKIPPED {
            0 => self.byte_at(at.wrapping_sub(1)),
            _ => state,
        } as u8;
        if flags & MSG_PEEK == 0 {
            mark.state.fetch_and(!UNREAD, Relaxed);
        }
        if flags & MSG_TRUNC == 0
            && let Some(v) = iov.iter().find(|v| v.iov_len > 0)
        {
            // SAFETY: promised by the caller.
            unsafe { v.iov_base.cast::<u8>().write(byte) };
        }
        Ok(iov_len(iov).min(1))
    }

    /// As [`Sock::owner_due`], unless somebody is at the descriptor. Waits for nothing.
    pub(crate) fn urgent_owner(&self, owner: &mut Option<Owner>) -> bool {
        let watch = self.watch.try_lock();
        watch.is_some() && self.owner_due(owner)
    }

    /// Stores whom to send the SIGURG for an urgent byte that has come, if that is due and the socket has an owner
    /// (F_SETOWN): the kernel knows nothing of the byte. False: another owner is stored there. Under `watch`.
    pub(super) fn owner_due(&self, owner: &mut Option<Owner>) -> bool {
        let fd = self.fd.load(Relaxed);
        if !self.fixed() || !crate::fds::is_sock(fd, self) {
            return true;
        }
        let (at, signalled) = (self.inc().tx.urgent.load(SeqCst), &self.rx.urgent.signalled);
        if signalled.load(SeqCst) == at {
            return true;
        }
        let found = Owner::of(fd);
        if owner.is_some() && found.is_some() && found != *owner {
            return false;
        }
        if signalled.swap(at, SeqCst) != at {
            *owner = owner.or(found);
        }
        true
    }

    /// Sends the SIGURG that is due. Not under a stream's lock: a handler may run here.
    pub(super) fn signal_urgent(&self) {
        let mut owner = None;
        self.urgent_owner(&mut owner);
        if let Some(owner) = owner {
            owner.send_sigurg();
        }
    }
}

/// Owner of a socket: fcntl(2)'s `struct f_owner_ex`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    kind: c_int,
    id: libc::pid_t,
}

// linux/fcntl.h
const F_GETOWN_EX: c_int = 16;
const F_OWNER_TID: c_int = 0;
const F_OWNER_PGRP: c_int = 2;

impl Owner {
    /// The owner of `fd`, if it has one.
    fn of(fd: c_int) -> Option<Owner> {
        let mut owner = Owner { kind: 0, id: 0 };
        // SAFETY: the kernel stores a `struct f_owner_ex`.
        let r = unsafe { syscall!(Sysno::fcntl, fd, F_GETOWN_EX, &raw mut owner) };
        (r.is_ok() && owner.id > 0).then_some(owner)
    }

    /// Sends it SIGURG.
    pub fn send_sigurg(self) {
        // SAFETY: these touch no memory.
        let _ = unsafe {
            match self.kind {
                F_OWNER_TID => syscall!(Sysno::tkill, self.id, libc::SIGURG),
                F_OWNER_PGRP => syscall!(Sysno::kill, -self.id, libc::SIGURG),
                _ => syscall!(Sysno::kill, self.id, libc::SIGURG),
            }
        };
    }
}
