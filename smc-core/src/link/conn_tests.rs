//! Two connections wired back to back: an RDMA WRITE is a copy, a SEND a queue.

mod failover;

use std::collections::VecDeque;

use proptest::prelude::*;

use super::Lane;
use super::conn::{Conn, Immediate, Local, Mark, Outgoing, Peer, SPARE, Violation};
use crate::fabric::shm::{TX_ABORT, TX_BLOCKED, TX_CLOSED, TX_DONE};
use crate::wire::cdc::Cdc;
use crate::wire::cursor::Cursor;
use crate::wire::{RmbSize, Rtoken};

/// One end: what the stream code, the block and the memory would be.
struct End {
    conn: Conn,
    slot: u32,
    rmb: Vec<u8>,
    mirror: Vec<u8>,
    local: Local,
    /// Consumer position published for the sender.
    free_from: u64,
    /// Urgent marks that were set, and those that have come.
    set_marks: Vec<u64>,
    heard_marks: Vec<u64>,
    /// Producer position published for the reader.
    peer_prod: u64,
    peer_flags: u32,
    /// The link by which this end sends.
    lane: Lane,
    /// Messages on their way to the peer.
    flight: VecDeque<Outgoing>,
    /// Delivered, but not yet completed here.
    uncompleted: VecDeque<Mark>,
    /// Of the peer's, arrived by the link that it has left, and not looked at yet.
    late: VecDeque<(Outgoing, Lane)>,
    sent: Vec<u8>,
    read: Vec<u8>,
    /// Bytes of the ring that the program leaves free.
    spare: u64,
    /// It doesn't say again how far it has read, as Linux, and the peer knows that.
    forgets: bool,
}

fn size(code: u8) -> RmbSize {
    RmbSize::from_code(code).unwrap()
}

fn end(own: RmbSize, peer: RmbSize, mirror: u32, token: u32, slot: Option<u32>) -> End {
    let mut conn = Conn::new(own, 0);
    conn.connect(Peer {
        token,
        rmb: Rtoken {
            rkey: 7,
            addr: 1 << 40,
        },
        size: peer,
        mirror_size: mirror,
        slot,
        forgets: false,
    });
    End {
        conn,
        slot: slot.unwrap_or(0),
        rmb: vec![0; own.bytes() as usize],
        mirror: vec![0; mirror as usize],
        local: Local::default(),
        free_from: 0,
        set_marks: Vec::new(),
        heard_marks: Vec::new(),
        peer_prod: 0,
        peer_flags: 0,
        lane: 0,
        flight: VecDeque::new(),
        late: VecDeque::new(),
        uncompleted: VecDeque::new(),
        sent: Vec::new(),
        read: Vec::new(),
        spare: 0,
        forgets: false,
    }
}

impl End {
    fn write(&mut self, n: usize) {
        let room = self.mirror.len() as u64 - (self.local.prod - self.free_from);
        let room = room.saturating_sub(self.spare);
        let n = (n as u64).min(room);
        for _ in 0..n {
            let byte = (self.sent.len() * 31 % 251) as u8;
            let at = (self.local.prod as usize) % self.mirror.len();
            self.mirror[at] = byte;
            self.sent.push(byte);
            self.local.prod += 1;
        }
        self.local.flags &= !TX_BLOCKED;
        if n == room {
            self.local.flags |= TX_BLOCKED;
        }
    }

    /// Writes, the last byte as an urgent one.
    fn write_urgent(&mut self, n: usize) {
        let before = self.local.prod;
        self.write(n);
        if self.local.prod > before {
            self.local.urgent = self.local.prod;
            self.set_marks.push(self.local.prod);
        }
    }

    fn read(&mut self, n: usize) {
        let n = (n as u64).min(self.peer_prod - self.local.cons);
        for _ in 0..n {
            let at = (self.local.cons as usize) % self.rmb.len();
            self.read.push(self.rmb[at]);
            self.local.cons += 1;
        }
    }

