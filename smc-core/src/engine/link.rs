//! The life of links: greeting, giving up, loss, and the end.

use core::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};
use std::collections::{HashMap, VecDeque};

use super::peer::Peer;
use super::run::Engine;
use super::{COUNTERS, ipc};
use crate::fabric::mapping;
use crate::fabric::shm::{BELL_PAGE_LEN, SEGMENT_LEN, Segment};
use crate::negotiate::message::{Greeting, VERSION};
use crate::negotiate::{DecodeError, Message, NodeId};
use crate::node::{self, LINK_POOL, Link};
use crate::observe::Reason;
use crate::ring::CHUNK;
use crate::ring::pool::RmbPool;
use crate::{fds, stream, sys};

/// A link that carries no connection is given up after this time.
const IDLE_NS: u64 = 10_000_000_000;
/// A peer that has been told that we leave the link has this long to leave it as well, from when the link has
/// carried nothing of ours.
const GOODBYE_NS: u64 = 5_000_000_000;

impl Engine {
    pub(super) fn greeting(&self, link_index: u32) -> Greeting {
        let mut program = [0u8; 16];
        for (d, s) in program.iter_mut().zip(self.identity.program().as_bytes()) {
            *d = *s;
        }
        Greeting {
            version: VERSION,
            link_index: link_index as u16,
            pid: self.shared.pid,
            node: self.shared.id,
            program,
        }
    }

    pub(super) fn add_peer(
        &mut self,
        fd: i32,
        seg: *mut u8,
        side: u32,
        node: NodeId,
    ) -> Option<usize> {
        let (pool_index, link) = LINK_POOL.alloc()?;
        // The link socket is shown to other threads only once the greeting is out: it must come first.
        link.init(seg.cast(), core::ptr::null_mut(), side, 0, -1);
        let peer = Peer {
            fd,
            link,
            link_pool_index: pool_index,
            table_index: u32::MAX,
            open: false,
            waiting: VecDeque::new(),
            node,
            pid: 0,
            program: [0; 16],
            pool: RmbPool::default(),
            chunks: Vec::new(),
            slots: HashMap::new(),
            seg,
            bells: core::ptr::null_mut(),
            gone: false,
            idle_since: 0,
        };
        let i = self
            .peers
            .iter()
            .position(Option::is_none)
            .unwrap_or_else(|| {
                self.peers.push(None);
                self.peers.len() - 1
            });
        self.peers[i] = Some(Box::new(peer));
        Some(i)
    }

    /// Connects to a node: segment and Hello go out, the rest follows with HelloAck.
    pub(super) fn connect_peer(&mut self, node: NodeId) -> Result<usize, Reason> {
        let path = self
            .shared
            .dir
            .sock_path(node)
            .map_err(|_| Reason::RuntimeDir)?;
        let fd = match ipc::connect(&path) {
            Ok(fd) => fd,
            Err(_) => {
                if !self.alive(node) {
                    self.shared.directory.clear_node(node);
                }
                return Err(Reason::NoPeer);
            }
        };
        let fail = |r| {
            fds::close_private(fd);
            r
        };
        let made = fds::make_private(|keep| sys::memfd_sealed(c"xsmc-link", SEGMENT_LEN).map(keep));
        let memfd = made.map_err(|_| fail(Reason::NoMemory))?;
        let Ok(seg) = mapping::map(memfd, SEGMENT_LEN) else {
            fds::close_private(memfd);
            return Err(fail(Reason::NoMemory));
        };
        // SAFETY: a fresh mapping of SEGMENT_LEN bytes, all of whose fields are atomics.
        unsafe { &*seg.cast::<Segment>() }.stamp();
        let Some(i) = self.add_peer(fd, seg, 0, node) else {
            fds::close_private(memfd);
            return Err(fail(Reason::NoMemory));
        };
        let table = self.enter(i);
        let hello = Message::Hello {
            greeting: self.greeting(table.unwrap_or(0)),
            control: true,
        };
        let ok = table.is_some() && ipc::send(fd, &hello, &[memfd, self.page_fd]).is_ok();
        fds::close_private(memfd);
        if !ok || self.watch_peer(i, fd).is_err() {
            self.lose(i);
            return Err(Reason::PeerDeclined);
        }
        self.show_socket(i);
        Ok(i)
    }

    /// Enters the link into the dispatch table.
    pub(super) fn enter(&mut self, i: usize) -> Option<u32> {
        let p = self.peers[i].as_mut()?;
        p.table_index = node::add_link(p.link)?;
        Some(p.table_index)
    }

