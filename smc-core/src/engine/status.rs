//! The answer to `smctl status`.

use core::sync::atomic::Ordering::{Acquire, Relaxed};
use std::time::SystemTime;

use super::COUNTERS;
use super::ipc;
use super::rdma::LinkGroup;
use super::run::Engine;
use crate::fabric::verbs::Failure;
use crate::link::llc::{Llc, Role};
use crate::negotiate::Endpoint;
use crate::node;
use crate::observe::status::{
    Carrier, ConnectionState, ConnectionStatus, DirectionStatus, Fabric, GroupLinkStatus,
    GroupRole, GroupState, LinkEnd, LinkGroupStatus, LinkStatus, NodeStatus, RdmaEnd, RdmaStatus,
};
use crate::stream::{self, F_LISTENER, FREE, MANAGED, PUBLISHED, Sock};
use crate::wire::clc::Diagnosis;
use crate::wire::{Gid, Qpn, Rtoken};

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
            reason: s.noted().map(|r| r.name().into()),
            diagnosis: match s.diagnosis.load(Relaxed) {
                0 => None,
                code => Some(Diagnosis::from(code).into()),
            },
        };
        (s.generation.load(Acquire) == generation).then_some(status)
    }
}

impl LinkGroup {
    /// What the status document says of it.
    pub(super) fn status(&self) -> LinkGroupStatus {
        let of_state = self.group.with(|s| (s.counts(), s.failures(), s.senders()));
        let (counts, failures, senders) = of_state.unwrap_or_default();
        let end = |gid: Gid, qpn: Qpn| LinkEnd {
            gid: gid.to_string(),
            qpn: qpn.get(),
        };
        let ports = self.ports.iter().zip(senders).enumerate();
        let links = ports.filter_map(|(lane, (port, connections))| {
            let port = port.as_ref()?;
            let known = self.llc.as_ref().and_then(|llc| llc.link(lane));
            let (number, up) = known.unwrap_or((0, false));
            Some(GroupLinkStatus {
                number,
                up,
                device: port.choice.device.clone(),
                port: port.choice.port,
                own: end(port.choice.gid, port.qpn()),
                peer: port.remote.map(|r| end(r.gid, r.qpn)),
                mtu: port.remote.map(|r| r.mtu.bytes()),
                connections,
            })
        });
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        LinkGroupStatus {
            id: self.id,
            role: match self.role {
                Role::Client => GroupRole::Client,
                Role::Server => GroupRole::Server,
            },
            state: match &self.llc {
                _ if self.down.is_some() => GroupState::Down,
                Some(llc) if llc.is_up() => GroupState::Up,
                Some(llc) if !llc.is_confirming() => GroupState::Closing,
                _ => GroupState::Confirming,
            },
            down: self.down.map(|why| why.to_string().into()),
            // An end for another reason breaks the queue pairs, too.
            failure: failures
                .into_iter()
                .flatten()
                .find(|f| self.down.is_some() && *f != Failure::Flushed)
                .map(|f| f.to_string().into()),
            links: links.collect(),
            peer_system_id: self.peer_name.to_string(),
            connections: count(self.slots.len()),
            max_conns: self.max_conns.into(),
            cdc_sent: counts.cdc_sent,
            cdc_received: counts.cdc_received,
            bytes_written: counts.bytes_written,
            rmb_chunks: count(self.rmbs.chunks()),
            send_chunks: count(self.mirrors.chunks()),
            idle_since_unix_ms: self
                .llc
                .as_ref()
                .and_then(Llc::idle_since)
                .and_then(|at| SystemTime::now().checked_sub(at.elapsed()))
                .and_then(|at| at.duration_since(SystemTime::UNIX_EPOCH).ok())
                .and_then(|at| u64::try_from(at.as_millis()).ok()),
        }
    }

    /// What the status document says of a connection.
    pub(super) fn connection(&self, slot: u32) -> Option<RdmaStatus> {
        let b = self.slots.get(&slot)?;
        let end = |alert_token: u32, rmb: Rtoken| RdmaEnd {
            alert_token,
            rkey: rmb.rkey,
            addr: rmb.addr,
        };
        let peer = self.group.with(|s| s.get(slot)?.conn.peer().copied());
        Some(RdmaStatus {
            link_group: self.id,
            slot,
            first_contact: b.first,
            own: end(b.end.alert_token, b.end.rtoken),
            peer: peer.flatten().map(|p| end(p.token, p.rmb)),
        })
    }
}
