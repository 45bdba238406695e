//! The engine's thread and its loop.

use core::sync::atomic::Ordering::{Relaxed, Release, SeqCst};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

use libc::epoll_event;

use super::peer::{Incoming, Peer};
use super::senders::FullRing;
use super::{
    ADDED, COUNTERS, END, IDLE, OFF, QUEUE, RUNNING, SHARED, STATE, Shared, THREAD, WORK_CANDIDATE,
    WORK_DECLINE, WORK_FREE, WORK_FULL, WORK_NEGOTIATE, WORK_WRITABLE, ipc,
};
use crate::link::table;
use crate::negotiate::{Directory, Endpoint, Found, NodeFiles, NodeId, RuntimeDir, RuntimeError};
use crate::observe::Reason;
use crate::observe::status::LinkGroupStatus;
use crate::policy::{self, Action, Identity, Policy};
use crate::ready;
use crate::ring::budget;
use crate::stream::{self, Downgrade, PLAIN, PUBLISHED, Sock};
use crate::sys::{self, Errno, TcpInfo};
use crate::wire::SystemId;
use crate::{fds, node};

const EV_BELL: u64 = 0;
const EV_LISTENER: u64 = 1;
const EV_PEER: u64 = 1 << 32;
const EV_INCOMING: u64 = 2 << 32;
pub(super) const EV_WRITABLE: u64 = 3 << 32;
/// The TCP socket of a handshake.
pub(super) const EV_CLC: u64 = 4 << 32;
/// The completion channel of a link group.
pub(super) const EV_CQ: u64 = 5 << 32;
/// The TCP socket of an SMC-R connection.
pub(super) const EV_TCP: u64 = 6 << 32;
/// An RDMA device.
pub(super) const EV_DEVICE: u64 = 7 << 32;

/// Most connections to our socket that have not said yet what they are.
const INCOMING: usize = 64;

/// Starts the thread, once. Failure switches xsmc off for this process.
#[cold]
pub(super) fn start() {
    if STATE
        .compare_exchange(IDLE, RUNNING, SeqCst, Relaxed)
        .is_err()
    {
        return;
    }
    let mut all = core::mem::MaybeUninit::<libc::sigset_t>::uninit();
    let mut old = core::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // The new thread inherits the mask: the program's signals are not for it.
    // SAFETY: sigfillset and pthread_sigmask initialise what they are given.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), old.as_mut_ptr());
    }
    let thread = std::thread::Builder::new()
        .name("xsmc".into())
        .stack_size(256 << 10)
        .spawn(main);
    // SAFETY: `old` was filled in above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, old.as_ptr(), core::ptr::null_mut()) };
    if thread.is_err() {
        off(Reason::NoThread);
    }
}

fn off(r: Reason) {
    COUNTERS.count(r);
    STATE.store(OFF, SeqCst);
    log::warn!("xsmc is off in this process: {}", r.sentence());
}

fn main() {
    crate::observe::log::init();
    THREAD.store(sys::gettid(), SeqCst);
    match Engine::new() {
        Ok(mut e) => {
            e.run();
            e.end();
            // Program threads may still look at what it refers to.
            core::mem::forget(e);
        }
        Err(r) => off(r),
    }
}

/// What follows a downgrade that the engine has started.
pub(super) enum Then {
    /// Nothing.
    Stay,
    /// An answer on this socket: another process of our end waits for it.
    Answer(i32),
    /// The connection leaves its link: it is idle.
    Leave,
}

/// The engine thread's state.
pub(super) struct Engine {
    pub(super) shared: &'static Shared,
    pub(super) policy: Policy,
    pub(super) identity: Identity,
    pub(super) epfd: i32,
    listener: i32,
    pub(super) peers: Vec<Option<Box<Peer>>>,
    pub(super) incoming: Vec<Option<Incoming>>,
    /// Downgrades in progress, and what is to follow.
    pub(super) leaving: Vec<(Downgrade, Then)>,
    /// When to look for idle connections, ns.
    pub(super) idle_look: Option<u64>,
    /// Rings that were too full for their senders.
    pub(super) full_rings: Vec<FullRing>,
    /// Connections in limbo.
    pub(super) handshakes: Vec<Option<Box<super::handshake::Handshake>>>,
    /// Link groups with other hosts.
    pub(super) groups: Vec<Option<Box<super::rdma::LinkGroup>>>,
    /// Those that have ended last.
    pub(super) ended_groups: VecDeque<LinkGroupStatus>,
    /// SMC-R connections whose FIN has come before their end was told.
    pub(super) partings: Vec<super::parting::Parting>,
    /// Open RDMA devices, by index.
    pub(super) devices: Vec<Option<super::device::Device>>,
    /// Our name in CLC: unique to this process.
    pub(super) system_id: SystemId,
    flip_us: u64,
    flips: u64,
    pub(super) started_ms: u64,
    pub(super) page_fd: i32,
}

