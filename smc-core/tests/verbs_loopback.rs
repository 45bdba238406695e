//! Two queue pairs on one RDMA device, connected to each other through its own address: everything that
//! SMC-R links do with verbs.
//!
//! It needs a RoCE device (soft-RoCE is enough) that it may use, and is skipped with a message where there is none. With
//! `XSMC_NEED_RDMA=1` in the environment that is a failure, and a test may change network addresses. In a guest:
//! `scripts/lab run -- "XSMC_NEED_RDMA=1 target/debug/deps/verbs_loopback-… --test-threads=1" -- true`.

use smc_core::fabric::verbs::{
    Access, AsyncEvent, Choice, Context, Device, Event, Failure, MESSAGE_MAX, MESSAGES, Path,
    PostError, ProtectionDomain, Queue, QueuePair, RECEIVE_DEPTH, Region, SEND_DEPTH, Survey, Wake,
    Write,
};
use smc_core::wire::Mtu;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};
use std::time::{Duration, Instant};

const RMB: usize = 1 << 20;
const LIMIT: Duration = Duration::from_secs(20);
const PSN: [u32; 2] = [0x00_1234, 0xff_fff0];

/// Memory that a device writes: only atomics look at it.
struct Memory {
    // Before the bytes it describes, so that it is dropped first.
    region: Region,
    bytes: Box<[AtomicU8]>,
}

impl Memory {
    fn new(domain: &Arc<ProtectionDomain>, len: usize, access: Access) -> Memory {
        let bytes: Box<[AtomicU8]> = (0..len).map(|_| AtomicU8::new(0)).collect();
        let start = NonNull::from(&bytes[0]).cast();
        // SAFETY: the box keeps its place until after the region is dropped; all access is atomic.
        let region = unsafe { Region::register(domain, start, len, access) }.unwrap();
        Memory { region, bytes }
    }

    fn fill(&self, byte: impl Fn(usize) -> u8) {
        for (i, place) in self.bytes.iter().enumerate() {
            place.store(byte(i), Relaxed);
        }
    }

    fn at(&self, i: usize) -> u8 {
        self.bytes[i].load(Relaxed)
    }
}

/// One end of a link, with its own queue.
struct End {
    queue_pair: QueuePair,
    queue: Arc<Queue>,
}

/// What an end was told, with messages copied.
#[derive(Debug, PartialEq)]
enum News {
    Received(Vec<u8>),
    Sent(u32),
    Written(u32),
    Immediate(u32, u32),
    Failed(Failure, u32),
}

impl End {
    fn new(domain: &Arc<ProtectionDomain>, context: &Arc<Context>) -> End {
        let queue = Queue::new(context, SEND_DEPTH + RECEIVE_DEPTH).unwrap();
        let queue_pair = QueuePair::new(domain, &queue, &queue).unwrap();
        End { queue_pair, queue }
    }

    fn connect(&self, choice: &Choice, mtu: Mtu, own_psn: u32, peer: u32, peer_psn: u32) {
        let path = Path {
            port: choice.port,
            gid_index: choice.gid_index,
            hop_limit: 1,
            mtu,
            peer_gid: choice.gid,
            peer_number: peer,
            peer_psn,
        };
        self.queue_pair.to_init(choice.port).unwrap();
        self.queue_pair.to_rtr(&path).unwrap();
        self.queue_pair.post_receives().unwrap();
        self.queue_pair.to_rts(own_psn).unwrap();
    }

    fn poll(&self) -> Vec<News> {
        let mut news = Vec::new();
        let each = |completion| match self.queue_pair.complete(completion) {
            Some(Event::Received(message)) => news.push(News::Received(message.bytes().to_vec())),
            Some(Event::Sent(token)) => news.push(News::Sent(token)),
            Some(Event::Written(token)) => news.push(News::Written(token)),
            Some(Event::Immediate { data, length }) => news.push(News::Immediate(data, length)),
            Some(Event::Failed(failure, token)) => news.push(News::Failed(failure, token)),
            None => {}
        };
        self.queue.poll(each).unwrap();
        news
    }

