//! The status document of a node: what its engine answers to `smctl status`, as JSON.
//!
//! Node and tool may be of different versions: unknown fields are ignored, and fields that a later
//! version adds must be optional or have a default.

use crate::wire::clc::Diagnosis;
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
    /// Link groups with processes of other hosts, and the last few that have ended.
    #[serde(default)]
    pub link_groups: Vec<LinkGroupStatus>,
    /// TCP connections that xsmc looks after, whatever carries them.
    #[serde(default)]
    pub connections: Vec<ConnectionStatus>,
    /// Fallback reasons met so far, with their counts.
    #[serde(default)]
    pub fallbacks: Vec<ReasonCount>,
    /// Declines of SMC-R sent and received so far, by diagnosis.
    #[serde(default)]
    pub declines: Vec<DeclineCount>,
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

/// A link group: what carries SMC-R connections to one process of another host. It has one link or two; each is a pair
/// of queue pairs, one on each host.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LinkGroupStatus {
    /// Names the group within the process, and in its log: the number of its first queue pair here.
    pub id: u32,
    /// Which side of the TCP connections this process is on.
    pub role: GroupRole,
    /// How far the group has come.
    pub state: GroupState,
    /// Why it has ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub down: Option<Cow<'static, str>>,
    /// What has broken the queue pair, where that was why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<Cow<'static, str>>,
    /// Its links; of a group that is down, those it had last.
    #[serde(default)]
    pub links: Vec<GroupLinkStatus>,
    /// Who the peer is: its system id in CLC, 16 hexadecimal digits.
    pub peer_system_id: String,
    /// Connections on it, those that are being set up included.
    pub connections: u32,
    /// Most connections, as agreed on; 0 before that.
    pub max_conns: u32,
    /// CDC messages sent.
    pub cdc_sent: u64,
    /// CDC messages received.
    pub cdc_received: u64,
    /// Payload bytes written into the peer's RMBs.
    pub bytes_written: u64,
    /// Pieces of memory of 4 MiB from which RMBs are cut.
    pub rmb_chunks: u32,
    /// Memory regions of 4 MiB registered for what is sent, for each link.
    pub send_chunks: u32,
    /// Since when it has had no connection, in milliseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_since_unix_ms: Option<u64>,
}

/// One link of a group.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct GroupLinkStatus {
    /// Its number, as the server has given it.
    pub number: u8,
    /// Whether connections may use it.
    pub up: bool,
    /// Own RDMA device.
    pub device: String,
    /// Port of that, from 1.
    pub port: u8,
    /// Own end.
    pub own: LinkEnd,
    /// The peer's end, once its CLC message has come.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer: Option<LinkEnd>,
    /// Path MTU in bytes, once the peer's end is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// Connections that send by it.
    pub connections: u32,
}

/// One end of a link.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LinkEnd {
    /// GID of the port: an IPv6 address, or an IPv4 one as `::ffff:a.b.c.d`.
    pub gid: String,
    /// Number of the queue pair, 24 bits.
    pub qpn: u32,
}

/// Which side of its TCP connections a link group is on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GroupRole {
    /// It connected.
    Client,
    /// It accepted.
    Server,
}

impl GroupRole {
    /// The word used in status documents.
    pub const fn name(self) -> &'static str {
        match self {
            GroupRole::Client => "client",
            GroupRole::Server => "server",
        }
    }
}

/// How far a link group has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GroupState {
    /// First contact: CLC, then CONFIRM LINK.
    Confirming,
    /// In use, or waiting for connections.
    Up,
    /// One side has asked for its end, being unused.
    Closing,
    /// At its end.
    Down,
}

impl GroupState {
    /// The word used in status documents.
    pub const fn name(self) -> &'static str {
        match self {
            GroupState::Confirming => "confirming",
            GroupState::Up => "up",
            GroupState::Closing => "closing",
            GroupState::Down => "down",
        }
    }
}

/// How far a connection has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ConnectionState {
    /// Only counted; every call goes to the kernel.
    Plain,
    /// In the directory, waiting for the peer to be found.
    Published,
    /// In the handshake of SMC-R: no byte of the program moves before it ends.
    Negotiating,
    /// Attached to a link or link group; each direction has a carrier of its own.
    Managed,
}

