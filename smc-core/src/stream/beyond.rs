//! Where reading goes on at a switch, and whether there is anything on its other side.
//!
//! A read takes the bytes of both sides, as far as they are there. It only looks for bytes: the end of the stream and errors, of
//! which the kernel tells once, are for the call after.

use core::sync::atomic::Ordering::{Acquire, Relaxed};

use super::{Sock, Want};
use crate::fabric::shm::LOG;
use crate::sys;

impl Sock {
    /// Whether the next byte is on the other side of a switch, and may be read together with the last:
    /// a read never goes over an urgent mark (tcp(7)). Under `rx.lock`.
    pub(super) fn at_switch(&self, fd: i32) -> bool {
        let (dir, passed) = (self.inc(), self.rx.passed.load(Relaxed));
        dir.tx.switches.load(Acquire) != passed
            && dir.log[passed as usize % LOG].load(Relaxed) == self.rx.off()
            && !has_mark(fd)
    }

    /// Whether there are bytes on the other side of the switch: with some to tell of, the kernel doesn't look at errors, and
    /// a look of ours would take them. Under `rx.lock`.
    pub(super) fn more_beyond(&self, fd: i32) -> bool {
        match self.locate() {
            Ok(Want::Ring(_)) => true,
            Ok(Want::Tcp(_)) => kernel_has(fd, 0),
            _ => false,
        }
    }

    /// Whether the connection has ended, and all its bytes have been read: what more there is to say is for another call.
    /// Under `rx.lock`.
    #[cold]
    pub(super) fn no_more(&self, fd: i32) -> bool {
        let nothing = || self.rx.frozen.load(Relaxed) == 0 && !self.more_beyond(fd);
        // Once more, as its last bytes may have come between.
        nothing() && sys::poll_now(fd, libc::POLLRDHUP) != 0 && nothing()
    }
}

/// Whether the kernel has an urgent mark. (After a reset it says POLLERR, whatever is asked.)
pub(super) fn has_mark(fd: i32) -> bool {
    sys::poll_now(fd, libc::POLLPRI) & libc::POLLPRI != 0
}

/// Whether the kernel has more than `n` bytes to read.
pub(crate) fn kernel_has(fd: i32, n: usize) -> bool {
    sys::ioctl_int(fd, libc::FIONREAD).is_ok_and(|all| all as usize > n)
}