    /// Polls until there is news.
    fn next(&self) -> Vec<News> {
        let end = Instant::now() + LIMIT;
        loop {
            let news = self.poll();
            if !news.is_empty() {
                return news;
            }
            assert!(Instant::now() < end, "no completion");
            // On one processor soft-RoCE's worker needs it.
            std::thread::yield_now();
        }
    }

    /// Sleeps on the channel until there is news, in the order that misses none.
    fn wait(&self, wake: Wake) -> Vec<News> {
        self.queue.arm(wake).unwrap();
        let news = self.poll();
        if !news.is_empty() {
            return news;
        }
        assert!(readable(self.queue.fd(), LIMIT), "no event");
        assert_eq!(self.queue.clear_events(), Ok(1));
        assert!(!readable(self.queue.fd(), Duration::ZERO), "still readable");
        self.poll()
    }

    /// Sends until the queue takes it.
    fn send(&self, writes: &[Write<'_>], message: &[u8], token: u32) {
        self.queue_pair.send(writes, message, token).unwrap();
    }
}

fn readable(fd: i32, limit: Duration) -> bool {
    let mut poll = libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one writable pollfd.
    unsafe { libc::poll(&mut poll, 1, limit.as_millis() as i32) == 1 }
}

/// A usable device, or why there is none.
fn device() -> Result<(Arc<Context>, Choice), String> {
    let survey = Survey::take();
    if let Some(why) = &survey.unusable {
        return Err(why.to_string());
    }
    let entries = |device: &Device| {
        let gids = device.ports.iter().flat_map(|port| &port.gids);
        gids.map(|entry| entry.gid.ip()).collect::<Vec<_>>()
    };
    let mut why = String::new();
    for ip in survey
        .devices
        .iter()
        .flat_map(entries)
        .filter(|ip| ip.is_ipv4())
    {
        match survey.choose(ip, None) {
            Ok(choice) => match Context::open(&choice.device) {
                Ok(context) => return Ok((context, choice)),
                Err(e) => why = format!("{}: {e}", choice.device),
            },
            Err(e) => why = e.to_string(),
        }
    }
    Err(format!(
        "no RoCE device with an IPv4 address is usable: {why}"
    ))
}

struct Link {
    choice: Choice,
    context: Arc<Context>,
    domain: Arc<ProtectionDomain>,
    a: End,
    b: End,
}

impl Link {
    fn new() -> Option<Link> {
        let (context, choice) = match device() {
            Ok(found) => found,
            Err(why) => {
                assert!(std::env::var_os("XSMC_NEED_RDMA").is_none(), "{why}");
                println!("skipped: {why}");
                return None;
            }
        };
        let domain = ProtectionDomain::new(&context).unwrap();
        let (a, b) = (End::new(&domain, &context), End::new(&domain, &context));
        let link = Link {
            choice,
            context,
            domain,
            a,
            b,
        };
        link.connect();
        Some(link)
    }

