//! `libxsmc.so`: put in front of the C library with `LD_PRELOAD`, it hands a program's socket calls
//! to smc-core.
//!
//! There is one thin hook a libc symbol: look the fd up, then call smc-core's function of the same
//! name, or, for fds that are none of our business, the real one. All knowledge of streams,
//! carriers and peers is in smc-core. Every symbol hooked is one that glibc exports to programs;
//! calls that glibc makes inside itself (stdio, the resolver) don't come by here.
//!
//! The Rust standard library linked into this file calls `read`, `close` and the like through the
//! same symbols and so through these hooks. That is harmless: its fds are not in the table.
//!
//! At start-up the real functions are looked up and the `XSMC_*` variables copied; nothing else is done.

#[macro_use]
mod real;

mod confine;
mod fds;
mod fortify;
mod io;
mod process;
mod ready;
mod signal;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod variadic;

#[cfg(not(all(target_os = "linux", target_env = "gnu", target_pointer_width = "64")))]
compile_error!("libxsmc.so hooks the symbols and types of 64-bit glibc");

/// Runs when the library is loaded. glibc passes what main gets.
#[used]
#[unsafe(link_section = ".init_array")]
static LOADED: unsafe extern "C" fn(
    core::ffi::c_int,
    *const *const core::ffi::c_char,
    *const *const core::ffi::c_char,
) = loaded;

unsafe extern "C" fn loaded(
    _argc: core::ffi::c_int,
    _argv: *const *const core::ffi::c_char,
    envp: *const *const core::ffi::c_char,
) {
    // SAFETY: the program's environment, before it runs.
    unsafe { smc_core::posix::init(envp) };
}

/// Runs when the program exits or returns from main.
#[used]
#[unsafe(link_section = ".fini_array")]
static EXITING: unsafe extern "C" fn() = exiting;

unsafe extern "C" fn exiting() {
    smc_core::posix::exiting();
}
