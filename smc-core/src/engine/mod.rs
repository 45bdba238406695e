//! The engine: one background thread a process, started when the first connection proves worth it.
//!
//! It publishes and finds endpoints, opens links, answers peers and `smctl`, and cleans up after the
//! dead. It is never on the data path of a busy connection and blocks when nothing is due.
//!
//! - this file: what the rest of the core may ask of the engine, from any thread;
//! - `run`: the thread and its loop; `peer`: a link's state; `link`: links' lives; `open`: connections on
//!   them; `idle`: those that give their buffers back; `senders`: those that wait for room; `ipc`: links' sockets;
//!   `handshake`, `machine`, `tasks`, `groups`, `rdma`, `device`, `parting`: SMC-R with other hosts; `status`: the
//!   answer to `smctl status`.

mod connect;
mod device;
mod groups;
mod handshake;
mod idle;
mod ipc;
mod link;
mod machine;
mod open;
mod outbox;
mod parting;
mod peer;
mod rdma;
mod run;
mod senders;
mod status;
mod tasks;

use core::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, fence};

use crate::negotiate::{Directory, Endpoint, Message, NodeFiles, NodeId, RuntimeDir};
use crate::node::{self, Link};
use crate::observe::{Counters, Reason};
use crate::policy::Upgrade;
use crate::stream::{self, Sock};
use crate::sys;

/// Counters of this node.
pub static COUNTERS: Counters = Counters::new();
/// What of [`COUNTERS`] is in the directory's totals.
static ADDED: Counters = Counters::new();

/// Publish this connection.
const WORK_CANDIDATE: u32 = 1;
/// Recalled bytes wait for room in the TCP socket.
const WORK_WRITABLE: u32 = 2;
/// The ring is too full for its sender.
const WORK_FULL: u32 = 32;

const IDLE: u32 = 0;
const RUNNING: u32 = 1;
/// Could not start; everything stays TCP.
const OFF: u32 = 2;

/// How long a program thread waits for the engine to come up, which takes about a millisecond.
const START_NS: u64 = 1_000_000_000;

static STATE: AtomicU32 = AtomicU32::new(IDLE);
static QUEUE: AtomicU32 = AtomicU32::new(0);
static SPIN_NS: AtomicU32 = AtomicU32::new(50_000);
static AFTER_OPS: AtomicU32 = AtomicU32::new(0);
static AFTER_BYTES: AtomicU64 = AtomicU64::new(0);
static TICKET: AtomicU32 = AtomicU32::new(0);

/// What other threads need of the engine's resources; leaked once made.
struct Shared {
    dir: RuntimeDir,
    directory: Directory,
    files: NodeFiles,
    id: NodeId,
    pid: u32,
}

static SHARED: AtomicPtr<Shared> = AtomicPtr::new(core::ptr::null_mut());

fn shared() -> Option<&'static Shared> {
    // SAFETY: null or a leaked box.
    unsafe { SHARED.load(Acquire).as_ref() }
}

/// Longest spin of a waiting call, ns.
#[inline]
pub fn spin_ns() -> u64 {
    u64::from(SPIN_NS.load(Relaxed))
}

/// Calls and bytes after which a new connection becomes a candidate.
pub fn thresholds() -> (u32, u64) {
    let ops = AFTER_OPS.load(Relaxed);
    if ops != 0 {
        return (ops, AFTER_BYTES.load(Relaxed));
    }
    let (ops, bytes) = match Upgrade::from_env() {
        Upgrade::Default => (16, 32 << 10),
        Upgrade::Eager => (1, 1),
        Upgrade::Never => (u32::MAX, u64::MAX),
    };
    AFTER_BYTES.store(bytes, Relaxed);
    AFTER_OPS.store(ops, Relaxed);
    (ops, bytes)
}

/// A connection has proved worth an upgrade: publish it. Starts the engine if need be.
pub fn candidate(s: &Sock) {
    match STATE.load(Acquire) {
        OFF => return,
        IDLE => run::start(),
        _ => {}
    }
    push(s, WORK_CANDIDATE);
}

/// The engine shall send recalled bytes as the TCP socket takes them.
pub fn want_writable(s: &Sock) {
    push(s, WORK_WRITABLE);
}

/// The engine shall see whether the ring that `s` writes to stays full.
pub fn watch_full(s: &Sock) {
    push(s, WORK_FULL);
}

