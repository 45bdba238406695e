//! What received LLC messages do.

use std::time::Instant;

use super::links::{Adding, Offer};
use super::rkey::Request;
use super::{Action, Down, FIRST, Llc, MAX_WAITING, RkeyError, Role, State};
use crate::link::rtoken::Rtokens;
use crate::link::{LANES, Lane};
use crate::wire::Error;
use crate::wire::llc::{
    AddLink, AddLinkAnswer, AddLinkExtension, Body, ConfirmLink, ConfirmRkey, DeleteLink,
    DeleteReason, DeleteRkey, Message, RequestAddLink, TestLink, Version,
};

/// A request that waits for the end of the running flow.
#[derive(Debug)]
pub(super) enum Delayed {
    AddLink(Offer),
    DeleteLink(Lane, Version, DeleteLink),
}

impl Llc {
    /// Takes a message that was received on a link. CDC messages go elsewhere, see [`Llc::note_received`].
    ///
    /// # Errors
    /// The bytes are no LLC message, or none that Linux sends. They have no effect, but prove that the link is alive.
    pub fn receive(&mut self, lane: Lane, bytes: &[u8], now: Instant) -> Result<(), Error> {
        if matches!(self.state, State::Down) || self.link(lane).is_none() {
            return Ok(());
        }
        self.note_received(lane, now);
        let message = Message::parse(bytes)?;
        if !message.is_response() && self.actions.len() >= MAX_WAITING {
            return Ok(());
        }
        let version = message.version;
        match message.body {
            Body::ConfirmLink(confirm) => self.on_confirm_link(lane, version, confirm, now),
            Body::AddLink(add) => match (add.answer, self.config.role) {
                (AddLinkAnswer::Request, Role::Client) => {
                    let rmbs = add.extension.iter().flat_map(AddLinkExtension::entries);
                    let offer = Offer {
                        lane,
                        version,
                        rmbs: rmbs.collect(),
                        add: AddLink {
                            extension: None,
                            ..add
                        },
                    };
                    self.delay(Delayed::AddLink(offer), now);
                }
                // A client may suggest a link; that is left to the server's own judgement.
                (AddLinkAnswer::Request, Role::Server) => (),
                _ => self.on_answer(lane, &add, now),
            },
            // Part of a flow of version 1, in which a link is never added.
            Body::AddLinkContinuation(_) => (),
            Body::DeleteLink(delete) => self.on_delete_link(lane, version, delete, now),
            Body::RequestAddLink(request) => {
                if !request.response && self.config.role == Role::Server {
                    let response = true;
                    let gids = &[];
                    self.send(
                        lane,
                        version,
                        Body::RequestAddLink(RequestAddLink { response, gids }),
                    );
                }
            }
            Body::ConfirmRkey(confirm) => self.on_confirm_rkey(lane, version, confirm, now),
            Body::TestLink(test) => {
                // A response has done its work by being received.
                if !test.response {
                    let response = true;
                    self.send(lane, version, Body::TestLink(TestLink { response, ..test }));
                }
            }
            Body::DeleteRkey(delete) => self.on_delete_rkey(lane, version, delete, now),
        }
        Ok(())
    }

    fn on_confirm_link(
        &mut self,
        lane: Lane,
        version: Version,
        confirm: ConfirmLink,
        now: Instant,
    ) {
        let server = self.config.role == Role::Server;
        let adding = matches!(self.adding, Some((new, Adding::Accepted, _)) if new == lane);
        let first = matches!(self.state, State::Confirming { .. }) && lane == FIRST;
        if confirm.response != server || !(first || self.is_up() && adding) {
            return;
        }
        if first && !confirm.no_eyecatcher {
            if server {
                self.delete_all(false, DeleteReason::PROGRAM);
            }
            return self.down(Down::Eyecatcher);
        }
        let Some(link) = self.links.get_mut(lane).and_then(Option::as_mut) else {
            return;
        };
        if !first && link.number != confirm.link {
            return;
        }
        if !server {
            link.number = confirm.link;
            link.ready = true;
            self.actions.push_back(Action::ReadyToSend(lane));
            if let Some(body) = self.confirm_link(lane, true, confirm.uid) {
                self.send(lane, version, body);
            }
        }
        if first {
            self.established(now);
        } else {
            self.link_added(lane, now);
        }
    }

