//! How links of a group come and go: what LLC asks for on the devices.
//!
//! A second link leads over another device, or another port, where the kernel's routes say so: to a GID of the peer's
//! from an address of that port. So the host's network set-up decides which ports belong together, as it does for TCP.

use std::time::Instant;

use super::super::device::Device;
use super::super::run::Engine;
use super::port::{Port, Remote};
use super::{FIRST, INQUIRY_TIME, LinkGroup};
use crate::fabric::verbs::{self, Choice, Failure};
use crate::link::llc::{NewEnd, Role};
use crate::link::{LANES, Lane};
use crate::negotiate::remote;
use crate::ring::pool::Token;

/// A queue pair that LLC wants for one more link.
pub(super) struct Wanted {
    pub(super) lane: Lane,
    /// Client: the server's end of it.
    pub(super) peer: Option<NewEnd>,
}

impl Engine {
    /// Makes the queue pair that group `g` wants for one more link, if it does, or tells it that there is none. Returns when
    /// to look at the group again.
    pub(in crate::engine) fn second_link(&mut self, g: usize) -> Option<Instant> {
        let group = self.group(g).ok()?;
        let wanted = group.wanted.take()?;
        let made = match group.way(&wanted) {
            Some(choice) => self.make_link(g, &wanted, &choice),
            None => false,
        };
        let group = self.group(g).ok()?;
        if !made {
            group.refuse_link();
        }
        group.tend()
    }

    fn make_link(&mut self, g: usize, wanted: &Wanted, choice: &Choice) -> bool {
        let Ok((device, _)) = self.open_device(choice) else {
            return false;
        };
        let Some(Some(device)) = self.devices.get(device) else {
            return false;
        };
        let Some(Some(group)) = self.groups.get_mut(g) else {
            return false;
        };
        group
            .add_link(device, wanted, choice)
            .inspect_err(|e| log::info!("link group {}: no second link: {e}", group.id))
            .is_ok()
    }
}

impl LinkGroup {
    /// Port and GID for one more link.
    fn way(&self, wanted: &Wanted) -> Option<Choice> {
        let remote = remote::remote()?;
        let first = self.ports.iter().flatten().next()?;
        let Some(peer) = wanted.peer else {
            // Where no GID of the client's needs another port, it shall judge: it may have a port more than it says.
            let others = self.client_gids.iter().skip(1);
            let mut ways = others.filter_map(|gid| remote.device_towards(*gid).ok());
            let other = ways.find(|choice| !first.is_at(choice));
            return Some(other.unwrap_or_else(|| first.choice.clone()));
        };
        let choice = remote.device_towards(peer.end.gid).ok()?;
        let same_peer = first.remote.is_some_and(|r| r.gid == peer.end.gid);
        (!first.is_at(&choice) || !same_peer).then_some(choice)
    }

    /// Makes a queue pair on a device for one more link, and has LLC go on: at once, or when it is connected.
    fn add_link(&mut self, device: &Device, wanted: &Wanted, choice: &Choice) -> verbs::Result<()> {
        let lane = wanted.lane;
        // One that came too late may be left.
        self.drop_port(lane);
        let (mut port, pair) = Port::new(device, choice)?;
        if let Some(peer) = wanted.peer {
            port.connect(remote_end(&port, &peer), None)?;
        }
        self.group
            .add_pair(lane, pair)
            .map_err(|errno| port.error("epoll_ctl", errno))?;
        self.ports[lane] = Some(port);
        self.register_all().inspect_err(|_| self.drop_port(lane))?;
        if wanted.peer.is_none() {
            self.propose(lane);
        }
        self.run_llc();
        Ok(())
    }

    /// Tells the peer of our end of a new link, and of the RMBs there.
    fn propose(&mut self, lane: Lane) {
        let Some(own) = self.port(lane).map(Port::end) else {
            return;
        };
        let known: Vec<_> = self.known.clone();
        let tokens = |rmb: &Token| self.tokens(*rmb, self.rmbs.ring(*rmb)?).ok();
        let rmbs: Vec<_> = known.iter().filter_map(tokens).collect();
        let now = Instant::now();
        if let Some(llc) = &mut self.llc {
            match self.role {
                Role::Server => llc.offer_link(own, &rmbs, now),
                Role::Client => llc.accept_link(own, &rmbs, now),
            }
        }
        // It may have waited too long.
        if self.llc.as_ref().and_then(|llc| llc.link(lane)).is_none() {
            self.drop_port(lane);
        }
    }

    /// Registers all buffers for a new link.
    fn register_all(&mut self) -> verbs::Result<()> {
        let rmbs: Vec<_> = self.slots.iter().map(|(slot, b)| (*slot, b.rmb)).collect();
        for (slot, rmb) in rmbs {
            if let Some(ring) = self.rmbs.ring(rmb) {
                let tokens = self.tokens(rmb, ring)?;
                if let Some(b) = self.slots.get_mut(&slot) {
                    b.tokens = tokens;
                }
            }
        }
        for chunk in 0..self.mirrors.chunks() as u32 {
            let token = Token {
                chunk,
                offset: 0,
                size: crate::ring::MIN_SIZE,
            };
            if let Some(ring) = self.mirrors.ring(token) {
                self.register_mirror(token, ring)?;
            }
        }
        Ok(())
    }

    fn refuse_link(&mut self) {
        if let Some(llc) = &mut self.llc {
            llc.refuse_link(Instant::now());
        }
        self.run_llc();
    }

