//! Leaving a process that is about to put itself under a seccomp filter, as sshd does.
//!
//! Such filters list the system calls that the program makes, and may end it for any other. Ours are others.
//! So the connections go back to TCP, the engine ends, and the descriptor table stays without them: from there
//! on, each call of the program is the kernel's alone.

use core::sync::atomic::Ordering::SeqCst;

use libc::{c_int, c_long};

use super::life;
use crate::fds::{self, Entry};
use crate::link::table;
use crate::observe::Reason;
use crate::stream::{self, F_BROKEN, F_INHERITED, F_LISTENER, F_OFFERS, FREE};
use crate::sys::{self, Errno};
use crate::{engine, ready};

/// Before prctl(2).
pub fn prctl(option: c_int, mode: libc::c_ulong, filter: libc::c_ulong) {
    // Without a filter to install, it is a question: whether the kernel has them.
    let confines = match mode as u32 {
        libc::SECCOMP_MODE_STRICT => true,
        libc::SECCOMP_MODE_FILTER => filter != 0,
        _ => false,
    };
    if option == libc::PR_SET_SECCOMP && confines {
        leave();
    }
}

/// Before seccomp(2), which has no function in the C library.
#[cold]
pub fn seccomp(operation: c_long, flags: c_long, filter: c_long) {
    let confines = match operation as u32 {
        libc::SECCOMP_SET_MODE_STRICT => flags == 0 && filter == 0,
        libc::SECCOMP_SET_MODE_FILTER => filter != 0,
        _ => false,
    };
    if confines {
        leave();
    }
}

#[cold]
fn leave() {
    if fds::given_up() {
        return;
    }
    let before = sys::errno();
    // SMC-R needs us to the end: its connections can't go back to TCP, and a listener that offers it can't stop.
    let mut needed = false;
    stream::POOL
        .each(|_, s| needed |= s.state.load(SeqCst) != FREE && (s.fixed() || s.has(F_OFFERS)));
    if needed {
        log::warn!(
            "the process confines itself, but uses SMC-R: its filter must allow what xsmc calls"
        );
        return sys::set_errno(Errno::new(before));
    }
    let mut list = Vec::new();
    stream::POOL.each(|_, s| {
        if s.state.load(SeqCst) == FREE || s.has(F_LISTENER) {
            return;
        }
        if s.has(F_INHERITED) {
            s.claim_inherited();
        }
        s.pin(Reason::Confined);
        if s.managed() {
            list.push((s, s.downgrade(Some(Reason::Confined))));
        }
    });
    for (s, d) in list {
        if !d.wait() {
            d.reset(Reason::Confined);
        }
        d.finish();
        s.leave_link();
    }
    // Groups without connections.
    table::linger(engine::end_groups);
    fds::give_up();
    let mut stay = false;
    fds::each(0, u32::MAX, |fd, e| match e {
        // An error that only we report.
        Entry::Sock(s) if s.has(F_BROKEN) => {}
        // Attached a moment ago.
        Entry::Sock(s) if s.managed() => stay = true,
        Entry::Sock(_) => {
            life::forget_number(e, fd);
            life::release(e, fd);
        }
        // Until the last cookie of ours has gone from it, what the kernel reports needs translation.
        Entry::Set(set) => {
            if ready::give_back(set) {
                fds::clear(fd);
            }
        }
        Entry::Private => {}
    });
    if !stay {
        engine::end();
    }
    sys::set_errno(Errno::new(before));
}
