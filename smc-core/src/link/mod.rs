//! Link groups: what two hosts that speak SMC-R share beyond single connections.
//!
//! | module | what it is |
//! |---|---|
//! | [`group`] | the data path: queue pair, connections, and who serves them |
//! | [`state`] | what a group's lock guards: connections, messages under way |
//! | [`table`] | the groups of this process, and who looks at them |
//! | [`conn`] | one connection: CDC messages out of cursors and flags, and the reverse |
//! | [`llc`] | state machine of a group's link: set-up, keepalive, RTokens, end |
//! | [`rtoken`] | the peer's RMBs that this side may write |
//!
//! `conn`, `llc` and `rtoken` take bytes and time as arguments and return what is to be done, so that they know nothing
//! of sockets, queue pairs or threads.

pub mod conn;
#[cfg(test)]
mod conn_tests;
pub mod group;
pub mod llc;
pub mod rtoken;
pub mod state;
pub mod table;

pub use group::Group;
