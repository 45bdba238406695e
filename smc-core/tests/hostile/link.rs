//! A node and a link made by hand: the protocol as a well-behaved peer speaks it, step by step.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::time::{Duration, Instant};

use smc_core::fabric::shm::{BELL_PAGE_LEN, BELLS, BellPage, ConnBlock, SEGMENT_LEN, Segment};
use smc_core::negotiate::message::{Greeting, MAX, VERSION};
use smc_core::negotiate::{Directory, Message, NodeId, RuntimeDir};
use smc_core::ring::CHUNK;
use socket2::Socket;

use crate::net::{self, Map};

/// Everything that the victim owes us comes within this time.
pub(crate) const PATIENCE: Duration = Duration::from_secs(2);

/// Polls `f` until it gives something, at most [`PATIENCE`].
pub(crate) fn until<T>(what: &str, mut f: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(t) = f() {
            return t;
        }
        assert!(start.elapsed() < PATIENCE, "waited in vain for {what}");
        std::thread::sleep(Duration::from_micros(50));
    }
}

/// What a fake process owns.
pub(crate) struct Node {
    runtime: RuntimeDir,
    pub(crate) directory: Directory,
    pub(crate) id: NodeId,
    pub(crate) page: Map,
    pub(crate) page_fd: OwnedFd,
    bell: OwnedFd,
    listener: Socket,
}

impl Node {
    /// A node in the runtime directory `at`.
    pub(crate) fn new(at: &Path) -> Node {
        let runtime = RuntimeDir::at(at).expect("runtime directory");
        let directory = Directory::open(&runtime).expect("directory");
        let id = NodeId::random().expect("id");
        let page_fd = net::sealed(BELL_PAGE_LEN);
        let path = runtime.sock_path(id).expect("path");
        Node {
            page: Map::new(&page_fd, BELL_PAGE_LEN),
            listener: net::listen(&path).expect("listen"),
            bell: net::eventfd(),
            runtime,
            directory,
            id,
            page_fd,
        }
    }

    /// Who we say we are.
    pub(crate) fn greeting(&self) -> Greeting {
        Greeting {
            version: VERSION,
            link_index: 0,
            pid: std::process::id(),
            node: self.id,
            program: *b"hostile\0\0\0\0\0\0\0\0\0",
        }
    }

    /// Waits for the victim to open a link to us.
    pub(crate) fn accept(&self) -> Socket {
        self.listener.accept().expect("the victim's link").0
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if let Ok(path) = self.runtime.sock_path(self.id) {
            let _ = std::fs::remove_file(path);
        }
        self.directory.clear_node(self.id);
    }
}

/// Sends one message.
pub(crate) fn say(s: &Socket, m: &Message, fds: &[RawFd]) -> io::Result<()> {
    let mut bytes = [0u8; MAX];
    let n = m.encode(&mut bytes);
    net::send(s, &bytes[..n], fds)
}

/// One end of a link.
pub(crate) struct Link {
    pub(crate) sock: Socket,
    /// Our number: 0 if we connected.
    pub(crate) side: usize,
    pub(crate) seg: Map,
    /// The victim's bell page, our index in it, and its bells.
    pub(crate) victim_page: Option<Map>,
    index: u32,
    pub(crate) bells: Vec<Option<OwnedFd>>,
    /// Chunks that the victim announced, and ours.
    chunks: Vec<Map>,
    pub(crate) own: Map,
    pub(crate) own_fd: OwnedFd,
    inbox: VecDeque<Message>,
    /// The victim has closed the link.
    pub(crate) ended: bool,
}

impl Link {
    fn with(sock: Socket, side: usize, seg: Map) -> Link {
        let own_fd = net::sealed(CHUNK as usize);
        Link {
            sock,
            side,
            seg,
            victim_page: None,
            index: 0,
            bells: (0..BELLS).map(|_| None).collect(),
            chunks: Vec::new(),
            own: Map::new(&own_fd, CHUNK as usize),
            own_fd,
            inbox: VecDeque::new(),
            ended: false,
        }
    }

    /// Connects to the victim's socket and greets, as a well-behaved peer does.
    pub(crate) fn dial(node: &Node, victim: &Path) -> Link {
        let sock = net::connect(victim).expect("the victim listens");
        let fd = net::sealed(SEGMENT_LEN);
        let seg = Map::new(&fd, SEGMENT_LEN);
        seg.get::<Segment>().stamp();
        let hello = Message::Hello {
            greeting: node.greeting(),
            control: true,
        };
        say(&sock, &hello, &[fd.as_raw_fd(), node.page_fd.as_raw_fd()]).expect("Hello");
        let mut link = Link::with(sock, 0, seg);
        link.wait("HelloAck", |m| matches!(m, Message::HelloAck { .. }));
        link.ring_me(node);
        link
    }

