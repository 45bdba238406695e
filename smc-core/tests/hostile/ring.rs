//! Attacks on the memory of an upgraded connection.

use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use smc_core::fabric::shm::{
    BellPage, LOG, RX_PINNED, RX_READY, Segment, TX_ABORT, TX_BLOCKED, TX_CLOSED, TX_DONE,
};
use smc_core::negotiate::Message;

use crate::fake::Conn;
use crate::link::{Node, say};
use crate::net;
use crate::rng::Rng;

/// How far the connection has come when the attack begins.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum State {
    /// On the link, both directions on TCP.
    Attached,
    /// The victim reads its RMB.
    In,
    /// The victim writes our RMB.
    Out,
    /// Both.
    Both,
}

/// What the victim has to do.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Wants {
    /// End the connection and count the violation.
    Violation,
    /// Carry on: nothing that matters was touched.
    Harmless,
    /// Survive.
    Anything,
}

/// What an attack needs besides its connection.
pub(crate) struct Where<'a> {
    /// Who we claim to be.
    pub(crate) node: &'a Node,
    /// The socket of the victim's engine.
    pub(crate) sock: &'a Path,
}

/// One kind of attack.
pub(crate) struct Attack {
    pub(crate) name: &'static str,
    pub(crate) state: State,
    pub(crate) wants: Wants,
    /// It touches what the victim shares with all its peers, whom it may deprive of wake-ups.
    pub(crate) shared: bool,
    pub(crate) run: fn(&mut Conn, &mut Rng, &Where),
}

const fn attack(
    name: &'static str,
    state: State,
    wants: Wants,
    run: fn(&mut Conn, &mut Rng, &Where),
) -> Attack {
    Attack {
        name,
        state,
        wants,
        shared: false,
        run,
    }
}

/// As `attack`, for one that touches the victim's bell page.
const fn page_attack(
    name: &'static str,
    state: State,
    wants: Wants,
    run: fn(&mut Conn, &mut Rng, &Where),
) -> Attack {
    Attack {
        shared: true,
        ..attack(name, state, wants, run)
    }
}

use State::{Attached, Both, In, Out};
use Wants::{Anything, Harmless, Violation};

