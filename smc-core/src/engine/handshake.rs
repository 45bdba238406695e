//! Drives the SMC-R handshakes: CLC on the program's TCP socket, and what it asks for on the RDMA side.
//!
//! What is said when is decided by the state machines of [`crate::negotiate::clc`]. Here bytes are carried between
//! machine and socket, `tasks` does what the machine asks for on a link group, and at the end the stream leaves
//! limbo, for the group or for TCP.

use core::sync::atomic::Ordering::Relaxed;
use std::net::IpAddr;
use std::time::Instant;

use libc::{MSG_DONTWAIT, MSG_NOSIGNAL, iovec};

use super::COUNTERS;
use super::machine::{Machine, Task};
use super::run::Engine;
use super::tasks::IMMEDIATE;
use crate::fabric::verbs::Choice;
use crate::link::llc::RkeyError;
use crate::link::rtoken::Rtokens;
use crate::negotiate::clc::{
    Action, Client, Established, Local, Outcome, Prepared, Server, Side, server,
};
use crate::negotiate::{endpoint, option, remote};
use crate::observe::Reason;
use crate::ring::Ring;
use crate::stream::{self, F_ACCEPTED, Sock};
use crate::sys::{self, Errno, TcpInfo};
use crate::wire::clc::{AcceptConfirm, Diagnosis, List};
use crate::wire::{Eid, Gid};

/// Connections that one of our link groups takes; the most that the protocol can say.
const MAX_CONNS: u8 = 255;
/// Links of a group, where there is another port; a side with a single one says 1.
const MAX_LINKS: u8 = 2;

/// What a handshake waits for, besides the peer's messages.
pub(super) enum Wait {
    Nothing,
    /// Client: that the program is seen to wait for the connection, or the time when it is too late for that; then this is
    /// done.
    Seen(Task, Instant),
    /// The queue pair's step to where it can receive; then this message, an Accept or a Confirm, is gone on with.
    Connect(AcceptConfirm),
    /// CONFIRM LINK of its group.
    Link,
    /// The second link of its group, or that there will be none.
    SecondLink,
    /// The peer's answer to CONFIRM RKEY.
    Rkey(Rtokens),
    /// The first contact of another connection with the same client, or the time when it is too late for that.
    Group(usize, server::Request, Instant),
}

/// One connection in limbo.
pub(super) struct Handshake {
    pub(super) index: u32,
    pub(super) generation: u32,
    pub(super) machine: Machine,
    pub(super) wait: Wait,
    /// Bytes to be written, and how many of them are.
    pub(super) out: (Vec<u8>, usize),
    /// Port and GID for the connection.
    pub(super) choice: Option<Choice>,
    pub(super) rmb_size: u32,
    /// The other end of the TCP connection.
    pub(super) peer: Option<IpAddr>,
    /// Link group, slot, and what the peer was told of our end.
    pub(super) place: Option<(usize, u32)>,
    /// The group was made for this connection.
    pub(super) first: bool,
    /// Server: the client's address and name, from its Proposal.
    pub(super) request: Option<server::Request>,
    pub(super) rings: Option<(Ring, Ring)>,
}

impl Handshake {
    pub(super) fn stream(&self) -> Option<&'static Sock> {
        stream::POOL
            .get(self.index)
            .filter(|s| s.generation.load(Relaxed) == self.generation && s.limbo())
    }

    /// Why we have declined with this diagnosis. `noted`: what the stream says.
    fn own_reason(&self, noted: Option<Reason>, diagnosis: Diagnosis) -> Reason {
        let server = matches!(self.machine, Machine::Server(_));
        match diagnosis {
            Diagnosis::OptUnsupp if noted == Some(Reason::UnseenWait) => Reason::UnseenWait,
            // It was refused before a device was looked for: by the policy.
            Diagnosis::CnfErr if self.choice.is_none() => Reason::PolicyTcp,
            // There is a device, but the Proposal is for version 1 only, which would need another kind.
            Diagnosis::NoSmcRDev if server && self.choice.is_some() && self.request.is_none() => {
                Reason::SmcVersion
            }
            diagnosis => Reason::of_own_decline(diagnosis),
        }
    }
}

