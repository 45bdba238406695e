//! Captured messages of Linux as the peer; where Linux sent what we would have to, we send the same bytes.

use super::*;
use crate::wire::vectors;

const LINUX_SERVER: u64 = 0x6d20_5254_0000_0001;
const LINUX_CLIENT: u64 = 0x995f_5254_0000_0002;

fn accept_confirm(name: &str) -> AcceptConfirm {
    match Message::parse(&vectors::get(name)) {
        Ok(Message::Accept(message) | Message::Confirm(message)) => message,
        other => panic!("{other:?}"),
    }
}

/// What the sender of the captured message `name` had prepared.
fn prepared_as(name: &str) -> Prepared {
    Prepared {
        end: accept_confirm(name).end,
        direct: true,
    }
}

/// A Proposal of Linux has no system id, ours has one.
fn with_system_id(mut proposal: Vec<u8>, id: u64) -> Vec<u8> {
    proposal[8..16].copy_from_slice(&id.to_be_bytes());
    proposal
}

#[test]
fn first_contact_with_a_linux_client() {
    let now = Instant::now();
    let mut server = Server::new(local(LINUX_SERVER), now);
    let proposal = vectors::get("proposal-1eid");
    assert_eq!(server.want(), 8);
    assert_eq!(server.read(&proposal, now), proposal.len());
    let terms = Terms {
        release: 1,
        max_conns: 255,
        max_links: 2,
        features: 1,
    };
    let request = Request {
        system_id: SystemId([0; 8]),
        gid: gid(2),
        mac: Mac([0; 6]),
        eid: eid(),
        terms,
    };
    assert_eq!(
        server.poll(),
        Some(Action::Task(ServerTask::Prepare(request)))
    );
    server.prepared(prepared_as("accept-first"), true, now);
    assert_eq!(sent(server.poll()), vectors::get("accept-first"));

    server.read(&vectors::get("confirm-first-1gid"), now);
    let confirm = accept_confirm("confirm-first-1gid");
    assert_eq!(
        server.poll(),
        Some(Action::Task(ServerTask::Connect {
            confirm,
            first_contact: true
        }))
    );
    server.link_ready(now);
    assert_eq!(server.poll(), Some(Action::Task(ServerTask::AddLink)));
    server.add_link_done(now);
    assert_ends!(
        server,
        Outcome::Established(Established {
            first_contact: true,
            peer_system_id: SystemId(LINUX_CLIENT.to_be_bytes()),
            local: accept_confirm("accept-first").end,
            peer: confirm.end,
            eid: eid(),
            terms: Some(terms),
        })
    );
}

#[test]
fn first_contact_with_a_linux_server() {
    for (accept, confirm, gids) in [
        ("accept-first", "confirm-first-1gid", vec![]),
        ("accept-first-mtu3", "confirm-first-2gid", vec![gid(12)]),
    ] {
        let now = Instant::now();
        let mut local = local(0);
        local.system_id = accept_confirm(confirm).system_id;
        let mut client = Client::new(local, gid(2), List::from_slice(&gids).unwrap(), now);
        let id = u64::from_be_bytes(local.system_id.0);
        assert_eq!(
            sent(client.poll()),
            with_system_id(vectors::get("proposal-1eid"), id)
        );
        client.read(&vectors::get(accept));
        let accept = accept_confirm(accept);
        assert_eq!(
            client.poll(),
            Some(Action::Task(ClientTask::PrepareFirst(accept)))
        );
        // The port could do more than the server's.
        let mut own = prepared_as(confirm);
        own.end.mtu = Mtu::B4096;
        client.prepared(own, now);
        assert_eq!(sent(client.poll()), vectors::get(confirm));
        assert_eq!(
            client.poll(),
            Some(Action::Task(ClientTask::AwaitConfirmLink))
        );
        client.link_ready(now);
        assert_eq!(client.poll(), Some(Action::Task(ClientTask::AwaitAddLink)));
        client.add_link_done(now);
        let Outcome::Established(established) = done(client.poll()) else {
            panic!("not established");
        };
        assert_eq!(established.peer, accept.end);
        assert_eq!(established.local, accept_confirm(confirm).end);
        assert_over!(client);
    }
}