/// All of them.
pub(crate) const ATTACKS: &[Attack] = &[
    attack("producer behind the reader", In, Violation, |c, r, _| {
        let back = c.sent - 1 - r.next() % (c.sent - 1);
        c.inbound().tx.prod.store(back, SeqCst);
    }),
    attack("producer beyond the ring", Both, Violation, |c, r, _| {
        let far = c.sent + c.ring() + 1 + r.next() % (1 << r.below(63));
        c.inbound().tx.prod.store(far, SeqCst);
    }),
    attack("producer at an extreme", In, Violation, |c, r, _| {
        let n = r.pick(&[u64::MAX, u64::MAX - 1, 0, 1 << 63, i64::MAX as u64]);
        c.inbound().tx.prod.store(n, SeqCst);
    }),
    attack("consumer beyond the writer", Out, Violation, |c, r, _| {
        let far = c.got + 1_000_000 + r.next() % (1 << r.below(63));
        c.outbound().rx.cons.store(far, SeqCst);
        provoke(c);
    }),
    attack("consumer backwards", Both, Violation, |c, r, _| {
        c.echo(&[7; 3000]).expect("echo");
        // The victim has seen where we were when it wrote the last bytes.
        c.echo(&[7; 10]).expect("echo");
        let back = (c.got - 11) - r.next() % (c.got - 100);
        c.outbound().rx.cons.store(back, SeqCst);
        provoke(c);
    }),
    attack("consumer at an extreme", Both, Violation, |c, r, _| {
        let n = r.pick(&[u64::MAX, u64::MAX - 1, 1 << 63, i64::MAX as u64]);
        c.outbound().rx.cons.store(n, SeqCst);
        provoke(c);
    }),
    attack("switch count jumps", In, Violation, |c, r, _| {
        let jump = r.pick(&[9, 10, 1000, u32::MAX, 1 << 31, u32::MAX / 2]);
        let s = &c.inbound().tx.switches;
        s.store(s.load(SeqCst).wrapping_add(jump), SeqCst);
    }),
    attack("switch in the past", In, Violation, |c, r, _| {
        let past = r.next() % c.sent;
        c.inbound().log[1].store(past, SeqCst);
        c.inbound().tx.switches.store(2, SeqCst);
    }),
    attack("switch behind the producer", In, Violation, |c, r, _| {
        let far = c.sent + 1 + r.odd(c.ring()) % (1 << 62);
        c.inbound().log[1].store(far, SeqCst);
        c.inbound().tx.switches.store(2, SeqCst);
    }),
    attack("switches on TCP", Attached, Anything, |c, r, _| {
        for n in 0..LOG {
            let at = r.odd(c.sent);
            c.inbound().log[n].store(at, SeqCst);
        }
        let at = r.odd(c.sent);
        c.inbound().tx.prod.store(at, SeqCst);
        let n = r.next() as u32 % 20;
        c.inbound().tx.switches.store(n, SeqCst);
        stir(c, r);
    }),
    attack("random switch log", Both, Anything, |c, r, _| {
        for n in 0..LOG {
            let at = r.odd(c.sent);
            c.inbound().log[n].store(at, SeqCst);
        }
        let n = r.next() as u32 % 12;
        c.inbound().tx.switches.store(n, SeqCst);
        stir(c, r);
    }),
    attack("random sender flags", Both, Anything, |c, r, _| {
        let some = TX_BLOCKED | TX_DONE | TX_CLOSED | TX_ABORT;
        let f = r.next() as u32 & if r.below(2) == 0 { some } else { u32::MAX };
        c.inbound().tx.flags.store(f, SeqCst);
        stir(c, r);
    }),
    attack("stuck sender flags", Both, Harmless, |c, _, _| {
        let f = TX_BLOCKED | TX_DONE | TX_ABORT | 0xffff_fff0;
        c.inbound().tx.flags.store(f, SeqCst);
    }),
    attack("closed and going on", Both, Anything, |c, r, _| {
        c.inbound().tx.flags.store(TX_CLOSED, SeqCst);
        stir(c, r);
        c.inbound().tx.flags.store(0, SeqCst);
        stir(c, r);
    }),
    attack("random receiver flags", Both, Anything, |c, r, _| {
        let f = r.next() as u32 & if r.below(2) == 0 { 3 } else { u32::MAX };
        c.outbound().rx.flags.store(f, SeqCst);
        stir(c, r);
    }),
    attack("agreement flickers", Attached, Anything, |c, r, _| {
        for _ in 0..20 {
            let f = r.pick(&[0, RX_READY, RX_PINNED, RX_READY | RX_PINNED]);
            c.outbound().rx.flags.store(f, SeqCst);
            let _ = (&c.tcp).write(&[1; 10]);
            std::thread::sleep(Duration::from_micros(100));
        }
    }),
    attack("switches passed at random", Both, Anything, |c, r, _| {
        let n = r.odd(1) as u32;
        c.outbound().rx.passed.store(n, SeqCst);
        stir(c, r);
    }),
    attack("odd notify", Both, Harmless, |c, r, _| {
        let n = r.pick(&[64, 65, 66, 1000, u32::MAX, 1 << 31]);
        c.outbound().rx.notify.store(n, SeqCst);
    }),
    attack("writer's own line", Both, Anything, |c, r, _| {
        let d = c.outbound();
        for n in 0..LOG {
            d.log[n].store(r.odd(c.got), SeqCst);
        }
        d.tx.prod.store(r.odd(c.got), SeqCst);
        d.tx.switches.store(r.odd(1) as u32, SeqCst);
        d.tx.flags.store(r.next() as u32, SeqCst);
        let d = c.inbound();
        d.rx.cons.store(r.odd(c.sent), SeqCst);
        d.rx.flags.store(r.next() as u32, SeqCst);
        d.rx.notify.store(r.next() as u32, SeqCst);
        stir(c, r);
    }),
    attack("everything pending", Both, Harmless, |c, _, _| {
        let words = size_of_val(&c.link.seg.get::<Segment>().pending) / 8;
        for w in &c.link.seg.words()[512..512 + words] {
            w.store(u64::MAX, SeqCst);
        }
        let page = c.link.victim_page.as_ref().expect("page");
        for w in &page.words()[..65] {
            w.store(u64::MAX, SeqCst);
        }
        c.link.ring_all();
    }),
    attack("sleepers that don't sleep", Both, Harmless, |c, r, at| {
        for s in &at.node.page.get::<BellPage>().sleep {
            s.0.store(r.next() as u32 | 1, SeqCst);
        }
        c.outbound().rx.notify.store(r.next() as u32 % 70, SeqCst);
    }),
    page_attack("victim's sleep flags", Both, Anything, |c, r, _| {
        let page = c.link.victim_page.as_ref().expect("page");
        for w in page.words() {
            w.store(r.odd(1), SeqCst);
        }
        stir(c, r);
    }),
    attack("saturated bells", Both, Harmless, |c, _, _| {
        for bell in c.link.bells.iter().flatten() {
            net::add(bell, u64::MAX - 1);
        }
        // Whoever rings next must cope with it.
        c.put(b"ring");
        c.receive(4).expect("echo");
    }),
    attack("random words in the block", Both, Anything, |c, r, _| {
        let first = 1024 + c.slot as usize * 64;
        for _ in 0..1 + r.below(64) {
            let (at, what) = (first + r.below(64), r.odd(c.sent));
            c.link.seg.words()[at].store(what, SeqCst);
        }
        stir(c, r);
    }),
    attack("random words everywhere", Both, Anything, |c, r, _| {
        let words = c.link.seg.words();
        for _ in 0..2000 {
            words[r.below(words.len())].store(r.odd(c.sent), SeqCst);
        }
        stir(c, r);
    }),
    attack("no magic", Both, Harmless, |c, _, _| {
        for w in &c.link.seg.words()[..512] {
            w.store(0, SeqCst);
        }
    }),
    attack("fast switching", In, Anything, |c, r, _| {
        for _ in 0..200 {
            let n = r.below(10);
            c.put(&vec![1; n]);
            c.go_tcp();
            let dir = c.inbound();
            dir.log[(dir.tx.switches.load(SeqCst) as usize) % LOG].store(c.sent, SeqCst);
            dir.tx.switches.fetch_add(1, SeqCst);
        }
        stir(c, r);
    }),
    attack("never reads, never lets go", Both, Anything, |c, _, _| {
        clog(c);
        c.tell();
        std::thread::sleep(Duration::from_millis(30));
    }),
    attack("clogged and closed", Both, Anything, |c, _, _| {
        clog(c);
        std::thread::sleep(Duration::from_millis(25));
        c.reset();
    }),
    attack("recall of a stuck direction", Out, Anything, |c, r, _| {
        c.outbound().rx.unbounded.store(1, SeqCst);
        for _ in 0..50 {
            recall(c, c.got, r.next() as u32);
        }
    }),
    attack("recalls of nonsense", Both, Anything, |c, r, _| {
        for _ in 0..10 {
            let (at, ticket) = (r.odd(c.got), r.next() as u32);
            recall(c, at, ticket);
        }
        stir(c, r);
    }),
    attack("recall beyond the writer", Out, Violation, |c, r, _| {
        let at = c.got + 1 + r.next() % (1 << r.below(63));
        recall(c, at, 1);
    }),
    attack("pinned while stuck", Both, Anything, |c, _, at| {
        c.outbound().rx.unbounded.store(1, SeqCst);
        pin(c, at.sock);
    }),
    attack("pinned without an answer", Both, Anything, |c, _, at| {
        pin(c, at.sock)
    }),
    attack("answers without a question", Both, Harmless, |c, r, _| {
        for _ in 0..20 {
            let (slot, generation, what) = (r.next() as u32, r.next() as u32, r.next() as u8);
            let done = Message::Done {
                slot,
                generation,
                what,
            };
            let nack = Message::Nack {
                slot,
                generation,
                what,
            };
            let _ = say(
                &c.link.sock,
                if r.below(2) == 0 { &done } else { &nack },
                &[],
            );
        }
    }),
    attack("bytes behind our back", Both, Anything, |c, r, _| {
        let n = 1 + r.below(1000);
        let _ = (&c.tcp).write(&r.bytes(n));
        c.put(&[2; 10]);
    }),
    attack("shut down under the ring", Both, Anything, |c, r, _| {
        let how = r.pick(&[libc::SHUT_RD, libc::SHUT_WR, libc::SHUT_RDWR]);
        // SAFETY: touches no memory.
        unsafe { libc::shutdown(c.tcp.as_raw_fd(), how) };
        c.put(&[2; 10]);
    }),
];

