//! A peer that is malicious or broken: it scribbles in the shared pages and talks nonsense on the link
//! socket. Whatever it does, the process at the other end must neither crash nor hang nor burn CPU, must go
//! on serving others, and must end what the peer has spoilt, with a reason.
//!
//! `victim` is the process under attack, `watch` starts it and asks how it is, `link` and `fake` are the peer;
//! `ring` holds the attacks on memory, `wire` those on the socket.
//!
//! XSMC_HOSTILE_SEED and XSMC_HOSTILE_CASES choose other and more random cases, XSMC_HOSTILE_ONLY the attacks
//! whose names contain it.

#[path = "hostile/fake.rs"]
mod fake;
#[path = "hostile/link.rs"]
mod link;
#[path = "hostile/long.rs"]
mod long;
#[path = "hostile/net.rs"]
mod net;
#[path = "hostile/ring.rs"]
mod ring;
#[path = "hostile/rng.rs"]
mod rng;
#[path = "hostile/victim.rs"]
mod victim;
#[path = "hostile/watch.rs"]
mod watch;
#[path = "hostile/wire.rs"]
mod wire;

use std::io;

use fake::{Conn, echo_tcp};
use link::{Link, Node, PATIENCE, say, until};
use ring::{ATTACKS, Attack, State, Wants};
use rng::Rng;
use smc_core::negotiate::Message;
use watch::Victim;
use wire::{Place, Then};

/// Not a test: where this binary continues when it is started as a victim or a client.
#[test]
fn another_role() {
    if let Ok(role) = std::env::var(victim::ROLE) {
        victim::run(&role);
    }
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name)
        .ok()
        .and_then(|v| v.parse().ok())
        .unwrap_or(default)
}

/// Tells which case was running when a test panics.
struct Context(String);

impl Drop for Context {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the case was: {}", self.0);
        }
    }
}

/// An upgraded connection in the state that an attack asks for.
fn prepare(v: &Victim, node: &Node, state: State, which: usize, rng: &mut Rng) -> Conn {
    let mut c = if rng.below(2) == 0 {
        Conn::opened(node, v.ports[which], &v.sock)
    } else {
        Conn::accepted(node, v.ports[which])
    };
    if state == State::Out || state == State::Both {
        c.invite();
    }
    if state == State::In || state == State::Both {
        c.go_rmb();
    }
    for _ in 0..3 {
        let n = 1 + rng.below(6000);
        c.echo(&rng.bytes(n)).expect("a valid echo");
    }
    c
}

/// Runs one attack. `alone`: nobody else keeps the victim busy.
fn attack(v: &mut Victim, a: &Attack, seed: u64, alone: bool) {
    let _c = Context(format!("{}, seed {seed}", a.name));
    let mut rng = Rng::new(seed);
    let node = Node::new(v.dir());
    let which = rng.below(2);
    let mut c = prepare(v, &node, a.state, which, &mut rng);
    let place = ring::Where {
        node: &node,
        sock: &v.sock,
    };
    (a.run)(&mut c, &mut rng, &place);
    c.tell();
    match a.wants {
        Wants::Violation => {
            until("the end of the connection", || {
                c.tell();
                c.ended().then_some(())
            });
            assert!(v.violated(), "no violation was counted");
        }
        Wants::Harmless => {
            let r: io::Result<()> = c.echo(&rng.bytes(3000));
            assert!(r.is_ok(), "a harmless thing hurt: {r:?}");
        }
        Wants::Anything => {}
    }
    v.status();
    if alone {
        v.calm();
    }
    v.plain_echo(which);
    c.reset();
    v.gone(&c.end);
    drop(c);
    v.violated();
}

#[test]
fn memory() {
    let mut v = Victim::start();
    let first = number("XSMC_HOSTILE_SEED", 1);
    let only = std::env::var("XSMC_HOSTILE_ONLY").unwrap_or_default();
    for i in 0..number("XSMC_HOSTILE_CASES", 4) {
        for a in ATTACKS.iter().filter(|a| a.name.contains(&*only)) {
            attack(&mut v, a, first + i, true);
        }
    }
}

