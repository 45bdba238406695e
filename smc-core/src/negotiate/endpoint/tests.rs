use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;

use proptest::prelude::*;

use super::*;

fn both(listen: &str, connect: &str) -> Option<(Endpoint, Endpoint, SocketAddr)> {
    let listener = TcpListener::bind((listen, 0)).ok()?;
    let port = listener.local_addr().ok()?.port();
    let client = TcpStream::connect((connect, port)).ok()?;
    let (server, from) = listener.accept().ok()?;
    let client_end = Endpoint::of_socket(client.as_raw_fd()).expect("a connected socket");
    let server_end = Endpoint::of_socket(server.as_raw_fd()).expect("a connected socket");
    Some((client_end, server_end, from))
}

#[test]
fn two_ends_mirror_each_other() {
    let (client, server, from) = both("127.0.0.1", "127.0.0.1").expect("loopback");
    assert_eq!(client.mirror(), server);
    assert_eq!(server.mirror(), client);
    assert_eq!(server.peer_addr(), from);
    assert_eq!(client.hash(), server.hash());
    assert!(!client.is_self_connected());
}

#[test]
fn families_do_not_matter() {
    // Without IPv6 in the kernel there is nothing to test.
    if let Some((client, server, _)) = both("::", "127.0.0.1") {
        assert_eq!(client.mirror(), server);
        assert!(client.local_addr().is_ipv4() && server.local_addr().is_ipv4());
    }
    if let Some((client, server, _)) = both("::1", "::1") {
        assert_eq!(client.mirror(), server);
        assert!(client.local_addr().is_ipv6());
    }
}

#[test]
fn other_sockets_are_refused() {
    let of = |socket: &dyn AsRawFd| Endpoint::of_socket(socket.as_raw_fd());
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    assert_eq!(of(&listener), Err(Errno::ENOTCONN));
    let udp = UdpSocket::bind("127.0.0.1:0").expect("loopback");
    assert_eq!(of(&udp), Err(Errno::ENOTCONN));
    let (unix, _peer) = std::os::unix::net::UnixStream::pair().expect("a pair");
    assert_eq!(of(&unix), Err(Errno::EAFNOSUPPORT));
    let file = std::fs::File::open("/dev/null").expect("it is everywhere");
    assert_eq!(of(&file), Err(Errno::ENOTSOCK));
    assert_eq!(Endpoint::of_socket(-1), Err(Errno::EBADF));
}

#[test]
fn link_local_is_recognised() {
    let ip = |s: &str| s.parse::<Ipv6Addr>().expect("an address").octets();
    assert!(link_local(&ip("fe80::1")) && link_local(&ip("febf::1")));
    assert!(!link_local(&ip("fec0::1")) && !link_local(&ip("::1")));
    assert!(!link_local(&mapped(IpAddr::from([254, 128, 0, 1]))));
}

#[test]
fn inode_of_the_namespace_is_stable() {
    let inode = netns_inode().expect("/proc is mounted");
    assert_ne!(inode, 0);
    assert_eq!(netns_inode(), Ok(inode));
    assert_eq!(inode & INODE_MARK, 0);
}

/// Real endpoints differ in a few bits of a port or an address. These must spread over the buckets.
#[test]
fn near_endpoints_spread() {
    let mut buckets = [0u32; 256];
    for port in 0..8192u16 {
        let local = SocketAddr::from(([127, 0, 0, 1], 8080));
        let peer = SocketAddr::from(([127, 0, 0, 1], 32768 + port));
        buckets[Endpoint::new(1, local, peer).hash() as usize % 256] += 1;
    }
    // 32 on average; a good hash stays within about six standard deviations.
    assert!(buckets.iter().all(|n| (4..70).contains(n)), "{buckets:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

    #[test]
    fn mirror_is_its_own_inverse(
        netns in any::<u64>(), local in any::<[u8; 16]>(), peer in any::<[u8; 16]>(),
        local_port in any::<u16>(), peer_port in any::<u16>(),
    ) {
        let end = Endpoint { netns, local, peer, local_port, peer_port };
        prop_assert_eq!(end.mirror().mirror(), end);
        prop_assert_eq!(end.mirror().hash(), end.hash());
        prop_assert_eq!(end.is_self_connected(), local == peer && local_port == peer_port);
    }
}
