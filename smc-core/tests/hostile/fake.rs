//! A connection with a victim, upgraded by hand: carried on well, until told otherwise.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use smc_core::fabric::shm::{Direction, LOG, RX_READY};
use smc_core::negotiate::{Endpoint, Message, RmbToken};

use crate::link::{Link, Node, PATIENCE, say, until};

/// A connection that the victim and we have upgraded.
pub(crate) struct Conn {
    pub(crate) tcp: TcpStream,
    /// Our end.
    pub(crate) end: Endpoint,
    pub(crate) link: Link,
    pub(crate) slot: u32,
    /// The victim's RMB, which we write.
    to: RmbToken,
    /// Our RMB.
    own: RmbToken,
    pub(crate) sent: u64,
    pub(crate) got: u64,
    switches: u32,
    passed: u32,
}

/// Our RMB of a connection: small, so that it fills quickly.
pub(crate) const OWN: RmbToken = RmbToken {
    chunk: 0,
    offset: 0x10000,
    size: 16 << 10,
};

/// Connects to the victim over TCP.
pub(crate) fn connect(port: u16) -> (TcpStream, Endpoint) {
    let tcp = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).expect("connect");
    tcp.set_nodelay(true).expect("nodelay");
    tcp.set_read_timeout(Some(PATIENCE)).expect("timeout");
    tcp.set_write_timeout(Some(PATIENCE)).expect("timeout");
    let end = Endpoint::of_socket(tcp.as_raw_fd()).expect("endpoint");
    (tcp, end)
}

/// Sends bytes over TCP and expects them back.
pub(crate) fn echo_tcp(tcp: &mut TcpStream, data: &[u8]) -> io::Result<()> {
    tcp.write_all(data)?;
    let mut back = vec![0u8; data.len()];
    tcp.read_exact(&mut back)?;
    assert_eq!(back, data, "the echo differs");
    Ok(())
}

/// The Open for our end of a connection that the victim has published.
pub(crate) fn open_for(node: &Node, end: &Endpoint, slot: u32, rmb: RmbToken) -> Message {
    let found = until("the victim's endpoint", || node.directory.find_mirror(end));
    Message::Open {
        slot,
        endpoint: end.mirror(),
        acceptor_slot: found.slot,
        acceptor_gen: found.slot_gen,
        opener_sock: 1,
        rmb,
    }
}

impl Conn {
    /// A connection that we open on a link of our making.
    pub(crate) fn opened(node: &Node, port: u16, victim: &Path) -> Conn {
        let link = Link::dial(node, victim);
        link.announce();
        Conn::open_on(node, port, link, 5, OWN)
    }

    /// A connection that we open on `link`.
    pub(crate) fn open_on(
        node: &Node,
        port: u16,
        mut link: Link,
        slot: u32,
        own: RmbToken,
    ) -> Conn {
        let (mut tcp, end) = connect(port);
        echo_tcp(&mut tcp, b"first bytes").expect("echo");
        say(&link.sock, &open_for(node, &end, slot, own), &[]).expect("Open");
        let Message::Accept { rmb, .. } = link.wait("Accept", |m| {
            matches!(m, Message::Accept { .. } | Message::Decline { .. })
        }) else {
            panic!("declined")
        };
        Conn::on(tcp, end, link, slot, rmb, own, 11)
    }

    /// A connection that the victim opens, on a link of its making.
    pub(crate) fn accepted(node: &Node, port: u16) -> Conn {
        let (tcp, end, mut link) = Conn::asked(node, port);
        link.answer(node);
        let Message::Open { slot, rmb, .. } =
            link.wait("Open", |m| matches!(m, Message::Open { .. }))
        else {
            unreachable!()
        };
        link.announce();
        let accept = Message::Accept { slot, rmb: OWN };
        say(&link.sock, &accept, &[]).expect("Accept");
        let conn = Conn::on(tcp, end, link, slot, rmb, OWN, 11);
        // The victim has no answer to give: it is attached once it says how to be told.
        until("the attachment", || {
            let ready = conn.inbound().rx.cons.load(SeqCst) == 11;
            ready.then_some(())
        });
        conn
    }

