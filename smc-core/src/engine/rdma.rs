//! A link group as the engine keeps it: device, queue pair, buffers, LLC.
//!
//! The data path is [`Group`]; here is what happens around it: making the queue pair, running the LLC state machine,
//! and the end. What connections use of the group is in `buffers`, what `smctl` is told of it in `status`.

mod buffers;
mod status;

use core::sync::atomic::Ordering::{Acquire, SeqCst};
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::connect::Connecting;
use super::device::Device;
use super::outbox::Outbox;
use crate::fabric::mapping;
use crate::fabric::shm::{SEGMENT_LEN, SLOTS};
use crate::fabric::verbs::{
    self, Choice, Path, ProtectionDomain, Queue, QueuePair, RECEIVE_DEPTH, Region, SEND_DEPTH,
};
use crate::link::Group;
use crate::link::llc::{Action, Config, Down, Llc, RkeyError, Role};
use crate::link::table;
use crate::node::{LINK_POOL, Link};
use crate::ring::pool::RmbPool;
use crate::sys;
use crate::wire::{Gid, Mac, Mtu, Psn, Qpn, Rtoken, SystemId};
use buffers::Buffers;

/// How long a group that is down may take to send what it has to say last.
const LAST_WORDS: Duration = Duration::from_millis(500);
/// After how long a group that is down is looked at again while its queue pair is still being connected.
const CONNECTING_LOOK: Duration = Duration::from_millis(50);
/// After how long a full send queue is tried again.
const FULL_TIME: Duration = Duration::from_millis(1);

/// The peer's end of a link, as its Accept or Confirm says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Remote {
    /// For people. A Linux client leaves it out of the Proposal, from which [`LinkGroup::peer`] is.
    pub(super) system_id: SystemId,
    pub(super) gid: Gid,
    pub(super) qpn: Qpn,
    pub(super) psn: Psn,
    pub(super) mtu: Mtu,
}

