//! Calls that wait for readiness.
//!
//! smc-core takes every timeout as a `timespec`, null meaning forever. Timeouts that the kernel
//! would refuse (EINVAL) never get there: such a call goes to the real function, which says so.

use core::ptr;
use libc::{
    c_int, c_long, epoll_event, fd_set, nfds_t, pollfd, sigset_t, time_t, timespec, timeval,
};
use smc_core::fds::lookup;
use smc_core::posix;

const MICROS: c_long = 1_000_000;
const NANOS: c_long = 1_000_000_000;

/// A timeout in milliseconds, of which negative means forever: `None`.
pub(crate) fn millis(timeout: c_int) -> Option<timespec> {
    let millis = u32::try_from(timeout).ok()?;
    Some(timespec {
        tv_sec: time_t::from(millis / 1000),
        tv_nsec: c_long::from(millis % 1000) * 1_000_000,
    })
}

/// The pointer form of an optional timeout.
pub(crate) fn pointer(timeout: &Option<timespec>) -> *const timespec {
    timeout.as_ref().map_or(ptr::null(), ptr::from_ref)
}

/// Whether the kernel would take this timeout.
///
/// # Safety
/// `timeout` is null or points to a timespec.
pub(crate) unsafe fn acceptable(timeout: *const timespec) -> bool {
    // SAFETY: the caller's promise.
    match unsafe { timeout.as_ref() } {
        None => true,
        Some(t) => t.tv_sec >= 0 && (0..NANOS).contains(&t.tv_nsec),
    }
}

/// Select's timeout as a timespec; `Err` if select would refuse it. As in the C library, a
/// microsecond part of a second and more is carried over.
fn select_timeout(timeout: Option<&timeval>) -> Result<Option<timespec>, ()> {
    let Some(t) = timeout else {
        return Ok(None);
    };
    if t.tv_sec < 0 || t.tv_usec < 0 {
        return Err(());
    }
    Ok(Some(timespec {
        tv_sec: t.tv_sec.checked_add(t.tv_usec / MICROS).ok_or(())?,
        tv_nsec: t.tv_usec % MICROS * 1000,
    }))
}

hook! {
    fn poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int, also __poll {
        let limit = millis(timeout);
        posix::poll(fds, count, pointer(&limit), ptr::null(), move || {
            real!(poll)(fds, count, timeout)
        })
    }

    fn ppoll(
        fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t,
    ) -> c_int {
        if !acceptable(timeout) {
            return real!(ppoll)(fds, count, timeout, mask);
        }
        posix::poll(fds, count, timeout, mask, move || real!(ppoll)(fds, count, timeout, mask))
    }

    fn select(
        count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set,
        timeout: *mut timeval,
    ) -> c_int, also __select {
        let Ok(limit) = select_timeout(timeout.as_ref()) else {
            return real!(select)(count, read, write, except, timeout);
        };
        posix::select(
            count, read, write, except, pointer(&limit), timeout, ptr::null(),
            move || real!(select)(count, read, write, except, timeout),
        )
    }

    fn pselect(
        count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set,
        timeout: *const timespec, mask: *const sigset_t,
    ) -> c_int {
        if !acceptable(timeout) {
            return real!(pselect)(count, read, write, except, timeout, mask);
        }
        posix::select(
            count, read, write, except, timeout, ptr::null_mut(), mask,
            move || real!(pselect)(count, read, write, except, timeout, mask),
        )
    }
}

hook! {
    fn epoll_create(size: c_int) -> c_int {
        posix::epoll_create(move || real!(epoll_create)(size))
    }

    fn epoll_create1(flags: c_int) -> c_int {
        posix::epoll_create(move || real!(epoll_create1)(flags))
    }

    fn epoll_ctl(epfd: c_int, op: c_int, fd: c_int, event: *mut epoll_event) -> c_int {
        posix::epoll_ctl(epfd, op, fd, event, move || real!(epoll_ctl)(epfd, op, fd, event))
    }

    fn epoll_wait(epfd: c_int, events: *mut epoll_event, max: c_int, timeout: c_int) -> c_int {
        match lookup(epfd) {
            None => real!(epoll_wait)(epfd, events, max, timeout),
            Some(entry) => {
                let limit = millis(timeout);
                posix::epoll_wait(entry, epfd, events, max, pointer(&limit), ptr::null(), move || {
                    real!(epoll_wait)(epfd, events, max, timeout)
                })
            }
        }
    }

    fn epoll_pwait(
        epfd: c_int, events: *mut epoll_event, max: c_int, timeout: c_int, mask: *const sigset_t,
    ) -> c_int {
        match lookup(epfd) {
            None => real!(epoll_pwait)(epfd, events, max, timeout, mask),
            Some(entry) => {
                let limit = millis(timeout);
                posix::epoll_wait(entry, epfd, events, max, pointer(&limit), mask, move || {
                    real!(epoll_pwait)(epfd, events, max, timeout, mask)
                })
            }
        }
    }

    fn epoll_pwait2(
        epfd: c_int, events: *mut epoll_event, max: c_int, timeout: *const timespec,
        mask: *const sigset_t,
    ) -> c_int {
        match lookup(epfd) {
            Some(entry) if acceptable(timeout) => {
                posix::epoll_wait(entry, epfd, events, max, timeout, mask, move || {
                    real!(epoll_pwait2)(epfd, events, max, timeout, mask)
                })
            }
            _ => real!(epoll_pwait2)(epfd, events, max, timeout, mask),
        }
    }
}
