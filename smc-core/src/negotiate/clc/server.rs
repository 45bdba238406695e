//! The server's side of the handshake: the one that accepted.

use std::time::Instant;

use super::core::{Core, Role};
use super::{Action, Established, Local, MIN_CONNS, Prepared, RELEASE, Terms};
use crate::wire::clc::{AcceptConfirm, Diagnosis, Message, OfferV2, Proposal, Type, V2Part};
use crate::wire::{Eid, Gid, Mac, SystemId};

/// What the server's driver may have to do. It reports the end of each task; if it can't do it,
/// [`Server::decline`] says why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(
    clippy::large_enum_variant,
    reason = "a handshake has one at a time, and it is taken apart at once"
)]
pub enum Task {
    /// Look for a link group of this client (as server; [`Request::system_id`] and [`Request::gid`] are the same,
    /// a link is active, fewer connections than agreed on, a free RToken). With one, choose a link, take an RMB, and
    /// have the client confirm its rkey ([`Server::confirm_rkey_sent`]) unless it has before. Without one, make a
    /// queue pair and an RMB. Then call [`Server::prepared`], before the client's 6 s are over.
    ///
    /// Without a route to [`Request::gid`], decline with [`Diagnosis::NoSmcRDev`], as Linux does.
    Prepare(Request),
    /// First contact: connect the queue pair to the client's end and to [`Request::gid`], send CONFIRM LINK, and
    /// call [`Server::link_ready`] when the answer is there. Else: note where the client's RMB is, then call
    /// [`Server::link_ready`].
    Connect {
        /// What the client says about its end.
        confirm: AcceptConfirm,
        /// Whether a new link group is made.
        first_contact: bool,
    },
    /// Add a second link, or find out that there can't be one; then call [`Server::add_link_done`]. After 2 s the
    /// connection is established with a single link. A client that agreed on two links waits for ADD LINK for up
    /// to 3 s, even if it can only reject it.
    AddLink,
}

/// A Proposal, and what we choose from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Who the client is. Zero from Linux: hosts differ by `gid` then.
    pub system_id: SystemId,
    /// RoCEv2 address of the client's queue pair. Not the one in the Confirm.
    pub gid: Gid,
    /// MAC of the client's port; zero unless the client has offered version 1 too.
    pub mac: Mac,
    /// The client's best enterprise id that we have.
    pub eid: Eid,
    /// For a new link group.
    pub terms: Terms,
}

/// The handshake of one connection, seen from the server. [`super`] says how to drive it.
pub struct Server {
    core: Core<Task>,
    step: Step,
}

#[derive(Clone, Copy)]
enum Step {
    Proposal,
    Prepare(Request),
    Confirm(Request, Prepared, bool),
    /// The rest is the same on both sides.
    Link,
}

impl Server {
    /// Waits for a Proposal from `now` on.
    ///
    /// Both sides must have sent the TCP option.
    pub fn new(local: Local, now: Instant) -> Server {
        let mut core = Core::new(local, Role::Server);
        core.await_message(now);
        Server {
            core,
            step: Step::Proposal,
        }
    }

    /// What to do next; `None` until something happens.
    pub fn poll(&mut self) -> Option<Action<Task>> {
        self.core.poll()
    }

