//! What the hooks call: each function has the meaning of the libc function of its name for a
//! descriptor that is (or may be) known to us, and returns what that function returns, `errno` included.
//! The closure performs the real call; whether it is made is decided here.
//!
//! - `io`: reading and writing; `message`: the same by recvmsg and its relatives; `check`: the arguments of these;
//!   `life`: making, closing and duplicating descriptors; `option`: fcntl, ioctl, socket options; `sendfile` and
//!   `splice`: these two; `process`: fork, exec, passing descriptors; `confine`: seccomp.

mod check;
mod confine;
mod io;
mod life;
mod message;
mod option;
mod process;
mod sendfile;
mod splice;

pub use crate::ready::{poll, select};
pub use crate::stream::handlers_changed;
pub use confine::{prctl, seccomp};
pub use io::{preadv2, pwritev2, read, readv, recv, recvfrom, send, sendto, write, writev};
pub use life::{
    accept, bind, close, close_range, closefrom, connect, dup, dup2, dup3, epoll_create, fdopen,
    listen, shutdown, socket,
};
pub use message::{recvmmsg, recvmsg, sendmmsg, sendmsg};
pub use option::{fcntl, getsockopt, ioctl, setsockopt, sockatmark};
pub use process::{
    after_failed_exec, before_exec, before_spawn, exiting, fork, received_fds, sending_fds,
};
pub use sendfile::sendfile;
pub use splice::splice;

use libc::{epoll_event, sigset_t, timespec};

use crate::fds::Entry;
use crate::observe::Reason;
use crate::stream::Sock;
use crate::sys::{self, Errno, Result};

/// When the library is loaded. The other functions work without it as well.
///
/// # Safety
/// As [`crate::env::capture`].
pub unsafe fn init(envp: *const *const core::ffi::c_char) {
    // SAFETY: promised by the caller.
    unsafe { crate::env::capture(envp) };
    sys::find_clock();
    process::adopt_inherited();
}

/// epoll_ctl(2).
///
/// # Safety
/// As epoll_ctl(2).
pub unsafe fn epoll_ctl(
    epfd: i32,
    op: i32,
    fd: i32,
    ev: *mut epoll_event,
    real: impl FnOnce() -> i32,
) -> i32 {
    // SAFETY: promised by the caller.
    unsafe { crate::ready::ctl(epfd, op, fd, ev, real) }
}

/// epoll_wait(2) and its relatives; `timeout` null waits for ever.
///
/// # Safety
/// As epoll_pwait2(2).
pub unsafe fn epoll_wait(
    e: Entry,
    epfd: i32,
    evs: *mut epoll_event,
    max: i32,
    timeout: *const timespec,
    sigmask: *const sigset_t,
    real: impl FnOnce() -> i32,
) -> i32 {
    match e {
        // SAFETY: promised by the caller.
        Entry::Set(set) => unsafe {
            crate::ready::epoll_wait(set, epfd, evs, max, timeout, sigmask, real)
        },
        Entry::Sock(_) => real(),
        Entry::Private => fail(Errno::EBADF) as i32,
    }
}

/// -1 with `errno` set.
fn fail(e: Errno) -> isize {
    sys::set_errno(e);
    -1
}

/// A result as libc returns it.
fn give(r: Result<usize>) -> isize {
    match r {
        Ok(n) => n as isize,
        Err(e) => fail(e),
    }
}

/// Puts both directions of a connection on TCP for good, and waits for it.
fn pin(s: &'static Sock, r: Reason) {
    // Where the kernel's stream is read or reported by others than us, nothing may stay in the rings.
    let alone = matches!(
        r,
        Reason::Stdio | Reason::SignalIo | Reason::Urgent | Reason::UnsupportedOption
    );
    let d = if alone {
        s.downgrade(Some(r))
    } else {
        s.downgrade_here(Some(r))
    };
    if !d.wait() && r == Reason::Stdio {
        // stdio would read a stream with a hole.
        d.reset(r);
    }
    d.finish();
    if r == Reason::UnsupportedOption && !s.fixed() {
        s.leave_soon();
    }
}
