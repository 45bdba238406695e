//! What connections use of a link group: slots, RMBs and mirrors.
//!
//! Buffers are cut from chunks of 4 MiB, each registered once as a memory region of this group's: RMBs from
//! chunks that the peer may write, mirrors (what is sent is written there first) from chunks that it may not.
//! All RMBs of a chunk share its rkey, so an RMB is not taken back by DELETE RKEY when its connection ends: it
//! stays known to the peer, and is used for the next connection.

use core::ptr::NonNull;
use core::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::{Duration, Instant};

use super::super::peer::reset_block;
use super::super::tasks::Refusal;
use super::LinkGroup;
use crate::fabric::shm::{SLOTS, TX_ABORT, TX_BLOCKED, TX_CLOSED};
use crate::fabric::verbs::{self, Access, Region};
use crate::link::conn::{self, Conn};
use crate::link::llc::Llc;
use crate::link::state::{self, Entry};
use crate::ring::pool::Token;
use crate::ring::{CHUNK, MIN_SIZE, Ring, size_class};
use crate::sys;
use crate::wire::clc::{ConnEnd, Diagnosis};
use crate::wire::{Mac, Mtu, RmbSize, Rtoken};

/// How long the peer may take to close a connection that we have closed, as long as TCP waits for a FIN then. A peer
/// that knows of our close writes nothing more into the RMB.
const CLOSE_TIME: Duration = Duration::from_secs(60);
/// The share of that after which it is looked for such connections again, if the engine is awake.
const CLOSE_LOOKS: u32 = 12;

/// What one connection uses.
pub(super) struct Buffers {
    pub(super) rmb: Token,
    mirror: Option<Token>,
    /// What CLC says of our end.
    pub(super) end: ConnEnd,
    /// The group was made for this connection.
    pub(super) first: bool,
    /// Since when it is known that only the peer has to close it.
    closed: Option<Instant>,
}

impl LinkGroup {
    /// Whether one more connection may use it.
    pub(in crate::engine) fn has_room(&self) -> bool {
        self.down.is_none()
            && self.llc.as_ref().is_some_and(Llc::is_up)
            && self.slots.len() < usize::from(self.max_conns)
    }

    /// Connections on it, those included that are being set up or closed.
    pub(in crate::engine) fn connections(&self) -> usize {
        self.slots.len()
    }

    /// What CLC says of our end of a connection.
    pub(in crate::engine) fn end(&self, slot: u32) -> Option<ConnEnd> {
        self.slots.get(&slot).map(|b| b.end)
    }

    /// Takes slot and RMB for a connection. Returns the slot, and what CLC says of our end.
    pub(in crate::engine) fn prepare(
        &mut self,
        size: u32,
        mtu: Mtu,
    ) -> verbs::Result<(u32, ConnEnd)> {
        let no_room = |errno| verbs::Error::of("slots", self.domain.context(), errno);
        let slot = (0..SLOTS)
            .find(|slot| !self.slots.contains_key(slot))
            .ok_or_else(|| no_room(sys::Errno::ENOSPC))?;
        let (rmb, new) = self.rmbs.alloc(size_class(size)).map_err(no_room)?;
        if let Some(new) = new {
            crate::fds::close_private(new.fd);
            let registered = self.register(rmb.ring, rmb.token, Access::Remote);
            let region = registered.inspect_err(|_| self.rmbs.free(rmb.token))?;
            self.rmb_regions.push(region);
        }
        let size = RmbSize::from_bytes(rmb.token.size);
        let region = self.rmb_regions.get(rmb.token.chunk as usize);
        let (Some(size), Some(region)) = (size, region) else {
            return Err(no_room(sys::Errno::EINVAL));
        };
        self.life += 1;
        let end = ConnEnd {
            gid: self.device.gid,
            mac: Mac(self.device.mac),
            qpn: self.qpn(),
            psn: self.psn,
            mtu,
            rtoken: Rtoken {
                rkey: region.rkey(),
                addr: region.address() + u64::from(rmb.token.offset),
            },
            rmb_size: size,
            rmb_index: 1,
            alert_token: state::token(slot, self.life),
        };
        reset_block(self.link, slot);
        let [out, inc] = &self.link.block(slot).dir;
        // The group wants to hear of everything: see `Link::tell`, and `Sock::consume`.
        out.rx.notify.store(1, Relaxed);
        inc.tx.flags.store(TX_BLOCKED, Relaxed);
        let entry = Entry {
            conn: Conn::new(size),
            token: end.alert_token,
            mirror: (0, 0),
        };
        self.group.with(|s| s.insert(slot, entry));
        self.slots.insert(
            slot,
            Buffers {
                rmb: rmb.token,
                mirror: None,
                end,
                first: self.llc.is_none(),
                closed: None,
            },
        );
        if let Some(llc) = &mut self.llc {
            llc.set_connections(self.slots.len(), Instant::now());
        }
        Ok((slot, end))
    }

