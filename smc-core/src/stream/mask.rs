//! Readiness of a managed connection, as poll(2) bits.
//!
//! Bytes and room come from the rings; FIN, RST, urgent data and whatever rides TCP come from the kernel,
//! which is asked only when there is a hint that it has something to say.

use core::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};

use libc::{POLLERR, POLLHUP, POLLIN, POLLOUT, POLLPRI, POLLRDHUP, POLLRDNORM, POLLWRNORM};

use super::{F_BROKEN, F_SHUT_RD, F_SHUT_WR, Sock, Want};
use crate::fabric::shm::{TX_CLOSED, TX_DONE};
use crate::sys;

pub(super) const IN: i16 = POLLIN | POLLRDNORM;
pub(super) const OUT: i16 = POLLOUT | POLLWRNORM;

impl Sock {
    /// Readiness now. `want_out`: also find out about room, and ask to be told of it. `force`: ask the
    /// kernel in any case.
    pub fn mask(&self, fd: i32, want_out: bool, force: bool) -> i16 {
        if self.has(F_BROKEN) {
            return IN | OUT | POLLERR | POLLHUP | POLLRDHUP;
        }
        if self.fixed() {
            return self.fixed_mask(want_out);
        }
        let mut m = 0;
        let mut ask = force || self.has(F_SHUT_RD | F_SHUT_WR);
        let mut rx_kernel = false;
        {
            let Some(_g) = self.rx.lock.lock() else {
                return sys::poll_now(fd, IN | POLLRDHUP | POLLPRI | OUT);
            };
            if !self.managed() {
                return sys::poll_now(fd, IN | POLLRDHUP | POLLPRI | OUT);
            }
            match self.locate() {
                Ok(Want::Ring(_)) => m |= IN,
                Ok(Want::RingEmpty) => {
                    ask |= self.inc().tx.flags.load(Acquire) & (TX_DONE | TX_CLOSED) != 0;
                    rx_kernel = true;
                }
                Ok(Want::Tcp(_)) => rx_kernel = true,
                Ok(Want::Frozen) => {
                    // What could be read before can be read, whichever way the bytes are just going.
                    if self.rx.kept() {
                        m |= IN;
                    }
                    rx_kernel = true;
                    ask = true;
                }
                Err(_) => return IN | OUT | POLLERR | POLLHUP,
            }
            if self.rx.error.load(Relaxed) != 0 {
                m |= IN | POLLERR;
            }
            // Here, as the end of a recall leaves it under this lock: the bytes have gone to TCP.
            ask |= self.rx.hint.load(Relaxed) != 0;
        }
        let tx_on_rmb = self.tx.switches.load(Relaxed) & 1 == 1;
        let mut kernel_out = false;
        if want_out {
            if tx_on_rmb {
                if let Some(_g) = self.tx.lock.lock()
                    && self.managed()
                {
                    if self.tx_writable(true) {
                        m |= OUT;
                    }
                } else {
                    m |= OUT;
                }
            } else {
                kernel_out = true;
                if self.tx.full.load(Relaxed) != 0 {
                    ask = true;
                } else {
                    m |= OUT;
                }
            }
        }
        if ask {
            self.rx.look();
            if kernel_out {
                // Before the look: what is sent after it must stand.
                self.tx.full.store(0, SeqCst);
            }
            let k = sys::poll_now(fd, IN | POLLRDHUP | POLLPRI | OUT);
            let always = POLLRDHUP | POLLPRI | POLLERR | POLLHUP;
            m |= k & always;
            self.rx.looked(k & (IN | always) != 0);
            if rx_kernel {
                m |= k & IN;
            }
            if k & (POLLERR | POLLHUP) != 0 || self.has(F_SHUT_WR) {
                m |= k & OUT;
            }
            if kernel_out {
                m = m & !OUT | k & OUT;
                if k & POLLOUT == 0 || !self.tx.backlog.load(Relaxed).is_null() {
                    self.tx.full.store(1, Relaxed);
                }
            }
        }
        m
    }

    /// Whether a spinning poll should look again. Without locks.
    pub(crate) fn news(&self) -> bool {
        self.rx_news() || self.rx.hint.load(Relaxed) != 0 && !self.fixed()
    }

    /// Whether bytes or FIN in the TCP socket matter to a sleeping reader.
    pub(crate) fn rx_wakes(&self) -> bool {
        self.rx.frozen.load(Relaxed) == 0
    }
}
