//! Attacks that last, and their late consequences.

use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::{Duration, Instant};

use smc_core::fabric::shm::SEGMENT_LEN;
use smc_core::negotiate::{Endpoint, Message};

use crate::fake::{Conn, OWN, connect, echo_tcp, open_for};
use crate::link::{Link, Node, PATIENCE, say};
use crate::net::{self, Map};
use crate::ring::{ATTACKS, State};
use crate::rng::Rng;
use crate::watch::Victim;
use crate::{Context, attack, fine, number, prepare};

/// Upgraded connections of as many peers.
fn several(v: &Victim, n: usize, rng: &mut Rng) -> Vec<(Node, Conn)> {
    (0..n)
        .map(|i| {
            let node = Node::new(v.dir());
            let state = rng.pick(&[State::Both, State::Both, State::In]);
            let conn = prepare(v, &node, state, i % 2, rng);
            (node, conn)
        })
        .collect()
}

/// Writes random words into all that the peer can reach, until told to stop.
fn scribble(conns: &[(Node, Conn)], seed: u64, stop: &AtomicBool) {
    let mut rng = Rng::new(seed);
    while !stop.load(Relaxed) {
        for (_, c) in conns {
            let seg = c.link.seg.words();
            let block = 1024 + c.slot as usize * 64;
            let ours: [&[_]; 5] = [
                &seg[block..block + 64],
                seg,
                c.link.victim_page.as_ref().expect("page").words(),
                c.link.own.words(),
                c.link.chunk(0).words(),
            ];
            for _ in 0..20 {
                let area = ours[rng.below(8).saturating_sub(3)];
                let near = c.sent;
                area[rng.below(area.len())].store(rng.odd(near), SeqCst);
            }
        }
        std::thread::sleep(Duration::from_micros(20));
    }
}

#[test]
fn scribbler() {
    let mut v = Victim::start();
    for round in 0..number("XSMC_HOSTILE_CASES", 4) * 2 {
        let seed = number("XSMC_HOSTILE_SEED", 1) + round;
        let _c = Context(format!("scribbling, seed {seed}"));
        let mut rng = Rng::new(seed);
        let mut conns = several(&v, 5, &mut rng);
        let stop = AtomicBool::new(false);
        let end = Instant::now() + Duration::from_millis(350);
        std::thread::scope(|scope| {
            scope.spawn(|| scribble(&conns, seed, &stop));
            while Instant::now() < end {
                for (_, c) in &conns {
                    c.knock(&mut rng);
                }
                std::thread::sleep(Duration::from_micros(200));
            }
            stop.store(true, Relaxed);
        });
        let which = rng.below(2);
        fine(&mut v, which);
        for (_, c) in conns.drain(..) {
            c.reset();
            // What the victim was told about its bells may be wrong now.
            c.tell();
            v.gone(&c.end);
        }
    }
}

/// An honest process must not notice that another peer of its server misbehaves.
#[test]
fn honest_neighbour() {
    let mut v = Victim::start();
    let clients = [v.client(0), v.client(1)];
    let end = Instant::now() + Duration::from_secs(3);
    let mut seed = number("XSMC_HOSTILE_SEED", 1);
    while Instant::now() < end {
        for a in ATTACKS.iter().filter(|a| !a.shared) {
            if Instant::now() < end {
                attack(&mut v, a, seed, false);
            }
        }
        seed += 1;
    }
    for c in clients {
        assert!(c.finish() > 100, "an honest client starves");
    }
}

/// A slot that is taken twice, or refused when it is in use, must not cost the first connection its memory.
#[test]
fn memory_outlives_its_users() {
    let mut v = Victim::start();
    let (node, other) = (Node::new(v.dir()), Node::new(v.dir()));
    let mut first = Conn::opened(&node, v.ports[0], &v.sock);
    first.echo(b"hello").expect("echo");
    let (mut tcp, end) = connect(v.ports[0]);
    echo_tcp(&mut tcp, b"first bytes").expect("echo");
    let again = open_for(&node, &end, first.slot, OWN);
    say(&first.link.sock, &again, &[]).expect("Open");
    let mut second = Conn::accepted(&other, v.ports[1]);
    second.echo(b"hello").expect("echo");
    let slot = second.slot;
    say(
        &second.link.sock,
        &Message::Decline { slot, reason: 1 },
        &[],
    )
    .expect("Decline");
    second.link.wait_end();
    drop(tcp);
    v.gone(&end);
    for c in [&mut first, &mut second] {
        let _ = c.link.sock.shutdown(std::net::Shutdown::Both);
    }
    // Links that are over are taken down within a second or two.
    std::thread::sleep(Duration::from_millis(2500));
    for mut c in [first, second] {
        c.link_gone();
        let r = c.echo(b"still there");
        v.alive();
        r.expect("echo");
        c.reset();
    }
    fine(&mut v, 0);
}

/// A peer that vanishes after each step of the protocol, by the TCP connection or by the link first.
#[test]
fn vanishes_at_every_step() {
    let mut v = Victim::start();
    for (step, by_link) in (0..14).flat_map(|s| [(s, false), (s, true)]) {
        let _c = Context(format!("vanishing at step {step}, link first: {by_link}"));
        let node = Node::new(v.dir());
        let (tcp, link, end) = until_step(&node, &v, step);
        if by_link {
            drop(link);
            fine(&mut v, 0);
            drop(tcp);
        } else {
            drop(tcp);
            v.gone(&end);
            fine(&mut v, 1);
            drop(link);
        }
        v.gone(&end);
    }
}

