//! The fortified forms, which programs built with `_FORTIFY_SOURCE` call.
//!
//! They know the size of the caller's buffer. When the length asked for is larger, the real form
//! gets the call and ends the program with its usual message; otherwise they do what the plain
//! forms do.

use core::ffi::c_void;
use libc::{c_int, nfds_t, pollfd, sigset_t, size_t, sockaddr, socklen_t, ssize_t, timespec};
use smc_core::fds::lookup;
use smc_core::posix;

use crate::ready::{acceptable, millis, pointer};

hook! {
    fn __read_chk(fd: c_int, buf: *mut c_void, len: size_t, size: size_t) -> ssize_t {
        match lookup(fd) {
            Some(entry) if len <= size => {
                posix::read(entry, fd, buf, len, move || real!(__read_chk)(fd, buf, len, size))
            }
            _ => real!(__read_chk)(fd, buf, len, size),
        }
    }

    fn __recv_chk(
        fd: c_int, buf: *mut c_void, len: size_t, size: size_t, flags: c_int,
    ) -> ssize_t {
        match lookup(fd) {
            Some(entry) if len <= size => posix::recv(entry, fd, buf, len, flags, move || {
                real!(__recv_chk)(fd, buf, len, size, flags)
            }),
            _ => real!(__recv_chk)(fd, buf, len, size, flags),
        }
    }

    fn __recvfrom_chk(
        fd: c_int, buf: *mut c_void, len: size_t, size: size_t, flags: c_int,
        addr: *mut sockaddr, addr_len: *mut socklen_t,
    ) -> ssize_t {
        match lookup(fd) {
            Some(entry) if len <= size => {
                posix::recvfrom(entry, fd, buf, len, flags, addr, addr_len, move || {
                    real!(__recvfrom_chk)(fd, buf, len, size, flags, addr, addr_len)
                })
            }
            _ => real!(__recvfrom_chk)(fd, buf, len, size, flags, addr, addr_len),
        }
    }

    fn __poll_chk(fds: *mut pollfd, count: nfds_t, timeout: c_int, size: size_t) -> c_int {
        if !fits(count, size) {
            return real!(__poll_chk)(fds, count, timeout, size);
        }
        let limit = millis(timeout);
        posix::poll(fds, count, pointer(&limit), core::ptr::null(), move || {
            real!(__poll_chk)(fds, count, timeout, size)
        })
    }

    fn __ppoll_chk(
        fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t,
        size: size_t,
    ) -> c_int {
        if !fits(count, size) || !acceptable(timeout) {
            return real!(__ppoll_chk)(fds, count, timeout, mask, size);
        }
        posix::poll(fds, count, timeout, mask, move || {
            real!(__ppoll_chk)(fds, count, timeout, mask, size)
        })
    }
}

/// Whether an array of `count` pollfds fits into `size` bytes.
fn fits(count: nfds_t, size: size_t) -> bool {
    count <= (size / size_of::<pollfd>()) as nfds_t
}
