//! Signals during a sleep: what interrupts recv(2) and what does not.
//!
//! A blocking TCP call goes on after a handler with SA_RESTART and fails with EINTR after one without
//! (signal(7)). ppoll(2), in which we sleep, fails with EINTR either way and does not say which handler
//! ran. So we sleep with signals blocked, and a signalfd among what we wait for: a signal stays pending,
//! we see which one it is and what its handler asks for, and then let it be delivered.
//!
//! A handler that runs between the look at the pending signals and the unblocking is treated as one that ran
//! just before the call, which a program can't tell apart.

use core::sync::atomic::AtomicI32;
use core::sync::atomic::Ordering::{Acquire, Release};

use syscalls::{Sysno, syscall};

use crate::fds;

/// All signals but those that glibc uses itself (cancellation and setxid, 32 and 33).
const BLOCKED: u64 = !(3 << 31);

/// The process's signalfd + 1.
static SIGNALFD: AtomicI32 = AtomicI32::new(0);

/// What handlers a sleep has met.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Met {
    /// None.
    Nothing,
    /// Only such as want the call to go on.
    Restarting,
    /// One that wants the call to fail.
    Interrupting,
}

/// Blocks signals while it lives.
pub(super) struct Blocked {
    old: u64,
}

#[repr(C)]
struct KernelSigaction {
    handler: usize,
    flags: libc::c_ulong,
    restorer: usize,
    mask: u64,
}

impl Blocked {
    /// Blocks signals for a sleep; also gives the descriptor that becomes readable when one is pending. `None`:
    /// no such descriptor can be had; the sleep then takes signals as ppoll does.
    pub(super) fn begin() -> Option<(Blocked, i32)> {
        let fd = signalfd()?;
        let mut old = 0u64;
        // SAFETY: both masks are eight bytes, the size of the kernel's sigset.
        unsafe {
            syscall!(
                Sysno::rt_sigprocmask,
                libc::SIG_SETMASK,
                &BLOCKED as *const u64,
                &mut old as *mut u64,
                8
            )
        }
        .ok()?;
        // Signals that the program blocks itself may be pending for long: then the signalfd is no use.
        let b = Blocked { old };
        if old & BLOCKED == 0 || pending() & old & BLOCKED == 0 {
            return Some((b, fd));
        }
        b.end(true);
        None
    }

    /// Delivers what is pending, and tells what it was. `seen`: the descriptor was readable after the sleep.
    pub(super) fn end(self, seen: bool) -> Met {
        let mut met = Met::Nothing;
        let mut set = if seen { pending() & !self.old } else { 0 };
        while set != 0 {
            let sig = set.trailing_zeros() + 1;
            set &= set - 1;
            let mut a = KernelSigaction {
                handler: 0,
                flags: 0,
                restorer: 0,
                mask: 0,
            };
            // SAFETY: stores one kernel sigaction (x86_64 and aarch64 layout).
            let r = unsafe {
                syscall!(
                    Sysno::rt_sigaction,
                    sig,
                    0,
                    &mut a as *mut KernelSigaction,
                    8
                )
            };
            if r.is_err() || a.handler == libc::SIG_DFL || a.handler == libc::SIG_IGN {
                continue;
            }
            if a.flags & libc::SA_RESTART as libc::c_ulong == 0 {
                met = Met::Interrupting;
            } else if met == Met::Nothing {
                met = Met::Restarting;
            }
        }
        // SAFETY: eight readable bytes; the handlers run on return.
        let _ = unsafe {
            syscall!(
                Sysno::rt_sigprocmask,
                libc::SIG_SETMASK,
                &self.old as *const u64,
                0,
                8
            )
        };
        met
    }
}

/// Pending signals, whoever blocks them.
fn pending() -> u64 {
    let mut set = 0u64;
    // SAFETY: eight writable bytes.
    let _ = unsafe { syscall!(Sysno::rt_sigpending, &mut set as *mut u64, 8) };
    set
}

fn signalfd() -> Option<i32> {
    match SIGNALFD.load(Acquire) {
        0 => {
            let made = fds::make_private(|keep| {
                let flags = libc::SFD_CLOEXEC | libc::SFD_NONBLOCK;
                // SAFETY: eight readable bytes.
                unsafe {
                    syscall!(
                        Sysno::signalfd4,
                        -1isize as usize,
                        &BLOCKED as *const u64,
                        8,
                        flags
                    )
                }
                .map(|fd| keep(fd as i32))
            });
            let fd = made.ok()?;
            if SIGNALFD
                .compare_exchange(0, fd + 1, Release, Acquire)
                .is_err()
            {
                fds::close_private(fd);
            }
            Some(SIGNALFD.load(Acquire) - 1)
        }
        fd => Some(fd - 1),
    }
}

/// In the child of a fork: the descriptor is closed with the other private ones.
pub fn after_fork_child() {
    SIGNALFD.store(0, Release);
}