    fn register(&self, ring: Ring, token: Token, access: Access) -> verbs::Result<Region> {
        let (at, _) = ring.span(0, 1);
        // SAFETY: the chunk begins `offset` bytes before its ring, and stays mapped until the group is
        // buried, which drops the regions first.
        unsafe {
            let base = NonNull::new_unchecked(at.sub(token.offset as usize));
            Region::register(&self.domain, base, CHUNK as usize, access)
        }
    }

    /// The peer knows the RMB: CLC has told it.
    pub(in crate::engine) fn announced(&mut self, rtoken: Rtoken) {
        if !self.known.contains(&rtoken) {
            self.known.push(rtoken);
        }
    }

    /// The peer's end of a connection is known. Returns the rings for the stream.
    pub(in crate::engine) fn complete(
        &mut self,
        slot: u32,
        peer: &ConnEnd,
    ) -> Result<(Ring, Ring), Refusal> {
        let no_memory = |errno| verbs::Error::of("mirror", self.domain.context(), errno);
        let addr = peer
            .rmb_addr()
            .ok_or_else(|| no_memory(sys::Errno::EINVAL))?;
        let mirror_size = peer.rmb_size.bytes().clamp(MIN_SIZE, CHUNK);
        let (mirror, new) = self
            .mirrors
            .alloc(size_class(mirror_size))
            .map_err(no_memory)?;
        if let Some(new) = new {
            crate::fds::close_private(new.fd);
            let region = self.register(mirror.ring, mirror.token, Access::Local)?;
            let index = self.group.with(|s| s.add_region(region));
            self.mirror_regions
                .push(index.ok_or_else(|| no_memory(sys::Errno::EDEADLK))?);
        }
        let region = self
            .mirror_regions
            .get(mirror.token.chunk as usize)
            .copied();
        let rx = self.slots.get_mut(&slot).and_then(|b| {
            b.mirror = Some(mirror.token);
            self.rmbs.ring(b.rmb)
        });
        let (Some(region), Some(rx)) = (region, rx) else {
            return Err(no_memory(sys::Errno::EINVAL).into());
        };
        let rtoken = Rtoken {
            addr,
            ..peer.rtoken
        };
        if let Some(llc) = &mut self.llc {
            llc.add_rtoken(rtoken)
                .map_err(|_| Refusal::Decline(Diagnosis::ErrRtok))?;
        }
        self.group.with(|s| {
            if let Some(entry) = s.get(slot) {
                entry.mirror = (region, mirror.token.offset as usize);
                entry.conn.connect(conn::Peer {
                    token: peer.alert_token,
                    rmb: rtoken,
                    size: peer.rmb_size,
                    mirror_size: mirror.token.size,
                    slot: self.immediate.then(|| state::slot(peer.alert_token)),
                });
            }
        });
        Ok((mirror.ring, rx))
    }

    /// The stream that a connection was made for is gone: the connection is closed.
    pub(in crate::engine) fn abandon(&mut self, slot: u32) {
        let out = &self.link.block(slot).dir[0];
        out.tx.flags.fetch_or(TX_CLOSED | TX_ABORT, SeqCst);
        self.group.kick(slot);
    }

    /// The peer will say nothing more about a connection.
    pub(in crate::engine) fn lost(&self, slot: u32) {
        self.group.with(|s| {
            if let Some(entry) = s.get(slot) {
                entry.conn.lost();
            }
        });
    }

    /// Gives up connections that the peer doesn't close: what it says of them later is of nobody's. The engine is not woken
    /// for it, but does turns for the keepalive and for new connections, if nothing else.
    pub(super) fn give_up_closed(&mut self, now: Instant) {
        if now < self.closed_look {
            return;
        }
        let time = close_time();
        self.closed_look = now + time / CLOSE_LOOKS;
        let (slots, mut due) = (&mut self.slots, Vec::new());
        self.group.with(|state| {
            for (slot, buffers) in slots {
                let since = buffers.closed.unwrap_or(now);
                buffers.closed = state.awaits_close(*slot).then_some(since);
                if buffers.closed.is_some() && now >= since + time {
                    due.push(*slot);
                }
            }
        });
        for slot in due {
            log::debug!("the peer doesn't close the connection of slot {slot}");
            self.lost(slot);
            self.group.kick(slot);
        }
    }

    /// Gives back what a connection used: it has ended, or never began.
    pub(in crate::engine) fn release(&mut self, slot: u32) {
        self.group.with(|s| s.remove(slot));
        if let Some(b) = self.slots.remove(&slot) {
            self.rmbs.free(b.rmb);
            if let Some(m) = b.mirror {
                self.mirrors.free(m);
            }
        }
        if let Some(llc) = &mut self.llc {
            llc.set_connections(self.slots.len(), Instant::now());
        }
    }
}

/// [`CLOSE_TIME`]. Tests can't wait for so long.
fn close_time() -> Duration {
    let hook = crate::env::get("XSMC_TEST_CLOSE_MS").and_then(|v| v.to_str()?.parse().ok());
    hook.map_or(CLOSE_TIME, Duration::from_millis)
}
