//! State machine of a link group: the LLC part of SMC-R as Linux speaks it (RFC 7609).
//!
//! The driver owns the queue pairs. It passes received messages, the time and its wishes to an [`Llc`], does the
//! [`Action`]s that [`Llc::poll`] returns, and calls [`Llc::handle_timeout`] when [`Llc::next_timeout`] has come.
//!
//! ```text
//!              CONFIRM LINK done          own "delete all links" (unused for long)
//! Confirming ────────────────────▶ Up ───────────────────────────────────────────▶ Closing
//!     │                            │                                                  │
//!     │ no or wrong answer         │ last link: test unanswered, failed, deleted      │ peer's answer, or 2 s
//!     └──────────────────────────▶ Down ◀─────────────────────────────────────────────┘
//! ```
//!
//! A group that may have two links gets the second one when the first is confirmed: see [`links`]. What concerns the group
//! goes by whichever link works.
//!
//! Flows: own requests about RMBs go one after the other, not while a link is being added, and each waits at most 20 s
//! for its turn. A peer's request to add or delete a link waits for the end of the running flow; a second one is
//! dropped, and so are responses that nobody waits for. All other requests are answered at once.

mod links;
mod receive;
mod rkey;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::rtoken::{Full, RtokenTable, Rtokens};
use super::{LANES, Lane};
use crate::wire::llc::{
    Body, ConfirmLink, ConfirmRkey, DeleteLink, DeleteReason, DeleteRkey, LinkRtoken, Message,
    Rkeys, Version,
};
use links::{Adding, Link};
use receive::Delayed;
use rkey::{Request, RkeyFlows};

