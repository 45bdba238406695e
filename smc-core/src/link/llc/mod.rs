//! State machine of a link group with one link: the LLC part of SMC-R as Linux speaks it (RFC 7609).
//!
//! The driver owns the queue pair. It passes received messages, the time and its wishes to an [`Llc`], does the
//! [`Action`]s that [`Llc::poll`] returns, and calls [`Llc::handle_timeout`] when [`Llc::next_timeout`] has come.
//!
//! ```text
//!              CONFIRM LINK done          own "delete all links" (unused for long)
//! Confirming ────────────────────▶ Up ───────────────────────────────────────────▶ Closing
//!     │                            │                                                  │
//!     │ no or wrong answer         │ test unanswered, link failed, deleted            │ peer's answer, or 2 s
//!     └──────────────────────────▶ Down ◀─────────────────────────────────────────────┘
//! ```
//!
//! A second link is never added: a proposed one is refused, and as server this side proposes none. Both roles should
//! therefore negotiate max_links 1 in CLC. With more a Linux client waits 3 s for a proposal, and a Linux server makes
//! one and holds its data back until it is refused.
//!
//! Flows: own requests about RMBs go one after the other, and each waits at most 20 s for its turn. A peer's request
//! to add or delete a link waits for the end of the running flow; a second one is dropped, and so are responses that
//! nobody waits for. All other requests are answered at once.

mod receive;
mod rkey;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::rtoken::{Full, RtokenTable};
use crate::wire::llc::{
    self, Body, ConfirmLink, DeleteLink, DeleteReason, Message, TestLink, Version,
};
use crate::wire::{Gid, Mac, Qpn, Rtoken};
use receive::Delayed;
use rkey::{Request, RkeyFlows};

pub use rkey::RkeyError;

/// How long a request may stay unanswered.
pub const RESPONSE_TIME: Duration = Duration::from_secs(2);
/// How long a client waits for the server's CONFIRM LINK after its Confirm has left.
pub const CONFIRM_LINK_TIME: Duration = Duration::from_secs(4);
/// Silence after which a link is tested, unless configured otherwise.
pub const KEEPALIVE: Duration = Duration::from_secs(30);
/// How long a server keeps a group without connections.
pub const SERVER_IDLE_TIME: Duration = Duration::from_secs(600);
/// How long a client does. The server ends it first, normally.
pub const CLIENT_IDLE_TIME: Duration = Duration::from_secs(610);

/// Requests of the peer are dropped while so many actions wait to be polled, so that a peer which asks faster than
/// the driver can answer doesn't fill our memory.
const MAX_WAITING: usize = 64;
/// Number of a server's first link.
const FIRST_LINK: u8 = 1;

/// Which side of the TCP connections a group is on. It is the same for all connections of the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The side that accepted.
    Server,
    /// The side that connected.
    Client,
}

impl Role {
    /// How long this side keeps a group without connections.
    pub fn idle_time(self) -> Duration {
        match self {
            Role::Server => SERVER_IDLE_TIME,
            Role::Client => CLIENT_IDLE_TIME,
        }
    }
}

/// What a group starts with.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Own side.
    pub role: Role,
    /// Form of own requests: that of the CLC messages which made the group.
    pub version: Version,
    /// Own port.
    pub mac: Mac,
    /// Own GID.
    pub gid: Gid,
    /// Own queue pair.
    pub qpn: Qpn,
    /// Server: name of the link for diagnosis.
    pub link_uid: u32,
    /// Negotiated limit of links.
    pub max_links: u8,
    /// Negotiated limit of connections.
    pub max_conns: u8,
    /// Silence after which the link is tested; `None` for never.
    pub keepalive: Option<Duration>,
    /// How long the group is kept without connections: [`Role::idle_time`], normally.
    pub idle: Duration,
}

