//! Ends of SMC-R connections that only TCP tells.
//!
//! An end that is closed says so by a CDC message. A process that is killed says nothing more: its queue pair dies
//! with it, and only the kernel ends the TCP connection. So the engine watches the TCP sockets. A reset there is a
//! reset at once. A FIN means nothing by itself: it comes with every shutdown and close, and may overtake the CDC
//! message that belongs to it. Where no such message follows, the peer is gone.

use core::sync::atomic::Ordering::{Acquire, Relaxed};
use std::time::{Duration, Instant};

use super::run::{EV_TCP, Engine, watch};
use crate::fabric::shm::{TX_CLOSED, TX_DONE};
use crate::observe::Reason;
use crate::stream::{self, Sock};
use crate::sys::{self, TcpInfo};

/// How long after a FIN the connection may be silent before the peer counts as gone. A message that RDMA has to
/// repeat takes up to some tenths of a second longer than the FIN.
const SILENCE: Duration = Duration::from_secs(2);
/// And how long it may take altogether, while bytes still come.
const PATIENCE: Duration = Duration::from_secs(20);

/// A connection whose FIN has come, but no CDC message that tells the end of the stream.
pub(super) struct Parting {
    index: u32,
    generation: u32,
    /// The peer's cursor at the last look.
    prod: u64,
    silent_until: Instant,
    until: Instant,
}

impl Parting {
    /// The stream, if it still is that connection and its end is still to be told.
    fn stream(&self) -> Option<&'static Sock> {
        let s = stream::POOL.get(self.index)?;
        let same = s.generation.load(Relaxed) == self.generation && s.fixed() && !s.limbo();
        (same && s.inc().tx.flags.load(Acquire) & (TX_DONE | TX_CLOSED) == 0).then_some(s)
    }
}

impl Engine {
    /// Begins to watch the TCP socket of an SMC-R connection.
    pub(super) fn watch_tcp(&self, s: &Sock) {
        self.arm_tcp(s, libc::EPOLLRDHUP);
    }

    /// A reset is reported whatever `events` says.
    fn arm_tcp(&self, s: &Sock, events: i32) {
        let data = EV_TCP | u64::from(s.index.load(Relaxed));
        s.with_fd(|fd| watch(self.epfd, fd, events | libc::EPOLLONESHOT, data));
    }

    /// The TCP connection of an SMC-R one has changed its state.
    pub(super) fn tcp_changed(&mut self, index: u32) {
        let Some(s) = stream::POOL.get(index).filter(|s| s.fixed() && !s.limbo()) else {
            return;
        };
        let generation = s.generation.load(Relaxed);
        let asked = s.with_fd(|fd| {
            let closed = TcpInfo::of(fd).map_or(true, |t| t.closed());
            (closed, sys::poll_now(fd, libc::POLLRDHUP))
        });
        // Closed by the program meanwhile.
        let Some((closed, found)) = asked else { return };
        // (Closed without an error: FIN has gone both ways.)
        if found & libc::POLLERR != 0 {
            return self.lost(s);
        }
        if !closed && found & libc::POLLRDHUP == 0 {
            // The event is of a socket that had this index before: a child of a fork may still hold that.
            return self.watch_tcp(s);
        }
        if !closed {
            self.arm_tcp(s, 0);
        }
        let now = Instant::now();
        let parting = Parting {
            index,
            generation,
            prod: s.inc().tx.prod.load(Acquire),
            silent_until: now + SILENCE,
            until: now + PATIENCE,
        };
        if parting.stream().is_some() {
            self.partings.retain(|p| p.index != index);
            self.partings.push(parting);
        }
    }

    /// Resets those that nobody has closed in time. Returns when to look again.
    pub(super) fn tend_partings(&mut self) -> Option<Instant> {
        let now = Instant::now();
        let (mut next, mut lost): (Option<Instant>, Vec<&'static Sock>) = (None, Vec::new());
        self.partings.retain_mut(|p| {
            let Some(s) = p.stream() else { return false };
            let prod = s.inc().tx.prod.load(Acquire);
            if core::mem::replace(&mut p.prod, prod) != prod {
                p.silent_until = now + SILENCE;
            }
            let until = p.silent_until.min(p.until);
            if until <= now {
                lost.push(s);
                return false;
            }
            next = Some(next.map_or(until, |n| n.min(until)));
            true
        });
        for s in lost {
            log::debug!("the peer has gone without closing");
            self.lost(s);
        }
        next
    }

    /// The peer won't say anything more about this connection.
    fn lost(&mut self, s: &'static Sock) {
        s.note(Reason::LinkLost);
        let Some((link, slot)) = s.place() else {
            return;
        };
        let told = s.inc().tx.flags.load(Acquire) & TX_CLOSED != 0;
        // The link group has to know as well, so that the buffers are free when the program closes.
        let mut groups = self.groups.iter_mut().flatten();
        if let Some(group) = groups.find(|g| core::ptr::eq(g.link(), link)) {
            group.lost(slot);
            if !told {
                group.doubt();
            }
        }
        s.rdma_reset();
    }
}
