//! What each thread keeps: a few words of thread-local storage.
//!
//! `thread_local!` in a shared library asks the dynamic linker for an address at each access (the general dynamic model of
//! the TLS ABI), some twenty instructions, and each lock needs the thread's number. But libxsmc.so comes into a process
//! together with the program, so that its words have a place at a fixed distance from the thread pointer, which the
//! dynamic linker stores once (the initial exec model). Rust has no stable way to say so, hence the assembly.
//!
//! All are zero when a thread begins, have no destructor, and may be used in signal handlers.

use core::cell::Cell;

/// The calling thread's.
#[repr(C)]
pub struct Words {
    /// Its kernel id, 0 until it is asked for.
    pub tid: Cell<u32>,
    /// Its bell, 0 if it has none.
    pub bell: Cell<u32>,
    /// Where on the stack the use of the bell began, 0: it is not in use.
    pub bell_in_use: Cell<usize>,
    /// The bell was taken from a use that a long jump has left, it seems.
    pub bell_taken_over: Cell<bool>,
    /// It is in a library that works on descriptors of ours.
    pub trusted: Cell<bool>,
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod place {
    use super::Words;

    core::arch::global_asm!(
        ".pushsection .tbss.xsmc_thread, \"awT\", @nobits",
        ".balign 8",
        ".globl xsmc_thread",
        ".hidden xsmc_thread",
        ".type xsmc_thread, @object",
        ".size xsmc_thread, {size}",
        "xsmc_thread:",
        ".zero {size}",
        ".popsection",
        size = const size_of::<Words>(),
    );

    /// Gives `f` the calling thread's words.
    #[inline(always)]
    pub fn with<T>(f: impl FnOnce(&Words) -> T) -> T {
        let words: *const Words;
        // SAFETY: the thread pointer is the first word at fs (x86-64 psABI), and the GOT's entry is the distance from there.
        // Both are the same whenever a thread asks, and neither is memory that Rust knows of.
        unsafe {
            core::arch::asm!(
                "mov {words}, qword ptr fs:[0]",
                "add {words}, qword ptr [rip + xsmc_thread@GOTTPOFF]",
                words = out(reg) words,
                options(pure, nomem, nostack),
            );
        }
        // SAFETY: zeroed memory of this thread alone, of that size and alignment, for which zero is valid; it lives as long
        // as the thread.
        f(unsafe { &*words })
    }
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
mod place {
    use super::Words;
    use core::cell::Cell;

    std::thread_local! {
        static WORDS: Words = const {
            Words {
                tid: Cell::new(0),
                bell: Cell::new(0),
                bell_in_use: Cell::new(0),
                bell_taken_over: Cell::new(false),
                trusted: Cell::new(false),
            }
        };
    }

    /// Gives `f` the calling thread's words.
    pub fn with<T>(f: impl FnOnce(&Words) -> T) -> T {
        WORDS.with(f)
    }
}

pub use place::with;

const _: () = assert!(align_of::<Words>() <= 8);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_thread_has_its_own() {
        with(|w| w.bell_in_use.set(usize::MAX));
        let other = std::thread::spawn(|| {
            let before = with(|w| w.bell_in_use.replace(7));
            (before, with(|w| (w.bell_in_use.get(), w.trusted.get())))
        });
        assert_eq!(other.join().unwrap(), (0, (7, false)));
        assert_eq!(with(|w| w.bell_in_use.replace(0)), usize::MAX);
    }
}
