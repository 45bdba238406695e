//! System calls, made directly.
//!
//! Inside libxsmc.so the symbols `read`, `close`, `poll`, … are our own hooks, so the core must not
//! call libc's functions by these names. A raw call has two more merits: it never touches `errno`,
//! and it is safe in signal handlers and in a forked child. The exceptions are [`ppoll`] and
//! [`epoll_pwait`]: a thread that sleeps must be cancellable (pthreads(7)), and only libc's own
//! functions are cancellation points. What sleeps, wakes, or tells the time is in `wait`.

mod wait;

use core::mem::{MaybeUninit, size_of, zeroed};
use core::ptr::{NonNull, null};
use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use libc::{c_int, epoll_event, iovec, msghdr, pollfd};
use syscalls::{Sysno, syscall};

pub use syscalls::Errno;
pub use wait::{
    epoll_pwait, find_clock, futex_wait, futex_wake, now_coarse_ns, now_ns, ppoll, sched_yield,
    sleep_us,
};

/// Result of a system call.
pub type Result<T> = core::result::Result<T, Errno>;

/// Most bytes that the kernel moves in one call (MAX_RW_COUNT).
pub const MAX_RW_COUNT: usize = 0x7fff_f000;

/// Flags of the eventfds made here.
const EFD_FLAGS: c_int = libc::EFD_CLOEXEC | libc::EFD_NONBLOCK;

/// Sets the calling thread's `errno`.
#[inline]
pub fn set_errno(e: Errno) {
    // SAFETY: __errno_location returns the calling thread's own errno, always valid.
    unsafe { *libc::__errno_location() = e.into_raw() }
}

/// Reads the calling thread's `errno`.
#[inline]
pub fn errno() -> c_int {
    // SAFETY: as in `set_errno`.
    unsafe { *libc::__errno_location() }
}

/// recvmsg(2) with a scatter list and nothing else.
///
/// # Safety
/// Each element of `iov` must describe memory that the caller may write.
pub unsafe fn recv(fd: c_int, iov: &[iovec], flags: c_int) -> Result<usize> {
    // SAFETY: an all-zero msghdr is valid; the list is only read by the kernel.
    let mut m: msghdr = unsafe { zeroed() };
    m.msg_iov = iov.as_ptr().cast_mut();
    m.msg_iovlen = iov.len();
    // SAFETY: promised by the caller.
    unsafe { syscall!(Sysno::recvmsg, fd, &mut m as *mut msghdr, flags) }
}

/// sendmsg(2) with a gather list and nothing else.
///
/// # Safety
/// Each element of `iov` must describe memory that the caller may read.
pub unsafe fn send(fd: c_int, iov: &[iovec], flags: c_int) -> Result<usize> {
    // SAFETY: as in `recv`.
    let mut m: msghdr = unsafe { zeroed() };
    m.msg_iov = iov.as_ptr().cast_mut();
    m.msg_iovlen = iov.len();
    // SAFETY: promised by the caller.
    unsafe { syscall!(Sysno::sendmsg, fd, &m as *const msghdr, flags) }
}

/// preadv2(2), or pwritev2(2) if `out`, of one byte that has no memory, with offset -1. Whatever it says, it moves nothing.
pub fn try_vectors_2(fd: c_int, out: bool, flags: c_int) -> Result<usize> {
    let call = if out { Sysno::pwritev2 } else { Sysno::preadv2 };
    let v = iovec {
        iov_base: core::ptr::null_mut(),
        iov_len: 1,
    };
    // SAFETY: the list is readable; the kernel says EFAULT instead of touching the byte.
    unsafe { syscall!(call, fd, &raw const v, 1, -1isize, -1isize, flags) }
}

/// recvmsg(2) with a complete header.
///
/// # Safety
/// As recvmsg(2): the header's pointers must be valid.
pub unsafe fn recvmsg(fd: c_int, m: &mut msghdr, flags: c_int) -> Result<usize> {
    // SAFETY: promised by the caller.
    unsafe { syscall!(Sysno::recvmsg, fd, m as *mut msghdr, flags) }
}

