//! A link group as the engine keeps it: its ends of links, buffers, LLC.
//!
//! The data path is [`Group`]; here is what happens around it: running the LLC state machine, and the end. How links
//! come and go is in `lanes`, our end of one in `port`, what connections use in `buffers`, what `smctl` is told in
//! `status`.

mod buffers;
mod lanes;
mod port;
mod status;

use core::sync::atomic::Ordering::{Acquire, SeqCst};
use std::collections::HashMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::device::Device;
use super::outbox::Outbox;
use super::tasks::IMMEDIATE;
use crate::fabric::mapping;
use crate::fabric::shm::{SEGMENT_LEN, SLOTS, TX_ABORT, TX_CLOSED};
use crate::fabric::verbs::{self, Choice};
use crate::link::conn::SPARE;
use crate::link::llc::{Action, Config, Down, Llc, RkeyError, Role};
use crate::link::rtoken::Rtokens;
use crate::link::{Group, LANES, Lane, table};
use crate::negotiate::clc::Terms;
use crate::node::{LINK_POOL, Link};
use crate::ring::pool::{RmbPool, Token};
use crate::sys;
use crate::wire::clc::ConnEnd;
use crate::wire::{Gid, Rtoken, SystemId};
use buffers::Buffers;
use lanes::Wanted;
use port::Port;
pub(super) use port::Remote;

/// Place of a group's first link.
pub(super) const FIRST: Lane = 0;

/// How long a group that is down may take to send what it has to say last.
const LAST_WORDS: Duration = Duration::from_millis(500);
/// After how long a group that is down is looked at again while a queue pair is still being connected.
const CONNECTING_LOOK: Duration = Duration::from_millis(50);
/// After how long a full send queue is tried again.
const FULL_TIME: Duration = Duration::from_millis(1);

/// How long after a change of links peers that forget are asked how far they have read, unless they say before that they
/// have changed, too; then after twice the time, up to eight times.
const INQUIRY_TIME: Duration = Duration::from_millis(250);

/// See the module comment.
pub(super) struct LinkGroup {
    group: Box<Group>,
    link: &'static Link,
    link_pool_index: u32,
    seg: *mut u8,
    /// Names it for people: number of its first queue pair.
    id: u32,
    ports: [Option<Port>; LANES],
    llc: Option<Llc>,
    pub(super) role: Role,
    /// Who the peer is, as its first CLC message says: a Linux client leaves it out there,
    pub(super) peer: SystemId,
    /// but not in the next one. For people.
    pub(super) peer_name: SystemId,
    /// The first queue pair has been connected, or couldn't be, and the handshake doesn't know.
    connected: Option<verbs::Result<()>>,
    /// Server: the client's GIDs, the first one from its Proposal, which names it.
    pub(super) client_gids: Vec<Gid>,
    max_conns: u8,
    /// Both ends are xsmc's, and understand immediate data.
    immediate: bool,
    /// See [`crate::link::conn::Peer::forgets`].
    forgets: bool,
    /// LLC messages for which the send queue had no room.
    unsent: Outbox,
    rmbs: RmbPool,
    mirrors: RmbPool,
    slots: HashMap<u32, Buffers>,
    /// When to look for connections that the peer doesn't close.
    closed_look: Instant,
    /// RMBs that the peer knows.
    known: Vec<Token>,
    life: u32,
    /// CDC messages that had come by each link at the last look.
    heard: [u64; LANES],
    /// A queue pair for one more link.
    wanted: Option<Wanted>,
    /// When peers that forget are asked again how far they have read, and how often they have been.
    inquiry: Option<(Instant, u32)>,
    /// In the dispatcher's table.
    listed: bool,
    /// When it is dropped whatever is outstanding.
    until: Option<Instant>,
    pub(super) down: Option<Down>,
    /// What the log says of the queue pairs.
    failures: [Option<verbs::Failure>; LANES],
    /// CONFIRM LINK has been done: the peer takes the connection that it was done for as established.
    pub(super) confirmed_link: bool,
    /// The TCP connections were reset after that.
    reset: bool,
    /// RMBs whose CONFIRM RKEY has come to an end.
    pub(super) confirmed: Vec<(Rtokens, Result<(), RkeyError>)>,
}

