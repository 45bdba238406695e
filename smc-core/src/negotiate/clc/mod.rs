//! The handshake by which two hosts put a TCP connection on SMC-R: CLC, sans I/O (RFC 7609 section 3.5 and SMC
//! version 2.1, as Linux speaks them).
//!
//! [`Client`] and [`Server`] decide what is said on the TCP stream, and when the driver has to do what on the RDMA
//! side. The driver owns the socket, the device and the link group. It
//!
//! 1. carries out what `poll` returns, in this order and to the end: an [`Action::Send`] is written completely
//!    before anything else is, and nothing may follow [`Action::Done`];
//! 2. reads from the socket at most `want` bytes at a time, and hands them to `read`. So it never takes a byte
//!    that follows a Decline: these belong to the program;
//! 3. calls `timeout` when the time that `poll_timeout` returns has come;
//! 4. reports results of tasks, and polls after each call;
//! 5. reads what has arrived before it calls `timeout` or `decline`: if both sides decline at once, each takes the
//!    other's Decline for the program's bytes, and nothing in the protocol helps against that.
//!
//! While it waits for anything here, the driver has to go on serving the link's queue pairs: the peer's
//! CONFIRM RKEY comes before its Accept, its CONFIRM LINK right after the Confirm, and both are due in 2 s.
//!
//! First contact, each side with its own machine and driver:
//!
//! | client | server |
//! |---|---|
//! | sends Proposal | |
//! | | [`server::Task::Prepare`]: queue pair, RMB |
//! | | sends Accept |
//! | [`client::Task::PrepareFirst`]: queue pair up to RTR, receives, RMB | |
//! | sends Confirm | |
//! | | [`server::Task::Connect`]: queue pair up to RTS, CONFIRM LINK |
//! | [`client::Task::AwaitConfirmLink`]: answers CONFIRM LINK | |
//! | [`client::Task::AwaitAddLink`], if more than one link is agreed on | [`server::Task::AddLink`], likewise |
//!
//! In subsequent contact the driver exchanges CONFIRM RKEY with the peer in its first task, and the second one
//! needs no answer from the peer.
//!
//! Either side may decline in between. Then both go on with TCP ([`Outcome::Fallback`]). Anything else that goes
//! wrong ends the connection ([`Outcome::Fail`]), because nobody knows any longer whose the next bytes are.

pub mod client;
mod core;
mod inbox;
pub mod server;
#[cfg(test)]
mod tests;

use std::time::Duration;

use crate::wire::clc::{ConnEnd, Diagnosis, FirstContact, List};
use crate::wire::{Eid, SystemId};

pub use client::Client;
pub use server::{Request, Server};

/// How long either side waits for the other's CLC message.
pub const CLC_WAIT: Duration = Duration::from_secs(6);
/// How long the client waits for CONFIRM LINK.
pub const CLIENT_CONFIRM_LINK_WAIT: Duration = Duration::from_secs(4);
/// How long the server waits for the answer to CONFIRM LINK.
pub const SERVER_CONFIRM_LINK_WAIT: Duration = Duration::from_secs(2);
/// How long either side waits for ADD LINK, or the answer to it.
pub const ADD_LINK_WAIT: Duration = Duration::from_secs(2);
/// How long either side waits for the answer to CONFIRM RKEY.
pub const CONFIRM_RKEY_WAIT: Duration = Duration::from_secs(2);
/// How long a side whose LLC wait has expired looks for a Decline on TCP, before it acts on its own.
pub const DECLINE_WAIT: Duration = Duration::from_secs(1);

/// Release of SMC version 2 that we speak: "v2.1".
pub const RELEASE: u8 = 1;
/// Fewest connections in a link group that v2.1 allows.
pub const MIN_CONNS: u8 = 16;

/// What this process brings into the negotiation.
#[derive(Clone, Copy, Debug)]
pub struct Local {
    /// Unique to this process, and not zero: by it and the GID a peer finds the link group of a connection. With
    /// another process's id, a server would answer with a link that this process doesn't own.
    pub system_id: SystemId,
    /// Enterprise ids, best first.
    pub eids: List<Eid>,
    /// Most connections in a link group, [`MIN_CONNS`] to 255. A peer declines less.
    pub max_conns: u8,
    /// Most links in a link group, 1 or 2.
    pub max_links: u8,
    /// Feature mask of v2.1; the peer's and ours are and-ed.
    pub features: u16,
    /// Host name, filled up with spaces. For people only.
    pub hostname: [u8; 32],
}

/// What the driver has to do next. `T` is what the side in question may have to do on the RDMA side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action<T> {
    /// Write these bytes to the TCP socket, all of them.
    Send(Vec<u8>),
    /// Begin with this, and report when it is done.
    Task(T),
    /// The handshake is over. No other action follows.
    Done(Outcome),
}

/// How a handshake ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The connection is on SMC-R. No byte of the program has been on TCP, and none may be.
    Established(Established),
    /// The connection stays on TCP, and its stream belongs to the program from here on. What the tasks have made
    /// for the connection is to be undone. (For [`Diagnosis::TimeoutCl`] and [`Diagnosis::RmbeEc`] that includes
    /// DELETE LINK for all links of a server's new group.)
    Fallback(Fallback),
    /// The connection has to be closed, and the program told this errno. What the tasks have made is to be undone.
    Fail(i32),
}

/// A connection on SMC-R.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Established {
    /// The connection is the first of a new link group.
    pub first_contact: bool,
    /// Who the peer is. A server that looks for link groups does so by the id in the Proposal, see
    /// [`Request::system_id`].
    pub peer_system_id: SystemId,
    /// Our end, as the peer was told.
    pub local: ConnEnd,
    /// The peer's end.
    pub peer: ConnEnd,
    /// The enterprise id in common.
    pub eid: Eid,
    /// Properties of a new link group; `None` in subsequent contact.
    pub terms: Option<Terms>,
}

/// What is agreed on for a new link group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// Release of SMC version 2: 0 or 1, or a higher one that a server insists on.
    pub release: u8,
    /// Most connections, [`MIN_CONNS`] to 255.
    pub max_conns: u8,
    /// Most links, 1 or 2. Release 0 can't agree on one: a client with a single port rejects ADD LINK.
    pub max_links: u8,
    /// Features that both sides have.
    pub features: u16,
}

impl Terms {
    /// What release 0, which doesn't negotiate, stands for.
    pub const RELEASE_0: Terms = Terms {
        release: 0,
        max_conns: 255,
        max_links: 2,
        features: 0,
    };
}

impl From<&FirstContact> for Terms {
    /// What an extension says; release 0 leaves it out.
    fn from(extension: &FirstContact) -> Terms {
        if extension.release == 0 {
            return Terms::RELEASE_0;
        }
        Terms {
            release: extension.release,
            max_conns: extension.max_conns,
            max_links: extension.max_links,
            features: extension.features,
        }
    }
}

/// Why a connection stays on TCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fallback {
    /// The reason that was sent, or came.
    pub diagnosis: Diagnosis,
    /// Who declined.
    pub by: Side,
    /// The peer doesn't know the link group that this connection was to join: all of it is to be ended.
    pub end_link_group: bool,
}

/// One of the two ends of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// This process.
    Local,
    /// The other one.
    Peer,
}

/// What the driver has made for a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prepared {
    /// Our end of the connection, with the path MTU of the port.
    pub end: ConnEnd,
    /// First contact: no gateway lies between us and the peer's GID.
    pub direct: bool,
}
