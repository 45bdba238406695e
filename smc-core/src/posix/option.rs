//! fcntl, ioctl and socket options: what changes how a stream behaves.

use core::sync::atomic::Ordering::Relaxed;

use libc::{c_int, c_ulong, c_void, socklen_t};

use super::life::dup;
use super::{fail, pin};
use crate::fds::Entry;
use crate::observe::Reason;
use crate::stream::{
    F_LISTENER, F_NONBLOCK, F_RX_NEVER_WAITS, F_TCP_ONLY, F_TIMEOUT, F_TX_NEVER_WAITS, Sock,
};
use crate::sys::{self, Errno};

/// linux/sockios.h; the same number as TIOCOUTQ.
const SIOCOUTQ: c_ulong = 0x5411;
/// linux/sockios.h: SIOCOUTQ's bytes that were not sent yet.
const SIOCOUTQNSD: c_ulong = 0x894b;
/// asm/sockios.h
const SIOCATMARK: c_ulong = 0x8905;

/// asm-generic/socket.h: the same options with 64-bit times.
const SO_TIMESTAMP_NEW: c_int = 63;
const SO_TIMESTAMPNS_NEW: c_int = 64;
const SO_TIMESTAMPING_NEW: c_int = 65;
const SO_RCVTIMEO_NEW: c_int = 66;
const SO_SNDTIMEO_NEW: c_int = 67;

fn set_flag(s: &Sock, flag: u32, on: bool) {
    if on {
        s.flags.fetch_or(flag, Relaxed);
    } else {
        s.flags.fetch_and(!flag, Relaxed);
    }
}

/// fcntl(2).
pub fn fcntl(e: Entry, fd: c_int, cmd: c_int, arg: usize, real: impl FnOnce() -> c_int) -> c_int {
    if matches!(e, Entry::Private) {
        return fail(Errno::EBADF) as c_int;
    }
    match cmd {
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => dup(e, fd, real),
        libc::F_SETFL => {
            let r = real();
            if let (Entry::Sock(s), true) = (e, r != -1) {
                set_flag(s, F_NONBLOCK, arg as c_int & libc::O_NONBLOCK != 0);
                if arg as c_int & libc::O_ASYNC != 0 {
                    pin(s, Reason::SignalIo);
                }
            }
            r
        }
        _ => real(),
    }
}

/// ioctl(2).
///
/// # Safety
/// As ioctl(2).
pub unsafe fn ioctl(
    e: Entry,
    fd: c_int,
    request: c_ulong,
    arg: usize,
    real: impl FnOnce() -> c_int,
) -> c_int {
    let s = match e {
        Entry::Sock(s) => s,
        Entry::Set(_) => return real(),
        Entry::Private => return fail(Errno::EBADF) as c_int,
    };
    let value = arg as *mut c_int;
    match request {
        libc::FIONBIO | libc::FIOASYNC => {
            let r = real();
            if r == 0 {
                // SAFETY: the kernel has just read it.
                let on = unsafe { *value } != 0;
                if request == libc::FIONBIO {
                    set_flag(s, F_NONBLOCK, on);
                } else if on {
                    pin(s, Reason::SignalIo);
                }
            }
            r
        }
        libc::FIONREAD if s.managed() && !s.has(F_LISTENER) => {
            let r = real();
            if r == 0
                && let Ok(n) = s.readable_bytes(fd)
            {
                // SAFETY: the kernel has just written it.
                unsafe { *value = c_int::try_from(n).unwrap_or(c_int::MAX) };
            }
            r
        }
        SIOCOUTQ if s.fixed() => {
            let r = real();
            if r == 0 {
                let more = s.undelivered();
                // SAFETY: as above.
                unsafe { *value = (*value).saturating_add(more as c_int) };
            }
            r
        }
        SIOCOUTQ | SIOCOUTQNSD if s.managed() => {
            // What has gone by a ring has arrived. What the kernel could not take yet goes to it under the lock.
            let _g = s.tx.lock.lock();
            let r = real();
            if r == 0 {
                let more = c_int::try_from(s.unacknowledged()).unwrap_or(c_int::MAX);
                // SAFETY: as above.
                unsafe { *value = (*value).saturating_add(more) };
            }
            r
        }
        SIOCATMARK if s.fixed() => {
            let r = real();
            if r == 0
                && let Ok(at) = s.at_mark()
            {
                // SAFETY: as above.
                unsafe { *value = c_int::from(at) };
            }
            r
        }
        _ => real(),
    }
}

/// sockatmark(3).
pub fn sockatmark(e: Entry, fd: c_int, real: impl FnOnce() -> c_int) -> c_int {
    let _ = fd;
    match e {
        Entry::Sock(s) if s.fixed() => s.at_mark().map_or_else(|_| real(), c_int::from),
        Entry::Private => fail(Errno::EBADF) as c_int,
        _ => real(),
    }
}

