//! What `smctl` is told of a link group.

use std::time::SystemTime;

use super::LinkGroup;
use crate::fabric::verbs::Failure;
use crate::link::llc::{Llc, Role};
use crate::observe::status::{
    GroupLinkStatus, GroupRole, GroupState, LinkEnd, LinkGroupStatus, RdmaEnd, RdmaStatus,
};
use crate::wire::{Gid, Qpn, Rtoken};

impl LinkGroup {
    /// What the status document says of it.
    pub(in crate::engine) fn status(&self) -> LinkGroupStatus {
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
    pub(in crate::engine) fn connection(&self, slot: u32) -> Option<RdmaStatus> {
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
