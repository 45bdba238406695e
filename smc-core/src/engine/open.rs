//! Opening connections on links, and everything else that peers say about them.

use core::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};

use super::peer::{Slot, reset_block, wire};
use super::run::{Engine, Then};
use super::{COUNTERS, ipc};
use crate::fabric::mapping;
use crate::fabric::shm::{BELL_PAGE_LEN, BELLS, SLOTS, TX_CLOSED};
use crate::negotiate::{Endpoint, Found, Message};
use crate::node::Link;
use crate::observe::Reason;
use crate::ring::Ring;
use crate::ring::pool::Token;
use crate::stream::{self, PUBLISHED, Sock};
use crate::{fds, ready, sys};

/// Connections of one link that are being opened at the same time.
const MOST_OPENING: usize = 32;
/// The engine turns to others when one peer's messages have taken this long.
const TURN_NS: u64 = 10_000_000;

impl Engine {
    /// Opens a connection to the node that published its other end.
    pub(super) fn open(
        &mut self,
        s: &'static Sock,
        generation: u32,
        endpoint: Endpoint,
        found: Found,
        rmb_size: u32,
    ) {
        let me = (s.index.load(Relaxed), generation);
        // A link serves both ends, whichever dialled. With ourselves there is one for each end; this is the opener's.
        let to_self = found.node == self.shared.id;
        let known = self.peers.iter().position(|p| {
            p.as_ref().is_some_and(|p| {
                p.node == found.node
                    && !p.is_gone()
                    && (p.side() == 0 || !to_self)
                    && p.slots.len() < 2000
            })
        });
        let i = match known.map_or_else(|| self.connect_peer(found.node), Ok) {
            Ok(i) => i,
            Err(r) => return s.note(r),
        };
        let Some(p) = self.peers[i].as_mut() else {
            return;
        };
        p.waiting.push_back((me.0, me.1, endpoint, found, rmb_size));
        self.send_opens(i);
    }

    /// Sends what waits to be opened on link `i`, as far as it may be: two engines that fill each other's
    /// sockets would wait for each other.
    pub(super) fn send_opens(&mut self, i: usize) {
        loop {
            let Some(p) = self.peers[i].as_mut() else {
                return;
            };
            let asked = p.slots.values().filter(|s| s.opening.is_some()).count();
            if !p.open || p.is_gone() || asked >= MOST_OPENING {
                return;
            }
            let Some((index, generation, endpoint, found, size)) = p.waiting.pop_front() else {
                return;
            };
            self.send_open(i, (index, generation), endpoint, found, size);
        }
    }

    pub(super) fn send_open(
        &mut self,
        i: usize,
        me: (u32, u32),
        endpoint: Endpoint,
        found: Found,
        rmb_size: u32,
    ) {
        let Some(s) = stream::POOL.get(me.0) else {
            return;
        };
        let Some(p) = self.peers[i].as_mut() else {
            return;
        };
        p.tidy();
        let Some(slot) = p.free_slot() else {
            return s.note(Reason::LinkFull);
        };
        let Ok((_, token)) = p.rmb(rmb_size) else {
            return s.note(Reason::NoMemory);
        };
        reset_block(p.link, slot);
        let m = Message::Open {
            slot,
            endpoint: endpoint.mirror(),
            acceptor_slot: found.slot,
            acceptor_gen: found.slot_gen,
            opener_sock: me.0,
            rmb: wire(token),
        };
        p.slots.insert(
            slot,
            Slot {
                rmb: token,
                opening: Some(me),
            },
        );
        log::debug!(
            "{} -> {}: asking for slot {slot}",
            endpoint.local_addr(),
            endpoint.peer_addr()
        );
        COUNTERS.opens_sent.fetch_add(1, Relaxed);
        if ipc::send(p.fd, &m, &[]).is_err() {
            self.lose(i);
        }
    }

    pub(super) fn peer_readable(&mut self, i: usize) {
        let start = sys::now_ns();
        for n in 0..64 {
            // A peer that does not read our answers makes each of them wait.
            if n > 0 && sys::now_ns() - start > TURN_NS {
                return;
            }
            let Some(Some(p)) = self.peers.get(i) else {
                return;
            };
            if p.gone {
                return;
            }
            let fd = p.fd;
            let leaving = p.link.leaving.load(Relaxed);
            match ipc::recv(fd) {
                Ok(Some(_)) if leaving => {}
                Ok(Some(mut d)) => {
                    let ok = match Message::decode(&d.bytes[..d.len]) {
                        Ok(m) => m.fds() == d.fd_count && self.message(i, m, &mut d),
                        Err(_) => false,
                    };
                    if !ok {
                        COUNTERS.count(Reason::PeerViolation);
                        return self.leave_link(i);
                    }
                }
                Err(sys::Errno::EAGAIN) => return,
                _ => return self.lose(i),
            }
        }
    }

