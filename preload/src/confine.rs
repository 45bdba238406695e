//! Calls by which a process puts itself under a seccomp filter.
//!
//! Both are variadic in C: that changes nothing for the callee as long as all arguments are numbers. Those that
//! the caller didn't pass are whatever the registers hold, and are handed on like that, as the C library does. The
//! real call comes last, hence compiles to a jump: what `syscall` is used for may not survive a frame of ours.

use libc::{c_int, c_long, c_ulong};
use smc_core::posix;

hook! {
    fn prctl(option: c_int, a: c_ulong, b: c_ulong, c: c_ulong, d: c_ulong) -> c_int {
        posix::prctl(option, a, b);
        real!(prctl)(option, a, b, c, d)
    }

    // What libseccomp uses.
    fn syscall(
        number: c_long, a: c_long, b: c_long, c: c_long, d: c_long, e: c_long, f: c_long,
    ) -> c_long {
        if number == libc::SYS_seccomp {
            posix::seccomp(a, b, c);
        }
        real!(syscall)(number, a, b, c, d, e, f)
    }
}