impl ConnectionState {
    /// The word used in status documents.
    pub const fn name(self) -> &'static str {
        match self {
            ConnectionState::Plain => "plain",
            ConnectionState::Published => "published",
            ConnectionState::Negotiating => "negotiating",
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

/// What the RMBs of a connection are.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Fabric {
    /// Memory that two processes of one host share.
    Shm,
    /// Memory that the other host writes by RDMA: SMC-R.
    Rdma,
}

impl Fabric {
    /// The word used in status documents.
    pub const fn name(self) -> &'static str {
        match self {
            Fabric::Shm => "shm",
            Fabric::Rdma => "rdma",
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
    /// What its RMBs are; absent while it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fabric: Option<Fabric>,
    /// What SMC-R knows of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rdma: Option<RdmaStatus>,
    /// The direction this end sends on.
    pub tx: DirectionStatus,
    /// The direction this end receives on.
    pub rx: DirectionStatus,
    /// Why the connection is on TCP, if there is a known reason.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<ReasonName>,
    /// Diagnosis of the Decline that kept the connection on TCP: the peer's if the reason is `smc-declined`, else
    /// what the peer was told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub diagnosis: Option<DiagnosisStatus>,
}

/// A connection on SMC-R.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RdmaStatus {
    /// [`LinkGroupStatus::id`] of its link group.
    pub link_group: u32,
    /// Its place there, from 0.
    pub slot: u32,
    /// Whether the link group was made for it.
    pub first_contact: bool,
    /// Own end.
    pub own: RdmaEnd,
    /// The peer's end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer: Option<RdmaEnd>,
}

/// One end of a connection on SMC-R.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RdmaEnd {
    /// What CDC messages to this end name the connection by.
    pub alert_token: u32,
    /// Key of the RMB's memory region.
    pub rkey: u32,
    /// Address of the RMB in that region, as the other side has to name it.
    pub addr: u64,
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

/// Why a side declines SMC-R, see [`Diagnosis`].
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DiagnosisStatus {
    /// The number that CLC carries.
    pub code: u32,
    /// [`Diagnosis::name`]; a later version may know more of them.
    pub name: Cow<'static, str>,
}

impl From<Diagnosis> for DiagnosisStatus {
    fn from(diagnosis: Diagnosis) -> DiagnosisStatus {
        DiagnosisStatus {
            code: diagnosis.into(),
            name: diagnosis.name().into(),
        }
    }
}

/// How often SMC-R was declined with one diagnosis.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DeclineCount {
    /// Which; code 0 for all that this version doesn't know.
    #[serde(flatten)]
    pub diagnosis: DiagnosisStatus,
    /// Declines sent.
    pub sent: u64,
    /// Declines received.
    pub received: u64,
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
    /// Bytes sent by RMB on connections that are over.
    pub rmb_sent: u64,
    /// Bytes received by RMB on connections that are over.
    pub rmb_received: u64,
}

/// What all nodes of a runtime directory have counted together, those that have ended as well. A node that was killed
/// may have taken its last counts with it.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct TotalsStatus {
    /// The runtime directory.
    pub directory: String,
    /// Node counters.
    pub counters: CounterValues,
    /// Fallback reasons met, with their counts.
    pub fallbacks: Vec<ReasonCount>,
    /// Declines of SMC-R sent and received, by diagnosis.
    pub declines: Vec<DeclineCount>,
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
            link_groups: vec![LinkGroupStatus {
                id: 17,
                role: GroupRole::Server,
                state: GroupState::Confirming,
                down: None,
                failure: None,
                links: vec![GroupLinkStatus {
                    number: 1,
                    up: false,
                    device: "rxe0".into(),
                    port: 1,
                    own: LinkEnd {
                        gid: "::ffff:10.9.0.1".into(),
                        qpn: 17,
                    },
                    peer: None,
                    mtu: None,
                    connections: 1,
                }],
                peer_system_id: "0000000000000001".into(),
                connections: 1,
                max_conns: 0,
                cdc_sent: 0,
                cdc_received: 0,
                bytes_written: 0,
                rmb_chunks: 1,
                send_chunks: 0,
                idle_since_unix_ms: None,
            }],
            connections: vec![ConnectionStatus {
                fd: 8,
                local: "127.0.0.1:6379".parse().unwrap(),
                peer: "[::1]:40000".parse().unwrap(),
                state: ConnectionState::Managed,
                fabric: Some(Fabric::Rdma),
                rdma: Some(RdmaStatus {
                    link_group: 17,
                    slot: 0,
                    first_contact: true,
                    own: RdmaEnd {
                        alert_token: 256,
                        rkey: 1,
                        addr: 0x7f00_0000_0000,
                    },
                    peer: None,
                }),
                tx: DirectionStatus {
                    carrier: Carrier::Rmb,
                    ..Default::default()
                },
                rx: DirectionStatus::default(),
                reason: Some("smc-declined".into()),
                diagnosis: Some(Diagnosis::NoSmcDev.into()),
            }],
            fallbacks: vec![ReasonCount {
                code: 1,
                name: "no-peer".into(),
                count: 3,
            }],
            declines: vec![DeclineCount {
                diagnosis: Diagnosis::NoSmcDev.into(),
                sent: 1,
                received: 2,
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
            text.contains(r#""fabric":"rdma","rdma":{"link_group":17"#),
            "{text}"
        );
        assert!(
            text.contains(r#"[{"code":50528256,"name":"NOSMCDEV","sent":1,"received":2}]"#),
            "{text}"
        );
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
            ConnectionState::Negotiating,
            ConnectionState::Managed,
        ] {
            assert_eq!(serde_json::to_value(state).unwrap(), state.name());
        }
        for carrier in [Carrier::Tcp, Carrier::Rmb] {
            assert_eq!(serde_json::to_value(carrier).unwrap(), carrier.name());
        }
        for fabric in [Fabric::Shm, Fabric::Rdma] {
            assert_eq!(serde_json::to_value(fabric).unwrap(), fabric.name());
        }
        for role in [GroupRole::Client, GroupRole::Server] {
            assert_eq!(serde_json::to_value(role).unwrap(), role.name());
        }
        for state in [
            GroupState::Confirming,
            GroupState::Up,
            GroupState::Closing,
            GroupState::Down,
        ] {
            assert_eq!(serde_json::to_value(state).unwrap(), state.name());
        }
    }

    #[test]
    fn other_versions_are_understood() {
        let text = r#"{"version":"9","node":"1","pid":1,"program":"p","uid":0,"news":[1],
                       "counters":{"upgrades":5,"teleports":6}}"#;
        let status: NodeStatus = serde_json::from_str(text).unwrap();
        assert_eq!(status.counters.upgrades, 5);
        assert!(status.connections.is_empty() && status.link_groups.is_empty());
    }
}
