//! What two Linux kernels said to each other, with this state machine in the place of one of them.

use super::*;

#[test]
fn first_contact_as_client() {
    let mut client = Rig::new(Role::Client);
    assert_eq!(client.actions(), []);
    assert!(!client.llc.is_up());
    client.receive("confirm-link-req");
    assert_eq!(
        client.actions(),
        [
            Action::ReadyToSend(0),
            sends("confirm-link-resp"),
            Action::Established
        ]
    );
    client.receive("add-link-req-same-gid");
    assert!(matches!(
        client.actions()[..],
        [Action::AnswerLink { lane: 1, .. }]
    ));
    client.llc.refuse_link(client.now);
    assert_eq!(client.actions(), [sends("add-link-reject")]);
    assert_eq!(client.llc.link(0), Some((1, true)));
    // Once confirmed, it isn't confirmed again.
    client.receive("confirm-link-req");
    client.receive("confirm-link-resp");
    assert_eq!(client.actions(), []);
}

#[test]
fn first_contact_as_server() {
    let mut server = Rig::new(Role::Server);
    assert_eq!(server.actions(), [sends("confirm-link-req")]);
    server.receive("confirm-link-resp");
    assert_eq!(
        server.actions(),
        [Action::Established, Action::OfferLink(1)]
    );
    server.receive("confirm-link-resp");
    server.receive("confirm-link-req");
    assert_eq!(server.actions(), []);
}

#[test]
fn subsequent_contact() {
    let (servers, clients) = (
        own(0x6c0, 0xff49_b0f4_0393_0000),
        own(0x4aa, 0xff2e_c9f8_437e_0000),
    );
    let mut client = Rig::up(Role::Client);
    client.receive("confirm-rkey-req-server");
    assert_eq!(client.actions(), [sends("confirm-rkey-resp-client")]);
    assert_eq!(client.llc.rtokens().get(0, 0x6c0), Some(&servers));
    client.llc.confirm_rkey(clients, client.now);
    assert_eq!(client.actions(), [sends("confirm-rkey-req-client")]);
    client.receive("confirm-rkey-resp-server");
    let done = Action::ConfirmRkeyDone {
        tokens: clients,
        result: Ok(()),
    };
    assert_eq!(client.actions(), [done]);

    let mut server = Rig::up(Role::Server);
    server.llc.confirm_rkey(servers, server.now);
    assert_eq!(server.actions(), [sends("confirm-rkey-req-server")]);
    // Both directions may overlap.
    server.receive("confirm-rkey-req-client");
    assert_eq!(server.actions(), [sends("confirm-rkey-resp-server")]);
    server.receive("confirm-rkey-resp-client");
    let done = Action::ConfirmRkeyDone {
        tokens: servers,
        result: Ok(()),
    };
    assert_eq!(server.actions(), [done]);
    assert_eq!(server.llc.rtokens().get(0, 0x4aa), Some(&clients));
}

#[test]
fn the_end_of_a_connection() {
    let mut client = Rig::up(Role::Client);
    client.receive("confirm-rkey-req-server");
    client.actions();
    client.llc.delete_rkey(own(0x4aa, 0), client.now);
    assert_eq!(client.actions(), [sends("delete-rkey-req-client")]);
    client.receive("delete-rkey-req-server");
    assert_eq!(client.actions(), [sends("delete-rkey-resp-client")]);
    assert_eq!(client.llc.rtokens().get(0, 0x6c0), None);
    client.receive("delete-rkey-resp-server");
    assert_eq!(
        client.actions(),
        [Action::DeleteRkeyDone {
            tokens: own(0x4aa, 0)
        }]
    );
}

#[test]
fn tests_of_the_link() {
    for role in [Role::Server, Role::Client] {
        let mut rig = Rig::up(role);
        rig.receive("test-link-req");
        assert_eq!(rig.actions(), [sends("test-link-resp")]);
        rig.receive("test-link-resp");
        assert_eq!(rig.actions(), []);
    }
}