    /// Takes the victim's Hello. Nothing has been answered yet.
    pub(crate) fn greeted(sock: Socket) -> Link {
        assert!(net::wait_readable(&sock, PATIENCE), "no Hello");
        let (bytes, mut fds) = net::recv(&sock).expect("Hello").expect("Hello");
        let Ok(Message::Hello { greeting, .. }) = Message::decode(&bytes) else {
            panic!("not a Hello")
        };
        assert_eq!(fds.len(), 2);
        let page = Map::new(&fds[1], BELL_PAGE_LEN);
        let mut link = Link::with(sock, 1, Map::new(&fds.remove(0), SEGMENT_LEN));
        link.victim_page = Some(page);
        link.index = u32::from(greeting.link_index);
        link
    }

    /// Answers the victim's Hello.
    pub(crate) fn answer(&mut self, node: &Node) {
        let ack = Message::HelloAck {
            greeting: node.greeting(),
        };
        say(&self.sock, &ack, &[node.page_fd.as_raw_fd()]).expect("HelloAck");
        self.ring_me(node);
    }

    fn ring_me(&self, node: &Node) {
        let bell = Message::Bell { index: 0 };
        say(&self.sock, &bell, &[node.bell.as_raw_fd()]).expect("Bell");
    }

    /// Announces our chunk.
    pub(crate) fn announce(&self) {
        let chunk = Message::Chunk {
            index: 0,
            len: CHUNK,
        };
        say(&self.sock, &chunk, &[self.own_fd.as_raw_fd()]).expect("Chunk");
    }

    /// Takes in what the victim has sent.
    pub(crate) fn pump(&mut self) {
        loop {
            let (bytes, mut fds) = match net::recv(&self.sock) {
                Ok(Some(d)) => d,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                _ => {
                    self.ended = true;
                    return;
                }
            };
            match Message::decode(&bytes).expect("the victim speaks the protocol") {
                Message::Bell { index } => self.bells[index as usize] = fds.pop(),
                Message::Chunk { index, len } => {
                    assert_eq!(index as usize, self.chunks.len());
                    self.chunks.push(Map::new(&fds[0], len as usize));
                }
                m => {
                    if let Message::HelloAck { greeting } = m {
                        self.index = u32::from(greeting.link_index);
                        self.victim_page = Some(Map::new(&fds[0], BELL_PAGE_LEN));
                    }
                    self.inbox.push_back(m);
                }
            }
        }
    }

    /// Takes in one datagram, whatever it is.
    pub(crate) fn pump_one(&mut self) {
        self.ended = matches!(net::recv(&self.sock), Ok(None));
    }

    /// A chunk of the victim's.
    pub(crate) fn chunk(&self, index: u32) -> &Map {
        &self.chunks[index as usize]
    }

    /// Waits for a message of a kind, dropping those before it.
    pub(crate) fn wait(&mut self, what: &str, want: impl Fn(&Message) -> bool) -> Message {
        until(what, || {
            self.pump();
            while let Some(m) = self.inbox.pop_front() {
                if want(&m) {
                    return Some(m);
                }
            }
            assert!(!self.ended, "the link ended instead of {what}");
            None
        })
    }

    /// Waits for the victim to close the link.
    pub(crate) fn wait_end(&mut self) {
        until("the end of the link", || {
            self.pump();
            self.ended.then_some(())
        })
    }

    /// Rings all bells of the victim that we know, whoever sleeps.
    pub(crate) fn ring_all(&self) {
        for bell in self.bells.iter().flatten() {
            net::add(bell, 1);
        }
    }

    /// Marks `slot` as having news, and rings.
    pub(crate) fn tell(&self, slot: u32) {
        let page = self.victim_page.as_ref().expect("greeted");
        self.seg.get::<Segment>().pending[1 - self.side].set(slot);
        page.get::<BellPage>().links.set(self.index);
        self.ring_all();
    }

    /// Connection block of a slot.
    pub(crate) fn block(&self, slot: u32) -> &ConnBlock {
        &self.seg.get::<Segment>().conns[slot as usize]
    }
}
