//! Silence, and the end of the stream, at each step.

use super::*;

/// Lets time pass until the side's deadline, which must be `after` `start`; just before it nothing happens.
macro_rules! expire {
    ($side:expr, $start:expr, $after:expr) => {{
        let at = $start + $after;
        assert_eq!($side.poll_timeout(), Some(at));
        $side.timeout(at - Duration::from_millis(1));
        assert_eq!($side.poll(), None);
        assert_eq!($side.poll_timeout(), Some(at));
        $side.timeout(at);
        at
    }};
}

#[test]
fn no_proposal() {
    let now = Instant::now();
    let mut server = Server::new(local(1), now);
    expire!(server, now, 6 * SECOND);
    assert_ends!(server, Outcome::Fail(libc::ETIMEDOUT));
}

#[test]
fn half_a_proposal_is_none() {
    let now = Instant::now();
    let (_, proposal) = client(local(2), now);
    let mut server = Server::new(local(1), now);
    for byte in &proposal[..proposal.len() - 1] {
        assert_eq!(server.read(&[*byte], now + 5 * SECOND), 1);
    }
    assert_eq!(server.want(), 1);
    expire!(server, now, 6 * SECOND);
    assert_ends!(server, Outcome::Fail(libc::ETIMEDOUT));
}

#[test]
fn no_accept() {
    let now = Instant::now();
    let (mut client, _) = client(local(2), now);
    expire!(client, now, 6 * SECOND);
    assert_ends!(client, Outcome::Fail(libc::ETIMEDOUT));
}

#[test]
fn no_confirm() {
    let now = Instant::now();
    let (_, mut server) = proposed(now);
    assert_eq!(server.poll_timeout(), None);
    let later = now + 3 * SECOND;
    server.prepared(prepared(1), true, later);
    sent(server.poll());
    expire!(server, later, 6 * SECOND);
    assert_ends!(server, Outcome::Fail(libc::ETIMEDOUT));
}

#[test]
fn rkey_not_confirmed() {
    let now = Instant::now();
    let (_, mut server) = proposed(now);
    server.confirm_rkey_sent(now);
    expire!(server, now, 2 * SECOND);
    assert_declines!(server, Diagnosis::ErrRegBuf, Version::V2);

    let (mut client, mut server) = accepted(false, now);
    client.confirm_rkey_sent(now);
    expire!(client, now, 2 * SECOND);
    server.read(&sent(client.poll()), now);
    assert_ends!(client, fallback(Diagnosis::ErrRegBuf, Side::Local));
    assert_ends!(server, fallback(Diagnosis::ErrRegBuf, Side::Peer));
}

/// An rkey confirmed in time leaves no deadline behind.
#[test]
fn rkey_confirmed() {
    let now = Instant::now();
    let (mut client, mut server) = accepted(false, now);
    client.confirm_rkey_sent(now);
    client.prepared(prepared(2), now + SECOND);
    let confirm = sent(client.poll());
    assert!(matches!(done(client.poll()), Outcome::Established(_)));
    assert_over!(client);
    server.read(&confirm, now);
    assert_eq!(server.poll_timeout(), None);
}

#[test]
fn no_confirm_link() {
    let now = Instant::now();
    let (mut client, mut server) = confirmed(now);
    let at = expire!(server, now, 2 * SECOND);
    // Too late.
    server.link_ready(at);
    assert_eq!(server.poll(), None);
    expire!(server, at, SECOND);
    let decline = sent(server.poll());
    assert_eq!(parsed_decline(&decline).diagnosis, Diagnosis::TimeoutCl);
    assert_ends!(server, fallback(Diagnosis::TimeoutCl, Side::Local));

    expire!(client, now, 4 * SECOND);
    assert_eq!(client.want(), 8);
    // The server's Decline comes while the client looks for one.
    client.read(&decline);
    assert_eq!(client.poll_timeout(), None);
    assert_ends!(client, fallback(Diagnosis::TimeoutCl, Side::Peer));

    let (mut client, _) = confirmed(now);
    let at = expire!(client, now, 4 * SECOND);
    expire!(client, at, SECOND);
    assert_declines!(client, Diagnosis::TimeoutCl, Version::V2);
}

/// LLC may find out first, and say so more than once.
#[test]
fn no_confirm_link_by_the_clock_of_llc() {
    let now = Instant::now();
    let (mut client, mut server) = confirmed(now);
    let at = now + SECOND;
    server.decline(Diagnosis::TimeoutCl, at);
    server.decline(Diagnosis::TimeoutCl, at + SECOND / 2);
    expire!(server, at, SECOND);
    assert_declines!(server, Diagnosis::TimeoutCl, Version::V2);

    client.decline(Diagnosis::TimeoutCl, at);
    assert_eq!(client.poll(), None);
    client.read(&decline_bytes(Version::V2, false));
    assert_ends!(client, fallback(Diagnosis::Mem, Side::Peer));
}

