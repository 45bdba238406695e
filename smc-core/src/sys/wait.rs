//! Sleeping, waking, and the time.

use core::ffi::c_void;
use core::ptr::null;
use core::sync::atomic::{AtomicPtr, AtomicUsize, Ordering::Relaxed};

use libc::{c_int, epoll_event, pollfd, sigset_t, timespec};
use syscalls::{Sysno, syscall};

use super::{Errno, Result, errno, set_errno};

/// Waits while `*word == expect`, at most `ms` milliseconds.
pub fn futex_wait(word: &core::sync::atomic::AtomicU32, expect: u32, ms: u32) {
    let ts = timespec {
        tv_sec: i64::from(ms / 1000),
        tv_nsec: i64::from(ms % 1000) * 1_000_000,
    };
    let op = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: the word lives as long as the borrow; the timeout is only read.
    let _ = unsafe {
        syscall!(
            Sysno::futex,
            word.as_ptr(),
            op,
            expect,
            &ts as *const timespec
        )
    };
}

/// Wakes one waiter of `word`.
pub fn futex_wake(word: &core::sync::atomic::AtomicU32) {
    let op = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: as in `futex_wait`.
    let _ = unsafe { syscall!(Sysno::futex, word.as_ptr(), op, 1) };
}

/// Lets another runnable thread have the core.
pub fn sched_yield() {
    // SAFETY: touches no memory.
    let _ = unsafe { syscall!(Sysno::sched_yield) };
}

/// Sleeps for `us` microseconds, or less when a signal comes.
pub fn sleep_us(us: u64) {
    let ts = timespec {
        tv_sec: (us / 1_000_000) as i64,
        tv_nsec: (us % 1_000_000 * 1000) as i64,
    };
    // SAFETY: the timespec is only read.
    let _ = unsafe { syscall!(Sysno::nanosleep, &ts as *const timespec, 0) };
}

type Clock = unsafe extern "C" fn(libc::clockid_t, *mut timespec) -> c_int;

/// The C library's own clock_gettime(2), once [`find_clock`] has found it.
static CLOCK: AtomicPtr<c_void> = AtomicPtr::new(core::ptr::null_mut());

/// Looks up the C library's own clock. What is in front of it may stand still or run as it likes, as libfaketime
/// does for a program; our spins must end all the same.
pub fn find_clock() {
    let before = errno();
    // SAFETY: takes a further reference to a library that is loaded; both strings end in NUL.
    unsafe {
        let libc = libc::dlopen(c"libc.so.6".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD);
        if !libc.is_null() {
            CLOCK.store(libc::dlsym(libc, c"clock_gettime".as_ptr()), Relaxed);
        }
    }
    set_errno(Errno::new(before));
}

#[inline]
fn clock_ns(clock: libc::clockid_t) -> u64 {
    let mut ts = timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    let own = CLOCK.load(Relaxed);
    let read: Clock = if own.is_null() {
        libc::clock_gettime
    } else {
        // SAFETY: the C library's function of that name, which has this signature.
        unsafe { core::mem::transmute::<*mut c_void, Clock>(own) }
    };
    // SAFETY: writes one timespec.
    unsafe { read(clock, &mut ts) };
    ts.tv_sec as u64 * 1_000_000_000 + ts.tv_nsec as u64
}

/// Nanoseconds of CLOCK_MONOTONIC (vDSO: no system call).
#[inline]
pub fn now_ns() -> u64 {
    clock_ns(libc::CLOCK_MONOTONIC)
}

/// As [`now_ns`], some milliseconds behind, but never a system call.
pub fn now_coarse_ns() -> u64 {
    clock_ns(libc::CLOCK_MONOTONIC_COARSE)
}

static PPOLL: AtomicUsize = AtomicUsize::new(0);
static EPOLL_PWAIT: AtomicUsize = AtomicUsize::new(0);

fn next_symbol(cache: &AtomicUsize, name: &core::ffi::CStr) -> usize {
    let known = cache.load(Relaxed);
    if known != 0 {
        return known;
    }
    // SAFETY: dlsym with a NUL-terminated name; RTLD_NEXT skips our own hook of that name.
    let p = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) } as usize;
    cache.store(p, Relaxed);
    p
}

/// libc's ppoll(2): a cancellation point. `None` waits for ever, and with the thread's own mask.
pub fn ppoll(
    fds: &mut [pollfd],
    timeout: Option<timespec>,
    mask: Option<&sigset_t>,
) -> Result<usize> {
    type F =
        unsafe extern "C" fn(*mut pollfd, libc::nfds_t, *const timespec, *const sigset_t) -> c_int;
    let ts = timeout.as_ref().map_or(null(), |t| t as *const timespec);
    let mask = mask.map_or(null(), |m| m as *const sigset_t);
    let p = next_symbol(&PPOLL, c"ppoll");
    let before = errno();
    // SAFETY: the symbol has this type; the slice, timeout and mask are valid for the call.
    let r =
        unsafe { core::mem::transmute::<usize, F>(p)(fds.as_mut_ptr(), fds.len() as _, ts, mask) };
    outcome(r, before)
}

/// libc's epoll_pwait(2) with a timeout in milliseconds: a cancellation point.
///
/// # Safety
/// `evs` must be writable for `max` events, `mask` null or valid.
pub unsafe fn epoll_pwait(
    ep: c_int,
    evs: *mut epoll_event,
    max: c_int,
    ms: c_int,
    mask: *const sigset_t,
) -> Result<usize> {
    type F = unsafe extern "C" fn(c_int, *mut epoll_event, c_int, c_int, *const sigset_t) -> c_int;
    let p = next_symbol(&EPOLL_PWAIT, c"epoll_pwait");
    let before = errno();
    // SAFETY: the symbol has this type; the rest is promised by the caller.
    let r = unsafe { core::mem::transmute::<usize, F>(p)(ep, evs, max, ms, mask) };
    outcome(r, before)
}

fn outcome(r: c_int, errno_before: c_int) -> Result<usize> {
    if r >= 0 {
        return Ok(r as usize);
    }
    let e = Errno::new(errno());
    set_errno(Errno::new(errno_before));
    Err(e)
}
