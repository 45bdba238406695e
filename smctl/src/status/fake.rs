//! A node of a kind for tests: answers one status query.

use smc_core::observe::status::{
    Carrier, ConnectionState, ConnectionStatus, CounterValues, DeclineCount, DirectionStatus,
    Fabric, GroupLinkStatus, GroupRole, GroupState, LinkEnd, LinkGroupStatus, LinkStatus,
    NodeStatus, RdmaEnd, RdmaStatus, ReasonCount, STATUS_QUERY,
};
use smc_core::wire::clc::Diagnosis;
use socket2::{Domain, SockAddr, Socket, Type};
use std::io::Read;
use std::path::Path;
use std::thread::JoinHandle;

pub(crate) struct FakeNode(JoinHandle<()>);

impl FakeNode {
    /// A listening socket that nobody serves.
    pub(crate) fn listener(path: &Path) -> Socket {
        let socket = Socket::new(Domain::UNIX, Type::SEQPACKET, None).unwrap();
        socket.bind(&SockAddr::unix(path).unwrap()).unwrap();
        socket.listen(8).unwrap();
        socket
    }

    /// Serves one query with these messages.
    pub(crate) fn answering(path: &Path, messages: Vec<Vec<u8>>) -> FakeNode {
        let listener = FakeNode::listener(path);
        FakeNode(std::thread::spawn(move || {
            let (client, _) = listener.accept().unwrap();
            let mut query = [0; 64];
            let len = (&mut &client).read(&mut query).unwrap();
            assert_eq!(&query[..len], STATUS_QUERY);
            for message in messages {
                assert_eq!(client.send(&message).unwrap(), message.len());
            }
        }))
    }

    /// Serves one query with a status.
    pub(crate) fn with_status(path: &Path, status: &NodeStatus) -> FakeNode {
        FakeNode::answering(path, vec![serde_json::to_vec(status).unwrap()])
    }

    /// Waits until the query was served, and checks it.
    pub(crate) fn join(self) {
        self.0.join().unwrap();
    }
}

/// A status with a bit of everything.
pub(crate) fn sample(pid: u32) -> NodeStatus {
    let rmb = DirectionStatus {
        carrier: Carrier::Rmb,
        bytes_tcp: 512,
        bytes_rmb: 3 << 30,
        rmb_size: 256 << 10,
        rmb_fill: 64 << 10,
        switches: 1,
    };
    let tcp = DirectionStatus {
        bytes_tcp: 1000,
        ..DirectionStatus::default()
    };
    let connection = ConnectionStatus {
        fd: 8,
        local: "127.0.0.1:6379".parse().unwrap(),
        peer: "127.0.0.1:40000".parse().unwrap(),
        state: ConnectionState::Managed,
        fabric: Some(Fabric::Shm),
        rdma: None,
        tx: rmb,
        rx: rmb,
        reason: None,
        diagnosis: None,
    };
    NodeStatus {
        version: "0.1.0".into(),
        node: format!("{pid:016x}"),
        pid,
        program: "redis-server".into(),
        uid: 999,
        started_unix_ms: None,
        links: vec![LinkStatus {
            peer_node: "00000000000000ff".into(),
            peer_pid: 4243,
            peer_program: Some("redis-benchmark".into()),
            slots_used: 1,
            chunks: 2,
        }],
        link_groups: Vec::new(),
        connections: vec![
            connection.clone(),
            ConnectionStatus {
                fd: 9,
                peer: "127.0.0.1:40001".parse().unwrap(),
                state: ConnectionState::Plain,
                fabric: None,
                tx: tcp,
                rx: tcp,
                reason: Some("no-peer".into()),
                ..connection
            },
        ],
        fallbacks: vec![ReasonCount {
            code: 1,
            name: "no-peer".into(),
            count: 3,
        }],
        declines: Vec::new(),
        counters: CounterValues {
            upgrades: 2,
            published: 2,
            ..CounterValues::default()
        },
    }
}

/// A status of a process with connections to another host.
pub(crate) fn sample_rdma(pid: u32) -> NodeStatus {
    let mut node = sample(pid);
    node.links.clear();
    let end = |n: u32| RdmaEnd {
        alert_token: 0x100 + n,
        rkey: 0xa000 + n,
        addr: 0x7f00_0000_0000 + u64::from(n),
    };
    let peer = |port: u16| ([10, 9, 0, 2], port).into();
    let rdma = ConnectionStatus {
        local: "10.9.0.1:6379".parse().unwrap(),
        peer: peer(40_000),
        fabric: Some(Fabric::Rdma),
        rdma: Some(RdmaStatus {
            link_group: 17,
            slot: 0,
            first_contact: true,
            own: end(1),
            peer: Some(end(2)),
        }),
        ..node.connections[0].clone()
    };
    let tcp = ConnectionStatus {
        local: rdma.local,
        ..node.connections[1].clone()
    };
    node.connections = vec![
        rdma,
        ConnectionStatus {
            peer: peer(40_001),
            state: ConnectionState::Negotiating,
            reason: None,
            ..tcp.clone()
        },
        ConnectionStatus {
            fd: 10,
            peer: peer(40_002),
            reason: Some("smc-declined".into()),
            diagnosis: Some(Diagnosis::NoSmcDev.into()),
            ..tcp
        },
    ];
    let end = |host: u8, qpn| LinkEnd {
        gid: format!("::ffff:10.9.0.{host}"),
        qpn,
    };
    let link = |number, peer: Option<u32>| GroupLinkStatus {
        number,
        up: peer.is_some(),
        device: "rxe0".into(),
        port: 1,
        own: end(1, 17),
        peer: peer.map(|qpn| end(2, qpn)),
        mtu: peer.map(|_| 4096),
        connections: 1,
    };
    let second = GroupLinkStatus {
        device: "rxe1".into(),
        own: end(11, 17),
        peer: Some(end(12, 33)),
        ..link(2, Some(33))
    };
    let up = LinkGroupStatus {
        id: 17,
        role: GroupRole::Server,
        state: GroupState::Up,
        down: None,
        failure: None,
        links: vec![link(1, Some(33))],
        peer_system_id: "0000525400090002".into(),
        connections: 1,
        max_conns: 255,
        cdc_sent: 12,
        cdc_received: 11,
        bytes_written: 3 << 20,
        rmb_chunks: 1,
        send_chunks: 1,
        idle_since_unix_ms: None,
    };
    let down = LinkGroupStatus {
        id: 16,
        role: GroupRole::Client,
        state: GroupState::Down,
        down: Some("the link failed".into()),
        failure: Some("the peer does not answer".into()),
        connections: 0,
        idle_since_unix_ms: Some(995_000),
        ..up.clone()
    };
    let confirming = LinkGroupStatus {
        id: 18,
        state: GroupState::Confirming,
        links: vec![link(1, None)],
        max_conns: 0,
        cdc_sent: 0,
        cdc_received: 0,
        bytes_written: 0,
        ..up.clone()
    };
    let up = LinkGroupStatus {
        links: vec![link(1, Some(33)), second],
        ..up
    };
    node.link_groups = vec![down, up, confirming];
    node.fallbacks = vec![ReasonCount {
        code: 42,
        name: "smc-declined".into(),
        count: 1,
    }];
    node.declines = vec![DeclineCount {
        diagnosis: Diagnosis::NoSmcDev.into(),
        sent: 0,
        received: 1,
    }];
    node
}
