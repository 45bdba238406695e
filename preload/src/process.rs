//! Calls that make a process or turn this one into another program.
//!
//! A connection that another process may use has to ride TCP there. smc-core sees to that in the
//! calls made here before and after the real ones.

use crate::real::{errno, keeping_errno, set_errno};
use libc::{
    FILE, c_char, c_int, pid_t, posix_spawn_file_actions_t, posix_spawnattr_t, termios, winsize,
};
use smc_core::fds::lookup;
use smc_core::posix;

/// A NULL-terminated array of C strings.
type Strings = *const *const c_char;

hook! {
    // A hook can't call vfork: the child would return from it first, over the stack frame that the
    // parent still has to return through. It would also run our code on the parent's memory with
    // its own fds, so that its close and dup2 calls would falsify the parent's fd table. POSIX lets
    // vfork be fork, and programs that keep its rules (only exec or _exit in the child) can't tell.
    fn fork() -> pid_t, also __fork, also vfork, also __vfork {
        posix::fork(move || real!(fork)())
    }

    fn _Fork() -> pid_t {
        posix::fork(move || real!(_Fork)())
    }

    fn forkpty(
        master: *mut c_int, name: *mut c_char, modes: *const termios, size: *const winsize,
    ) -> pid_t {
        let pid = posix::fork(move || real!(forkpty)(master, name, modes, size));
        if pid == 0 {
            forget_standard_fds();
        }
        pid
    }

    // Daemon forks inside the C library. In the parent it doesn't return, unless fork failed; in
    // the child it may fail as well, after the fork.
    fn daemon(keep_directory: c_int, keep_fds: c_int) -> c_int {
        let mut result = -1;
        let mut error = 0;
        posix::fork(|| {
            let parent = libc::getpid();
            result = real!(daemon)(keep_directory, keep_fds);
            error = errno();
            if result == 0 || libc::getpid() != parent { 0 } else { -1 }
        });
        if result == 0 && keep_fds == 0 {
            forget_standard_fds();
        }
        set_errno(error);
        result
    }
}

/// Tells the fd table that the C library has put other files on fds 0 to 2.
fn forget_standard_fds() {
    for fd in 0..=2 {
        // What used to be open on `fd` is closed: nothing is left to do for the real call.
        posix::close(lookup(fd), fd, || 0);
    }
}

/// Runs an exec function: returns only if that failed, with its errno.
fn exec(exec: impl FnOnce() -> c_int) -> c_int {
    posix::before_exec();
    let result = exec();
    keeping_errno(posix::after_failed_exec);
    result
}

hook! {
    fn execve(path: *const c_char, argv: Strings, envp: Strings) -> c_int {
        exec(move || real!(execve)(path, argv, envp))
    }

    fn execv(path: *const c_char, argv: Strings) -> c_int {
        exec(move || real!(execv)(path, argv))
    }

    fn execvp(file: *const c_char, argv: Strings) -> c_int {
        exec(move || real!(execvp)(file, argv))
    }

    fn execvpe(file: *const c_char, argv: Strings, envp: Strings) -> c_int {
        exec(move || real!(execvpe)(file, argv, envp))
    }

    fn fexecve(fd: c_int, argv: Strings, envp: Strings) -> c_int {
        exec(move || real!(fexecve)(fd, argv, envp))
    }

    fn execveat(
        dir: c_int, path: *const c_char, argv: Strings, envp: Strings, flags: c_int,
    ) -> c_int {
        exec(move || real!(execveat)(dir, path, argv, envp, flags))
    }
}

/// `execl`, its arguments gathered in `argv`.
///
/// # Safety
/// As for `execv`.
pub(crate) unsafe extern "C" fn exec_list(path: *const c_char, argv: Strings) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { exec(move || real!(execv)(path, argv)) }
}

/// `execlp`, its arguments gathered in `argv`.
///
/// # Safety
/// As for `execvp`.
pub(crate) unsafe extern "C" fn exec_list_search(file: *const c_char, argv: Strings) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { exec(move || real!(execvp)(file, argv)) }
}

/// `execle`, its arguments gathered in `argv`: the environment follows the terminating NULL.
///
/// # Safety
/// As for `execve`, with the environment where it is said to be.
pub(crate) unsafe extern "C" fn exec_list_env(path: *const c_char, argv: Strings) -> c_int {
    // SAFETY: `argv` ends in NULL and one more argument, the environment, follows it: that is how
    // execle is called. The rest is the caller's promise.
    unsafe {
        let mut end = argv;
        while !(*end).is_null() {
            end = end.add(1);
        }
        let envp: Strings = (*end.add(1)).cast();
        exec(move || real!(execve)(path, argv, envp))
    }
}

hook! {
    fn posix_spawn(
        pid: *mut pid_t, path: *const c_char, actions: *const posix_spawn_file_actions_t,
        attributes: *const posix_spawnattr_t, argv: Strings, envp: Strings,
    ) -> c_int {
        keeping_errno(|| posix::before_spawn(!actions.is_null()));
        real!(posix_spawn)(pid, path, actions, attributes, argv, envp)
    }

    fn posix_spawnp(
        pid: *mut pid_t, file: *const c_char, actions: *const posix_spawn_file_actions_t,
        attributes: *const posix_spawnattr_t, argv: Strings, envp: Strings,
    ) -> c_int {
        keeping_errno(|| posix::before_spawn(!actions.is_null()));
        real!(posix_spawnp)(pid, file, actions, attributes, argv, envp)
    }

    fn system(command: *const c_char) -> c_int {
        // Without a command it only says whether there is a shell.
        if !command.is_null() {
            keeping_errno(|| posix::before_spawn(false));
        }
        real!(system)(command)
    }

    fn popen(command: *const c_char, mode: *const c_char) -> *mut FILE, also _IO_popen {
        keeping_errno(|| posix::before_spawn(false));
        real!(popen)(command, mode)
    }
}

hook! {
    // The ways to end that run no exit handlers: what our own handler does is needed all the same.
    fn _exit(status: c_int) -> c_int, also _Exit {
        posix::exiting();
        real!(_exit)(status)
    }
}