fn reason_of(e: &RuntimeError) -> Reason {
    log::warn!("runtime directory: {e}");
    Reason::RuntimeDir
}

impl Engine {
    /// Makes everything the engine needs. Its descriptors, the short-lived ones included, must not meet
    /// the program's.
    fn new() -> Result<Engine, Reason> {
        fds::make_private(Engine::build)
    }

    fn build(keep: &dyn Fn(i32) -> i32) -> Result<Engine, Reason> {
        let dir = RuntimeDir::open().map_err(|e| reason_of(&e))?;
        let directory = Directory::open(&dir).map_err(|e| reason_of(&e))?;
        crate::negotiate::runtime::sweep_with(&dir, |id| {
            directory.clear_node(id);
        });
        let id = NodeId::random().map_err(|e| reason_of(&e))?;
        let (files, lock) = NodeFiles::create(&dir, id).map_err(|e| reason_of(&e))?;
        keep(lock);
        let up = || -> sys::Result<(i32, i32, i32)> {
            let (page_fd, bell) = node::create_page(keep)?;
            let ep = keep(sys::epoll_create()?);
            let listener = ipc::listen(files.sock_path(), keep)?;
            watch(ep, bell, libc::EPOLLIN | libc::EPOLLET, EV_BELL)?;
            watch(ep, listener, libc::EPOLLIN, EV_LISTENER)?;
            Ok((page_fd, ep, listener))
        };
        let (page_fd, epfd, listener) = up().map_err(|e| {
            files.remove();
            if matches!(e, Errno::EMFILE | Errno::ENFILE) {
                Reason::NoFd
            } else {
                Reason::NoMemory
            }
        })?;
        let identity = Identity::current();
        let policy = Policy::load().narrow(&identity);
        budget::set_limit(policy.rmb_memory());
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let spin_us = if cores == 1 {
            0
        } else {
            policy.defaults().spin_us
        };
        super::SPIN_NS.store(spin_us * 1000, Relaxed);
        let flip_us = crate::env::get("XSMC_TEST_FLIP_US")
            .and_then(|v| v.to_str()?.parse().ok())
            .unwrap_or(0);
        let shared = Box::leak(Box::new(Shared {
            dir,
            directory,
            files,
            id,
            pid: sys::getpid(),
        }));
        SHARED.store(shared, Release);
        let started_ms = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0, |d| d.as_millis() as u64);
        Ok(Engine {
            shared,
            policy,
            identity,
            epfd,
            listener,
            peers: Vec::new(),
            incoming: Vec::new(),
            leaving: Vec::new(),
            idle_look: None,
            full_rings: Vec::new(),
            handshakes: Vec::new(),
            groups: Vec::new(),
            ended_groups: VecDeque::new(),
            partings: Vec::new(),
            devices: Vec::new(),
            system_id: SystemId(id.get().to_be_bytes()),
            flip_us,
            flips: 0,
            started_ms,
            page_fd,
        })
    }

    fn run(&mut self) {
        let mut evs = [epoll_event { events: 0, u64: 0 }; 64];
        let mut next = None;
        let mut busy = false;
        loop {
            node::engine_about_to_sleep(busy);
            node::dispatch();
            if END.load(SeqCst) {
                node::awake(node::ENGINE_BELL);
                return;
            }
            let polls = table::polls();
            let left = next.map_or(-1, |at: Instant| {
                let left = at.saturating_duration_since(Instant::now());
                i32::try_from(left.as_micros().div_ceil(1000)).unwrap_or(i32::MAX)
            });
            let mut glance = false;
            let timeout = if QUEUE.load(SeqCst) != 0 || node::engine_called() {
                0
            } else if !self.leaving.is_empty() || self.flip_us > 0 {
                1
            } else if (busy || self.unwatched()) && !(0..=table::BUSY_LOOK_MS).contains(&left) {
                glance = true;
                table::BUSY_LOOK_MS
            } else {
                left
            };
            // SAFETY: 64 writable events.
            let n = unsafe {
                syscalls::syscall!(
                    syscalls::Sysno::epoll_pwait,
                    self.epfd,
                    evs.as_mut_ptr(),
                    evs.len(),
                    timeout,
                    0,
                    8
                )
            };
            busy = table::polls() != polls;
            node::awake(node::ENGINE_BELL);
            if glance && n == Ok(0) {
                // It was only to see whether others still look at the completion queues.
                if !busy {
                    self.watch_groups();
                }
                continue;
            }
            node::dispatch();
            let events = &evs[..n.unwrap_or(0)];
            for e in events {
                self.event(e.u64);
            }
            let routed = |e: &epoll_event| e.u64 & !0xffff_ffff == EV_CQ;
            let only_routed = !events.is_empty() && events.iter().all(routed);
            self.work();
            self.leave();
            self.flip();
            if !busy {
                self.watch_groups();
            }
            let (links, rdma) = (self.tend_links(), self.tend_rdma());
            let times = [links, rdma, self.tend_idle(), self.tend_full()];
            let soonest = times.into_iter().flatten().min();
            next = soonest.map(|ms| Instant::now() + Duration::from_millis(ms.max(0) as u64));
            // Turns for arrivals come with each of them; what they count can wait for another, or the exit.
            if !only_routed {
                COUNTERS.add_to(self.shared.directory.totals(), &ADDED);
            }
        }
    }

    /// The process goes on without us: peers and `smctl` must not find it any more.
    fn end(&mut self) {
        COUNTERS.add_to(self.shared.directory.totals(), &ADDED);
        SHARED.store(core::ptr::null_mut(), SeqCst);
        self.shared.files.remove();
        for i in 0..self.peers.len() {
            self.lose(i);
        }
        fds::close_private(self.listener);
        STATE.store(OFF, SeqCst);
        log::debug!("the engine has ended: the process confines itself");
    }

    fn event(&mut self, data: u64) {
        let i = data as u32 as usize;
        match data & !0xffff_ffff {
            EV_PEER => self.peer_readable(i),
            EV_INCOMING => self.incoming_readable(i),
            EV_CLC => self.advance(i),
            EV_CQ => self.completions(i),
            EV_DEVICE => self.device_news(i),
            EV_TCP => self.tcp_changed(i as u32),
            EV_WRITABLE => {
                if let Some(s) = stream::POOL.get(i as u32) {
                    self.send_backlog(s);
                }
            }
            _ if data == EV_LISTENER => self.accept(),
            _ => {}
        }
    }

    fn accept(&mut self) {
        // Not for ever, whoever connects how fast.
        for _ in 0..INCOMING {
            let Ok(fd) = ipc::accept(self.listener) else {
                return;
            };
            self.make_room();
            let i = self
                .incoming
                .iter()
                .position(Option::is_none)
                .unwrap_or_else(|| {
                    self.incoming.push(None);
                    self.incoming.len() - 1
                });
            let since = sys::now_ns();
            self.incoming[i] = Some(Incoming { fd, since });
            if watch(self.epfd, fd, libc::EPOLLIN, EV_INCOMING | i as u64).is_err() {
                self.incoming[i] = None;
                fds::close_private(fd);
            }
        }
    }

    /// Where too many have connected to us without a word, the one that has waited longest has to go.
    fn make_room(&mut self) {
        if self.incoming.iter().flatten().count() < INCOMING {
            return;
        }
        for i in 0..self.incoming.len() {
            self.incoming_readable(i);
        }
        let silent = self.incoming.iter_mut();
        let Some(oldest) = silent
            .filter(|i| i.is_some())
            .min_by_key(|i| i.as_ref().map(|i| i.since))
        else {
            return;
        };
        if let Some(i) = oldest.take() {
            fds::close_private(i.fd);
        }
    }

    /// Has peer `i`'s link socket watched.
    pub(super) fn watch_peer(&self, i: usize, fd: i32) -> sys::Result<()> {
        watch(self.epfd, fd, libc::EPOLLIN, EV_PEER | i as u64)
    }

    fn work(&mut self) {
        let mut head = QUEUE.swap(0, SeqCst);
        while head != 0 {
            let Some(s) = stream::POOL.get(head - 1) else {
                return;
            };
            let index = head - 1;
            head = s.work_next.load(Relaxed);
            let w = s.work.swap(0, SeqCst);
            if w & WORK_FREE != 0 {
                stream::POOL.free(index);
                continue;
            }
            if w & WORK_NEGOTIATE != 0 {
                self.begin_handshake(s);
            }
            if w & WORK_DECLINE != 0 {
                self.decline_handshake(s);
            }
            if w & WORK_CANDIDATE != 0 {
                self.candidate(s);
            }
            if w & WORK_WRITABLE != 0 {
                self.send_backlog(s);
            }
            if w & WORK_FULL != 0 {
                self.watch_full(s);
            }
        }
    }

    /// Publishes a connection and looks for its other end.
    fn candidate(&mut self, s: &'static Sock) {
        let state = s.state.load(SeqCst);
        if state != PLAIN && state != PUBLISHED || s.pinned.load(Relaxed) != 0 {
            return;
        }
        let generation = s.generation.load(Relaxed);
        let asked = s.with_fd(|fd| {
            let endpoint = Endpoint::of_socket(fd)?;
            Ok((endpoint, TcpInfo::of(fd)?.established()))
        });
        let endpoint = match asked {
            Some(Ok((e, true))) => e,
            Some(Err(Errno::EADDRNOTAVAIL | Errno::EAFNOSUPPORT)) => {
                return s.pin(Reason::AddressFamily);
            }
            _ => return,
        };
        let at = policy::Endpoint {
            local: endpoint.local_addr(),
            peer: endpoint.peer_addr(),
            role: s.role(),
        };
        let decision = self.policy.decide(&self.identity, &at);
        if decision.action == Action::Tcp {
            return s.pin(decision.reason.unwrap_or(Reason::PolicyTcp));
        }
        let t = decision.tunables;
        s.set_idle_after(u64::from(t.idle_ms) * 1_000_000);
        if s.ops.load(Relaxed) < t.upgrade_after_ops && s.earned() < t.upgrade_after_bytes {
            s.set_thresholds(t.upgrade_after_ops, t.upgrade_after_bytes);
            return;
        }
        if state == PLAIN && !s.waits_are_seen() {
            // To be seen later, perhaps.
            s.set_thresholds(s.ops.load(Relaxed).saturating_mul(2), u64::MAX);
            return s.note(Reason::UnseenWait);
        }
        if state == PLAIN && !self.publish(s, generation, endpoint) {
            return;
        }
        if self.opening(index_of(s), generation) {
            return;
        }
        match self.shared.directory.find_mirror(&endpoint) {
            Some(found) => match ready::prepare(s) {
                Ok(()) => self.open(s, generation, endpoint, found, t.rmb_size),
                Err(r) => s.note(r),
            },
            // Nobody on this host, and it is known why not with another one, or that the peer has gone back to TCP.
            None if s
                .noted()
                .is_some_and(|r| r.is_not_offered() || r == Reason::PeerRequest) => {}
            None => s.note(Reason::NoPeer),
        }
    }

    /// Puts an endpoint into the directory. False: it does not stay there.
    fn publish(&mut self, s: &'static Sock, generation: u32, endpoint: Endpoint) -> bool {
        let (dir, id) = (&self.shared.directory, self.shared.id);
        let Ok(p) = dir.publish(&endpoint, id, index_of(s), generation) else {
            s.pin(Reason::DirectoryFull);
            return false;
        };
        if !s.published(p.entry, generation) {
            dir.withdraw(p.entry);
            return false;
        }
        COUNTERS.published.fetch_add(1, Relaxed);
        log::debug!(
            "{} -> {}: published",
            endpoint.local_addr(),
            endpoint.peer_addr()
        );
        if let Some(other) = p.duplicate {
            self.pin_elsewhere(other, endpoint);
            s.pin(Reason::SharedEnd);
            self.unpublish(s);
            return false;
        }
        true
    }

    /// Whether a node lives, as far as can be told.
    pub(super) fn alive(&self, node: NodeId) -> bool {
        fds::make_private(|_| self.shared.dir.is_alive(node))
    }

    /// Back to plain TCP, not in the directory.
    pub(super) fn unpublish(&self, s: &Sock) {
        if s.state
            .compare_exchange(PUBLISHED, PLAIN, SeqCst, Relaxed)
            .is_ok()
        {
            super::withdraw(s);
        }
    }

    fn pin_elsewhere(&self, other: Found, endpoint: Endpoint) {
        if let Ok(path) = self.shared.dir.sock_path(other.node)
            && let Ok(fd) = ipc::connect(&path)
        {
            let m = crate::negotiate::Message::PinEnd {
                endpoint,
                reason: Reason::SharedEnd.code(),
            };
            let _ = ipc::send(fd, &m, &[]);
            fds::close_private(fd);
        }
    }

    /// Another process uses an end that is ours: all of it goes back to TCP.
    pub(super) fn pin_end(&mut self, endpoint: Endpoint, reason: Reason, answer: i32) {
        let mut hit = None;
        stream::POOL.each(|_, s| {
            let st = s.state.load(SeqCst);
            if st != stream::FREE
                && st != PLAIN
                && hit.is_none()
                && s.with_fd(Endpoint::of_socket)
                    .is_some_and(|e| e == Ok(endpoint))
            {
                hit = Some(s);
            }
        });
        let Some(s) = hit else {
            answer_pin(answer);
            return;
        };
        self.unpublish(s);
        self.leaving
            .push((s.downgrade(Some(reason)), Then::Answer(answer)));
    }

    fn leave(&mut self) {
        let mut i = 0;
        while i < self.leaving.len() {
            let Some(on_tcp) = self.leaving[i].0.done() else {
                i += 1;
                continue;
            };
            let (d, then) = self.leaving.swap_remove(i);
            match then {
                Then::Stay => d.finish(),
                Then::Answer(fd) => {
                    d.finish();
                    answer_pin(fd);
                }
                Then::Leave => self.rest(d, on_tcp),
            }
        }
    }

    /// The test hook: switches carriers at random moments.
    fn flip(&mut self) {
        if self.flip_us == 0 {
            return;
        }
        for _ in 0..(1000 / self.flip_us).clamp(1, 16) {
            self.flips = self
                .flips
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            let mut managed = Vec::new();
            stream::POOL.each(|_, s| {
                if s.managed() {
                    managed.push(s);
                }
            });
            if managed.is_empty() {
                return;
            }
            let s = managed[(self.flips >> 33) as usize % managed.len()];
            if self.flips >> 60 == 0 && self.leaving.is_empty() {
                self.leaving.push((s.downgrade_here(None), Then::Stay));
            } else {
                s.flip();
            }
        }
    }

    /// Finishes an attachment.
    pub(super) fn attached(&mut self, s: &'static Sock) {
        s.attached();
        self.watch_idle(s);
        if let Some(r) = s.cant_serve() {
            self.leaving.push((s.downgrade_here(Some(r)), Then::Stay));
        }
    }
}

pub(super) fn index_of(s: &Sock) -> u32 {
    s.index.load(Relaxed)
}

fn answer_pin(fd: i32) {
    let done = crate::negotiate::Message::Done {
        slot: 0,
        generation: 0,
        what: 0,
    };
    let _ = ipc::send(fd, &done, &[]);
    fds::close_private(fd);
}

pub(super) fn watch(ep: i32, fd: i32, events: i32, data: u64) -> sys::Result<()> {
    let ev = epoll_event {
        events: events as u32,
        u64: data,
    };
    match sys::epoll_ctl(ep, libc::EPOLL_CTL_ADD, fd, Some(&ev)) {
        Err(Errno::EEXIST) => sys::epoll_ctl(ep, libc::EPOLL_CTL_MOD, fd, Some(&ev)),
        r => r,
    }
}