    /// The victim has said Hello to us, for a connection with eleven bytes of traffic.
    pub(crate) fn asked(node: &Node, port: u16) -> (TcpStream, Endpoint, Link) {
        let (mut tcp, end) = connect(port);
        node.directory
            .publish(&end, node.id, 7, 9)
            .expect("publish");
        echo_tcp(&mut tcp, b"first bytes").expect("echo");
        let link = Link::greeted(node.accept());
        (tcp, end, link)
    }

    fn on(
        tcp: TcpStream,
        end: Endpoint,
        link: Link,
        slot: u32,
        to: RmbToken,
        own: RmbToken,
        moved: u64,
    ) -> Conn {
        tcp.set_nonblocking(true).expect("nonblocking");
        Conn {
            tcp,
            end,
            link,
            slot,
            to,
            own,
            sent: moved,
            got: moved,
            switches: 0,
            passed: 0,
        }
    }

    /// The TCP connection and the link.
    pub(crate) fn split(self) -> (TcpStream, Link) {
        (self.tcp, self.link)
    }

    /// The direction that we send and the victim receives.
    pub(crate) fn inbound(&self) -> &Direction {
        &self.link.block(self.slot).dir[self.link.side]
    }

    /// The direction that the victim sends.
    pub(crate) fn outbound(&self) -> &Direction {
        &self.link.block(self.slot).dir[1 - self.link.side]
    }

    /// Size of the ring that the victim reads.
    pub(crate) fn ring(&self) -> u64 {
        u64::from(self.to.size)
    }

    /// Makes the victim look at the connection.
    pub(crate) fn tell(&self) {
        self.link.tell(self.slot);
    }

    /// Writes to the victim's RMB without looking whether there is room, and publishes it.
    pub(crate) fn put(&mut self, data: &[u8]) {
        let chunk = self.link.chunk(self.to.chunk);
        for (i, b) in data.iter().enumerate() {
            let at = (self.sent + i as u64) & (self.ring() - 1);
            // SAFETY: within the victim's ring, which lies in the mapped chunk.
            unsafe {
                chunk
                    .at((u64::from(self.to.offset) + at) as usize)
                    .write(*b)
            };
        }
        self.sent += data.len() as u64;
        self.inbound().tx.prod.store(self.sent, SeqCst);
        self.tell();
    }

    /// Moves a cursor, sends bytes over TCP, reads some, rings: traffic without any sense.
    pub(crate) fn knock(&self, rng: &mut crate::rng::Rng) {
        match rng.below(4) {
            0 => drop((&self.tcp).write(&rng.bytes(100))),
            1 => drop((&self.tcp).read(&mut [0; 4096])),
            2 => {
                let n = rng.next() % 1000;
                self.inbound().tx.prod.fetch_add(n, SeqCst);
            }
            _ => {}
        }
        self.tell();
    }

    /// Sends on whatever carrier our direction has.
    pub(crate) fn send(&mut self, data: &[u8]) -> io::Result<()> {
        if self.switches & 1 == 1 {
            self.link.pump();
            self.put(data);
            return Ok(());
        }
        let mut done = 0;
        let start = Instant::now();
        while done < data.len() {
            match (&self.tcp).write(&data[done..]) {
                Ok(n) => done += n,
                Err(e) if e.kind() != io::ErrorKind::WouldBlock => return Err(e),
                Err(e) if start.elapsed() > PATIENCE => return Err(e),
                Err(_) => std::thread::sleep(Duration::from_micros(50)),
            }
        }
        self.sent += data.len() as u64;
        Ok(())
    }

