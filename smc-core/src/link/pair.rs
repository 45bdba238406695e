//! The queue pairs of a group, one for each link, and the descriptor that tells of completions on any of them.

use core::sync::atomic::Ordering::Relaxed;
use core::sync::atomic::{AtomicI32, AtomicU32};
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
pub(super) struct Channels {
    epoll: i32,
    queues: AtomicU32,
    /// See [`Channels::nearest`].
    nearest: AtomicI32,
}

impl Channels {
    pub(super) fn new() -> sys::Result<Channels> {
        let epoll = fds::make_private(|keep| sys::epoll_create().map(keep))?;
        Ok(Channels {
            epoll,
            queues: AtomicU32::new(0),
            nearest: AtomicI32::new(epoll),
        })
    }

    pub(super) fn fd(&self) -> i32 {
        self.epoll
    }

    /// The same with less work for the kernel, for a thread that has a bell as well: while there is but one queue, its own
    /// channel. Who sleeps on that when another link comes is told of what comes by that one by its bell.
    pub(super) fn nearest(&self) -> i32 {
        self.nearest.load(Relaxed)
    }

    pub(super) fn add(&self, queue: &Queue) -> sys::Result<()> {
        let ev = libc::epoll_event {
            events: libc::EPOLLIN as u32,
            u64: 0,
        };
        sys::epoll_ctl(self.epoll, libc::EPOLL_CTL_ADD, queue.fd(), Some(&ev))?;
        let first = self.queues.fetch_add(1, Relaxed) == 0;
        let nearest = if first { queue.fd() } else { self.epoll };
        self.nearest.store(nearest, Relaxed);
        Ok(())
    }

    pub(super) fn remove(&self, queue: &Queue) {
        self.queues.fetch_sub(1, Relaxed);
        self.nearest.store(self.epoll, Relaxed);
        let _ = sys::epoll_ctl(self.epoll, libc::EPOLL_CTL_DEL, queue.fd(), None);
    }
}

impl Drop for Channels {
    fn drop(&mut self) {
        fds::close_private(self.epoll);
    }
}
