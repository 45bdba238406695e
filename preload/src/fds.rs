//! Calls that make, change, copy and close fds.

use core::ffi::c_void;
use libc::{FILE, c_char, c_int, c_uint, c_ulong, sockaddr, socklen_t};
use smc_core::fds::lookup;
use smc_core::posix;

hook! {
    fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
        posix::socket(domain, kind, protocol, move || real!(socket)(domain, kind, protocol))
    }

    fn accept(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int {
        posix::accept(fd, lookup(fd), 0, move || real!(accept)(fd, addr, len))
    }

    fn accept4(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t, flags: c_int) -> c_int {
        posix::accept(fd, lookup(fd), flags, move || real!(accept4)(fd, addr, len, flags))
    }
}

hook_fd! {
    fn connect(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int, also __connect
        = posix::connect;
    fn bind(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int = posix::bind;
    fn listen(fd: c_int, backlog: c_int) -> c_int = posix::listen;
    fn shutdown(fd: c_int, how: c_int) -> c_int = posix::shutdown;
    fn getsockopt(
        fd: c_int, level: c_int, name: c_int, value: *mut c_void, len: *mut socklen_t,
    ) -> c_int = posix::getsockopt;
    fn setsockopt(
        fd: c_int, level: c_int, name: c_int, value: *const c_void, len: socklen_t,
    ) -> c_int = posix::setsockopt;
    fn sockatmark(fd: c_int) -> c_int = posix::sockatmark;
    fn dup(fd: c_int) -> c_int = posix::dup;
}

// In C these three are variadic with at most one more argument, an integer or a pointer. Both the
// x86-64 System V and the AArch64 Linux calling conventions put it where a fixed third argument
// goes, and in both a variadic function can be called as if it were fixed: AL, which on x86-64
// says whether vector registers carry arguments, may hold anything then. If the program passed no
// third argument the value is whatever the register held, as it is inside the C library.
hook_fd! {
    fn fcntl(fd: c_int, cmd: c_int, arg: usize) -> c_int, also __fcntl = posix::fcntl;
    fn fcntl64(fd: c_int, cmd: c_int, arg: usize) -> c_int = posix::fcntl;
    fn ioctl(fd: c_int, request: c_ulong, arg: usize) -> c_int = posix::ioctl;
}

hook! {
    fn close(fd: c_int) -> c_int, also __close {
        posix::close(lookup(fd), fd, move || real!(close)(fd))
    }

    fn dup2(old: c_int, new: c_int) -> c_int, also __dup2 {
        posix::dup2(old, new, move || real!(dup2)(old, new))
    }

    fn dup3(old: c_int, new: c_int, flags: c_int) -> c_int {
        posix::dup3(old, new, flags, move || real!(dup3)(old, new, flags))
    }

    fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
        posix::close_range(first, last, flags, move |first, last, flags| {
            real!(close_range)(first, last, flags)
        })
    }

    fn closefrom(low: c_int) -> () {
        posix::closefrom(low, move |first, last, flags| {
            let result = real!(close_range)(first, last, flags);
            if result == 0 {
                return result;
            }
            // Closefrom can't fail. Without the system call (an old kernel, a seccomp filter) the
            // C library's own closefrom finds the open fds in /proc; the gaps between fds that
            // have to stay are closed one by one.
            if last == c_uint::MAX {
                real!(closefrom)(first.cast_signed());
            } else {
                for fd in first..=last {
                    real!(close)(fd.cast_signed());
                }
            }
            0
        });
    }

    // From here on stdio reads and writes this fd by internal calls that no hook sees.
    fn fdopen(fd: c_int, mode: *const c_char) -> *mut FILE, also _IO_fdopen {
        if let Some(entry) = lookup(fd) {
            posix::fdopen(entry, fd);
        }
        real!(fdopen)(fd, mode)
    }
}