#[test]
fn subsequent_contact() {
    let now = Instant::now();
    let mut server = Server::new(local(LINUX_SERVER), now);
    server.read(&vectors::get("proposal-again"), now);
    assert!(matches!(
        server.poll(),
        Some(Action::Task(ServerTask::Prepare(_)))
    ));
    server.prepared(prepared_as("accept-subsequent"), false, now);
    let accept = sent(server.poll());
    assert_eq!(accept, vectors::get("accept-subsequent"));
    let confirm = vectors::get("confirm-subsequent");
    server.read(&confirm, now);
    assert!(matches!(
        server.poll(),
        Some(Action::Task(ServerTask::Connect {
            first_contact: false,
            ..
        }))
    ));
    assert_eq!(server.poll_timeout(), None);
    server.link_ready(now);
    let Outcome::Established(established) = done(server.poll()) else {
        panic!("not established");
    };
    assert!(!established.first_contact);
    assert_eq!(established.terms, None);

    let (mut client, _) = client(local(LINUX_CLIENT), now);
    client.read(&accept);
    assert_eq!(
        client.poll(),
        Some(Action::Task(ClientTask::PrepareSubsequent(accept_confirm(
            "accept-subsequent"
        ))))
    );
    client.prepared(prepared_as("confirm-subsequent"), now);
    assert_eq!(sent(client.poll()), confirm);
    assert!(matches!(done(client.poll()), Outcome::Established(e) if e.terms.is_none()));
    assert_over!(client);
}

#[test]
fn declines() {
    let now = Instant::now();
    // Linux declines.
    let (mut client, proposal) = client(local(LINUX_CLIENT), now);
    client.read(&vectors::get("decline-v2-no-common-ueid"));
    assert_ends!(client, fallback(Diagnosis::NoSmcDev, Side::Peer));
    let mut server = Server::new(local(LINUX_SERVER), now);
    server.read(&vectors::get("decline-v1-client"), now);
    assert_ends!(server, fallback(Diagnosis::NoSmcDev, Side::Peer));

    // We do.
    let mut other = local(LINUX_SERVER);
    other.eids = List::from_slice(&[Eid::new("OTHER").unwrap()]).unwrap();
    let mut server = Server::new(other, now);
    server.read(&proposal, now);
    assert_eq!(
        sent(server.poll()),
        vectors::get("decline-v2-no-common-ueid")
    );
    assert_ends!(server, fallback(Diagnosis::NoSmcDev, Side::Local));
    let mut client = Client::without_device(local(LINUX_CLIENT), Diagnosis::NoSmcDev);
    let v1 = sent(client.poll());
    assert_eq!(v1.len(), 28);
    assert_eq!(v1[..20], vectors::get("decline-v1-client")[..20]);
    assert_ends!(client, fallback(Diagnosis::NoSmcDev, Side::Local));
}

