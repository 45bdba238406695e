//! What the handshake's state machines ask for on the RDMA side: link groups, queue pairs, RMBs.

use std::time::{Duration, Instant};

use super::device::Device;
use super::handshake::{Handshake, Wait};
use super::machine::Task;
use super::rdma::{FIRST, LinkGroup, Remote};
use super::run::Engine;
use crate::fabric::verbs::{self, Choice};
use crate::link::{Lane, llc};
use crate::negotiate::clc::{Prepared, Terms, server};
use crate::negotiate::remote;
use crate::observe::Reason;
use crate::observe::status::LinkGroupStatus;
use crate::sys::Errno;
use crate::wire::clc::{AcceptConfirm, Diagnosis};
use crate::wire::{Mtu, SystemId};

/// Bit of the feature mask by which xsmc nodes know each other: they understand [`crate::link::conn::Immediate`].
/// Others leave it out of what they agree to.
pub(super) const IMMEDIATE: u16 = 0x8000;

/// How long a connection waits for another one's first contact with the same peer, to join its link group.
const JOIN_WAIT: Duration = Duration::from_secs(3);

/// Ended link groups that the status shows.
const ENDED: usize = 4;

/// How long a client's program may take until it is seen to wait for its non-blocking socket.
const SEEN_TIME: Duration = Duration::from_millis(250);

/// Client: whether the program is seen to wait for the connection, so that the task can be done. Else it is put off, or
/// SMC-R declined. (A server has looked at its listener.)
fn is_awaited(h: &mut Handshake, t: Task) -> bool {
    let now = Instant::now();
    let until = match core::mem::replace(&mut h.wait, Wait::Nothing) {
        Wait::Seen(_, until) => until,
        _ => now + SEEN_TIME,
    };
    let Some(s) = h.stream().filter(|s| !s.waits_are_seen()) else {
        return true;
    };
    if now < until {
        h.wait = Wait::Seen(t, until);
    } else {
        s.note(Reason::UnseenWait);
        refuse(h, Refusal::Decline(Diagnosis::OptUnsupp));
    }
    false
}

/// Why a task can't be done.
pub(super) enum Refusal {
    Decline(Diagnosis),
    Rdma(verbs::Error),
}

impl From<verbs::Error> for Refusal {
    fn from(e: verbs::Error) -> Refusal {
        Refusal::Rdma(e)
    }
}

/// Silence after which a link is tested.
fn keepalive() -> Option<Duration> {
    remote::remote().and_then(|r| r.smc_r().keepalive())
}

impl Engine {
    /// Does a task, or declines.
    pub(super) fn task(&mut self, h: &mut Handshake, t: Task) {
        let done = match t {
            Task::PrepareFirst(_) | Task::PrepareSubsequent(_) if !is_awaited(h, t) => return,
            Task::PrepareFirst(accept) => self.prepare_first(h, &accept),
            Task::PrepareSubsequent(accept) => self.prepare_subsequent(h, &accept),
            Task::Prepare(request) => self.prepare(h, request),
            Task::Connect(confirm, first) => self.connect(h, &confirm, first),
            Task::AwaitLink => {
                h.wait = Wait::Link;
                self.check_link(h);
                Ok(())
            }
            Task::AddLink => {
                h.wait = Wait::SecondLink;
                self.check_second_link(h);
                Ok(())
            }
        };
        if let Err(why) = done {
            refuse(h, why);
        }
    }

    /// Opens the device of a choice, or finds it open; also gives the port's MTU.
    pub(super) fn open_device(&mut self, choice: &Choice) -> Result<(usize, Mtu), Refusal> {
        let known = self
            .devices
            .iter()
            .position(|d| d.as_ref().is_some_and(|d| d.name() == choice.device));
        let i = match known {
            Some(i) => i,
            None => match Device::open(&choice.device) {
                Ok(d) => self.add_device(d),
                Err(why) => {
                    log::warn!("RDMA device {}: {why}", choice.device);
                    return Err(Refusal::Decline(Diagnosis::NoSmcRDev));
                }
            },
        };
        let mtu = self.device(i)?.mtu(choice.port)?;
        Ok((i, mtu))
    }

    fn device(&self, i: usize) -> Result<&Device, Refusal> {
        let device = self.devices.get(i).and_then(Option::as_ref);
        device.ok_or(Refusal::Decline(Diagnosis::NoSmcRDev))
    }

    /// A new link group for this handshake.
    fn new_group(
        &mut self,
        h: &mut Handshake,
        role: llc::Role,
        peer: SystemId,
    ) -> Result<(usize, Mtu), Refusal> {
        let choice = h.choice.clone();
        let choice = choice.ok_or(Refusal::Decline(Diagnosis::NoSmcRDev))?;
        let (device, mtu) = self.open_device(&choice)?;
        let group = LinkGroup::new(self.device(device)?, &choice, role, peer, self.epfd)?;
        let g = self
            .groups
            .iter()
            .position(Option::is_none)
            .unwrap_or_else(|| {
                self.groups.push(None);
                self.groups.len() - 1
            });
        group.watch(super::run::EV_CQ | g as u64);
        self.groups[g] = Some(Box::new(group));
        h.first = true;
        Ok((g, mtu))
    }

