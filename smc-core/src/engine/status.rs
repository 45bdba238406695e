//! The answer to `smctl status`.

use core::sync::atomic::Ordering::{Acquire, Relaxed};

use super::COUNTERS;
use super::ipc;
use super::run::Engine;
use crate::negotiate::Endpoint;
use crate::node;
use crate::observe::Reason;
use crate::observe::status::{
    Carrier, ConnectionState, ConnectionStatus, DirectionStatus, Fabric, LinkStatus, NodeStatus,
};
use crate::stream::{self, F_LISTENER, FREE, MANAGED, PUBLISHED, Sock};
use crate::wire::clc::Diagnosis;

/// Bytes of one datagram of the answer.
const PIECE: usize = 32 << 10;

impl Engine {
    /// Sends the node's status document.
    pub(super) fn send_status(&self, fd: i32) {
        let Ok(text) = serde_json::to_vec(&self.status()) else {
            return;
        };
        for piece in text.chunks(PIECE) {
            if ipc::send_bytes(fd, piece, &[]).is_err() {
                return;
            }
        }
    }

    fn status(&self) -> NodeStatus {
        let mut counters = COUNTERS.values();
        counters.doorbells = node::COUNTERS.bells_rung.load(Relaxed);
        counters.spins = node::COUNTERS.spins.load(Relaxed);
        counters.sleeps = node::COUNTERS.sleeps.load(Relaxed);
        let mut connections = Vec::new();
        stream::POOL.each(|_, s| connections.extend(self.connection(s)));
        let groups = self.groups.iter().flatten().map(|g| g.status());
        NodeStatus {
            version: env!("CARGO_PKG_VERSION").into(),
            node: self.shared.id.to_string(),
            pid: self.shared.pid,
            program: self.identity.program().into(),
            uid: self.identity.uid,
            started_unix_ms: Some(self.started_ms),
            links: self
                .peers
                .iter()
                .flatten()
                .filter(|p| !p.is_gone())
                .map(|p| LinkStatus {
                    peer_node: p.node.to_string(),
                    peer_pid: p.pid,
                    peer_program: Some(
                        String::from_utf8_lossy(&p.program)
                            .trim_end_matches('\0')
                            .into(),
                    ),
                    slots_used: p.slots_used(),
                    chunks: p.chunk_count(),
                })
                .collect(),
            link_groups: self.ended_groups.iter().cloned().chain(groups).collect(),
            connections,
            fallbacks: COUNTERS.fallbacks(),
            declines: COUNTERS.declines(),
            counters,
        }
    }

    fn connection(&self, s: &'static Sock) -> Option<ConnectionStatus> {
        let (generation, st) = (s.generation.load(Acquire), s.state.load(Acquire));
        if st == FREE || s.has(F_LISTENER) {
            return None;
        }
        let fd = s.fd.load(Relaxed);
        let at = s.with_fd(Endpoint::of_socket)?.ok()?;
        let place = s.place().filter(|_| st == MANAGED);
        let limbo = place.is_some_and(|(link, _)| link.limbo());
        let managed = place.is_some() && !limbo;
        let group = place.and_then(|(link, slot)| {
            let mut groups = self.groups.iter().flatten();
            groups
                .find(|g| core::ptr::eq(g.link(), link))?
                .connection(slot)
        });
        let (tx_ring, rx_ring) = if managed {
            (s.tx_ring().size(), s.rx_ring().size())
        } else {
            (0, 0)
        };
        let (sent, received) = s.rmb_bytes();
        let dir = |tx: bool| {
            let (switches, tcp, rmb, size) = if tx {
                (&s.tx.switches, &s.tx.tcp, sent, tx_ring)
            } else {
                (&s.rx.passed, &s.rx.tcp, received, rx_ring)
            };
            let n = if managed { switches.load(Relaxed) } else { 0 };
            DirectionStatus {
                carrier: if n & 1 == 1 {
                    Carrier::Rmb
                } else {
                    Carrier::Tcp
                },
                bytes_tcp: tcp.load(Relaxed),
                bytes_rmb: rmb,
                rmb_size: u64::from(size),
                rmb_fill: if !managed {
                    0
                } else if tx {
                    s.unread_by_peer() as u64
                } else {
                    s.unread_by_us() as u64
                },
                switches: n,
            }
        };
        let status = ConnectionStatus {
            fd,
            local: at.local_addr(),
            peer: at.peer_addr(),
            state: match st {
                _ if limbo => ConnectionState::Negotiating,
                _ if managed => ConnectionState::Managed,
                PUBLISHED => ConnectionState::Published,
                _ => ConnectionState::Plain,
            },
            fabric: place.filter(|_| managed).map(|(link, _)| {
                if link.fixed() {
                    Fabric::Rdma
                } else {
                    Fabric::Shm
                }
            }),
            rdma: group,
            tx: dir(true),
            rx: dir(false),
            reason: s
                .noted()
                .or_else(|| (managed && s.peer_pins()).then_some(Reason::PeerRequest))
                .map(|r| r.name().into()),
            diagnosis: match s.diagnosis.load(Relaxed) {
                0 => None,
                code => Some(Diagnosis::from(code).into()),
            },
        };
        (s.generation.load(Acquire) == generation).then_some(status)
    }
}
