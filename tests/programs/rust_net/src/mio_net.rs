//! mio: readiness by edges, on one thread.

use crate::tokio_net::echoes;
use crate::{ANY_PORT, Outcome, bytes, check, check_bytes, report};
use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Registry, Token, Waker};
use std::collections::{HashMap, VecDeque};
use std::io::{self, ErrorKind, Read, Write};
use std::net::Ipv4Addr;
use std::sync::mpsc;
use std::time::{Duration, Instant};

const BOTH: Interest = Interest::READABLE.add(Interest::WRITABLE);
/// How much the server holds of what it hasn't sent back yet.
const HELD: usize = 256 << 10;

/// None if the call would block.
fn now<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
        other => other.map(Some),
    }
}

/// A connection of the server. `anew` counts events, if it is registered anew after each of them.
struct Echo {
    stream: TcpStream,
    held: VecDeque<u8>,
    ended: bool,
    anew: Option<usize>,
}

impl Echo {
    /// Goes on until both directions would block; true once all has gone back.
    fn turn(&mut self) -> io::Result<bool> {
        let (mut buffer, mut moved) = ([0; 30_000], true);
        while std::mem::take(&mut moved) {
            while !self.ended && self.held.len() < HELD {
                let Some(count) = now(self.stream.read(&mut buffer))? else {
                    break;
                };
                self.held.extend(&buffer[..count]);
                (self.ended, moved) = (count == 0, true);
            }
            while !self.held.is_empty() {
                let Some(count) = now(self.stream.write(self.held.as_slices().0))? else {
                    break;
                };
                self.held.drain(..count);
                moved = true;
            }
        }
        Ok(self.ended && self.held.is_empty())
    }

    /// Asks only for what it waits for.
    fn register_anew(&mut self, registry: &Registry, token: Token) -> io::Result<()> {
        let Some(times) = &mut self.anew else {
            return Ok(());
        };
        *times += 1;
        let interest = match (self.held.is_empty(), self.ended || self.held.len() >= HELD) {
            (true, _) => Interest::READABLE,
            (_, true) => Interest::WRITABLE,
            _ => BOTH,
        };
        if *times % 4 != 0 {
            return registry.reregister(&mut self.stream, token, interest);
        }
        registry.deregister(&mut self.stream)?;
        registry.register(&mut self.stream, token, interest)
    }
}

/// On the first port a connection is registered once, on the second after each event.
pub fn serve() -> Outcome {
    let (mut poll, mut events) = (Poll::new()?, Events::with_capacity(64));
    let mut listeners = [
        TcpListener::bind(ANY_PORT.into())?,
        TcpListener::bind(ANY_PORT.into())?,
    ];
    for (number, listener) in listeners.iter_mut().enumerate() {
        poll.registry()
            .register(listener, Token(number), Interest::READABLE)?;
    }
    println!(
        "ports {} {}",
        listeners[0].local_addr()?.port(),
        listeners[1].local_addr()?.port()
    );
    let (mut connections, mut next) = (HashMap::new(), 2);
    loop {
        poll.poll(&mut events, None)?;
        for event in &events {
            let token = event.token();
            if let Some(listener) = listeners.get(token.0) {
                while let Some((mut stream, _)) = now(listener.accept())? {
                    poll.registry().register(&mut stream, Token(next), BOTH)?;
                    let (held, anew) = (VecDeque::new(), (token.0 == 1).then_some(0));
                    connections.insert(
                        Token(next),
                        Echo {
                            stream,
                            held,
                            ended: false,
                            anew,
                        },
                    );
                    next += 1;
                }
            } else if let Some(echo) = connections.get_mut(&token) {
                match echo.turn() {
                    Ok(false) => echo.register_anew(poll.registry(), token)?,
                    _ => drop(connections.remove(&token)),
                }
            }
        }
    }
}

/// A connection of the client, whose answers are checked.
struct Flow {
    poll: Poll,
    stream: TcpStream,
    sent: usize,
    got: usize,
}

impl Flow {
    /// Messages have gone over it, and it is quiet.
    fn new(port: u16) -> Outcome<Self> {
        let (poll, address) = (Poll::new()?, (Ipv4Addr::LOCALHOST, port));
        let mut stream = TcpStream::connect(address.into())?;
        poll.registry().register(&mut stream, Token(0), BOTH)?;
        let mut flow = Self {
            poll,
            stream,
            sent: 0,
            got: 0,
        };
        flow.until(|flow, _| {
            flow.receive()?;
            if flow.got == flow.sent && flow.got < 40_000 {
                flow.send(flow.sent + 1000)?;
            }
            Ok(flow.got == 40_000)
        })?;
        flow.seen()?;
        Ok(flow)
    }

    /// Sends until `end` or until it would block: true if it has come to the end.
    fn send(&mut self, end: usize) -> Outcome<bool> {
        while self.sent < end {
            let data = bytes(1, self.sent, (end - self.sent).min(50_000));
            let Some(count) = now(self.stream.write(&data))? else {
                return Ok(false);
            };
            self.sent += count;
        }
        Ok(true)
    }