    fn post(&mut self) {
        while let Some(out) = self.conn.next(self.local) {
            let validation = out.cdc.flags.failover_validation;
            self.flight.push_back(out);
            if !(validation || self.conn.is_inquiring() && self.conn.withholds()) {
                break;
            }
        }
    }

    fn deliver(&mut self, to: &mut End) -> Result<(), Violation> {
        let Some(out) = self.flight.pop_front() else {
            return Ok(());
        };
        self.execute(&out, to);
        self.uncompleted.push_back(out.mark);
        to.take(&out, self.lane)
    }

    /// What the devices do.
    fn execute(&self, out: &Outgoing, to: &mut End) {
        for w in out.writes {
            for i in 0..w.len {
                let at = (w.to - (1 << 40)) as usize + i as usize;
                // A write beyond the RMB would panic here.
                to.rmb[at] = self.mirror[(w.from + i) as usize];
            }
        }
    }

    /// A message of the peer's is looked at.
    fn take(&mut self, out: &Outgoing, lane: Lane) -> Result<(), Violation> {
        let c = match out.immediate.map(Immediate::unpack) {
            Some(i) => {
                assert_eq!((i.slot, out.writes[1].len), (self.slot, 0));
                self.conn.written(out.writes[0].len, i.consumed, lane)?
            }
            None => self.conn.received(&out.cdc, lane)?,
        };
        self.peer_prod = c.prod;
        self.free_from = c.cons;
        self.peer_flags |= c.flags;
        if c.urgent != self.heard_marks.last().copied().unwrap_or(0) {
            self.heard_marks.push(c.urgent);
        }
        // What is behind the mark comes when that has been passed, but for a sender that can't know.
        assert!(self.forgets || c.urgent <= self.local.cons || c.prod == c.urgent);
        if c.resume {
            self.post();
        }
        Ok(())
    }

    /// The link by which this end sends dies. Of the messages under way `arrived` have been carried out, but this end
    /// doesn't get to know it, and the peer may look at them late.
    fn fail_over(&mut self, to: &mut End, arrived: usize) {
        for (at, out) in core::mem::take(&mut self.flight).iter().enumerate() {
            if at < arrived {
                self.execute(out, to);
                to.late.push_back((*out, self.lane));
            } else if at == arrived {
                // Only the first half: the writes.
                self.execute(out, to);
            }
        }
        self.uncompleted.clear();
        self.lane = 1 - self.lane;
        // A link takes the place of another one when all that had come by that has been looked at.
        while to.late.iter().any(|(_, lane)| *lane == self.lane) {
            to.take_late();
        }
        let rmb = self.conn.peer().unwrap().rmb;
        self.conn.fail_over(rmb);
    }

    fn take_late(&mut self) {
        if let Some((out, lane)) = self.late.pop_front() {
            self.take(&out, lane).unwrap();
        }
    }

    fn complete(&mut self) {
        if let Some(mark) = self.uncompleted.pop_front() {
            self.conn.acked(mark);
            if self.conn.is_inquiring() && self.conn.withholds() {
                self.post();
            }
        }
    }
}

fn pair(a: u8, b: u8, mirror_halvings: u32) -> (End, End) {
    pair_with(a, b, mirror_halvings, None)
}

/// `slot`: both understand immediate data.
fn pair_with(a: u8, b: u8, mirror_halvings: u32, slot: Option<u32>) -> (End, End) {
    let mirror = size(b).bytes() >> mirror_halvings;
    (
        end(size(a), size(b), mirror, 2, slot),
        end(size(b), size(a), size(a).bytes(), 1, slot),
    )
}

/// Has the second end be one as Linux's.
fn forgetful((mut a, mut b): (End, End)) -> (End, End) {
    let peer = *a.conn.peer().unwrap();
    let forgets = true;
    a.conn.connect(Peer { forgets, ..peer });
    a.spare = SPARE.into();
    b.forgets = true;
    (a, b)
}

