//! Attacks on the link socket.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use smc_core::fabric::shm::{BELL_PAGE_LEN, BELLS, BellPage, SEGMENT_LEN, SLOTS, Segment};
use smc_core::negotiate::message::{Greeting, MAX, VERSION};
use smc_core::negotiate::{Message, NodeId, RmbToken};
use smc_core::ring::CHUNK;
use socket2::Socket;

use crate::fake::{Conn, OWN, connect, echo_tcp, open_for};
use crate::link::{Link, Node, say};
use crate::net::{self, Map};
use crate::rng::Rng;

/// What an attack may use besides its link.
pub(crate) struct Place<'a> {
    /// Who we claim to be.
    pub(crate) node: &'a Node,
    /// Id of the victim.
    pub(crate) victim: NodeId,
    /// A port of the victim.
    pub(crate) port: u16,
}

/// What becomes of the link.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Then {
    /// The victim closes it and counts a violation.
    Ends,
    /// It goes on.
    Stays,
    /// Either.
    Any,
}

use Then::{Any, Ends, Stays};

const SHUT: i32 = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;

fn raw(s: &Socket, bytes: &[u8], fds: &[RawFd]) {
    let _ = net::send(s, bytes, fds);
}

fn encoded(m: &Message) -> Vec<u8> {
    let mut bytes = [0u8; MAX];
    let n = m.encode(&mut bytes);
    bytes[..n].to_vec()
}

/// A descriptor that is no good as a memfd of `len` bytes.
fn bad_memory(r: &mut Rng, len: usize) -> OwnedFd {
    match r.below(9) {
        0 => net::memfd(len, 0),
        1 => net::memfd(len, libc::F_SEAL_GROW),
        2 => net::memfd(r.below(len), SHUT),
        3 => net::memfd(0, SHUT),
        4 => net::memfd(len, SHUT & !libc::F_SEAL_SEAL | libc::F_SEAL_WRITE),
        5 => net::full_pipe().1,
        6 => net::eventfd(),
        7 => net::huge(len),
        _ => std::fs::File::open("/dev/zero").expect("/dev/zero").into(),
    }
}

/// A random message in which some field is odd. Often it means nothing, sometimes it is right.
fn message(r: &mut Rng, p: &Place) -> Message {
    let slot = r.pick(&[
        0,
        1,
        5,
        2047,
        2048,
        4095,
        4096,
        u32::MAX,
        r.clone().next() as u32,
    ]);
    let rmb = RmbToken {
        chunk: r.pick(&[0, 1, 2, 4095, u32::MAX]),
        offset: r.pick(&[
            0,
            4096,
            CHUNK - 4096,
            CHUNK - (16 << 10),
            u32::MAX - 4095,
            1,
        ]),
        size: r.pick(&[16 << 10, CHUNK, 8 << 10, 3 << 14, 0, 1 << 31, u32::MAX]),
    };
    let (generation, what) = (r.next() as u32, r.next() as u8);
    let endpoint = connect(p.port).1;
    match r.below(12) {
        0 => Message::Open {
            slot,
            endpoint,
            acceptor_slot: r.odd(3) as u32,
            acceptor_gen: r.odd(3) as u32,
            opener_sock: generation,
            rmb,
        },
        1 => Message::Accept { slot, rmb },
        2 => Message::Decline { slot, reason: what },
        3 => Message::Downgrade {
            slot,
            generation,
            pin: what,
        },
        4 => Message::Recall {
            slot,
            generation,
            at: r.odd(11),
        },
        5 => Message::Nack {
            slot,
            generation,
            what,
        },
        6 => Message::Done {
            slot,
            generation,
            what,
        },
        7 => Message::Ping { seq: generation },
        8 => Message::PinEnd {
            endpoint,
            reason: what,
        },
        9 => Message::Left { slot },
        10 => Message::Chunk {
            index: r.odd(1) as u32,
            len: r.pick(&[CHUNK, 16 << 10, 0, 4096, u32::MAX]),
        },
        _ => Message::Bell {
            index: r.odd(63) as u16,
        },
    }
}

/// A message with a byte changed, cut, or with something behind it.
fn mangled(r: &mut Rng, m: &Message) -> Vec<u8> {
    let mut b = encoded(m);
    let at = r.below(b.len());
    match r.below(4) {
        0 => b[at] ^= 1 << r.below(8),
        1 => b.truncate(at.max(1)),
        2 => b.extend(r.clone().bytes(1 + at)),
        _ => b[r.clone().below(4)] = r.next() as u8,
    }
    b
}

