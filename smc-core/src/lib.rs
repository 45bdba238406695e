//! xsmc's protocol, data path and engine: a library that knows nothing of LD_PRELOAD.
//!
//! Where to look:
//!
//! | module | what it is |
//! |---|---|
//! | [`posix`] | the calls of the interposer, with the meaning of the libc functions |
//! | [`stream`] | one connection: its carriers and switches, sending, receiving, waiting |
//! | [`ready`] | epoll sets, poll, select |
//! | [`ring`] | RMB rings and their pool |
//! | [`fabric`] | what two processes map together |
//! | [`node`] | bells, links, and the dispatch of peers' events |
//! | [`engine`] | the background thread |
//! | [`negotiate`] | runtime directory, directory of endpoints, link messages |
//! | [`link`] | SMC-R's link groups between hosts |
//! | [`wire`] | SMC-R's messages between hosts: bytes to typed values and back |
//! | [`policy`] | the whitelist |
//! | [`observe`] | reasons, counters, the status document |
//! | [`fds`], [`pool`], [`lock`], [`thread`], [`bitmap`], [`env`], [`sys`] | tools |

/// Atomics of modules that a model check includes with loom's in their place.
mod atomic {
    pub(crate) use core::sync::atomic::{AtomicU64, Ordering, fence};
}

pub mod bitmap;
pub mod engine;
pub mod env;
pub mod fabric;
pub mod fds;
pub mod link;
pub mod lock;
pub mod negotiate;
pub mod node;
pub mod observe;
pub mod policy;
pub mod pool;
pub mod posix;
pub mod ready;
pub mod ring;
pub mod stream;
pub mod sys;
pub mod thread;
pub mod wire;
