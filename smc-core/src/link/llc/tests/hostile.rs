//! Peers that send anything at any time.

use super::*;
use proptest::prelude::*;

/// One event at a state machine.
#[derive(Clone, Debug)]
enum Event {
    Receive(Vec<u8>),
    Pass(u64),
    Timeout,
    Confirm(u32),
    Delete(u32),
    Connections(usize),
    Poll,
}

fn bytes() -> impl Strategy<Value = Vec<u8>> {
    let types = prop_oneof![1u8..10, 0x21u8..0x2a, any::<u8>()];
    let flags = prop_oneof![
        Just(0),
        Just(0x80),
        Just(0xa0),
        Just(0xc0),
        Just(0x03),
        Just(0x83),
        any::<u8>()
    ];
    let small = proptest::collection::vec(0u8..3, 40..120);
    let body = prop_oneof![4 => small, 1 => proptest::collection::vec(any::<u8>(), 40..120)];
    let message = (types, flags, body).prop_map(|(kind, flags, body)| {
        let len = if kind & 0x20 == 0 {
            44
        } else {
            body.len() as u8 + 4
        };
        [&[kind, len, 0, flags], &body[..]].concat()
    });
    prop_oneof![9 => message, 1 => proptest::collection::vec(any::<u8>(), 0..60)]
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        12 => bytes().prop_map(Event::Receive),
        2 => (0u64..3000).prop_map(Event::Pass),
        1 => (0u64..700_000).prop_map(Event::Pass),
        3 => Just(Event::Timeout),
        2 => (0u32..4).prop_map(Event::Confirm),
        2 => (0u32..4).prop_map(Event::Delete),
        1 => (0usize..2).prop_map(Event::Connections),
        6 => Just(Event::Poll),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// No event does harm; every own request comes to one end; after the end of the group nothing follows.
    #[test]
    fn anything_at_any_time(
        server: bool,
        confirmed: bool,
        events in proptest::collection::vec(event(), 0..60),
    ) {
        let role = if server { Role::Server } else { Role::Client };
        let mut rig = if confirmed { Rig::up(role) } else { Rig::new(role) };
        let mut open = 0i32;
        let mut over = false;
        for event in events.into_iter().chain([Event::Poll]) {
            match event {
                Event::Receive(bytes) => drop(rig.llc.receive(0, &bytes, rig.now)),
                Event::Pass(ms) => rig.now += Duration::from_millis(ms),
                Event::Timeout => {
                    rig.llc.handle_timeout(rig.now);
                    // What was due is done.
                    prop_assert!(rig.llc.next_timeout().is_none_or(|at| at > rig.now));
                }
                Event::Confirm(rkey) => {
                    rig.llc.confirm_rkey(own(rkey, 0), rig.now);
                    open += 1;
                }
                Event::Delete(rkey) => {
                    rig.llc.delete_rkey(own(rkey, 0), rig.now);
                    open += 1;
                }
                Event::Connections(n) => rig.llc.set_connections(n, rig.now),
                Event::Poll => {
                    for action in rig.actions() {
                        let done = matches!(
                            action,
                            Action::ConfirmRkeyDone { .. } | Action::DeleteRkeyDone { .. }
                        );
                        prop_assert!(done || !over, "{action:?} after the end");
                        open -= i32::from(done);
                        prop_assert!(open >= 0);
                        over |= matches!(action, Action::Down(_));
                    }
                    prop_assert!(!over || open == 0);
                    prop_assert!(!over || rig.llc.next_timeout().is_none());
                }
            }
        }
    }
}

#[test]
fn a_flood_of_requests_doesnt_fill_memory() {
    let mut server = Rig::up(Role::Server);
    for rkey in 0..1000u32 {
        server.receive("test-link-req");
        server.receive_hex(&format!("262c0000 00 {rkey:08x}"));
        server.receive_hex("242c0020 09 00010000");
        server.receive_hex("252c0000");
    }
    let actions = server.actions();
    assert!(actions.len() <= 70, "{}", actions.len());
    // It goes on once the driver has done its part.
    server.receive("test-link-req");
    assert_eq!(server.actions(), [sends("test-link-resp")]);
    let known = (0..1000).filter(|rkey| server.llc.rtokens().get(0, *rkey).is_some());
    assert!(known.count() <= 255);
}

/// Its queue pair doesn't take requests yet.
#[test]
fn a_client_says_nothing_before_confirm_link() {
    let ends: [fn(&mut Rig); 3] = [
        |rig| rig.llc.terminate(DeleteReason::PROGRAM),
        |rig| rig.receive_hex("242c0040 00 00020000"),
        |rig| rig.receive_hex("272c0000"),
    ];
    for end in ends {
        let mut client = Rig::new(Role::Client);
        end(&mut client);
        let said = client.actions();
        assert!(
            said.iter().all(|a| matches!(a, Action::Down(_))),
            "{said:?}"
        );
    }
}