fn push(s: &Sock, work: u32) {
    if s.work.fetch_or(work, SeqCst) != 0 {
        return;
    }
    let me = s.index.load(Relaxed) + 1;
    let mut head = QUEUE.load(Relaxed);
    loop {
        s.work_next.store(head, Relaxed);
        match QUEUE.compare_exchange_weak(head, me, SeqCst, Relaxed) {
            Ok(_) => break,
            Err(h) => head = h,
        }
    }
    fence(SeqCst);
    node::ring_own(node::ENGINE_BELL);
}

/// The stream object may be reused: nothing of the engine's refers to it any more, or it does so by
/// index and generation.
pub fn forget(s: &Sock) {
    // A stream still in the work queue keeps its place there; its work finds it free or reused
    // and checks everything anew.
    if s.work.fetch_or(WORK_FREE, SeqCst) == 0 {
        s.work.store(0, SeqCst);
        stream::POOL.free(s.index.load(Relaxed));
    }
}

/// Return the stream object to its pool.
const WORK_FREE: u32 = 4;

/// Takes a published endpoint back.
pub fn withdraw(s: &Sock) {
    if let (Some(e), Some(sh)) = (s.take_entry(), shared()) {
        sh.directory.withdraw(e);
    }
}

/// A connection has left its slot of `link`. Any thread, under its direction locks.
pub fn slot_released(link: &Link) {
    if link.used.fetch_sub(1, SeqCst) == 1 || link.limbo() {
        // The engine gives an idle link up after a while.
        node::call_engine();
    }
}

/// Asks the sender of the direction we receive on `slot` to take back what lies in the ring from stream
/// offset `at` on. Returns a ticket; the answer stores it in the asking stream.
pub fn recall(asks: &Sock, link: &'static Link, slot: u32, at: u64) -> u32 {
    let ticket = TICKET.fetch_add(1, SeqCst).wrapping_add(1).max(1);
    // SAFETY: null or an object of the type-stable pool.
    if let Some(twin) = unsafe { link.twin.load(Acquire).as_ref() } {
        // Both ends are in this process: the engine may be the one that asks.
        if let Some(s) = twin.sock(slot) {
            s.recalled(at);
        }
        asks.rx.recall_done.store(ticket, SeqCst);
        return ticket;
    }
    let m = Message::Recall {
        slot,
        generation: ticket,
        at,
    };
    if ipc::send(link.sock_fd.load(Relaxed), &m, &[]).is_err() {
        asks.rx.recall_done.store(ticket, SeqCst);
    }
    ticket
}

/// Negotiate SMC-R.
const WORK_NEGOTIATE: u32 = 8;
/// Give the negotiation up.
const WORK_DECLINE: u32 = 16;

/// Both ends have sent the SMC option: the connection is in limbo until the engine has negotiated SMC-R. Its bytes
/// go nowhere before.
pub fn negotiate(s: &'static Sock) {
    if STATE.load(Acquire) == IDLE {
        run::start();
    }
    await_start();
    let obstacle = match node::limbo() {
        Err(_) => Reason::NoMemory,
        Ok(limbo) if !s.enter_limbo(limbo) => Reason::Closed,
        Ok(_) if STATE.load(Acquire) == OFF => Reason::NoThread,
        Ok(_) => return push(s, WORK_NEGOTIATE),
    };
    // Nobody here can speak CLC, and nothing else may come first.
    s.note(obstacle);
    s.leave_limbo(Some(sys::Errno::ECONNRESET));
}

/// The process exits: link groups without connections are to be ended.
static ENDING: AtomicBool = AtomicBool::new(false);

/// Has link groups that carry nothing ended, as the process exits.
pub fn end_groups() {
    ENDING.store(true, SeqCst);
    node::call_engine();
}

/// Waits until the engine that was started has its bells: an epoll set could not serve the connection without.
fn await_start() {
    let until = sys::now_ns() + START_NS;
    while STATE.load(Acquire) == RUNNING && shared().is_none() && sys::now_ns() < until {
        sys::sleep_us(50);
    }
}

/// Asks the engine to give the negotiation up, in favour of TCP.
pub fn decline(s: &Sock) {
    push(s, WORK_DECLINE);
}

