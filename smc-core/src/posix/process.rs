//! fork, exec and passing descriptors: before another process image can see a stream, the kernel
//! alone must hold it.

use core::mem::size_of;
use core::sync::atomic::Ordering::{Relaxed, SeqCst};

use libc::{cmsghdr, msghdr, pid_t};
use std::sync::Mutex;

use super::option::unknown_options;
use crate::fds::{self, Entry};
use crate::link::table;
use crate::observe::Reason;
use crate::stream::{
    self, Downgrade, F_BROKEN, F_INHERITED, F_NONBLOCK, FREE, MANAGED, PLAIN, Sock,
};
use crate::sys::Errno;
use crate::{engine, lock, node, ready, sys};

/// Downgrades that a failed exec must undo.
static EXEC: Mutex<Vec<Downgrade>> = Mutex::new(Vec::new());

/// Puts every managed connection that `which` picks on TCP, and waits for all of them together. `failed`
/// gets those of which the kernel does not hold the whole stream.
fn downgrade(
    which: impl Fn(&'static Sock) -> bool,
    mut failed: impl FnMut(&Downgrade),
) -> Vec<Downgrade> {
    let mut list = Vec::new();
    stream::POOL.each(|_, s| {
        if s.state.load(SeqCst) == MANAGED && which(s) {
            list.push(s.downgrade(None));
        }
    });
    for d in &list {
        if !d.wait() {
            failed(d);
        }
    }
    list
}

fn finish(list: Vec<Downgrade>) {
    for d in list {
        d.finish();
    }
}

/// Whether any descriptor of the stream survives exec.
fn inheritable(s: &'static Sock) -> bool {
    let mut yes = false;
    fds::each(0, u32::MAX, |fd, e| {
        if matches!(e, Entry::Sock(x) if core::ptr::eq(x, s)) {
            yes |= survives_exec(fd);
        }
    });
    yes
}

/// In the child of a fork, of which the kernel doesn't hold the whole stream: who gets the connection from here must take it
/// neither for a silent one nor read a stream with a hole, so it finds a socket that is not connected.
fn unplug_broken(which: impl Fn(i32) -> bool) {
    fds::each(0, u32::MAX, |fd, e| {
        if let Entry::Sock(s) = e
            && s.has(F_BROKEN)
            && s.state.load(SeqCst) == PLAIN
            && which(fd)
        {
            let _ = sys::unplug(fd);
        }
    });
}

/// Whether a descriptor survives exec.
fn survives_exec(fd: i32) -> bool {
    sys::fcntl(fd, libc::F_GETFD, 0).is_ok_and(|f| f & libc::FD_CLOEXEC == 0)
}

/// fork(2), and what stands in for vfork(2).
pub fn fork(real: impl FnOnce() -> pid_t) -> pid_t {
    let before = sys::errno();
    // What the kernel does not hold stays with the parent; the child gets an error, not a hole.
    let mut kept = Vec::new();
    let list = downgrade(|_| true, |d| kept.push(d.sock()));
    // Tables that the child will use must not be caught half-changed by another thread.
    // Sets first: their holders take the others.
    let mut locks = Vec::new();
    ready::POOL.each(|_, s| locks.push(s.guard()));
    locks.extend([
        stream::POOL.guard(),
        ready::POOL.guard(),
        node::LINK_POOL.guard(),
        fds::making_lock(),
        node::dispatch_lock(),
    ]);
    // One that this thread holds already (fork in a signal handler) is not ours to free.
    locks.retain(|l| l.acquire());
    sys::set_errno(Errno::new(before));
    let r = real();
    let after = sys::errno();
    if r == 0 {
        child();
        for s in &kept {
            s.flags.fetch_or(F_BROKEN, Relaxed);
        }
        core::mem::forget((list, locks, kept));
    } else {
        for l in &locks {
            l.unlock();
        }
        finish(list);
    }
    sys::set_errno(Errno::new(after));
    r
}

/// Runs in the child of a fork: no allocation, no locks, only system calls.
fn child() {
    lock::forget_tid();
    for l in [
        stream::POOL.guard(),
        ready::POOL.guard(),
        node::LINK_POOL.guard(),
    ] {
        l.reset();
    }
    fds::after_fork_child();
    node::after_fork_child();
    stream::after_fork_child();
    engine::after_fork_child();
    ready::POOL.each(|_, s| s.after_fork_child());
    stream::POOL.each(|_, s| s.after_fork_child());
}

/// Before execve(2) and its relatives.
pub fn before_exec() {
    let before = sys::errno();
    let list = downgrade(inheritable, |d| d.reset(Reason::Inherited));
    unplug_broken(survives_exec);
    // What was written by RDMA ends with this program.
    table::flush();
    if !list.is_empty()
        && let Ok(mut e) = EXEC.lock()
    {
        e.extend(list);
    }
    sys::set_errno(Errno::new(before));
}

/// After an exec that failed.
pub fn after_failed_exec() {
    let before = sys::errno();
    if let Ok(mut e) = EXEC.try_lock() {
        finish(core::mem::take(&mut *e));
    }
    sys::set_errno(Errno::new(before));
}

/// Before posix_spawn(3), system(3) and popen(3). File actions may duplicate any descriptor. A connection that can't go
/// back to TCP stays with this process.
pub fn before_spawn(has_file_actions: bool) {
    let before = sys::errno();
    finish(downgrade(
        |s| !s.fixed() && (has_file_actions || inheritable(s)),
        |d| d.reset(Reason::Inherited),
    ));
    unplug_broken(|fd| has_file_actions || survives_exec(fd));
    sys::set_errno(Errno::new(before));
}

/// Calls `f` for each descriptor in a message's SCM_RIGHTS.
///
/// # Safety
/// `msg` null or a valid msghdr with valid control data.
unsafe fn each_right(msg: *const msghdr, mut f: impl FnMut(i32)) {
    // SAFETY: promised by the caller.
    let Some(m) = (unsafe { msg.as_ref() }) else {
        return;
    };
    if m.msg_control.is_null() || m.msg_controllen < size_of::<cmsghdr>() {
        return;
    }
    // SAFETY: the macros walk within msg_controllen.
    unsafe {
        let mut c = libc::CMSG_FIRSTHDR(m);
        while let Some(h) = c.as_ref() {
            if h.cmsg_level == libc::SOL_SOCKET && h.cmsg_type == libc::SCM_RIGHTS {
                let n = h.cmsg_len.saturating_sub(libc::CMSG_LEN(0) as usize) / 4;
                for i in 0..n {
                    f(libc::CMSG_DATA(c).cast::<i32>().add(i).read_unaligned());
                }
            }
            c = libc::CMSG_NXTHDR(m, c);
        }
    }
}

/// Before a sendmsg(2) with control data: streams among the descriptors go back to TCP for good.
///
/// # Safety
/// As sendmsg(2).
pub unsafe fn sending_fds(msg: *const msghdr) {
    let before = sys::errno();
    // SAFETY: promised by the caller.
    unsafe {
        each_right(msg, |fd| {
            if let Some(s) = fds::sock(fd) {
                let d = s.downgrade(Some(Reason::PassedFd));
                if !d.wait() {
                    d.reset(Reason::PassedFd);
                }
                d.finish();
                unplug_broken(|broken| broken == fd);
            }
        });
    }
    sys::set_errno(Errno::new(before));
}

/// After a recvmsg(2) with control data: TCP sockets among the descriptors become known.
///
/// # Safety
/// As recvmsg(2).
pub unsafe fn received_fds(msg: *const msghdr) {
    let before = sys::errno();
    // SAFETY: promised by the caller.
    unsafe {
        each_right(msg, |fd| {
            if fds::lookup(fd).is_none() {
                adopt(fd);
            }
        });
    }
    sys::set_errno(Errno::new(before));
}

/// Makes connected sockets known that the program was started with, under the usual numbers.
pub(super) fn adopt_inherited() {
    let before = sys::errno();
    for fd in 0..8 {
        adopt(fd);
    }
    sys::set_errno(Errno::new(before));
}

/// Makes a connected TCP socket known that came from another process.
fn adopt(fd: i32) {
    if fds::given_up() {
        return;
    }
    // Asked one after the other: this runs at every program's start.
    let is = |option, value| sys::getsockopt::<i32>(fd, libc::SOL_SOCKET, option) == Ok(value);
    if !is(libc::SO_PROTOCOL, libc::IPPROTO_TCP) || is(libc::SO_ACCEPTCONN, 1) {
        return;
    }
    let inode = sys::inode(fd);
    let mut copy_of = None;
    fds::each(0, u32::MAX, |n, e| {
        if let Entry::Sock(_) = e
            && inode.is_ok()
            && sys::inode(n) == inode
        {
            copy_of = Some(e);
        }
    });
    if let Some(e) = copy_of {
        return super::life::copied(e, fd);
    }
    let nonblock = sys::fcntl(fd, libc::F_GETFL, 0).is_ok_and(|f| f & libc::O_NONBLOCK != 0);
    let nonblock = if nonblock { F_NONBLOCK } else { 0 };
    let flags = F_INHERITED | nonblock | unknown_options(fd);
    let Some(s) = Sock::create(fd, flags) else {
        return;
    };
    // The kernel's own counts are the ends' common offsets; what we see of the bytes begins here.
    if let (Ok(i), Ok(unread)) = (sys::TcpInfo::of(fd), sys::ioctl_int(fd, libc::FIONREAD)) {
        s.tx.tcp.store(i.sent_total(), Relaxed);
        s.rx.tcp
            .store(i.bytes_received.wrapping_sub(unread as u64), Relaxed);
    }
}

/// The process ends in an orderly way. Only what travels by RDMA is waited for, shortly.
pub fn exiting() {
    stream::POOL.each(|_, s| {
        let st = s.state.load(SeqCst);
        if st != FREE {
            s.count_bytes();
        }
        if st == MANAGED {
            s.exiting();
        }
    });
    // What was written by RDMA is the device's, not the kernel's, and ends with the process.
    table::linger(engine::end_groups);
    engine::exiting();
}