pub use links::{End, LINK_TIME, NewEnd};
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
/// Place of the first link.
const FIRST: Lane = 0;
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
    /// Own end of the first link.
    pub end: End,
    /// Server: name of the first link for diagnosis; the others' follow.
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
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Client: bring the link's queue pair from RTR to RTS.
    ReadyToSend(Lane),
    /// Send this message on the link, after those before it.
    Send(Lane, Vec<u8>),
    /// The first link works: connections may use the group.
    Established,
    /// Server: make a queue pair for one more link, with receives posted, then call [`Llc::offer_link`]. If there is
    /// no device for it, [`Llc::refuse_link`].
    OfferLink(Lane),
    /// Client: make a queue pair for one more link, up to RTR, then call [`Llc::accept_link`]. If there is no way to
    /// the peer's end but the one that the group has, [`Llc::refuse_link`].
    AnswerLink {
        /// Place of the link.
        lane: Lane,
        /// The server's end.
        peer: NewEnd,
    },
    /// Server: connect the queue pair of the link to the client's end, up to RTS, then call
    /// [`Llc::link_connected`]. If that fails, [`Llc::link_failed`].
    ConnectLink {
        /// Place of the link.
        lane: Lane,
        /// The client's end.
        peer: NewEnd,
    },
    /// The new link works: connections may use it.
    LinkUp(Lane),
    /// The link is no more, or came to nothing, but another one works: move its connections there, and drop the
    /// queue pair.
    DropLink(Lane),
    /// [`Llc::confirm_rkey`] has come to an end.
    ConfirmRkeyDone {
        /// The RMB.
        tokens: Rtokens,
        /// Whether the peer may be expected to know it.
        result: Result<(), RkeyError>,
    },
    /// [`Llc::delete_rkey`] has come to an end: answered, or given up.
    DeleteRkeyDone {
        /// The RMB.
        tokens: Rtokens,
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
    links: [Option<Link>; LANES],
    /// The link that is being added, and until when the next step has to be done.
    adding: Option<(Lane, Adding, Instant)>,
    /// Client: the server is to propose a second link after the first one.
    awaits_offer: bool,
    /// Server: number of the last link that was proposed.
    last_number: u8,
    /// RMBs of the peer.
    rtokens: RtokenTable,
    /// Own CONFIRM RKEY and DELETE RKEY requests.
    rkeys: RkeyFlows,
    /// A request of the peer that waits for the end of the running flow.
    delayed: Option<Delayed>,
    /// A link is tested because the peer has reset a TCP connection.
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
            // A client learns the number from CONFIRM LINK; its queue pair can't send before.
            links: [const { None }; LANES],
            adding: None,
            awaits_offer: false,
            last_number: FIRST_LINK,
            rtokens: RtokenTable::default(),
            rkeys: RkeyFlows::default(),
            delayed: None,
            doubted: false,
            idle_since: None,
            actions: VecDeque::new(),
        };
        let server = config.role == Role::Server;
        llc.links[FIRST] = Some(Link {
            number: FIRST_LINK,
            own: config.end,
            ready: server,
            up: false,
            heard: now,
            test_until: None,
        });
        if server && let Some(body) = llc.confirm_link(FIRST, false, config.link_uid) {
            llc.request(body);
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

    /// Number of a link, as DELETE LINK names it, and whether it works.
    pub fn link(&self, lane: Lane) -> Option<(u8, bool)> {
        let link = self.links.get(lane)?.as_ref()?;
        Some((link.number, link.up))
    }

    /// The peer's RMBs.
    pub fn rtokens(&self) -> &RtokenTable {
        &self.rtokens
    }

    /// Adds an RMB of the peer that an Accept or Confirm announced.
    ///
    /// # Errors
    /// [`Full`]: decline with ERR_RTOK.
    pub fn add_rtoken(&mut self, tokens: Rtokens) -> Result<(), Full> {
        self.rtokens.insert(tokens)
    }

    /// Announces an own RMB to the peer: on subsequent contact, the server before its Accept, the client before its
    /// Confirm. [`Action::ConfirmRkeyDone`] follows.
    pub fn confirm_rkey(&mut self, tokens: Rtokens, now: Instant) {
        self.local(Request::Confirm(tokens), now);
    }

    /// Whether the announcement of this RMB still waits for its turn.
    pub fn rkey_waits(&self, tokens: Rtokens) -> bool {
        self.rkeys.waits(Request::Confirm(tokens))
    }

    /// Takes an own RMB back after both sides have closed the connection. [`Action::DeleteRkeyDone`] follows.
    pub fn delete_rkey(&mut self, tokens: Rtokens, now: Instant) {
        self.local(Request::Delete(tokens), now);
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
    pub fn note_received(&mut self, lane: Lane, now: Instant) {
        if let Some(link) = self.links.get_mut(lane).and_then(Option::as_mut) {
            link.heard = link.heard.max(now);
            link.test_until = None;
        }
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
        let adding = self.adding.as_ref().map(|(.., until)| *until);
        let times = [state, self.rkeys.next_timeout(), adding, self.idle_end()];
        let tests = (0..LANES).map(|lane| self.test_end(lane).or(self.next_test(lane)));
        times.into_iter().chain(tests).flatten().min()
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
        for lane in 0..LANES {
            if self.test_end(lane).is_some_and(|until| now >= until) {
                self.lose(lane, Down::Silent, now);
            }
        }
        if matches!(self.state, State::Down) {
            return;
        }
        if self
            .adding
            .as_ref()
            .is_some_and(|(.., until)| now >= *until)
        {
            self.adding_expired(now);
        }
        if self.rkeys.expire(now, &mut self.actions) {
            self.next_flow(now);
        }
        for lane in 0..LANES {
            if self.next_test(lane).is_some_and(|at| now >= at) {
                self.doubted = self.in_doubt();
                self.test(lane, now);
            }
        }
        if self.idle_end().is_some_and(|at| now >= at) {
            self.delete_all(true, DeleteReason::PROGRAM);
            self.state = State::Closing {
                until: now + RESPONSE_TIME,
            };
        }
    }

    /// When the group is to be ended because it isn't used.
    fn idle_end(&self) -> Option<Instant> {
        self.idle_since
            .filter(|_| self.is_up())?
            .checked_add(self.config.idle)
    }

    fn established(&mut self, now: Instant) {
        self.state = State::Up;
        if let Some(link) = &mut self.links[FIRST] {
            link.up = true;
        }
        self.actions.push_back(Action::Established);
        match self.config.role {
            Role::Server => self.start_adding(now),
            Role::Client => self.awaits_offer = self.config.max_links > 1,
        }
        self.next_flow(now);
    }

    /// Starts what waits for the end of a flow, unless one is running.
    fn next_flow(&mut self, now: Instant) {
        let free = |llc: &Llc| llc.is_up() && llc.rkeys.running().is_none() && llc.adding.is_none();
        if free(self)
            && let Some(delayed) = self.delayed.take()
        {
            self.handle_delayed(delayed, now);
        }
        while free(self)
            && let Some(request) = self.rkeys.start(now)
        {
            self.send_request(request);
        }
    }

    /// Sends a request about an RMB, or ends it if some link was added without the RMB.
    fn send_request(&mut self, request: Request) {
        let Some(carrier) = self.carrier() else {
            return;
        };
        let body = match request {
            Request::Confirm(tokens) => self.confirm_rkey_body(carrier, &tokens),
            Request::Delete(tokens) => tokens[carrier].map(|token| {
                Body::DeleteRkey(DeleteRkey {
                    response: false,
                    negative: false,
                    errors: 0,
                    rkeys: Rkeys::one(token.rkey),
                })
            }),
        };
        match body {
            Some(body) => self.send(carrier, self.config.version, body),
            None => {
                self.rkeys.finish(|_| true);
                self.actions
                    .push_back(request.done(Err(RkeyError::NewLink)));
            }
        }
    }

    fn confirm_rkey_body(&self, carrier: Lane, tokens: &Rtokens) -> Option<Body<'static>> {
        let mut others = [None; 2];
        let links = self.links.iter().zip(tokens).enumerate();
        let links = links.filter(|(lane, _)| *lane != carrier);
        let rest = links.filter_map(|(_, (link, token))| Some((link.as_ref()?, token)));
        for (place, (link, token)) in others.iter_mut().zip(rest) {
            let token = (*token)?;
            let link = link.number;
            *place = Some(LinkRtoken { link, token });
        }
        Some(Body::ConfirmRkey(ConfirmRkey {
            response: false,
            negative: false,
            retry: false,
            token: tokens[carrier]?,
            others,
        }))
    }

    /// CONFIRM LINK about the own end of a link.
    fn confirm_link(&self, lane: Lane, response: bool, uid: u32) -> Option<Body<'static>> {
        let link = self.links.get(lane)?.as_ref()?;
        let End { mac, gid, qpn } = link.own;
        Some(Body::ConfirmLink(ConfirmLink {
            response,
            no_eyecatcher: true,
            mac,
            gid,
            qpn,
            link: link.number,
            uid,
            max_links: self.config.max_links,
            max_conns: self.config.max_conns,
        }))
    }

    /// The link for what concerns the group: one that works, rather one that isn't in doubt.
    fn carrier(&self) -> Option<Lane> {
        let which = |good: &dyn Fn(&Link) -> bool| {
            let mut links = self.links.iter();
            links.position(|link| link.as_ref().is_some_and(good))
        };
        which(&|link| link.up && link.test_until.is_none())
            .or_else(|| which(&|link| link.up))
            .or_else(|| which(&|link| link.ready))
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
        if let Some(carrier) = self.carrier() {
            self.send(carrier, self.config.version, body);
        }
    }

    fn abort_connections(&mut self) {
        if self.carrier().is_some() {
            self.actions.push_back(Action::AbortConnections);
        }
    }

    fn send(&mut self, lane: Lane, version: Version, body: Body<'_>) {
        let link = self.links.get(lane).copied().flatten();
        if !link.is_some_and(|link| link.ready) {
            return;
        }
        let message = Message { version, body };
        let mut bytes = vec![0; message.encoded_len()];
        // (An ADD LINK with more RMBs than a message can carry isn't sent: then there is no answer.)
        if message.emit(&mut bytes).is_some() {
            self.actions.push_back(Action::Send(lane, bytes));
        }
    }

    fn down(&mut self, why: Down) {
        if matches!(self.state, State::Down) {
            return;
        }
        self.state = State::Down;
        self.delayed = None;
        self.adding = None;
        self.rkeys.fail(&mut self.actions);
        self.actions.push_back(Action::Down(why));
    }
}
