//! The log: one line a message on standard error, off unless `XSMC_LOG` asks for it.
//!
//! We are a guest in somebody else's process, and file descriptor 2 is not ours. So a line is
//! written by a raw system call (never through hooks), without allocation, without touching
//! `errno`, without raising SIGPIPE and without blocking; and it is dropped rather than written to
//! a TCP connection or to a file that the program meanwhile opened under the number 2.

use std::fmt::{self, Write};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use syscalls::{Errno, Sysno, syscall};

/// Longest line in bytes, with prefix and newline. Below PIPE_BUF, so that lines stay whole.
const LINE_MAX: usize = 512;
const STDERR: usize = 2;

/// Device and inode of standard error as found at the start, 0 before that.
static STDERR_DEV: AtomicU64 = AtomicU64::new(0);
static STDERR_INO: AtomicU64 = AtomicU64::new(0);
static STARTED: AtomicBool = AtomicBool::new(false);

struct StderrLog;

impl ::log::Log for StderrLog {
    fn enabled(&self, metadata: &::log::Metadata<'_>) -> bool {
        metadata.level() <= ::log::max_level()
    }

    fn log(&self, record: &::log::Record<'_>) {
        if self.enabled(record.metadata()) {
            write_line(level_word(record.level()), *record.args());
        }
    }

    fn flush(&self) {}
}

fn level_word(level: ::log::Level) -> &'static str {
    match level {
        ::log::Level::Error => "error",
        ::log::Level::Warn => "warn",
        ::log::Level::Info => "info",
        ::log::Level::Debug => "debug",
        ::log::Level::Trace => "trace",
    }
}

/// Installs the logger with the level of `XSMC_LOG` (`error`, `warn`, `info`, `debug`, `trace`,
/// `off`; unset means off). Idempotent. Best called early: it also remembers what standard error
/// is, so that a file which gets the number 2 later is not mistaken for it.
pub fn init() {
    if STARTED.swap(true, Relaxed) {
        return;
    }
    if let Some((dev, ino, _)) = stat_stderr() {
        STDERR_DEV.store(dev, Relaxed);
        STDERR_INO.store(ino, Relaxed);
    }
    let wanted = crate::env::get("XSMC_LOG").unwrap_or_default();
    let level = match parse_level(&wanted.to_string_lossy()) {
        Some(level) => level,
        None => {
            warning(format_args!(
                "XSMC_LOG={wanted:?} is not a level, nothing is logged; use error, warn, info, \
                 debug or trace"
            ));
            ::log::LevelFilter::Off
        }
    };
    // Fails only if a logger is set already; then that one stays.
    if ::log::set_logger(&StderrLog).is_ok() {
        ::log::set_max_level(level);
    }
}

fn parse_level(word: &str) -> Option<::log::LevelFilter> {
    match word.trim() {
        "" => Some(::log::LevelFilter::Off),
        word => word.parse().ok(),
    }
}

/// Writes a warning whatever `XSMC_LOG` says. For the very few things that an operator must hear
/// of, such as a policy file that can't be used.
pub fn warning(args: fmt::Arguments<'_>) {
    init();
    write_line("warn", args);
}

/// Formats one line on the stack and writes it.
fn write_line(level: &str, args: fmt::Arguments<'_>) {
    let mut line = Line::new();
    // SAFETY: getpid takes no arguments and touches no memory of ours.
    let pid = unsafe { syscall!(Sysno::getpid) }.unwrap_or(0);
    // A line that doesn't fit is cut by `Line`; its `write_str` never fails. A failing `Display`
    // of an argument only shortens the line.
    let _ = write!(line, "xsmc[{pid}] {level}: ");
    let _ = line.write_fmt(args);
    write_stderr(line.finish());
}

/// A line of bounded length; what doesn't fit is cut and marked, control characters are replaced.
struct Line {
    bytes: [u8; LINE_MAX],
    len: usize,
    cut: bool,
}

const CUT_MARK: &str = "...";

impl Line {
    fn new() -> Line {
        Line {
            bytes: [0; LINE_MAX],
            len: 0,
            cut: false,
        }
    }

    /// Ends the line and returns it with its newline.
    fn finish(&mut self) -> &[u8] {
        let end: &[u8] = if self.cut { b"...\n" } else { b"\n" };
        for &byte in end {
            if let Some(slot) = self.bytes.get_mut(self.len) {
                *slot = byte;
                self.len += 1;
            }
        }
        self.bytes.get(..self.len).unwrap_or_default()
    }
}

