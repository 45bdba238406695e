//! The messages of SMC-R as Linux speaks it (RFC 7609, SMC version 2.1): bytes to typed values and back.
//!
//! | module | messages | channel |
//! |---|---|---|
//! | [`clc`] | connection layer control: the negotiation of a connection | TCP stream |
//! | [`llc`] | link layer control: confirm, add, delete and test links, exchange RTokens | SEND on the link |
//! | [`cdc`] | connection data control: cursors and flags of one connection | SEND on the link |
//! | [`cursor`] | a cursor of a CDC message as a 64-bit stream offset | |
//!
//! Here are the values that several messages share. Nothing in these modules does I/O, knows the time or
//! allocates, and no input makes them panic. Integers are big-endian, except where a module says otherwise.

pub mod cdc;
pub mod clc;
pub mod cursor;
pub mod llc;

use core::fmt;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

mod bytes;
pub mod fuzzing;
#[cfg(test)]
pub(crate) mod vectors;

pub(crate) use bytes::{Reader, Writer};

/// Why bytes are not a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The message ends before the last field that its layout needs.
    #[error("message is too short")]
    Truncated,
    /// A length or count field contradicts the number of bytes, or the type of the message.
    #[error("wrong length")]
    Length,
    /// A CLC message doesn't begin with the eyecatcher.
    #[error("wrong eyecatcher")]
    Eyecatcher,
    /// A CLC message doesn't end with the eyecatcher.
    #[error("wrong trailer")]
    Trailer,
    /// No message has this type code.
    #[error("unknown message type {0:#04x}")]
    Type(u8),
    /// The type exists, but not in this version of the protocol.
    #[error("unknown version {0}")]
    Version(u8),
    /// The named field has a value that the protocol doesn't allow.
    #[error("field {0} is out of range")]
    Field(&'static str),
}

/// Address of a RoCE port. RoCEv2 over IPv4 has the form `::ffff:a.b.c.d`.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// No address.
    pub const ZERO: Gid = Gid([0; 16]);

    /// The RoCEv2 GID of an IPv4 address.
    pub fn from_ipv4(ip: Ipv4Addr) -> Gid {
        Gid(ip.to_ipv6_mapped().octets())
    }

    /// From sysfs: eight groups of four hexadecimal digits.
    pub fn parse(text: &str) -> Option<Gid> {
        let address: Ipv6Addr = text.trim().parse().ok()?;
        Some(Gid(address.octets()))
    }

    /// The IP address that a RoCEv2 GID stands for.
    pub fn ip(self) -> IpAddr {
        Ipv6Addr::from(self.0).to_canonical()
    }

    /// Whether it is a link-local IPv6 address, fe80::/10: one that no TCP connection over IPv4 has.
    pub fn is_link_local(self) -> bool {
        Ipv6Addr::from(self.0).is_unicast_link_local()
    }

    /// The IPv4 address in a GID of the form `::ffff:a.b.c.d`.
    pub fn to_ipv4(self) -> Option<Ipv4Addr> {
        Ipv6Addr::from(self.0).to_ipv4_mapped()
    }
}

impl From<IpAddr> for Gid {
    fn from(ip: IpAddr) -> Gid {
        match ip {
            IpAddr::V4(v4) => Gid::from_ipv4(v4),
            IpAddr::V6(v6) => Gid(v6.octets()),
        }
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Ipv6Addr::from(self.0).fmt(f)
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Ipv6Addr::from(self.0).fmt(f)
    }
}

/// Ethernet address of a RoCE port.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Mac(pub [u8; 6]);

impl fmt::Debug for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

/// Name of an SMC-R peer ("id_for_peer"): together with the GID, the key under which the other side files its
/// link groups. A user-space process needs a unique one that isn't zero.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct SystemId(pub [u8; 8]);

impl fmt::Debug for SystemId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for SystemId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", u64::from_be_bytes(self.0))
    }
}

/// Enterprise id of SMC version 2: 32 bytes, filled up with spaces. Two hosts need one in common.
///
/// A value that came from a peer may hold any bytes; see [`Eid::is_valid`].
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Eid(pub [u8; 32]);

impl Eid {
    /// An id of the user's choice (UEID): 1 to 32 characters out of `A-Z`, `0-9`, `.` and `-`, the first a letter
    /// or digit. `None` for anything else.
    pub fn new(name: &str) -> Option<Eid> {
        let mut bytes = [b' '; 32];
        bytes
            .get_mut(..name.len())?
            .copy_from_slice(name.as_bytes());
        Some(Eid(bytes)).filter(|eid| eid.is_valid() && eid.name().len() == name.len())
    }

    /// Whether it obeys the rules of [`Eid::new`].
    pub fn is_valid(&self) -> bool {
        let name = self.name();
        name.first().is_some_and(u8::is_ascii_alphanumeric)
            && name
                .iter()
                .all(|c| matches!(c, b'A'..=b'Z' | b'0'..=b'9' | b'.' | b'-'))
    }

    /// The bytes without the spaces at the end.
    pub fn name(&self) -> &[u8] {
        self.0.trim_ascii_end()
    }
}

impl fmt::Debug for Eid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\"", self.name().escape_ascii())
    }
}

impl fmt::Display for Eid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.name().escape_ascii().fmt(f)
    }
}

/// Number of a queue pair: 24 bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Qpn(u32);

/// Packet sequence number: 24 bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Psn(u32);

