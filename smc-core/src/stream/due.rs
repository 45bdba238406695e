//! Errors that the program has yet to be told of.
//!
//! The kernel tells of an error of the connection once, to the call that comes first: send, recv or SO_ERROR. If that
//! call is one of ours and has bytes to tell of, or was a look of our own, the error is kept for the program's next
//! call. On connections that can't go back to TCP nothing is kept: what has been told is marked there, and unmarked.

use core::sync::atomic::Ordering::{Relaxed, SeqCst};

use super::{F_BROKEN, F_ERROR, Sock};
use crate::sys::Errno;

impl Sock {
    /// Keeps the error that ended a call (`tx`: a sending one), unless it says nothing of the connection or stands anyway.
    /// Under one of the direction locks, or both.
    #[cold]
    pub(super) fn keep_error(&self, tx: bool, e: Errno) {
        match e {
            Errno::EAGAIN
            | Errno::EINTR
            | Errno::EFAULT
            | Errno::EINVAL
            | Errno::ENOMEM
            | Errno::ENOBUFS
            | Errno::EBADF
            | Errno::ESTALE
            | Errno::ENOTCONN
            | Errno::EOPNOTSUPP => {}
            Errno::EPIPE if tx => {}
            _ if self.has(F_BROKEN) => {}
            _ if self.fixed() => self.rx.reset_told.store(0, Relaxed),
            _ => self.owe_error(e),
        }
    }

    /// As [`Sock::keep_error`], with or without locks: for a call on `fd`.
    #[cold]
    pub(super) fn keep_plain_error(&self, fd: i32, tx: bool, e: Errno) {
        // `None`: this very thread has it already.
        let _g = self.rx.lock.lock();
        if crate::fds::is_sock(fd, self) {
            self.keep_error(tx, e);
        }
    }

    /// As [`Sock::keep_plain_error`], for a look of ours at a connection that may be managed. (The TCP socket of one that
    /// can't go back to TCP has nothing to say.)
    #[cold]
    pub(crate) fn keep_kernel_error(&self, fd: i32, tx: bool, e: Errno) {
        if !self.fixed() {
            self.keep_plain_error(fd, tx, e);
        }
    }

    /// Has the next call say `e`.
    #[cold]
    pub(crate) fn owe_error(&self, e: Errno) {
        self.rx.error.store(e.into_raw() as u32, Relaxed);
        self.flags.fetch_or(F_ERROR, SeqCst);
    }

    /// The error that is due, told once.
    #[cold]
    pub(crate) fn take_error(&self) -> Option<Errno> {
        self.flags.fetch_and(!F_ERROR, SeqCst);
        let e = self.rx.error.swap(0, Relaxed);
        (e != 0).then(|| Errno::new(e as i32))
    }

    /// What a send gets instead of sending. Under `tx.lock`, where the flags say that there may be something.
    #[cold]
    pub(super) fn error_of_send(&self) -> Option<Errno> {
        if self.has(F_BROKEN) {
            return Some(Errno::ECONNRESET);
        }
        self.take_error()
    }
}
