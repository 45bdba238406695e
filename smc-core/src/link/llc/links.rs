//! Adding a link to a group, and losing one of two.
//!
//! | server | client |
//! |---|---|
//! | [`Action::OfferLink`]: makes a queue pair, [`Llc::offer_link`] | |
//! | sends ADD LINK | |
//! | | [`Action::AnswerLink`]: makes a queue pair in RTR, [`Llc::accept_link`] |
//! | | sends the accepting ADD LINK |
//! | [`Action::ConnectLink`]: queue pair up to RTS, [`Llc::link_connected`] | |
//! | sends CONFIRM LINK, on the new link | |
//! | | [`Action::ReadyToSend`] |
//! | | sends the answer, on the new link: [`Action::LinkUp`] |
//! | [`Action::LinkUp`] | |
//!
//! Either side may say no on the way ([`Llc::refuse_link`]); the queue pair is taken back by [`Action::DropLink`].
//!
//! A link that is lost while the other works is dropped at once, and the peer told by DELETE LINK; its connections
//! move ([`Action::DropLink`]). Of a client's DELETE LINK the server makes a request of its own, as only a server
//! deletes links; the client needs no more than to answer it.

use std::time::{Duration, Instant};

use super::{Action, Down, Llc, RESPONSE_TIME, Role, State};
use crate::link::rtoken::Rtokens;
use crate::link::{LANES, Lane};
use crate::wire::llc::{
    AddLink, AddLinkAnswer, AddLinkExtension, Body, DeleteLink, DeleteReason, RmbEntry, TestLink,
    Version,
};
use crate::wire::{Gid, Mac, Mtu, Psn, Qpn};

/// How long CONFIRM LINK on a new link may take.
pub const LINK_TIME: Duration = Duration::from_secs(5);
/// Reason in the reject of ADD LINK (RFC 7609): no alternate path.
const NO_ALTERNATE_PATH: u8 = 1;

/// One side's end of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    /// Port.
    pub mac: Mac,
    /// GID of the port.
    pub gid: Gid,
    /// Queue pair.
    pub qpn: Qpn,
}

/// One side's end of a link that is being added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewEnd {
    /// Address.
    pub end: End,
    /// Path MTU.
    pub mtu: Mtu,
    /// First packet sequence number.
    pub psn: Psn,
}

/// One link of the group.
#[derive(Clone, Copy, Debug)]
pub(super) struct Link {
    /// Number on the wire.
    pub(super) number: u8,
    pub(super) own: End,
    /// The queue pair takes requests. Before, nothing is said on it.
    pub(super) ready: bool,
    /// Confirmed.
    pub(super) up: bool,
    /// When something was last received on it.
    pub(super) heard: Instant,
    /// Until when TEST LINK has to be answered.
    pub(super) test_until: Option<Instant>,
}

/// The server's request, as the client got it.
#[derive(Debug)]
pub(super) struct Offer {
    /// The link that it came by.
    pub(super) lane: Lane,
    pub(super) version: Version,
    pub(super) add: AddLink<'static>,
    pub(super) rmbs: Vec<RmbEntry>,
}

/// How far adding a link has come.
#[derive(Debug)]
pub(super) enum Adding {
    /// The driver makes the queue pair. Client: for this request.
    Asked(Option<Offer>),
    /// Server: the request is sent.
    Offered,
    /// Client: the answer is sent. Server: it has come.
    Accepted,
}

impl Llc {
    /// Whether a link is being added, or a client waits for the server to begin with it after the first one.
    pub fn is_adding(&self) -> bool {
        self.adding.is_some() || self.awaits_offer
    }

    /// A place for one more link.
    fn free_lane(&self) -> Option<Lane> {
        let links = self.links.iter().flatten().count();
        let allowed = usize::from(self.config.max_links).min(LANES);
        let free = self.links.iter().position(Option::is_none)?;
        (links < allowed && self.config.version == Version::V2).then_some(free)
    }