impl Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for c in text.chars() {
            let c = match c {
                '\n' | '\t' => ' ',
                c if c.is_control() => '?',
                c => c,
            };
            let mut utf8 = [0; 4];
            let utf8 = c.encode_utf8(&mut utf8).as_bytes();
            let room = LINE_MAX - CUT_MARK.len() - 1;
            if self.cut || self.len + utf8.len() > room {
                self.cut = true;
                return Ok(());
            }
            if let Some(slot) = self.bytes.get_mut(self.len..self.len + utf8.len()) {
                slot.copy_from_slice(utf8);
                self.len += utf8.len();
            }
        }
        Ok(())
    }
}

/// Device, inode and mode of file descriptor 2.
fn stat_stderr() -> Option<(u64, u64, u32)> {
    let mut stat = MaybeUninit::<libc::stat>::zeroed();
    // SAFETY: on 64-bit Linux the kernel's stat has the layout of libc's; the buffer is ours.
    unsafe { syscall!(Sysno::fstat, STDERR, stat.as_mut_ptr()) }.ok()?;
    // SAFETY: zeroed at first and filled by the call; every bit pattern is valid.
    let stat = unsafe { stat.assume_init() };
    Some((stat.st_dev, stat.st_ino, stat.st_mode))
}

/// Whether file descriptor 2 is something that a line of ours may go to.
fn stderr_is_ours_to_use() -> bool {
    let Some((dev, ino, mode)) = stat_stderr() else {
        return false;
    };
    match mode & libc::S_IFMT {
        // Started by inetd or the like: never a foreign byte on a TCP stream.
        libc::S_IFSOCK => {
            is_unix_socket() && dev == STDERR_DEV.load(Relaxed) && ino == STDERR_INO.load(Relaxed)
        }
        libc::S_IFCHR => true,
        // A daemon that closed its standard error may have got the number 2 for a data file.
        // One that reopened it on a log file has opened that for appending.
        libc::S_IFREG => {
            (dev == STDERR_DEV.load(Relaxed) && ino == STDERR_INO.load(Relaxed)) || is_appending()
        }
        _ => dev == STDERR_DEV.load(Relaxed) && ino == STDERR_INO.load(Relaxed),
    }
}

fn is_unix_socket() -> bool {
    let mut domain: libc::c_int = -1;
    let mut len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: `domain` and `len` are ours and `len` tells the size of `domain`.
    let asked = unsafe {
        syscall!(
            Sysno::getsockopt,
            STDERR,
            libc::SOL_SOCKET,
            libc::SO_DOMAIN,
            &raw mut domain,
            &raw mut len
        )
    };
    asked.is_ok() && domain == libc::AF_UNIX
}

fn is_appending() -> bool {
    // SAFETY: F_GETFL takes no pointer.
    let flags = unsafe { syscall!(Sysno::fcntl, STDERR, libc::F_GETFL) };
    flags.is_ok_and(|flags| flags & libc::O_APPEND as usize != 0)
}

fn is_writable_now() -> bool {
    let mut poll = libc::pollfd {
        fd: STDERR as libc::c_int,
        events: libc::POLLOUT,
        revents: 0,
    };
    let zero = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: one pollfd and one timespec of ours, no signal mask.
    let ready = unsafe { syscall!(Sysno::ppoll, &raw mut poll, 1, &raw const zero, 0, 0) };
    ready == Ok(1) && poll.revents & libc::POLLOUT != 0
}