/// sendmsg(2) with a complete header.
///
/// # Safety
/// As sendmsg(2): the header's pointers must be valid.
pub unsafe fn sendmsg(fd: c_int, m: &msghdr, flags: c_int) -> Result<usize> {
    // SAFETY: promised by the caller.
    unsafe { syscall!(Sysno::sendmsg, fd, m as *const msghdr, flags) }
}

/// read(2) into raw memory.
///
/// # Safety
/// `buf` must be writable for `len` bytes.
pub unsafe fn read_raw(fd: c_int, buf: *mut u8, len: usize) -> Result<usize> {
    // SAFETY: promised by the caller.
    unsafe { syscall!(Sysno::read, fd, buf, len) }
}

/// write(2) from raw memory.
///
/// # Safety
/// `buf` must be readable for `len` bytes.
pub unsafe fn write_raw(fd: c_int, buf: *const u8, len: usize) -> Result<usize> {
    // SAFETY: promised by the caller.
    unsafe { syscall!(Sysno::write, fd, buf, len) }
}

/// pread(2) into raw memory.
///
/// # Safety
/// `buf` must be writable for `len` bytes.
pub unsafe fn pread_raw(fd: c_int, buf: *mut u8, len: usize, off: i64) -> Result<usize> {
    // SAFETY: promised by the caller.
    unsafe { syscall!(Sysno::pread64, fd, buf, len, off) }
}

/// sendfile(2).
///
/// # Safety
/// As sendfile(2). The kernel checks `offset`: a call that has not failed has read and written it.
pub unsafe fn sendfile(
    fd: c_int,
    file: c_int,
    offset: *mut libc::off_t,
    count: usize,
) -> Result<usize> {
    // SAFETY: promised by the caller.
    unsafe { syscall!(Sysno::sendfile, fd, file, offset, count) }
}

/// splice(2) between a pipe and a socket.
pub fn splice(from: c_int, to: c_int, count: usize, flags: libc::c_uint) -> Result<usize> {
    // SAFETY: no memory of ours is touched.
    unsafe { syscall!(Sysno::splice, from, 0, to, 0, count, flags) }
}

/// The IPv4 or IPv6 address in a sockaddr; IPv4-mapped ones as IPv4. `None` for anything else.
///
/// # Safety
/// `addr` null or readable for `len` bytes.
pub unsafe fn socket_address(
    addr: *const libc::sockaddr,
    len: libc::socklen_t,
) -> Option<core::net::SocketAddr> {
    let len = len as usize;
    if (addr as usize) < 4096 || len < size_of::<libc::sockaddr_in>() {
        return None;
    }
    // SAFETY: long enough for a family, as checked; the casts are to plain integers of the checked length.
    unsafe {
        match i32::from((*addr).sa_family) {
            libc::AF_INET => {
                let a = addr.cast::<libc::sockaddr_in>().read_unaligned();
                let ip = core::net::Ipv4Addr::from(a.sin_addr.s_addr.to_ne_bytes());
                Some((ip, u16::from_be(a.sin_port)).into())
            }
            libc::AF_INET6 if len >= size_of::<libc::sockaddr_in6>() => {
                let a = addr.cast::<libc::sockaddr_in6>().read_unaligned();
                let ip = core::net::Ipv6Addr::from(a.sin6_addr.s6_addr).to_canonical();
                Some((ip, u16::from_be(a.sin6_port)).into())
            }
            _ => None,
        }
    }
}

/// While it lives, the calling thread can't be cancelled (pthread_setcancelstate(3)): for calls into other
/// libraries that may reach a cancellation point in the middle of something.
pub struct NoCancel(c_int);

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
}

impl NoCancel {
    /// Disables cancellation.
    pub fn new() -> NoCancel {
        const PTHREAD_CANCEL_DISABLE: c_int = 1;
        let mut old = 0;
        // SAFETY: changes a state of the calling thread; `old` is writable.
        unsafe { pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &mut old) };
        NoCancel(old)
    }
}