impl LinkGroup {
    /// A group with a queue pair in INIT, receives posted.
    pub(super) fn new(
        device: &Device,
        choice: &Choice,
        role: Role,
        peer: SystemId,
        epfd: i32,
    ) -> verbs::Result<LinkGroup> {
        let (port, pair) = Port::new(device, choice)?;
        let no_memory = |errno| port.error("mmap", errno);
        let seg = sys::map(-1, SEGMENT_LEN).map_err(no_memory)?;
        let Some((link_pool_index, link)) = LINK_POOL.alloc() else {
            mapping::retire(seg, SEGMENT_LEN);
            return Err(no_memory(sys::Errno::ENOMEM));
        };
        let group = Group::new(link, epfd).and_then(|group| {
            link.init_fixed(seg.cast(), (&raw const *group).cast_mut());
            group.add_pair(FIRST, pair)?;
            group.link_up(FIRST);
            Ok(group)
        });
        let group = group.map_err(|errno| {
            mapping::retire(seg, SEGMENT_LEN);
            LINK_POOL.free(link_pool_index);
            no_memory(errno)
        })?;
        Ok(LinkGroup {
            group,
            link,
            link_pool_index,
            seg,
            id: port.qpn().get(),
            ports: [Some(port), None],
            llc: None,
            role,
            peer,
            peer_name: peer,
            connected: None,
            client_gids: Vec::new(),
            max_conns: 0,
            immediate: false,
            forgets: false,
            unsent: Outbox::default(),
            rmbs: RmbPool::default(),
            mirrors: RmbPool::default(),
            slots: HashMap::new(),
            closed_look: Instant::now(),
            known: Vec::new(),
            life: 0,
            heard: [0; LANES],
            wanted: None,
            inquiry: None,
            listed: false,
            until: None,
            down: None,
            failures: [None; LANES],
            confirmed_link: false,
            reset: false,
            confirmed: Vec::new(),
        })
    }

    /// What both sides have agreed to.
    pub(super) fn agree(&mut self, terms: Terms) {
        self.immediate = terms.features & IMMEDIATE != 0;
        self.forgets = !self.immediate && terms.max_links > 1;
    }