#[test]
fn the_client_powers_off() {
    let mut server = Rig::up(Role::Server);
    server.receive("delete-link-all-client");
    assert_eq!(
        server.actions(),
        [
            sends("delete-link-all-echo"),
            Action::AbortConnections,
            sends("delete-link-all-server"),
            Action::Down(Down::Peer(DeleteReason::OPERATOR)),
        ]
    );
    assert!(!server.llc.is_up());
    server.receive("test-link-req");
    server.llc.terminate(DeleteReason::OPERATOR);
    server.llc.link_failed(0, server.now);
    assert_eq!(server.actions(), []);
    assert_eq!(server.llc.next_timeout(), None);
}

#[test]
fn this_side_powers_off() {
    let mut client = Rig::up(Role::Client);
    client.llc.terminate(DeleteReason::OPERATOR);
    assert_eq!(
        client.actions(),
        [
            Action::AbortConnections,
            sends("delete-link-all-client"),
            Action::Down(Down::Local(DeleteReason::OPERATOR)),
        ]
    );
}

#[test]
fn more_links_than_agreed_on_are_refused() {
    let mut client = Rig::with(Config {
        max_links: 1,
        ..config(Role::Client)
    });
    client.receive("confirm-link-req");
    client.actions();
    let mut refused = vectors::get("add-link-req");
    client.receive_bytes(&refused);
    refused.truncate(LEN);
    refused[1..4].copy_from_slice(&[44, 0, 0xc0]);
    assert_eq!(client.actions(), [Action::Send(0, refused)]);
    // Answers and suggestions to a server that proposes nothing.
    let mut server = Rig::up(Role::Server);
    server.receive("add-link-resp");
    server.receive("add-link-reject");
    server.receive_hex("22 2c00 00");
    assert_eq!(server.actions(), []);
    let gid = "00000000000000000000ffff0a09004d";
    let request = format!("255c0000 {} 04000000 {}", "00".repeat(20), gid.repeat(4));
    server.receive_bytes(&vectors::from_hex(&request));
    assert_eq!(server.actions(), [sends_hex("252c0080")]);
}

#[test]
fn rtokens_of_other_links_are_returned() {
    let mut client = Rig::up(Role::Client);
    client.receive("confirm-rkey-2tok-server");
    assert_eq!(client.actions(), [sends("confirm-rkey-2tok-resp")]);
    assert_eq!(
        client.llc.rtokens().get(0, 0x42c),
        Some(&own(0x42c, 0xff21_1454_048c_0000))
    );
    // That one is for link 1 of the captured group, which carried the message over link 2.
    assert_eq!(client.llc.rtokens().get(0, 0x4d6), None);
}

#[test]
fn a_link_that_doesnt_exist_is_deleted() {
    let mut client = Rig::up(Role::Client);
    client.receive("delete-link-lost-server");
    assert_eq!(client.actions(), [sends("delete-link-resp-client")]);
    let mut server = Rig::up(Role::Server);
    server.receive("delete-link-lost-client");
    assert_eq!(server.actions(), [sends_hex("242c00a0 02 00100000")]);
    // Answers to nothing.
    for rig in [&mut client, &mut server] {
        rig.receive("delete-link-resp-client");
        rig.receive_hex("242c00a0 01 00010000");
        rig.receive_hex("242c00e0 00 00010000");
        assert_eq!(rig.actions(), []);
    }
    assert!(client.llc.is_up() && server.llc.is_up());
}

#[test]
fn the_only_link_is_deleted() {
    let lost = Down::Peer(DeleteReason::LOST_PATH);
    let mut client = Rig::up(Role::Client);
    client.receive_hex("242c0020 01 00010000");
    assert_eq!(
        client.actions(),
        [sends_hex("242c00a0 01 00010000"), Action::Down(lost)]
    );
    // The server answers a client's request with its own, and waits for the answer to that.
    let mut server = Rig::up(Role::Server);
    server.receive_hex("242c0020 01 00010000");
    assert_eq!(server.actions(), [sends_hex("242c0020 01 00010000")]);
    assert!(!server.llc.is_up());
    server.receive_hex("242c00a0 01 00100000");
    assert_eq!(server.actions(), [Action::Down(lost)]);
}

