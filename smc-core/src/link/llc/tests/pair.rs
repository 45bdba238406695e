//! A client and a server against each other.

use super::*;
use proptest::prelude::*;

/// Two sides, joined by a link that delivers at once.
pub(super) struct Pair {
    pub(super) sides: [Rig; 2],
    /// What each side was told beside what it had to send.
    told: [Vec<Action>; 2],
    /// They have two ports each.
    two: bool,
}

impl Pair {
    fn new() -> Pair {
        let now = Instant::now();
        let side = |role| Rig {
            llc: Llc::new(config(role), now),
            now,
        };
        Pair {
            sides: [side(Role::Client), side(Role::Server)],
            told: [Vec::new(), Vec::new()],
            two: false,
        }
    }

    /// With two links.
    pub(super) fn with_two() -> Pair {
        let mut pair = Pair::new();
        pair.two = true;
        pair.settle();
        pair
    }

    /// Delivers until both are quiet.
    pub(super) fn settle(&mut self) {
        loop {
            let mut quiet = true;
            for (from, to) in [(0, 1), (1, 0)] {
                for action in self.sides[from].actions() {
                    quiet = false;
                    match action {
                        Action::Send(lane, bytes) => {
                            let to = &mut self.sides[to];
                            to.llc.receive(lane, &bytes, to.now).unwrap();
                        }
                        told => {
                            drive(&mut self.sides[from], &told, self.two);
                            self.told[from].push(told);
                        }
                    }
                }
            }
            if quiet {
                return;
            }
        }
    }

    fn pass(&mut self, time: Duration) {
        for side in &mut self.sides {
            side.now += time;
            side.llc.handle_timeout(side.now);
        }
        self.settle();
    }

    pub(super) fn take_told(&mut self) -> [Vec<Action>; 2] {
        core::mem::take(&mut self.told)
    }
}

/// Does what LLC asks for where a link is added.
fn drive(side: &mut Rig, action: &Action, two: bool) {
    let now = side.now;
    let end = NewEnd {
        end: config(Role::Client).end,
        mtu: Mtu::from_code(3).unwrap(),
        psn: Psn::from_be_bytes([1, 2, 3]),
    };
    match action {
        Action::OfferLink(_) | Action::AnswerLink { .. } if !two => side.llc.refuse_link(now),
        Action::OfferLink(_) => side.llc.offer_link(end, &[], now),
        Action::AnswerLink { .. } => side.llc.accept_link(end, &[], now),
        Action::ConnectLink { .. } => side.llc.link_connected(now),
        _ => {}
    }
}

#[test]
fn from_first_contact_to_the_end() {
    let mut pair = Pair::new();
    pair.settle();
    assert_eq!(
        pair.take_told(),
        [
            vec![Action::ReadyToSend(0), Action::Established],
            vec![Action::Established, Action::OfferLink(1)]
        ]
    );
    for (at, side) in pair.sides.iter_mut().enumerate() {
        side.llc.set_connections(1, side.now);
        for n in 0..10 {
            side.llc
                .confirm_rkey(own(100 * at as u32 + n, n.into()), side.now);
        }
    }
    pair.settle();
    for (at, told) in pair.take_told().iter().enumerate() {
        let peer = &pair.sides[1 - at];
        assert_eq!(told.len(), 10);
        for (n, done) in (0..).zip(told) {
            let rkey = 100 * at as u32 + n;
            let result = Ok(());
            assert_eq!(
                *done,
                Action::ConfirmRkeyDone {
                    tokens: own(rkey, n.into()),
                    result
                }
            );
            assert_eq!(peer.llc.rtokens().get(0, rkey), Some(&own(rkey, n.into())));
        }
    }
    // A long silence.
    for _ in 0..100 {
        pair.pass(secs(15));
    }
    assert_eq!(pair.take_told(), [vec![], vec![]]);
    pair.sides[0].llc.delete_rkey(own(3, 0), pair.sides[0].now);
    for side in &mut pair.sides {
        side.llc.set_connections(0, side.now);
    }
    pair.settle();
    assert_eq!(pair.sides[1].llc.rtokens().get(0, 3), None);
    assert_eq!(
        pair.take_told(),
        [vec![Action::DeleteRkeyDone { tokens: own(3, 0) }], vec![]]
    );
    for _ in 0..40 {
        pair.pass(secs(15));
    }
    let ended = Action::Down(Down::Peer(DeleteReason::PROGRAM));
    assert_eq!(
        pair.take_told(),
        [
            vec![Action::AbortConnections, ended],
            vec![Action::Down(Down::Idle)]
        ]
    );
}

#[test]
fn one_side_ends_the_group() {
    for (ending, other) in [(0, 1), (1, 0)] {
        let mut pair = Pair::new();
        pair.settle();
        pair.take_told();
        pair.sides[ending].llc.terminate(DeleteReason::OPERATOR);
        pair.settle();
        let told = pair.take_told();
        let local = Action::Down(Down::Local(DeleteReason::OPERATOR));
        let peer = Action::Down(Down::Peer(DeleteReason::OPERATOR));
        assert_eq!(told[ending], [Action::AbortConnections, local]);
        assert_eq!(told[other], [Action::AbortConnections, peer]);
    }
}

#[test]
fn both_end_an_unused_group_at_the_same_time() {
    let mut pair = Pair::new();
    pair.settle();
    pair.take_told();
    for side in &mut pair.sides {
        side.llc.set_connections(0, side.now);
        side.now += CLIENT_IDLE_TIME;
        side.llc.note_received(0, side.now);
        side.llc.handle_timeout(side.now);
    }
    pair.settle();
    let idle = vec![Action::Down(Down::Idle)];
    assert_eq!(pair.take_told(), [idle.clone(), idle]);
}

proptest! {
    /// Whatever both sides ask, and in whatever order: every request is answered, and each side knows exactly the RMBs
    /// that the other has announced and not taken back.
    #[test]
    fn all_requests_are_answered(
        steps in proptest::collection::vec((0usize..2, 0u32..20, any::<bool>(), any::<bool>()), 0..80),
    ) {
        let mut pair = Pair::new();
        pair.settle();
        pair.take_told();
        let mut announced = [[false; 20]; 2];
        let mut asked = [0; 2];
        for (at, rkey, announce, settle) in steps {
            let side = &mut pair.sides[at];
            if announce {
                side.llc.confirm_rkey(own(rkey, 0), side.now);
            } else {
                side.llc.delete_rkey(own(rkey, 0), side.now);
            }
            announced[at][rkey as usize] = announce;
            asked[at] += 1;
            if settle {
                pair.settle();
            }
        }
        pair.settle();
        for (at, told) in pair.take_told().iter().enumerate() {
            prop_assert_eq!(told.len(), asked[at]);
            let lost = told.iter().find(|told| matches!(told, Action::ConfirmRkeyDone { result: Err(_), .. }));
            prop_assert_eq!(lost, None);
            for rkey in 0..20 {
                let known = pair.sides[1 - at].llc.rtokens().get(0, rkey).is_some();
                prop_assert_eq!(known, announced[at][rkey as usize]);
            }
        }
    }
}