/// What the driver has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Client: bring the queue pair from RTR to RTS.
    ReadyToSend,
    /// Send this message on the link, after those before it.
    Send([u8; llc::LEN]),
    /// The link works: connections may use the group.
    Established,
    /// [`Llc::confirm_rkey`] has come to an end.
    ConfirmRkeyDone {
        /// The RMB.
        token: Rtoken,
        /// Whether the peer may be expected to know it.
        result: Result<(), RkeyError>,
    },
    /// [`Llc::delete_rkey`] has come to an end: answered, or given up.
    DeleteRkeyDone {
        /// The RMB.
        rkey: u32,
    },
    /// Send a CDC message with the abort flag on each connection.
    AbortConnections,
    /// The group is gone: reset the TCP connection of each of its connections, and drop the queue pair once what was to
    /// be sent before is sent, or can't be. Always the last action.
    Down(Down),
}

/// Why a group is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Down {
    /// The other side didn't say CONFIRM LINK in time. CLC: decline with TIMEOUT_CL.
    #[error("no CONFIRM LINK in time")]
    ConfirmTimeout,
    /// The other side wants eyecatchers in RMBs. CLC: decline with RMBE_EC.
    #[error("the peer wants RMBE eyecatchers")]
    Eyecatcher,
    /// TEST LINK wasn't answered.
    #[error("the peer is silent")]
    Silent,
    /// The driver said so.
    #[error("the link failed")]
    LinkFailed,
    /// The peer deleted the link, or the group.
    #[error("the peer ended the link group, reason {:#010x}", .0.0)]
    Peer(DeleteReason),
    /// [`Llc::terminate`].
    #[error("link group ended, reason {:#010x}", .0.0)]
    Local(DeleteReason),
    /// No connection used the group for long.
    #[error("the link group was unused")]
    Idle,
}

#[derive(Clone, Copy, Debug)]
enum State {
    /// CONFIRM LINK is under way.
    Confirming { until: Instant },
    /// In use.
    Up,
    /// Server: told the client to delete the link, as the client had asked.
    Deleting {
        until: Instant,
        reason: DeleteReason,
    },
    /// Told the peer that the group ends.
    Closing { until: Instant },
    /// Gone.
    Down,
}

/// The LLC side of one link group.
#[derive(Debug)]
pub struct Llc {
    config: Config,
    state: State,
    /// Number of the link; the client learns it from CONFIRM LINK.
    link: u8,
    /// The queue pair takes requests: a client's does from CONFIRM LINK on. Before, nothing is said on it.
    ready: bool,
    /// RMBs of the peer.
    rtokens: RtokenTable,
    /// Own CONFIRM RKEY and DELETE RKEY requests.
    rkeys: RkeyFlows,
    /// A request of the peer that waits for the end of the running flow.
    delayed: Option<Delayed>,
    /// When something was last received on the link.
    heard: Instant,
    /// Until when TEST LINK has to be answered.
    test_until: Option<Instant>,
    /// That is because the peer has reset a TCP connection.
    doubted: bool,
    /// Since when the group has had no connection.
    idle_since: Option<Instant>,
    actions: VecDeque<Action>,
}

impl Llc {
    /// A group at first contact. The server creates it when the queue pair is in RTS after the Confirm has come, and
    /// asks for CONFIRM LINK at once; the client before it sends the Confirm, with the queue pair in RTR.
    ///
    /// It counts as used until [`Llc::set_connections`] says otherwise.
    pub fn new(config: Config, now: Instant) -> Llc {
        let wait = match config.role {
            Role::Server => RESPONSE_TIME,
            Role::Client => CONFIRM_LINK_TIME,
        };
        let mut llc = Llc {
            config,
            state: State::Confirming { until: now + wait },
            link: FIRST_LINK,
            ready: config.role == Role::Server,
            rtokens: RtokenTable::default(),
            rkeys: RkeyFlows::default(),
            delayed: None,
            heard: now,
            test_until: None,
            doubted: false,
            idle_since: None,
            actions: VecDeque::new(),
        };
        if config.role == Role::Server {
            llc.request(Body::ConfirmLink(llc.confirm_link(false, config.link_uid)));
        }
        llc
    }