    pub(super) fn group(&mut self, g: usize) -> Result<&mut LinkGroup, Refusal> {
        let group = self.groups.get_mut(g).and_then(Option::as_deref_mut);
        group.ok_or(Refusal::Decline(Diagnosis::NoActLink))
    }

    /// Drops a link group that is over. The status shows the last few of these.
    pub(super) fn drop_group(&mut self, g: usize) {
        if let Some(group) = self.groups.get_mut(g).and_then(Option::take) {
            if self.ended_groups.len() == ENDED {
                self.ended_groups.pop_front();
            }
            // Connections that were reset with it never gave their slots back.
            self.ended_groups.push_back(LinkGroupStatus {
                connections: 0,
                ..group.status()
            });
        }
    }

    fn prepare_first(&mut self, h: &mut Handshake, accept: &AcceptConfirm) -> Result<(), Refusal> {
        let (g, mtu) = self.new_group(h, llc::Role::Client, accept.system_id)?;
        let size = h.rmb_size;
        let group = self.group(g)?;
        group.agree(terms_of(accept));
        h.place = Some((g, u32::MAX));
        let (slot, _) = group.prepare(size, FIRST)?;
        h.place = Some((g, slot));
        group.announced(slot);
        let remote = Remote {
            gid: accept.end.gid,
            qpn: accept.end.qpn,
            psn: accept.end.psn,
            mtu: accept.end.mtu.min(mtu),
        };
        self.connect_group(h, g, remote, accept)
    }

    /// Connects the queue pair of a first contact, as an Accept or a Confirm says.
    fn connect_group(
        &mut self,
        h: &mut Handshake,
        g: usize,
        remote: Remote,
        message: &AcceptConfirm,
    ) -> Result<(), Refusal> {
        if self.group(g)?.connect(remote, h.peer)? {
            return self.connected(h, message);
        }
        h.wait = Wait::Connect(*message);
        Ok(())
    }

    /// The queue pair of a first contact can receive, now that an Accept or a Confirm has told of the peer's.
    fn connected(&mut self, h: &mut Handshake, message: &AcceptConfirm) -> Result<(), Refusal> {
        let Some((g, slot)) = h.place else {
            return Err(Refusal::Decline(Diagnosis::IntErr));
        };
        let group = self.group(g)?;
        h.rings = Some(group.complete(slot, &message.end)?);
        let server = h.request.is_some();
        if server {
            group.ready_to_send(FIRST)?;
        }
        let terms = h.request.map_or_else(|| terms_of(message), |r| r.terms);
        group.confirm_link(terms.max_links, terms.max_conns, keepalive());
        if server {
            h.wait = Wait::Link;
            self.check_link(h);
        } else {
            let end = group.end(slot);
            let end = end.ok_or(Refusal::Decline(Diagnosis::IntErr))?;
            h.machine
                .prepared(Prepared { end, direct: true }, true, Instant::now());
        }
        Ok(())
    }

    /// Goes on where the queue pair of a first contact has been waited for.
    pub(super) fn check_connected(&mut self, h: &mut Handshake, message: AcceptConfirm) {
        let result = match h.place.map(|(g, _)| self.group(g)) {
            Some(Ok(group)) => group.connected(),
            _ => return refuse(h, Refusal::Decline(Diagnosis::NoActLink)),
        };
        let Some(result) = result else { return };
        h.wait = Wait::Nothing;
        let done = result.map_err(Refusal::Rdma);
        if let Err(why) = done.and_then(|()| self.connected(h, &message)) {
            refuse(h, why);
        }
    }

    fn prepare_subsequent(
        &mut self,
        h: &mut Handshake,
        accept: &AcceptConfirm,
    ) -> Result<(), Refusal> {
        let (qpn, gid) = (accept.end.qpn, accept.end.gid);
        let is_end = |r: &Remote| r.qpn == qpn && r.gid == gid;
        let g = self.find_group(llc::Role::Client, |group| {
            group.peer == accept.system_id && group.lane_to(is_end).is_some()
        });
        let g = g.ok_or(Refusal::Decline(Diagnosis::SyncErr))?;
        let lane = self.group(g)?.lane_to(is_end).unwrap_or(FIRST);
        self.join(h, g, lane)?;
        let (_, slot) = h.place.unwrap_or((g, 0));
        h.rings = Some(self.group(g)?.complete(slot, &accept.end)?);
        Ok(())
    }

    fn find_group(&self, role: llc::Role, which: impl Fn(&LinkGroup) -> bool) -> Option<usize> {
        self.groups.iter().position(|g| {
            g.as_ref()
                .is_some_and(|g| g.role == role && g.has_room() && which(g))
        })
    }