#[test]
fn no_add_link() {
    let now = Instant::now();
    let (mut client, mut server) = confirmed(now);
    let ready = now + SECOND;
    client.link_ready(ready);
    server.link_ready(ready);
    assert_eq!(client.poll(), Some(Action::Task(ClientTask::AwaitAddLink)));
    assert_eq!(server.poll(), Some(Action::Task(ServerTask::AddLink)));
    expire!(server, ready, 2 * SECOND);
    assert!(matches!(done(server.poll()), Outcome::Established(_)));
    assert_over!(server);
    let at = expire!(client, ready, 2 * SECOND);
    expire!(client, at, SECOND);
    assert!(matches!(done(client.poll()), Outcome::Established(_)));
    assert_over!(client);
}

/// ADD LINK in the client's last second still counts.
#[test]
fn late_add_link() {
    let now = Instant::now();
    let (mut client, _) = confirmed(now);
    client.link_ready(now);
    client.poll();
    let at = expire!(client, now, 2 * SECOND);
    client.add_link_done(at);
    assert!(matches!(done(client.poll()), Outcome::Established(_)));
}

/// The beginning of a Decline without its end, in every step of the link.
#[test]
fn half_a_decline() {
    let now = Instant::now();
    let decline = decline_bytes(Version::V2, false);
    let (head, tail) = decline.split_at(20);
    let steps: [fn(&mut Client, Instant); 3] = [
        |_, _| {},
        |client, now| client.timeout(now + 4 * SECOND),
        |client, now| {
            client.link_ready(now);
            assert_eq!(client.poll(), Some(Action::Task(ClientTask::AwaitAddLink)));
        },
    ];
    let triggers: [fn(&mut Client, Instant); 3] = [
        |client, now| client.decline(Diagnosis::ErrRdyLnk, now),
        |client, now| client.add_link_done(now),
        |client, now| {
            if let Some(at) = client.poll_timeout() {
                client.timeout(at.max(now));
            }
        },
    ];
    for step in steps {
        for trigger in triggers {
            let halfway = || {
                let (mut client, _) = confirmed(now);
                step(&mut client, now);
                assert_eq!(client.read(head), head.len());
                trigger(&mut client, now + SECOND);
                client
            };
            let mut client = halfway();
            while let Some(at) = client.poll_timeout() {
                assert_eq!(client.poll(), None);
                client.timeout(at);
            }
            assert_ends!(client, Outcome::Fail(libc::ETIMEDOUT));

            let mut client = halfway();
            if client.want() > 0 {
                client.read(tail);
                assert_ends!(client, fallback(Diagnosis::Mem, Side::Peer));
            }

            let mut client = halfway();
            if client.want() > 0 {
                client.eof();
                assert_ends!(client, Outcome::Fail(libc::ECONNRESET));
            }
        }
    }
}

#[test]
fn end_of_stream() {
    let now = Instant::now();
    let (mut client, _) = client(local(2), now);
    client.eof();
    assert_ends!(client, Outcome::Fail(libc::ECONNRESET));
    let mut server = Server::new(local(1), now);
    server.eof();
    assert_ends!(server, Outcome::Fail(libc::ECONNRESET));
    // While the link is being made, the end of the stream says nothing about the data: the client may have sent
    // all of it, and closed.
    let (_, mut server) = confirmed(now);
    server.eof();
    assert_eq!((server.poll(), server.want()), (None, 0));
    server.link_ready(now);
    server.poll();
    server.add_link_done(now);
    assert!(matches!(done(server.poll()), Outcome::Established(_)));
}

#[test]
fn errors_of_the_socket() {
    let now = Instant::now();
    let (mut client, mut server) = confirmed(now);
    client.error(libc::ECONNRESET);
    assert_ends!(client, Outcome::Fail(libc::ECONNRESET));
    server.error(libc::EHOSTUNREACH);
    assert_ends!(server, Outcome::Fail(libc::EHOSTUNREACH));
    // After the end nothing counts.
    server.error(libc::ECONNRESET);
    server.timeout(now + 60 * SECOND);
    server.eof();
    server.link_ready(now);
    server.add_link_done(now);
    server.decline(Diagnosis::Mem, now);
    assert_eq!(server.read(b"payload", now), 0);
    assert_over!(server);
}