impl Engine {
    /// Takes up a connection that a program thread has put into limbo.
    pub(super) fn begin_handshake(&mut self, s: &'static Sock) {
        if !s.limbo() {
            return;
        }
        let h = Box::new(Handshake {
            index: s.index.load(Relaxed),
            generation: s.generation.load(Relaxed),
            machine: Machine::Connecting,
            wait: Wait::Nothing,
            out: (Vec::new(), 0),
            choice: None,
            rmb_size: 0,
            peer: None,
            place: None,
            first: false,
            request: None,
            rings: None,
        });
        let i = self
            .handshakes
            .iter()
            .position(Option::is_none)
            .unwrap_or_else(|| {
                self.handshakes.push(None);
                self.handshakes.len() - 1
            });
        self.handshakes[i] = Some(h);
        self.advance(i);
    }

    /// Gives a handshake up in favour of TCP, if it is not too late.
    pub(super) fn decline_handshake(&mut self, s: &'static Sock) {
        let me = (s.index.load(Relaxed), s.generation.load(Relaxed));
        let found = self
            .handshakes
            .iter_mut()
            .position(|h| h.as_ref().is_some_and(|h| (h.index, h.generation) == me));
        if let Some(i) = found {
            if let Some(h) = &mut self.handshakes[i] {
                h.machine.decline(Diagnosis::OptUnsupp, Instant::now());
            }
            self.advance(i);
        }
    }

    /// Moves handshake `i` on as far as it goes.
    pub(super) fn advance(&mut self, i: usize) {
        let Some(mut h) = self.handshakes.get_mut(i).and_then(Option::take) else {
            return;
        };
        let Some(s) = h.stream() else {
            // Closed by the program.
            self.undo(&mut h);
            return;
        };
        if matches!(h.machine, Machine::Connecting) && !self.tcp_connected(s, &mut h) {
            if s.limbo() {
                self.arm_handshake(i, s, libc::EPOLLOUT);
                self.handshakes[i] = Some(h);
            }
            return;
        }
        loop {
            match s.with_fd(|fd| flush(fd, &mut h)) {
                None => return self.undo(&mut h),
                Some(false) => {
                    self.arm_handshake(i, s, libc::EPOLLOUT);
                    break;
                }
                Some(true) => {}
            }
            match h.machine.poll() {
                Some(Action::Send(bytes)) => h.out = (bytes, 0),
                Some(Action::Task(t)) => self.task(&mut h, t),
                Some(Action::Done(outcome)) => return self.finish(s, &mut h, outcome),
                None => match s.with_fd(|fd| take(fd, &mut h)) {
                    None => return self.undo(&mut h),
                    Some(true) => {}
                    Some(false) => {
                        if h.machine.want() > 0 {
                            self.arm_handshake(i, s, libc::EPOLLIN | libc::EPOLLRDHUP);
                        }
                        break;
                    }
                },
            }
        }
        self.handshakes[i] = Some(h);
    }

    fn arm_handshake(&self, i: usize, s: &Sock, events: i32) {
        let data = super::run::EV_CLC | i as u64;
        s.with_fd(|fd| super::run::watch(self.epfd, fd, events | libc::EPOLLONESHOT, data));
    }

    /// Whether the TCP connection stands and the other end has the option; then the machine is made. If it never
    /// will, the connection is plain TCP.
    fn tcp_connected(&mut self, s: &'static Sock, h: &mut Handshake) -> bool {
        let state = s.with_fd(|fd| {
            let connecting = TcpInfo::of(fd).is_ok_and(|t| t.connecting());
            (
                connecting,
                option::peer_has_it(fd).unwrap_or(false),
                endpoint::ends_of(fd),
            )
        });
        match state {
            Some((true, ..)) | None => return false,
            Some((false, true, Ok((local, peer)))) => {
                self.make_machine(s, h, local, peer);
                return true;
            }
            Some((false, false, Ok(_))) => {
                log::debug!("the other host does not offer SMC-R");
                s.note(Reason::NoSmcOption);
            }
            // Refused, or reset.
            Some((false, ..)) => {}
        }
        s.leave_limbo(None);
        false
    }

