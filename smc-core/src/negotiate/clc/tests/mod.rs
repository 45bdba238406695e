//! Helpers of the tests.

mod captured;
mod decline;
mod property;
mod sim;
mod timeouts;

use std::time::{Duration, Instant};

use super::client::Task as ClientTask;
use super::server::Task as ServerTask;
use super::*;
use crate::wire::clc::{AcceptConfirm, Decline, Message, Version};
use crate::wire::{Eid, Gid, Mac, Mtu, Psn, Qpn, RmbSize, Rtoken, SystemId};

const SECOND: Duration = Duration::from_secs(1);

fn eid() -> Eid {
    Eid::new("XSMC-TEST").unwrap()
}

fn gid(last: u8) -> Gid {
    Gid::from_ipv4([10, 9, 0, last].into())
}

fn local(id: u64) -> Local {
    let mut hostname = [b' '; 32];
    hostname[..6].copy_from_slice(b"(none)");
    Local {
        system_id: SystemId(id.to_be_bytes()),
        eids: List::from_slice(&[eid()]).unwrap(),
        max_conns: 255,
        max_links: 2,
        features: 1,
        hostname,
    }
}

fn prepared(last: u8) -> Prepared {
    let n = u32::from(last);
    Prepared {
        end: ConnEnd {
            gid: gid(last),
            mac: Mac([0x52, 0x54, 0, 0, 0, last]),
            qpn: Qpn::new(16 + n).unwrap(),
            psn: Psn::new(n << 16).unwrap(),
            mtu: Mtu::B4096,
            rtoken: Rtoken {
                rkey: 0x300 + n,
                addr: 0xff49_b0f4_038d_0000,
            },
            rmb_size: RmbSize::from_bytes(64 << 10).unwrap(),
            rmb_index: 1,
            alert_token: n,
        },
        direct: true,
    }
}

/// A client that has sent its Proposal, and that.
fn client(local: Local, now: Instant) -> (Client, Vec<u8>) {
    let mut client = Client::new(local, gid(2), List::new(), now);
    let proposal = sent(client.poll());
    assert_eq!(client.poll(), None);
    (client, proposal)
}

/// A client and a server that have come to where the server has to prepare its end.
fn proposed(now: Instant) -> (Client, Server) {
    let (client, proposal) = client(local(2), now);
    let mut server = Server::new(local(1), now);
    assert_eq!(server.read(&proposal, now), proposal.len());
    assert!(matches!(
        server.poll(),
        Some(Action::Task(ServerTask::Prepare(_)))
    ));
    (client, server)
}

/// The same to where the client has to prepare its end.
fn accepted(first_contact: bool, now: Instant) -> (Client, Server) {
    let (mut client, mut server) = proposed(now);
    server.prepared(prepared(1), first_contact, now);
    let accept = sent(server.poll());
    assert_eq!(client.read(&accept), accept.len());
    match client.poll() {
        Some(Action::Task(ClientTask::PrepareFirst(_))) => assert!(first_contact),
        Some(Action::Task(ClientTask::PrepareSubsequent(_))) => assert!(!first_contact),
        other => panic!("{other:?}"),
    }
    (client, server)
}

/// The same to where both make the link work (first contact).
fn confirmed(now: Instant) -> (Client, Server) {
    let (mut client, mut server) = accepted(true, now);
    client.prepared(prepared(2), now);
    let confirm = sent(client.poll());
    assert_eq!(
        client.poll(),
        Some(Action::Task(ClientTask::AwaitConfirmLink))
    );
    assert_eq!(server.read(&confirm, now), confirm.len());
    assert!(matches!(
        server.poll(),
        Some(Action::Task(ServerTask::Connect { .. }))
    ));
    (client, server)
}

/// The bytes of a message to be sent.
fn sent<T: std::fmt::Debug>(action: Option<Action<T>>) -> Vec<u8> {
    match action {
        Some(Action::Send(bytes)) => bytes,
        other => panic!("{other:?}"),
    }
}

fn done<T: std::fmt::Debug>(action: Option<Action<T>>) -> Outcome {
    match action {
        Some(Action::Done(outcome)) => outcome,
        other => panic!("{other:?}"),
    }
}

fn parsed_decline(bytes: &[u8]) -> Decline {
    match Message::parse(bytes) {
        Ok(Message::Decline(decline)) => decline,
        other => panic!("{other:?}"),
    }
}

fn fallback(diagnosis: Diagnosis, by: Side) -> Outcome {
    Outcome::Fallback(Fallback {
        diagnosis,
        by,
        end_link_group: false,
    })
}

/// A Decline as it may come at any time.
fn decline_bytes(version: Version, out_of_sync: bool) -> Vec<u8> {
    crate::wire::clc::testing::bytes_of(&Message::Decline(Decline {
        version,
        out_of_sync,
        system_id: SystemId([7; 8]),
        diagnosis: Diagnosis::Mem,
        os: 0,
    }))
}

/// Asserts that the side declines with `diagnosis` in the form of `version`, and is through then.
macro_rules! assert_declines {
    ($side:expr, $diagnosis:expr, $version:expr) => {{
        let side = &mut $side;
        let decline = parsed_decline(&sent(side.poll()));
        assert_eq!(decline.diagnosis, $diagnosis);
        assert_eq!(decline.version, $version);
        assert_eq!(done(side.poll()), fallback($diagnosis, Side::Local));
        assert_over!(side);
    }};
}

/// Asserts that the side ends with this outcome, and without another action.
macro_rules! assert_ends {
    ($side:expr, $outcome:expr) => {{
        let side = &mut $side;
        assert_eq!(done(side.poll()), $outcome);
        assert_over!(side);
    }};
}

macro_rules! assert_over {
    ($side:expr) => {{
        assert_eq!($side.poll(), None);
        assert_eq!($side.poll_timeout(), None);
        assert_eq!($side.want(), 0);
    }};
}

use {assert_declines, assert_ends, assert_over};