    /// Server: the client's end of a new link is known.
    pub(super) fn connect_link(&mut self, lane: Lane, peer: NewEnd) {
        let begun = self.ports[lane]
            .as_mut()
            .map(|port| port.connect(remote_end(port, &peer), None));
        if !matches!(begun, Some(Ok(_))) {
            self.link_connected(lane, begun.map_or(Ok(()), |begun| begun.map(|_| ())));
        }
    }

    /// The queue pair of a new link can receive, or never will.
    fn link_connected(&mut self, lane: Lane, result: verbs::Result<()>) {
        let ready = result.and_then(|()| match self.role {
            Role::Server => self.ready_to_send(lane),
            Role::Client => Ok(()),
        });
        if let Err(e) = &ready {
            log::info!("link group {}: no second link: {e}", self.id);
        }
        let now = Instant::now();
        match (self.role, ready, &mut self.llc) {
            (Role::Client, Ok(()), _) => self.propose(lane),
            (Role::Client, Err(_), _) => {
                self.drop_port(lane);
                self.refuse_link();
            }
            (Role::Server, Ok(()), Some(llc)) => llc.link_connected(now),
            (Role::Server, Err(_), Some(llc)) => llc.link_failed(lane, now),
            (Role::Server, _, None) => {}
        }
    }

    /// Takes notice of the queue pairs that have been connected meanwhile.
    pub(super) fn look_for_connected(&mut self) {
        for lane in 0..LANES {
            let Some(result) = self.ports[lane].as_mut().and_then(Port::connected) else {
                continue;
            };
            // The first one's is the handshake's.
            if lane == FIRST && self.llc.is_none() {
                self.connected = Some(result.and_then(|()| self.enlist()));
            } else {
                self.link_connected(lane, result);
            }
        }
    }

    /// The link is no more, but another one works: its connections move there.
    pub(super) fn drop_link(&mut self, lane: Lane) {
        if let Some(port) = self.port(lane) {
            port.stop();
        }
        let other = (0..LANES).find(|other| *other != lane && self.is_link_up(*other));
        if let (Some(to), Some(llc)) = (other, &self.llc) {
            log::info!("link group {}: goes on with one link", self.id);
            let known = llc.rtokens();
            self.group
                .fail_over(lane, to, |rkey| known.get(lane, rkey)?[to]);
            if self.forgets {
                self.inquiry = Some((Instant::now() + INQUIRY_TIME, 1));
            }
        }
        self.drop_port(lane);
    }

    /// Gives back what a link uses.
    pub(super) fn drop_port(&mut self, lane: Lane) {
        if let Some(port) = self.port(lane) {
            port.stop();
        }
        self.unsent.forget(lane);
        drop(self.group.take_pair(lane));
        self.ports[lane] = None;
        for b in self.slots.values_mut() {
            b.tokens[lane] = None;
        }
    }

    /// Whether connections may use a link.
    fn is_link_up(&self, lane: Lane) -> bool {
        let link = self.llc.as_ref().and_then(|llc| llc.link(lane));
        link.is_some_and(|(_, up)| up)
    }

    /// The link to the peer's queue pair of this number and GID, that connections may use.
    pub(in crate::engine) fn lane_to(&self, which: impl Fn(&Remote) -> bool) -> Option<Lane> {
        let mut ports = self.ports.iter().enumerate();
        let found = ports.find(|(lane, port)| {
            let remote = port.as_ref().and_then(|port| port.remote);
            self.is_link_up(*lane) && remote.is_some_and(|r| which(&r))
        });
        found.map(|(lane, _)| lane)
    }

    /// Server: the link for one more connection: by turns.
    pub(in crate::engine) fn next_lane(&self) -> Lane {
        let lanes: Vec<_> = (0..LANES).filter(|lane| self.is_link_up(*lane)).collect();
        let turn = self.connections() % lanes.len().max(1);
        lanes.get(turn).copied().unwrap_or(FIRST)
    }

    /// Whether a link is being added, or to be.
    pub(in crate::engine) fn is_adding(&self) -> bool {
        self.llc.as_ref().is_some_and(|llc| llc.is_adding())
    }

    /// The links on this device work no more whose queue pairs' numbers are `which`. Whether there are any.
    pub(in crate::engine) fn fail(&mut self, device: &Device, which: impl Fn(u32) -> bool) -> bool {
        let mut any = false;
        for (lane, port) in self.ports.iter().enumerate() {
            if let Some(port) = port
                && port.is_on(device)
                && which(port.qpn().get())
            {
                any = true;
                self.group.fail(lane, Failure::Flushed);
            }
        }
        any
    }

    /// A port of this device works no more. Where there is a link at another one, it isn't waited for.
    pub(in crate::engine) fn port_down(&mut self, device: &Device, number: u8) {
        let is_at = |port: &Port| port.is_on(device) && port.choice.port == number;
        let ports = || self.ports.iter().enumerate();
        let ports = || ports().filter_map(|(lane, port)| Some((lane, port.as_ref()?)));
        if ports().any(|(lane, port)| self.is_link_up(lane) && !is_at(port)) {
            for (lane, _) in ports().filter(|(_, port)| is_at(port)) {
                self.group.fail(lane, Failure::Flushed);
            }
        }
    }
}

fn remote_end(port: &Port, peer: &NewEnd) -> Remote {
    Remote {
        gid: peer.end.gid,
        qpn: peer.end.qpn,
        psn: peer.psn,
        mtu: peer.mtu.min(port.end().mtu),
    }
}
