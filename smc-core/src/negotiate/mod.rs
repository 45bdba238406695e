//! How two nodes of one host find each other, and what they say to each other over their link socket.
//!
//! - [`runtime`]: the runtime directory, the files that stand for a live node, and the sweep of dead ones.
//! - [`endpoint`]: one end of a TCP connection as a key that both ends can compute.
//! - [`directory`]: the shared table endpoint -> (node, slot); `entry` holds its lock-free protocol.
//! - [`message`]: the datagrams of a link socket.
//! - [`clc`]: between two hosts instead, the handshake on the TCP stream.
//! - [`option`]: the SMC option of TCP, by which nodes of two hosts find each other.
//!
//! Everything read from the shared table or from a socket is a hint from an untrusted peer. It is checked for
//! shape here (no panic, no access out of bounds); whether it is *true* is for the caller to verify.

pub mod clc;
pub mod directory;
pub mod endpoint;
mod entry;
#[doc(hidden)]
pub mod fuzzing;
pub mod message;
pub mod option;
mod raw;
pub mod remote;
pub mod runtime;

#[cfg(test)]
mod fuzz_tests;
#[cfg(all(test, loom))]
mod loom_tests;

/// Atomics of the entry protocol; the loom model gives `entry.rs` loom's instead.
mod atomic {
    pub(super) use core::sync::atomic::{AtomicU64, Ordering, fence};
}

pub use directory::{Directory, EntryRef, Found, Full, Published};
pub use endpoint::{Endpoint, netns_inode};
pub use message::{DecodeError, Message, RmbToken};
pub use runtime::{NodeFiles, NodeId, NodeInfo, RuntimeDir, RuntimeError};
