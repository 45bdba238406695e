//! Time limits.

use super::*;

#[test]
fn the_server_waits_2_s_for_confirm_link() {
    let mut server = Rig::new(Role::Server);
    server.actions();
    server.expire(secs(2));
    assert_eq!(
        server.actions(),
        [
            sends("delete-link-all-server"),
            Action::Down(Down::ConfirmTimeout)
        ]
    );
    server.receive("confirm-link-resp");
    server.llc.handle_timeout(server.now + secs(1000));
    assert_eq!(server.actions(), []);
}

#[test]
fn the_client_waits_4_s_for_confirm_link() {
    let mut client = Rig::new(Role::Client);
    client.expire(secs(4));
    assert_eq!(client.actions(), [Action::Down(Down::ConfirmTimeout)]);
}

#[test]
fn a_silent_link_is_tested() {
    for role in [Role::Server, Role::Client] {
        let mut rig = Rig::up(role);
        rig.expire(secs(30));
        assert_eq!(rig.actions(), [sends("test-link-req")]);
        rig.now += secs(1);
        rig.receive("test-link-resp");
        rig.expire(secs(30));
        assert_eq!(rig.actions(), [sends("test-link-req")]);
        rig.expire(secs(2));
        // Nothing more is sent on a link that can't be trusted.
        assert_eq!(rig.actions(), [Action::Down(Down::Silent)]);
    }
}

#[test]
fn a_doubted_link_is_tested_at_once() {
    for role in [Role::Server, Role::Client] {
        let mut rig = Rig::up(role);
        assert!(!rig.llc.in_doubt());
        rig.llc.doubt(rig.now);
        rig.llc.doubt(rig.now);
        assert_eq!(
            rig.actions(),
            [sends("test-link-req")],
            "one test is enough"
        );
        assert!(rig.llc.in_doubt());
        rig.receive("test-link-resp");
        assert!(!rig.llc.in_doubt() && rig.llc.is_up());
        rig.expire(secs(30));
        assert_eq!(rig.actions(), [sends("test-link-req")]);
        assert!(!rig.llc.in_doubt(), "that is only the keepalive's test");
        rig.llc.doubt(rig.now);
        assert_eq!(rig.actions(), [], "which serves for doubt, too");
        assert!(rig.llc.in_doubt());
        rig.expire(secs(2));
        assert_eq!(rig.actions(), [Action::Down(Down::Silent)]);
        assert!(!rig.llc.in_doubt());
        rig.llc.doubt(rig.now);
        assert_eq!(rig.actions(), []);
    }
}

#[test]
fn whatever_is_received_puts_the_test_off() {
    let mut server = Rig::up(Role::Server);
    server.now += secs(29);
    server.llc.note_received(0, server.now);
    server.now += secs(29);
    server.receive("test-link-req");
    assert_eq!(server.actions(), [sends("test-link-resp")]);
    server.now += secs(29);
    assert!(server.llc.receive(0, &[0x2a; 44], server.now).is_err());
    server.expire(secs(30));
    assert_eq!(server.actions(), [sends("test-link-req")]);
    server.llc.note_received(0, server.now);
    server.expire(secs(30));
    assert_eq!(server.actions(), [sends("test-link-req")]);
}

#[test]
fn tests_can_be_switched_off() {
    let mut client = Rig::with(Config {
        keepalive: None,
        ..config(Role::Client)
    });
    client.receive("confirm-link-req");
    assert_eq!(client.llc.next_timeout(), None);
}