    fn make_machine(
        &mut self,
        s: &Sock,
        h: &mut Handshake,
        local: std::net::SocketAddr,
        peer: std::net::SocketAddr,
    ) {
        let now = Instant::now();
        h.peer = Some(peer.ip().to_canonical());
        let server = s.has(F_ACCEPTED);
        let mut config = self.clc_local();
        let offered = remote::remote().and_then(|r| {
            let tunables = r.offers(local, peer, s.role())?;
            Some((tunables, r.device(local.ip())))
        });
        let refusal = match offered {
            Some((tunables, Ok(choice))) => {
                h.rmb_size = tunables.rmb_size;
                h.choice = Some(choice);
                None
            }
            Some((_, Err(why))) => {
                log::info!("{local} -> {peer}: {why}");
                Some(Diagnosis::NoSmcRDev)
            }
            None => Some(Diagnosis::CnfErr),
        };
        let others = match (remote::remote(), &h.choice) {
            (Some(remote), Some(choice)) => remote.others(choice),
            _ => Vec::new(),
        };
        if others.is_empty() {
            config.max_links = 1;
        }
        log::debug!(
            "{local} -> {peer}: CLC as {}",
            if server { "server" } else { "client" }
        );
        h.machine = match (server, refusal, &h.choice) {
            (true, refusal, _) => {
                let mut m = Server::new(config, now);
                if let Some(d) = refusal {
                    m.decline(d, now);
                }
                Machine::Server(Box::new(m))
            }
            (false, None, Some(choice)) => {
                let gids: Vec<Gid> = others.iter().map(|other| other.gid).take(7).collect();
                let more = List::from_slice(&gids).unwrap_or_default();
                Machine::Client(Box::new(Client::new(config, choice.gid, more, now)))
            }
            (false, refusal, _) => {
                let d = refusal.unwrap_or(Diagnosis::NoSmcRDev);
                Machine::Client(Box::new(Client::without_device(config, d)))
            }
        };
    }

    fn clc_local(&self) -> Local {
        let ueids: &[Eid] = remote::remote().map_or(&[], |r| &r.smc_r().ueids);
        Local {
            system_id: self.system_id,
            eids: List::from_slice(ueids).unwrap_or_default(),
            max_conns: MAX_CONNS,
            max_links: MAX_LINKS,
            features: IMMEDIATE,
            hostname: hostname(),
        }
    }

    /// The handshake is over.
    fn finish(&mut self, s: &'static Sock, h: &mut Handshake, outcome: Outcome) {
        s.with_fd(|fd| sys::epoll_ctl(self.epfd, libc::EPOLL_CTL_DEL, fd, None));
        match outcome {
            Outcome::Established(e) => self.establish(s, h, &e),
            Outcome::Fallback(f) => {
                let reason = match f.by {
                    Side::Local => {
                        log::info!("SMC-R declined by us: {}", f.diagnosis);
                        COUNTERS.decline_sent(f.diagnosis);
                        h.own_reason(s.noted(), f.diagnosis)
                    }
                    Side::Peer => {
                        log::info!("SMC-R declined by the peer: {}", f.diagnosis);
                        COUNTERS.decline_received(f.diagnosis);
                        Reason::SmcDeclined
                    }
                };
                if f.end_link_group
                    && let Some((g, _)) = h.place
                    && let Ok(group) = self.group(g)
                {
                    group.terminate();
                }
                self.undo(h);
                s.diagnosis.store(f.diagnosis.into(), Relaxed);
                s.pin(reason);
                s.leave_limbo(None);
            }
            Outcome::Fail(errno) => {
                log::info!("SMC-R handshake failed: {}", Errno::new(errno));
                self.undo(h);
                s.pin(Reason::of_failed_handshake(errno));
                s.leave_limbo(Some(Errno::new(errno)));
            }
        }
    }

    fn establish(&mut self, s: &'static Sock, h: &mut Handshake, e: &Established) {
        let (Some((g, slot)), Some((tx, rx))) = (h.place, h.rings) else {
            return self.finish(s, h, Outcome::Fail(libc::EPROTO));
        };
        let Ok(group) = self.group(g) else {
            return self.finish(s, h, Outcome::Fail(libc::ECONNRESET));
        };
        log::debug!(
            "SMC-R established, {} contact, slot {slot}",
            if e.first_contact {
                "first"
            } else {
                "subsequent"
            }
        );
        if !s.leave_limbo_for(h.generation, group.link(), slot, tx, rx) {
            group.abandon(slot);
            return;
        }
        COUNTERS.opens_accepted.fetch_add(1, Relaxed);
        self.watch_tcp(s);
    }

    /// Gives back what a handshake has made.
    fn undo(&mut self, h: &mut Handshake) {
        let Some((g, slot)) = h.place.take() else {
            return;
        };
        let first = h.first;
        let Ok(group) = self.group(g) else { return };
        if first {
            group.terminate();
        }
        if slot != u32::MAX {
            group.release(slot);
        }
    }

    pub(super) fn rkey_confirmed(&mut self, h: &mut Handshake, result: Result<(), RkeyError>) {
        if let Err(e) = result {
            log::info!("SMC-R handshake: {e}");
        }
        h.wait = Wait::Nothing;
        let now = Instant::now();
        let Some((g, slot)) = h.place else { return };
        let end = self.group(g).ok().and_then(|g| g.end(slot));
        match end {
            Some(end) if result.is_ok() => {
                h.machine
                    .prepared(Prepared { end, direct: true }, false, now)
            }
            _ => h.machine.decline(Diagnosis::ErrRegBuf, now),
        }
    }
}

