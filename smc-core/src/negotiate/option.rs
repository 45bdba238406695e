//! The SMC option of TCP, as a process uses it (RFC 7609, appendix A.1).
//!
//! Two hosts find out in the TCP handshake whether both can do SMC-R: the SYN carries an option that says so, and the
//! SYN-ACK answers with the same. A program can't write TCP options; eBPF programs do it for sockets
//! that are marked by a socket option of ours. Root attaches them to control groups by `smctl enable`; where that
//! hasn't happened, the kernel knows no such socket option, and nothing changes.
//!
//! Announcing is a promise: once both ends have sent the option, the first bytes in each direction must be CLC
//! messages. Mark a socket only if it could speak CLC, and ask [`peer_has_it`] before the first byte.

use core::ffi::c_int;
use std::io;

use crate::sys::{self, Errno};

/// Level of our socket options, for setsockopt(2) and getsockopt(2): "XSMC", far from the kernel's own levels.
pub const SOL_XSMC: c_int = 0x5853_4d43;

/// setsockopt only, `u32`: 1 marks the socket. EPERM with another value, and unless the socket is neither connected,
/// connecting nor listening.
pub const XSMC_OPT_WANT: c_int = 1;

/// getsockopt only, `u32`: [`STATE_WANTED`] and [`STATE_PEER`].
pub const XSMC_OPT_STATE: c_int = 2;

/// Bit of [`XSMC_OPT_STATE`]: the socket is marked, or was accepted by a marked listener.
pub const STATE_WANTED: u32 = 1;

/// Bit of [`XSMC_OPT_STATE`]: both ends of the connection sent the option.
pub const STATE_PEER: u32 = 2;

/// Why a socket couldn't be marked. In each case it goes on as plain TCP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum OptionError {
    /// ENOPROTOOPT: no programs are attached to this process's control group.
    #[error("the SMC option of TCP isn't enabled here (smctl enable)")]
    NotEnabled,
    /// The socket is connected, connecting or listening already.
    #[error("it is too late for the SMC option: the socket is connected or listens")]
    TooLate,
    /// The program wants its own bytes in the SYN, so CLC couldn't come first.
    #[error("TCP Fast Open is in use, which the SMC option excludes")]
    FastOpen,
    /// Any other answer: not a TCP socket, a closed descriptor, a seccomp filter, …
    #[error("the kernel refused the SMC option: {0}")]
    Kernel(Errno),
}

/// Marks a TCP socket (IPv4 or IPv6), so that its SYN, or its SYN-ACKs to clients that sent it, carry the option.
///
/// Call it before connect(2) or listen(2); a later one on the same socket uses the mark again. Sockets that a
/// marked listener accepts are marked from the beginning. A listener that had `TCP_SAVE_SYN` on before listen(2) answers
/// without the option. Allocates nothing.
pub fn want(fd: c_int) -> Result<(), OptionError> {
    if uses_fast_open(fd) {
        return Err(OptionError::FastOpen);
    }
    sys::setsockopt(fd, SOL_XSMC, XSMC_OPT_WANT, &1u32).map_err(|e| match e {
        Errno::ENOPROTOOPT => OptionError::NotEnabled,
        Errno::EPERM => OptionError::TooLate,
        other => OptionError::Kernel(other),
    })
}

/// Whether both ends of a connection sent the option, which then is certain for the other end, too: CLC comes next.
///
/// It is final as soon as the connection is established. `false` for sockets that weren't marked. Fails with
/// EOPNOTSUPP or ENOPROTOOPT (Linux's IPv4 and IPv6 differ) where it isn't enabled, or no longer.
pub fn peer_has_it(fd: c_int) -> io::Result<bool> {
    let state: u32 = sys::getsockopt(fd, SOL_XSMC, XSMC_OPT_STATE)
        .map_err(|e| io::Error::from_raw_os_error(e.into_raw()))?;
    Ok(state & STATE_PEER != 0)
}

