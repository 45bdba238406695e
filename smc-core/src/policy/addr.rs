//! Address patterns of `listen` and `connect`: a network, ports, or both.

use serde::{Serialize, Serializer};
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// A set of socket addresses: those in `net` (any address if `None`) with a port in `ports` (any
/// port if `None`).
///
/// Written `CIDR`, `CIDR:port`, `CIDR:port-port`, `:port` or `:port-port`. An IPv6 network with
/// ports stands in brackets, `[fd00::/8]:80`. A CIDR without a prefix length is one host.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AddrPattern {
    /// Network address (host bits are 0) and prefix length.
    pub net: Option<(IpAddr, u8)>,
    /// First and last port, both included.
    pub ports: Option<(u16, u16)>,
}

/// Why a text is not a pattern.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct AddrError {
    /// Byte offset in the text of what is wrong.
    pub(super) offset: usize,
    pub(super) what: String,
    pub(super) help: String,
}

fn error<T>(offset: usize, what: String, help: impl Into<String>) -> Result<T, AddrError> {
    Err(AddrError {
        offset,
        what,
        help: help.into(),
    })
}

impl AddrPattern {
    /// Whether the pattern covers `addr`. IPv4-mapped IPv6 addresses count as IPv4.
    pub fn matches(&self, addr: &SocketAddr) -> bool {
        self.matches_port(addr.port())
            && self
                .net
                .is_none_or(|net| contains(net, addr.ip().to_canonical()))
    }

    /// Whether the pattern covers some address with this port.
    pub(super) fn matches_port(&self, port: u16) -> bool {
        self.ports
            .is_none_or(|(low, high)| (low..=high).contains(&port))
    }

    pub(super) fn parse(text: &str) -> Result<AddrPattern, AddrError> {
        if text.is_empty() {
            return error(0, "empty address".into(), "write CIDR, CIDR:port or :port");
        }
        if let Some(inner) = text.strip_prefix('[') {
            let Some((net, after)) = inner.split_once(']') else {
                return error(
                    0,
                    "'[' without ']'".into(),
                    "write IPv6 as \"[fd00::/8]:80\"",
                );
            };
            if !net.contains(':') {
                return error(
                    1,
                    format!("{net:?} in brackets is not IPv6"),
                    "write IPv4 without brackets, such as \"10.0.0.0/8:80\"",
                );
            }
            let net = Some(parse_net(net, 1)?);
            let ports_at = text.len() - after.len();
            return match after.strip_prefix(':') {
                _ if after.is_empty() => Ok(AddrPattern { net, ports: None }),
                Some(ports) => Ok(AddrPattern {
                    net,
                    ports: Some(parse_ports(ports, ports_at + 1)?),
                }),
                None => error(
                    ports_at,
                    format!("{after:?} after ']'"),
                    "write \":port\" or nothing there",
                ),
            };
        }
        match text.split_once(':') {
            Some(("", ports)) if !ports.starts_with(':') => Ok(AddrPattern {
                net: None,
                ports: Some(parse_ports(ports, 1)?),
            }),
            Some((net, ports)) if !ports.contains(':') => Ok(AddrPattern {
                net: Some(parse_net(net, 0)?),
                ports: Some(parse_ports(ports, net.len() + 1)?),
            }),
            _ => Ok(AddrPattern {
                net: Some(parse_net(text, 0)?),
                ports: None,
            }),
        }
    }
}

/// Parses `address` or `address/prefix`; `base` is where the text starts within the whole pattern.
fn parse_net(text: &str, base: usize) -> Result<(IpAddr, u8), AddrError> {
    let (addr_text, prefix_text) = match text.split_once('/') {
        Some((addr, prefix)) => (addr, Some(prefix)),
        None => (text, None),
    };
    let Ok(addr) = addr_text.parse::<IpAddr>() else {
        let help = if addr_text.contains(':') {
            "write IPv6 with ports as \"[fd00::/8]:80\""
        } else {
            "write numbers such as \"10.0.0.0/8\" or \"127.0.0.1:80\"; names are not looked up"
        };
        return error(base, format!("{addr_text:?} is not an IP address"), help);
    };
    let bits = if addr.is_ipv4() { 32 } else { 128 };
    let prefix = match prefix_text {
        None => bits,
        Some(prefix_text) => match parse_number(prefix_text) {
            Some(prefix) if prefix <= u32::from(bits) => prefix as u8,
            _ => {
                let help = if prefix_text.contains(':') {
                    format!("write IPv6 with ports as \"[{addr}/length]:port\"")
                } else {
                    format!("write 0 to {bits}")
                };
                let at = base + addr_text.len() + 1;
                return error(at, format!("{prefix_text:?} is not a prefix length"), help);
            }
        },
    };
    let net = masked(addr, prefix);
    if net != addr {
        return error(
            base,
            format!("{text:?} has host bits set"),
            format!("write \"{net}/{prefix}\" for the network or \"{addr}\" for the host"),
        );
    }
    // ::ffff:10.0.0.0/104 means what 10.0.0.0/8 means.
    Ok(match addr.to_canonical() {
        IpAddr::V4(v4) if addr.is_ipv6() && prefix >= 96 => (IpAddr::V4(v4), prefix - 96),
        _ => (addr, prefix),
    })
}