/// Writes what is to be written. False: the socket takes no more now.
fn flush(fd: i32, h: &mut Handshake) -> bool {
    while let Some(rest) = h.out.0.get(h.out.1..).filter(|r| !r.is_empty()) {
        let v = iovec {
            iov_base: rest.as_ptr().cast_mut().cast(),
            iov_len: rest.len(),
        };
        // SAFETY: `rest` is readable.
        match unsafe { sys::send(fd, &[v], MSG_DONTWAIT | MSG_NOSIGNAL) } {
            Ok(n) => h.out.1 += n,
            Err(Errno::EAGAIN) => return false,
            Err(Errno::EINTR) => {}
            Err(e) => {
                h.out = (Vec::new(), 0);
                h.machine.ended(Some(e));
            }
        }
    }
    true
}

/// Reads what the machine wants. False: nothing has come.
fn take(fd: i32, h: &mut Handshake) -> bool {
    let mut buf = [0u8; 512];
    let want = h.machine.want().min(buf.len());
    if want == 0 {
        return false;
    }
    let v = iovec {
        iov_base: buf.as_mut_ptr().cast(),
        iov_len: want,
    };
    // SAFETY: `buf` is writable for `want` bytes.
    match unsafe { sys::recv(fd, &[v], MSG_DONTWAIT) } {
        Ok(0) => {
            h.machine.ended(None);
            // The machine may have something to say to that, once.
            h.machine.want() == 0
        }
        Ok(n) => {
            h.machine.read(buf.get(..n).unwrap_or(&[]), Instant::now());
            true
        }
        Err(Errno::EAGAIN | Errno::EINTR) => false,
        Err(e) => {
            h.machine.ended(Some(e));
            true
        }
    }
}

/// The host's name, as CLC has it.
fn hostname() -> [u8; 32] {
    let mut out = [b' '; 32];
    if let Ok(name) = std::fs::read("/proc/sys/kernel/hostname") {
        for (o, c) in out.iter_mut().zip(name.trim_ascii_end()) {
            *o = *c;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::SystemId;

    fn handshake(server: bool) -> Handshake {
        let local = Local {
            system_id: SystemId([1; 8]),
            eids: List::new(),
            max_conns: MAX_CONNS,
            max_links: MAX_LINKS,
            features: 0,
            hostname: [b' '; 32],
        };
        let now = Instant::now();
        Handshake {
            index: 0,
            generation: 0,
            machine: if server {
                Machine::Server(Box::new(Server::new(local, now)))
            } else {
                let client = Client::new(local, Gid::default(), List::new(), now);
                Machine::Client(Box::new(client))
            },
            wait: Wait::Nothing,
            out: (Vec::new(), 0),
            choice: Some(Choice {
                device: "rxe0".into(),
                port: 1,
                gid_index: 1,
                gid: Gid::default(),
                netdev: "eth0".into(),
                mac: [0; 6],
            }),
            rmb_size: 0,
            peer: None,
            place: None,
            first: false,
            request: None,
            rings: None,
        }
    }

    /// Where a diagnosis has more than one cause.
    #[test]
    fn own_declines_are_told_apart() {
        let cases = [
            (true, true, Diagnosis::NoSmcRDev, Reason::SmcVersion),
            (true, false, Diagnosis::NoSmcRDev, Reason::NoRdmaDevice),
            (false, true, Diagnosis::NoSmcRDev, Reason::NoRdmaDevice),
            (false, false, Diagnosis::NoSmcRDev, Reason::NoRdmaDevice),
            (true, true, Diagnosis::CnfErr, Reason::ClcTerms),
            (true, false, Diagnosis::CnfErr, Reason::PolicyTcp),
            (false, false, Diagnosis::CnfErr, Reason::PolicyTcp),
            (true, false, Diagnosis::NoUeid, Reason::NoCommonEid),
        ];
        for (server, device, diagnosis, reason) in cases {
            let mut h = handshake(server);
            h.choice = h.choice.filter(|_| device);
            assert_eq!(
                h.own_reason(None, diagnosis),
                reason,
                "{diagnosis}, server {server}, device {device}"
            );
        }
        let unseen = Some(Reason::UnseenWait);
        let reason = handshake(true).own_reason(unseen, Diagnosis::OptUnsupp);
        assert_eq!(reason, Reason::UnseenWait);
    }
}
