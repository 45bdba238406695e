//! The client's side of the handshake: the one that connected.

use std::time::Instant;

use super::core::{Core, Role};
use super::{Action, Established, Local, MIN_CONNS, Prepared, RELEASE, Terms};
use crate::wire::clc::{
    AcceptConfirm, Diagnosis, FirstContact, List, Message, OfferV2, Proposal, Type, V2Part, Version,
};
use crate::wire::{Gid, Mtu};

/// What the client's driver may have to do. It reports the end of each task; if it can't do it,
/// [`Client::decline`] says why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// Make a new link group: a queue pair in RTR, connected to the server's end, with receives posted, and an RMB.
    /// Then call [`Client::prepared`].
    ///
    /// If [`FirstContact::direct`] of the Accept is false, the route to the server's GID must exist
    /// ([`Diagnosis::NoRoute`]) and have a gateway ([`Diagnosis::NoIndirect`]).
    PrepareFirst(AcceptConfirm),
    /// Find the link that has the server's GID and queue pair number as its peer's; if there is none, decline with
    /// [`Diagnosis::SyncErr`]. Take an RMB, and have the server confirm its rkey ([`Client::confirm_rkey_sent`])
    /// unless it has before. Then call [`Client::prepared`].
    PrepareSubsequent(AcceptConfirm),
    /// Answer the server's CONFIRM LINK, then call [`Client::link_ready`].
    AwaitConfirmLink,
    /// Answer the server's ADD LINK, then call [`Client::add_link_done`]. Without one, the connection is
    /// established with a single link after 3 s.
    AwaitAddLink,
}

/// The handshake of one connection, seen from the client. [`super`] says how to drive it.
pub struct Client {
    core: Core<Task>,
    more_gids: List<Gid>,
    /// The Accept, once it has come and is found good, and what it means for a new link group.
    accept: Option<(AcceptConfirm, V2Part, Option<Terms>)>,
}

impl Client {
    /// Begins with a Proposal, at `now`, that offers the RoCEv2 address `gid`: the one whose queue pair the server
    /// will connect to. `more_gids` are addresses for further links, at most 7.
    ///
    /// Both sides must have sent the TCP option; then CLC has to be the first bytes on the stream.
    pub fn new(local: Local, gid: Gid, more_gids: List<Gid>, now: Instant) -> Client {
        let mut core = Core::new(local, Role::Client);
        core.send(&Message::Proposal(Proposal {
            version: Version::V2,
            system_id: local.system_id,
            vendor: [0; 8],
            v1: None,
            v2: Some(OfferV2 {
                release: RELEASE,
                gid,
                max_conns: local.max_conns,
                max_links: local.max_links,
                features: local.features,
                eids: local.eids,
            }),
        }));
        core.await_message(now);
        Client {
            core,
            more_gids,
            accept: None,
        }
    }

    /// Declines in place of the Proposal: both sides have sent the TCP option, but now there is no device
    /// ([`Diagnosis::NoSmcRDev`]), or no enterprise id ([`Diagnosis::NoSmcDev`], as Linux says it).
    pub fn without_device(local: Local, diagnosis: Diagnosis) -> Client {
        let mut core = Core::new(local, Role::Client);
        core.decline(diagnosis);
        Client {
            core,
            more_gids: List::new(),
            accept: None,
        }
    }

    /// What to do next; `None` until something happens.
    pub fn poll(&mut self) -> Option<Action<Task>> {
        self.core.poll()
    }