    /// Server: begins to add a link, if there may be one.
    pub(super) fn start_adding(&mut self, now: Instant) {
        let Some(lane) = self.free_lane() else { return };
        self.rtokens.clear(lane);
        self.adding = Some((lane, Adding::Asked(None), now + RESPONSE_TIME));
        self.actions.push_back(Action::OfferLink(lane));
    }

    /// Client: a request to add one.
    pub(super) fn on_offer(&mut self, offer: Offer, now: Instant) {
        self.awaits_offer = false;
        let AddLink { mac, gid, qpn, .. } = offer.add;
        let known = self.lane_of(offer.add.link).is_some();
        let (Some(lane), Some(mtu), false) = (self.free_lane(), offer.add.mtu, known) else {
            return self.reject(&offer);
        };
        let peer = NewEnd {
            end: End { mac, gid, qpn },
            mtu,
            psn: offer.add.psn,
        };
        self.rtokens.clear(lane);
        self.adding = Some((lane, Adding::Asked(Some(offer)), now + RESPONSE_TIME));
        self.actions.push_back(Action::AnswerLink { lane, peer });
    }

    fn reject(&mut self, offer: &Offer) {
        let answer = AddLinkAnswer::Reject {
            reason: NO_ALTERNATE_PATH,
        };
        let add = AddLink {
            answer,
            ..offer.add
        };
        self.send(offer.lane, offer.version, Body::AddLink(add));
    }

    /// Server: the queue pair that [`Action::OfferLink`] asked for is made. `rmbs`: the RTokens of all own RMBs that
    /// the peer knows, those for the new link included.
    pub fn offer_link(&mut self, own: NewEnd, rmbs: &[Rtokens], now: Instant) {
        let (Some((lane, Adding::Asked(None), _)), Some(carrier)) = (&self.adding, self.carrier())
        else {
            return;
        };
        let lane = *lane;
        self.last_number = self.last_number.wrapping_add(1).max(1);
        let number = self.last_number;
        self.place(lane, number, own.end, now);
        let answer = AddLinkAnswer::Request;
        self.adding = Some((lane, Adding::Offered, now + RESPONSE_TIME));
        let version = self.config.version;
        self.send_add_link(carrier, version, answer, number, own, (lane, rmbs));
    }

    /// Client: the queue pair that [`Action::AnswerLink`] asked for is made, and can receive. `rmbs` as for
    /// [`Llc::offer_link`], the MTU that of the port.
    pub fn accept_link(&mut self, own: NewEnd, rmbs: &[Rtokens], now: Instant) {
        let Some((lane, Adding::Asked(Some(offer)), _)) = self.adding.take() else {
            return;
        };
        for entry in &offer.rmbs {
            let known = (offer.lane, entry.known);
            self.rtokens.extend(known, lane, entry.token);
        }
        let number = offer.add.link;
        self.place(lane, number, own.end, now);
        self.adding = Some((lane, Adding::Accepted, now + LINK_TIME));
        let own = NewEnd {
            mtu: offer.add.mtu.map_or(own.mtu, |mtu| mtu.min(own.mtu)),
            ..own
        };
        let answer = AddLinkAnswer::Accept;
        self.send_add_link(offer.lane, offer.version, answer, number, own, (lane, rmbs));
    }

    /// There is no way for the link that [`Action::OfferLink`] or [`Action::AnswerLink`] asked for.
    pub fn refuse_link(&mut self, now: Instant) {
        if let Some((_, Adding::Asked(offer), _)) =
            self.adding.take_if(|a| matches!(a.1, Adding::Asked(_)))
        {
            if let Some(offer) = offer {
                self.reject(&offer);
            }
            self.next_flow(now);
        }
    }