fn parse_ports(text: &str, base: usize) -> Result<(u16, u16), AddrError> {
    let port = |text: &str, at: usize| match parse_number(text) {
        Some(port @ 1..=65535) => Ok(port as u16),
        _ => error(
            at,
            format!("{text:?} is not a port"),
            "write 1 to 65535, or a range 80-90",
        ),
    };
    let Some((low, high)) = text.split_once('-') else {
        let port = port(text, base)?;
        return Ok((port, port));
    };
    let range = (port(low, base)?, port(high, base + low.len() + 1)?);
    if range.0 > range.1 {
        return error(
            base,
            format!("the port range {text:?} is empty"),
            format!("write {}-{}", range.1, range.0),
        );
    }
    Ok(range)
}

/// Digits only: `u32::from_str` alone would also take "+80".
fn parse_number(text: &str) -> Option<u32> {
    text.bytes()
        .all(|b| b.is_ascii_digit())
        .then(|| text.parse().ok())?
}

fn masked(addr: IpAddr, prefix: u8) -> IpAddr {
    let prefix = u32::from(prefix);
    match addr {
        IpAddr::V4(v4) => {
            let mask = u32::MAX.checked_shl(32 - prefix).unwrap_or(0);
            IpAddr::V4(Ipv4Addr::from_bits(v4.to_bits() & mask))
        }
        IpAddr::V6(v6) => {
            let mask = u128::MAX.checked_shl(128 - prefix).unwrap_or(0);
            IpAddr::V6((v6.to_bits() & mask).into())
        }
    }
}

fn contains((net, prefix): (IpAddr, u8), addr: IpAddr) -> bool {
    net.is_ipv4() == addr.is_ipv4() && masked(addr, prefix) == net
}

impl fmt::Display for AddrPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some((net, prefix)) = self.net {
            let host = prefix == if net.is_ipv4() { 32 } else { 128 };
            match (net.is_ipv6() && self.ports.is_some(), host) {
                (true, true) => write!(f, "[{net}]")?,
                (true, false) => write!(f, "[{net}/{prefix}]")?,
                (false, true) => write!(f, "{net}")?,
                (false, false) => write!(f, "{net}/{prefix}")?,
            }
        }
        match self.ports {
            Some((low, high)) if low == high => write!(f, ":{low}"),
            Some((low, high)) => write!(f, ":{low}-{high}"),
            None => Ok(()),
        }
    }
}

impl Serialize for AddrPattern {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::net::Ipv6Addr;

    fn pattern(text: &str) -> AddrPattern {
        AddrPattern::parse(text).unwrap_or_else(|e| panic!("{text}: {e:?}"))
    }

    fn covers(text: &str, addr: &str) -> bool {
        pattern(text).matches(&addr.parse().unwrap())
    }

    #[test]
    fn forms() {
        for text in [
            "10.0.0.0/8",
            "0.0.0.0/0",
            "127.0.0.1",
            "127.0.0.1:80",
            "10.0.0.0/8:80-90",
            ":80",
            ":1-65535",
            "fd00::/8",
            "::1",
            "::/0",
            "[fd00::/8]:80",
            "[::1]:80-81",
        ] {
            assert_eq!(pattern(text).to_string(), text);
        }
        assert_eq!(pattern("[fd00::/8]"), pattern("fd00::/8"));
        assert_eq!(pattern("127.0.0.1/32").to_string(), "127.0.0.1");
        assert_eq!(pattern("::ffff:10.0.0.0/104").to_string(), "10.0.0.0/8");
    }