impl Default for NoCancel {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for NoCancel {
    fn drop(&mut self) {
        // SAFETY: as above; the old state may go nowhere.
        unsafe { pthread_setcancelstate(self.0, core::ptr::null_mut()) };
    }
}

/// Ends a TCP connection with a reset, by connect(2) to AF_UNSPEC. The descriptor stays open.
pub fn disconnect(fd: c_int) -> Result<()> {
    let none = libc::sockaddr {
        sa_family: libc::AF_UNSPEC as u16,
        sa_data: [0; 14],
    };
    // SAFETY: a valid address of that length.
    unsafe {
        syscall!(
            Sysno::connect,
            fd,
            &raw const none,
            size_of::<libc::sockaddr>()
        )
    }
    .map(drop)
}

/// Throws away what a TCP socket has received that nothing more will come to. An error stays due.
pub fn discard_received(fd: c_int) {
    const DISCARD: c_int = libc::MSG_TRUNC | libc::MSG_DONTWAIT;
    while let Ok(n @ 1..) = ioctl_int(fd, libc::FIONREAD) {
        let v = iovec {
            iov_base: core::ptr::null_mut(),
            iov_len: n as usize,
        };
        // SAFETY: MSG_TRUNC on TCP writes nothing (tcp(7)).
        if !matches!(unsafe { recv(fd, &[v], DISCARD) }, Ok(1..)) {
            return;
        }
    }
}

/// Puts a TCP socket that was never connected into the place of `fd`. Whether exec(2) closes that stays the same.
pub fn unplug(fd: c_int) -> Result<()> {
    let closes = fcntl(fd, libc::F_GETFD, 0)? & libc::FD_CLOEXEC != 0;
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC;
    // SAFETY: touches no memory.
    let fresh = unsafe { syscall!(Sysno::socket, libc::AF_INET, kind, 0) }? as c_int;
    let flags = if closes { libc::O_CLOEXEC } else { 0 };
    // SAFETY: as above.
    let done = unsafe { syscall!(Sysno::dup3, fresh, fd, flags) };
    close(fresh);
    done.map(drop)
}

/// Fills `buf` with random bytes (getrandom(2)).
pub fn random(buf: &mut [u8]) -> Result<()> {
    // SAFETY: writable for its length.
    let n = unsafe { syscall!(Sysno::getrandom, buf.as_mut_ptr(), buf.len(), 0) }?;
    if n == buf.len() {
        Ok(())
    } else {
        Err(Errno::EIO)
    }
}

/// close(2).
pub fn close(fd: c_int) {
    // SAFETY: closing a descriptor touches no memory; the callers own `fd`.
    let _ = unsafe { syscall!(Sysno::close, fd) };
}

/// fcntl(2) with an integer argument.
pub fn fcntl(fd: c_int, cmd: c_int, arg: usize) -> Result<c_int> {
    // SAFETY: only used with commands that take an integer.
    unsafe { syscall!(Sysno::fcntl, fd, cmd, arg) }.map(|v| v as c_int)
}

/// shutdown(2).
pub fn shutdown(fd: c_int, how: c_int) -> Result<()> {
    // SAFETY: touches no memory.
    unsafe { syscall!(Sysno::shutdown, fd, how) }.map(drop)
}

/// getsockopt(2) of a fixed-size value.
pub fn getsockopt<T: Copy>(fd: c_int, level: c_int, name: c_int) -> Result<T> {
    let mut v = MaybeUninit::<T>::zeroed();
    let mut len = size_of::<T>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes. The callers' types are plain integers or
    // structs of integers, for which zeroed bytes are valid.
    unsafe {
        syscall!(
            Sysno::getsockopt,
            fd,
            level,
            name,
            v.as_mut_ptr(),
            &mut len as *mut _
        )?;
        Ok(v.assume_init())
    }
}

/// setsockopt(2) of a fixed-size value.
pub fn setsockopt<T: Copy>(fd: c_int, level: c_int, name: c_int, v: &T) -> Result<()> {
    // SAFETY: the kernel reads size_of::<T>() bytes of `v`.
    unsafe {
        syscall!(
            Sysno::setsockopt,
            fd,
            level,
            name,
            v as *const T,
            size_of::<T>()
        )
    }
    .map(drop)
}

/// ioctl(2) that stores one int (FIONREAD, SIOCOUTQ, …).
pub fn ioctl_int(fd: c_int, request: u64) -> Result<c_int> {
    let mut v: c_int = 0;
    // SAFETY: the requests used store one int.
    unsafe { syscall!(Sysno::ioctl, fd, request, &mut v as *mut c_int) }?;
    Ok(v)
}

/// Fields of `struct tcp_info` (linux/tcp.h) that the kernel-counter check uses.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct TcpInfo {
    /// tcpi_state; 1 is TCP_ESTABLISHED.
    pub state: u8,
    _a: [u8; 127],
    /// Payload bytes received, including duplicates never counted twice.
    pub bytes_received: u64,
    _b: [u8; 8],
    /// Payload bytes not yet sent.
    pub notsent_bytes: u32,
    _c: [u8; 52],
    /// Payload bytes sent, retransmissions included.
    pub bytes_sent: u64,
    /// Payload bytes retransmitted.
    pub bytes_retrans: u64,
    _d: [u8; 24],
}