    /// Server: the queue pair of [`Action::ConnectLink`] can send.
    pub fn link_connected(&mut self, now: Instant) {
        let Some((lane, Adding::Accepted, _)) = self.adding else {
            return;
        };
        if let Some(link) = self.links.get_mut(lane).and_then(Option::as_mut) {
            link.ready = true;
            link.heard = now;
            let uid = self
                .config
                .link_uid
                .wrapping_add(u32::from(link.number) - 1);
            if let Some(body) = self.confirm_link(lane, false, uid) {
                self.send(lane, self.config.version, body);
            }
        }
    }

    /// Tests the links at once: the peer has reset a TCP connection, as it does when it has given the group up and can't
    /// say so on a link.
    pub fn doubt(&mut self, now: Instant) {
        if !self.is_up() {
            return;
        }
        for lane in 0..LANES {
            if self.test_end(lane).is_none() {
                self.test(lane, now);
            }
        }
        self.doubted = true;
    }

    /// Whether such a test is still to be answered: until then nobody knows whether a new connection may use the group.
    pub fn in_doubt(&self) -> bool {
        self.is_up() && self.doubted && (0..LANES).any(|lane| self.test_end(lane).is_some())
    }

    pub(super) fn test(&mut self, lane: Lane, now: Instant) {
        if let Some(link) = self.links.get_mut(lane).and_then(Option::as_mut)
            && link.up
        {
            link.test_until = Some(now + RESPONSE_TIME);
            let body = Body::TestLink(TestLink::default());
            self.send(lane, self.config.version, body);
        }
    }

    /// When a link is to be tested.
    pub(super) fn next_test(&self, lane: Lane) -> Option<Instant> {
        let link = self.links.get(lane)?.as_ref()?;
        if !self.is_up() || !link.up || link.test_until.is_some() {
            return None;
        }
        link.heard.checked_add(self.config.keepalive?)
    }

    /// Until when the test of a link has to be answered.
    pub(super) fn test_end(&self, lane: Lane) -> Option<Instant> {
        self.links.get(lane)?.as_ref()?.test_until
    }

    /// The link carries nothing any more: completion with an error, port down, device gone.
    pub fn link_failed(&mut self, lane: Lane, now: Instant) {
        self.lose(lane, Down::LinkFailed, now);
    }

    /// Gives a link up; if it was the last one, the group.
    pub(super) fn lose(&mut self, lane: Lane, why: Down, now: Instant) {
        let Some(link) = self.links.get(lane).copied().flatten() else {
            return;
        };
        if !self.is_up() || !self.has_other(lane) {
            return self.down(why);
        }
        self.drop_link(lane, now);
        self.request(Body::DeleteLink(DeleteLink {
            response: false,
            all: false,
            orderly: true,
            link: link.number,
            reason: DeleteReason::LOST_PATH,
        }));
    }

    /// Whether another link works.
    pub(super) fn has_other(&self, lane: Lane) -> bool {
        let mut links = self.links.iter().enumerate();
        links.any(|(other, link)| other != lane && link.is_some_and(|link| link.up))
    }

    /// Takes a link out, another one being there.
    pub(super) fn drop_link(&mut self, lane: Lane, now: Instant) {
        if let Some(place) = self.links.get_mut(lane) {
            *place = None;
        }
        self.adding.take_if(|(adding, ..)| *adding == lane);
        self.actions.push_back(Action::DropLink(lane));
        // It may have gone with the link; twice does no harm.
        if let Some(request) = self.rkeys.running() {
            self.send_request(request);
        }
        self.next_flow(now);
    }

    /// The server's side of the client's answer.
    pub(super) fn on_answer(&mut self, lane: Lane, add: &AddLink<'_>, now: Instant) {
        let Some((new, Adding::Offered, _)) = self.adding else {
            return;
        };
        let number = self.links.get(new).copied().flatten().map(|l| l.number);
        if number != Some(add.link) {
            return;
        }
        let (AddLinkAnswer::Accept, Some(mtu)) = (add.answer, add.mtu) else {
            return self.drop_link(new, now);
        };
        for entry in add.extension.iter().flat_map(AddLinkExtension::entries) {
            self.rtokens.extend((lane, entry.known), new, entry.token);
        }
        self.adding = Some((new, Adding::Accepted, now + LINK_TIME));
        let AddLink { mac, gid, qpn, .. } = *add;
        let end = End { mac, gid, qpn };
        let psn = add.psn;
        let peer = NewEnd { end, mtu, psn };
        self.actions
            .push_back(Action::ConnectLink { lane: new, peer });
    }

