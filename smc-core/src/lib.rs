//! xsmc's protocol, data path and engine: a library that knows nothing of LD_PRELOAD.
//!
//! Where to look:
//!
//! | module | what it is |
//! |---|---|
//! | [`negotiate`] | runtime directory, directory of endpoints, link messages |
//! | [`policy`] | the whitelist |
//! | [`observe`] | reasons, counters, the status document |

/// Atomics of modules that a model check includes with loom's in their place.
mod atomic {
    pub(crate) use core::sync::atomic::{AtomicU64, Ordering, fence};
}

pub mod env;
pub mod negotiate;
pub mod observe;
pub mod policy;
