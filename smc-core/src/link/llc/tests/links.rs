//! A second link: what two Linux kernels said to each other about it, with this state machine in the place of one of
//! them, and two of these against each other.

use super::pair::Pair;
use super::*;

/// The end of the captured group's second link at this side.
fn second(role: Role) -> NewEnd {
    let (d, psn) = match role {
        Role::Server => (1, [0x36, 0x2b, 0xf8]),
        Role::Client => (2, [0xf6, 0x33, 0x3b]),
    };
    NewEnd {
        end: End {
            mac: Mac([0x52, 0x54, 0, 0, 2, d]),
            gid: Gid::from_ipv4([10, 9, 0, 10 + d].into()),
            qpn: Qpn::new(17).unwrap(),
        },
        mtu: Mtu::from_code(3).unwrap(),
        psn: Psn::from_be_bytes(psn),
    }
}

const SERVERS: u64 = 0xff21_1454_039e_0000;
const CLIENTS: u64 = 0xff1e_a257_03a6_0000;

fn on_both(first: u32, second: u32, addr: u64) -> Rtokens {
    [Some(token(first, addr)), Some(token(second, addr))]
}

fn send(lane: Lane, name: &str) -> Action {
    Action::Send(lane, vectors::get(name))
}

fn lost(lane: Lane) -> Vec<Action> {
    let deleted = Action::Send(lane, vectors::get("delete-link-lost-client"));
    vec![Action::DropLink(1 - lane), deleted]
}

impl Rig {
    fn receive_on(&mut self, lane: Lane, name: &str) {
        self.llc
            .receive(lane, &vectors::get(name), self.now)
            .unwrap();
    }

    /// One that has got its second link with the captured messages.
    fn with_two(role: Role) -> Rig {
        let mut rig = Rig::new(role);
        let peers = match role {
            Role::Server => token(0x305, CLIENTS),
            Role::Client => token(0x3b2, SERVERS),
        };
        rig.llc.add_rtoken([Some(peers), None]).unwrap();
        let (own, now) = (second(role), rig.now);
        match role {
            Role::Server => {
                rig.receive("confirm-link-resp");
                assert_eq!(rig.actions().last(), Some(&Action::OfferLink(1)));
                let rmbs = [on_both(0x3b2, 0x3f1, SERVERS)];
                rig.llc.offer_link(own, &rmbs, now);
                assert_eq!(rig.actions(), [sends("add-link-req")]);
                rig.receive("add-link-resp");
                let peer = second(Role::Client);
                assert_eq!(rig.actions(), [Action::ConnectLink { lane: 1, peer }]);
                rig.llc.link_connected(now);
                let confirm = send(1, "confirm-link2-req");
                assert_eq!(rig.actions(), [confirm]);
                rig.receive_on(1, "confirm-link2-resp");
                assert_eq!(rig.actions(), [Action::LinkUp(1)]);
            }
            Role::Client => {
                rig.receive("confirm-link-req");
                rig.actions();
                assert!(rig.llc.is_adding());
                rig.receive("add-link-req");
                let peer = second(Role::Server);
                assert_eq!(rig.actions(), [Action::AnswerLink { lane: 1, peer }]);
                let rmbs = [on_both(0x305, 0x392, CLIENTS)];
                rig.llc.accept_link(own, &rmbs, now);
                assert_eq!(rig.actions(), [sends("add-link-resp")]);
                rig.receive_on(1, "confirm-link2-req");
                assert_eq!(
                    rig.actions(),
                    [
                        Action::ReadyToSend(1),
                        send(1, "confirm-link2-resp"),
                        Action::LinkUp(1)
                    ]
                );
            }
        }
        assert!(!rig.llc.is_adding());
        assert_eq!(rig.llc.link(1), Some((2, true)));
        let known = match role {
            Role::Server => on_both(0x305, 0x392, CLIENTS),
            Role::Client => on_both(0x3b2, 0x3f1, SERVERS),
        };
        assert_eq!(rig.llc.rtokens().get(0, peers.rkey), Some(&known));
        rig
    }
}

#[test]
fn a_link_is_added_and_the_first_one_lost() {
    for role in [Role::Server, Role::Client] {
        let mut rig = Rig::with_two(role);
        rig.llc.link_failed(0, rig.now);
        let mut deleted = vectors::get("delete-link-lost-client");
        deleted[4] = 1;
        assert_eq!(
            rig.actions(),
            [Action::DropLink(0), Action::Send(1, deleted)]
        );
        assert!(rig.llc.is_up());
        // Once more, and what still comes by it.
        rig.llc.link_failed(0, rig.now);
        rig.receive("test-link-req");
        assert_eq!(rig.actions(), []);
        rig.llc.link_failed(1, rig.now);
        assert_eq!(rig.actions(), [Action::Down(Down::LinkFailed)]);
    }
}