    /// CONFIRM LINK has come by the new link.
    pub(super) fn link_added(&mut self, lane: Lane, now: Instant) {
        self.adding = None;
        if let Some(link) = self.links.get_mut(lane).and_then(Option::as_mut) {
            link.up = true;
        }
        self.actions.push_back(Action::LinkUp(lane));
        self.next_flow(now);
    }

    /// Adding a link has taken too long.
    pub(super) fn adding_expired(&mut self, now: Instant) {
        match self.adding {
            Some((_, Adding::Asked(_), _)) => self.refuse_link(now),
            Some((lane, Adding::Offered, _)) => self.drop_link(lane, now),
            Some((lane, Adding::Accepted, _)) => self.lose(lane, Down::LinkFailed, now),
            None => {}
        }
    }

    /// The peer wants a single link to end. `lane`: where it said so.
    pub(super) fn delete_link(
        &mut self,
        lane: Lane,
        version: Version,
        delete: DeleteLink,
        now: Instant,
    ) {
        let response = DeleteLink {
            response: true,
            ..delete
        };
        let Some(target) = self.lane_of(delete.link) else {
            let reason = DeleteReason::UNKNOWN_LINK;
            let body = Body::DeleteLink(DeleteLink { reason, ..response });
            return self.send(lane, version, body);
        };
        let reason = delete.reason;
        let last = !self.has_other(target);
        match self.config.role {
            Role::Client => {
                self.send(lane, version, Body::DeleteLink(response));
                if last {
                    self.down(Down::Peer(reason));
                } else {
                    self.drop_link(target, now);
                }
            }
            Role::Server if last => {
                self.send(lane, version, Body::DeleteLink(delete));
                let until = now + RESPONSE_TIME;
                self.state = State::Deleting { until, reason };
            }
            Role::Server => {
                self.drop_link(target, now);
                if let Some(carrier) = self.carrier() {
                    self.send(carrier, version, Body::DeleteLink(delete));
                }
            }
        }
    }

    /// The link with this number.
    pub(super) fn lane_of(&self, number: u8) -> Option<Lane> {
        let mut links = self.links.iter();
        links.position(|link| link.is_some_and(|link| link.number == number))
    }

    fn place(&mut self, lane: Lane, number: u8, own: End, now: Instant) {
        if let Some(place) = self.links.get_mut(lane) {
            *place = Some(Link {
                number,
                own,
                ready: false,
                up: false,
                heard: now,
                test_until: None,
            });
        }
    }

    fn send_add_link(
        &mut self,
        carrier: Lane,
        version: Version,
        answer: AddLinkAnswer,
        link: u8,
        own: NewEnd,
        (lane, rmbs): (Lane, &[Rtokens]),
    ) {
        let entry = |tokens: &Rtokens| {
            let known = tokens.get(carrier).copied().flatten()?.rkey;
            let token = tokens.get(lane).copied().flatten()?;
            Some(RmbEntry { known, token }.to_bytes())
        };
        let rmbs: Vec<_> = rmbs.iter().filter_map(entry).collect();
        let body = Body::AddLink(AddLink {
            answer,
            mac: own.end.mac,
            gid: own.end.gid,
            qpn: own.end.qpn,
            link,
            mtu: Some(own.mtu),
            psn: own.psn,
            extension: Some(AddLinkExtension {
                direct: true,
                target: own.end.gid,
                rmbs: &rmbs,
            }),
        });
        self.send(carrier, version, body);
    }
}
