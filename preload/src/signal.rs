//! Calls that install signal handlers.
//!
//! smc-core wants to know which handlers have calls restarted, and looks that up again after these. Aliases are
//! the C library's.

use libc::{c_int, sigaction as Action, sighandler_t};
use smc_core::posix::handlers_changed;

hook! {
    fn sigaction(signal: c_int, new: *const Action, old: *mut Action) -> c_int, also __sigaction {
        let result = real!(sigaction)(signal, new, old);
        if !new.is_null() {
            handlers_changed();
        }
        result
    }

    fn signal(number: c_int, handler: sighandler_t) -> sighandler_t, also bsd_signal, also ssignal {
        let old = real!(signal)(number, handler);
        handlers_changed();
        old
    }

    fn sysv_signal(number: c_int, handler: sighandler_t) -> sighandler_t, also __sysv_signal {
        let old = real!(sysv_signal)(number, handler);
        handlers_changed();
        old
    }

    fn sigset(number: c_int, handler: sighandler_t) -> sighandler_t {
        let old = real!(sigset)(number, handler);
        handlers_changed();
        old
    }

    fn sigignore(number: c_int) -> c_int {
        let result = real!(sigignore)(number);
        handlers_changed();
        result
    }

    fn siginterrupt(number: c_int, interrupts: c_int) -> c_int {
        let result = real!(siginterrupt)(number, interrupts);
        handlers_changed();
        result
    }
}
