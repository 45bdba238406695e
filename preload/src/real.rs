//! How a hook is made, and how the real function behind it is found.
//!
//! `redhook` looks the symbols up (`dlsym_next`), but its `hook!` and `real!` are not used:
//!
//! - its hooks run inside `catch_unwind`, a barrier in the way of the forced unwinding by which
//!   `pthread_cancel` leaves a blocking call;
//! - its `real!` waits on a `std::sync::Once`. If `dlsym` comes back into the same hook (through a
//!   memory allocator that reads a file, say), or a signal handler does, that waits for itself;
//! - it panics, which for us means abort, when a symbol is missing.
//!
//! Here each hook owns one pointer-sized cell. It starts out as the address of a small function of
//! the same signature that looks the symbol up, stores it and calls it. So there is no "resolved
//! yet?" test on the way, and threads that race, or recursion, do the same work twice and store the
//! same value.
//!
//! All cells are filled when the library is loaded, 0.3 us each. Left to the first
//! call, `dlsym` would take the dynamic linker's lock, and so wait for ever if a `dlopen` in
//! another thread waits for this one, and it would clear an error that `dlerror` has not
//! reported yet. Only code that runs before our initialisers still meets an empty cell.
//!
//! Forced unwinding passes through plain `"C"` functions compiled with `panic = "abort"`: they have
//! unwind tables and no landing pads. It would not pass through `"C-unwind"` ones, whose landing
//! pads end the process (so they do as of Rust 1.95, forced or not), and those would also cost
//! untouched fds the jump that a real call in last place compiles to. No destructor runs in frames
//! left like this, so nothing that needs one may be alive across a real call.

use core::ffi::c_void;
use core::sync::atomic::{AtomicPtr, Ordering};
use libc::{c_int, ssize_t};

/// What a function returns when the C library has no such symbol; `errno` is then `ENOSYS`.
pub(crate) trait Missing {
    fn missing() -> Self;
}

impl Missing for c_int {
    fn missing() -> Self {
        -1
    }
}

impl Missing for ssize_t {
    fn missing() -> Self {
        -1
    }
}

impl Missing for libc::c_long {
    fn missing() -> Self {
        -1
    }
}

impl<T> Missing for *mut T {
    fn missing() -> Self {
        core::ptr::null_mut()
    }
}

impl Missing for libc::sighandler_t {
    fn missing() -> Self {
        libc::SIG_ERR
    }
}

impl Missing for () {
    fn missing() -> Self {}
}

/// The calling thread's `errno`.
pub(crate) fn errno() -> c_int {
    // SAFETY: the C library's pointer to this thread's errno is valid as long as the thread runs.
    unsafe { *libc::__errno_location() }
}

/// Sets the calling thread's `errno`.
pub(crate) fn set_errno(value: c_int) {
    // SAFETY: as in `errno`.
    unsafe { *libc::__errno_location() = value }
}

/// Runs `work` and puts `errno` back to what it was before.
pub(crate) fn keeping_errno<T>(work: impl FnOnce() -> T) -> T {
    let saved = errno();
    let result = work();
    set_errno(saved);
    result
}

/// Looks up the next definition of `name` (which ends in a NUL byte) after this library and stores
/// it in `cell`. Returns false, and leaves `cell` alone, if there is none.
#[cold]
pub(crate) fn resolve(name: &'static str, cell: &AtomicPtr<c_void>) -> bool {
    keeping_errno(|| {
        // SAFETY: `hook!`, the only caller, passes a string that ends in NUL. `dlsym_next` panics
        // on a missing symbol, so it is asked only for those that a first look finds.
        let found = unsafe {
            if libc::dlsym(libc::RTLD_NEXT, name.as_ptr().cast()).is_null() {
                return false;
            }
            redhook::ld_preload::dlsym_next(name)
        };
        // Relaxed is enough: the pointer itself is all that is published. The code it points to
        // was mapped before this process ran its first instruction.
        cell.store(found.cast_mut().cast(), Ordering::Relaxed);
        true
    })
}

/// Defines exported functions that take the place of the C library's.
///
/// `fn name(args) -> ret, also alias { body }`: the body runs in an unsafe context, for `name` and
/// for each alias (other names of the same function in the C library). In it, `real!(name)` is the
/// function that the program would have called without us.
macro_rules! hook {
    (@real $name:ident ($($arg:ident : $ty:ty),* $(,)?) $ret:ty) => {
        #[allow(non_snake_case, reason = "the C library's names: _Fork")]
        mod $name {
            #[allow(unused_imports, reason = "some signatures name only primitive types")]
            use super::*;
            use core::sync::atomic::{AtomicPtr, Ordering};

            static REAL: AtomicPtr<core::ffi::c_void> =
                AtomicPtr::new(first as *mut core::ffi::c_void);

            unsafe extern "C" fn first($($arg: $ty),*) -> $ret {
                if $crate::real::resolve(concat!(stringify!($name), "\0"), &REAL) {
                    // SAFETY: the caller's arguments, unchanged.
                    return unsafe { real()($($arg),*) };
                }
                $crate::real::set_errno(libc::ENOSYS);
                $crate::real::Missing::missing()
            }

            // The dynamic linker calls what this section lists once, before main.
            #[used]
            #[unsafe(link_section = ".init_array")]
            static AT_LOAD: extern "C" fn() = at_load;

            extern "C" fn at_load() {
                $crate::real::resolve(concat!(stringify!($name), "\0"), &REAL);
            }

            #[inline(always)]
            pub(super) fn real() -> unsafe extern "C" fn($($ty),*) -> $ret {
                let pointer = REAL.load(Ordering::Relaxed);
                // SAFETY: the cell holds `first` or what the dynamic linker found under this name;
                // both have the C signature that the hook states.
                unsafe { core::mem::transmute(pointer) }
            }
        }
    };
    (@export $name:ident ($($arg:ident : $ty:ty),* $(,)?) $ret:ty, $body:block) => {
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($arg: $ty),*) -> $ret {
            // SAFETY: the program keeps the contract that the C library states for this function.
            // The body passes the arguments on to the real function or to smc-core's function of
            // the same name, which ask for that contract and no more.
            unsafe { $body }
        }
    };
    ($(fn $name:ident $args:tt -> $ret:ty $(, also $alias:ident)* $body:block)+) => {$(
        hook!(@real $name $args $ret);
        hook!(@export $name $args $ret, $body);
        $(hook!(@export $alias $args $ret, $body);)*
    )+};
}

/// Hooks for calls on one fd: `fn name(fd, args) -> ret, also alias = core_function;`. An untouched
/// fd goes straight to the real function, a tracked one to smc-core.
macro_rules! hook_fd {
    ($(fn $name:ident($fd:ident : $fd_ty:ty $(, $arg:ident : $ty:ty)* $(,)?) -> $ret:ty
       $(, also $alias:ident)* = $core:path;)+) => {$(
        hook! {
            fn $name($fd: $fd_ty $(, $arg: $ty)*) -> $ret $(, also $alias)* {
                match ::smc_core::fds::lookup($fd) {
                    None => real!($name)($fd $(, $arg)*),
                    Some(entry) => {
                        $core(entry, $fd $(, $arg)*, move || real!($name)($fd $(, $arg)*))
                    }
                }
            }
        }
    )+};
}

/// The function that the program would have called without us.
macro_rules! real {
    ($name:ident) => {
        $name::real()
    };
}