/// Runs `f` for many seeds.
fn seeds(per_case: u64, mut f: impl FnMut(u64)) {
    let first = number("XSMC_HOSTILE_SEED", 1);
    for i in 0..number("XSMC_HOSTILE_CASES", 4) * per_case {
        f(first + i);
    }
}

/// The victim answers, rests and serves.
fn fine(v: &mut Victim, which: usize) {
    v.status();
    v.calm();
    v.plain_echo(which);
}

#[test]
fn strangers() {
    let mut v = Victim::start();
    let mut kept = std::collections::VecDeque::new();
    seeds(16, |seed| {
        let (mut rng, node) = (Rng::new(seed), Node::new(v.dir()));
        let place = Place {
            node: &node,
            victim: v.id,
            port: v.ports[rng.below(2)],
        };
        let s = net::connect(&v.sock).expect("the engine listens");
        v.violated();
        let (what, then) = wire::stranger(&mut rng, &place, &s);
        let _c = Context(format!("{what}, seed {seed}"));
        if then == Then::Ends {
            let ended = net::wait_readable(&s, PATIENCE) && matches!(net::recv(&s), Ok(None));
            assert!(ended, "the victim keeps the socket");
            assert!(v.violated(), "no violation was counted");
        }
        let which = rng.below(2);
        fine(&mut v, which);
        kept.push_back(s);
        if rng.below(3) == 0 {
            kept.pop_front();
        }
    });
}

#[test]
fn greeted() {
    let mut v = Victim::start();
    seeds(22, |seed| {
        let (mut rng, node) = (Rng::new(seed), Node::new(v.dir()));
        let place = Place {
            node: &node,
            victim: v.id,
            port: v.ports[rng.below(2)],
        };
        let mut link = Link::dial(&node, &v.sock);
        link.announce();
        v.violated();
        let (what, then) = wire::greeted(&mut rng, &place, &mut link);
        let _c = Context(format!("{what}, seed {seed}"));
        link_then(&mut v, &mut link, then);
        let which = rng.below(2);
        fine(&mut v, which);
    });
}

fn link_then(v: &mut Victim, link: &mut Link, then: Then) {
    match then {
        Then::Ends => {
            link.wait_end();
            assert!(v.violated(), "no violation was counted");
        }
        Then::Stays => {
            let seq = 4711;
            say(&link.sock, &Message::Ping { seq }, &[]).expect("the link stands");
            link.wait("Pong", |m| *m == Message::Pong { seq });
        }
        Then::Any => {}
    }
}

#[test]
fn attached() {
    let mut v = Victim::start();
    seeds(16, |seed| {
        let (mut rng, node) = (Rng::new(seed), Node::new(v.dir()));
        let which = rng.below(2);
        let state = rng.pick(&[State::Attached, State::In, State::Out, State::Both]);
        let mut c = prepare(&v, &node, state, which, &mut rng);
        let place = Place {
            node: &node,
            victim: v.id,
            port: v.ports[which],
        };
        v.violated();
        let (what, then) = wire::attached(&mut rng, &place, &mut c);
        let _c = Context(format!("{what}, {state:?}, seed {seed}"));
        link_then(&mut v, &mut c.link, then);
        if then == Then::Ends || what == "the link is cut" {
            // What the kernel carries goes on.
            c.link.wait_end();
            c.link_gone();
            let r = c.echo(&rng.bytes(3000));
            assert!(r.is_ok(), "the connection died with its link: {r:?}");
        }
        fine(&mut v, which);
        c.reset();
        v.gone(&c.end);
    });
}

#[test]
fn answered() {
    let mut v = Victim::start();
    let mut kept = Vec::new();
    seeds(12, |seed| {
        let (mut rng, node) = (Rng::new(seed), Node::new(v.dir()));
        let which = rng.below(2);
        let place = Place {
            node: &node,
            victim: v.id,
            port: v.ports[which],
        };
        let (mut tcp, _, mut link) = Conn::asked(&node, v.ports[which]);
        let what = wire::answered(&mut rng, &place, &mut link);
        let _c = Context(format!("{what}, seed {seed}"));
        let r = echo_tcp(&mut tcp, &rng.bytes(2000));
        assert!(r.is_ok(), "TCP is disturbed: {r:?}");
        fine(&mut v, which);
        if rng.below(2) == 0 {
            kept.push((node, link));
        }
    });
}