    #[test]
    fn matching() {
        assert!(covers("10.0.0.0/8", "10.255.1.2:1"));
        assert!(!covers("10.0.0.0/8", "11.0.0.0:1"));
        assert!(covers("0.0.0.0/0", "200.1.1.1:1"));
        assert!(!covers("0.0.0.0/0", "[::1]:1"));
        assert!(covers("10.0.0.0/8", "[::ffff:10.1.1.1]:1"));
        assert!(covers("::/0", "[fe80::1]:1"));
        assert!(!covers("::/0", "1.2.3.4:1"));
        assert!(covers(":80-90", "[::1]:90"));
        assert!(covers(":80-90", "1.2.3.4:80"));
        assert!(!covers(":80-90", "1.2.3.4:91"));
        assert!(covers("[fd00::/8]:80", "[fdff::1]:80"));
        assert!(!covers("[fd00::/8]:80", "[fdff::1]:81"));
        assert!(!covers("127.0.0.1:80", "127.0.0.2:80"));
    }

    #[test]
    fn errors_say_where() {
        for (text, offset, what) in [
            ("", 0, "empty address"),
            ("localhost:80", 0, "\"localhost\" is not an IP address"),
            ("10.0.0.0/33", 9, "\"33\" is not a prefix length"),
            ("10.0.0.1/8", 0, "\"10.0.0.1/8\" has host bits set"),
            ("10.0.0.0/8:0", 11, "\"0\" is not a port"),
            ("10.0.0.0/8:80-", 14, "\"\" is not a port"),
            (":90-80", 1, "the port range \"90-80\" is empty"),
            (":", 1, "\"\" is not a port"),
            (":65536", 1, "\"65536\" is not a port"),
            (":+80", 1, "\"+80\" is not a port"),
            ("[fd00::/8", 0, "'[' without ']'"),
            ("[fd00::/8]80", 10, "\"80\" after ']'"),
            ("[fd00::/8]:x", 11, "\"x\" is not a port"),
            (
                "[10.0.0.0/8]:80",
                1,
                "\"10.0.0.0/8\" in brackets is not IPv6",
            ),
            ("fd00::/8:80", 7, "\"8:80\" is not a prefix length"),
            ("*:80", 0, "\"*\" is not an IP address"),
        ] {
            let error = AddrPattern::parse(text).unwrap_err();
            assert_eq!((error.offset, &*error.what), (offset, what), "{text}");
            assert!(!error.help.is_empty(), "{text}");
        }
    }

    fn any_pattern() -> impl Strategy<Value = AddrPattern> {
        let v4 = (any::<u32>(), 0u8..=32)
            .prop_map(|(bits, p)| (masked(Ipv4Addr::from_bits(bits).into(), p), p));
        let v6 = (any::<u128>(), 0u8..=128)
            .prop_map(|(bits, p)| (masked(Ipv6Addr::from_bits(bits).into(), p), p));
        let ports = (1u16.., 1u16..).prop_map(|(a, b)| (a.min(b), a.max(b)));
        (
            prop::option::of(prop_oneof![v4, v6]),
            prop::option::of(ports),
        )
            .prop_filter("one of both", |(net, ports)| {
                net.is_some() || ports.is_some()
            })
            .prop_map(|(net, ports)| AddrPattern { net, ports })
    }

    proptest! {
        #[test]
        fn display_round_trips(pattern in any_pattern()) {
            prop_assert_eq!(AddrPattern::parse(&pattern.to_string()), Ok(pattern));
        }

        #[test]
        fn network_and_ports_are_covered(pattern in any_pattern(), host in any::<u128>()) {
            let (net, prefix) = pattern.net.unwrap_or((Ipv4Addr::LOCALHOST.into(), 32));
            let ip = match net {
                IpAddr::V4(v4) => {
                    let free = u32::MAX.checked_shr(prefix.into()).unwrap_or(0);
                    IpAddr::V4((v4.to_bits() | host as u32 & free).into())
                }
                IpAddr::V6(v6) => {
                    let free = u128::MAX.checked_shr(prefix.into()).unwrap_or(0);
                    IpAddr::V6((v6.to_bits() | host & free).into())
                }
            };
            let (low, high) = pattern.ports.unwrap_or((7, 7));
            prop_assert!(pattern.matches(&SocketAddr::new(ip, low)));
            prop_assert!(pattern.matches(&SocketAddr::new(ip, high)));
        }

        #[test]
        fn never_panics(text in "[0-9a-f:./\\[\\]é-]{0,24}") {
            if let Err(error) = AddrPattern::parse(&text) {
                prop_assert!(error.offset <= text.len());
                prop_assert!(text.is_char_boundary(error.offset));
            }
        }
    }
}