    /// When [`Client::timeout`] is to be called, if nothing happens before.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.core.poll_timeout()
    }

    /// It is `now`. Nothing happens if that is before [`Client::poll_timeout`].
    pub fn timeout(&mut self, now: Instant) {
        self.core.timeout(now);
    }

    /// How many bytes to read from the socket, at most. 0: none for now, also not to look for an end of file.
    pub fn want(&self) -> usize {
        self.core.want()
    }

    /// Takes bytes that were read. Returns how many; the rest, if they were more than [`Client::want`], is the
    /// program's, or to be offered again.
    pub fn read(&mut self, bytes: &[u8]) -> usize {
        let (taken, message) = self.core.read(bytes);
        match message {
            None => {}
            Some(Message::Accept(accept)) => self.accepted(accept),
            Some(Message::SmcD(Type::Accept)) => {
                self.core.form = Version::V2;
                self.core.decline(Diagnosis::ModeUnsupp);
            }
            Some(_) => self.core.fail(libc::EPROTO),
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

    /// In a `Prepare` task: a CONFIRM RKEY request is on its way. Without [`Client::prepared`] in 2 s, the
    /// connection is declined with [`Diagnosis::ErrRegBuf`].
    pub fn confirm_rkey_sent(&mut self, now: Instant) {
        self.core.confirm_rkey_sent(now);
    }

    /// A `Prepare` task is done.
    pub fn prepared(&mut self, prepared: Prepared, now: Instant) {
        if !self.core.is_preparing() {
            return;
        }
        let Some((accept, v2, terms)) = self.accept else {
            return;
        };
        let mut end = prepared.end;
        end.mtu = Mtu::min(end.mtu, accept.end.mtu);
        let extension = terms.map(|terms| {
            let more = self.more_gids.iter().take(List::<Gid>::MAX - 1);
            let gids: Vec<Gid> = std::iter::once(end.gid).chain(more).collect();
            FirstContact {
                gids: List::from_slice(&gids).unwrap_or_default(),
                ..self.core.extension(&terms, prepared.direct)
            }
        });
        self.core.send(&Message::Confirm(AcceptConfirm {
            system_id: self.core.local.system_id,
            first_contact: accept.first_contact,
            end,
            v2: Some(V2Part {
                eid: v2.eid,
                extension,
            }),
        }));
        let established = Established {
            first_contact: accept.first_contact,
            peer_system_id: accept.system_id,
            local: end,
            peer: accept.end,
            eid: v2.eid,
            terms,
        };
        if accept.first_contact {
            self.core.task(Task::AwaitConfirmLink);
            self.core.start_link(established, Task::AwaitAddLink, now);
        } else {
            self.core.established(established);
        }
    }

    /// CONFIRM LINK is answered. Ignored if that was too late.
    pub fn link_ready(&mut self, now: Instant) {
        self.core.link_ready(now);
    }

    /// ADD LINK is answered, with a second link or without.
    pub fn add_link_done(&mut self, now: Instant) {
        self.core.add_link_done(now);
    }

    /// Gives SMC up for this connection. While an answer of the server is due, this waits until it has been read;
    /// [`Diagnosis::TimeoutCl`] waits another second for the peer's Decline.
    pub fn decline(&mut self, diagnosis: Diagnosis, now: Instant) {
        self.core.declined_by_driver(diagnosis, now);
    }

    fn accepted(&mut self, accept: AcceptConfirm) {
        // We have proposed version 2, and nothing else.
        let Some(v2) = accept.v2 else {
            return self.core.fail(libc::EPROTO);
        };
        self.core.form = Version::V2;
        self.core.subsequent = !accept.first_contact;
        if self.core.refuse() {
            return;
        }
        let task = if accept.first_contact {
            match self.terms(v2.extension) {
                Ok(terms) => self.accept = Some((accept, v2, Some(terms))),
                Err(diagnosis) => return self.core.decline(diagnosis),
            }
            Task::PrepareFirst(accept)
        } else {
            self.accept = Some((accept, v2, None));
            Task::PrepareSubsequent(accept)
        };
        if accept.end.rmb_addr().is_none() {
            return self.core.decline(Diagnosis::CnfErr);
        }
        self.core.task(task);
    }

    /// What the server has chosen, if that is among what we have offered.
    fn terms(&self, extension: Option<FirstContact>) -> Result<Terms, Diagnosis> {
        let extension = extension.ok_or(Diagnosis::MaxConnErr)?;
        let local = &self.core.local;
        let terms = Terms::from(&extension);
        if extension.release > 0 {
            if !(MIN_CONNS..=local.max_conns).contains(&terms.max_conns) {
                return Err(Diagnosis::MaxConnErr);
            }
            if !(1..=local.max_links).contains(&terms.max_links) {
                return Err(Diagnosis::MaxLinkErr);
            }
        }
        Ok(Terms {
            features: terms.features & local.features,
            ..terms
        })
    }
}