    fn connect(&self) {
        let port = self.context.port(self.choice.port).unwrap();
        assert!(port.active);
        let gid = self.context.gid(self.choice.port, self.choice.gid_index);
        assert_eq!(gid.unwrap(), self.choice.gid);
        let (a, b) = (&self.a.queue_pair, &self.b.queue_pair);
        self.a
            .connect(&self.choice, port.mtu, PSN[0], b.number(), PSN[1]);
        self.b
            .connect(&self.choice, port.mtu, PSN[1], a.number(), PSN[0]);
    }
}

#[test]
fn messages_arrive_with_events() {
    let Some(link) = Link::new() else { return };
    let message: [u8; 44] = std::array::from_fn(|i| i as u8);
    link.b.queue.arm(Wake::Solicited).unwrap();
    link.a.send(&[], &message, 7);
    assert!(readable(link.b.queue.fd(), LIMIT), "no event");
    assert_eq!(link.b.queue.clear_events(), Ok(1));
    assert_eq!(link.b.next(), [News::Received(message.to_vec())]);
    assert_eq!(link.a.next(), [News::Sent(7)]);
    assert_eq!(link.a.queue_pair.outstanding(), 0);
    // The longest message, the other way.
    let long: Vec<u8> = (0..MESSAGE_MAX).map(|i| (i % 251) as u8).collect();
    link.b.send(&[], &long, 8);
    assert_eq!(link.a.wait(Wake::All), [News::Received(long)]);
    assert_eq!(link.b.wait(Wake::All), [News::Sent(8)]);
}

#[test]
fn receives_are_reposted() {
    let Some(link) = Link::new() else { return };
    for token in 0..4 * RECEIVE_DEPTH {
        link.a.send(&[], &token.to_be_bytes(), token);
        let received = News::Received(token.to_be_bytes().to_vec());
        assert_eq!(link.b.next(), [received]);
        assert_eq!(link.a.next(), [News::Sent(token)]);
    }
}

#[test]
fn messages_in_flight_are_bounded() {
    let Some(link) = Link::new() else { return };
    let mut posted = 0;
    while link.a.queue_pair.send(&[], &[0; 44], posted) != Err(PostError::Full) {
        posted += 1;
        assert!(posted <= MESSAGES + 1);
    }
    assert_eq!(posted, MESSAGES + 1);
    assert_eq!(link.a.queue_pair.outstanding(), posted);
    let mut sent = Vec::new();
    while sent.len() < posted as usize {
        sent.extend(link.a.next());
    }
    assert_eq!(sent, (0..posted).map(News::Sent).collect::<Vec<_>>());
    link.a.send(&[], &[0; 44], posted);
}

#[test]
fn threads_share_a_queue_pair() {
    const THREADS: u32 = 4;
    const EACH: u32 = 200;
    let Some(link) = Link::new() else { return };
    let all: Vec<u32> = (0..THREADS * EACH).collect();
    std::thread::scope(|scope| {
        for own in all.chunks(EACH as usize) {
            let a = &link.a.queue_pair;
            scope.spawn(move || {
                for token in own {
                    while a.send(&[], &token.to_be_bytes(), *token) == Err(PostError::Full) {
                        std::thread::yield_now();
                    }
                }
            });
        }
        let (mut sent, mut received) = (Vec::new(), Vec::new());
        let end = Instant::now() + LIMIT;
        while sent.len() < all.len() || received.len() < all.len() {
            assert!(Instant::now() < end, "{} of {}", sent.len(), all.len());
            for news in link.a.poll().into_iter().chain(link.b.poll()) {
                match news {
                    News::Sent(token) => sent.push(token),
                    News::Received(bytes) => {
                        received.push(u32::from_be_bytes(bytes.try_into().unwrap()));
                    }
                    other => panic!("{other:?}"),
                }
            }
            std::thread::yield_now();
        }
        assert_eq!(sent, received, "completed in the order of arrival");
        sent.sort();
        assert_eq!(sent, all);
    });
    assert_eq!(link.a.queue_pair.outstanding(), 0);
}

#[test]
fn immediate_data_comes_with_a_write() {
    let Some(link) = Link::new() else { return };
    let source = Memory::new(&link.domain, 4096, Access::Local);
    let target = Memory::new(&link.domain, 4096, Access::Remote);
    source.fill(|i| (i % 251) as u8);
    // More often than there are receives, small (inline) and large.
    for n in 0..2 * RECEIVE_DEPTH {
        let length = if n % 2 == 0 { 64 } else { 3000 };
        let write = Write {
            local: &[source.region.piece(5, length).unwrap()],
            address: target.region.address() + 1,
            rkey: target.region.rkey(),
        };
        let data = 0x8000_0000 | n;
        // Unsignalled ones complete with the next that isn't.
        let signal = n % 4 == 3;
        let posted = link.a.queue_pair.write_immediate(write, data, n, signal);
        posted.unwrap();
        let came = [News::Immediate(data, length as u32)];
        // By an event once; later ones may come before the queue is armed.
        if n == 0 {
            assert_eq!(link.b.wait(Wake::Solicited), came);
        } else {
            assert_eq!(link.b.next(), came);
        }
        if signal {
            assert_eq!(link.a.next(), [News::Written(n)]);
        }
        assert_eq!(target.at(1), 5);
        assert_eq!(target.at(length), ((4 + length) % 251) as u8);
    }
    assert_eq!(link.a.queue_pair.outstanding(), 0);
}

#[test]
fn writes_wrap_and_are_there_before_their_message() {
    let Some(link) = Link::new() else { return };
    let source = Memory::new(&link.domain, RMB, Access::Local);
    let target = Memory::new(&link.domain, RMB, Access::Remote);
    source.fill(|i| (i % 251) as u8);
    // From the last 64 KiB of the ring on; and the source wraps elsewhere.
    let (start, wrap) = (RMB - 65536, 12345);
    let (first, rest) = (RMB - start, start);
    let pieces = [
        source.region.piece(wrap, first).unwrap(),
        source
            .region
            .piece(wrap + first, RMB - wrap - first)
            .unwrap(),
        source.region.piece(0, rest - (RMB - wrap - first)).unwrap(),
    ];
    let writes = [
        Write {
            local: &pieces[..1],
            address: target.region.address() + start as u64,
            rkey: target.region.rkey(),
        },
        Write {
            local: &pieces[1..],
            address: target.region.address(),
            rkey: target.region.rkey(),
        },
    ];
    link.a.send(&writes, &[0xfe; 44], 1);
    assert_eq!(link.a.queue_pair.outstanding(), 3);
    assert_eq!(
        link.b.wait(Wake::Solicited),
        [News::Received(vec![0xfe; 44])]
    );
    for i in 0..RMB {
        let expected = source.at((wrap + i) % RMB);
        assert_eq!(target.at((start + i) % RMB), expected, "at {i}");
    }
    assert_eq!(link.a.next(), [News::Sent(1)]);
    assert_eq!(link.a.queue_pair.outstanding(), 0);
}

#[test]
fn small_writes_go_inline_and_unsignalled_ones_are_freed() {
    let Some(link) = Link::new() else { return };
    let source = Memory::new(&link.domain, 4096, Access::Local);
    let target = Memory::new(&link.domain, 4096, Access::Remote);
    let inline = link.a.queue_pair.inline_max() as usize;
    println!("{}: {inline} bytes inline", link.context.name());
    let mut written = 0;
    // Several times what the send queue holds, without asking for a completion.
    for i in 0..4 * SEND_DEPTH as usize {
        source.bytes[0].store(i as u8, Relaxed);
        let len = if inline > 0 { 1 } else { 0 };
        let pieces = [source.region.piece(0, len).unwrap()];
        let write = Write {
            local: &pieces,
            address: target.region.address() + i as u64,
            rkey: target.region.rkey(),
        };
        while link.a.queue_pair.write(&[write], 9, false) == Err(PostError::Full) {
            written += link.a.next().len();
        }
        // The inline copy was made: this must not reach the peer.
        source.bytes[0].store(0xaa, Relaxed);
    }
    // Without pieces: a probe.
    let probe = Write {
        local: &[],
        address: target.region.address(),
        rkey: target.region.rkey(),
    };
    while link.a.queue_pair.write(&[probe], 10, true) == Err(PostError::Full) {
        written += link.a.next().len();
    }
    let mut news = Vec::new();
    while !news.contains(&News::Written(10)) {
        news.extend(link.a.next());
    }
    assert!(written > 0, "the queue was never full");
    assert_eq!(link.a.queue_pair.outstanding(), 0);
    if inline > 0 {
        for i in 0..4 * SEND_DEPTH as usize {
            assert_eq!(target.at(i), i as u8);
        }
    }
}

#[test]
fn a_wrong_key_ends_both_ends_and_a_reset_revives_them() {
    let Some(link) = Link::new() else { return };
    let source = Memory::new(&link.domain, 4096, Access::Local);
    let target = Memory::new(&link.domain, 4096, Access::Remote);
    let pieces = [source.region.piece(0, 4096).unwrap()];
    let write = Write {
        local: &pieces,
        // One byte beyond its end.
        address: target.region.address() + 1,
        rkey: target.region.rkey(),
    };
    link.a.send(&[write], &[0xfe; 44], 3);
    let mut news = link.a.next();
    while !news.contains(&News::Failed(Failure::Flushed, 3)) {
        news.extend(link.a.next());
    }
    assert_eq!(news[0], News::Failed(Failure::RemoteAccess, 3), "{news:?}");
    assert_eq!(target.at(4095), 0);
    // The rest of a's receives is flushed; b's device says so by an event.
    while news.len() < 2 + RECEIVE_DEPTH as usize {
        news.extend(link.a.next());
    }
    let flushed = |n: &News| matches!(n, News::Failed(Failure::Flushed, 0));
    assert_eq!(
        news.iter().filter(|n| flushed(n)).count(),
        RECEIVE_DEPTH as usize
    );
    assert_eq!(link.a.queue_pair.outstanding(), 0);
    // The other end, told to stop, gives back all its receives, too.
    link.b.queue_pair.to_error().unwrap();
    let mut news = Vec::new();
    while news.len() < RECEIVE_DEPTH as usize {
        news.extend(link.b.next());
    }
    assert!(
        news.iter().all(|n| matches!(n, News::Failed(_, 0))),
        "{news:?}"
    );

    for end in [&link.a, &link.b] {
        end.queue_pair.to_reset().unwrap();
    }
    link.connect();
    link.a.send(&[], &[1; 44], 4);
    assert_eq!(link.b.next(), [News::Received(vec![1; 44])]);
    assert_eq!(link.a.next(), [News::Sent(4)]);
}

#[test]
fn a_change_of_address_is_an_event() {
    let Some(link) = Link::new() else { return };
    while link.context.next_event().unwrap().is_some() {}
    if std::env::var_os("XSMC_NEED_RDMA").is_none() {
        println!("skipped: changes the network; set XSMC_NEED_RDMA=1 where that is welcome");
        return;
    }
    for change in ["add", "del"] {
        let arguments = [
            "address",
            change,
            "192.0.2.1/32",
            "dev",
            &link.choice.netdev,
        ];
        let done = std::process::Command::new("ip").args(arguments).status();
        assert!(done.unwrap().success());
        assert!(readable(link.context.async_fd(), LIMIT), "no event");
        let event = link.context.next_event();
        assert_eq!(event, Ok(Some(AsyncEvent::GidChange(link.choice.port))));
    }
}

#[test]
fn a_child_that_drops_its_copies_does_not_disturb_the_parent() {
    let Some(link) = Link::new() else { return };
    // SAFETY: the child only drops the objects and leaves.
    let child = unsafe { libc::fork() };
    if child == 0 {
        drop(link);
        // SAFETY: ends the child without running the test harness's handlers.
        unsafe { libc::_exit(0) };
    }
    let mut status = 0;
    // SAFETY: waits for the child, and writes one int.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0);
    // The parent's first touches of all pages that the fork shared.
    for token in 0..2 * RECEIVE_DEPTH {
        link.a.send(&[], &token.to_be_bytes(), token);
        let received = News::Received(token.to_be_bytes().to_vec());
        assert_eq!(link.b.next(), [received]);
        assert_eq!(link.a.next(), [News::Sent(token)]);
    }
}

#[test]
fn bounds_are_checked() {
    let Some(link) = Link::new() else { return };
    let a = &link.a.queue_pair;
    let long = vec![0; MESSAGE_MAX + 1];
    assert_eq!(a.send(&[], &long, 0), Err(PostError::Invalid));
    let memory = Memory::new(&link.domain, 4096, Access::Local);
    assert!(memory.region.piece(4096, 0).is_some());
    assert!(memory.region.piece(4096, 1).is_none());
    assert!(memory.region.piece(usize::MAX, 1).is_none());
    let probe = Write {
        local: &[],
        address: 0,
        rkey: 0,
    };
    assert_eq!(a.write(&[probe; 3], 0, true), Err(PostError::Invalid));
    assert_eq!(a.write(&[], 0, true), Err(PostError::Invalid));
    // A queue has room for the queue pairs that it was made for.
    let queue = Queue::new(&link.context, SEND_DEPTH + RECEIVE_DEPTH).unwrap();
    let first = QueuePair::new(&link.domain, &queue, &queue).unwrap();
    let refused = QueuePair::new(&link.domain, &queue, &queue).err().unwrap();
    assert_eq!(refused.errno, smc_core::sys::Errno::ENOSPC);
    drop(first);
    QueuePair::new(&link.domain, &queue, &queue).unwrap();
    // Out of order: the kernel refuses, and the error says what.
    let error = link.a.queue_pair.to_init(200).unwrap_err();
    assert!(error.to_string().contains("to INIT"), "{error}");
}
