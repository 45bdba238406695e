//! Unix SEQPACKET sockets with descriptors on board, memfds and mappings, as a hostile peer needs them.

use std::io;
use std::mem::{size_of, zeroed};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::time::Duration;

use libc::{cmsghdr, iovec, msghdr};
use smc_core::sys;
use socket2::{Domain, SockAddr, Socket, Type};

/// Room for this many descriptors.
const FDS: usize = 64;

const CONTROL: usize = size_of::<cmsghdr>() + FDS * 4;

#[repr(C, align(8))]
struct Control([u8; CONTROL]);

fn socket() -> io::Result<Socket> {
    Socket::new(Domain::UNIX, Type::SEQPACKET, None)
}

/// Listens at `path`.
pub(crate) fn listen(path: &Path) -> io::Result<Socket> {
    let s = socket()?;
    s.bind(&SockAddr::unix(path)?)?;
    s.listen(16)?;
    s.set_read_timeout(Some(Duration::from_secs(2)))?;
    Ok(s)
}

/// Connects to `path`.
pub(crate) fn connect(path: &Path) -> io::Result<Socket> {
    let s = socket()?;
    s.connect(&SockAddr::unix(path)?)?;
    Ok(s)
}

/// Sends one datagram without waiting.
pub(crate) fn send(s: &Socket, bytes: &[u8], fds: &[RawFd]) -> io::Result<()> {
    let mut iov = iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    };
    let mut control = Control([0; CONTROL]);
    // SAFETY: an all-zero msghdr is valid.
    let mut m: msghdr = unsafe { zeroed() };
    m.msg_iov = &raw mut iov;
    m.msg_iovlen = 1;
    if !fds.is_empty() {
        assert!(fds.len() <= FDS);
        let len = size_of::<cmsghdr>() + fds.len() * 4;
        let c = control.0.as_mut_ptr().cast::<cmsghdr>();
        // SAFETY: the buffer is aligned for a cmsghdr and holds one with FDS descriptors.
        unsafe {
            (*c).cmsg_len = len;
            (*c).cmsg_level = libc::SOL_SOCKET;
            (*c).cmsg_type = libc::SCM_RIGHTS;
            std::ptr::copy_nonoverlapping(fds.as_ptr(), c.add(1).cast(), fds.len());
        }
        m.msg_control = control.0.as_mut_ptr().cast();
        m.msg_controllen = len.next_multiple_of(8);
    }
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    // SAFETY: the header's pointers are valid for the call.
    match unsafe { libc::sendmsg(s.as_raw_fd(), &m, flags) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Receives one datagram without waiting. `Ok(None)`: the other end is closed.
pub(crate) fn recv(s: &Socket) -> io::Result<Option<(Vec<u8>, Vec<OwnedFd>)>> {
    let mut bytes = vec![0u8; 64 << 10];
    let mut iov = iovec {
        iov_base: bytes.as_mut_ptr().cast(),
        iov_len: bytes.len(),
    };
    let mut control = Control([0; CONTROL]);
    // SAFETY: an all-zero msghdr is valid.
    let mut m: msghdr = unsafe { zeroed() };
    m.msg_iov = &raw mut iov;
    m.msg_iovlen = 1;
    m.msg_control = control.0.as_mut_ptr().cast();
    m.msg_controllen = CONTROL;
    let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
    // SAFETY: the header's pointers are valid for the call.
    let n = match unsafe { libc::recvmsg(s.as_raw_fd(), &mut m, flags) } {
        -1 => return Err(io::Error::last_os_error()),
        n => n as usize,
    };
    let mut fds = Vec::new();
    // SAFETY: the kernel has written well-formed control data, whose descriptors are ours.
    unsafe {
        let c = libc::CMSG_FIRSTHDR(&m);
        if let Some(h) = c.as_ref()
            && h.cmsg_type == libc::SCM_RIGHTS
        {
            let first = c.add(1).cast::<RawFd>();
            for i in 0..(h.cmsg_len - size_of::<cmsghdr>()) / 4 {
                fds.push(OwnedFd::from_raw_fd(first.add(i).read_unaligned()));
            }
        }
    }
    bytes.truncate(n);
    Ok((n > 0).then_some((bytes, fds)))
}

/// Waits until something can be received, or the other end has closed.
pub(crate) fn wait_readable(s: &Socket, most: Duration) -> bool {
    let mut p = libc::pollfd {
        fd: s.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one writable pollfd.
    unsafe { libc::poll(&mut p, 1, most.as_millis() as i32) > 0 }
}

/// A memfd of `len` bytes with exactly these seals.
pub(crate) fn memfd(len: usize, seals: i32) -> OwnedFd {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: the name ends with NUL; the descriptor is ours.
    unsafe {
        let fd = libc::memfd_create(c"hostile".as_ptr(), flags);
        assert!(fd >= 0, "memfd_create");
        assert_eq!(libc::ftruncate(fd, len as i64), 0);
        if seals != 0 {
            assert_eq!(libc::fcntl(fd, libc::F_ADD_SEALS, seals), 0);
        }
        OwnedFd::from_raw_fd(fd)
    }
}

/// A memfd as the protocol wants it.
pub(crate) fn sealed(len: usize) -> OwnedFd {
    memfd(
        len,
        libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL,
    )
}

/// A sealed memfd of huge pages if the kernel makes one.
pub(crate) fn huge(len: usize) -> OwnedFd {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING | libc::MFD_HUGETLB;
    // SAFETY: the name ends with NUL; the descriptor, if there is one, is ours.
    unsafe {
        let fd = libc::memfd_create(c"hostile".as_ptr(), flags);
        if fd < 0 {
            return memfd(len, 0);
        }
        libc::ftruncate(fd, len.next_multiple_of(2 << 20) as i64);
        libc::fcntl(
            fd,
            libc::F_ADD_SEALS,
            libc::F_SEAL_SHRINK | libc::F_SEAL_GROW,
        );
        OwnedFd::from_raw_fd(fd)
    }
}

/// A pipe that is full, and blocks who writes to it: the reading and the writing end.
pub(crate) fn full_pipe() -> (OwnedFd, OwnedFd) {
    let mut ends = [0; 2];
    // SAFETY: pipe2 fills the array, its descriptors are ours; the buffer is readable.
    unsafe {
        assert_eq!(libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC), 0);
        libc::fcntl(ends[1], libc::F_SETFL, libc::O_NONBLOCK);
        let page = [0u8; 4096];
        while libc::write(ends[1], page.as_ptr().cast(), page.len()) > 0 {}
        while libc::write(ends[1], page.as_ptr().cast(), 1) > 0 {}
        libc::fcntl(ends[1], libc::F_SETFL, 0);
        (OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1]))
    }
}

