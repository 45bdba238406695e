//! Calls that move bytes.

use crate::real::keeping_errno;
use core::ffi::c_void;
use libc::{
    c_int, c_uint, iovec, loff_t, mmsghdr, msghdr, off_t, size_t, sockaddr, socklen_t, ssize_t,
    timespec,
};
use smc_core::fds::lookup;
use smc_core::posix;

/// The kernel looks at no more messages than this in one sendmmsg call (UIO_MAXIOV).
const MAX_MESSAGES: c_uint = 1024;

hook_fd! {
    fn read(fd: c_int, buf: *mut c_void, len: size_t) -> ssize_t, also __read = posix::read;
    fn write(fd: c_int, buf: *const c_void, len: size_t) -> ssize_t, also __write = posix::write;
    fn readv(fd: c_int, iov: *const iovec, count: c_int) -> ssize_t = posix::readv;
    fn writev(fd: c_int, iov: *const iovec, count: c_int) -> ssize_t = posix::writev;

    fn recv(fd: c_int, buf: *mut c_void, len: size_t, flags: c_int) -> ssize_t = posix::recv;
    fn recvfrom(
        fd: c_int, buf: *mut c_void, len: size_t, flags: c_int,
        addr: *mut sockaddr, addr_len: *mut socklen_t,
    ) -> ssize_t = posix::recvfrom;

    fn send(fd: c_int, buf: *const c_void, len: size_t, flags: c_int) -> ssize_t, also __send
        = posix::send;
    fn sendto(
        fd: c_int, buf: *const c_void, len: size_t, flags: c_int,
        addr: *const sockaddr, addr_len: socklen_t,
    ) -> ssize_t = posix::sendto;
}

// Offset -1 means "at the current position", the only offset that sockets take: with any other the
// kernel answers ESPIPE, so those go to it.
hook! {
    fn preadv2(fd: c_int, iov: *const iovec, count: c_int, offset: off_t, flags: c_int) -> ssize_t,
        also preadv64v2
    {
        match lookup(fd) {
            Some(entry) if offset == -1 => {
                posix::preadv2(entry, fd, iov, count, flags, move || {
                    real!(preadv2)(fd, iov, count, offset, flags)
                })
            }
            _ => real!(preadv2)(fd, iov, count, offset, flags),
        }
    }

    fn pwritev2(fd: c_int, iov: *const iovec, count: c_int, offset: off_t, flags: c_int) -> ssize_t,
        also pwritev64v2
    {
        match lookup(fd) {
            Some(entry) if offset == -1 => {
                posix::pwritev2(entry, fd, iov, count, flags, move || {
                    real!(pwritev2)(fd, iov, count, offset, flags)
                })
            }
            _ => real!(pwritev2)(fd, iov, count, offset, flags),
        }
    }
}

// Messages on untouched fds matter when they carry fds (SCM_RIGHTS): a socket of ours may leave
// for another process, or one may come in.
hook! {
    fn recvmsg(fd: c_int, msg: *mut msghdr, flags: c_int) -> ssize_t {
        match lookup(fd) {
            Some(entry) => {
                posix::recvmsg(entry, fd, msg, flags, move || real!(recvmsg)(fd, msg, flags))
            }
            None => {
                let received = real!(recvmsg)(fd, msg, flags);
                // The kernel has accepted `msg`, and made msg_controllen what it filled in.
                if received >= 0 && (*msg).msg_controllen > 0 {
                    keeping_errno(|| posix::received_fds(msg));
                }
                received
            }
        }
    }

    fn recvmmsg(
        fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int, timeout: *mut timespec,
    ) -> c_int {
        match lookup(fd) {
            Some(entry) => {
                posix::recvmmsg(entry, fd, messages, count, flags, timeout, move || {
                    real!(recvmmsg)(fd, messages, count, flags, timeout)
                })
            }
            None => {
                let received = real!(recvmmsg)(fd, messages, count, flags, timeout);
                for i in 0..usize::try_from(received).unwrap_or(0) {
                    let msg = &raw const (*messages.add(i)).msg_hdr;
                    if (*msg).msg_controllen > 0 {
                        keeping_errno(|| posix::received_fds(msg));
                    }
                }
                received
            }
        }
    }

    fn sendmsg(fd: c_int, msg: *const msghdr, flags: c_int) -> ssize_t {
        match lookup(fd) {
            Some(entry) => {
                posix::sendmsg(entry, fd, msg, flags, move || real!(sendmsg)(fd, msg, flags))
            }
            None => {
                if !msg.is_null() && (*msg).msg_controllen > 0 {
                    keeping_errno(|| posix::sending_fds(msg));
                }
                real!(sendmsg)(fd, msg, flags)
            }
        }
    }

    fn sendmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int {
        match lookup(fd) {
            Some(entry) => posix::sendmmsg(entry, fd, messages, count, flags, move || {
                real!(sendmmsg)(fd, messages, count, flags)
            }),
            None => {
                if !messages.is_null() {
                    for i in 0..count.min(MAX_MESSAGES) as usize {
                        let msg = &raw const (*messages.add(i)).msg_hdr;
                        if (*msg).msg_controllen > 0 {
                            keeping_errno(|| posix::sending_fds(msg));
                        }
                    }
                }
                real!(sendmmsg)(fd, messages, count, flags)
            }
        }
    }
}

hook! {
    // The input of sendfile can't be a socket: the kernel wants a file that has pages.
    fn sendfile(out_fd: c_int, in_fd: c_int, offset: *mut off_t, count: size_t) -> ssize_t,
        also sendfile64
    {
        match lookup(out_fd) {
            None => real!(sendfile)(out_fd, in_fd, offset, count),
            Some(entry) => posix::sendfile(entry, out_fd, in_fd, offset, count, move || {
                real!(sendfile)(out_fd, in_fd, offset, count)
            }),
        }
    }

    fn splice(
        fd_in: c_int, off_in: *mut loff_t, fd_out: c_int, off_out: *mut loff_t,
        len: size_t, flags: c_uint,
    ) -> ssize_t {
        if lookup(fd_in).is_none() && lookup(fd_out).is_none() {
            return real!(splice)(fd_in, off_in, fd_out, off_out, len, flags);
        }
        posix::splice(fd_in, off_in, fd_out, off_out, len, flags, move || {
            real!(splice)(fd_in, off_in, fd_out, off_out, len, flags)
        })
    }
}
