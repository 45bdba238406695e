//! A node of a kind for tests: answers one status query.

use smc_core::observe::status::{
    Carrier, ConnectionState, ConnectionStatus, CounterValues, DirectionStatus, LinkStatus,
    NodeStatus, ReasonCount, STATUS_QUERY,
};
use socket2::{Domain, SockAddr, Socket, Type};
use std::io::Read;
use std::path::Path;
use std::thread::JoinHandle;

pub(super) struct FakeNode(JoinHandle<()>);

impl FakeNode {
    /// A listening socket that nobody serves.
    pub(super) fn listener(path: &Path) -> Socket {
        let socket = Socket::new(Domain::UNIX, Type::SEQPACKET, None).unwrap();
        socket.bind(&SockAddr::unix(path).unwrap()).unwrap();
        socket.listen(8).unwrap();
        socket
    }

    /// Serves one query with these messages.
    pub(super) fn answering(path: &Path, messages: Vec<Vec<u8>>) -> FakeNode {
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
    pub(super) fn with_status(path: &Path, status: &NodeStatus) -> FakeNode {
        FakeNode::answering(path, vec![serde_json::to_vec(status).unwrap()])
    }

    /// Waits until the query was served, and checks it.
    pub(super) fn join(self) {
        self.0.join().unwrap();
    }
}

/// A status with a bit of everything.
pub(super) fn sample(pid: u32) -> NodeStatus {
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
        tx: rmb,
        rx: rmb,
        reason: None,
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
        connections: vec![
            connection.clone(),
            ConnectionStatus {
                fd: 9,
                peer: "127.0.0.1:40001".parse().unwrap(),
                state: ConnectionState::Plain,
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
        counters: CounterValues {
            upgrades: 2,
            published: 2,
            ..CounterValues::default()
        },
    }
}
