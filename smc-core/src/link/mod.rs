//! Link groups: what two hosts that speak SMC-R share beyond single connections.
//!
//! | module | what it is |
//! |---|---|
//! | [`llc`] | state machine of a group's link: set-up, keepalive, RTokens, end |
//! | [`rtoken`] | the peer's RMBs that this side may write |
//! | [`alert`] | the ids by which CDC messages name connections |
//!
//! They take bytes and time as arguments and return what is to be done, so that they know nothing of sockets, queue
//! pairs or threads.

pub mod alert;
pub mod llc;
pub mod rtoken;
