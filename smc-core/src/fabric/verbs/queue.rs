//! Completion queues, each with a channel that can be waited on.
//!
//! The order of use, so that no completion is missed: poll until empty, [`Queue::arm`], poll once more,
//! wait for [`Queue::fd`] to be readable, [`Queue::clear_events`], poll.

use core::mem::MaybeUninit;
use core::ptr::{NonNull, null_mut};
use core::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::ffi::c_int;
use std::sync::Arc;

use rdma_sys as sys;

use super::error::check;
use super::work::Completion;
use super::{Context, Error, Object, Result};
use crate::fds;
use crate::sys::Errno;

/// Completions taken by one call of [`Queue::poll`].
pub const POLL_BATCH: usize = 16;

/// Which completions make an armed queue's descriptor readable. An error always does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wake {
    /// Received messages whose sender set the solicited-event bit, as SMC-R peers do.
    Solicited,
    /// All.
    All,
}

/// A completion queue.
pub struct Queue {
    raw: NonNull<sys::ibv_cq>,
    channel: Channel,
    entries: u32,
    /// Entries that queue pairs may use at the same time.
    reserved: AtomicU32,
}

// SAFETY: as for `Context`.
unsafe impl Send for Queue {}
// SAFETY: as for `Context`.
unsafe impl Sync for Queue {}

impl Queue {
    /// Makes a queue of `entries`, or of as many as the device has. Each queue pair reserves the entries that it may
    /// need ([`super::SEND_DEPTH`], [`super::RECEIVE_DEPTH`]), so that a queue never overflows. (Some drivers leave the
    /// completions of a queue pair that is gone in the queue: poll it empty before new ones take its place.)
    pub fn new(context: &Arc<Context>, entries: u32) -> Result<Arc<Queue>> {
        let entries = entries.min(context.max_queue_entries);
        let object = || Object::Queue(entries);
        let depth = c_int::try_from(entries)
            .map_err(|_| Error::new("ibv_create_cq", object(), Errno::EINVAL))?;
        let channel = Channel::new(context)?;
        // SAFETY: context and channel exist, and outlive the queue.
        let raw = fds::trusted(|| unsafe {
            (context.library.ibv_create_cq)(context.raw(), depth, null_mut(), channel.raw(), 0)
        });
        match NonNull::new(raw) {
            Some(raw) => Ok(Arc::new(Queue {
                raw,
                channel,
                entries,
                reserved: AtomicU32::new(0),
            })),
            None => Err(Error::last("ibv_create_cq", object())),
        }
    }

    pub(super) fn raw(&self) -> *mut sys::ibv_cq {
        self.raw.as_ptr()
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.channel.context
    }

    /// Readable after a completion of an armed queue.
    pub fn fd(&self) -> i32 {
        self.channel.fd()
    }

    /// Takes up to [`POLL_BATCH`] completions and hands them to `f`, in order. Returns their number.
    /// Makes no system call on most devices.
    pub fn poll(&self, mut f: impl FnMut(Completion)) -> Result<usize> {
        let mut entries = [const { MaybeUninit::<sys::ibv_wc>::uninit() }; POLL_BATCH];
        // SAFETY: the queue exists; the driver writes at most so many entries.
        let found = fds::trusted(|| unsafe {
            (self.context().calls.poll_cq)(
                self.raw(),
                POLL_BATCH as c_int,
                entries.as_mut_ptr().cast(),
            )
        });
        let Ok(found) = usize::try_from(found) else {
            return Err(Error::new("ibv_poll_cq", self.object(), Errno::EIO));
        };
        for entry in entries.iter().take(found) {
            // SAFETY: written by the driver.
            f(unsafe { Completion::read(entry.as_ptr()) });
        }
        Ok(found)
    }

    /// Asks for one event on the next such completion.
    pub fn arm(&self, wake: Wake) -> Result<()> {
        let solicited_only = c_int::from(wake == Wake::Solicited);
        // SAFETY: the queue exists.
        let code = fds::trusted(|| unsafe {
            (self.context().calls.req_notify_cq)(self.raw(), solicited_only)
        });
        check(code, "ibv_req_notify_cq", || self.object())
    }

    /// Takes all events that have come, without waiting, so that the descriptor isn't readable any more. Returns
    /// their number.
    pub fn clear_events(&self) -> Result<u32> {
        let mut count = 0;
        while self.clear_event()? {
            count += 1;
        }
        Ok(count)
    }

    /// Takes one event, without waiting; whether there was one. Arming once leads to one event at most.
    pub fn clear_event(&self) -> Result<bool> {
        let library = self.context().library;
        let (mut queue, mut cookie) = (null_mut(), null_mut());
        // SAFETY: the channel exists, and doesn't block; both pointers are written.
        let code = fds::trusted(|| unsafe {
            (library.ibv_get_cq_event)(self.channel.raw(), &mut queue, &mut cookie)
        });
        if code != 0 {
            let error = Error::last("ibv_get_cq_event", self.object());
            return match error.errno {
                Errno::EAGAIN | Errno::EINTR => Ok(false),
                _ => Err(error),
            };
        }
        // SAFETY: the channel serves this queue only, so the event is its own. Acknowledged at once, it
        // never holds up ibv_destroy_cq.
        unsafe { (library.ibv_ack_cq_events)(self.raw(), 1) };
        Ok(true)
    }

    /// Sets `entries` aside for a queue pair.
    pub(super) fn reserve(&self, entries: u32) -> Result<()> {
        self.reserved
            .fetch_update(Relaxed, Relaxed, |reserved| {
                reserved
                    .checked_add(entries)
                    .filter(|sum| *sum <= self.entries)
            })
            .map(drop)
            .map_err(|_| Error::new("reserving entries", self.object(), Errno::ENOSPC))
    }

    pub(super) fn release(&self, entries: u32) {
        self.reserved.fetch_sub(entries, Relaxed);
    }

    fn object(&self) -> Object {
        Object::Queue(self.entries)
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        if self.context().is_ours() {
            // SAFETY: made by ibv_create_cq; its queue pairs hold an Arc of it, so are gone.
            fds::trusted(|| unsafe { (self.context().library.ibv_destroy_cq)(self.raw()) });
        }
    }
}

/// A completion channel: dropped after its queue.
struct Channel {
    raw: NonNull<sys::ibv_comp_channel>,
    context: Arc<Context>,
}

impl Channel {
    fn new(context: &Arc<Context>) -> Result<Channel> {
        let raw = fds::make_private(|keep| {
            // SAFETY: the context is open.
            let raw = fds::trusted(|| unsafe {
                (context.library.ibv_create_comp_channel)(context.raw())
            });
            let raw = NonNull::new(raw)?;
            // SAFETY: nobody else knows the channel; the library takes the descriptor from this field.
            unsafe { (*raw.as_ptr()).fd = keep((*raw.as_ptr()).fd) };
            Some(raw)
        });
        let raw = raw.ok_or_else(|| Error::last("ibv_create_comp_channel", context.object()))?;
        let channel = Channel {
            raw,
            context: context.clone(),
        };
        context.set_nonblocking(channel.fd())?;
        Ok(channel)
    }

    fn raw(&self) -> *mut sys::ibv_comp_channel {
        self.raw.as_ptr()
    }

    fn fd(&self) -> i32 {
        // SAFETY: the channel exists.
        unsafe { (*self.raw()).fd }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        if self.context.is_ours() {
            fds::clear(self.fd());
            // SAFETY: made by ibv_create_comp_channel; its queue is gone.
            fds::trusted(|| unsafe { (self.context.library.ibv_destroy_comp_channel)(self.raw()) });
        }
    }
}
