//! What a failed call of the library says: which operation, on what, and why.

use core::fmt;
use std::sync::Arc;

use crate::sys::Errno;

/// A call of libibverbs that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{operation} failed for {object}: {errno}")]
pub struct Error {
    /// The verb, such as `ibv_reg_mr`, with the new state for changes of state.
    pub operation: &'static str,
    /// What it was about.
    pub object: Object,
    /// What the library or the kernel said.
    pub errno: Errno,
}

/// Result of an operation on a device.
pub type Result<T> = core::result::Result<T, Error>;

/// What an operation is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Object {
    /// A device, by name.
    Device(Arc<str>),
    /// A port of a device.
    Port(Arc<str>, u8),
    /// A memory region of so many bytes.
    Region(usize),
    /// A completion queue of so many entries.
    Queue(u32),
    /// A queue pair, by number; 0 while it is being made.
    QueuePair(u32),
}

impl fmt::Display for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Object::Device(name) => write!(f, "device {name}"),
            Object::Port(name, port) => write!(f, "port {port} of {name}"),
            Object::Region(bytes) => write!(f, "a memory region of {bytes} bytes"),
            Object::Queue(entries) => write!(f, "a completion queue of {entries} entries"),
            Object::QueuePair(0) => write!(f, "a new queue pair"),
            Object::QueuePair(number) => write!(f, "queue pair {number}"),
        }
    }
}

impl Error {
    /// For what fails around the library's calls, on a device.
    pub fn of(operation: &'static str, context: &super::Context, errno: Errno) -> Error {
        Error::new(operation, context.object(), errno)
    }

    pub(crate) fn new(operation: &'static str, object: Object, errno: Errno) -> Error {
        Error {
            operation,
            object,
            errno,
        }
    }

    /// For calls that return null or -1 and set `errno`.
    pub(super) fn last(operation: &'static str, object: Object) -> Error {
        Error::new(operation, object, Errno::new(crate::sys::errno()))
    }
}

/// For calls that return 0 or an errno value (a few providers negate it, or return -1 and set `errno`).
pub(super) fn check(
    code: i32,
    operation: &'static str,
    object: impl FnOnce() -> Object,
) -> Result<()> {
    match code {
        0 => Ok(()),
        -1 => Err(Error::last(operation, object())),
        _ => Err(Error::new(
            operation,
            object(),
            Errno::new(code.saturating_abs()),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn says_operation_object_and_cause() {
        let e = check(libc::EINVAL, "ibv_modify_qp to RTR", || {
            Object::QueuePair(17)
        })
        .unwrap_err();
        let text = e.to_string();
        assert!(
            text.starts_with("ibv_modify_qp to RTR failed for queue pair 17: "),
            "{text}"
        );
        assert_eq!(e.errno, Errno::EINVAL);
        assert_eq!(check(0, "", || Object::Queue(1)), Ok(()));
        let negated = check(-libc::ENOMEM, "ibv_post_send", || Object::QueuePair(1));
        assert_eq!(negated.unwrap_err().errno, Errno::ENOMEM);
    }
}