    /// The next action, in order. Poll until there is none after each call of another method.
    pub fn poll(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Whether a new connection may use the group.
    pub fn is_up(&self) -> bool {
        matches!(self.state, State::Up)
    }

    /// Whether CONFIRM LINK is under way.
    pub fn is_confirming(&self) -> bool {
        matches!(self.state, State::Confirming { .. })
    }

    /// Since when the group has had no connection.
    pub fn idle_since(&self) -> Option<Instant> {
        self.idle_since
    }

    /// Number of the link, as DELETE LINK names it.
    pub fn link(&self) -> u8 {
        self.link
    }

    /// The peer's RMBs.
    pub fn rtokens(&self) -> &RtokenTable {
        &self.rtokens
    }

    /// Adds an RMB of the peer that an Accept or Confirm announced.
    ///
    /// # Errors
    /// [`Full`]: decline with ERR_RTOK.
    pub fn add_rtoken(&mut self, token: Rtoken) -> Result<(), Full> {
        self.rtokens.insert(token)
    }

    /// Announces an own RMB to the peer: on subsequent contact, the server before its Accept, the client before its
    /// Confirm. [`Action::ConfirmRkeyDone`] follows.
    pub fn confirm_rkey(&mut self, token: Rtoken, now: Instant) {
        self.local(Request::Confirm(token), now);
    }

    /// Whether the announcement of this RMB still waits for its turn.
    pub fn rkey_waits(&self, token: Rtoken) -> bool {
        self.rkeys.waits(Request::Confirm(token))
    }

    /// Takes an own RMB back after both sides have closed the connection. [`Action::DeleteRkeyDone`] follows.
    pub fn delete_rkey(&mut self, rkey: u32, now: Instant) {
        self.local(Request::Delete(rkey), now);
    }

    fn local(&mut self, request: Request, now: Instant) {
        if !matches!(self.state, State::Confirming { .. } | State::Up) {
            self.actions.push_back(request.done(Err(RkeyError::Down)));
            return;
        }
        match self.rkeys.push(request, now) {
            Ok(()) => self.next_flow(now),
            Err(error) => self.actions.push_back(request.done(Err(error))),
        }
    }

    /// Says how many connections use the group, those that are being set up included.
    pub fn set_connections(&mut self, connections: usize, now: Instant) {
        self.idle_since = match connections {
            0 => self.idle_since.or(Some(now)),
            _ => None,
        };
    }

    /// Notes that something other than an LLC message was received on the link: it is alive.
    pub fn note_received(&mut self, now: Instant) {
        self.heard = self.heard.max(now);
        self.test_until = None;
    }

    /// Tests the link at once: the peer has reset a TCP connection, as it does when it has given the group up and can't say
    /// so on the link.
    pub fn doubt(&mut self, now: Instant) {
        if !self.is_up() {
            return;
        }
        if self.test_until.is_none() {
            self.test(now);
        }
        self.doubted = true;
    }

    /// Whether that test is still to be answered: until then nobody knows whether a new connection may use the group.
    pub fn in_doubt(&self) -> bool {
        self.is_up() && self.doubted && self.test_until.is_some()
    }

    /// Ends the group because the link no longer carries anything: completion with an error, port down, device gone.
    pub fn link_failed(&mut self) {
        self.down(Down::LinkFailed);
    }

    /// Ends the group at once, while the link works.
    pub fn terminate(&mut self, reason: DeleteReason) {
        if matches!(self.state, State::Down) {
            return;
        }
        self.abort_connections();
        self.delete_all(false, reason);
        self.down(Down::Local(reason));
    }

    /// The time at which [`Llc::handle_timeout`] has something to do, if nothing happens before.
    pub fn next_timeout(&self) -> Option<Instant> {
        let state = match self.state {
            State::Confirming { until }
            | State::Deleting { until, .. }
            | State::Closing { until } => Some(until),
            State::Up => None,
            State::Down => return None,
        };
        let times = [
            state,
            self.rkeys.next_timeout(),
            self.test_until,
            self.next_test(),
            self.idle_end(),
        ];
        times.into_iter().flatten().min()
    }

    /// Does what is due. Pass what was received before to the other methods first, so that a late call of this one
    /// doesn't take an answer for missing.
    pub fn handle_timeout(&mut self, now: Instant) {
        match self.state {
            State::Confirming { until } if now >= until => {
                if self.config.role == Role::Server {
                    self.delete_all(false, DeleteReason::PROGRAM);
                }
                return self.down(Down::ConfirmTimeout);
            }
            State::Deleting { until, reason } if now >= until => {
                return self.down(Down::Peer(reason));
            }
            State::Closing { until } if now >= until => return self.down(Down::Idle),
            State::Down => return,
            _ => (),
        }
        if self.test_until.is_some_and(|until| now >= until) {
            return self.down(Down::Silent);
        }
        if self.rkeys.expire(now, &mut self.actions) {
            self.next_flow(now);
        }
        if self.next_test().is_some_and(|at| now >= at) {
            self.test(now);
        }
        if self.idle_end().is_some_and(|at| now >= at) {
            self.delete_all(true, DeleteReason::PROGRAM);
            self.state = State::Closing {
                until: now + RESPONSE_TIME,
            };
        }
    }

    fn test(&mut self, now: Instant) {
        self.request(Body::TestLink(TestLink::default()));
        self.test_until = Some(now + RESPONSE_TIME);
        self.doubted = false;
    }

    /// When the link is to be tested.
    fn next_test(&self) -> Option<Instant> {
        if !self.is_up() || self.test_until.is_some() {
            return None;
        }
        self.heard.checked_add(self.config.keepalive?)
    }

    /// When the group is to be ended because it isn't used.
    fn idle_end(&self) -> Option<Instant> {
        self.idle_since
            .filter(|_| self.is_up())?
            .checked_add(self.config.idle)
    }

    fn established(&mut self, now: Instant) {
        self.state = State::Up;
        self.actions.push_back(Action::Established);
        self.next_flow(now);
    }

    /// Starts what waits for the end of a flow, unless one is running.
    fn next_flow(&mut self, now: Instant) {
        if !self.is_up() || self.rkeys.is_running() {
            return;
        }
        if let Some(delayed) = self.delayed.take() {
            self.handle_delayed(delayed, now);
        }
        if self.is_up()
            && let Some(request) = self.rkeys.start(now)
        {
            self.request(request.body());
        }
    }

    /// CONFIRM LINK about the own end of the link.
    fn confirm_link(&self, response: bool, uid: u32) -> ConfirmLink {
        ConfirmLink {
            response,
            no_eyecatcher: true,
            mac: self.config.mac,
            gid: self.config.gid,
            qpn: self.config.qpn,
            link: self.link,
            uid,
            max_links: self.config.max_links,
            max_conns: self.config.max_conns,
        }
    }

    /// Requests the end of all links.
    fn delete_all(&mut self, orderly: bool, reason: DeleteReason) {
        self.request(Body::DeleteLink(DeleteLink {
            response: false,
            all: true,
            orderly,
            link: 0,
            reason,
        }));
    }

    fn request(&mut self, body: Body<'_>) {
        self.send(self.config.version, body);
    }

    fn abort_connections(&mut self) {
        if self.ready {
            self.actions.push_back(Action::AbortConnections);
        }
    }

    fn send(&mut self, version: Version, body: Body<'_>) {
        if !self.ready {
            return;
        }
        let mut bytes = [0; llc::LEN];
        let len = Message { version, body }.emit(&mut bytes);
        debug_assert_eq!(len, Some(bytes.len()), "only ADD LINK can be longer");
        self.actions.push_back(Action::Send(bytes));
    }

    fn down(&mut self, why: Down) {
        if matches!(self.state, State::Down) {
            return;
        }
        self.state = State::Down;
        self.delayed = None;
        self.rkeys.fail(&mut self.actions);
        self.actions.push_back(Action::Down(why));
    }
}