/// Goes as far as `step`, and leaves what is open then.
fn until_step(node: &Node, v: &Victim, step: usize) -> (Option<TcpStream>, Option<Link>, Endpoint) {
    let port = v.ports[step % 2];
    match step {
        // The victim opens.
        0 => {
            let (tcp, end, link) = Conn::asked(node, port);
            (Some(tcp), Some(link), end)
        }
        1..=3 => {
            let (tcp, end, mut link) = Conn::asked(node, port);
            link.answer(node);
            if step > 1 {
                link.wait("Open", |m| matches!(m, Message::Open { .. }));
            }
            if step > 2 {
                link.announce();
            }
            (Some(tcp), Some(link), end)
        }
        // We open.
        4..=6 => {
            let link = Link::dial(node, &v.sock);
            let (mut tcp, end) = connect(port);
            echo_tcp(&mut tcp, b"first bytes").expect("echo");
            let open = open_for(node, &end, 1, OWN);
            if step > 4 {
                link.announce();
            }
            if step > 5 {
                say(&link.sock, &open, &[]).expect("Open");
            }
            (Some(tcp), Some(link), end)
        }
        // In the middle of the stream.
        _ => {
            let states = [State::Attached, State::In, State::Out, State::Both];
            let mut c = prepare(
                v,
                node,
                states[step % 4],
                step % 2,
                &mut Rng::new(step as u64),
            );
            if step >= 11 {
                // Bytes are under way in both directions.
                c.send(&[1; 6000]).expect("send");
            }
            let (end, (tcp, link)) = (c.end, c.split());
            (Some(tcp), Some(link), end)
        }
    }
}

/// A peer shares the victim's bells, and may make them eventfds that block.
#[test]
fn blocking_bells() {
    let mut v = Victim::start();
    for which in [0, 1, 1] {
        let node = Node::new(v.dir());
        let mut c = prepare(&v, &node, State::Both, which, &mut Rng::new(1));
        c.link.pump();
        for bell in c.link.bells.iter().flatten() {
            // SAFETY: touches no memory.
            unsafe { libc::fcntl(bell.as_raw_fd(), libc::F_SETFL, 0) };
        }
        for _ in 0..20 {
            c.echo(&[1; 3000]).expect("echo");
        }
        fine(&mut v, which);
        c.reset();
        v.gone(&c.end);
    }
}

/// fork has to put all connections on TCP, and some peers don't play along.
#[test]
fn fork_does_not_wait_for_ever() {
    let mut v = Victim::start();
    let conns = several(&v, 4, &mut Rng::new(1));
    for (_, c) in &conns {
        c.outbound().rx.unbounded.store(1, SeqCst);
    }
    let took = v.fork();
    assert!(took < Duration::from_secs(5), "fork took {took:?}");
    fine(&mut v, 1);
    for (_, c) in conns {
        c.reset();
        v.gone(&c.end);
    }
}

/// Whoever connects and says nothing, or nonsense, must not use up the victim's descriptors and mappings.
#[test]
fn resources_are_bounded() {
    let mut v = Victim::start();
    fine(&mut v, 0);
    let (maps, fds) = v.resources();
    let node = Node::new(v.dir());
    let memory = net::sealed(SEGMENT_LEN);
    let hello = Message::Hello {
        greeting: node.greeting(),
        control: true,
    };
    let _map = Map::new(&memory, SEGMENT_LEN);
    for _ in 0..100 {
        let s = net::connect(&v.sock).expect("the engine listens");
        // Good memory without the mark of a segment.
        say(&s, &hello, &[memory.as_raw_fd(), node.page_fd.as_raw_fd()]).expect("Hello");
        assert!(net::wait_readable(&s, PATIENCE), "no answer");
    }
    let silent: Vec<_> = (0..300).map(|_| net::connect(&v.sock)).collect();
    fine(&mut v, 1);
    let (more_maps, more_fds) = v.resources();
    assert!(more_maps < maps + 60, "{maps} mappings became {more_maps}");
    assert!(more_fds < fds + 100, "{fds} descriptors became {more_fds}");
    drop(silent);
}

/// A peer that asks and hardly reads the answers must not keep the engine to itself.
#[test]
fn slow_reader() {
    let mut v = Victim::start();
    let node = Node::new(v.dir());
    let mut link = Link::dial(&node, &v.sock);
    let (stop, begun) = (AtomicBool::new(false), Instant::now());
    let mut slowest = Duration::ZERO;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Relaxed) && begun.elapsed() < Duration::from_secs(4) {
                while say(&link.sock, &Message::Ping { seq: 1 }, &[]).is_ok() {}
                std::thread::sleep(Duration::from_millis(100));
                link.pump_one();
            }
        });
        std::thread::sleep(Duration::from_millis(300));
        for _ in 0..4 {
            let start = Instant::now();
            v.status();
            slowest = slowest.max(start.elapsed());
        }
        stop.store(true, Relaxed);
    });
    assert!(
        slowest < Duration::from_millis(800),
        "a status took {slowest:?}"
    );
    fine(&mut v, 0);
}