    pub(super) fn incoming_readable(&mut self, i: usize) {
        let Some(Some(inc)) = self.incoming.get(i) else {
            return;
        };
        let fd = inc.fd;
        let drop_it = |e: &mut Engine, close: bool| {
            e.incoming[i] = None;
            let _ = sys::epoll_ctl(e.epfd, libc::EPOLL_CTL_DEL, fd, None);
            if close {
                fds::close_private(fd);
            }
        };
        let mut d = match ipc::recv(fd) {
            Ok(Some(d)) => d,
            Err(sys::Errno::EAGAIN) => return,
            _ => return drop_it(self, true),
        };
        // SAFETY: geteuid has no arguments and no failure.
        let me = unsafe { libc::geteuid() };
        let uid = ipc::peer(fd).map_or(u32::MAX, |(uid, _)| uid);
        if uid != me && uid != 0 {
            COUNTERS.count(Reason::PeerUid);
            return drop_it(self, true);
        }
        if &d.bytes[..d.len] == crate::observe::status::STATUS_QUERY {
            self.send_status(fd);
            return drop_it(self, true);
        }
        match Message::decode(&d.bytes[..d.len]) {
            Ok(Message::PinEnd { endpoint, reason }) => {
                drop_it(self, false);
                let reason = Reason::from_code(reason).unwrap_or(Reason::SharedEnd);
                self.pin_end(endpoint, reason, fd);
            }
            Ok(Message::Hello {
                greeting,
                control: true,
            }) if uid == me => {
                drop_it(self, false);
                if let Err(r) = self.welcome(fd, greeting, &mut d) {
                    COUNTERS.count(r);
                    fds::close_private(fd);
                }
            }
            Err(DecodeError::Version(_)) => {
                COUNTERS.count(Reason::Version);
                drop_it(self, true);
            }
            _ => {
                COUNTERS.count(Reason::PeerViolation);
                drop_it(self, true);
            }
        }
    }

    /// Answers a Hello. An error: refused; the caller closes the socket.
    pub(super) fn welcome(
        &mut self,
        fd: i32,
        g: Greeting,
        d: &mut ipc::Datagram,
    ) -> Result<(), Reason> {
        // Only we ourselves may speak in our name.
        let impostor =
            g.node == self.shared.id && ipc::peer(fd).map(|(_, pid)| pid) != Ok(self.shared.pid);
        if d.fd_count != 2 || impostor {
            return Err(Reason::PeerViolation);
        }
        let (Some(memfd), Some(page)) = (d.take(0), d.take(1)) else {
            return Err(Reason::PeerViolation);
        };
        let seg = mapping::map_sealed(memfd, SEGMENT_LEN).ok();
        let bells = mapping::map_sealed(page, BELL_PAGE_LEN).ok();
        fds::close_private(memfd);
        fds::close_private(page);
        // SAFETY: a mapping of SEGMENT_LEN bytes; all its fields are atomics.
        let valid = seg.is_some_and(|s| unsafe { &*s.cast::<Segment>() }.valid());
        let added = match (seg, bells) {
            (Some(seg), Some(bells)) if valid => {
                let i = self.add_peer(fd, seg, 1, g.node);
                i.map(|i| (i, bells)).ok_or(Reason::NoMemory)
            }
            _ => Err(Reason::PeerViolation),
        };
        let (i, bells) = added.inspect_err(|_| {
            for (p, len) in [(seg, SEGMENT_LEN), (bells, BELL_PAGE_LEN)] {
                if let Some(p) = p {
                    mapping::retire(p, len);
                }
            }
        })?;
        self.greeted(i, &g, bells);
        let table = self.enter(i);
        let ack = Message::HelloAck {
            greeting: self.greeting(table.unwrap_or(0)),
        };
        let ok = table.is_some() && ipc::send(fd, &ack, &[self.page_fd]).is_ok();
        if !ok || self.watch_peer(i, fd).is_err() {
            self.lose(i);
            return Ok(());
        }
        self.show_socket(i);
        self.send_bells(i);
        Ok(())
    }

    pub(super) fn greeted(&mut self, i: usize, g: &Greeting, bells: *mut u8) {
        let Some(p) = self.peers[i].as_mut() else {
            return;
        };
        p.bells = bells;
        p.pid = g.pid;
        p.program = g.program;
        p.open = true;
        p.link.set_bells(bells.cast(), u32::from(g.link_index));
    }

    pub(super) fn show_socket(&self, i: usize) {
        if let Some(p) = self.peers[i].as_ref() {
            p.link.sock_fd.store(p.fd, Relaxed);
        }
    }

    pub(super) fn send_bells(&self, i: usize) {
        let Some(p) = self.peers[i].as_ref() else {
            return;
        };
        node::each_bell(|b, fd| {
            let _ = ipc::send(p.fd, &Message::Bell { index: b as u16 }, &[fd]);
        });
    }

    /// Where both ends of a link are in this process, each learns of the other.
    pub(super) fn join_twins(&mut self, i: usize) {
        let (me, node) = match self.peers[i].as_ref() {
            Some(p) if p.node == self.shared.id => (p.link, p.node),
            _ => return,
        };
        let other = self.peers.iter().flatten().find(|p| {
            p.node == node
                && p.side() != me.side.load(Relaxed)
                && p.link.twin.load(Relaxed).is_null()
                && !p.is_gone()
        });
        if let Some(o) = other {
            me.twin.store((o.link as *const Link).cast_mut(), Relaxed);
            o.link.twin.store((me as *const Link).cast_mut(), Relaxed);
        }
    }