    /// One message of peer `i`. False: it breaks the rules, the link ends.
    pub(super) fn message(&mut self, i: usize, m: Message, d: &mut ipc::Datagram) -> bool {
        let Some(p) = self.peers[i].as_mut() else {
            return true;
        };
        match m {
            Message::HelloAck { greeting } if !p.open => {
                let Some(page) = d.take(0) else { return false };
                let bells = mapping::map_sealed(page, BELL_PAGE_LEN);
                fds::close_private(page);
                let Ok(bells) = bells else { return false };
                self.greeted(i, &greeting, bells);
                self.send_bells(i);
                self.join_twins(i);
                self.send_opens(i);
                true
            }
            Message::Bell { index } if (index as usize) < BELLS => {
                let Some(fd) = d.take(0) else { return false };
                if !sys::is_eventfd(fd) {
                    fds::close_private(fd);
                    return false;
                }
                let known = &p.link.bell_fds[index as usize];
                if known.load(Relaxed) == 0 {
                    known.store(fd + 1, Relaxed);
                } else {
                    // Announced twice. The first stays: a thread may be ringing it right now.
                    fds::close_private(fd);
                }
                true
            }
            Message::Chunk { index, len } => {
                let Some(fd) = d.take(0) else { return false };
                let r = p.map_chunk(index, len, fd);
                fds::close_private(fd);
                r.is_ok()
            }
            Message::Open {
                slot,
                endpoint,
                acceptor_slot,
                acceptor_gen,
                rmb,
                ..
            } => {
                let theirs = slot < SLOTS && (slot >= SLOTS / 2) != (p.side() == 1);
                let Some(tx) = p.ring(&rmb).filter(|_| p.open && theirs) else {
                    return false;
                };
                let answer =
                    match self.accept_open(i, slot, &endpoint, (acceptor_slot, acceptor_gen), tx) {
                        Ok(t) => Message::Accept { slot, rmb: wire(t) },
                        Err(r) => Message::Decline {
                            slot,
                            reason: r.map_or(0, Reason::code),
                        },
                    };
                let Some(p) = self.peers[i].as_ref() else {
                    return true;
                };
                ipc::send(p.fd, &answer, &[]).is_ok()
            }
            Message::Accept { slot, rmb } => {
                log::debug!("slot {slot}: accepted");
                let Some(tx) = p.ring(&rmb) else { return false };
                let Some(Slot { opening, rmb: own }) = p.slots.get_mut(&slot) else {
                    return false;
                };
                let (Some((index, generation)), own) = (opening.take(), *own) else {
                    return false;
                };
                let Some(rx) = p.ring_of_own(own) else {
                    return false;
                };
                let link = p.link;
                let Some(s) = stream::POOL.get(index) else {
                    return false;
                };
                if ready::prepare(s).is_ok() && attach(s, generation, link, slot, tx, rx) {
                    COUNTERS.opens_accepted.fetch_add(1, Relaxed);
                    self.attached(s);
                } else {
                    // Closed meanwhile, or can't: the peer sees us leave and does the same.
                    let block = link.block(slot);
                    let side = (link.side.load(Relaxed) & 1) as usize;
                    block.dir[side]
                        .tx
                        .flags
                        .fetch_or(TX_CLOSED, core::sync::atomic::Ordering::SeqCst);
                    link.tell(slot, block.dir[side].rx.notify.load(Relaxed));
                }
                self.send_opens(i);
                true
            }
            Message::Decline { slot, reason } => {
                log::debug!("slot {slot}: declined, reason {reason}");
                COUNTERS.opens_declined.fetch_add(1, Relaxed);
                if p.slots.get(&slot).is_none_or(|s| s.opening.is_none()) {
                    return false;
                }
                let Some(Slot { opening, rmb }) = p.slots.remove(&slot) else {
                    return false;
                };
                p.pool.free(rmb);
                if let Some((index, generation)) = opening
                    && reason != 0
                    && let Some(s) = stream::POOL.get(index)
                    && s.generation.load(Relaxed) == generation
                {
                    s.note(Reason::PeerDeclined);
                }
                self.send_opens(i);
                true
            }
            Message::Recall {
                slot,
                generation,
                at,
            } => {
                if slot >= SLOTS {
                    return false;
                }
                if let Some(s) = p.link.sock(slot) {
                    s.recalled(at);
                }
                ipc::send(
                    p.fd,
                    &Message::Done {
                        slot,
                        generation,
                        what: 1,
                    },
                    &[],
                )
                .is_ok()
            }
            Message::Done {
                slot, generation, ..
            }
            | Message::Nack {
                slot, generation, ..
            } => {
                if let Some(s) = p.link.sock(slot) {
                    s.rx.recall_done.store(generation, SeqCst);
                }
                true
            }
            Message::Downgrade { slot, .. } => {
                if let Some(s) = p.link.sock(slot) {
                    self.leaving.push((s.downgrade_rx(), Then::Stay));
                }
                slot < SLOTS
            }
            Message::Left { slot } => {
                if let Some(s) = p.link.sock(slot) {
                    self.follow(s);
                } else {
                    p.tidy();
                }
                slot < SLOTS
            }
            Message::Ping { seq } => ipc::send(p.fd, &Message::Pong { seq }, &[]).is_ok(),
            Message::Pong { .. } => true,
            _ => false,
        }
    }