/// First words of somebody who connects to the victim's socket; the socket is kept open for a while.
pub(crate) fn stranger(r: &mut Rng, p: &Place, s: &Socket) -> (&'static str, Then) {
    let segment = net::sealed(SEGMENT_LEN);
    let map = Map::new(&segment, SEGMENT_LEN);
    map.get::<Segment>().stamp();
    let (seg, page) = (segment.as_raw_fd(), p.node.page_fd.as_raw_fd());
    let hello = |greeting: Greeting, control| encoded(&Message::Hello { greeting, control });
    let (good, me) = (hello(p.node.greeting(), true), p.node.greeting());
    match r.below(16) {
        0 => ("silence", Any),
        1 => {
            let n = 1 + r.below(300);
            raw(s, &r.bytes(n), &[]);
            ("garbage", Ends)
        }
        2 => {
            raw(s, &good[..1 + r.below(good.len() - 1)], &[seg, page]);
            ("half a Hello", Ends)
        }
        3 => {
            let n = r.pick(&[0, 1, 3, 4, 5, 64]);
            raw(s, &good, &[seg, page].repeat(32)[..n]);
            ("Hello with a wrong number of descriptors", Ends)
        }
        4 => {
            let bad = bad_memory(r, SEGMENT_LEN);
            raw(s, &good, &[bad.as_raw_fd(), page]);
            ("Hello with a bad segment", Ends)
        }
        5 => {
            let bad = bad_memory(r, BELL_PAGE_LEN);
            raw(s, &good, &[seg, bad.as_raw_fd()]);
            ("Hello with a bad bell page", Ends)
        }
        6 => {
            map.words()[0].store(r.next(), SeqCst);
            raw(s, &good, &[seg, page]);
            ("Hello with a segment of another kind", Ends)
        }
        7 => {
            raw(s, &hello(me, false), &[page]);
            ("Hello without a segment", Ends)
        }
        8 => {
            let version = r.pick(&[0, VERSION + 1, u16::MAX]);
            raw(s, &hello(Greeting { version, ..me }, true), &[seg, page]);
            ("Hello of another version", Ends)
        }
        9 => {
            let pid = r.pick(&[0, u32::MAX, 1 << 31]);
            raw(s, &hello(Greeting { pid, ..me }, true), &[seg, page]);
            ("Hello of an impossible process", Ends)
        }
        10 => {
            let node = p.victim;
            raw(s, &hello(Greeting { node, ..me }, true), &[seg, page]);
            ("Hello in the victim's own name", Ends)
        }
        11 => {
            raw(s, &mangled(r, &message(&mut r.clone(), p)), &[seg]);
            ("a mangled message", Any)
        }
        12 => {
            raw(s, &encoded(&message(r, p)), &[seg, page]);
            ("a message that is not Hello", Any)
        }
        13 => {
            raw(s, &b"XSMCSTATUS!"[..r.pick(&[1, 7, 9, 11])], &[page]);
            ("half a query", Ends)
        }
        14 => {
            let link_index = r.next() as u16;
            raw(s, &hello(Greeting { link_index, ..me }, true), &[seg, page]);
            ("Hello, and gone at once", Any)
        }
        _ => {
            raw(s, &[], &[seg, page]);
            ("an empty message", Any)
        }
    }
}