    /// Gives link `i` up: nothing more goes by its rings. When the peer has done the same it closes its
    /// end, and so do we.
    pub(super) fn leave_link(&mut self, i: usize) {
        let Some(p) = self.peers[i].as_mut() else {
            return;
        };
        if p.link.leaving.swap(true, SeqCst) {
            return;
        }
        let (fd, link) = (p.fd, p.link);
        self.empty_link(i);
        link.sock_fd.store(-1, Relaxed);
        let _ = sys::shutdown(fd, libc::SHUT_WR);
    }

    /// Peer `i` has closed its end: it has died, or given the link up. It stores nothing more into
    /// its rings; what it has stored can still be read.
    pub(super) fn lose(&mut self, i: usize) {
        let Some(p) = self.peers[i].as_mut() else {
            return;
        };
        if p.gone {
            return;
        }
        p.gone = true;
        let (fd, link, node) = (p.fd, p.link, p.node);
        link.leaving.store(true, SeqCst);
        self.empty_link(i);
        link.dead.store(true, SeqCst);
        for s in &link.slots {
            // SAFETY: streams are type-stable.
            if let Some(s) = unsafe { s.load(Acquire).as_ref() } {
                s.on_event();
            }
        }
        link.sock_fd.store(-1, Relaxed);
        let _ = sys::epoll_ctl(self.epfd, libc::EPOLL_CTL_DEL, fd, None);
        let _ = sys::shutdown(fd, libc::SHUT_RDWR);
        if !self.alive(node) {
            self.shared.directory.clear_node(node);
        }
    }

    /// Puts what we send on link `i` back on TCP, and has connections that were being opened try anew.
    pub(super) fn empty_link(&mut self, i: usize) {
        let Some(p) = self.peers[i].as_mut() else {
            return;
        };
        let link = p.link;
        let waiting = core::mem::take(&mut p.waiting)
            .into_iter()
            .map(|w| (w.0, w.1));
        let opening = p.slots.values_mut().filter_map(|s| s.opening.take());
        let again: Vec<_> = waiting.chain(opening).collect();
        let patience = sys::now_ns() + 20_000_000;
        for s in &link.slots {
            // SAFETY: streams are type-stable.
            if let Some(s) = unsafe { s.load(Acquire).as_ref() } {
                s.link_lost(patience);
            }
        }
        for (index, generation) in again {
            if let Some(s) = stream::POOL.get(index)
                && s.generation.load(Relaxed) == generation
            {
                self.unpublish(s);
            }
        }
    }

    /// Gives up links that carry nothing, and frees those that are over. Returns when to look again, in
    /// milliseconds; `None`: no need to.
    pub(super) fn tend_links(&mut self) -> Option<i32> {
        let mut next = None;
        for i in 0..self.peers.len() {
            let Some(p) = self.peers[i].as_mut() else {
                continue;
            };
            let unused = p.link.used.load(SeqCst) == 0;
            if p.gone || unused {
                p.tidy();
            }
            if unused && !p.gone && p.link.leaving.load(Relaxed) {
                // Nothing of ours depends on it any more: a peer that doesn't say goodbye is not waited for.
                let now = sys::now_ns();
                if p.idle_since == 0 {
                    p.idle_since = now;
                }
                if now - p.idle_since >= GOODBYE_NS {
                    self.lose(i);
                }
                next = Some(1000);
                continue;
            }
            if !p.slots.is_empty() || !p.waiting.is_empty() {
                p.idle_since = 0;
                continue;
            }
            if p.link.used.load(SeqCst) != 0 {
                continue;
            }
            if p.gone {
                self.bury(i);
                continue;
            }
            let now = sys::now_ns();
            if p.idle_since == 0 {
                p.idle_since = now;
            }
            if now - p.idle_since >= IDLE_NS {
                self.leave_link(i);
            } else {
                next = Some(1000);
            }
        }
        next
    }

    /// Frees what a link used that is over at both ends and carries no connection of ours.
    pub(super) fn bury(&mut self, i: usize) {
        let Some(mut p) = self.peers[i].take() else {
            return;
        };
        fds::close_private(p.fd);
        for f in &p.link.bell_fds {
            let fd = f.swap(0, Relaxed);
            if fd != 0 {
                fds::close_private(fd - 1);
            }
        }
        for other in self.peers.iter().flatten() {
            if core::ptr::eq(other.link.twin.load(Relaxed), p.link) {
                other.link.twin.store(core::ptr::null_mut(), Relaxed);
            }
        }
        let (table_index, pool_index) = (p.table_index, p.link_pool_index);
        let mut free = move || {
            p.pool.retire();
            for c in p.chunks.drain(..).flatten() {
                mapping::retire(c, CHUNK as usize);
            }
            mapping::retire(p.seg, SEGMENT_LEN);
            if !p.bells.is_null() {
                mapping::retire(p.bells, BELL_PAGE_LEN);
            }
        };
        if table_index == u32::MAX {
            free()
        } else {
            node::remove_link(table_index, free)
        }
        LINK_POOL.free(pool_index);
    }
}