    pub(super) fn link(&self) -> &'static Link {
        self.link
    }

    fn port(&self, lane: Lane) -> Option<&Port> {
        self.ports.get(lane)?.as_ref()
    }

    /// Has completions reported to the engine, as event `data`.
    pub(super) fn watch(&self, data: u64) {
        self.group.watch(data);
    }

    /// See [`Group::watched`].
    pub(super) fn watched(&self) -> bool {
        self.group.watched()
    }

    /// Whether one more connection may use it.
    pub(super) fn has_room(&self) -> bool {
        self.down.is_none()
            && self.llc.as_ref().is_some_and(Llc::is_up)
            && self.slots.len() < usize::from(self.max_conns)
    }

    /// Connections on it, those included that are being set up or closed.
    pub(super) fn connections(&self) -> usize {
        self.slots.len()
    }

    /// What CLC says of our end of a connection.
    pub(super) fn end(&self, slot: u32) -> Option<ConnEnd> {
        self.slots.get(&slot).map(|b| b.end)
    }

    /// Takes the events of the completion channel.
    pub(super) fn clear_events(&self) {
        self.group.clear_events();
    }

    /// The peer's end of the first link is known: see [`Port::connect`]. [`LinkGroup::connected`] will tell.
    pub(super) fn connect(
        &mut self,
        remote: Remote,
        neighbour: Option<IpAddr>,
    ) -> verbs::Result<bool> {
        let Some(port) = &mut self.ports[FIRST] else {
            return Err(self.shortage("link", sys::Errno::ENOENT));
        };
        if port.connect(remote, neighbour)? {
            return self.enlist().map(|()| true);
        }
        Ok(false)
    }

    /// Whether what [`LinkGroup::connect`] has begun has ended, and how. Told once.
    pub(super) fn connected(&mut self) -> Option<verbs::Result<()>> {
        self.connected.take()
    }

    /// The peer may write and send to us.
    fn enlist(&mut self) -> verbs::Result<()> {
        self.listed = table::add(&self.group);
        if self.listed {
            Ok(())
        } else {
            Err(self.shortage("link groups", sys::Errno::ENOSPC))
        }
    }

    /// We may send on a link.
    pub(super) fn ready_to_send(&self, lane: Lane) -> verbs::Result<()> {
        self.port(lane).map_or(Ok(()), Port::ready_to_send)
    }

    /// Starts the LLC part of first contact: CONFIRM LINK.
    pub(super) fn confirm_link(
        &mut self,
        max_links: u8,
        max_conns: u8,
        keepalive: Option<Duration>,
    ) {
        self.max_conns = max_conns;
        let Some(end) = self.port(FIRST).map(|port| port.end().end) else {
            return;
        };
        let config = Config {
            role: self.role,
            version: crate::wire::llc::Version::V2,
            end,
            link_uid: self.id,
            max_links,
            max_conns,
            keepalive,
            idle: idle_time(self.role),
        };
        let mut llc = Llc::new(config, Instant::now());
        // What CLC has said already.
        for slot in self.slots.keys() {
            let rmb = self.group.with(|s| {
                let entry = s.get(*slot)?;
                let rmb = entry.conn.peer()?.rmb;
                let addr = rmb.addr.wrapping_sub(entry.element);
                Some(Rtoken { addr, ..rmb })
            });
            if let Some(Some(rmb)) = rmb {
                let _ = llc.add_rtoken([Some(rmb), None]);
            }
        }
        self.llc = Some(llc);
        self.run_llc();
    }

    /// Announces the RMB of a connection, unless the peer knows it. Gives what its answer will be about.
    pub(super) fn confirm_rkey(&mut self, slot: u32) -> Option<Rtokens> {
        let b = self.slots.get(&slot)?;
        if self.known.contains(&b.rmb) {
            return None;
        }
        let tokens = b.tokens;
        if let Some(llc) = &mut self.llc {
            llc.confirm_rkey(tokens, Instant::now());
            self.run_llc();
        }
        Some(tokens)
    }

    /// Whether the announcement of an RMB still waits for its turn.
    pub(super) fn rkey_waits(&self, tokens: Rtokens) -> bool {
        self.llc.as_ref().is_some_and(|llc| llc.rkey_waits(tokens))
    }

    /// The peer knows the RMB of a connection: CLC has told it.
    pub(super) fn announced(&mut self, slot: u32) {
        if let Some(b) = self.slots.get(&slot)
            && !self.known.contains(&b.rmb)
        {
            self.known.push(b.rmb);
        }
    }

    /// Whether CONFIRM LINK is done.
    pub(super) fn is_up(&self) -> bool {
        self.llc.as_ref().is_some_and(Llc::is_up)
    }

    /// The peer has reset a TCP connection, and not said by RDMA that it ends: see [`Llc::doubt`].
    pub(super) fn doubt(&mut self) {
        // What came before says nothing.
        self.note_received();
        if let Some(llc) = &mut self.llc {
            llc.doubt(Instant::now());
            self.run_llc();
        }
    }

    /// The stream that a connection was made for is gone: the connection is closed.
    pub(super) fn abandon(&mut self, slot: u32) {
        let out = &self.link.block(slot).dir[0];
        out.tx.flags.fetch_or(TX_CLOSED | TX_ABORT, SeqCst);
        self.group.kick(slot);
    }

    /// The peer will say nothing more about a connection.
    pub(super) fn lost(&self, slot: u32) {
        self.group.with(|s| {
            if let Some(entry) = s.get(slot) {
                entry.conn.lost();
            }
        });
    }

    /// Whether it will be known soon which links connections may use.
    pub(super) fn is_changing(&self) -> bool {
        let changing = |llc: &Llc| llc.is_adding() || llc.in_doubt();
        self.llc.as_ref().is_some_and(changing)
    }

    fn note_received(&mut self) {
        let heard = self.group.with(|s| s.heard()).unwrap_or_default();
        let before = core::mem::replace(&mut self.heard, heard);
        if let Some(llc) = &mut self.llc {
            for lane in (0..LANES).filter(|lane| heard[*lane] != before[*lane]) {
                llc.note_received(lane, Instant::now());
            }
        }
    }

    /// Does what has become due. Returns when to look again.
    pub(super) fn tend(&mut self) -> Option<Instant> {
        self.look_for_connected();
        self.note_received();
        if self.group.take_attention() {
            // What broke a queue pair may complete after what was flushed for it.
            self.group.poll();
            let (mut messages, mut ended, mut failures) = (Vec::new(), Vec::new(), [None; LANES]);
            let mut moved = false;
            self.group.with(|s| {
                s.take_llc(|lane, m| messages.push((lane, m.to_vec())));
                s.take_ended(|slot| ended.push(slot));
                failures = s.failures();
                moved = core::mem::take(&mut s.moved);
            });
            let now = Instant::now();
            if let Some((at, _)) = self.inquiry.as_mut().filter(|_| moved) {
                *at = now;
            }
            let before = core::mem::replace(&mut self.failures, failures);
            for (failure, before) in failures.iter().zip(before) {
                // A queue pair that is ended is flushed, too.
                let told = self.down.is_some() && *failure == Some(verbs::Failure::Flushed);
                if let Some(failure) = failure.filter(|f| !told && before != Some(*f)) {
                    log::info!("link group {}: {failure}", self.id);
                }
            }
            if let Some(llc) = &mut self.llc {
                for (lane, m) in &messages {
                    if let Err(e) = llc.receive(*lane, m, now) {
                        log::debug!("LLC message ignored: {e}");
                    }
                }
                for lane in (0..LANES).filter(|lane| failures[*lane].is_some()) {
                    llc.link_failed(lane, now);
                }
            } else if failures[FIRST].is_some() {
                self.down = Some(Down::LinkFailed);
            }
            for slot in ended {
                self.release(slot);
            }
        }
        if let Some(llc) = &mut self.llc {
            let now = Instant::now();
            if llc.next_timeout().is_some_and(|at| at <= now) {
                llc.handle_timeout(now);
            }
        }
        self.give_up_closed(Instant::now());
        self.run_llc();
        if self.down.is_some() && !core::mem::replace(&mut self.reset, true) {
            self.reset_tcp();
        }
        self.send_llc();
        if !self.unsent.is_empty() {
            let stuck = self.unsent.stuck(Instant::now());
            if let (Some(llc), Some(lane)) = (self.llc.as_mut(), stuck) {
                llc.link_failed(lane, Instant::now());
                log::info!("link group {}: a link takes no messages", self.id);
                self.unsent.forget(lane);
                self.run_llc();
            }
            // Completions of what fills the send queue need not wake us.
            self.group.poll();
            return Some(Instant::now() + FULL_TIME);
        }
        let inquiry = self.inquire();
        let timeout = self.llc.as_ref().and_then(Llc::next_timeout);
        timeout.into_iter().chain(inquiry).min()
    }

    /// Asks how far the peer has read, where it is time. Returns when to do so again.
    fn inquire(&mut self) -> Option<Instant> {
        let now = Instant::now();
        if let Some((at, count)) = self.inquiry
            && now >= at
        {
            let again = self.group.inquire() && count < SPARE;
            self.inquiry = again.then(|| (now + INQUIRY_TIME * (1 << count.min(3)), count + 1));
        }
        self.inquiry.map(|(at, _)| at)
    }

    /// Resets the TCP connections of a group that is down: the peer may not know of it by RDMA.
    fn reset_tcp(&self) {
        for s in (0..SLOTS).filter_map(|slot| self.link.sock(slot)) {
            s.reset_tcp(self.link);
        }
    }

    /// Sends the LLC messages that wait, in order, as far as the send queue has room.
    fn send_llc(&mut self) {
        let group = &self.group;
        self.unsent
            .send(Instant::now(), |lane, bytes| group.send_llc(lane, bytes));
    }

    pub(super) fn run_llc(&mut self) {
        while let Some(action) = self.llc.as_mut().and_then(Llc::poll) {
            match action {
                Action::ReadyToSend(lane) => {
                    if let Err(e) = self.ready_to_send(lane) {
                        log::warn!("{e}");
                        self.group.fail(lane, verbs::Failure::LocalProtection);
                    }
                }
                Action::Send(lane, bytes) => {
                    self.unsent.push(lane, bytes);
                    self.send_llc();
                }
                Action::Established => {
                    log::debug!("link group {}: up", self.id);
                    self.confirmed_link = true;
                }
                Action::OfferLink(lane) => self.wanted = Some(Wanted { lane, peer: None }),
                Action::AnswerLink { lane, peer } => {
                    let peer = Some(peer);
                    self.wanted = Some(Wanted { lane, peer });
                }
                Action::ConnectLink { lane, peer } => self.connect_link(lane, peer),
                Action::LinkUp(lane) => {
                    log::debug!("link group {}: one more link", self.id);
                    self.group.link_up(lane);
                }
                Action::DropLink(lane) => self.drop_link(lane),
                Action::ConfirmRkeyDone { tokens, result } => {
                    let slot = self.slots.iter().find(|(_, b)| b.tokens == tokens);
                    if result.is_ok()
                        && let Some(slot) = slot.map(|(slot, _)| *slot)
                    {
                        self.announced(slot);
                    }
                    self.confirmed.push((tokens, result));
                }
                Action::DeleteRkeyDone { .. } => {}
                Action::AbortConnections => self.group.abort_all(),
                Action::Down(why) => {
                    log::info!("link group {}: {why}", self.id);
                    self.go_down(why);
                }
            }
        }
    }

    fn go_down(&mut self, why: Down) {
        self.down = Some(why);
        for lane in 0..LANES {
            self.group.fail(lane, verbs::Failure::Flushed);
        }
    }

    /// Whether nothing refers to it any more and its last messages have gone, or had time to: it may be dropped.
    /// Gives the time to ask again if that is soon.
    pub(super) fn over(&mut self) -> Result<bool, Instant> {
        if self.down.is_none() || self.link.used.load(SeqCst) != 0 {
            return Ok(false);
        }
        let now = Instant::now();
        if self.ports.iter().flatten().any(Port::is_connecting) {
            return Err(now + CONNECTING_LOOK);
        }
        let until = *self.until.get_or_insert(now + LAST_WORDS);
        if self.group.is_quiet() || now >= until {
            Ok(true)
        } else {
            Err(now + Duration::from_millis(5))
        }
    }

    /// Ends the group at once.
    pub(super) fn terminate(&mut self) {
        if self.down.is_some() {
            return;
        }
        match &mut self.llc {
            Some(llc) if llc.is_up() => {
                llc.terminate(crate::wire::llc::DeleteReason::PROGRAM);
                self.run_llc();
            }
            // Nothing could be sent.
            _ => self.go_down(Down::LinkFailed),
        }
    }
}

impl Drop for LinkGroup {
    fn drop(&mut self) {
        if self.listed {
            table::remove(&self.group);
        }
        debug_assert_eq!(self.link.used.load(Acquire), 0);
        // The devices must have let go of the memory before it is given back.
        for lane in 0..LANES {
            self.drop_port(lane);
        }
        self.rmbs.retire();
        self.mirrors.retire();
        mapping::retire(self.seg, SEGMENT_LEN);
        LINK_POOL.free(self.link_pool_index);
    }
}

/// How long a group is kept without connections. Tests can't wait for so long.
fn idle_time(role: Role) -> Duration {
    let hook = crate::env::get("XSMC_TEST_GROUP_IDLE_MS").and_then(|v| v.to_str()?.parse().ok());
    hook.map_or(role.idle_time(), Duration::from_millis)
}
