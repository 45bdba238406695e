//! The verbs layer: RDMA devices through libibverbs, made safe.
//!
//! | file | what it is |
//! |---|---|
//! | [`device`] | which devices, ports and GIDs there are, and why some can't be used; choice for a connection |
//! | [`reason`] | the reasons |
//! | `library` | libibverbs, opened at run time |
//! | [`context`] | an open device and its asynchronous events |
//! | [`memory`] | protection domains and memory regions |
//! | [`queue`] | completion queues, and waiting for them |
//! | [`qp`] | queue pairs and their states |
//! | [`post`] | sending, writing, receiving |
//! | [`work`] | work requests: bounds, accounts, failures |
//! | [`error`] | what a failed call says |
//!
//! **Lifetime.** Each object holds those it was made from (queue pair: its queues and domain; region: its domain;
//! all: the context), so they are destroyed in the order that libibverbs asks for, whoever is dropped first.
//!
//! **Threads.** The library's objects are safe for access by several threads (ibv_alloc_td(3)), and what is added here is
//! behind locks: all objects are `Send` and `Sync`. Posting, polling and arming may reach system calls that are
//! cancellation points (soft-RoCE rings its doorbell so): call them with cancellation disabled where
//! threads may be cancelled, and not from a signal handler that interrupted another call of the same
//! object.
//!
//! **Fork.** A child must not use its parent's objects. Dropping them there does nothing, and
//! [`crate::fds`] closes their descriptors in it. Memory: a device is opened only where
//! `ibv_is_fork_initialized` says IBV_FORK_UNNEEDED, which means that the kernel (5.13 or later) gives the child copies
//! of private pages that a device uses. Without that, the parent's next write would move *its* page
//! away from the device. `ibv_fork_init` is the older remedy; it takes each registered range out of
//! the child's memory, where connections may have to go on reading their RMBs, so it isn't used.

pub mod context;
pub mod device;
pub mod error;
mod library;
pub mod memory;
pub mod post;
pub mod qp;
pub mod queue;
pub mod reason;
pub mod work;

pub use context::{AsyncEvent, Context, PortState};
pub use device::{Choice, Device, GidEntry, Port, Survey};
pub use error::Result;
pub use error::{Error, Object};
pub use library::check_library;
pub use memory::{Access, Piece, ProtectionDomain, Region};
pub use post::{Event, PostError, Received, WRITES, Write};
pub use qp::{Path, QueuePair};
pub use queue::{POLL_BATCH, Queue, Wake};
pub use reason::{MEMLOCK_MIN, Unusable};
pub use work::{
    Completion, Failure, MESSAGE_MAX, MESSAGE_SHORT, MESSAGES, RECEIVE_DEPTH, SEND_DEPTH,
};
