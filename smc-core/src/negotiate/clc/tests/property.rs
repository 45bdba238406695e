//! Random runs of both sides together, and random bytes into each.

use proptest::collection::vec;
use proptest::prelude::*;

use super::sim::{CLIENT_PAYLOAD, Deed, Plan, SERVER_PAYLOAD, Sim};
use super::*;

fn deed() -> impl Strategy<Value = Deed> {
    prop_oneof![4 => Just(Deed::Do), 1 => Just(Deed::Decline), 1 => Just(Deed::Stall)]
}

fn plan() -> impl Strategy<Value = Plan> {
    (
        any::<bool>(),
        1u8..=2,
        1u8..=2,
        (deed(), deed(), deed()).prop_map(|(a, b, c)| [a, b, c]),
        (deed(), deed(), deed()).prop_map(|(a, b, c)| [a, b, c]),
    )
        .prop_map(
            |(first_contact, client_links, server_links, client, server)| Plan {
                first_contact,
                client_links,
                server_links,
                client,
                server,
            },
        )
}

const DILIGENT: Plan = Plan {
    first_contact: true,
    client_links: 2,
    server_links: 2,
    client: [Deed::Do; 3],
    server: [Deed::Do; 3],
};

/// Checks what holds for every run.
fn check(plan: Plan, cuts: &[usize]) {
    let mut sim = Sim::new(plan);
    let start = sim.now;
    sim.run(cuts);
    assert!(sim.now - start <= 9 * SECOND, "took {:?}", sim.now - start);
    let ends = (sim.client_end.unwrap(), sim.server_end.unwrap());
    let (client_reads, server_reads) = sim.leftovers();
    match ends {
        (Outcome::Established(client), Outcome::Established(server)) => {
            assert_eq!(client.local, server.peer);
            assert_eq!(client.peer, server.local);
            assert_eq!(client.terms, server.terms);
            assert_eq!(client.first_contact, server.first_contact);
            assert_eq!(client.first_contact, client.terms.is_some());
            assert!(client_reads.is_empty() && server_reads.is_empty());
        }
        (Outcome::Fallback(client), Outcome::Fallback(server)) => {
            assert_eq!(client.diagnosis, server.diagnosis);
            if client.by == Side::Local && server.by == Side::Local {
                // Two Declines that crossed: the protocol has no remedy. It takes two that give up at once.
                assert_eq!(plan.client[1], Deed::Decline);
                assert_eq!(plan.server[1], Deed::Decline);
                return;
            }
            assert_ne!(client.by, server.by);
            assert_eq!(client_reads, SERVER_PAYLOAD);
            assert_eq!(server_reads, CLIENT_PAYLOAD);
        }
        // The client of a subsequent contact doesn't wait for the server to be content with its Confirm, and one
        // side may have gone on without a second link when the other one declines.
        (Outcome::Established(established), Outcome::Fallback(server)) => {
            assert!(!established.first_contact || established.terms.unwrap().max_links > 1);
            assert_eq!(server.by, Side::Local);
        }
        (Outcome::Fallback(client), Outcome::Established(established)) => {
            assert!(established.terms.unwrap().max_links > 1);
            assert_eq!(client.by, Side::Local);
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn diligent_drivers_get_there_without_waiting() {
    for first_contact in [true, false] {
        for cut in 1..200 {
            let plan = Plan {
                first_contact,
                ..DILIGENT
            };
            let mut sim = Sim::new(plan);
            let start = sim.now;
            sim.run(&[cut]);
            assert_eq!(sim.now, start);
            assert!(matches!(sim.client_end, Some(Outcome::Established(_))));
            assert!(matches!(sim.server_end, Some(Outcome::Established(_))));
            check(plan, &[cut]);
        }
    }
}

/// Every combination of deeds, not only the likely ones.
#[test]
fn every_plan() {
    const DEEDS: [Deed; 3] = [Deed::Do, Deed::Decline, Deed::Stall];
    for code in 0..3usize.pow(6) {
        let deed = |place: u32| DEEDS[code / 3usize.pow(place) % 3];
        for links in [1, 2] {
            for first_contact in [true, false] {
                check(
                    Plan {
                        first_contact,
                        client_links: links,
                        server_links: 2,
                        client: [deed(0), deed(1), deed(2)],
                        server: [deed(3), deed(4), deed(5)],
                    },
                    &[1000],
                );
            }
        }
    }
}

/// Brings a client to one of its steps.
fn client_at(step: usize, now: Instant) -> Client {
    match step {
        0 => client(local(2), now).0,
        1 => accepted(true, now).0,
        2 => accepted(false, now).0,
        _ => confirmed(now).0,
    }
}

fn server_at(step: usize, now: Instant) -> Server {
    match step {
        0 => Server::new(local(1), now),
        1 => proposed(now).1,
        2 => accepted(true, now).1,
        _ => confirmed(now).1,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..Default::default() })]

    #[test]
    fn random_runs(plan in plan(), cuts in vec(1usize..100, 1..20)) {
        check(plan, &cuts);
    }

    /// Any bytes, after what may be the beginning of a message: no panic, and `want` is an upper bound.
    #[test]
    fn any_bytes(
        step in 0usize..4,
        head in 0usize..200,
        kind in prop_oneof![0u8..6, any::<u8>()],
        data in vec(any::<u8>(), 0..300),
    ) {
        let now = Instant::now();
        let mut bytes = client(local(2), now).1;
        bytes[4] = kind;
        bytes.truncate(head);
        bytes.extend(data);
        let mut client = client_at(step, now);
        let mut server = server_at(step, now);
        for byte in bytes.chunks(7) {
            let want = client.want();
            prop_assert_eq!(client.read(byte) > 0, want > 0);
            let want = server.want();
            prop_assert_eq!(server.read(byte, now) > 0, want > 0);
        }
        while client.poll().is_some() {}
        while server.poll().is_some() {}
    }

    /// A good message of any kind at any step, with bytes behind it: not one of these is taken while it isn't wanted.
    #[test]
    fn any_message(step in 0usize..4, message in crate::wire::clc::testing::message()) {
        let now = Instant::now();
        let mut bytes = crate::wire::clc::testing::bytes_of(&message);
        let length = bytes.len();
        bytes.extend(b"payload");
        let mut client = client_at(step, now);
        let wants = client.want() > 0;
        prop_assert_eq!(client.read(&bytes), if wants { length } else { 0 });
        prop_assert_eq!(client.poll().is_some(), wants);
        let mut server = server_at(step, now);
        let wants = server.want() > 0;
        prop_assert_eq!(server.read(&bytes, now), if wants { length } else { 0 });
        prop_assert_eq!(server.poll().is_some(), wants);
    }
}