/// Writes to standard error, or drops the bytes where that would block, kill or corrupt.
fn write_stderr(bytes: &[u8]) {
    if !stderr_is_ours_to_use() || !is_writable_now() {
        return;
    }
    // The kernel's signal sets are one u64 on the platforms we support.
    const SET_SIZE: usize = size_of::<u64>();
    let sigpipe: u64 = 1 << (libc::SIGPIPE - 1);
    let mut old: u64 = 0;
    let mut pending: u64 = 0;
    // SAFETY: the sets are ours and SET_SIZE is their size; the mask is restored below.
    let blocked = unsafe {
        syscall!(
            Sysno::rt_sigprocmask,
            libc::SIG_BLOCK,
            &raw const sigpipe,
            &raw mut old,
            SET_SIZE
        )
    };
    if blocked.is_err() {
        return;
    }
    // SAFETY: `pending` is ours and SET_SIZE is its size.
    let _ = unsafe { syscall!(Sysno::rt_sigpending, &raw mut pending, SET_SIZE) };
    // SAFETY: the pointer and length come from one slice. A short write loses the rest: fine.
    let written = unsafe { syscall!(Sysno::write, STDERR, bytes.as_ptr(), bytes.len()) };
    if written == Err(Errno::EPIPE) && pending & sigpipe == 0 {
        let zero = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: takes back the SIGPIPE that our write has raised for this thread, no waiting.
        let _ = unsafe {
            syscall!(
                Sysno::rt_sigtimedwait,
                &raw const sigpipe,
                0,
                &raw const zero,
                SET_SIZE
            )
        };
    }
    // SAFETY: restores the mask saved above.
    let _ = unsafe {
        syscall!(
            Sysno::rt_sigprocmask,
            libc::SIG_SETMASK,
            &raw const old,
            0,
            SET_SIZE
        )
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(text: &str) -> String {
        let mut line = Line::new();
        line.write_str(text).unwrap();
        String::from_utf8(line.finish().to_vec()).unwrap()
    }

    #[test]
    fn lines_are_single_and_bounded() {
        assert_eq!(line("plain"), "plain\n");
        assert_eq!(line("two\nlines\u{1b}[0m"), "two lines?[0m\n");
        let long = line(&"é".repeat(LINE_MAX));
        assert!(
            long.len() <= LINE_MAX && long.ends_with("é...\n"),
            "{}",
            long.len()
        );
        let exact = "x".repeat(LINE_MAX - CUT_MARK.len() - 1);
        assert_eq!(line(&exact), format!("{exact}\n"));
        assert!(line(&format!("{exact}y")).ends_with("x...\n"));
    }

    #[test]
    fn levels() {
        assert_eq!(parse_level(""), Some(::log::LevelFilter::Off));
        assert_eq!(parse_level("info"), Some(::log::LevelFilter::Info));
        assert_eq!(parse_level("DEBUG"), Some(::log::LevelFilter::Debug));
        assert_eq!(parse_level("loud"), None);
    }

    /// Runs this test binary again with `fd` as its standard error and the child part below.
    fn run_child(stderr: std::process::Stdio) -> std::process::ExitStatus {
        std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--nocapture", "--test-threads=1"])
            .arg(format!(
                "{}::child",
                module_path!().split_once("::").unwrap().1
            ))
            .env("XSMC_LOG", "info")
            .env("XSMC_LOG_TEST_CHILD", "1")
            .stdout(std::process::Stdio::null())
            .stderr(stderr)
            .status()
            .unwrap()
    }

    #[test]
    fn child() {
        if std::env::var_os("XSMC_LOG_TEST_CHILD").is_none() {
            return;
        }
        // SAFETY: the child runs this test alone; default SIGPIPE is what programs start with.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
        init();
        init();
        ::log::info!("seen {}", 1);
        ::log::debug!("not seen");
        warning(format_args!("always"));
    }

    #[test]
    fn child_writes_lines() {
        let (mut read, write) = std::io::pipe().unwrap();
        assert!(run_child(write.into()).success());
        let mut text = String::new();
        std::io::Read::read_to_string(&mut read, &mut text).unwrap();
        let lines: Vec<_> = text.lines().filter(|l| l.starts_with("xsmc[")).collect();
        assert_eq!(lines.len(), 2, "{text}");
        assert!(lines[0].ends_with("] info: seen 1"), "{text}");
        assert!(lines[1].ends_with("] warn: always"), "{text}");
    }

    #[test]
    fn a_closed_pipe_does_not_kill() {
        let (read, write) = std::io::pipe().unwrap();
        drop(read);
        assert!(run_child(write.into()).success());
    }

    #[test]
    fn nothing_goes_to_a_tcp_connection() {
        use std::io::Read;
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let near = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut far, _) = listener.accept().unwrap();
        assert!(run_child(std::os::fd::OwnedFd::from(near).into()).success());
        let mut bytes = Vec::new();
        far.read_to_end(&mut bytes).unwrap();
        assert_eq!(String::from_utf8_lossy(&bytes), "");
    }
}
