//! Connections that change links.

use super::*;

#[test]
fn old_and_validating_messages_change_nothing() {
    let (mut a, mut b) = pair(0, 0, 0);
    a.write(10);
    a.post();
    let old = a.flight[0];
    a.deliver(&mut b).unwrap();
    a.write(10);
    a.post();
    a.deliver(&mut b).unwrap();
    let c = b.conn.received(&old.cdc, 0).unwrap();
    assert_eq!((c.prod, c.news), (20, false));
    let mut validation = Cdc { seq: 2, ..old.cdc };
    validation.flags.failover_validation = true;
    assert!(!b.conn.received(&validation, 1).unwrap().news);
    // One that never came.
    validation.seq = 3;
    assert_eq!(b.conn.received(&validation, 1), Err(Violation));
}

#[test]
fn what_is_not_acknowledged_is_repeated_on_another_link() {
    let (mut a, mut b) = pair_with(0, 0, 0, Some(9));
    a.write(100);
    a.local.flags |= TX_BLOCKED;
    a.post();
    a.deliver(&mut b).unwrap();
    a.complete();
    a.write(50);
    a.post();
    assert_eq!(a.flight[0].immediate, Some(9 << 20));
    a.write(20);
    a.local.flags |= TX_DONE | TX_CLOSED;
    a.post();
    a.fail_over(&mut b, 1);
    a.post();
    a.post();
    let [validation, repeat] = [a.flight[0], a.flight[1]];
    assert!(validation.cdc.flags.failover_validation);
    assert_eq!((validation.cdc.seq, validation.cdc.token), (1, 2));
    assert_eq!(validation.writes.map(|w| w.len), [0, 0]);
    // All that was sent behind the first message, in one with a new number.
    assert_eq!((repeat.cdc.seq, repeat.immediate), (3, None));
    assert_eq!((repeat.writes[0].from, repeat.writes[0].len), (100, 70));
    assert!(repeat.cdc.state.closed);
    a.post();
    assert_eq!(a.flight.len(), 2);
    a.deliver(&mut b).unwrap();
    a.deliver(&mut b).unwrap();
    assert_eq!(b.peer_prod, 170);
    // It is included.
    b.take_late();
    assert_eq!(b.peer_prod, 170);
    b.read(170);
    assert_eq!(a.sent, b.read);
}

/// The second end reads everything, but what it says of that is lost with the link.
fn lose_update(a: &mut End, b: &mut End) {
    a.post();
    a.deliver(b).unwrap();
    a.complete();
    b.read(usize::MAX);
    b.post();
    assert_eq!(b.flight.len(), 1);
    b.flight.clear();
    a.fail_over(b, 0);
    a.post();
    assert!(a.flight[0].cdc.flags.failover_validation);
    a.deliver(b).unwrap();
    a.complete();
}

#[test]
fn a_peer_that_forgets_what_it_has_read_is_asked_with_a_byte_to_read() {
    let (mut a, mut b) = forgetful(pair(0, 0, 0));
    a.write(16384);
    assert_eq!(a.local.prod, 16376);
    lose_update(&mut a, &mut b);
    // Linux doesn't answer the question alone.
    assert!(a.flight[0].cdc.flags.update_requested);
    a.deliver(&mut b).unwrap();
    b.flight.clear();
    assert!(a.free_from == 0 && a.conn.is_inquiring());
    a.spare -= 1;
    a.write(16384);
    a.post();
    let question = a.flight[0];
    assert!(question.cdc.flags.update_requested);
    let write = question.writes[0];
    assert_eq!((write.from, write.len), (16376, 1));
    a.deliver(&mut b).unwrap();
    a.complete();
    a.complete();
    b.read(1);
    b.post();
    while !b.flight.is_empty() {
        b.deliver(&mut a).unwrap();
    }
    assert_eq!((a.free_from, a.conn.is_inquiring()), (16377, false));
    settle(&mut a, &mut b);
    assert_eq!(a.sent, b.read);
}

#[test]
fn an_urgent_byte_that_may_have_been_read_is_not_waited_for() {
    let (mut a, mut b) = forgetful(pair(0, 0, 0));
    a.write_urgent(1);
    a.write(5);
    lose_update(&mut a, &mut b);
    a.deliver(&mut b).unwrap();
    assert_eq!((b.peer_prod, &b.heard_marks[..]), (6, &[1][..]));
    // Unless the peer may not have the mark.
    let (mut a, mut b) = forgetful(pair(0, 0, 0));
    a.write_urgent(1);
    a.post();
    a.write(5);
    a.fail_over(&mut b, 0);
    a.post();
    assert_eq!(a.flight.len(), 2);
    a.deliver(&mut b).unwrap();
    a.deliver(&mut b).unwrap();
    assert_eq!((b.peer_prod, &b.heard_marks[..]), (1, &[1][..]));
    a.complete();
    a.complete();
    a.deliver(&mut b).unwrap();
    assert_eq!(b.peer_prod, 6);
}

#[test]
fn a_question_is_answered() {
    let (mut a, mut b) = pair(0, 0, 0);
    a.write(1);
    a.post();
    a.flight[0].cdc.flags.update_requested = true;
    a.deliver(&mut b).unwrap();
    assert_eq!(b.flight.len(), 1);
    b.deliver(&mut a).unwrap();
    b.post();
    assert!(b.flight.is_empty());
    // And so is what it may mean.
    b.read(1);
    b.post();
    assert_eq!(b.flight.len(), 1);
    b.deliver(&mut a).unwrap();
    a.post();
    b.post();
    assert!(a.flight.is_empty() && b.flight.is_empty());
}

#[test]
fn a_peer_that_has_closed_is_written_nothing_again() {
    let (mut a, mut b) = pair(0, 0, 0);
    a.write(100);
    a.post();
    b.local.flags |= TX_CLOSED;
    b.post();
    b.deliver(&mut a).unwrap();
    a.fail_over(&mut b, 0);
    a.post();
    a.post();
    assert_eq!(a.flight.len(), 2);
    assert!(a.flight.iter().flat_map(|o| o.writes).all(|w| w.len == 0));
}

#[test]
fn a_failover_that_has_lost_a_message_breaks_the_connection() {
    let (mut a, mut b) = pair(0, 0, 0);
    a.write(10);
    a.post();
    let mut validation = a.flight[0].cdc;
    a.deliver(&mut b).unwrap();
    validation.seq += 1;
    validation.flags.failover_validation = true;
    assert_eq!(b.conn.received(&validation, 0), Err(Violation));
    b.post();
    assert!(b.flight[0].cdc.state.abort);
}