/// An eventfd as the protocol wants it.
pub(crate) fn eventfd() -> OwnedFd {
    // SAFETY: a new descriptor that is ours.
    unsafe { OwnedFd::from_raw_fd(sys::eventfd().expect("eventfd")) }
}

/// Adds to an eventfd, if it takes that.
pub(crate) fn add(fd: &OwnedFd, n: u64) {
    // SAFETY: eight readable bytes.
    unsafe { libc::write(fd.as_raw_fd(), (&raw const n).cast(), 8) };
}

/// A shared mapping.
pub(crate) struct Map {
    base: *mut u8,
    len: usize,
}

// SAFETY: an address of shared memory that is only accessed through atomics and raw copies.
unsafe impl Send for Map {}
// SAFETY: as above.
unsafe impl Sync for Map {}

impl Map {
    /// Maps `len` bytes of `fd`.
    pub(crate) fn new(fd: &OwnedFd, len: usize) -> Map {
        let base = sys::map(fd.as_raw_fd(), len).expect("mmap");
        Map { base, len }
    }

    /// The mapping as a `T`, which consists of atomics.
    pub(crate) fn get<T>(&self) -> &T {
        assert!(size_of::<T>() <= self.len);
        // SAFETY: large enough, page-aligned, mapped as long as `self`; any bytes are valid for atomics.
        unsafe { &*self.base.cast::<T>() }
    }

    /// Address of byte `at`.
    pub(crate) fn at(&self, at: usize) -> *mut u8 {
        assert!(at <= self.len);
        // SAFETY: within the mapping.
        unsafe { self.base.add(at) }
    }

    /// The mapping as words.
    pub(crate) fn words(&self) -> &[std::sync::atomic::AtomicU64] {
        // SAFETY: as for `get`.
        unsafe { std::slice::from_raw_parts(self.base.cast(), self.len / 8) }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: references into the mapping end with `self`.
        unsafe { libc::munmap(self.base.cast(), self.len) };
    }
}