    /// Whether we have asked for this stream's upgrade and wait for the answer.
    pub(super) fn opening(&self, index: u32, generation: u32) -> bool {
        let me = (index, generation);
        self.peers.iter().flatten().any(|p| {
            p.slots.values().any(|s| s.opening == Some(me))
                || p.waiting.iter().any(|w| (w.0, w.1) == me)
        })
    }

    /// Verifies what the peer claims and attaches our end. `Err(None)`: both opened, and ours stands.
    pub(super) fn accept_open(
        &mut self,
        i: usize,
        slot: u32,
        endpoint: &Endpoint,
        which: (u32, u32),
        tx: Ring,
    ) -> Result<Token, Option<Reason>> {
        let s = stream::POOL.get(which.0).ok_or(Some(Reason::Closed))?;
        if s.generation.load(Relaxed) != which.1 || s.state.load(Relaxed) != PUBLISHED {
            return Err(Some(Reason::Closed));
        }
        let same = s.with_fd(|fd| {
            Endpoint::of_socket(fd).as_ref() == Ok(endpoint)
                && sys::TcpInfo::of(fd).is_ok_and(|t| t.established())
        });
        if same != Some(true) {
            return Err(Some(Reason::Closed));
        }
        if s.pinned.load(Relaxed) != 0 {
            return Err(s.noted().or(Some(Reason::PeerRequest)));
        }
        let ours = self.opening(which.0, which.1);
        if ours && (endpoint.local, endpoint.local_port) < (endpoint.peer, endpoint.peer_port) {
            return Err(None);
        }
        ready::prepare(s).map_err(Some)?;
        let size = self.rmb_size(s, endpoint);
        let p = self.peers[i].as_mut().ok_or(Some(Reason::LinkLost))?;
        p.tidy();
        if !p.link.slots[slot as usize].load(Acquire).is_null() {
            return Err(Some(Reason::PeerViolation));
        }
        if let Some(old) = p.slots.remove(&slot) {
            // The opener reuses the slot, so both had left it.
            p.pool.free(old.rmb);
        }
        let (rx, token) = p.rmb(size).map_err(|_| Some(Reason::NoMemory))?;
        p.slots.insert(
            slot,
            Slot {
                rmb: token,
                opening: None,
            },
        );
        if !attach(s, which.1, p.link, slot, tx, rx) {
            p.slots.remove(&slot);
            p.pool.free(token);
            return Err(Some(Reason::Closed));
        }
        self.attached(s);
        Ok(token)
    }

    pub(super) fn rmb_size(&self, s: &Sock, endpoint: &Endpoint) -> u32 {
        let at = crate::policy::Endpoint {
            local: endpoint.local_addr(),
            peer: endpoint.peer_addr(),
            role: s.role(),
        };
        self.policy.decide(&self.identity, &at).tunables.rmb_size
    }
}

/// Attaches a published stream, if it is still the one of `generation`.
fn attach(s: &Sock, generation: u32, link: &'static Link, slot: u32, tx: Ring, rx: Ring) -> bool {
    let (Some(_t), Some(_r)) = (s.tx.lock.lock(), s.rx.lock.lock()) else {
        return false;
    };
    if s.generation.load(Relaxed) != generation || s.state.load(Relaxed) != PUBLISHED {
        return false;
    }
    s.attach(link, slot, tx, rx);
    true
}
