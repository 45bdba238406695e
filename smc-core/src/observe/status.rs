//! The status document of a node: what its engine answers to `smctl status`, as JSON.
//!
//! Node and tool may be of different versions: unknown fields are ignored, and fields that a later
//! version adds must be optional or have a default.

use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::net::SocketAddr;

/// What a client sends on a node's socket to get its status.
pub const STATUS_QUERY: &[u8; 8] = b"XSMCSTAT";

/// Name of a fallback reason ([`super::Reason::name`]); a later version may know more of them.
pub type ReasonName = Cow<'static, str>;

/// Status of one node, that is of one process under xsmc.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct NodeStatus {
    /// Version of libxsmc.so in this process.
    pub version: String,
    /// Node id in lower-case hexadecimal, as in the names of its runtime files.
    pub node: String,
    /// Process id, as the process itself sees it.
    pub pid: u32,
    /// Name of the program, see [`crate::policy::Identity::program`].
    pub program: String,
    /// Effective user id.
    pub uid: u32,
    /// When the engine started, in milliseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_unix_ms: Option<u64>,
    /// Links to peers.
    #[serde(default)]
    pub links: Vec<LinkStatus>,
    /// TCP connections that xsmc looks after, whatever carries them.
    #[serde(default)]
    pub connections: Vec<ConnectionStatus>,
    /// Fallback reasons met so far, with their counts.
    #[serde(default)]
    pub fallbacks: Vec<ReasonCount>,
    /// Node counters since the engine started.
    #[serde(default)]
    pub counters: CounterValues,
}

/// One link, that is one shared channel to one peer process.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LinkStatus {
    /// Node id of the peer, hexadecimal.
    pub peer_node: String,
    /// Process id of the peer.
    pub peer_pid: u32,
    /// Name of the peer's program, cut to 16 bytes, where known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer_program: Option<String>,
    /// Connections that ride this link now.
    pub slots_used: u32,
    /// Shared chunks of 4 MiB, both sides together.
    pub chunks: u32,
}

/// How far a connection has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ConnectionState {
    /// Only counted; every call goes to the kernel.
    Plain,
    /// In the directory, waiting for the peer to be found.
    Published,
    /// Attached to a link; each direction has a carrier of its own.
    Managed,
}

impl ConnectionState {
    /// The word used in status documents.
    pub const fn name(self) -> &'static str {
        match self {
            ConnectionState::Plain => "plain",
            ConnectionState::Published => "published",
            ConnectionState::Managed => "managed",
        }
    }
}

/// What a direction's bytes ride on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Carrier {
    /// The kernel's TCP socket.
    #[default]
    Tcp,
    /// A remote memory buffer.
    Rmb,
}

impl Carrier {
    /// The word used in status documents.
    pub const fn name(self) -> &'static str {
        match self {
            Carrier::Tcp => "tcp",
            Carrier::Rmb => "rmb",
        }
    }
}

/// One TCP connection of the node.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ConnectionStatus {
    /// The program's file descriptor (one of them, if it was duplicated).
    pub fd: i32,
    /// Address of this end.
    pub local: SocketAddr,
    /// Address of the other end.
    pub peer: SocketAddr,
    /// How far the connection has come.
    pub state: ConnectionState,
    /// The direction this end sends on.
    pub tx: DirectionStatus,
    /// The direction this end receives on.
    pub rx: DirectionStatus,
    /// Why the connection is on TCP, if there is a known reason.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<ReasonName>,
}

/// One direction of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct DirectionStatus {
    /// What the direction rides on now.
    pub carrier: Carrier,
    /// Payload bytes that went over TCP.
    pub bytes_tcp: u64,
    /// Payload bytes that went through RMBs.
    pub bytes_rmb: u64,
    /// Size of the RMB in bytes, 0 without one.
    pub rmb_size: u64,
    /// Bytes in the RMB that were not read yet.
    pub rmb_fill: u64,
    /// Changes of carrier so far.
    pub switches: u32,
}

/// How often a fallback reason was met.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ReasonCount {
    /// [`super::Reason::code`].
    pub code: u8,
    /// [`super::Reason::name`].
    pub name: ReasonName,
    /// Times it was met.
    pub count: u64,
}

/// Node counters at one moment; see [`super::Counters`] for their meaning.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct CounterValues {
    /// Directions switched from tcp to rmb.
    pub upgrades: u64,
    /// Directions switched from rmb to tcp.
    pub downgrades: u64,
    /// Connections whose endpoint was put into the directory.
    pub published: u64,
    /// Doorbells rung.
    pub doorbells: u64,
    /// Waits that ended while spinning.
    pub spins: u64,
    /// Waits that slept in the kernel.
    pub sleeps: u64,
    /// OPEN messages sent.
    pub opens_sent: u64,
    /// OPEN messages accepted by the peer.
    pub opens_accepted: u64,
    /// OPEN messages declined by the peer.
    pub opens_declined: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> NodeStatus {
        NodeStatus {
            version: "0.1.0".into(),
            node: "00ff".into(),
            pid: 42,
            program: "redis-server".into(),
            uid: 1000,
            started_unix_ms: None,
            links: vec![LinkStatus {
                peer_node: "0a".into(),
                peer_pid: 43,
                peer_program: None,
                slots_used: 1,
                chunks: 2,
            }],
            connections: vec![ConnectionStatus {
                fd: 8,
                local: "127.0.0.1:6379".parse().unwrap(),
                peer: "[::1]:40000".parse().unwrap(),
                state: ConnectionState::Managed,
                tx: DirectionStatus {
                    carrier: Carrier::Rmb,
                    ..Default::default()
                },
                rx: DirectionStatus::default(),
                reason: Some("no-peer".into()),
            }],
            fallbacks: vec![ReasonCount {
                code: 1,
                name: "no-peer".into(),
                count: 3,
            }],
            counters: CounterValues {
                upgrades: 1,
                ..Default::default()
            },
        }
    }

    #[test]
    fn json_round_trip_and_words() {
        let text = serde_json::to_string(&sample()).unwrap();
        assert!(text.contains(r#""tx":{"carrier":"rmb""#), "{text}");
        assert!(text.contains(r#""rx":{"carrier":"tcp""#), "{text}");
        assert!(text.contains(r#""state":"managed""#), "{text}");
        assert!(
            text.contains(r#""local":"127.0.0.1:6379","peer":"[::1]:40000""#),
            "{text}"
        );
        assert_eq!(serde_json::from_str::<NodeStatus>(&text).unwrap(), sample());
    }

    #[test]
    fn names_match_the_json_words() {
        for state in [
            ConnectionState::Plain,
            ConnectionState::Published,
            ConnectionState::Managed,
        ] {
            assert_eq!(serde_json::to_value(state).unwrap(), state.name());
        }
        for carrier in [Carrier::Tcp, Carrier::Rmb] {
            assert_eq!(serde_json::to_value(carrier).unwrap(), carrier.name());
        }
    }

    #[test]
    fn other_versions_are_understood() {
        let text = r#"{"version":"9","node":"1","pid":1,"program":"p","uid":0,"news":[1],
                       "counters":{"upgrades":5,"teleports":6}}"#;
        let status: NodeStatus = serde_json::from_str(text).unwrap();
        assert_eq!(status.counters.upgrades, 5);
        assert!(status.connections.is_empty());
    }
}