    /// When [`Server::timeout`] is to be called, if nothing happens before.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.core.poll_timeout()
    }

    /// It is `now`. Nothing happens if that is before [`Server::poll_timeout`].
    pub fn timeout(&mut self, now: Instant) {
        self.core.timeout(now);
    }

    /// How many bytes to read from the socket, at most. 0: none for now, also not to look for an end of file.
    pub fn want(&self) -> usize {
        self.core.want()
    }

    /// Takes bytes that were read at `now`. Returns how many; the rest, if they were more than [`Server::want`], is
    /// the program's, or to be offered again.
    pub fn read(&mut self, bytes: &[u8], now: Instant) -> usize {
        let (taken, message) = self.core.read(bytes);
        match (message, self.step) {
            (None, _) => {}
            (Some(Message::Proposal(proposal)), Step::Proposal) => self.proposed(&proposal),
            (Some(Message::Confirm(confirm)), Step::Confirm(request, prepared, first)) => {
                self.confirmed(confirm, request, prepared, first, now);
            }
            (Some(Message::SmcD(Type::Confirm)), Step::Confirm(..)) => {
                self.core.decline(Diagnosis::ModeUnsupp);
            }
            (Some(_), _) => self.core.fail(libc::EPROTO),
        }
        taken
    }

    /// The peer has ended its direction of the stream.
    pub fn eof(&mut self) {
        self.core.eof();
    }

    /// The socket has failed with this errno.
    pub fn error(&mut self, errno: i32) {
        self.core.fail(errno);
    }

    /// In [`Task::Prepare`]: a CONFIRM RKEY request is on its way. Without [`Server::prepared`] in 2 s, the
    /// connection is declined with [`Diagnosis::ErrRegBuf`].
    pub fn confirm_rkey_sent(&mut self, now: Instant) {
        self.core.confirm_rkey_sent(now);
    }

    /// [`Task::Prepare`] is done, for a new link group or an existing one.
    pub fn prepared(&mut self, prepared: Prepared, first_contact: bool, now: Instant) {
        let Step::Prepare(request) = self.step else {
            return;
        };
        if !self.core.is_preparing() {
            return;
        }
        self.core.subsequent = !first_contact;
        self.core.send(&Message::Accept(AcceptConfirm {
            system_id: self.core.local.system_id,
            first_contact,
            end: prepared.end,
            v2: Some(V2Part {
                eid: request.eid,
                extension: first_contact
                    .then(|| self.core.extension(&request.terms, prepared.direct)),
            }),
        }));
        self.step = Step::Confirm(request, prepared, first_contact);
        self.core.await_message(now);
    }

    /// [`Task::Connect`] is done. Ignored if that was too late.
    pub fn link_ready(&mut self, now: Instant) {
        self.core.link_ready(now);
    }

    /// [`Task::AddLink`] is done, with a second link or without.
    pub fn add_link_done(&mut self, now: Instant) {
        self.core.add_link_done(now);
    }

    /// Gives SMC up for this connection. While a message of the client is due, this waits until it has been read;
    /// [`Diagnosis::TimeoutCl`] waits another second for the peer's Decline.
    pub fn decline(&mut self, diagnosis: Diagnosis, now: Instant) {
        self.core.declined_by_driver(diagnosis, now);
    }

    fn proposed(&mut self, proposal: &Proposal) {
        self.core.form = proposal.version;
        if self.core.refuse() {
            return;
        }
        match choose(&self.core.local, proposal) {
            Ok(request) => {
                self.step = Step::Prepare(request);
                self.core.task(Task::Prepare(request));
            }
            Err(diagnosis) => self.core.decline(diagnosis),
        }
    }

    fn confirmed(
        &mut self,
        confirm: AcceptConfirm,
        request: Request,
        prepared: Prepared,
        first_contact: bool,
        now: Instant,
    ) {
        self.step = Step::Link;
        let Some(v2) = confirm.v2 else {
            return self.core.fail(libc::EPROTO);
        };
        if self.core.refuse() {
            return;
        }
        let terms = first_contact.then_some(request.terms);
        // Without an extension there is nothing that could differ.
        let wrong = match (terms, v2.extension) {
            (Some(ours), Some(extension)) => difference(&ours, &Terms::from(&extension)),
            _ => None,
        };
        if let Some(diagnosis) = wrong {
            return self.core.decline(diagnosis);
        }
        if confirm.end.rmb_addr().is_none() {
            return self.core.decline(Diagnosis::CnfErr);
        }
        self.core.task(Task::Connect {
            confirm,
            first_contact,
        });
        let established = Established {
            first_contact,
            peer_system_id: confirm.system_id,
            local: prepared.end,
            peer: confirm.end,
            eid: request.eid,
            terms,
        };
        self.core.start_link(established, Task::AddLink, now);
    }
}

/// What we answer to `proposal`.
fn choose(local: &Local, proposal: &Proposal) -> Result<Request, Diagnosis> {
    let Some(offer) = &proposal.v2 else {
        // We have no RoCEv1 device, and no SMC-D device at all.
        return Err(match proposal.v1 {
            Some(_) => Diagnosis::NoSmcRDev,
            None => Diagnosis::NoSmcDDev,
        });
    };
    if offer.eids.is_empty() {
        return Err(Diagnosis::NoUeid);
    }
    let ours = |eid: &Eid| local.eids.iter().any(|own| own == *eid);
    let eid = offer.eids.iter().find(ours).ok_or(Diagnosis::NoSmcDev)?;
    Ok(Request {
        system_id: proposal.system_id,
        gid: offer.gid,
        mac: proposal.v1.map_or(Mac::default(), |v1| v1.mac),
        eid,
        terms: terms(local, offer)?,
    })
}

fn terms(local: &Local, offer: &OfferV2) -> Result<Terms, Diagnosis> {
    if offer.release == 0 {
        return Ok(Terms::RELEASE_0);
    }
    let terms = Terms {
        release: offer.release.min(RELEASE),
        max_conns: offer.max_conns.min(local.max_conns),
        max_links: offer.max_links.min(local.max_links),
        features: offer.features & local.features,
    };
    if terms.max_conns < MIN_CONNS {
        return Err(Diagnosis::MaxConnErr);
    }
    if terms.max_links < 1 {
        return Err(Diagnosis::MaxLinkErr);
    }
    Ok(terms)
}

/// What a Confirm has to repeat, but doesn't.
fn difference(ours: &Terms, theirs: &Terms) -> Option<Diagnosis> {
    if ours.release != theirs.release {
        return Some(Diagnosis::ReleaseErr);
    }
    if ours.max_conns != theirs.max_conns {
        return Some(Diagnosis::MaxConnErr);
    }
    if ours.max_links != theirs.max_links {
        return Some(Diagnosis::MaxLinkErr);
    }
    None
}