/// Runs both ends until nothing moves any more.
fn settle(a: &mut End, b: &mut End) {
    for _ in 0..64 {
        while !a.late.is_empty() || !b.late.is_empty() {
            a.take_late();
            b.take_late();
        }
        a.post();
        b.post();
        while !a.flight.is_empty() || !b.flight.is_empty() {
            a.deliver(b).unwrap();
            b.deliver(a).unwrap();
        }
        while !a.uncompleted.is_empty() || !b.uncompleted.is_empty() {
            a.complete();
            b.complete();
        }
        a.read(usize::MAX);
        b.read(usize::MAX);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever the order of writes, reads, messages, completions and failing links: every byte arrives, once, in order.
    #[test]
    fn every_byte_arrives(
        sizes in (0u8..2, 0u8..2, 0u32..2), slot in proptest::option::of(0u32..4096),
        (failures, forgets) in any::<(bool, bool)>(),
        steps in proptest::collection::vec((0u8..9, any::<bool>(), 0usize..40_000), 1..200),
    ) {
        let mut ends = pair_with(sizes.0, sizes.1, sizes.2, slot);
        if forgets && slot.is_none() {
            ends = forgetful(ends);
        }
        let (mut a, mut b) = ends;
        for (what, first, n) in steps {
            let (x, y) = if first { (&mut a, &mut b) } else { (&mut b, &mut a) };
            match what {
                0 => x.write(n),
                1 => x.read(n),
                2 => x.post(),
                3 => x.deliver(y).unwrap(),
                4 => x.write_urgent(n),
                5 if failures && n < 20_000 => x.fail_over(y, n % 4),
                6 => x.take_late(),
                _ => x.complete(),
            }
        }
        settle(&mut a, &mut b);
        prop_assert_eq!(&a.sent, &b.read);
        prop_assert_eq!(&b.sent, &a.read);
        // The last mark arrives; earlier ones unless a later one has taken their place.
        for (from, to) in [(&a, &b), (&b, &a)] {
            prop_assert_eq!(from.set_marks.last(), to.heard_marks.last());
            prop_assert!(to.heard_marks.is_sorted());
            prop_assert!(to.heard_marks.iter().all(|m| from.set_marks.contains(m)));
        }
        // There is room again: nobody waits for an update that never comes.
        prop_assert!(a.local.prod - a.free_from < a.mirror.len() as u64);
        prop_assert!(b.local.prod - b.free_from < b.mirror.len() as u64);
    }

    /// No message makes a connection panic, or publish what it can't be.
    #[test]
    fn any_message_is_checked(
        messages in proptest::collection::vec(any::<[u8; 24]>(), 1..20), written in 0usize..20_000,
    ) {
        let (mut a, mut b) = pair(0, 0, 0);
        a.write(written);
        a.post();
        a.deliver(&mut b).unwrap();
        for m in messages {
            let mut bytes = [0u8; 44];
            bytes[0] = 0xfe;
            bytes[1] = 44;
            bytes[2..26].copy_from_slice(&m);
            let m = Cdc::parse(&bytes).unwrap();
            if let Ok(c) = a.conn.received(&m, 0) {
                prop_assert!(c.prod <= 16384 && c.cons <= a.local.prod && c.urgent <= c.prod);
            }
        }
    }
}

#[test]
fn a_blocked_sender_is_told_of_room() {
    let (mut a, mut b) = pair(0, 0, 0);
    a.write(16384);
    a.post();
    assert!(a.flight[0].cdc.flags.write_blocked);
    a.deliver(&mut b).unwrap();
    a.complete();
    b.read(1000);
    b.post();
    assert!(b.flight.is_empty(), "too little to be worth a message");
    b.read(15384);
    b.post();
    b.deliver(&mut a).unwrap();
    assert_eq!(a.free_from, 16384);
}

#[test]
fn what_the_peer_has_read_has_arrived() {
    let (mut a, mut b) = pair(0, 0, 0);
    a.write(16384);
    a.post();
    a.deliver(&mut b).unwrap();
    assert_eq!((a.conn.delivered(), a.free_from), (0, 0));
    b.read(16384);
    b.post();
    b.deliver(&mut a).unwrap();
    // Though no completion has come.
    assert_eq!((a.conn.delivered(), a.free_from), (16384, 16384));
    a.complete();
    assert_eq!(a.conn.delivered(), 16384);
}

#[test]
fn closing_flags_follow_the_data_and_stay() {
    let (mut a, mut b) = pair(0, 0, 0);
    a.write(100);
    a.local.flags |= TX_DONE;
    a.post();
    let m = a.flight[0].cdc;
    assert!(m.state.done && !m.state.closed);
    assert_eq!(
        m.producer,
        Cursor {
            wrap: 0,
            count: 100
        }
    );
    a.deliver(&mut b).unwrap();
    assert_eq!(b.peer_flags, TX_DONE);
    b.write(5);
    b.post();
    b.deliver(&mut a).unwrap();
    a.local.flags |= TX_CLOSED;
    a.post();
    assert!(a.flight[0].cdc.state.done && a.flight[0].cdc.state.closed);
    a.deliver(&mut b).unwrap();
    assert!(!a.conn.over());
    b.local.flags |= TX_CLOSED;
    b.post();
    b.deliver(&mut a).unwrap();
    assert!(a.conn.over() && b.conn.over());
    a.local.prod += 1;
    a.post();
    assert!(a.flight.is_empty(), "nothing follows the close");
}

#[test]
fn immediate_data_says_what_a_message_would() {
    let (mut a, mut b) = pair_with(0, 0, 0, Some(4095));
    a.write(100);
    a.post();
    assert_eq!(
        a.flight[0].immediate.map(Immediate::unpack),
        Some(Immediate {
            slot: 4095,
            consumed: 0
        })
    );
    a.deliver(&mut b).unwrap();
    b.read(100);
    b.write(50);
    b.post();
    assert_eq!(b.flight[0].immediate, Some(4095 << 20 | 100));
    b.deliver(&mut a).unwrap();
    a.complete();
    assert_eq!((a.free_from, a.peer_prod), (100, 50));
    // Flags, and writes in two parts, need a message.
    a.local.flags |= TX_DONE;
    a.write(1);
    a.post();
    assert_eq!(a.flight[0].immediate, None);
    a.deliver(&mut b).unwrap();
    assert_eq!(b.peer_flags, TX_DONE);
    assert_eq!(b.conn.written(16385, 0, 0), Err(Violation));
    assert_eq!(a.conn.written(0, 1 << 19, 0), Err(Violation));
    let far = Immediate {
        slot: 0,
        consumed: 1 << 20,
    };
    assert_eq!(far.pack(), None);
}

#[test]
fn aborts_discard() {
    let (mut a, mut b) = pair(0, 0, 0);
    a.write(100);
    a.local.flags |= TX_CLOSED | TX_ABORT;
    a.post();
    let m = a.flight[0].cdc;
    assert!(m.state.abort && m.producer.count == 0);
    a.deliver(&mut b).unwrap();
    assert_eq!(b.peer_flags, TX_ABORT | TX_CLOSED);
}

#[test]
fn a_peer_that_breaks_the_rules_is_told_an_abort() {
    let (mut a, mut b) = pair(0, 0, 0);
    a.write(10);
    a.post();
    a.flight[0].cdc.producer.count = 16384;
    assert_eq!(a.deliver(&mut b), Err(Violation));
    b.post();
    assert!(b.flight[0].cdc.state.abort);
}

#[test]
fn an_abort_is_answered_with_an_abort() {
    let (mut a, mut b) = pair(0, 0, 0);
    a.local.flags |= TX_ABORT | TX_CLOSED;
    a.post();
    a.deliver(&mut b).unwrap();
    b.post();
    assert!(b.flight.is_empty(), "the program has yet to close");
    b.local.flags |= TX_DONE | TX_CLOSED;
    b.post();
    let state = b.flight[0].cdc.state;
    assert!(state.abort && !state.closed && b.conn.over());
}

#[test]
fn what_follows_an_urgent_byte_waits_until_that_is_read() {
    let (mut a, mut b) = pair(0, 0, 0);
    a.write(2);
    a.write_urgent(1);
    a.write(2);
    a.local.flags |= TX_DONE | TX_CLOSED;
    a.post();
    let m = a.flight[0].cdc;
    assert!(m.flags.urgent_pending && m.flags.urgent_present);
    assert_eq!(m.producer.count, 3);
    assert!(!m.state.done && !m.state.closed, "there is more to come");
    assert!(a.conn.withholds());
    a.post();
    assert_eq!(a.flight.len(), 1);
    a.deliver(&mut b).unwrap();
    assert_eq!(b.heard_marks, [3]);

    b.read(2);
    b.post();
    assert!(b.flight.is_empty(), "the urgent byte is still unread");
    b.read(1);
    b.post();
    assert_eq!(b.flight[0].cdc.consumer.count, 3, "an update at once");
    assert!(!b.flight[0].cdc.flags.urgent_pending);
    b.deliver(&mut a).unwrap();
    // Without being asked: the program may have closed.
    let m = a.flight[0].cdc;
    assert_eq!(m.producer.count, 5);
    assert!(!m.flags.urgent_pending && !m.flags.urgent_present);
    assert!(m.state.done && m.state.closed && !a.conn.withholds());
}

#[test]
fn a_second_urgent_byte_takes_the_place_of_an_unsent_one() {
    let (mut a, mut b) = pair(0, 0, 0);
    a.write_urgent(2);
    a.post();
    a.write_urgent(2);
    a.write_urgent(2);
    a.write(1);
    a.post();
    assert_eq!(a.flight.len(), 1);
    a.deliver(&mut b).unwrap();
    b.write(1);
    b.read(2);
    b.post();
    b.deliver(&mut a).unwrap();
    assert_eq!(a.flight[0].cdc.producer.count, 6);
    a.deliver(&mut b).unwrap();
    assert_eq!(b.heard_marks, [2, 6]);
    a.post();
    assert!(a.flight.is_empty());
    b.read(4);
    b.post();
    b.deliver(&mut a).unwrap();
    assert_eq!(a.flight[0].cdc.producer.count, 7);
}

#[test]
fn a_message_tells_of_an_urgent_byte_to_come() {
    let (mut a, mut b) = pair(0, 0, 0);
    b.write(10);
    b.post();
    b.flight[0].cdc.flags.update_requested = true;
    a.write_urgent(1);
    a.post();
    b.deliver(&mut a).unwrap();
    a.write_urgent(1);
    a.read(10);
    a.post();
    let m = a.flight.back().unwrap().cdc;
    assert!(m.flags.urgent_pending && !m.flags.urgent_present);
    assert_eq!((m.producer.count, m.consumer.count), (1, 10));
}

#[test]
fn a_peer_that_has_closed_is_not_waited_for() {
    let (mut a, mut b) = pair(0, 0, 0);
    a.write_urgent(1);
    a.post();
    a.write_urgent(2);
    a.write(1);
    a.local.flags |= TX_CLOSED;
    a.post();
    a.deliver(&mut b).unwrap();
    b.local.flags |= TX_CLOSED;
    b.post();
    b.deliver(&mut a).unwrap();
    assert!(a.flight[0].cdc.state.closed && a.conn.over());
}

#[test]
fn over_once_closed_after_the_peer_was_lost() {
    let (mut a, _) = pair(0, 0, 0);
    a.conn.lost();
    assert!(!a.conn.over(), "the program has not closed");
    a.local.flags = TX_CLOSED;
    assert!(a.conn.next(a.local).is_some());
    assert!(a.conn.over());
}