    /// Handles a request now, or when the running flow has ended.
    fn delay(&mut self, request: Delayed, now: Instant) {
        match self.state {
            State::Up | State::Confirming { .. } => {
                self.delayed.get_or_insert(request);
                self.next_flow(now);
            }
            // The group ends anyway.
            State::Deleting { .. } | State::Closing { .. } | State::Down => (),
        }
    }

    pub(super) fn handle_delayed(&mut self, request: Delayed, now: Instant) {
        match request {
            Delayed::AddLink(offer) => self.on_offer(offer, now),
            Delayed::DeleteLink(lane, version, delete) => {
                self.delete_link(lane, version, delete, now);
            }
        }
    }

    fn on_delete_link(&mut self, lane: Lane, version: Version, delete: DeleteLink, now: Instant) {
        match (self.state, delete) {
            (State::Closing { .. }, DeleteLink { all: true, .. }) => self.down(Down::Idle),
            (State::Deleting { reason, .. }, DeleteLink { response: true, .. }) => {
                self.down(Down::Peer(reason));
            }
            (_, DeleteLink { response: true, .. }) => (),
            (
                _,
                DeleteLink {
                    all: true, reason, ..
                },
            ) => {
                self.delete_all(true, reason);
                self.abort_connections();
                self.delete_all(false, DeleteReason::PROGRAM);
                self.down(Down::Peer(reason));
            }
            _ => self.delay(Delayed::DeleteLink(lane, version, delete), now),
        }
    }

    fn on_confirm_rkey(
        &mut self,
        lane: Lane,
        version: Version,
        confirm: ConfirmRkey,
        now: Instant,
    ) {
        if confirm.response {
            let token = Some(confirm.token);
            let own = |request: &Request| matches!(request, Request::Confirm(tokens) if tokens.contains(&token));
            if let Some(request) = self.rkeys.finish(own) {
                let result = match confirm.negative {
                    false => Ok(()),
                    true => Err(RkeyError::Refused),
                };
                self.actions.push_back(request.done(result));
                self.next_flow(now);
            }
            return;
        }
        let mut tokens: Rtokens = [None; LANES];
        tokens[lane] = Some(confirm.token);
        for other in confirm.others.iter().flatten() {
            if let Some(at) = self.lane_of(other.link).filter(|at| *at != lane) {
                tokens[at] = Some(other.token);
            }
        }
        let negative = self.rtokens.insert(tokens).is_err();
        let answer = ConfirmRkey {
            response: true,
            negative,
            ..confirm
        };
        self.send(lane, version, Body::ConfirmRkey(answer));
    }

    fn on_delete_rkey(&mut self, lane: Lane, version: Version, delete: DeleteRkey, now: Instant) {
        if delete.response {
            // Version 2 doesn't say which.
            let own = |request: &Request| matches!(request, Request::Delete(_));
            if let Some(request) = self.rkeys.finish(own) {
                self.actions.push_back(request.done(Ok(())));
                self.next_flow(now);
            }
            return;
        }
        let mut unknown = 0;
        let mut mask = 0;
        for (at, rkey) in delete.rkeys.as_slice().iter().enumerate() {
            if !self.rtokens.remove(lane, *rkey) {
                unknown += 1;
                mask |= 0x80 >> at;
            }
        }
        let answer = DeleteRkey {
            response: true,
            negative: unknown > 0,
            errors: match version {
                Version::V1 => mask,
                Version::V2 => unknown,
            },
            rkeys: match version {
                Version::V1 => delete.rkeys,
                Version::V2 => delete.rkeys.blank(),
            },
        };
        self.send(lane, version, Body::DeleteRkey(answer));
    }
}
