//! Unix SEQPACKET sockets with descriptors on board. All descriptors made here are private (see
//! [`fds::make_private`]).

use core::mem::{size_of, zeroed};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use libc::{cmsghdr, iovec, msghdr, sockaddr_un};
use syscalls::{Sysno, syscall};

use crate::fds;
use crate::negotiate::Message;
use crate::negotiate::message::MAX;
use crate::sys::{self, Errno, Result};

/// Most descriptors that one message of ours carries.
const MAX_FDS: usize = 4;

fn address(path: &Path) -> Result<(sockaddr_un, u32)> {
    // SAFETY: an all-zero sockaddr_un is valid.
    let mut a: sockaddr_un = unsafe { zeroed() };
    a.sun_family = libc::AF_UNIX as u16;
    let bytes = path.as_os_str().as_bytes();
    if bytes.len() >= a.sun_path.len() {
        return Err(Errno::ENAMETOOLONG);
    }
    for (d, s) in a.sun_path.iter_mut().zip(bytes) {
        *d = *s as libc::c_char;
    }
    Ok((a, size_of::<sockaddr_un>() as u32))
}

fn raw_socket() -> Result<i32> {
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: touches no memory.
    unsafe { syscall!(Sysno::socket, libc::AF_UNIX, kind, 0) }.map(|f| f as i32)
}

/// Listens at `path`; within [`fds::make_private`].
pub(super) fn listen(path: &Path, keep: &dyn Fn(i32) -> i32) -> Result<i32> {
    let (a, len) = address(path)?;
    let fd = keep(raw_socket()?);
    // SAFETY: `a` is a readable address of `len` bytes.
    let r = unsafe { syscall!(Sysno::bind, fd, &a as *const _, len) }
        // SAFETY: touches no memory.
        .and_then(|_| unsafe { syscall!(Sysno::listen, fd, 128) });
    if let Err(e) = r {
        fds::close_private(fd);
        return Err(e);
    }
    Ok(fd)
}

/// Connects to `path`. Never waits: a full queue is an error.
pub(super) fn connect(path: &Path) -> Result<i32> {
    let (a, len) = address(path)?;
    let fd = fds::make_private(|keep| raw_socket().map(keep))?;
    // SAFETY: as in `listen`.
    if let Err(e) = unsafe { syscall!(Sysno::connect, fd, &a as *const _, len) } {
        fds::close_private(fd);
        return Err(e);
    }
    Ok(fd)
}

/// Accepts one connection.
pub(super) fn accept(fd: i32) -> Result<i32> {
    let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    fds::make_private(|keep| {
        // SAFETY: no address is asked for.
        unsafe { syscall!(Sysno::accept4, fd, 0, 0, flags) }.map(|f| keep(f as i32))
    })
}

/// Effective uid and pid of the process at the other end.
pub(super) fn peer(fd: i32) -> Result<(u32, u32)> {
    let c: libc::ucred = sys::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PEERCRED)?;
    Ok((c.uid, c.pid as u32))
}

#[repr(C, align(8))]
struct Control([u8; 64]);

/// Sends one message; a full socket is waited for, at most 200 ms.
pub(super) fn send(fd: i32, m: &Message, fds: &[i32]) -> Result<()> {
    let mut bytes = [0u8; MAX];
    let n = m.encode(&mut bytes);
    send_bytes(fd, &bytes[..n], fds)
}