/// Attacks on a link that has been greeted, and on which our chunk has been announced.
pub(crate) fn greeted(r: &mut Rng, p: &Place, l: &mut Link) -> (&'static str, Then) {
    let own = l.own_fd.as_raw_fd();
    let other_half = SLOTS / 2 * (1 - l.side as u32);
    let out_of_range = r.pick(&[SLOTS, SLOTS + 5, u32::MAX, 1 << 31]);
    let page = p.node.page_fd.as_raw_fd();
    let greeting = p.node.greeting();
    let bell = net::eventfd();
    match r.below(22) {
        0 => {
            raw(
                &l.sock,
                &encoded(&Message::Hello {
                    greeting,
                    control: true,
                }),
                &[own, page],
            );
            ("Hello again", Ends)
        }
        1 => {
            raw(&l.sock, &encoded(&Message::HelloAck { greeting }), &[page]);
            ("HelloAck again", Ends)
        }
        2 => {
            let n = 1 + r.below(200);
            raw(&l.sock, &r.bytes(n), &[]);
            ("garbage", Any)
        }
        3 => {
            raw(&l.sock, &mangled(r, &message(&mut r.clone(), p)), &[]);
            ("a mangled message", Any)
        }
        4 => {
            let index = r.pick(&[2, 3, 4096, u32::MAX]);
            let _ = say(&l.sock, &Message::Chunk { index, len: CHUNK }, &[own]);
            ("a chunk out of turn", Ends)
        }
        5 => {
            let _ = say(
                &l.sock,
                &Message::Chunk {
                    index: 0,
                    len: CHUNK,
                },
                &[own],
            );
            ("a chunk twice", Ends)
        }
        6 => {
            let len = r.pick(&[16 << 10, CHUNK - 4096, CHUNK + 4096, 0, u32::MAX]);
            let _ = say(&l.sock, &Message::Chunk { index: 1, len }, &[own]);
            ("a chunk of another size", Ends)
        }
        7 => {
            let bad = bad_memory(r, CHUNK as usize);
            let _ = say(
                &l.sock,
                &Message::Chunk {
                    index: 1,
                    len: CHUNK,
                },
                &[bad.as_raw_fd()],
            );
            ("a chunk of bad memory", Ends)
        }
        8 => {
            let n = r.pick(&[0, 2, 3, 10]);
            let _ = say(
                &l.sock,
                &Message::Chunk {
                    index: 1,
                    len: CHUNK,
                },
                &[own; 10][..n],
            );
            ("a chunk with a wrong number of descriptors", Ends)
        }
        9 => {
            let index = r.pick(&[BELLS as u16, 65, u16::MAX]);
            let _ = say(&l.sock, &Message::Bell { index }, &[bell.as_raw_fd()]);
            ("a bell out of range", Ends)
        }
        10 => {
            let _ = say(&l.sock, &Message::Bell { index: 0 }, &[bell.as_raw_fd()]);
            ("a bell twice", Any)
        }
        11 => {
            let bad = bad_memory(r, 4096);
            let _ = say(&l.sock, &Message::Bell { index: 1 }, &[bad.as_raw_fd()]);
            ("a bell that may be none", Any)
        }
        12 => {
            let (end, _keep) = net::full_pipe();
            let fd = r.pick(&[end.as_raw_fd(), _keep.as_raw_fd()]);
            let _ = say(&l.sock, &Message::Bell { index: 2 }, &[fd]);
            ("a bell that is a pipe", Ends)
        }
        13 => {
            let (_tcp, end) = echoed(p);
            let slot = r.pick(&[other_half, other_half + 7, out_of_range]);
            let _ = say(&l.sock, &open_for(p.node, &end, slot, OWN), &[]);
            ("Open of a slot that isn't ours", Ends)
        }
        14 => {
            let (_tcp, end) = echoed(p);
            let chunk = r.pick(&[1, 2, 4095, u32::MAX]);
            let _ = say(
                &l.sock,
                &open_for(p.node, &end, 9, RmbToken { chunk, ..OWN }),
                &[],
            );
            ("Open with an unknown chunk", Ends)
        }
        15 => {
            let (_tcp, end) = echoed(p);
            let (offset, size) = r.pick(&[
                (1, 16 << 10),
                (CHUNK - 4096, 16 << 10),
                (0, 3 << 14),
                (0, 1 << 31),
                (4096, CHUNK),
                (u32::MAX - 4095, 16 << 10),
                (0, 0),
            ]);
            let rmb = RmbToken {
                chunk: 0,
                offset,
                size,
            };
            let _ = say(&l.sock, &open_for(p.node, &end, 9, rmb), &[]);
            ("Open with a ring out of range", Ends)
        }
        16 => {
            let slot = r.pick(&[0, 5, other_half, out_of_range]);
            let _ = say(&l.sock, &Message::Accept { slot, rmb: OWN }, &[]);
            ("Accept of nothing", Ends)
        }
        17 => {
            let slot = r.pick(&[0, 5, other_half, out_of_range]);
            let _ = say(&l.sock, &Message::Decline { slot, reason: 3 }, &[]);
            ("Decline of nothing", Ends)
        }
        18 => {
            let m = Message::Recall {
                slot: out_of_range,
                generation: 1,
                at: 0,
            };
            let _ = say(&l.sock, &m, &[]);
            ("Recall of a slot out of range", Ends)
        }
        19 => {
            for _ in 0..20 {
                let m = Message::Recall {
                    slot: r.next() as u32 % SLOTS,
                    generation: r.next() as u32,
                    at: r.odd(0),
                };
                let _ = say(&l.sock, &m, &[]);
            }
            ("Recall of unused slots", Stays)
        }
        20 => {
            // Until the socket is full in both directions.
            for seq in 0..3000 {
                if say(&l.sock, &Message::Ping { seq }, &[]).is_err() {
                    std::thread::sleep(Duration::from_micros(100));
                }
            }
            ("a flood of Pings", Any)
        }
        _ => {
            for _ in 0..30 {
                let _ = say(&l.sock, &message(r, p), &[]);
            }
            ("random messages", Any)
        }
    }
}

fn echoed(p: &Place) -> (std::net::TcpStream, smc_core::negotiate::Endpoint) {
    let (mut tcp, end) = connect(p.port);
    echo_tcp(&mut tcp, b"first bytes").expect("echo");
    (tcp, end)
}