const _: () = {
    // Offsets in struct tcp_info of linux/tcp.h, which is kernel ABI.
    assert!(core::mem::offset_of!(TcpInfo, bytes_received) == 128);
    assert!(core::mem::offset_of!(TcpInfo, notsent_bytes) == 144);
    assert!(core::mem::offset_of!(TcpInfo, bytes_sent) == 200);
    assert!(core::mem::offset_of!(TcpInfo, bytes_retrans) == 208);
};

impl TcpInfo {
    /// Asks the kernel about `fd`.
    pub fn of(fd: c_int) -> Result<TcpInfo> {
        getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO)
    }
    /// Payload bytes that were ever put into the socket.
    pub fn sent_total(&self) -> u64 {
        (self.bytes_sent - self.bytes_retrans.min(self.bytes_sent)) + u64::from(self.notsent_bytes)
    }
    /// Whether the handshake is under way (SYN_SENT, SYN_RECV).
    pub fn connecting(&self) -> bool {
        matches!(self.state, 2 | 3)
    }

    /// Whether there is no connection any more (CLOSE).
    pub fn closed(&self) -> bool {
        self.state == 7
    }

    /// Whether the connection is in state ESTABLISHED.
    pub fn established(&self) -> bool {
        self.state == 1
    }
}

/// Creates an eventfd, non-blocking and close-on-exec.
pub fn eventfd() -> Result<c_int> {
    // SAFETY: touches no memory.
    unsafe { syscall!(Sysno::eventfd2, 0, EFD_FLAGS) }.map(|v| v as c_int)
}

/// Adds one to an eventfd. A full counter is emptied first: who waits for its next change must see one.
#[inline]
pub fn eventfd_ring(fd: c_int) {
    let one: u64 = 1;
    // SAFETY: eight readable bytes.
    let ring = || unsafe { write_raw(fd, (&raw const one).cast(), 8) };
    if ring() == Err(Errno::EAGAIN) {
        eventfd_drain(fd);
        let _ = ring();
    }
}

/// Whether a descriptor that came from a peer is an eventfd on which nobody waits: nothing else may be rung,
/// as writing to a full pipe, say, would block.
pub fn is_eventfd(fd: c_int) -> bool {
    let nonblocking = fcntl(fd, libc::F_GETFL, 0).is_ok_and(|f| f & libc::O_NONBLOCK != 0);
    // SAFETY: an all-zero stat is valid to be overwritten.
    let mut st: libc::stat = unsafe { zeroed() };
    // SAFETY: `st` is a writable struct stat.
    let stat = unsafe { syscall!(Sysno::fstat, fd, &mut st as *mut libc::stat) };
    // Anonymous inodes have no file type, which leaves those that know no write, and eventfd. Both
    // refuse an empty write, and the former would never block.
    nonblocking
        && stat.is_ok()
        && st.st_mode & libc::S_IFMT == 0
        // SAFETY: no bytes are read.
        && unsafe { write_raw(fd, NonNull::dangling().as_ptr(), 0) } == Err(Errno::EINVAL)
}