    /// Receives until it would block.
    fn receive(&mut self) -> Outcome {
        let mut buffer = [0; 40_000];
        while let Some(count) = now(self.stream.read(&mut buffer))? {
            check(count > 0, || format!("ends after {} bytes", self.got))?;
            check_bytes(&buffer[..count], 1, self.got)?;
            self.got += count;
        }
        Ok(())
    }

    /// Calls `done` with the token of each event, until it is true.
    fn until(&mut self, mut done: impl FnMut(&mut Self, Token) -> Outcome<bool>) -> Outcome {
        let mut events = Events::with_capacity(64);
        loop {
            self.poll.poll(&mut events, Some(Duration::from_secs(20)))?;
            check(!events.is_empty(), || {
                format!("no event after {} bytes", self.got)
            })?;
            for event in &events {
                if done(self, event.token())? {
                    return Ok(());
                }
            }
        }
    }

    /// What shows in a while: readable, writable.
    fn seen(&mut self) -> Outcome<(bool, bool)> {
        let (end, mut seen) = (Instant::now() + Duration::from_millis(300), (false, false));
        let mut events = Events::with_capacity(64);
        while Instant::now() < end {
            self.poll.poll(&mut events, Some(end - Instant::now()))?;
            for event in &events {
                seen = (seen.0 || event.is_readable(), seen.1 || event.is_writable());
            }
        }
        Ok(seen)
    }

    fn expect(&mut self, expected: (bool, bool), when: &str) -> Outcome {
        let seen = self.seen()?;
        check(seen == expected, || {
            format!("{when}: readable, writable {seen:?}")
        })
    }
}

/// An edge shows once, and again when more comes.
fn edges(mut flow: Flow) -> Outcome {
    for (when, more) in [("first", 100), ("unread", 0), ("more", 100)] {
        flow.send(flow.sent + more)?;
        let readable = flow.seen()?.0;
        check(readable == (more > 0), || {
            format!("{when}: readable {readable}")
        })?;
    }
    flow.receive()?;
    check(flow.got == flow.sent, || "not all could be read".into())
}

/// What comes while the socket isn't registered shows when it is again, also in another poll.
fn deregister(mut flow: Flow) -> Outcome {
    for poll in [None, Some(Poll::new()?)] {
        flow.poll.registry().deregister(&mut flow.stream)?;
        flow.send(flow.sent + 100)?;
        flow.expect((false, false), "not registered")?;
        flow.poll = poll.unwrap_or(flow.poll);
        flow.poll
            .registry()
            .register(&mut flow.stream, Token(3), Interest::READABLE)?;
        flow.expect((true, false), "registered to read")?;
        flow.receive()?;
        flow.poll
            .registry()
            .reregister(&mut flow.stream, Token(4), Interest::WRITABLE)?;
        flow.expect((false, true), "registered to write")?;
        check(flow.got == flow.sent, || "not all could be read".into())?;
    }
    Ok(())
}

/// A peer whose answers aren't read holds the writer up, and lets it go on when they are.
fn until_would_block(mut flow: Flow) -> Outcome {
    check(!flow.send(200 << 20)?, || "never blocks".into())?;
    while flow.seen()?.1 {
        check(!flow.send(200 << 20)?, || "never blocks for long".into())?;
    }
    let end = flow.sent + (1 << 20);
    flow.receive()?;
    flow.until(|flow, _| {
        flow.receive()?;
        Ok(flow.send(end)? && flow.got == end)
    })
}

/// Each call of the waker shows, while messages go to and fro.
fn waker(mut flow: Flow) -> Outcome {
    let waker = Waker::new(flow.poll.registry(), Token(1))?;
    let (tell, told) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        (0..200).all(|_| waker.wake().is_ok() && told.recv_timeout(Duration::from_secs(5)).is_ok())
    });
    let (mut wakes, end) = (0, flow.got + 10_000);
    flow.send(flow.sent + 100)?;
    flow.until(|flow, token| {
        if token == Token(1) {
            wakes += 1;
            tell.send(())?;
        } else {
            flow.receive()?;
            flow.send(if flow.got == flow.sent {
                flow.sent + 100
            } else {
                0
            })?;
        }
        Ok(wakes == 200 && flow.got > end)
    })?;
    check(thread.join().is_ok_and(|all| all), || {
        "a call wasn't seen".into()
    })
}

pub async fn cases(once: u16, anew: u16) {
    echoes("once", once).await;
    echoes("anew", anew).await;
    report("edges", Flow::new(once).and_then(edges));
    report("deregister", Flow::new(once).and_then(deregister));
    report(
        "until-would-block",
        Flow::new(once).and_then(until_would_block),
    );
    report("waker", Flow::new(once).and_then(waker));
}