/// Proposals that Linux was seen to answer in this way.
#[test]
fn odd_proposals() {
    let now = Instant::now();
    let answer = |edit: fn(&mut Vec<u8>)| {
        let mut proposal = vectors::get("proposal-1eid");
        edit(&mut proposal);
        let length = u16::try_from(proposal.len()).unwrap();
        proposal[5..7].copy_from_slice(&length.to_be_bytes());
        let mut server = Server::new(local(0x2391_5254_0000_0001), now);
        server.read(&proposal, now);
        server
    };
    for (hex, edit) in [
        (
            "e2d4c3d904002c2023915254000000010303000a2000000000000000000000000000000000000000e2d4c3d9",
            (|m: &mut Vec<u8>| m[104] = 15) as fn(&mut Vec<u8>),
        ),
        (
            "e2d4c3d904002c2023915254000000010303000b2000000000000000000000000000000000000000e2d4c3d9",
            |m| m[105] = 0,
        ),
        (
            "e2d4c3d904002c202391525400000001030300002000000000000000000000000000000000000000e2d4c3d9",
            |m| m[120] = b'Y',
        ),
        (
            "e2d4c3d904002c202391525400000001030300082000000000000000000000000000000000000000e2d4c3d9",
            |m| {
                m[80] = 0;
                m.drain(120..152);
            },
        ),
    ] {
        assert_eq!(sent(answer(edit).poll()), vectors::from_hex(hex));
    }
    for edit in [
        |m: &mut Vec<u8>| drop(m.drain(130..131)),
        |m: &mut Vec<u8>| m.insert(130, 0),
        |m: &mut Vec<u8>| *m.last_mut().unwrap() = 0,
        |m: &mut Vec<u8>| m[51] = 0,
        |m: &mut Vec<u8>| m[80] = 9,
        |m: &mut Vec<u8>| m[4] = 2,
        |m: &mut Vec<u8>| m[..8].copy_from_slice(b"GET / HT"),
    ] {
        assert_ends!(answer(edit), Outcome::Fail(libc::EPROTO));
    }
    let terms = |edit: fn(&mut Vec<u8>)| match answer(edit).poll() {
        Some(Action::Task(ServerTask::Prepare(request))) => request.terms,
        other => panic!("{other:?}"),
    };
    assert_eq!(terms(|m| m[104] = 16).max_conns, 16);
    assert_eq!(terms(|m| m[105] = 1).max_links, 1);
    assert_eq!(terms(|m| m[105] = 5).max_links, 2);
    assert_eq!(terms(|m| m[83] = 0x20).release, 1);
    assert_eq!(terms(|m| m[106..108].fill(0xff)).features, 1);
    assert_eq!(terms(|m| m[83] = 0), Terms::RELEASE_0);
}

/// Unknown ids before a known one: the first known one counts.
#[test]
fn chooses_the_clients_best_eid() {
    let now = Instant::now();
    let mut own = local(1);
    let second = Eid::new("A.SECOND-EID").unwrap();
    own.eids = List::from_slice(&[second, Eid::new("X").unwrap()]).unwrap();
    let mut server = Server::new(own, now);
    server.read(&vectors::get("proposal-2eid"), now);
    assert!(matches!(
        server.poll(),
        Some(Action::Task(ServerTask::Prepare(request))) if request.eid == second
    ));
}

/// Accepts that Linux was seen to answer in this way.
#[test]
fn odd_accepts() {
    let now = Instant::now();
    let answer = |edit: fn(&mut Vec<u8>)| {
        let mut accept = vectors::get("accept-first");
        edit(&mut accept);
        let length = u16::try_from(accept.len()).unwrap();
        accept[5..7].copy_from_slice(&length.to_be_bytes());
        let (mut client, _) = client(local(2), now);
        client.read(&accept);
        client
    };
    for (diagnosis, edit) in [
        (
            Diagnosis::ModeUnsupp,
            (|m: &mut Vec<u8>| m[7] = 0x29) as fn(&mut Vec<u8>),
        ),
        (Diagnosis::MaxConnErr, |m| drop(m.drain(104..156))),
        (Diagnosis::MaxConnErr, |m| m[140] = 15),
        (Diagnosis::MaxLinkErr, |m| m[141] = 0),
        (Diagnosis::MaxLinkErr, |m| m[141] = 3),
        // Not seen; Linux doesn't check these.
        (Diagnosis::CnfErr, |m| m[50] = 0x2f),
        (Diagnosis::CnfErr, |m| m[52..60].fill(0xff)),
    ] {
        // Where the message itself can't be worked with, its version isn't known.
        let mut client = answer(edit);
        let decline = parsed_decline(&sent(client.poll()));
        assert_eq!(decline.diagnosis, diagnosis);
        assert!(!decline.out_of_sync);
        assert_ends!(client, fallback(diagnosis, Side::Local));
    }
    for edit in [
        |m: &mut Vec<u8>| *m.last_mut().unwrap() = 0,
        |m: &mut Vec<u8>| m[4] = 3,
        |m: &mut Vec<u8>| m[7] = 0x38,
        // A good message of version 1.
        |m: &mut Vec<u8>| {
            m[7] = 0x18;
            m.drain(64..156);
        },
    ] {
        assert_ends!(answer(edit), Outcome::Fail(libc::EPROTO));
    }
    for edit in [
        |m: &mut Vec<u8>| drop(m.splice(156..156, [0; 8])),
        |m: &mut Vec<u8>| m[64] = b'Y',
        |m: &mut Vec<u8>| m[105] = 0x22,
        |m: &mut Vec<u8>| m[8..16].fill(0),
        |m: &mut Vec<u8>| m[105] = 0x20,
    ] {
        let mut client = answer(edit);
        assert!(matches!(
            client.poll(),
            Some(Action::Task(ClientTask::PrepareFirst(_)))
        ));
        client.prepared(prepared(2), now);
        assert!(matches!(
            Message::parse(&sent(client.poll())),
            Ok(Message::Confirm(_))
        ));
    }
}

