//! What received LLC messages do.

use std::time::Instant;

use super::rkey::Request;
use super::{Action, Down, Llc, MAX_WAITING, RESPONSE_TIME, RkeyError, Role, State};
use crate::wire::Error;
use crate::wire::llc::{
    AddLink, AddLinkAnswer, Body, ConfirmLink, ConfirmRkey, DeleteLink, DeleteReason, DeleteRkey,
    Message, RequestAddLink, TestLink, Version,
};

/// Reason in the reject of ADD LINK (RFC 7609): no alternate path.
const NO_ALTERNATE_PATH: u8 = 1;

/// A request that waits for the end of the running flow.
#[derive(Clone, Copy, Debug)]
pub(super) enum Delayed {
    AddLink(Version, AddLink<'static>),
    DeleteLink(Version, DeleteLink),
}

impl Llc {
    /// Takes a message that was received on the link. CDC messages go elsewhere, see [`Llc::note_received`].
    ///
    /// # Errors
    /// The bytes are no LLC message, or none that Linux sends. They have no effect, but prove that the link is alive.
    pub fn receive(&mut self, bytes: &[u8], now: Instant) -> Result<(), Error> {
        if matches!(self.state, State::Down) {
            return Ok(());
        }
        self.note_received(now);
        let message = Message::parse(bytes)?;
        if !message.is_response() && self.actions.len() >= MAX_WAITING {
            return Ok(());
        }
        let version = message.version;
        match message.body {
            Body::ConfirmLink(confirm) => self.on_confirm_link(version, confirm, now),
            Body::AddLink(add) => {
                if add.answer == AddLinkAnswer::Request && self.config.role == Role::Client {
                    let extension = None;
                    let add = AddLink { extension, ..add };
                    self.delay(Delayed::AddLink(version, add), now);
                }
            }
            // Part of a flow that begins with an accepted ADD LINK.
            Body::AddLinkContinuation(_) => (),
            Body::DeleteLink(delete) => self.on_delete_link(version, delete, now),
            Body::RequestAddLink(request) => {
                if !request.response && self.config.role == Role::Server {
                    let response = true;
                    let gids = &[];
                    self.send(
                        version,
                        Body::RequestAddLink(RequestAddLink { response, gids }),
                    );
                }
            }
            Body::ConfirmRkey(confirm) => self.on_confirm_rkey(version, confirm, now),
            Body::TestLink(test) => {
                // A response has done its work by being received.
                if !test.response {
                    let response = true;
                    self.send(version, Body::TestLink(TestLink { response, ..test }));
                }
            }
            Body::DeleteRkey(delete) => self.on_delete_rkey(version, delete, now),
        }
        Ok(())
    }

    fn on_confirm_link(&mut self, version: Version, confirm: ConfirmLink, now: Instant) {
        let expected = confirm.response == (self.config.role == Role::Server);
        if !expected || !matches!(self.state, State::Confirming { .. }) {
            return;
        }
        if !confirm.no_eyecatcher {
            if self.config.role == Role::Server {
                self.delete_all(false, DeleteReason::PROGRAM);
            }
            return self.down(Down::Eyecatcher);
        }
        if self.config.role == Role::Client {
            self.link = confirm.link;
            self.ready = true;
            self.actions.push_back(Action::ReadyToSend);
            let answer = self.confirm_link(true, confirm.uid);
            self.send(version, Body::ConfirmLink(answer));
        }
        self.established(now);
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
            Delayed::AddLink(version, add) => {
                let answer = AddLinkAnswer::Reject {
                    reason: NO_ALTERNATE_PATH,
                };
                self.send(version, Body::AddLink(AddLink { answer, ..add }));
            }
            Delayed::DeleteLink(version, delete) => self.delete_this_link(version, delete, now),
        }
    }

    fn on_delete_link(&mut self, version: Version, delete: DeleteLink, now: Instant) {
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
            _ => self.delay(Delayed::DeleteLink(version, delete), now),
        }
    }

    /// The peer wants a single link to end.
    fn delete_this_link(&mut self, version: Version, delete: DeleteLink, now: Instant) {
        let response = DeleteLink {
            response: true,
            ..delete
        };
        let reason = delete.reason;
        if delete.link != self.link {
            let reason = DeleteReason::UNKNOWN_LINK;
            self.send(version, Body::DeleteLink(DeleteLink { reason, ..response }));
        } else if self.config.role == Role::Client {
            self.send(version, Body::DeleteLink(response));
            self.down(Down::Peer(reason));
        } else {
            // Only the server deletes links: it answers a client's wish with a request of its own.
            self.send(version, Body::DeleteLink(delete));
            let until = now + RESPONSE_TIME;
            self.state = State::Deleting { until, reason };
        }
    }

    fn on_confirm_rkey(&mut self, version: Version, confirm: ConfirmRkey, now: Instant) {
        if confirm.response {
            let own = |request: &Request| *request == Request::Confirm(confirm.token);
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
        let negative = self.rtokens.insert(confirm.token).is_err();
        let answer = ConfirmRkey {
            response: true,
            negative,
            ..confirm
        };
        self.send(version, Body::ConfirmRkey(answer));
    }

    fn on_delete_rkey(&mut self, version: Version, delete: DeleteRkey, now: Instant) {
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
            if !self.rtokens.remove(*rkey) {
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
        self.send(version, Body::DeleteRkey(answer));
    }
}
