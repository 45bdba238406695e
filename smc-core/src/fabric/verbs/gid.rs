//! Addresses and sizes that CLC messages and queue pairs share: GIDs and path MTU codes.

use core::fmt;
use core::net::{IpAddr, Ipv6Addr};

/// A global identifier: 16 bytes that name an RDMA port. With RoCEv2 it is an IP address, IPv4 ones
/// in the mapped form `::ffff:a.b.c.d` (InfiniBand architecture, annex A17).
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Gid([u8; 16]);

impl Gid {
    /// From its 16 bytes, in network order.
    pub const fn new(octets: [u8; 16]) -> Gid {
        Gid(octets)
    }

    /// Its 16 bytes, in network order.
    pub const fn octets(&self) -> [u8; 16] {
        self.0
    }

    /// Parses the form of sysfs: eight groups of four hexadecimal digits.
    pub fn parse(text: &str) -> Option<Gid> {
        let address: Ipv6Addr = text.trim().parse().ok()?;
        Some(Gid(address.octets()))
    }

    /// An unused place of a port's GID table.
    pub fn is_zero(&self) -> bool {
        self.0 == [0; 16]
    }

    /// The IP address that a RoCEv2 GID stands for.
    pub fn ip(&self) -> IpAddr {
        Ipv6Addr::from(self.0).to_canonical()
    }

    /// Whether it is a link-local IPv6 address, fe80::/10: one that no TCP connection over IPv4 has.
    pub fn is_link_local(&self) -> bool {
        Ipv6Addr::from(self.0).is_unicast_link_local()
    }
}

impl From<IpAddr> for Gid {
    fn from(ip: IpAddr) -> Gid {
        match ip {
            IpAddr::V4(v4) => Gid(v4.to_ipv6_mapped().octets()),
            IpAddr::V6(v6) => Gid(v6.octets()),
        }
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Ipv6Addr::from(self.0).fmt(f)
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Path MTU of a queue pair: payload bytes of one RDMA packet. Both ends must use the same.
///
/// The order is that of the sizes, so `min` negotiates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum PathMtu {
    /// 256 bytes, code 1.
    B256 = 1,
    /// 512 bytes, code 2.
    B512 = 2,
    /// 1024 bytes, code 3.
    B1024 = 3,
    /// 2048 bytes, code 4.
    B2048 = 4,
    /// 4096 bytes, code 5.
    B4096 = 5,
}

impl PathMtu {
    /// From the code in CLC and LLC messages, which is also that of `enum ibv_mtu`. `None`: no such code.
    pub const fn from_code(code: u8) -> Option<PathMtu> {
        Some(match code {
            1 => PathMtu::B256,
            2 => PathMtu::B512,
            3 => PathMtu::B1024,
            4 => PathMtu::B2048,
            5 => PathMtu::B4096,
            _ => return None,
        })
    }

    /// Code in messages, 1..=5.
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// Bytes, 256..=4096.
    pub const fn bytes(self) -> u32 {
        128 << self as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn gids_of_sysfs() {
        let v4 = Gid::parse("0000:0000:0000:0000:0000:ffff:0a09:0001\n").unwrap();
        assert_eq!(v4.ip(), "10.9.0.1".parse::<IpAddr>().unwrap());
        assert_eq!(v4.to_string(), "::ffff:10.9.0.1");
        let local = Gid::parse("fe80:0000:0000:0000:5054:00ff:fe00:0001").unwrap();
        assert!(local.is_link_local() && !v4.is_link_local());
        assert_eq!(
            local.ip(),
            "fe80::5054:ff:fe00:1".parse::<IpAddr>().unwrap()
        );
        let none = Gid::parse("0000:0000:0000:0000:0000:0000:0000:0000").unwrap();
        assert!(none.is_zero() && !v4.is_zero());
        assert_eq!(Gid::parse(""), None);
        assert_eq!(Gid::parse("10.9.0.1"), None);
    }

    #[test]
    fn mtu_codes() {
        let sizes = [256, 512, 1024, 2048, 4096];
        for (code, bytes) in (1..=5).zip(sizes) {
            let mtu = PathMtu::from_code(code).unwrap();
            assert_eq!((mtu.code(), mtu.bytes()), (code, bytes));
        }
        assert_eq!(PathMtu::from_code(0), None);
        assert_eq!(PathMtu::from_code(6), None);
        assert_eq!(PathMtu::B4096.min(PathMtu::B1024), PathMtu::B1024);
    }

    proptest! {
        #[test]
        fn an_ip_address_survives_its_gid(ip: IpAddr) {
            // A mapped IPv6 address is the IPv4 one: that is the meaning of the form.
            prop_assert_eq!(Gid::from(ip).ip(), ip.to_canonical());
        }

        #[test]
        fn any_text_is_parsed_or_refused(text: String) {
            let _ = Gid::parse(&text);
        }
    }
}