/// Attacks on the link of an upgraded connection.
pub(crate) fn attached(r: &mut Rng, p: &Place, c: &mut Conn) -> (&'static str, Then) {
    let slot = c.slot;
    match r.below(8) {
        0 if c.link.side == 0 => {
            let (_tcp, end) = echoed(p);
            let _ = say(&c.link.sock, &open_for(p.node, &end, slot, OWN), &[]);
            ("Open of a slot in use", Stays)
        }
        0 | 1 => {
            let _ = say(&c.link.sock, &Message::Decline { slot, reason: 1 }, &[]);
            ("Decline of a slot in use", Ends)
        }
        2 => {
            let _ = say(&c.link.sock, &Message::Accept { slot, rmb: OWN }, &[]);
            ("Accept of a slot in use", Ends)
        }
        3 => {
            let m = Message::Open {
                slot: slot + 1,
                endpoint: c.end.mirror(),
                acceptor_slot: r.odd(3) as u32,
                acceptor_gen: r.odd(3) as u32,
                opener_sock: 1,
                rmb: OWN,
            };
            let _ = say(&c.link.sock, &m, &[]);
            (
                "Open of an upgraded connection",
                if c.link.side == 0 { Stays } else { Ends },
            )
        }
        4 => {
            let n = 1 + r.below(128);
            raw(&c.link.sock, &r.bytes(n), &[]);
            ("garbage", Any)
        }
        5 => {
            let m = Message::Recall {
                slot,
                generation: 1,
                at: c.got,
            };
            let _ = say(&c.link.sock, &m, &[]);
            ("Recall of nothing unread", Stays)
        }
        6 => {
            // A bell that blocks whoever rings it, and an owner that seems to sleep.
            let (read, write) = net::full_pipe();
            let _ = say(
                &c.link.sock,
                &Message::Bell { index: 3 },
                &[write.as_raw_fd()],
            );
            p.node.page.get::<BellPage>().sleep[3].0.store(1, SeqCst);
            c.outbound().rx.notify.store(4, SeqCst);
            std::thread::sleep(Duration::from_millis(2));
            std::mem::forget(read);
            ("a bell that blocks", Ends)
        }
        _ => {
            let _ = c.link.sock.shutdown(std::net::Shutdown::Both);
            ("the link is cut", Any)
        }
    }
}

/// Answers to a victim that has just greeted us.
pub(crate) fn answered(r: &mut Rng, p: &Place, l: &mut Link) -> &'static str {
    let (s, page) = (&l.sock, p.node.page_fd.as_raw_fd());
    let ack = Message::HelloAck {
        greeting: p.node.greeting(),
    };
    match r.below(12) {
        0 => "silence",
        1 => {
            let bad = bad_memory(r, BELL_PAGE_LEN);
            let _ = say(s, &ack, &[bad.as_raw_fd()]);
            "HelloAck with a bad page"
        }
        2 => {
            let n = r.pick(&[0, 2, 3]);
            let _ = say(s, &ack, &[page; 3][..n]);
            "HelloAck with a wrong number of descriptors"
        }
        3 => {
            l.announce();
            let _ = say(s, &Message::Accept { slot: 0, rmb: OWN }, &[]);
            "Accept before HelloAck"
        }
        4 => {
            let _ = say(s, &message(r, p), &[page]);
            "something else"
        }
        5 => {
            raw(s, &mangled(r, &ack), &[page]);
            "a mangled HelloAck"
        }
        6 => {
            let node = p.victim;
            let greeting = Greeting {
                node,
                ..p.node.greeting()
            };
            let _ = say(s, &Message::HelloAck { greeting }, &[page]);
            "HelloAck in the victim's name"
        }
        how => {
            l.answer(p.node);
            let Message::Open { slot, .. } = l.wait("Open", |m| matches!(m, Message::Open { .. }))
            else {
                unreachable!()
            };
            let s = &l.sock;
            match how {
                7 => {
                    let _ = say(s, &Message::Accept { slot, rmb: OWN }, &[]);
                    "Accept with an unknown chunk"
                }
                8 => {
                    l.announce();
                    let slot = r.pick(&[slot + 1, slot + 2048, u32::MAX]);
                    let _ = say(s, &Message::Accept { slot, rmb: OWN }, &[]);
                    "Accept of another slot"
                }
                9 => {
                    l.announce();
                    let _ = say(
                        s,
                        &Message::Decline {
                            slot,
                            reason: r.next() as u8,
                        },
                        &[],
                    );
                    let _ = say(s, &Message::Accept { slot, rmb: OWN }, &[]);
                    "Decline and Accept"
                }
                10 => {
                    let _ = say(
                        s,
                        &Message::Decline {
                            slot,
                            reason: r.next() as u8,
                        },
                        &[],
                    );
                    let _ = say(s, &Message::Decline { slot, reason: 0 }, &[]);
                    "Decline twice"
                }
                _ => "no answer to Open",
            }
        }
    }
}