macro_rules! bits24 {
    ($name:ident) => {
        impl $name {
            /// Largest value.
            pub const MAX: $name = $name(0xff_ffff);

            /// `value` if it fits into 24 bits.
            pub const fn new(value: u32) -> Option<$name> {
                if value <= Self::MAX.0 {
                    Some($name(value))
                } else {
                    None
                }
            }

            /// The number, at most 0xffffff.
            pub const fn get(self) -> u32 {
                self.0
            }

            /// From its three bytes on the wire.
            pub const fn from_be_bytes([a, b, c]: [u8; 3]) -> $name {
                $name(u32::from_be_bytes([0, a, b, c]))
            }

            /// Its three bytes on the wire.
            pub const fn to_be_bytes(self) -> [u8; 3] {
                let [_, a, b, c] = self.0.to_be_bytes();
                [a, b, c]
            }
        }
    };
}
bits24!(Qpn);
bits24!(Psn);

/// What lets the peer of a link write an RMB. An rkey is valid on one link only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Rtoken {
    /// Key of the memory region.
    pub rkey: u32,
    /// Where the RMB begins, as the region counts; offsets are added to it.
    pub addr: u64,
}

/// Size of an RMB: 16 KiB << code, code 0 to 15.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RmbSize(u8);

impl RmbSize {
    /// The size with this code; `None` above 15.
    pub const fn from_code(code: u8) -> Option<RmbSize> {
        if code <= 15 {
            Some(RmbSize(code))
        } else {
            None
        }
    }

    /// The size of exactly so many bytes; `None` if there is none.
    pub fn from_bytes(bytes: u32) -> Option<RmbSize> {
        (0..=15).map(RmbSize).find(|size| size.bytes() == bytes)
    }

    /// Code on the wire, 0 to 15.
    pub const fn code(self) -> u8 {
        self.0
    }

    /// Bytes: 16 KiB to 512 MiB, a power of two.
    pub const fn bytes(self) -> u32 {
        (16 << 10) << self.0
    }
}

/// Path MTU of a queue pair, with the codes of the InfiniBand specification (1 to 5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Mtu {
    /// 256 bytes.
    B256 = 1,
    /// 512 bytes.
    B512 = 2,
    /// 1024 bytes.
    B1024 = 3,
    /// 2048 bytes.
    B2048 = 4,
    /// 4096 bytes.
    B4096 = 5,
}

impl Mtu {
    /// The MTU with this code, 1 to 5.
    pub const fn from_code(code: u8) -> Option<Mtu> {
        Some(match code {
            1 => Mtu::B256,
            2 => Mtu::B512,
            3 => Mtu::B1024,
            4 => Mtu::B2048,
            5 => Mtu::B4096,
            _ => return None,
        })
    }

    /// Code on the wire.
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// Payload of one packet in bytes.
    pub const fn bytes(self) -> u32 {
        128 << self as u8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gids_hold_ipv4_addresses() {
        let ip = Ipv4Addr::new(10, 9, 0, 2);
        let gid = Gid::from_ipv4(ip);
        assert_eq!(
            gid.0,
            [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 9, 0, 2]
        );
        assert_eq!(gid.to_ipv4(), Some(ip));
        assert_eq!(gid.to_string(), "::ffff:10.9.0.2");
        assert_eq!(Gid::ZERO.to_ipv4(), None);
    }

    #[test]
    fn gids_of_sysfs() {
        let v4 = Gid::parse("0000:0000:0000:0000:0000:ffff:0a09:0001\n").unwrap();
        assert_eq!(v4.ip(), Ipv4Addr::new(10, 9, 0, 1));
        let local = Gid::parse("fe80:0000:0000:0000:5054:00ff:fe00:0001").unwrap();
        assert!(local.is_link_local() && !v4.is_link_local());
        assert_eq!(Gid::parse(""), None);
        assert_eq!(Gid::parse("10.9.0.1"), None);
    }

    #[test]
    fn eids_keep_the_rules_of_ueids() {
        let eid = Eid::new("XSMC-TEST").unwrap();
        assert_eq!(&eid.0, b"XSMC-TEST                       ");
        assert_eq!(eid.to_string(), "XSMC-TEST");
        assert!(Eid::new(&"A".repeat(32)).is_some());
        for bad in ["", " ", "-A", ".A", "a", "A B", "A ", "Ä"] {
            assert_eq!(Eid::new(bad), None, "{bad:?}");
        }
        assert_eq!(Eid::new(&"A".repeat(33)), None);
        assert!(!Eid([0; 32]).is_valid());
        assert!(!Eid([b' '; 32]).is_valid());
    }

    #[test]
    fn numbers_of_24_bits() {
        assert_eq!(Qpn::new(0x0100_0000), None);
        let qpn = Qpn::new(0x12_3456).unwrap();
        assert_eq!(qpn.to_be_bytes(), [0x12, 0x34, 0x56]);
        assert_eq!(Qpn::from_be_bytes([0xff; 3]), Qpn::MAX);
        assert_eq!(Psn::from_be_bytes(Psn::MAX.to_be_bytes()).get(), 0xff_ffff);
    }

    #[test]
    fn size_and_mtu_codes() {
        assert_eq!(RmbSize::from_code(2).unwrap().bytes(), 64 << 10);
        assert_eq!(RmbSize::from_code(15).unwrap().bytes(), 512 << 20);
        assert_eq!(RmbSize::from_code(16), None);
        for code in 0..=15 {
            let size = RmbSize::from_code(code).unwrap();
            assert_eq!(RmbSize::from_bytes(size.bytes()), Some(size));
        }
        assert_eq!(RmbSize::from_bytes(0), None);
        assert_eq!(RmbSize::from_bytes(65535), None);
        let mtus: Vec<u32> = (1..=5)
            .map(|code| Mtu::from_code(code).unwrap().bytes())
            .collect();
        assert_eq!(mtus, [256, 512, 1024, 2048, 4096]);
        assert_eq!(Mtu::from_code(0), None);
        assert_eq!(Mtu::from_code(6), None);
        assert_eq!(Mtu::B4096.code(), 5);
    }
}