#[test]
fn an_unused_group_ends() {
    for (role, limit) in [(Role::Server, secs(600)), (Role::Client, secs(610))] {
        let mut rig = Rig::with(Config {
            keepalive: None,
            ..config(role)
        });
        rig.receive(match role {
            Role::Server => "confirm-link-resp",
            Role::Client => "confirm-link-req",
        });
        rig.llc.set_connections(1, rig.now);
        rig.llc.refuse_link(rig.now);
        rig.actions();
        assert_eq!(rig.llc.next_timeout(), None);
        rig.llc.set_connections(0, rig.now);
        rig.now += secs(500);
        rig.llc.set_connections(1, rig.now);
        rig.llc.set_connections(0, rig.now);
        // Said again, it changes nothing.
        rig.llc.set_connections(0, rig.now + secs(1));
        rig.expire(limit);
        assert_eq!(rig.actions(), [sends_hex("242c0060 00 00030000")]);
        assert!(!rig.llc.is_up());
        rig.expire(secs(2));
        assert_eq!(rig.actions(), [Action::Down(Down::Idle)]);
    }
}

#[test]
fn the_peers_answer_ends_an_unused_group() {
    let mut server = Rig::up(Role::Server);
    server.llc.set_connections(0, server.now);
    server.now += secs(600);
    server.llc.note_received(0, server.now);
    server.llc.handle_timeout(server.now);
    assert_eq!(server.actions(), [sends_hex("242c0060 00 00030000")]);
    server.llc.confirm_rkey(own(1, 0), server.now);
    let ending = Action::ConfirmRkeyDone {
        tokens: own(1, 0),
        result: Err(RkeyError::Down),
    };
    assert_eq!(server.actions(), [ending]);
    server.receive("add-link-req-same-gid");
    server.receive_hex("242c0060 00 00030000");
    assert_eq!(server.actions(), [Action::Down(Down::Idle)]);
}

#[test]
fn the_server_doesnt_wait_for_ever_to_delete_the_link() {
    let mut server = Rig::up(Role::Server);
    server.receive_hex("242c0020 01 00010000");
    server.actions();
    server.expire(secs(2));
    let lost = Down::Peer(DeleteReason::LOST_PATH);
    assert_eq!(server.actions(), [Action::Down(lost)]);
}

fn late(rkey: u32) -> Action {
    Action::ConfirmRkeyDone {
        tokens: own(rkey, 0),
        result: Err(RkeyError::Timeout),
    }
}

#[test]
fn requests_about_rkeys_are_given_up() {
    let mut client = Rig::up(Role::Client);
    client.llc.confirm_rkey(own(1, 0), client.now);
    client.llc.delete_rkey(own(2, 0), client.now);
    client.actions();
    client.expire(secs(2));
    assert_eq!(
        client.actions(),
        [late(1), sends_hex("292c0000 01 00 0000 00000002")]
    );
    // The answer to what was given up.
    client.receive_hex("262c0080 00 00000001");
    assert_eq!(client.actions(), []);
    client.expire(secs(2));
    assert_eq!(
        client.actions(),
        [Action::DeleteRkeyDone { tokens: own(2, 0) }]
    );
}

#[test]
fn a_request_waits_20_s_for_its_turn() {
    let mut client = Rig::up(Role::Client);
    for rkey in 0..12 {
        client.llc.confirm_rkey(own(rkey, 0), client.now);
    }
    client.actions();
    for rkey in 0..9 {
        client.expire(secs(2));
        let next = Action::Send(0, padded(&format!("262c0000 00 {:08x}", rkey + 1)));
        assert_eq!(client.actions(), [late(rkey), next]);
        client.llc.note_received(0, client.now);
    }
    // 20 s have passed: the last that was sent, and all that wait.
    client.expire(secs(2));
    assert_eq!(client.actions(), [late(9), late(10), late(11)]);
}

#[test]
fn no_more_requests_wait_than_connections_can_have() {
    let mut client = Rig::up(Role::Client);
    for rkey in 0..511 {
        client.llc.confirm_rkey(own(rkey, 0), client.now);
    }
    assert_eq!(client.actions(), [sends_hex("262c0000 00 00000000")]);
    client.llc.confirm_rkey(own(511, 0), client.now);
    let busy = Action::ConfirmRkeyDone {
        tokens: own(511, 0),
        result: Err(RkeyError::Busy),
    };
    assert_eq!(client.actions(), [busy]);
}