/// Confirms that Linux was seen to answer in this way.
#[test]
fn odd_confirms() {
    let now = Instant::now();
    let answer = |edit: fn(&mut Vec<u8>)| {
        let mut own = local(1);
        own.max_links = 1;
        let mut server = Server::new(own, now);
        server.read(&vectors::get("proposal-1eid"), now);
        server.poll();
        server.prepared(prepared(1), true, now);
        sent(server.poll());
        let mut confirm = vectors::get("confirm-first-1gid");
        confirm[141] = 1;
        edit(&mut confirm);
        let length = u16::try_from(confirm.len()).unwrap();
        confirm[5..7].copy_from_slice(&length.to_be_bytes());
        server.read(&confirm, now);
        server
    };
    for (diagnosis, edit) in [
        (
            Diagnosis::MaxLinkErr,
            (|m: &mut Vec<u8>| m[141] = 2) as fn(&mut Vec<u8>),
        ),
        (Diagnosis::MaxConnErr, |m| m[140] = 200),
        (Diagnosis::ReleaseErr, |m| m[105] = 0x20),
        (Diagnosis::ModeUnsupp, |m| m[7] = 0x29),
    ] {
        assert_declines!(answer(edit), diagnosis, Version::V2);
    }
    assert_ends!(
        answer(|m| *m.last_mut().unwrap() = 0),
        Outcome::Fail(libc::EPROTO)
    );
    assert_ends!(answer(|m| m[4] = 1), Outcome::Fail(libc::EPROTO));
    for edit in [
        |m: &mut Vec<u8>| m[142..144].fill(0),
        |m: &mut Vec<u8>| m[64] = b'Y',
        |m: &mut Vec<u8>| m[7] = 0x20,
        |m: &mut Vec<u8>| m[31] = 99,
    ] {
        let mut server = answer(edit);
        assert!(matches!(
            server.poll(),
            Some(Action::Task(ServerTask::Connect {
                first_contact: true,
                ..
            }))
        ));
        // One link is agreed on, so nothing follows it.
        server.link_ready(now);
        assert!(matches!(done(server.poll()), Outcome::Established(_)));
    }
}

/// A client that can only do version 1, or only SMC-D.
#[test]
fn other_kinds_of_proposal() {
    let now = Instant::now();
    let mut v1 = vec![0xe2, 0xd4, 0xc3, 0xd9, 1, 0, 52, 0x10];
    v1.resize(48, 0);
    v1.extend([0xe2, 0xd4, 0xc3, 0xd9]);
    let mut server = Server::new(local(1), now);
    server.read(&v1, now);
    assert_declines!(server, Diagnosis::NoSmcRDev, Version::V1);
    v1[7] = 0x11;
    v1[3] = 0xc4;
    let mut server = Server::new(local(1), now);
    server.read(&v1, now);
    assert_declines!(server, Diagnosis::NoSmcDDev, Version::V1);
}