/// What a kernel answered to an independent peer.
#[test]
fn probes() {
    let mut server = Rig::up(Role::Server);
    let data = "30313233343536373839616263646566";
    for (probe, answer) in [
        (format!("272c0000 {data}"), Some(format!("272c0080 {data}"))),
        (format!("27002c00 {data}"), Some(format!("272c0080 {data}"))),
        ("072c0000".into(), Some("072c0080".into())),
        ("292c0000 01 00 0000 01020304".into(), Some("292c00a0 01 01".into())),
        ("262c0000 00 22000001 00007f1200000000".into(), Some("262c0080 00 22000001 00007f1200000000".into())),
        ("292c0000 01 00 0000 22000001".into(), Some("292c0080 01".into())),
        (
            "252c0000 0000000000000000000000000000000000000000 01000000 00000000000000000000ffff0a09004d".into(),
            Some("252c0080".into()),
        ),
        ("222c0000".into(), None),
    ] {
        server.receive_hex(&probe);
        let expected: Vec<Action> = answer.iter().map(|hex| sends_hex(hex)).collect();
        assert_eq!(server.actions(), expected, "{probe}");
    }
    assert_eq!(
        server.llc.receive(0, &[0x2a; 44], server.now),
        Err(crate::wire::Error::Length)
    );
    assert!(server.llc.receive(0, &[0x27; 40], server.now).is_err());
    assert_eq!(server.actions(), []);
    server.receive_hex("242c0060 00 00030000");
    assert_eq!(
        server.actions(),
        [
            sends_hex("242c0060 00 00030000"),
            Action::AbortConnections,
            sends_hex("242c0040 00 00030000"),
            Action::Down(Down::Peer(DeleteReason::PROGRAM)),
        ]
    );
}

#[test]
fn requests_in_the_form_of_version_1_are_answered_in_it() {
    let mut client = Rig::up(Role::Client);
    client.receive_hex("092c0000 03 00 0000 00000001 00000002 00000003");
    assert_eq!(
        client.actions(),
        [sends_hex("092c00a0 03 e0 0000 00000001 00000002 00000003")]
    );
    client.receive_hex("062c0000 00 00000002 0000000000001000");
    assert_eq!(
        client.actions(),
        [sends_hex("062c0080 00 00000002 0000000000001000")]
    );
    client.receive_hex("092c0000 03 00 0000 00000001 00000002 00000003");
    assert_eq!(
        client.actions(),
        [sends_hex("092c00a0 03 a0 0000 00000001 00000002 00000003")]
    );
    client.receive_hex("022c0000 525400000001 0000");
    assert_eq!(client.actions(), [sends_hex("022c01c0 525400000001 0000")]);
    client.receive_hex("032c0000 02 01");
    assert_eq!(client.actions(), []);
}

#[test]
fn groups_of_version_1_ask_in_it() {
    let mut server = Rig::with(Config {
        version: Version::V1,
        max_conns: 0,
        ..config(Role::Server)
    });
    let mut expected = vectors::get("confirm-link-req");
    expected[..3].copy_from_slice(&[0x01, 44, 0]);
    expected[35] = 0;
    assert_eq!(server.actions(), [Action::Send(0, expected)]);
}

#[test]
fn peers_that_want_eyecatchers_are_declined() {
    let without = |name| {
        let mut bytes = vectors::get(name);
        bytes[3] &= 0x80;
        bytes
    };
    let mut client = Rig::new(Role::Client);
    client.receive_bytes(&without("confirm-link-req"));
    assert_eq!(client.actions(), [Action::Down(Down::Eyecatcher)]);
    let mut server = Rig::new(Role::Server);
    server.actions();
    server.receive_bytes(&without("confirm-link-resp"));
    assert_eq!(
        server.actions(),
        [
            sends("delete-link-all-server"),
            Action::Down(Down::Eyecatcher)
        ]
    );
}

