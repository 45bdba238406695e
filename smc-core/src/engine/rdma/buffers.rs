//! What connections use of a link group: slots, RMBs and mirrors.
//!
//! Buffers are cut from chunks of 4 MiB, and registered for each link: RMBs one by one, mirrors (what is sent is
//! written there first) by the chunk. An RMB is not taken back by DELETE RKEY when its connection ends: it stays known
//! to the peer, and is used for the next connection.

use core::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use super::super::peer::reset_block;
use super::super::tasks::Refusal;
use super::LinkGroup;
use crate::fabric::shm::SLOTS;
use crate::fabric::verbs;
use crate::link::conn::{self, Conn};
use crate::link::rtoken::Rtokens;
use crate::link::state::{self, Entry};
use crate::link::{LANES, Lane};
use crate::ring::pool::{Rmb, RmbPool, Token};
use crate::ring::{CHUNK, MIN_SIZE, Ring, size_class};
use crate::sys;
use crate::wire::clc::{ConnEnd, Diagnosis};
use crate::wire::{RmbSize, Rtoken};

/// How long the peer may take to close a connection that we have closed, as long as TCP waits for a FIN then. A peer
/// that knows of our close writes nothing more into the RMB.
const CLOSE_TIME: Duration = Duration::from_secs(60);
/// The share of that after which it is looked for such connections again, if the engine is awake.
const CLOSE_LOOKS: u32 = 12;

/// What one connection uses.
pub(super) struct Buffers {
    pub(super) rmb: Token,
    /// The RTokens of that.
    pub(super) tokens: Rtokens,
    mirror: Option<Token>,
    /// The link that CLC speaks of.
    lane: Lane,
    /// What it says of our end.
    pub(super) end: ConnEnd,
    /// The group was made for this connection.
    pub(super) first: bool,
    /// Since when it is known that only the peer has to close it.
    closed: Option<Instant>,
}

impl LinkGroup {
    /// What can't be had of the host.
    pub(super) fn shortage(&self, operation: &'static str, errno: sys::Errno) -> verbs::Error {
        match self.ports.iter().flatten().next() {
            Some(port) => port.error(operation, errno),
            None => verbs::Error::new(operation, verbs::Object::QueuePair(self.id), errno),
        }
    }

