//! Client's and server's handshake machines behind one face: what a driver does with both is the same.

use std::time::Instant;

use crate::negotiate::clc::{Action, Client, Prepared, Server, client, server};
use crate::sys::Errno;
use crate::wire::clc::{AcceptConfirm, Diagnosis};

/// The machine of one side.
pub(super) enum Machine {
    Client(Box<Client>),
    Server(Box<Server>),
    /// TCP is still connecting.
    Connecting,
}

/// A task, whichever side's.
#[derive(Clone, Copy)]
pub(super) enum Task {
    PrepareFirst(AcceptConfirm),
    PrepareSubsequent(AcceptConfirm),
    Prepare(server::Request),
    Connect(AcceptConfirm, bool),
    AwaitLink,
    AddLink,
}

impl Machine {
    pub(super) fn poll(&mut self) -> Option<Action<Task>> {
        match self {
            Machine::Connecting => None,
            Machine::Client(c) => c.poll().map(|a| {
                translate(a, |t| match t {
                    client::Task::PrepareFirst(a) => Task::PrepareFirst(a),
                    client::Task::PrepareSubsequent(a) => Task::PrepareSubsequent(a),
                    client::Task::AwaitConfirmLink => Task::AwaitLink,
                    client::Task::AwaitAddLink => Task::AddLink,
                })
            }),
            Machine::Server(s) => s.poll().map(|a| {
                translate(a, |t| match t {
                    server::Task::Prepare(r) => Task::Prepare(r),
                    server::Task::Connect {
                        confirm,
                        first_contact,
                    } => Task::Connect(confirm, first_contact),
                    server::Task::AddLink => Task::AddLink,
                })
            }),
        }
    }

    pub(super) fn want(&self) -> usize {
        match self {
            Machine::Connecting => 0,
            Machine::Client(c) => c.want(),
            Machine::Server(s) => s.want(),
        }
    }

    pub(super) fn read(&mut self, bytes: &[u8], now: Instant) {
        match self {
            Machine::Connecting => {}
            Machine::Client(c) => drop(c.read(bytes)),
            Machine::Server(s) => drop(s.read(bytes, now)),
        }
    }

    pub(super) fn ended(&mut self, e: Option<Errno>) {
        match (self, e) {
            (Machine::Connecting, _) => {}
            (Machine::Client(c), None) => c.eof(),
            (Machine::Server(s), None) => s.eof(),
            (Machine::Client(c), Some(e)) => c.error(e.into_raw()),
            (Machine::Server(s), Some(e)) => s.error(e.into_raw()),
        }
    }

    pub(super) fn decline(&mut self, d: Diagnosis, now: Instant) {
        match self {
            Machine::Connecting => {}
            Machine::Client(c) => c.decline(d, now),
            Machine::Server(s) => s.decline(d, now),
        }
    }

    pub(super) fn prepared(&mut self, p: Prepared, first: bool, now: Instant) {
        match self {
            Machine::Connecting => {}
            Machine::Client(c) => c.prepared(p, now),
            Machine::Server(s) => s.prepared(p, first, now),
        }
    }

    pub(super) fn rkey_sent(&mut self, now: Instant) {
        match self {
            Machine::Connecting => {}
            Machine::Client(c) => c.confirm_rkey_sent(now),
            Machine::Server(s) => s.confirm_rkey_sent(now),
        }
    }

    pub(super) fn link_ready(&mut self, now: Instant) {
        match self {
            Machine::Connecting => {}
            Machine::Client(c) => c.link_ready(now),
            Machine::Server(s) => s.link_ready(now),
        }
    }

    pub(super) fn add_link_done(&mut self, now: Instant) {
        match self {
            Machine::Connecting => {}
            Machine::Client(c) => c.add_link_done(now),
            Machine::Server(s) => s.add_link_done(now),
        }
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        match self {
            Machine::Connecting => None,
            Machine::Client(c) => c.poll_timeout(),
            Machine::Server(s) => s.poll_timeout(),
        }
    }

    pub(super) fn timeout(&mut self, now: Instant) {
        match self {
            Machine::Connecting => {}
            Machine::Client(c) => c.timeout(now),
            Machine::Server(s) => s.timeout(now),
        }
    }
}

fn translate<T, U>(a: Action<T>, f: impl FnOnce(T) -> U) -> Action<U> {
    match a {
        Action::Send(bytes) => Action::Send(bytes),
        Action::Done(outcome) => Action::Done(outcome),
        Action::Task(t) => Action::Task(f(t)),
    }
}