/// Asks the receiver of what `s` sends to recall what lies in the ring.
pub fn ask_recall(s: &Sock) {
    let Some((link, slot)) = s.place() else {
        return;
    };
    // SAFETY: null or an object of the type-stable pool.
    let Some(twin) = (unsafe { link.twin.load(Acquire).as_ref() }) else {
        let m = Message::Downgrade {
            slot,
            generation: 0,
            pin: 0,
        };
        let _ = ipc::send(link.sock_fd.load(Relaxed), &m, &[]);
        return;
    };
    // Both ends are in this process: the engine may be the one that asks.
    if let Some(other) = twin.sock(slot) {
        other.downgrade_rx().finish();
    }
}

/// Tells all peers of a new bell. A peer that hears of it late rings the engine's instead.
pub fn announce_bell(b: u32) {
    let Some(fd) = node::bell_fd(b) else { return };
    node::each_link(|l| {
        if !l.is_dead() {
            let _ = ipc::send(
                l.sock_fd.load(Relaxed),
                &Message::Bell { index: b as u16 },
                &[fd],
            );
        }
    });
}

/// First use, in this process, of a socket that came from another: if that one has it upgraded, it
/// is asked to go back to TCP for good.
pub fn claim_end(s: &Sock) {
    let Ok(endpoint) = Endpoint::of_socket(s.fd.load(Relaxed)) else {
        return;
    };
    let opened;
    let (dir, directory, id) = match shared() {
        Some(sh) => (&sh.dir, &sh.directory, sh.id),
        None => {
            let made = crate::fds::make_private(|_| {
                let dir = RuntimeDir::open().ok()?;
                let directory = Directory::open(&dir).ok()?;
                Some((dir, directory, NodeId::random().ok()?))
            });
            let Some((dir, directory, id)) = made else {
                return;
            };
            opened = (dir, directory);
            (&opened.0, &opened.1, id)
        }
    };
    let Some(found) = directory.find_same(&endpoint, id) else {
        return;
    };
    s.pin(Reason::SharedEnd);
    let Ok(path) = dir.sock_path(found.node) else {
        return;
    };
    let Ok(fd) = ipc::connect(&path) else {
        if !dir.is_alive(found.node) {
            directory.clear_node(found.node);
        }
        return;
    };
    let m = Message::PinEnd {
        endpoint,
        reason: Reason::SharedEnd.code(),
    };
    if ipc::send(fd, &m, &[]).is_ok() {
        // The answer, or the owner's death.
        let mut p = [libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        }];
        // SAFETY: one writable pollfd.
        let _ = unsafe { syscalls::syscall!(syscalls::Sysno::poll, p.as_mut_ptr(), 1, 5000) };
    }
    crate::fds::close_private(fd);
}

/// The engine is to end, or has.
static END: AtomicBool = AtomicBool::new(false);
/// Thread id of the engine, 0 until it runs.
static THREAD: AtomicU32 = AtomicU32::new(0);

/// Ends the engine, if there is one, and has none started any more. No connection needs it.
pub fn end() {
    let idle = STATE.compare_exchange(IDLE, OFF, SeqCst, SeqCst);
    if idle.is_ok() {
        return;
    }
    END.store(true, SeqCst);
    let until = sys::now_ns() + START_NS;
    loop {
        fence(SeqCst);
        node::ring_own(node::ENGINE_BELL);
        let thread = THREAD.load(SeqCst);
        if STATE.load(SeqCst) == OFF && (thread == 0 || !sys::thread_alive(thread))
            || sys::now_ns() > until
        {
            return;
        }
        sys::sleep_us(50);
    }
}

/// Removes the node's files, and adds up what it has counted: the process exits.
pub fn exiting() {
    if let Some(sh) = shared()
        && sh.pid == sys::getpid()
    {
        COUNTERS.add_to(sh.directory.totals(), &ADDED);
        sh.files.remove();
    }
}

/// In the child of a fork: there is no engine thread here.
pub fn after_fork_child() {
    if STATE.load(Relaxed) == RUNNING {
        STATE.store(IDLE, Relaxed);
    }
    THREAD.store(0, Relaxed);
    crate::negotiate::remote::after_fork_child();
    connect::after_fork_child();
    crate::ring::budget::after_fork_child();
    SHARED.store(core::ptr::null_mut(), Relaxed);
    QUEUE.store(0, Relaxed);
    COUNTERS.reset();
    ADDED.reset();
}