#[test]
fn rkeys_are_told_for_both_links() {
    let mut server = Rig::with_two(Role::Server);
    let addr = 0xff21_1454_048c_0000;
    server
        .llc
        .confirm_rkey(on_both(0x4d6, 0x42c, addr), server.now);
    let expected = padded("262c0000 01 000004d6 ff211454048c0000 02 0000042c ff211454048c0000");
    assert_eq!(server.actions(), [Action::Send(0, expected)]);
    // The captured one went by the second link.
    let mut client = Rig::with_two(Role::Client);
    client.receive_on(1, "confirm-rkey-2tok-server");
    assert_eq!(client.actions(), [send(1, "confirm-rkey-2tok-resp")]);
    let known = on_both(0x4d6, 0x42c, addr);
    assert_eq!(client.llc.rtokens().get(1, 0x42c), Some(&known));
    assert_eq!(client.llc.rtokens().get(0, 0x4d6), Some(&known));
    client.receive_hex("292c0000 01 00 0000 000004d6");
    assert_eq!(client.llc.rtokens().get(1, 0x42c), None);
    // An RMB that the second link doesn't know can't be told.
    server.receive_hex("262c0080 01 000004d6 ff211454048c0000");
    server.actions();
    server.llc.confirm_rkey(own(5, 0), server.now);
    let done = Action::ConfirmRkeyDone {
        tokens: own(5, 0),
        result: Err(RkeyError::NewLink),
    };
    assert_eq!(server.actions(), [done]);
}

/// The client has noticed first.
#[test]
fn the_client_loses_a_link() {
    let mut client = Rig::with_two(Role::Client);
    client.llc.link_failed(1, client.now);
    assert_eq!(client.actions(), lost(0));
    client.receive("delete-link-lost-server");
    assert_eq!(client.actions(), [sends("delete-link-resp-client")]);

    let mut server = Rig::with_two(Role::Server);
    server.receive("delete-link-lost-client");
    assert_eq!(server.actions(), lost(0));
    server.receive("delete-link-resp-client");
    assert_eq!(server.actions(), []);
    assert_eq!(server.llc.link(1), None);
}

#[test]
fn the_server_deletes_a_link() {
    let mut client = Rig::with_two(Role::Client);
    client.receive("delete-link-lost-server");
    assert_eq!(
        client.actions(),
        [sends_hex("242c00a0 02 00010000"), Action::DropLink(1)]
    );
    // And makes up for it: the next number, in the same place.
    client.receive("add-link-asym-req");
    let [Action::AnswerLink { lane: 1, peer }] = client.actions()[..] else {
        panic!()
    };
    assert_eq!(peer.end.qpn, Qpn::new(18).unwrap());
}

#[test]
fn a_silent_link_is_given_up() {
    let mut client = Rig::with_two(Role::Client);
    client.llc.note_received(0, client.now + secs(10));
    client.expire(secs(30));
    assert_eq!(client.actions(), [send(1, "test-link-req")]);
    client.expire(secs(2));
    assert_eq!(client.actions(), lost(0));
    client.expire(secs(8));
    assert_eq!(client.actions(), [sends("test-link-req")]);
}

#[test]
fn a_request_goes_on_over_the_other_link() {
    let mut client = Rig::with_two(Role::Client);
    client.llc.confirm_rkey(on_both(1, 2, 0), client.now);
    client.actions();
    client.llc.link_failed(0, client.now);
    let again = Action::Send(1, padded("262c0000 00 00000002"));
    assert!(client.actions().contains(&again));
    let answer = padded("262c0080 00 00000002");
    client.llc.receive(1, &answer, client.now).unwrap();
    let done = Action::ConfirmRkeyDone {
        tokens: on_both(1, 2, 0),
        result: Ok(()),
    };
    assert_eq!(client.actions(), [done]);
}

#[test]
fn the_other_side_says_nothing() {
    let mut server = Rig::new(Role::Server);
    server.receive("confirm-link-resp");
    server.actions();
    server.llc.offer_link(second(Role::Server), &[], server.now);
    server.actions();
    server.llc.confirm_rkey(own(1, 0), server.now);
    assert_eq!(server.actions(), [], "not while a link is being added");
    server.expire(secs(2));
    assert_eq!(
        server.actions(),
        [Action::DropLink(1), sends_hex("262c0000 00 00000001")]
    );
    let mut client = Rig::up(Role::Client);
    client.receive("add-link-req");
    client.actions();
    client
        .llc
        .accept_link(second(Role::Client), &[], client.now);
    client.actions();
    client.expire(LINK_TIME);
    assert_eq!(client.actions(), lost(0));
    assert!(client.llc.is_up());
}

#[test]
fn the_other_side_refuses() {
    let mut server = Rig::new(Role::Server);
    server.receive("confirm-link-resp");
    server.actions();
    server.llc.offer_link(second(Role::Server), &[], server.now);
    server.actions();
    server.receive("add-link-reject");
    assert_eq!(server.actions(), [Action::DropLink(1)]);
    assert!(!server.llc.is_adding());
}

#[test]
fn a_client_and_a_server_add_a_link_and_lose_one() {
    for losing in [0, 1] {
        for lane in [0, 1] {
            let mut pair = Pair::with_two();
            let told = pair.take_told();
            assert!(told.iter().all(|told| told.contains(&Action::LinkUp(1))));
            let now = pair.sides[losing].now;
            pair.sides[losing].llc.link_failed(lane, now);
            pair.settle();
            let dropped = vec![Action::DropLink(lane)];
            assert_eq!(pair.take_told(), [dropped.clone(), dropped]);
            assert!(pair.sides.iter().all(|side| side.llc.is_up()));
        }
    }
}