/// Resets an eventfd to zero.
pub fn eventfd_drain(fd: c_int) {
    let mut v: u64 = 0;
    // SAFETY: eight writable bytes.
    let _ = unsafe { read_raw(fd, (&raw mut v).cast(), 8) };
}

/// Creates a memfd of `len` bytes, sealed against any change of size.
pub fn memfd_sealed(name: &core::ffi::CStr, len: usize) -> Result<c_int> {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: the name is NUL-terminated.
    let fd = unsafe { syscall!(Sysno::memfd_create, name.as_ptr(), flags) }? as c_int;
    let seal = || -> Result<()> {
        // SAFETY: touches no memory.
        unsafe { syscall!(Sysno::ftruncate, fd, len) }?;
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        fcntl(fd, libc::F_ADD_SEALS, seals as usize).map(drop)
    };
    if let Err(e) = seal() {
        close(fd);
        return Err(e);
    }
    Ok(fd)
}

/// Size of a file, bytes.
pub fn file_size(fd: c_int) -> Result<u64> {
    // SAFETY: an all-zero stat is valid to be overwritten.
    let mut st: libc::stat = unsafe { zeroed() };
    // SAFETY: `st` is a writable struct stat.
    unsafe { syscall!(Sysno::fstat, fd, &mut st as *mut libc::stat) }?;
    Ok(st.st_size as u64)
}

/// Maps `len` bytes of `fd` shared, or of anonymous private memory when `fd` is -1.
pub fn map(fd: c_int, len: usize) -> Result<*mut u8> {
    let flags = if fd < 0 {
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE
    } else {
        libc::MAP_SHARED
    };
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
    unsafe { syscall!(Sysno::mmap, 0, len, prot, flags, fd, 0) }.map(|p| p as *mut u8)
}

/// epoll_create1(2), close-on-exec.
pub fn epoll_create() -> Result<i32> {
    // SAFETY: touches no memory.
    unsafe { syscall!(Sysno::epoll_create1, libc::EPOLL_CLOEXEC) }.map(|fd| fd as i32)
}

/// epoll_ctl(2).
pub fn epoll_ctl(ep: c_int, op: c_int, fd: c_int, ev: Option<&epoll_event>) -> Result<()> {
    let p = ev.map_or(null(), |e| e as *const epoll_event);
    // SAFETY: `p` is null (DEL) or a readable epoll_event.
    unsafe { syscall!(Sysno::epoll_ctl, ep, op, fd, p) }.map(drop)
}

/// epoll_wait(2) that never waits.
///
/// # Safety
/// `evs` must be writable for `max` events.
pub unsafe fn epoll_poll(ep: c_int, evs: *mut epoll_event, max: c_int) -> Result<usize> {
    // SAFETY: promised by the caller.
    unsafe { syscall!(Sysno::epoll_pwait, ep, evs, max, 0, 0, 8) }
}

/// Non-waiting poll(2) of one descriptor; returns its revents.
pub fn poll_now(fd: c_int, events: i16) -> i16 {
    let mut p = pollfd {
        fd,
        events,
        revents: 0,
    };
    // SAFETY: one writable pollfd.
    match unsafe { syscall!(Sysno::poll, &mut p as *mut pollfd, 1, 0) } {
        Ok(_) => p.revents,
        Err(_) => 0,
    }
}

/// Non-waiting poll(2) of many descriptors.
pub fn poll_many(fds: &mut [pollfd]) -> Result<usize> {
    // SAFETY: a writable slice.
    unsafe { syscall!(Sysno::poll, fds.as_mut_ptr(), fds.len(), 0) }
}

/// Inode of a descriptor: identifies the socket behind it.
pub fn inode(fd: c_int) -> Result<u64> {
    stat(fd).map(|st| st.st_ino)
}