    /// Takes a place on a link of an existing group and has the peer confirm the RMB.
    fn join(&mut self, h: &mut Handshake, g: usize, lane: Lane) -> Result<(), Refusal> {
        let size = h.rmb_size;
        let group = self.group(g)?;
        let (slot, end) = group.prepare(size, lane)?;
        h.place = Some((g, slot));
        let now = Instant::now();
        match group.confirm_rkey(slot) {
            None => h
                .machine
                .prepared(Prepared { end, direct: true }, false, now),
            Some(tokens) => {
                h.machine.rkey_sent(now);
                h.wait = Wait::Rkey(tokens);
            }
        }
        Ok(())
    }

    fn prepare(&mut self, h: &mut Handshake, request: server::Request) -> Result<(), Refusal> {
        h.request = Some(request);
        let now = Instant::now();
        let until = match core::mem::replace(&mut h.wait, Wait::Nothing) {
            Wait::Group(_, _, until) => until,
            _ => now + JOIN_WAIT,
        };
        let is_peer = |group: &LinkGroup| {
            group.peer == request.system_id && group.client_gids.first() == Some(&request.gid)
        };
        let found = self.find_group(llc::Role::Server, |g| is_peer(g) && !g.is_changing());
        if let Some(g) = found {
            let lane = self.group(g)?.next_lane();
            return self.join(h, g, lane);
        }
        // A first contact with the same client may be under way, or a link being added; or it may have given up a group
        // that we still have.
        let coming = self.groups.iter().position(|g| {
            g.as_ref().is_some_and(|g| {
                let coming = !g.is_up() || g.is_changing() && g.has_room();
                g.role == llc::Role::Server && is_peer(g) && coming && g.down.is_none()
            })
        });
        if let Some(g) = coming
            && now < until
        {
            h.wait = Wait::Group(g, request, until);
            return Ok(());
        }
        let (g, _) = self.new_group(h, llc::Role::Server, request.system_id)?;
        let size = h.rmb_size;
        let group = self.group(g)?;
        h.place = Some((g, u32::MAX));
        group.client_gids.push(request.gid);
        group.agree(request.terms);
        let (slot, end) = group.prepare(size, FIRST)?;
        h.place = Some((g, slot));
        group.announced(slot);
        h.machine
            .prepared(Prepared { end, direct: true }, true, now);
        Ok(())
    }

    fn connect(
        &mut self,
        h: &mut Handshake,
        confirm: &AcceptConfirm,
        first: bool,
    ) -> Result<(), Refusal> {
        let (Some((g, slot)), Some(request)) = (h.place, h.request) else {
            return Err(Refusal::Decline(Diagnosis::IntErr));
        };
        let group = self.group(g)?;
        if !first {
            h.rings = Some(group.complete(slot, &confirm.end)?);
            h.machine.link_ready(Instant::now());
            return Ok(());
        }
        group.peer_name = confirm.system_id;
        let extension = confirm.v2.and_then(|v| v.extension);
        let gids = extension.iter().flat_map(|e| e.gids.iter().skip(1));
        group.client_gids.extend(gids);
        let remote = Remote {
            gid: request.gid,
            qpn: confirm.end.qpn,
            psn: confirm.end.psn,
            mtu: confirm.end.mtu,
        };
        self.connect_group(h, g, remote, confirm)
    }

    /// Goes on when a second link was added, or isn't to be.
    pub(super) fn check_second_link(&mut self, h: &mut Handshake) {
        let Some((g, _)) = h.place else { return };
        if self.group(g).map_or(true, |group| !group.is_adding()) {
            h.wait = Wait::Nothing;
            h.machine.add_link_done(Instant::now());
        }
    }

    pub(super) fn check_link(&mut self, h: &mut Handshake) {
        let Some((g, _)) = h.place else { return };
        let (up, down, confirmed) = match self.group(g) {
            Ok(group) => (group.is_up(), group.down, group.confirmed_link),
            Err(_) => (false, Some(llc::Down::LinkFailed), false),
        };
        let now = Instant::now();
        if let Some(why) = down {
            h.wait = Wait::Nothing;
            // A silent peer is the CLC machine's to time out.
            match why {
                // The peer's program may have sent something: the way back to TCP is closed.
                _ if confirmed => h.machine.ended(Some(Errno::ECONNRESET)),
                llc::Down::ConfirmTimeout => {}
                llc::Down::Eyecatcher => h.machine.decline(Diagnosis::RmbeEc, now),
                _ => h.machine.decline(Diagnosis::ErrRdyLnk, now),
            }
        } else if up {
            h.wait = Wait::Nothing;
            h.machine.link_ready(now);
        }
    }
}

/// What the extension of an Accept says.
fn terms_of(accept: &AcceptConfirm) -> Terms {
    let extension = accept.v2.and_then(|v| v.extension);
    extension.map_or(Terms::RELEASE_0, |e| Terms::from(&e))
}

/// A task can't be done.
fn refuse(h: &mut Handshake, why: Refusal) {
    let now = Instant::now();
    h.wait = Wait::Nothing;
    match why {
        Refusal::Decline(d) => h.machine.decline(d, now),
        Refusal::Rdma(e) => {
            log::warn!("SMC-R handshake: {e}");
            h.machine.decline(Diagnosis::ErrRdyLnk, now);
        }
    }
}
