//! A link to a peer as the engine keeps it: its buffers and its slots.
//!
//! A slot of a link is used by one connection. The side that opens chooses the slot from its half
//! (side 0 the lower, side 1 the upper), so that the two never choose the same. Each side marks the slot
//! closed in shared memory when its connection leaves; buffers and slot are used again once both have.

use core::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};
use std::collections::{HashMap, VecDeque};

use super::ipc;
use crate::fabric::mapping;
use crate::fabric::shm::{SLOTS, TX_CLOSED};
use crate::negotiate::{Endpoint, Found, Message, NodeId, RmbToken};
use crate::node::Link;
use crate::ring::pool::{RmbPool, Token};
use crate::ring::{CHUNK, Ring, size_class};
use crate::{fds, sys};

/// A connection to our socket that has not said yet what it is.
pub(super) struct Incoming {
    pub(super) fd: i32,
    /// When it came, ns.
    pub(super) since: u64,
}

/// One connection on a link, as the engine knows it.
pub(super) struct Slot {
    pub(super) rmb: Token,
    /// We asked, and wait for the answer: stream index and generation.
    pub(super) opening: Option<(u32, u32)>,
}

/// A link with its control state.
pub(super) struct Peer {
    pub(super) fd: i32,
    pub(super) link: &'static Link,
    pub(super) link_pool_index: u32,
    pub(super) table_index: u32,
    /// Greeted both ways.
    pub(super) open: bool,
    /// Opens that wait for the greeting.
    pub(super) waiting: VecDeque<(u32, u32, Endpoint, Found, u32)>,
    pub(super) node: NodeId,
    pub(super) pid: u32,
    pub(super) program: [u8; 16],
    pub(super) pool: RmbPool,
    pub(super) chunks: Vec<Option<*mut u8>>,
    pub(super) slots: HashMap<u32, Slot>,
    pub(super) seg: *mut u8,
    pub(super) bells: *mut u8,
    /// The peer has closed its end.
    pub(super) gone: bool,
    /// Since when the link has carried nothing, ns; 0: it carries something.
    pub(super) idle_since: u64,
}

impl Peer {
    pub(super) fn is_gone(&self) -> bool {
        self.gone || self.link.leaving.load(Relaxed)
    }

    pub(super) fn slots_used(&self) -> u32 {
        self.slots.len() as u32
    }

    pub(super) fn chunk_count(&self) -> u32 {
        (self.pool.chunks() + self.chunks.iter().flatten().count()) as u32
    }

    pub(super) fn side(&self) -> u32 {
        self.link.side.load(Relaxed)
    }

    /// Frees what connections that both sides have left were using.
    pub(super) fn tidy(&mut self) {
        let link = self.link;
        if self.slots.len() <= link.used.load(SeqCst) as usize {
            return;
        }
        let (side, dead) = (self.side() as usize, link.is_dead());
        let pool = &mut self.pool;
        self.slots.retain(|&slot, s| {
            let ours = s.opening.is_none() && link.slots[slot as usize].load(Acquire).is_null();
            let theirs =
                dead || link.block(slot).dir[1 - side].tx.flags.load(Acquire) & TX_CLOSED != 0;
            if ours && theirs {
                pool.free(s.rmb);
            }
            !(ours && theirs)
        });
    }

    /// The lowest free slot of our half: used slots stay close together in memory.
    pub(super) fn free_slot(&self) -> Option<u32> {
        let half = SLOTS / 2;
        let base = self.side() * half;
        (base..base + half).find(|slot| !self.slots.contains_key(slot))
    }

    /// Takes an RMB for a connection to receive into, announcing its chunk if it is new.
    pub(super) fn rmb(&mut self, size: u32) -> sys::Result<(Ring, Token)> {
        let (rmb, new) = self.pool.alloc(size_class(size))?;
        if let Some(n) = new {
            let r = ipc::send(
                self.fd,
                &Message::Chunk {
                    index: n.index,
                    len: CHUNK,
                },
                &[n.fd],
            );
            fds::close_private(n.fd);
            r?;
        }
        Ok((rmb.ring, rmb.token))
    }

    /// The peer's ring that a token names.
    pub(super) fn ring(&self, t: &RmbToken) -> Option<Ring> {
        let base = (*self.chunks.get(t.chunk as usize)?)?;
        let end = t.offset.checked_add(t.size)?;
        if !t.size.is_power_of_two() || end > CHUNK {
            return None;
        }
        // SAFETY: within the chunk, a sealed mapping of CHUNK bytes that lives as long as the link.
        Some(unsafe { Ring::new(base.add(t.offset as usize), t.size) })
    }

    pub(super) fn map_chunk(&mut self, index: u32, len: u32, fd: i32) -> sys::Result<()> {
        let i = index as usize;
        if len != CHUNK || i > self.chunks.len() || i >= 4096 {
            return Err(sys::Errno::EINVAL);
        }
        let p = mapping::map_sealed(fd, CHUNK as usize)?;
        if i == self.chunks.len() {
            self.chunks.push(None);
        }
        if self.chunks[i].is_some() {
            mapping::retire(p, CHUNK as usize);
            return Err(sys::Errno::EEXIST);
        }
        self.chunks[i] = Some(p);
        Ok(())
    }

    /// The ring of ours that a token names.
    pub(super) fn ring_of_own(&self, t: Token) -> Option<Ring> {
        self.pool.ring(t)
    }
}

pub(super) fn wire(t: Token) -> RmbToken {
    RmbToken {
        chunk: t.chunk,
        offset: t.offset,
        size: t.size,
    }
}

/// Clears a connection block for a new connection.
pub(super) fn reset_block(link: &Link, slot: u32) {
    for d in &link.block(slot).dir {
        d.tx.prod.store(0, Relaxed);
        d.tx.flags.store(0, Relaxed);
        d.tx.switches.store(0, Relaxed);
        d.tx.urgent.store(0, Relaxed);
        d.rx.cons.store(0, Relaxed);
        d.rx.flags.store(0, Relaxed);
        d.rx.passed.store(0, Relaxed);
        d.rx.unbounded.store(0, Relaxed);
        d.rx.notify.store(0, Relaxed);
        d.rx.spare.store(0, Relaxed);
    }
}
