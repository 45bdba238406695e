//! Bringing a queue pair to where it can receive, without making the engine wait.
//!
//! With the step to RTR the kernel looks for the way to the peer's GID. Where that is not among its neighbours yet,
//! it asks, and gives up after a second. The GID is what the peer says, so nobody else's connections may wait
//! for that: the step is done by a thread of its own, unless the GID is the very address with which the TCP connection
//! stands. The thread holds the queue pair, so nothing is taken from under it; when it has an answer it calls the engine.
//!
//! A fork leaves the thread to the parent; exec and exit end it.

use core::sync::atomic::AtomicU32;
use core::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, OnceLock};

use crate::fabric::verbs::{self, Path, QueuePair};
use crate::node;
use crate::sys::Errno;

/// Most threads at the same time: no peer gets more out of us.
const MOST: u32 = 8;

static RUNNING: AtomicU32 = AtomicU32::new(0);

/// A step that is under way.
pub(super) struct Connecting(Arc<OnceLock<verbs::Result<()>>>);

impl Connecting {
    /// Begins.
    pub(super) fn start(qp: &Arc<QueuePair>, path: Path) -> verbs::Result<Connecting> {
        let (answer, held) = (Arc::new(OnceLock::new()), qp.clone());
        let theirs = answer.clone();
        let run = move || {
            let result = held.to_rtr(&path);
            drop(held);
            let _ = theirs.set(result);
            RUNNING.fetch_sub(1, Relaxed);
            node::call_engine();
        };
        if RUNNING.fetch_add(1, Relaxed) >= MOST {
            RUNNING.fetch_sub(1, Relaxed);
            return Err(qp.error("connecting", Errno::EAGAIN));
        }
        // It inherits the engine's signal mask: the program's signals are not for it.
        let thread = std::thread::Builder::new()
            .name("xsmc-connect".into())
            .stack_size(256 << 10)
            .spawn(run);
        match thread {
            Ok(_) => Ok(Connecting(answer)),
            Err(_) => {
                RUNNING.fetch_sub(1, Relaxed);
                Err(qp.error("connecting", Errno::EAGAIN))
            }
        }
    }

    /// How it has ended.
    pub(super) fn result(&self) -> Option<verbs::Result<()>> {
        self.0.get().cloned()
    }
}

/// In the child of a fork, where none of the threads is.
pub(super) fn after_fork_child() {
    RUNNING.store(0, Relaxed);
}
