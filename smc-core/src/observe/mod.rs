//! What operators get to see: fallback reasons, counters, status documents and the log.

pub mod counters;
pub mod log;
pub mod reason;
pub mod status;

pub use counters::Counters;
pub use reason::Reason;
pub use status::NodeStatus;