/// How many names an open file has; 0: it was removed.
pub fn links(fd: c_int) -> Result<u64> {
    stat(fd).map(|st| st.st_nlink)
}

/// The soft limit of descriptor numbers (RLIMIT_NOFILE), if it can be asked for.
pub fn descriptor_limit() -> Option<u64> {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: writes `limit`.
    unsafe {
        syscall!(
            Sysno::prlimit64,
            0,
            libc::RLIMIT_NOFILE,
            core::ptr::null::<libc::rlimit>(),
            &raw mut limit
        )
    }
    .ok()
    .map(|_| limit.rlim_cur)
}

/// Whether a descriptor is one of a pipe or FIFO.
pub fn is_pipe(fd: c_int) -> bool {
    stat(fd).is_ok_and(|st| st.st_mode & libc::S_IFMT == libc::S_IFIFO)
}

fn stat(fd: c_int) -> Result<libc::stat> {
    // SAFETY: an all-zero stat is valid to be overwritten.
    let mut st: libc::stat = unsafe { zeroed() };
    // SAFETY: `st` is a writable struct stat.
    unsafe { syscall!(Sysno::fstat, fd, &mut st as *mut libc::stat) }?;
    Ok(st)
}

/// An inotify(7) descriptor that becomes readable when a file loses its name (or its attributes change).
pub fn watch_links(path: &Path) -> Result<c_int> {
    let path = CString::new(path.as_os_str().as_bytes()).map_err(|_| Errno::EINVAL)?;
    let flags = libc::IN_CLOEXEC | libc::IN_NONBLOCK;
    // SAFETY: touches no memory.
    let fd = unsafe { syscall!(Sysno::inotify_init1, flags) }? as c_int;
    // SAFETY: the path is a string that ends with NUL.
    let added = unsafe { syscall!(Sysno::inotify_add_watch, fd, path.as_ptr(), libc::IN_ATTRIB) };
    match added {
        Ok(_) => Ok(fd),
        Err(e) => {
            close(fd);
            Err(e)
        }
    }
}

/// Reads and forgets what a non-blocking descriptor has. True: there was something.
pub fn drain(fd: c_int) -> bool {
    let mut bytes = [0u8; 4096];
    let mut any = false;
    // SAFETY: `bytes` is writable for its length.
    while unsafe { syscall!(Sysno::read, fd, bytes.as_mut_ptr(), bytes.len()) }.is_ok_and(|n| n > 0)
    {
        any = true;
    }
    any
}

/// Kernel thread id.
pub fn gettid() -> u32 {
    // SAFETY: touches no memory.
    unsafe { syscall!(Sysno::gettid) }.unwrap_or(0) as u32
}

/// Process id, asked of the kernel (a cached one would be wrong after a raw fork).
pub fn getpid() -> u32 {
    // SAFETY: touches no memory.
    unsafe { syscall!(Sysno::getpid) }.unwrap_or(0) as u32
}

/// Whether thread `tid` of this process exists.
pub fn thread_alive(tid: u32) -> bool {
    // SAFETY: signal 0 only checks.
    let r = unsafe { syscall!(Sysno::tgkill, getpid(), tid, 0) };
    r != Err(Errno::ESRCH)
}

/// Sends `sig` to the calling thread.
pub fn raise_thread(sig: c_int) {
    // SAFETY: touches no memory.
    let _ = unsafe { syscall!(Sysno::tgkill, getpid(), gettid(), sig) };
}

/// Moves a private descriptor to a high number, out of the way of programs that count on low ones.
/// Takes the descriptor as it is when there is no higher number to be had.
pub fn move_high(fd: c_int) -> c_int {
    let top = descriptor_limit().map_or(1024, |limit| limit.min(1 << 16)) as usize;
    for base in [top.saturating_sub(top / 4), top / 2] {
        if let Ok(new) = fcntl(fd, libc::F_DUPFD_CLOEXEC, base) {
            close(fd);
            return new;
        }
    }
    fd
}
