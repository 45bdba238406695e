//! What `smctl` is told of a link group.

use std::time::SystemTime;

use super::LinkGroup;
use crate::fabric::verbs;
use crate::link::llc::{Llc, Role};
use crate::observe::status::{
    GroupRole, GroupState, LinkEnd, LinkGroupStatus, RdmaEnd, RdmaStatus,
};
use crate::wire::{Gid, Qpn, Rtoken};

impl LinkGroup {
    /// What the status document says of it.
    pub(in crate::engine) fn status(&self) -> LinkGroupStatus {
        let (counts, failure) = self
            .group
            .with(|s| (s.counts(), s.failure()))
            .unwrap_or_default();
        let end = |gid: Gid, qpn: Qpn| LinkEnd {
            gid: gid.to_string(),
            qpn: qpn.get(),
        };
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        LinkGroupStatus {
            id: self.qpn().get(),
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
            // An end for another reason breaks the queue pair, too.
            failure: failure
                .filter(|f| *f != verbs::Failure::Flushed)
                .map(|f| f.to_string().into()),
            device: self.device.device.clone(),
            port: self.device.port,
            own: end(self.device.gid, self.qpn()),
            peer: self.remote.map(|r| end(r.gid, r.qpn)),
            mtu: self.remote.map(|r| r.mtu.bytes()),
            peer_system_id: self.remote.map_or(self.peer, |r| r.system_id).to_string(),
            connections: count(self.slots.len()),
            max_conns: self.max_conns.into(),
            cdc_sent: counts.cdc_sent,
            cdc_received: counts.cdc_received,
            bytes_written: counts.bytes_written,
            rmb_chunks: count(self.rmb_regions.len()),
            send_chunks: count(self.mirror_regions.len()),
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
            link_group: self.qpn().get(),
            slot,
            first_contact: b.first,
            own: end(b.end.alert_token, b.end.rtoken),
            peer: peer.flatten().map(|p| end(p.token, p.rmb)),
        })
    }
}
