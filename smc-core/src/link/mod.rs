//! Link groups: what two hosts that speak SMC-R share beyond single connections.
//!
//! | module | what it is |
//! |---|---|
//! | [`group`] | the data path: queue pairs, connections, and who serves them |
//! | [`pair`] | the queue pair of each link |
//! | [`state`] | what else a group's lock guards: connections, messages under way |
//! | [`table`] | the groups of this process, and who looks at them |
//! | [`conn`] | one connection: CDC messages out of cursors and flags, and the reverse |
//! | [`llc`] | state machine of a group's links: set-up, keepalive, RTokens, end |
//! | [`rtoken`] | the peer's RMBs that this side may write |
//!
//! `conn`, `llc` and `rtoken` take bytes and time as arguments and return what is to be done, so that they know nothing
//! of sockets, queue pairs or threads.

pub mod conn;
#[cfg(test)]
mod conn_tests;
pub mod group;
pub mod llc;
pub mod pair;
pub mod rtoken;
pub mod state;
pub mod table;

pub use group::Group;

/// Most links of a group in use at the same time. (Their numbers on the wire go on to 255.)
pub const LANES: usize = 2;

/// A place for a link of a group, below [`LANES`]. (A *link* of SMC-R is a pair of queue pairs, one at each host. What the
/// stream code calls [`crate::node::Link`] is a whole group.)
pub type Lane = usize;
