//! One end of a TCP connection, written so that both ends of it compute keys that mirror each other.
//!
//! An IPv4 address is kept in its IPv6-mapped form and the family is dropped: a server that listens on `[::]` sees
//! `::ffff:127.0.0.1` where its client sees `127.0.0.1`, and the two must still match.
//!
//! The first part of the key names the network namespace *of the socket*. The kernel tells it for any socket as
//! the namespace cookie (`SO_NETNS_COOKIE`, Linux 5.14). This stays true for a socket that came from another
//! namespace, and after `unshare` or `setns`. Where the kernel can't say, the inode of the process's namespace
//! stands in, read once and marked by the top bit so that it can't equal a cookie. A process on such a kernel that
//! changes its namespace publishes keys that match nothing or the wrong thing; the found node's own check catches
//! the latter.
//!
//! Limits: the kernel tells apart connections with equal addresses that are bound to different devices (VRF). We
//! don't; the evidence check and the found node's check are what protects those. Link-local IPv6 addresses name a
//! connection only together with a scope, so they are refused.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::RawFd;

use once_cell::sync::OnceCell;
use syscalls::{Errno, Sysno, syscall};

#[cfg(test)]
mod tests;

/// Marks a namespace key that is an inode and not a cookie.
const INODE_MARK: u64 = 1 << 63;

/// One end of a TCP connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Endpoint {
    /// Network namespace of the socket: its cookie, or an inode number with the top bit set.
    pub netns: u64,
    /// Local address, network byte order, IPv4 as `::ffff:a.b.c.d`.
    pub local: [u8; 16],
    /// Peer address, in the same form.
    pub peer: [u8; 16],
    /// Local port, host byte order.
    pub local_port: u16,
    /// Peer port, host byte order.
    pub peer_port: u16,
}

impl Endpoint {
    /// The endpoint with these addresses, as seen from `local`.
    pub fn new(netns: u64, local: SocketAddr, peer: SocketAddr) -> Endpoint {
        Endpoint {
            netns,
            local: mapped(local.ip()),
            peer: mapped(peer.ip()),
            local_port: local.port(),
            peer_port: peer.port(),
        }
    }

    /// The endpoint of a connected TCP socket. System calls only, no allocation.
    ///
    /// # Errors
    /// `ENOTCONN` when it has no peer, `EAFNOSUPPORT` when it is neither IPv4 nor IPv6, `EADDRNOTAVAIL` for a
    /// link-local address, and whatever the kernel says about a bad descriptor.
    pub fn of_socket(fd: RawFd) -> Result<Endpoint, Errno> {
        let local = address(Sysno::getsockname, fd)?;
        let peer = address(Sysno::getpeername, fd)?;
        let endpoint = Endpoint::new(netns_of_socket(fd)?, local, peer);
        if endpoint.local_port == 0 || endpoint.peer_port == 0 {
            return Err(Errno::ENOTCONN);
        }
        if link_local(&endpoint.local) || link_local(&endpoint.peer) {
            return Err(Errno::EADDRNOTAVAIL);
        }
        Ok(endpoint)
    }

    /// The same connection as its other end sees it.
    pub fn mirror(&self) -> Endpoint {
        Endpoint {
            netns: self.netns,
            local: self.peer,
            peer: self.local,
            local_port: self.peer_port,
            peer_port: self.local_port,
        }
    }

    /// Whether the connection is one socket connected to itself (both ends are the same).
    pub fn is_self_connected(&self) -> bool {
        *self == self.mirror()
    }

    /// Local address and port; IPv4 in IPv4 form.
    pub fn local_addr(&self) -> SocketAddr {
        SocketAddr::new(Ipv6Addr::from(self.local).to_canonical(), self.local_port)
    }

    /// Peer address and port; IPv4 in IPv4 form.
    pub fn peer_addr(&self) -> SocketAddr {
        SocketAddr::new(Ipv6Addr::from(self.peer).to_canonical(), self.peer_port)
    }

    /// A hash that both ends of a connection share.
    pub(super) fn hash(&self) -> u64 {
        let a = mix_address(&self.local, self.local_port);
        let b = mix_address(&self.peer, self.peer_port);
        // Sum and product of the two are symmetric and together lose less than either alone.
        let both = a.wrapping_add(b) ^ mix((a | 1).wrapping_mul(b | 1));
        mix(both ^ mix(self.netns))
    }
}

/// Inode of the calling thread's network namespace, asked from the kernel each time.
///
/// # Errors
/// The errno of the failed `stat`, mostly because `/proc` isn't there.
pub fn netns_inode() -> Result<u64, Errno> {
    use std::os::unix::fs::MetadataExt;
    let stat = std::fs::metadata("/proc/thread-self/ns/net");
    stat.map(|s| s.ino())
        .map_err(|e| Errno::new(e.raw_os_error().unwrap_or(libc::EIO)))
}