/// getsockopt(2).
///
/// # Safety
/// As getsockopt(2).
pub unsafe fn getsockopt(
    e: Entry,
    fd: c_int,
    level: c_int,
    name: c_int,
    val: *mut c_void,
    len: *mut socklen_t,
    real: impl FnOnce() -> c_int,
) -> c_int {
    let _ = fd;
    match e {
        Entry::Sock(s) if level == libc::SOL_SOCKET && name == libc::SO_ERROR => {
            let r = real();
            if r == 0
                && let Some(e) = s.take_error().or_else(|| s.take_reset())
            {
                // SAFETY: the kernel has just written both.
                unsafe {
                    if *len as usize >= size_of::<c_int>() {
                        val.cast::<c_int>().write_unaligned(e.into_raw());
                    }
                }
            }
            return r;
        }
        Entry::Private => return fail(Errno::EBADF) as c_int,
        Entry::Sock(s) if level == libc::IPPROTO_TCP && name == libc::TCP_NODELAY => {
            return s.own_nodelay(real);
        }
        Entry::Sock(s) if level == libc::IPPROTO_TCP && name == libc::TCP_ZEROCOPY_RECEIVE => {
            pin(s, Reason::UnsupportedOption);
        }
        _ => {}
    }
    real()
}

/// setsockopt(2).
///
/// # Safety
/// As setsockopt(2).
pub unsafe fn setsockopt(
    e: Entry,
    fd: c_int,
    level: c_int,
    name: c_int,
    val: *const c_void,
    len: socklen_t,
    real: impl FnOnce() -> c_int,
) -> c_int {
    let _ = fd;
    let s = match e {
        Entry::Private => return fail(Errno::EBADF) as c_int,
        Entry::Sock(s) => s,
        Entry::Set(_) => return real(),
    };
    if level == libc::IPPROTO_TCP && name == libc::TCP_NODELAY {
        return s.own_nodelay(real);
    }
    let r = real();
    if r != 0 {
        return r;
    }
    // SAFETY: the kernel has just read `len` bytes.
    let v = if len >= 4 && !val.is_null() {
        // SAFETY: the kernel has just read `len` bytes.
        unsafe { val.cast::<c_int>().read_unaligned() }
    } else {
        0
    };
    let timeout = matches!(
        name,
        libc::SO_RCVTIMEO | libc::SO_SNDTIMEO | SO_RCVTIMEO_NEW | SO_SNDTIMEO_NEW
    );
    if level == libc::SOL_SOCKET && timeout {
        // SAFETY: the kernel has just read it. All four have a `time_t` of 64 bits first.
        let seconds = unsafe { val.cast::<i64>().read_unaligned() };
        let never_waits = if matches!(name, libc::SO_SNDTIMEO | SO_SNDTIMEO_NEW) {
            F_TX_NEVER_WAITS
        } else {
            F_RX_NEVER_WAITS
        };
        set_flag(s, never_waits, seconds < 0);
        set_flag(s, F_TIMEOUT, true);
    }
    if is_tcp_only(level, name, v) {
        pin(s, Reason::UnsupportedOption);
    }
    r
}

/// Whether an option with this value asks for what only the kernel's TCP does.
fn is_tcp_only(level: c_int, name: c_int, value: c_int) -> bool {
    match (level, name) {
        // (The kernel takes a negative one for the largest.)
        (libc::SOL_SOCKET, libc::SO_RCVLOWAT) => !(0..=1).contains(&value),
        (libc::SOL_SOCKET, libc::SO_PEEK_OFF) => value >= 0,
        (libc::SOL_SOCKET, libc::SO_ATTACH_FILTER | libc::SO_ATTACH_BPF) => true,
        (libc::SOL_SOCKET, _) => value != 0 && INHERITED.contains(&name),
        (libc::IPPROTO_TCP, libc::TCP_ULP | libc::TCP_REPAIR) => true,
        (libc::IPPROTO_TCP, libc::TCP_INQ) => value != 0,
        _ => false,
    }
}

/// Options of SOL_SOCKET of this kind that accepted sockets get from their listener, and that can be asked for.
const INHERITED: [c_int; 9] = [
    libc::SO_RCVLOWAT,
    libc::SO_PEEK_OFF,
    libc::SO_ZEROCOPY,
    libc::SO_TIMESTAMP,
    libc::SO_TIMESTAMPNS,
    libc::SO_TIMESTAMPING,
    SO_TIMESTAMP_NEW,
    SO_TIMESTAMPNS_NEW,
    SO_TIMESTAMPING_NEW,
];

/// Flags of a stream that say what options are set, which accepted sockets inherit.
pub(super) const OPTIONS: u32 = F_TIMEOUT | F_TCP_ONLY | F_RX_NEVER_WAITS | F_TX_NEVER_WAITS;

/// Those of a socket whose options were set by somebody else. (A negative time-out can't be told from none.)
pub(super) fn unknown_options(fd: c_int) -> u32 {
    let tcp_only = INHERITED.iter().any(|name| {
        sys::getsockopt::<c_int>(fd, libc::SOL_SOCKET, *name)
            .is_ok_and(|value| is_tcp_only(libc::SOL_SOCKET, *name, value))
    });
    F_TIMEOUT | if tcp_only { F_TCP_ONLY } else { 0 }
}