    /// Takes slot and RMB for a connection on a link. Returns the slot, and what CLC says of our end.
    pub(in crate::engine) fn prepare(
        &mut self,
        size: u32,
        lane: Lane,
    ) -> verbs::Result<(u32, ConnEnd)> {
        let slot = (0..SLOTS)
            .find(|slot| !self.slots.contains_key(slot))
            .ok_or_else(|| self.shortage("slots", sys::Errno::ENOSPC))?;
        let rmb = take(&mut self.rmbs, size).map_err(|errno| self.shortage("RMB", errno))?;
        let named = self.tokens(rmb.token, rmb.ring).and_then(|tokens| {
            match (self.port(lane), tokens[lane]) {
                (Some(port), Some(token)) => Ok((tokens, port.end(), token)),
                _ => Err(self.shortage("link", sys::Errno::ENOENT)),
            }
        });
        let (tokens, own, rtoken) = named.inspect_err(|_| self.rmbs.free(rmb.token))?;
        let Some(size) = RmbSize::from_bytes(rmb.token.size) else {
            return Err(self.shortage("RMB", sys::Errno::EINVAL));
        };
        self.life += 1;
        let end = ConnEnd {
            gid: own.end.gid,
            mac: own.end.mac,
            qpn: own.end.qpn,
            psn: own.psn,
            mtu: own.mtu,
            rtoken,
            rmb_size: size,
            rmb_index: 1,
            alert_token: state::token(slot, self.life),
        };
        reset_block(self.link, slot);
        let [out, _] = &self.link.block(slot).dir;
        // The group wants to hear of all that is sent: see `Link::tell`.
        out.rx.notify.store(1, Relaxed);
        let entry = Entry {
            conn: Conn::new(size, lane),
            token: end.alert_token,
            lane,
            element: 0,
            mirror: (0, 0),
        };
        self.group.with(|s| s.insert(slot, entry));
        self.slots.insert(
            slot,
            Buffers {
                rmb: rmb.token,
                tokens,
                mirror: None,
                lane,
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

    /// The RTokens of an RMB on all links.
    pub(super) fn tokens(&mut self, rmb: Token, ring: Ring) -> verbs::Result<Rtokens> {
        let mut tokens = [None; LANES];
        for (token, port) in tokens.iter_mut().zip(&mut self.ports) {
            if let Some(port) = port {
                // SAFETY: the pool gave them together, and is retired after the ports are dropped.
                *token = Some(unsafe { port.rmb(ring, rmb) }?);
            }
        }
        Ok(tokens)
    }

    /// The peer's end of a connection is known. Returns the rings for the stream.
    pub(in crate::engine) fn complete(
        &mut self,
        slot: u32,
        peer: &ConnEnd,
    ) -> Result<(Ring, Ring), Refusal> {
        let element = peer.rmb_addr().map(|addr| addr - peer.rtoken.addr);
        let lane = self.slots.get(&slot).map(|b| b.lane);
        let (Some(element), Some(lane)) = (element, lane) else {
            return Err(self.shortage("connection", sys::Errno::EINVAL).into());
        };
        // The link of the negotiation may be gone again.
        let at = self.group.with(|s| s.get(slot).map(|e| e.lane)).flatten();
        let at = at.unwrap_or(lane);
        let mut rmb = Some(peer.rtoken);
        if let Some(llc) = &mut self.llc {
            let mut tokens = [None; LANES];
            tokens[lane] = rmb;
            llc.add_rtoken(tokens)
                .map_err(|_| Refusal::Decline(Diagnosis::ErrRtok))?;
            let known = llc.rtokens().get(lane, peer.rtoken.rkey);
            if at != lane {
                rmb = known.and_then(|tokens| tokens[at]);
            }
        }
        let rmb = rmb.ok_or_else(|| self.shortage("RToken", sys::Errno::ENOENT))?;
        let mirror_size = peer.rmb_size.bytes().clamp(MIN_SIZE, CHUNK);
        let mirror = take(&mut self.mirrors, mirror_size);
        let mirror = mirror.map_err(|errno| self.shortage("mirror", errno))?;
        self.register_mirror(mirror.token, mirror.ring)
            .inspect_err(|_| self.mirrors.free(mirror.token))?;
        let rx = self.slots.get_mut(&slot).and_then(|b| {
            b.mirror = Some(mirror.token);
            self.rmbs.ring(b.rmb)
        });
        let rx = rx.ok_or_else(|| self.shortage("RMB", sys::Errno::EINVAL))?;
        if self.forgets {
            let out = &self.link.block(slot).dir[0];
            out.rx.spare.store(conn::SPARE, Relaxed);
        }
        self.group.with(|s| {
            if let Some(entry) = s.get(slot) {
                entry.element = element;
                entry.mirror = (mirror.token.chunk as usize, mirror.token.offset as usize);
                entry.conn.connect(conn::Peer {
                    token: peer.alert_token,
                    rmb: Rtoken {
                        addr: rmb.addr.wrapping_add(element),
                        ..rmb
                    },
                    size: peer.rmb_size,
                    mirror_size: mirror.token.size,
                    slot: self.immediate.then(|| state::slot(peer.alert_token)),
                    forgets: self.forgets,
                });
            }
        });
        Ok((mirror.ring, rx))
    }

    /// Registers the chunk of a mirror for all links.
    pub(super) fn register_mirror(&self, mirror: Token, ring: Ring) -> verbs::Result<()> {
        for (lane, port) in self.ports.iter().enumerate() {
            if let Some(port) = port
                && !self.group.has_mirrors(lane, mirror.chunk)
            {
                // SAFETY: the pool gave them together, and is retired after the group's queue pairs are gone.
                let region = unsafe { port.mirrors(ring, mirror) }?;
                self.group.add_mirrors(lane, mirror.chunk, region);
            }
        }
        Ok(())
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

/// A ring from a pool whose chunks no other process maps.
fn take(pool: &mut RmbPool, size: u32) -> sys::Result<Rmb> {
    let (rmb, new) = pool.alloc(size_class(size))?;
    if let Some(new) = new {
        crate::fds::close_private(new.fd);
    }
    Ok(rmb)
}

/// [`CLOSE_TIME`]. Tests can't wait for so long.
fn close_time() -> Duration {
    let hook = crate::env::get("XSMC_TEST_CLOSE_MS").and_then(|v| v.to_str()?.parse().ok());
    hook.map_or(CLOSE_TIME, Duration::from_millis)
}