    /// Takes what the victim has sent, at most `buf.len()`; 0 at the end of the stream.
    pub(crate) fn take(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let dir = self.outbound();
        let (prod, head) = (dir.tx.prod.load(SeqCst), dir.tx.switches.load(SeqCst));
        let bound = (head != self.passed).then(|| dir.log[self.passed as usize % LOG].load(SeqCst));
        if bound == Some(self.got) {
            self.passed += 1;
            self.outbound().rx.passed.store(self.passed, SeqCst);
            return Err(io::ErrorKind::WouldBlock.into());
        }
        if self.passed & 1 == 0 {
            let most = bound.map_or(buf.len(), |b| buf.len().min((b - self.got) as usize));
            let n = (&self.tcp).read(&mut buf[..most])?;
            self.got += n as u64;
            self.outbound().rx.cons.store(self.got, SeqCst);
            return Ok(n);
        }
        let end = prod.min(bound.unwrap_or(u64::MAX));
        let n = (end - self.got).min(buf.len() as u64);
        if n == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        for (i, b) in buf.iter_mut().take(n as usize).enumerate() {
            let at = (self.got + i as u64) & u64::from(self.own.size - 1);
            // SAFETY: within our ring, which lies in our mapped chunk.
            *b = unsafe {
                self.link
                    .own
                    .at((u64::from(self.own.offset) + at) as usize)
                    .read()
            };
        }
        self.got += n;
        self.outbound().rx.cons.store(self.got, SeqCst);
        self.tell();
        Ok(n as usize)
    }

    /// Receives exactly `n` bytes within [`PATIENCE`].
    pub(crate) fn receive(&mut self, n: usize) -> io::Result<Vec<u8>> {
        let (mut back, mut done, start) = (vec![0u8; n], 0, Instant::now());
        while done < n {
            match self.take(&mut back[done..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(k) => done += k,
                Err(e) if e.kind() != io::ErrorKind::WouldBlock => return Err(e),
                Err(e) if start.elapsed() > PATIENCE => return Err(e),
                Err(_) => std::thread::sleep(Duration::from_micros(20)),
            }
        }
        Ok(back)
    }

    /// Sends bytes and expects them back.
    pub(crate) fn echo(&mut self, data: &[u8]) -> io::Result<()> {
        self.send(data)?;
        let back = self.receive(data.len())?;
        assert_eq!(back, data, "the echo differs");
        Ok(())
    }

    /// Puts our direction on the victim's RMB.
    pub(crate) fn go_rmb(&mut self) {
        // The victim agrees in its first managed read.
        self.echo(b"evidence").expect("echo");
        until("the victim's agreement", || {
            (self.inbound().rx.flags.load(SeqCst) & RX_READY != 0).then_some(())
        });
        let dir = self.inbound();
        dir.tx.prod.store(self.sent, SeqCst);
        dir.log[self.switches as usize % LOG].store(self.sent, SeqCst);
        self.switches += 1;
        self.inbound().tx.switches.store(self.switches, SeqCst);
        self.tell();
    }

    /// Puts our direction back on TCP.
    pub(crate) fn go_tcp(&mut self) {
        self.inbound().log[self.switches as usize % LOG].store(self.sent, SeqCst);
        self.switches += 1;
        self.inbound().tx.switches.store(self.switches, SeqCst);
        self.tell();
    }

    /// Lets the victim put its direction on our RMB, which it does when it sends next.
    pub(crate) fn invite(&mut self) {
        self.outbound().rx.cons.store(self.got, SeqCst);
        self.outbound().rx.flags.fetch_or(RX_READY, SeqCst);
        self.echo(b"come").expect("echo");
        assert_eq!(
            self.outbound().tx.switches.load(SeqCst),
            1,
            "the victim stays on TCP"
        );
    }

    /// The link is gone: what we send goes over TCP, as the victim expects.
    pub(crate) fn link_gone(&mut self) {
        if self.switches & 1 == 1 {
            self.go_tcp();
        }
    }

    /// Whether the victim has ended the TCP connection. Drops what it sent before.
    pub(crate) fn ended(&self) -> bool {
        let mut buf = [0u8; 4096];
        loop {
            match (&self.tcp).read(&mut buf) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(e) => return e.kind() != io::ErrorKind::WouldBlock,
            }
        }
    }

    /// Closes the TCP connection by a reset; the link and its memory stay.
    pub(crate) fn reset(&self) {
        let s = socket2::SockRef::from(&self.tcp);
        let _ = s.set_linger(Some(Duration::ZERO));
        // SO_LINGER acts on close, and the socket closes with `self`: connecting to nowhere resets now.
        // SAFETY: an all-zero address of family AF_UNSPEC is valid.
        unsafe {
            let a: libc::sockaddr = std::mem::zeroed();
            libc::connect(self.tcp.as_raw_fd(), &a, size_of_val(&a) as u32);
        }
    }
}