/// Key of the network namespace that the socket lives in.
fn netns_of_socket(fd: RawFd) -> Result<u64, Errno> {
    static INODE: OnceCell<u64> = OnceCell::new();
    const SO_NETNS_COOKIE: usize = 71;
    let mut cookie = 0u64;
    let mut len = size_of::<u64>() as libc::socklen_t;
    // SAFETY: both pointers are to live locals, and `len` is the size of the buffer that may be written.
    let answer = unsafe {
        let level = libc::SOL_SOCKET;
        syscall!(
            Sysno::getsockopt,
            fd,
            level,
            SO_NETNS_COOKIE,
            &raw mut cookie,
            &raw mut len
        )
    };
    match answer {
        Ok(_) if cookie != 0 => Ok(cookie & !INODE_MARK),
        Err(e @ (Errno::EBADF | Errno::ENOTSOCK)) => Err(e),
        _ => INODE
            .get_or_try_init(netns_inode)
            .map(|inode| inode | INODE_MARK),
    }
}

/// Local address of a socket; the wildcard if it isn't bound.
pub(super) fn local_of(fd: RawFd) -> Result<SocketAddr, Errno> {
    let local = address(Sysno::getsockname, fd)?;
    Ok(SocketAddr::new(local.ip().to_canonical(), local.port()))
}

/// Addresses of a connected socket's two ends; IPv4 in IPv4 form.
///
/// # Errors
/// As getsockname(2) and getpeername(2).
pub fn ends_of(fd: RawFd) -> Result<(SocketAddr, SocketAddr), Errno> {
    let peer = address(Sysno::getpeername, fd)?;
    let peer = SocketAddr::new(peer.ip().to_canonical(), peer.port());
    Ok((local_of(fd)?, peer))
}

/// The address from which a connection to `peer` would come: the kernel's route for it. No packet is sent, as
/// connecting a UDP socket only looks up the route.
pub(super) fn route_source(peer: SocketAddr) -> Option<IpAddr> {
    let to = socket2::SockAddr::from(peer);
    let (family, kind) = (to.family(), libc::SOCK_DGRAM | libc::SOCK_CLOEXEC);
    // SAFETY: touches no memory.
    let fd = unsafe { syscall!(Sysno::socket, family, kind, 0) }.ok()? as RawFd;
    // SAFETY: the address is valid for its length.
    let connected = unsafe { syscall!(Sysno::connect, fd, to.as_ptr(), to.len()) };
    let local = connected.and_then(|_| local_of(fd));
    crate::sys::close(fd);
    local.ok().map(|l| l.ip())
}

/// Runs getsockname or getpeername.
fn address(call: Sysno, fd: RawFd) -> Result<SocketAddr, Errno> {
    #[repr(C)]
    union Space {
        family: libc::sa_family_t,
        v4: libc::sockaddr_in,
        v6: libc::sockaddr_in6,
    }
    // SAFETY: every member consists of integers, for which all zeroes is a valid value.
    let mut space: Space = unsafe { std::mem::zeroed() };
    let mut len = size_of::<Space>() as libc::socklen_t;
    // SAFETY: the pointers are to live locals, and `len` is the size of the buffer that may be written.
    unsafe { syscall!(call, fd, &raw mut space, &raw mut len) }?;
    let len = len as usize;
    // SAFETY: all bytes of the union were initialised to zero, then maybe overwritten by the kernel; every member
    // is valid for any bytes.
    unsafe {
        match i32::from(space.family) {
            libc::AF_INET if len >= size_of::<libc::sockaddr_in>() => {
                let ip = IpAddr::from(space.v4.sin_addr.s_addr.to_ne_bytes());
                Ok(SocketAddr::new(ip, u16::from_be(space.v4.sin_port)))
            }
            // Some kernels' oldest form of sockaddr_in6 lacks the scope, which isn't used here.
            libc::AF_INET6 if len >= 24 => {
                let ip = IpAddr::from(space.v6.sin6_addr.s6_addr);
                Ok(SocketAddr::new(ip, u16::from_be(space.v6.sin6_port)))
            }
            _ => Err(Errno::EAFNOSUPPORT),
        }
    }
}

fn mapped(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// Whether the address is in fe80::/10.
fn link_local(address: &[u8; 16]) -> bool {
    address[0] == 0xfe && address[1] & 0xc0 == 0x80
}

fn mix_address(address: &[u8; 16], port: u16) -> u64 {
    let bits = u128::from_be_bytes(*address);
    let low = mix(bits as u64 ^ (u64::from(port) << 48));
    mix(low.wrapping_add((bits >> 64) as u64) ^ u64::from(port))
}

/// Spreads every input bit over the whole word (a bijection: multiply by odd, xor with own high bits).
pub(super) fn mix(value: u64) -> u64 {
    let mut x = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    x = (x ^ (x >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    x ^ (x >> 32)
}
