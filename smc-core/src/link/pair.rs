//! The queue pairs of a group, one for each link, and the descriptor that tells of completions on any of them.

use std::sync::Arc;

use super::{LANES, Lane};
use crate::fabric::verbs::{Queue, QueuePair, Region, Wake};
use crate::{fds, sys};

/// A link's queue pair, with what belongs to it.
pub struct Pair {
    /// The queue pair.
    pub qp: Arc<QueuePair>,
    /// Its completion queue.
    pub queue: Arc<Queue>,
    /// Mirrors' memory, by chunk.
    pub mirrors: Vec<Option<Region>>,
}

impl Pair {
    /// The memory of the mirrors in a chunk.
    pub fn mirror(&self, chunk: usize) -> Option<&Region> {
        self.mirrors.get(chunk)?.as_ref()
    }
}

/// Those of a group. They change under its lock only, by the engine.
pub(super) type Pairs = [Option<Pair>; LANES];

/// The pair at `lane`, if there is one.
pub(super) fn at(pairs: &Pairs, lane: Lane) -> Option<&Pair> {
    pairs.get(lane)?.as_ref()
}

/// Has the next completion of each queue make its channel readable.
pub(super) fn arm(pairs: &Pairs, wake: Wake) {
    for pair in pairs.iter().flatten() {
        if let Err(e) = pair.queue.arm(wake) {
            log::warn!("{e}");
        }
    }
}

/// Readable when an armed completion queue of any link has something: an epoll instance over their channels, so that
/// whoever waits need not know which links there are.
pub(super) struct Channels(i32);

impl Channels {
    pub(super) fn new() -> sys::Result<Channels> {
        fds::make_private(|keep| sys::epoll_create().map(|fd| Channels(keep(fd))))
    }

    pub(super) fn fd(&self) -> i32 {
        self.0
    }

    pub(super) fn add(&self, queue: &Queue) -> sys::Result<()> {
        let ev = libc::epoll_event {
            events: libc::EPOLLIN as u32,
            u64: 0,
        };
        sys::epoll_ctl(self.0, libc::EPOLL_CTL_ADD, queue.fd(), Some(&ev))
    }

    pub(super) fn remove(&self, queue: &Queue) {
        let _ = sys::epoll_ctl(self.0, libc::EPOLL_CTL_DEL, queue.fd(), None);
    }
}

impl Drop for Channels {
    fn drop(&mut self) {
        fds::close_private(self.0);
    }
}
