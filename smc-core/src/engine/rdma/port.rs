//! Our end of one link of a group: a port of a device, a queue pair on it, and the RMBs that are registered for it.
//!
//! Each RMB is a memory region of its own: the peer tells RMBs apart by their rkeys where a link is added, and can write
//! nothing else.

use core::ptr::NonNull;
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use super::super::connect::Connecting;
use super::super::device::Device;
use crate::fabric::verbs::{
    self, Access, Choice, Path, ProtectionDomain, Queue, QueuePair, RECEIVE_DEPTH, Region,
    SEND_DEPTH,
};
use crate::link::llc::{End, NewEnd};
use crate::link::pair::Pair;
use crate::ring::pool::Token;
use crate::ring::{CHUNK, Ring};
use crate::sys;
use crate::wire::{Gid, Mac, Mtu, Psn, Qpn, Rtoken};

/// The peer's end of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine) struct Remote {
    pub(in crate::engine) gid: Gid,
    pub(in crate::engine) qpn: Qpn,
    pub(in crate::engine) psn: Psn,
    /// The smaller one of both ends'.
    pub(in crate::engine) mtu: Mtu,
}

/// See the module comment.
pub(super) struct Port {
    pub(super) choice: Choice,
    pub(super) remote: Option<Remote>,
    /// The step to RTR, where it is under way.
    connecting: Option<(Remote, Connecting)>,
    domain: Arc<ProtectionDomain>,
    qp: Arc<QueuePair>,
    psn: Psn,
    mtu: Mtu,
    rmbs: HashMap<Token, Region>,
}

impl Port {
    /// One with a queue pair in INIT, receives posted, and what of it is the group's.
    pub(super) fn new(device: &Device, choice: &Choice) -> verbs::Result<(Port, Pair)> {
        let mtu = device.mtu(choice.port)?;
        let queue = Queue::new(device.context(), SEND_DEPTH + RECEIVE_DEPTH)?;
        let qp = Arc::new(QueuePair::new(device.domain(), &queue, &queue)?);
        qp.to_init(choice.port)?;
        qp.post_receives()?;
        let port = Port {
            choice: choice.clone(),
            remote: None,
            connecting: None,
            domain: device.domain().clone(),
            qp: qp.clone(),
            psn: random_psn(),
            mtu,
            rmbs: HashMap::new(),
        };
        let mirrors = Vec::new();
        Ok((port, Pair { qp, queue, mirrors }))
    }

    /// What LLC and CLC say of it.
    pub(super) fn end(&self) -> NewEnd {
        NewEnd {
            end: End {
                mac: Mac(self.choice.mac),
                gid: self.choice.gid,
                qpn: self.qpn(),
            },
            mtu: self.mtu,
            psn: self.psn,
        }
    }

    pub(super) fn qpn(&self) -> Qpn {
        Qpn::new(self.qp.number()).unwrap_or_default()
    }

    /// Whether it is on this device.
    pub(super) fn is_on(&self, device: &Device) -> bool {
        Arc::ptr_eq(&self.domain, device.domain())
    }

    /// Whether it is at this port of this device.
    pub(super) fn is_at(&self, choice: &Choice) -> bool {
        (&self.choice.device, self.choice.port) == (&choice.device, choice.port)
    }

    /// The peer's end is known: it may write and send to us once this is done. That is at once (true) if its GID stands
    /// for `neighbour`, an address of which it is known how to get there; else [`Port::connected`] will tell.
    pub(super) fn connect(
        &mut self,
        remote: Remote,
        neighbour: Option<IpAddr>,
    ) -> verbs::Result<bool> {
        let path = Path {
            port: self.choice.port,
            gid_index: self.choice.gid_index,
            // A gateway between the two hosts makes no difference to what we send on the wire but this.
            hop_limit: 64,
            mtu: remote.mtu,
            peer_gid: remote.gid,
            peer_number: remote.qpn.get(),
            peer_psn: remote.psn.get(),
        };
        if neighbour == Some(remote.gid.ip()) {
            self.qp.to_rtr(&path)?;
            self.remote = Some(remote);
            return Ok(true);
        }
        self.connecting = Some((remote, Connecting::start(&self.qp, path)?));
        Ok(false)
    }

    /// Whether what [`Port::connect`] has begun has ended, and how. Told once.
    pub(super) fn connected(&mut self) -> Option<verbs::Result<()>> {
        let (remote, result) = match &self.connecting {
            Some((remote, connecting)) => (*remote, connecting.result()?),
            None => return None,
        };
        self.connecting = None;
        Some(result.map(|()| self.remote = Some(remote)))
    }

    /// Whether that is still under way.
    pub(super) fn is_connecting(&self) -> bool {
        let under_way = |(_, c): &(Remote, Connecting)| c.result().is_none();
        self.connecting.as_ref().is_some_and(under_way)
    }

    /// We may send.
    pub(super) fn ready_to_send(&self) -> verbs::Result<()> {
        self.qp.to_rts(self.psn.get())
    }

    /// Nothing is sent or written any more, in either direction.
    pub(super) fn stop(&self) {
        if let Err(e) = self.qp.to_error() {
            log::debug!("{e}");
        }
    }

    /// An error of an operation on this device that was not the library's.
    pub(super) fn error(&self, operation: &'static str, errno: sys::Errno) -> verbs::Error {
        verbs::Error::of(operation, self.domain.context(), errno)
    }

    /// The RToken of an RMB, which is registered unless it has been before.
    ///
    /// # Safety
    /// `ring` is the one of `token`, and stays mapped until the port is dropped.
    pub(super) unsafe fn rmb(&mut self, ring: Ring, token: Token) -> verbs::Result<Rtoken> {
        let region = match self.rmbs.get(&token) {
            Some(region) => region,
            None => {
                let (at, _) = ring.span(0, 1);
                let base = NonNull::new(at).ok_or_else(|| self.error("RMB", sys::Errno::EINVAL))?;
                let len = token.size as usize;
                // SAFETY: promised by the caller.
                let region = unsafe { Region::register(&self.domain, base, len, Access::Remote) }?;
                self.rmbs.entry(token).or_insert(region)
            }
        };
        Ok(Rtoken {
            rkey: region.rkey(),
            addr: region.address(),
        })
    }

    /// Registers the chunk that a mirror lies in, for us to send from.
    ///
    /// # Safety
    /// `ring` is the one of `token`, a part of a chunk that stays mapped until the region is dropped.
    pub(super) unsafe fn mirrors(&self, ring: Ring, token: Token) -> verbs::Result<Region> {
        let (at, _) = ring.span(0, 1);
        // SAFETY: a chunk begins `offset` bytes before its ring.
        let base = NonNull::new(unsafe { at.sub(token.offset as usize) });
        let base = base.ok_or_else(|| self.error("mirror", sys::Errno::EINVAL))?;
        // SAFETY: promised by the caller.
        unsafe { Region::register(&self.domain, base, CHUNK as usize, Access::Local) }
    }
}

/// A random initial packet sequence number.
fn random_psn() -> Psn {
    let mut bytes = [0; 3];
    if sys::random(&mut bytes).is_err() {
        bytes = [0x5a, 0x17, 0x01];
    }
    Psn::from_be_bytes(bytes)
}