/// As [`send`], for bytes.
pub(super) fn send_bytes(fd: i32, bytes: &[u8], fds: &[i32]) -> Result<()> {
    let mut iov = iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    };
    let mut control = Control([0; 64]);
    // SAFETY: an all-zero msghdr is valid.
    let mut m: msghdr = unsafe { zeroed() };
    m.msg_iov = &raw mut iov;
    m.msg_iovlen = 1;
    if !fds.is_empty() {
        let n = fds.len().min(MAX_FDS);
        let len = size_of::<cmsghdr>() + n * 4;
        let c = control.0.as_mut_ptr().cast::<cmsghdr>();
        // SAFETY: the buffer is aligned for a cmsghdr and holds one with MAX_FDS descriptors.
        unsafe {
            (*c).cmsg_len = len;
            (*c).cmsg_level = libc::SOL_SOCKET;
            (*c).cmsg_type = libc::SCM_RIGHTS;
            core::ptr::copy_nonoverlapping(fds.as_ptr().cast::<u8>(), c.add(1).cast(), n * 4);
        }
        m.msg_control = control.0.as_mut_ptr().cast();
        m.msg_controllen = len.next_multiple_of(8);
    }
    for _ in 0..20 {
        // SAFETY: the header's pointers are valid for the call.
        match unsafe { sys::sendmsg(fd, &m, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) } {
            Err(Errno::EAGAIN) => {
                let mut p = [libc::pollfd {
                    fd,
                    events: libc::POLLOUT,
                    revents: 0,
                }];
                // SAFETY: one writable pollfd.
                let _ = unsafe { syscall!(Sysno::poll, p.as_mut_ptr(), 1, 10) };
            }
            r => return r.map(drop),
        }
    }
    Err(Errno::EAGAIN)
}

/// A received datagram: its bytes and descriptors, which are the caller's to close.
pub(super) struct Datagram {
    pub(super) bytes: [u8; MAX],
    pub(super) len: usize,
    pub(super) fds: [i32; MAX_FDS],
    pub(super) fd_count: usize,
}

impl Datagram {
    /// Takes descriptor `i` out.
    pub(super) fn take(&mut self, i: usize) -> Option<i32> {
        if i >= self.fd_count || self.fds[i] < 0 {
            return None;
        }
        Some(core::mem::replace(&mut self.fds[i], -1))
    }
}

impl Drop for Datagram {
    fn drop(&mut self) {
        for i in 0..self.fd_count {
            if self.fds[i] >= 0 {
                fds::close_private(self.fds[i]);
            }
        }
    }
}

/// Receives one datagram. `Ok(None)`: the other end is closed.
pub(super) fn recv(fd: i32) -> Result<Option<Datagram>> {
    fds::make_private(|keep| recv_keeping(fd, keep))
}

fn recv_keeping(fd: i32, keep: &dyn Fn(i32) -> i32) -> Result<Option<Datagram>> {
    let mut d = Datagram {
        bytes: [0; MAX],
        len: 0,
        fds: [-1; MAX_FDS],
        fd_count: 0,
    };
    let mut iov = iovec {
        iov_base: d.bytes.as_mut_ptr().cast(),
        iov_len: MAX,
    };
    let mut control = Control([0; 64]);
    // SAFETY: an all-zero msghdr is valid.
    let mut m: msghdr = unsafe { zeroed() };
    m.msg_iov = &raw mut iov;
    m.msg_iovlen = 1;
    m.msg_control = control.0.as_mut_ptr().cast();
    m.msg_controllen = size_of::<cmsghdr>() + MAX_FDS * 4;
    // SAFETY: the header's pointers are valid for the call.
    d.len = unsafe { sys::recvmsg(fd, &mut m, libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC) }?;
    let c = control.0.as_ptr().cast::<cmsghdr>();
    // SAFETY: the kernel has written msg_controllen bytes of well-formed control data.
    unsafe {
        if m.msg_controllen >= size_of::<cmsghdr>()
            && (*c).cmsg_level == libc::SOL_SOCKET
            && (*c).cmsg_type == libc::SCM_RIGHTS
        {
            d.fd_count = (((*c).cmsg_len - size_of::<cmsghdr>()) / 4).min(MAX_FDS);
            core::ptr::copy_nonoverlapping(
                c.add(1).cast::<u8>(),
                d.fds.as_mut_ptr().cast(),
                d.fd_count * 4,
            );
        }
    }
    for f in &mut d.fds[..d.fd_count] {
        *f = keep(*f);
    }
    if d.len == 0 {
        return Ok(None);
    }
    Ok(Some(d))
}
