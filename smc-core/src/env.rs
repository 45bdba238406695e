//! The `XSMC_*` variables, as they were when the process started.
//!
//! Programs may replace or overwrite their environment (nginx does) long before the engine looks, so
//! libxsmc.so copies these few strings while it is loaded. Without [`capture`] (in tools and tests)
//! the present environment is asked.

use core::ffi::{CStr, c_char};
use core::sync::atomic::AtomicUsize;
use core::sync::atomic::Ordering::{Acquire, Release};
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;

const ROOM: usize = 4096;

struct Copy(core::cell::UnsafeCell<[u8; ROOM]>);

// SAFETY: written by `capture` only, before it publishes the length.
unsafe impl Sync for Copy {}

static COPY: Copy = Copy(core::cell::UnsafeCell::new([0; ROOM]));
/// Bytes used + 1; 0 before the capture.
static USED: AtomicUsize = AtomicUsize::new(0);

/// Copies the variables. For the library's start-up code.
///
/// # Safety
/// `envp` must be an environment as the program gets it, and no other thread may run yet.
pub unsafe fn capture(mut envp: *const *const c_char) {
    let mut used = 0;
    // SAFETY: the array ends with a null pointer, its strings with NUL; nobody reads COPY yet.
    unsafe {
        while !envp.is_null() && !(*envp).is_null() {
            let var = CStr::from_ptr(*envp).to_bytes_with_nul();
            if var.starts_with(b"XSMC_") && used + var.len() <= ROOM {
                let to = COPY.0.get().cast::<u8>().add(used);
                core::ptr::copy_nonoverlapping(var.as_ptr(), to, var.len());
                used += var.len();
            }
            envp = envp.add(1);
        }
    }
    USED.store(used + 1, Release);
}

/// The value of variable `name`, if it is set.
pub fn get(name: &str) -> Option<OsString> {
    let used = USED.load(Acquire);
    if used == 0 {
        return std::env::var_os(name);
    }
    // SAFETY: written before `USED` was stored, never again.
    let copy = unsafe { &*COPY.0.get() };
    copy.get(..used - 1)?.split(|&b| b == 0).find_map(|var| {
        let value = var.strip_prefix(name.as_bytes())?.strip_prefix(b"=")?;
        Some(OsString::from_vec(value.to_vec()))
    })
}
