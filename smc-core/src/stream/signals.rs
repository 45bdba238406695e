//! Signals during a sleep: what interrupts recv(2) and what does not.
//!
//! A blocking TCP call goes on after a handler with SA_RESTART and fails with EINTR after one without (signal(7)).
//! ppoll(2), in which we sleep, fails with EINTR after either and doesn't say which ran. Where all handlers of the
//! process are of one kind that needs no answer. Where there are both, the thread sleeps with the signals of the
//! restarting ones blocked, and a signalfd among what it waits for: so EINTR is from the other kind, and a signal of
//! this one ends the sleep, is delivered as ppoll puts the mask back, and the call goes on.
//!
//! What would interrupt is never blocked. A signal to a process goes to its first thread if that takes it, else to
//! any other: blocked here, it would have no effect on the call that it was meant to interrupt.
//!
//! Which handlers there are is looked up when the program may have changed them, not before each sleep.

use core::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use core::sync::atomic::{AtomicI32, AtomicU32, AtomicU64};

use syscalls::{Sysno, syscall};

use crate::fds;
use crate::lock::Lock;

/// Highest signal number.
const SIGNALS: u32 = 64;
/// glibc uses these itself, for cancellation and for setxid.
const GLIBC: u64 = bit(32) | bit(33);

/// How often the program has installed a handler, or may have.
static CHANGES: AtomicU32 = AtomicU32::new(1);
/// `CHANGES` at the time of the last look.
static LOOKED: AtomicU32 = AtomicU32::new(0);
/// Signals with a handler that interrupts calls, and with one that has them restarted.
static INTERRUPTING: AtomicU64 = AtomicU64::new(0);
static RESTARTING: AtomicU64 = AtomicU64::new(0);
/// The process's signalfd + 1; its mask is `RESTARTING`.
static SIGNALFD: AtomicI32 = AtomicI32::new(0);
/// Held while looking.
static LOOKING: Lock = Lock::new();

const fn bit(signal: u32) -> u64 {
    1 << (signal - 1)
}

/// Handlers have been installed, or removed, or may have been. Safe in signal handlers.
pub fn handlers_changed() {
    CHANGES.fetch_add(1, SeqCst);
}

/// How one sleep takes signals.
pub(super) struct Taking {
    /// The mask for the sleep; `None`: the thread's own.
    pub(super) mask: Option<libc::sigset_t>,
    /// Readable when there is a signal whose handler lets the call go on; -1: none is needed.
    pub(super) fd: i32,
    /// EINTR: the call fails. Else it goes on.
    pub(super) interrupts: bool,
}

impl Taking {
    /// For a sleep of this thread. `timed`: the socket has a timeout, so any handler interrupts (signal(7)).
    pub(super) fn now(timed: bool) -> Taking {
        let changes = CHANGES.load(SeqCst);
        if LOOKED.load(Acquire) != changes {
            look(changes);
        }
        let (interrupting, restarting) = (INTERRUPTING.load(Relaxed), RESTARTING.load(Relaxed));
        let simply = |interrupts| Taking {
            mask: None,
            fd: -1,
            interrupts,
        };
        if interrupting == 0 || restarting == 0 || timed {
            return simply(interrupting != 0 || timed);
        }
        let own = own_mask();
        if interrupting & !own == 0 || restarting & !own == 0 {
            return simply(interrupting & !own != 0);
        }
        match SIGNALFD.load(Acquire) {
            // Signals that the thread blocks itself may be pending for long: then the descriptor is no use.
            fd if fd > 0 && pending() & own & restarting == 0 => Taking {
                mask: Some(set_of(own | restarting)),
                fd: fd - 1,
                interrupts: true,
            },
            _ => simply(true),
        }
    }
}

/// Looks up which handlers there are.
#[cold]
fn look(changes: u32) {
    // A handler that has interrupted a look makes do with what is known.
    let Some(_g) = LOOKING.try_lock() else { return };
    let (mut interrupting, mut restarting) = (0, 0);
    for signal in (1..=SIGNALS).filter(|s| bit(*s) & GLIBC == 0) {
        match handler_restarts(signal) {
            Some(true) => restarting |= bit(signal),
            Some(false) => interrupting |= bit(signal),
            None => {}
        }
    }
    INTERRUPTING.store(interrupting, Relaxed);
    RESTARTING.store(restarting, Relaxed);
    if interrupting != 0 && restarting != 0 {
        watch(restarting);
    }
    LOOKED.store(changes, Release);
}

/// Whether the handler of a signal has calls restarted; `None`: it has none.
fn handler_restarts(signal: u32) -> Option<bool> {
    #[repr(C)]
    struct KernelSigaction {
        handler: usize,
        flags: libc::c_ulong,
        restorer: usize,
        mask: u64,
    }
    let mut action = KernelSigaction {
        handler: 0,
        flags: 0,
        restorer: 0,
        mask: 0,
    };
    // SAFETY: stores one kernel sigaction (x86_64 and aarch64 layout).
    unsafe {
        syscall!(
            Sysno::rt_sigaction,
            signal,
            0,
            &mut action as *mut KernelSigaction,
            8
        )
    }
    .ok()?;
    if action.handler == libc::SIG_DFL || action.handler == libc::SIG_IGN {
        return None;
    }
    Some(action.flags & libc::SA_RESTART as libc::c_ulong != 0)
}

/// Has the signalfd watch these signals. Without one, sleeps take every handler for one that interrupts.
fn watch(signals: u64) {
    let set = |fd: isize| {
        let flags = libc::SFD_CLOEXEC | libc::SFD_NONBLOCK;
        // SAFETY: eight readable bytes.
        unsafe { syscall!(Sysno::signalfd4, fd, &signals as *const u64, 8, flags) }
    };
    match SIGNALFD.load(Acquire) {
        0 => {
            let made = fds::make_private(|keep| set(-1).map(|fd| keep(fd as i32)));
            if let Ok(fd) = made {
                SIGNALFD.store(fd + 1, Release);
            }
        }
        fd => drop(set(fd as isize - 1)),
    }
}

/// A set as libc has it.
fn set_of(signals: u64) -> libc::sigset_t {
    // SAFETY: a C struct of integers; sigemptyset gives it its value.
    let mut set = unsafe { core::mem::zeroed() };
    // SAFETY: a writable set; the numbers are those of signals.
    unsafe {
        libc::sigemptyset(&mut set);
        for signal in (1..=SIGNALS).filter(|s| signals & bit(*s) != 0) {
            libc::sigaddset(&mut set, signal as i32);
        }
    }
    set
}

/// The calling thread's signal mask.
fn own_mask() -> u64 {
    let mut mask = 0u64;
    // SAFETY: eight writable bytes; no new mask.
    let _ = unsafe {
        syscall!(
            Sysno::rt_sigprocmask,
            libc::SIG_SETMASK,
            0,
            &mut mask as *mut u64,
            8
        )
    };
    mask
}

/// Pending signals, whoever blocks them.
fn pending() -> u64 {
    let mut set = 0u64;
    // SAFETY: eight writable bytes.
    let _ = unsafe { syscall!(Sysno::rt_sigpending, &mut set as *mut u64, 8) };
    set
}

/// In the child of a fork: the descriptor is closed with the other private ones.
pub fn after_fork_child() {
    SIGNALFD.store(0, Release);
    LOOKING.reset();
    handlers_changed();
}