/// Gives the victim something to send.
fn provoke(c: &mut Conn) {
    let _ = c.send(&[3; 10]);
}

/// Makes the victim look again and again, with and without bytes.
fn stir(c: &mut Conn, r: &mut Rng) {
    for _ in 0..4 {
        c.tell();
        if r.below(2) == 0 {
            let _ = (&c.tcp).write(&[4; 50]);
        }
        std::thread::sleep(Duration::from_micros(300));
    }
}

/// Has the victim send more than fits in our ring, which we don't read, and forbids it to leave the ring.
fn clog(c: &mut Conn) {
    c.outbound().rx.unbounded.store(1, SeqCst);
    for _ in 0..6 {
        c.put(&[5; 8000]);
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn recall(c: &Conn, at: u64, generation: u32) {
    let m = Message::Recall {
        slot: c.slot,
        generation,
        at,
    };
    let _ = say(&c.link.sock, &m, &[]);
}

/// Claims, as another process, to use the victim's end.
fn pin(c: &Conn, victim: &Path) {
    let m = Message::PinEnd {
        endpoint: c.end.mirror(),
        reason: 5,
    };
    if let Ok(s) = net::connect(victim) {
        let _ = say(&s, &m, &[]);
        std::thread::sleep(Duration::from_millis(2));
    }
}