/// See the module comment.
pub(super) struct LinkGroup {
    group: Box<Group>,
    link: &'static Link,
    link_pool_index: u32,
    seg: *mut u8,
    device: Choice,
    domain: Arc<ProtectionDomain>,
    llc: Option<Llc>,
    pub(super) role: Role,
    pub(super) peer: SystemId,
    pub(super) remote: Option<Remote>,
    /// Server: the client's GID, from its Proposal.
    pub(super) client_gid: Option<Gid>,
    pub(super) psn: Psn,
    /// The step to RTR is under way,
    connecting: Option<(Remote, Connecting)>,
    /// or has ended, and nobody knows.
    connected: Option<verbs::Result<()>>,
    max_conns: u8,
    /// Both ends are xsmc's, and understand immediate data.
    pub(super) immediate: bool,
    /// LLC messages for which the send queue had no room.
    unsent: Outbox,
    rmbs: RmbPool,
    rmb_regions: Vec<Region>,
    mirrors: RmbPool,
    /// Index in the group's list of regions, by chunk.
    mirror_regions: Vec<usize>,
    slots: HashMap<u32, Buffers>,
    /// When to look for connections that the peer doesn't close.
    closed_look: Instant,
    /// RMBs that the peer knows.
    known: Vec<Rtoken>,
    life: u32,
    /// CDC messages that had come at the last look.
    received: u64,
    /// In the dispatcher's table.
    listed: bool,
    /// When it is dropped whatever is outstanding.
    until: Option<Instant>,
    pub(super) down: Option<Down>,
    /// What the log says of the queue pair.
    failure: Option<verbs::Failure>,
    /// CONFIRM LINK has been done: the peer takes the connection that it was done for as established.
    pub(super) confirmed_link: bool,
    /// The TCP connections were reset after that.
    reset: bool,
    /// RMBs whose CONFIRM RKEY has come to an end.
    pub(super) confirmed: Vec<(Rtoken, Result<(), RkeyError>)>,
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
        let queue = Queue::new(device.context(), SEND_DEPTH + RECEIVE_DEPTH)?;
        let qp = QueuePair::new(device.domain(), &queue, &queue)?;
        qp.to_init(choice.port)?;
        qp.post_receives()?;
        let no_memory = |errno| verbs::Error::of("mmap", device.context(), errno);
        let seg = sys::map(-1, SEGMENT_LEN).map_err(no_memory)?;
        let Some((link_pool_index, link)) = LINK_POOL.alloc() else {
            mapping::retire(seg, SEGMENT_LEN);
            return Err(no_memory(sys::Errno::ENOMEM));
        };
        let group = Group::new(link, Arc::new(qp), queue, epfd);
        link.init_fixed(seg.cast(), (&raw const *group).cast_mut());
        Ok(LinkGroup {
            group,
            link,
            link_pool_index,
            seg,
            device: choice.clone(),
            domain: device.domain().clone(),
            llc: None,
            role,
            peer,
            remote: None,
            client_gid: None,
            psn: random_psn(),
            connecting: None,
            connected: None,
            max_conns: 0,
            immediate: false,
            unsent: Outbox::default(),
            rmbs: RmbPool::default(),
            rmb_regions: Vec::new(),
            mirrors: RmbPool::default(),
            mirror_regions: Vec::new(),
            slots: HashMap::new(),
            closed_look: Instant::now(),
            known: Vec::new(),
            life: 0,
            received: 0,
            listed: false,
            until: None,
            down: None,
            failure: None,
            confirmed_link: false,
            reset: false,
            confirmed: Vec::new(),
        })
    }

    pub(super) fn link(&self) -> &'static Link {
        self.link
    }

    /// Our queue pair.
    pub(super) fn qpn(&self) -> Qpn {
        Qpn::new(self.group.qp().number()).unwrap_or_default()
    }

    /// Has completions reported to the engine, as event `data`.
    pub(super) fn watch(&self, data: u64) {
        self.group.watch(data);
    }

    /// See [`Group::watched`].
    pub(super) fn watched(&self) -> bool {
        self.group.watched()
    }

    /// Device, port and GID.
    pub(super) fn choice(&self) -> &Choice {
        &self.device
    }

    /// Takes the events of the completion channel.
    pub(super) fn clear_events(&self) {
        if let Err(e) = self.group.queue().clear_events() {
            log::warn!("{e}");
        }
    }

    /// The peer's end of the link is known: it may write and send to us once this is done. That is at once (true) if its
    /// GID stands for `neighbour`, an address of which it is known how to get there; else
    /// [`LinkGroup::connected`] will tell.
    pub(super) fn connect(
        &mut self,
        remote: Remote,
        neighbour: Option<IpAddr>,
    ) -> verbs::Result<bool> {
        let path = Path {
            port: self.device.port,
            gid_index: self.device.gid_index,
            // A gateway between the two hosts makes no difference to what we send on the wire but this.
            hop_limit: 64,
            mtu: remote.mtu,
            peer_gid: remote.gid,
            peer_number: remote.qpn.get(),
            peer_psn: remote.psn.get(),
        };
        if neighbour == Some(remote.gid.ip()) {
            self.group.qp().to_rtr(&path)?;
            return self.enlist(remote).map(|()| true);
        }
        self.connecting = Some((remote, Connecting::start(self.group.qp(), path)?));
        Ok(false)
    }

    /// Whether what [`LinkGroup::connect`] has begun has ended, and how. Told once.
    pub(super) fn connected(&mut self) -> Option<verbs::Result<()>> {
        self.connected.take()
    }

    fn is_connecting(&self) -> bool {
        let ended = |(_, c): &(Remote, Connecting)| c.result().is_some();
        self.connecting.as_ref().is_some_and(|c| !ended(c))
    }

    /// Takes notice of the end of what [`LinkGroup::connect`] has begun.
    fn look_for_connected(&mut self) {
        if let Some((remote, result)) = self
            .connecting
            .as_ref()
            .and_then(|(remote, c)| Some((*remote, c.result()?)))
        {
            self.connecting = None;
            self.connected = Some(result.and_then(|()| self.enlist(remote)));
        }
    }

    /// The peer may write and send to us.
    fn enlist(&mut self, remote: Remote) -> verbs::Result<()> {
        self.remote = Some(remote);
        self.listed = table::add(&self.group);
        if self.listed {
            Ok(())
        } else {
            Err(verbs::Error::of(
                "link groups",
                self.domain.context(),
                sys::Errno::ENOSPC,
            ))
        }
    }

    /// We may send.
    pub(super) fn ready_to_send(&self) -> verbs::Result<()> {
        self.group.qp().to_rts(self.psn.get())
    }

    /// Starts the LLC part of first contact: CONFIRM LINK.
    pub(super) fn confirm_link(
        &mut self,
        max_links: u8,
        max_conns: u8,
        keepalive: Option<Duration>,
    ) {
        self.max_conns = max_conns;
        let config = Config {
            role: self.role,
            version: crate::wire::llc::Version::V2,
            mac: Mac(self.device.mac),
            gid: self.device.gid,
            qpn: self.qpn(),
            link_uid: self.qpn().get(),
            max_links,
            max_conns,
            keepalive,
            idle: idle_time(self.role),
        };
        let mut llc = Llc::new(config, Instant::now());
        // The RMB for which the group is made.
        for slot in self.slots.keys().copied() {
            let peer = self.group.with(|s| s.get(slot)?.conn.peer().copied());
            if let Some(peer) = peer.flatten() {
                let _ = llc.add_rtoken(peer.rmb);
            }
        }
        self.llc = Some(llc);
        self.run_llc();
    }

    /// Announces an RMB, unless the peer knows it. True: it does.
    pub(super) fn confirm_rkey(&mut self, rtoken: Rtoken) -> bool {
        if self.known.contains(&rtoken) {
            return true;
        }
        if let Some(llc) = &mut self.llc {
            llc.confirm_rkey(rtoken, Instant::now());
            self.run_llc();
        }
        false
    }

    /// Whether the announcement of an RMB still waits for its turn.
    pub(super) fn rkey_waits(&self, rtoken: Rtoken) -> bool {
        self.llc.as_ref().is_some_and(|llc| llc.rkey_waits(rtoken))
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

    /// See [`Llc::in_doubt`].
    pub(super) fn in_doubt(&self) -> bool {
        self.llc.as_ref().is_some_and(Llc::in_doubt)
    }

    fn note_received(&mut self) {
        let received = self.group.with(|s| s.counts().cdc_received).unwrap_or(0);
        if core::mem::replace(&mut self.received, received) != received
            && let Some(llc) = &mut self.llc
        {
            llc.note_received(Instant::now());
        }
    }

    /// Does what has become due. Returns when to look again.
    pub(super) fn tend(&mut self) -> Option<Instant> {
        self.look_for_connected();
        self.note_received();
        if self.group.take_attention() {
            // What broke the queue pair may complete after what was flushed for it.
            self.group.poll();
            let (mut messages, mut ended, mut failure) = (Vec::new(), Vec::new(), None);
            self.group.with(|s| {
                s.take_llc(|m| messages.push(m.to_vec()));
                s.take_ended(|slot| ended.push(slot));
                failure = s.failure();
            });
            let now = Instant::now();
            // A queue pair that is ended is flushed, too.
            let told = self.down.is_some() && failure == Some(verbs::Failure::Flushed);
            if let Some(f) = failure.filter(|_| !told)
                && core::mem::replace(&mut self.failure, failure) != failure
            {
                log::info!("link group {}: {f}", self.qpn().get());
            }
            if let Some(llc) = &mut self.llc {
                for m in &messages {
                    if let Err(e) = llc.receive(m, now) {
                        log::debug!("LLC message ignored: {e}");
                    }
                }
                if failure.is_some() {
                    llc.link_failed();
                }
            } else if failure.is_some() {
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
            let stuck = self.unsent.is_stuck(Instant::now());
            if let Some(llc) = self.llc.as_mut().filter(|_| stuck) {
                llc.link_failed();
                log::info!("link group {}: takes no messages", self.qpn().get());
                self.run_llc();
            }
            // Completions of what fills the send queue need not wake us.
            self.group.poll();
            return Some(Instant::now() + FULL_TIME);
        }
        self.llc.as_ref().and_then(Llc::next_timeout)
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
            .send(Instant::now(), |bytes| group.send_llc(bytes));
    }

    fn run_llc(&mut self) {
        while let Some(action) = self.llc.as_mut().and_then(Llc::poll) {
            match action {
                Action::ReadyToSend => {
                    if let Err(e) = self.ready_to_send() {
                        log::warn!("{e}");
                        self.group.fail(verbs::Failure::LocalProtection);
                    }
                }
                Action::Send(bytes) => {
                    self.unsent.push(bytes);
                    self.send_llc();
                }
                Action::Established => {
                    log::debug!("link group {}: up", self.qpn().get());
                    self.confirmed_link = true;
                }
                Action::ConfirmRkeyDone { token, result } => {
                    if result.is_ok() {
                        self.announced(token);
                    }
                    self.confirmed.push((token, result));
                }
                Action::DeleteRkeyDone { .. } => {}
                Action::AbortConnections => self.group.abort_all(),
                Action::Down(why) => {
                    log::info!("link group {}: {why}", self.qpn().get());
                    self.down = Some(why);
                    self.group.fail(verbs::Failure::Flushed);
                }
            }
        }
    }

    /// Whether nothing refers to it any more and its last messages have gone, or had time to: it may be dropped.
    /// Gives the time to ask again if that is soon.
    pub(super) fn over(&mut self) -> Result<bool, Instant> {
        if self.down.is_none() || self.link.used.load(SeqCst) != 0 {
            return Ok(false);
        }
        let now = Instant::now();
        if self.is_connecting() {
            return Err(now + CONNECTING_LOOK);
        }
        let until = *self.until.get_or_insert(now + LAST_WORDS);
        if self.group.qp().outstanding() == 0 || now >= until {
            Ok(true)
        } else {
            Err(now + Duration::from_millis(5))
        }
    }

    /// Whether it uses this device.
    pub(super) fn is_on(&self, device: &Device) -> bool {
        Arc::ptr_eq(&self.domain, device.domain())
    }

    /// The link works no more.
    pub(super) fn fail(&mut self) {
        self.group.fail(verbs::Failure::Flushed);
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
            _ => {
                self.down = Some(Down::LinkFailed);
                self.group.fail(verbs::Failure::Flushed);
            }
        }
    }
}

impl Drop for LinkGroup {
    fn drop(&mut self) {
        if self.listed {
            table::remove(&self.group);
        }
        debug_assert_eq!(self.link.used.load(Acquire), 0);
        // The device must have let go of the memory before it is given back.
        let _ = self.group.qp().to_error();
        self.group.with(|s| s.drop_regions());
        self.rmb_regions.clear();
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

/// A random initial packet sequence number.
fn random_psn() -> Psn {
    let mut bytes = [0; 3];
    if sys::random(&mut bytes).is_err() {
        bytes = [0x5a, 0x17, 0x01];
    }
    Psn::from_be_bytes(bytes)
}
