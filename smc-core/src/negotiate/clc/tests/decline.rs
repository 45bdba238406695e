//! Declines by either side at each step, and what they leave on the stream.

use super::*;

/// A Decline with the program's bytes right behind it.
fn with_payload(version: Version) -> (Vec<u8>, usize) {
    let mut bytes = decline_bytes(version, false);
    let length = bytes.len();
    bytes.extend(b"payload");
    (bytes, length)
}

#[test]
fn by_the_server_at_each_step() {
    let now = Instant::now();
    for version in [Version::V1, Version::V2] {
        let (bytes, length) = with_payload(version);
        let steps: [fn(Instant) -> Client; 3] = [
            |now| client(local(2), now).0,
            |now| confirmed(now).0,
            |now| {
                let mut client = confirmed(now).0;
                client.link_ready(now);
                client.poll();
                client
            },
        ];
        for step in steps {
            let mut client = step(now);
            assert_eq!(client.read(&bytes), length);
            assert_ends!(client, fallback(Diagnosis::Mem, Side::Peer));
        }
        // Before the Accept has been dealt with, nothing is read.
        let (mut client, _) = accepted(true, now);
        assert_eq!((client.want(), client.read(&bytes)), (0, 0));
    }
}

#[test]
fn by_the_client_at_each_step() {
    let now = Instant::now();
    for version in [Version::V1, Version::V2] {
        let (bytes, length) = with_payload(version);
        let steps: [fn(Instant) -> Server; 4] = [
            |now| Server::new(local(1), now),
            |now| accepted(true, now).1,
            |now| confirmed(now).1,
            |now| {
                let mut server = confirmed(now).1;
                server.link_ready(now);
                server.poll();
                server
            },
        ];
        for step in steps {
            let mut server = step(now);
            assert_eq!(server.read(&bytes, now), length);
            assert_ends!(server, fallback(Diagnosis::Mem, Side::Peer));
        }
    }
}

/// Before the Accept is known, the client has to read what the server is sending, or its program would.
#[test]
fn a_client_declines_after_the_accept() {
    let now = Instant::now();
    let (mut client, mut server) = proposed(now);
    client.decline(Diagnosis::ErrRdyLnk, now);
    assert_eq!(client.poll(), None);
    server.prepared(prepared(1), true, now);
    let mut accept = sent(server.poll());
    let length = accept.len();
    accept.extend(b"payload");
    assert_eq!(client.read(&accept), length);
    let decline = sent(client.poll());
    assert_ends!(client, fallback(Diagnosis::ErrRdyLnk, Side::Local));
    server.read(&decline, now);
    assert_ends!(server, fallback(Diagnosis::ErrRdyLnk, Side::Peer));

    // The server may decline first.
    let (mut client, _) = client_of_now(now);
    client.decline(Diagnosis::ErrRdyLnk, now);
    client.read(&decline_bytes(Version::V2, false));
    assert_ends!(client, fallback(Diagnosis::Mem, Side::Peer));
}

fn client_of_now(now: Instant) -> (Client, Vec<u8>) {
    client(local(2), now)
}

#[test]
fn a_client_declines_in_its_tasks() {
    let now = Instant::now();
    for first in [true, false] {
        let (mut client, _) = accepted(first, now);
        client.decline(Diagnosis::NoRoute, now);
        assert_declines!(client, Diagnosis::NoRoute, Version::V2);
    }
    let (mut client, _) = confirmed(now);
    client.decline(Diagnosis::RmbeEc, now);
    assert_declines!(client, Diagnosis::RmbeEc, Version::V2);
}

#[test]
fn a_server_declines_after_the_proposal() {
    let now = Instant::now();
    let mut server = Server::new(local(1), now);
    server.decline(Diagnosis::NoSmcRDev, now);
    assert_eq!(server.poll(), None);
    let (_, proposal) = client(local(2), now);
    server.read(&proposal, now);
    assert_declines!(server, Diagnosis::NoSmcRDev, Version::V2);

    let (_, mut server) = proposed(now);
    server.decline(Diagnosis::Mem, now);
    assert_declines!(server, Diagnosis::Mem, Version::V2);
}

#[test]
fn a_server_declines_after_the_confirm() {
    let now = Instant::now();
    let (mut client, mut server) = accepted(true, now);
    server.decline(Diagnosis::NoActLink, now);
    assert_eq!(server.poll(), None);
    client.prepared(prepared(2), now);
    server.read(&sent(client.poll()), now);
    assert_declines!(server, Diagnosis::NoActLink, Version::V2);

    let (_, mut server) = confirmed(now);
    server.decline(Diagnosis::ErrRtok, now);
    assert_declines!(server, Diagnosis::ErrRtok, Version::V2);
}

#[test]
fn out_of_sync() {
    let now = Instant::now();
    let (mut client, mut server) = accepted(false, now);
    client.decline(Diagnosis::SyncErr, now);
    let bytes = sent(client.poll());
    assert_eq!(bytes[7], 0x28);
    assert_ends!(client, fallback(Diagnosis::SyncErr, Side::Local));
    server.read(&bytes, now);
    assert_ends!(
        server,
        Outcome::Fallback(Fallback {
            diagnosis: Diagnosis::SyncErr,
            by: Side::Peer,
            end_link_group: true,
        })
    );

    // The bit is for an Accept that names a link, and for that only.
    let (mut client, _) = accepted(true, now);
    client.decline(Diagnosis::SyncErr, now);
    assert_eq!(sent(client.poll())[7], 0x20);
    let mut server = Server::new(local(1), now);
    server.read(&decline_bytes(Version::V1, true), now);
    assert_ends!(server, fallback(Diagnosis::Mem, Side::Peer));
    let (_, mut server) = accepted(true, now);
    server.read(&decline_bytes(Version::V2, true), now);
    assert_ends!(server, fallback(Diagnosis::Mem, Side::Peer));
}

/// What the driver hasn't written when the peer declines must not be written any more.
#[test]
fn a_decline_of_the_peer_withdraws_what_is_not_sent() {
    let now = Instant::now();
    let (mut client, _) = accepted(true, now);
    client.prepared(prepared(2), now);
    client.read(&decline_bytes(Version::V2, false));
    assert_ends!(client, fallback(Diagnosis::Mem, Side::Peer));
}

#[test]
fn only_a_decline_may_come_while_the_link_is_made() {
    let now = Instant::now();
    let (mut client, mut server) = confirmed(now);
    assert_eq!(client.read(b"hello"), 5);
    assert_ends!(client, Outcome::Fail(libc::EPROTO));
    let (_, proposal) = client_of_now(now);
    server.read(&proposal, now);
    assert_ends!(server, Outcome::Fail(libc::EPROTO));
}