/// Whether the program asked for Fast Open, as a server or as a client. A client can also do so in the very call
/// that connects (`MSG_FASTOPEN`), which needs no mark.
fn uses_fast_open(fd: c_int) -> bool {
    [libc::TCP_FASTOPEN, libc::TCP_FASTOPEN_CONNECT]
        .iter()
        .any(|&name| sys::getsockopt::<c_int>(fd, libc::IPPROTO_TCP, name).is_ok_and(|v| v > 0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use socket2::{Domain, Socket, Type};
    use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
    use std::os::fd::AsRawFd;

    fn tcp(domain: Domain) -> Socket {
        Socket::new(domain, Type::STREAM, None).unwrap()
    }

    /// A client and what the listener accepted.
    fn connection(client: &Socket, listener: &Socket, address: SocketAddr) -> Socket {
        listener.bind(&address.into()).unwrap();
        listener.listen(8).unwrap();
        client.connect(&listener.local_addr().unwrap()).unwrap();
        listener.accept().unwrap().0
    }

    /// Both answers of a system are right: this one's tests may run where it is enabled, and where it isn't.
    #[test]
    fn both_ends_agree() {
        for address in [
            SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            SocketAddr::from((Ipv6Addr::LOCALHOST, 0)),
        ] {
            for (client_wants, server_wants) in
                [(true, true), (true, false), (false, true), (false, false)]
            {
                let domain = Domain::for_address(address);
                let (client, listener) = (tcp(domain), tcp(domain));
                let mut enabled = true;
                for (socket, wants) in [(&client, client_wants), (&listener, server_wants)] {
                    if wants {
                        match want(socket.as_raw_fd()) {
                            Ok(()) => {}
                            Err(OptionError::NotEnabled) => enabled = false,
                            Err(other) => panic!("{other}"),
                        }
                    }
                }
                let server = connection(&client, &listener, address);
                for end in [&client, &server] {
                    match peer_has_it(end.as_raw_fd()) {
                        Ok(it) => assert_eq!(it, client_wants && server_wants),
                        Err(e) => {
                            let unknown = [Some(libc::ENOPROTOOPT), Some(libc::EOPNOTSUPP)];
                            assert!(unknown.contains(&e.raw_os_error()), "{e}");
                            assert!(!enabled || !(client_wants || server_wants));
                        }
                    }
                }
                if enabled && (client_wants || server_wants) {
                    assert_eq!(want(client.as_raw_fd()), Err(OptionError::TooLate));
                    assert_eq!(want(listener.as_raw_fd()), Err(OptionError::TooLate));
                }
            }
        }
    }

    #[test]
    fn fast_open_is_refused() {
        let listener = tcp(Domain::IPV4);
        sys::setsockopt(
            listener.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_FASTOPEN,
            &5i32,
        )
        .unwrap();
        assert_eq!(want(listener.as_raw_fd()), Err(OptionError::FastOpen));
        let client = tcp(Domain::IPV4);
        let name = libc::TCP_FASTOPEN_CONNECT;
        sys::setsockopt(client.as_raw_fd(), libc::IPPROTO_TCP, name, &1i32).unwrap();
        assert_eq!(want(client.as_raw_fd()), Err(OptionError::FastOpen));
    }

    #[test]
    fn other_descriptors() {
        let unix = tcp(Domain::UNIX);
        let answer = want(unix.as_raw_fd());
        assert_eq!(answer, Err(OptionError::Kernel(Errno::EOPNOTSUPP)));
        assert_eq!(want(-1), Err(OptionError::Kernel(Errno::EBADF)));
        assert_eq!(
            peer_has_it(-1).unwrap_err().raw_os_error(),
            Some(libc::EBADF)
        );
        let udp = Socket::new(Domain::IPV4, Type::DGRAM, None).unwrap();
        assert_eq!(want(udp.as_raw_fd()), Err(OptionError::NotEnabled));
    }
}