#[test]
fn a_full_table_refuses_rtokens() {
    let mut server = Rig::up(Role::Server);
    server.llc.add_rtoken(own(1000, 0)).unwrap();
    for rkey in 1..255 {
        server.llc.add_rtoken(own(rkey, 0)).unwrap();
    }
    assert!(server.llc.add_rtoken(own(255, 0)).is_err());
    server.receive_hex("262c0000 00 000000ff 0000000000001000");
    assert_eq!(
        server.actions(),
        [sends_hex("262c00a0 00 000000ff 0000000000001000")]
    );
    server.receive_hex("292c0000 01 00 0000 000003e8");
    server.receive_hex("262c0000 00 000000ff 0000000000001000");
    assert_eq!(
        server.actions(),
        [
            sends_hex("292c0080 01"),
            sends_hex("262c0080 00 000000ff 0000000000001000")
        ]
    );
}

#[test]
fn the_peer_refuses_an_rtoken() {
    let mut server = Rig::up(Role::Server);
    server.llc.confirm_rkey(own(5, 0x1000), server.now);
    server.actions();
    // Answers that belong to something else.
    server.receive_hex("262c0080 00 00000006 0000000000001000");
    server.receive_hex("292c0080 01");
    assert_eq!(server.actions(), []);
    server.receive_hex("262c00a0 00 00000005 0000000000001000");
    let refused = Action::ConfirmRkeyDone {
        tokens: own(5, 0x1000),
        result: Err(RkeyError::Refused),
    };
    assert_eq!(server.actions(), [refused]);
}

#[test]
fn one_request_waits_for_the_end_of_a_flow() {
    let mut client = Rig::new(Role::Client);
    // Before the link is confirmed: the first waits, the second is dropped.
    client.receive("add-link-req-same-gid");
    client.receive_hex("242c0020 01 00010000");
    assert_eq!(client.actions(), []);
    client.receive("confirm-link-req");
    let actions = client.actions();
    assert!(matches!(
        actions[2..],
        [Action::Established, Action::AnswerLink { .. }]
    ));
    client.llc.refuse_link(client.now);
    assert_eq!(client.actions(), [sends("add-link-reject")]);
    // Own requests go one after the other; what the peer asked comes between them.
    client.llc.confirm_rkey(own(1, 0), client.now);
    client.llc.delete_rkey(own(2, 0), client.now);
    assert_eq!(client.actions(), [sends_hex("262c0000 00 00000001")]);
    client.receive_hex("242c0020 07 00010000");
    assert_eq!(client.actions(), []);
    client.receive_hex("262c0080 00 00000001");
    assert_eq!(
        client.actions(),
        [
            Action::ConfirmRkeyDone {
                tokens: own(1, 0),
                result: Ok(())
            },
            sends_hex("242c00a0 07 00100000"),
            sends_hex("292c0000 01 00 0000 00000002"),
        ]
    );
    client.receive_hex("292c0080 01");
    assert_eq!(
        client.actions(),
        [Action::DeleteRkeyDone { tokens: own(2, 0) }]
    );
}

#[test]
fn own_requests_wait_for_the_link_and_end_with_it() {
    let mut client = Rig::new(Role::Client);
    client.llc.confirm_rkey(own(1, 0), client.now);
    client.llc.confirm_rkey(own(2, 0), client.now);
    assert_eq!(client.actions(), []);
    let waits = |client: &Rig| [1, 2].map(|rkey| client.llc.rkey_waits(own(rkey, 0)));
    assert_eq!(waits(&client), [true, true]);
    client.receive("confirm-link-req");
    assert_eq!(client.actions()[3..], [sends_hex("262c0000 00 00000001")]);
    assert_eq!(waits(&client), [false, true]);
    client.llc.link_failed(0, client.now);
    client.llc.delete_rkey(own(3, 0), client.now);
    let lost = |rkey| Action::ConfirmRkeyDone {
        tokens: own(rkey, 0),
        result: Err(RkeyError::Down),
    };
    assert_eq!(
        client.actions(),
        [
            lost(1),
            lost(2),
            Action::Down(Down::LinkFailed),
            Action::DeleteRkeyDone { tokens: own(3, 0) }
        ]
    );
}
