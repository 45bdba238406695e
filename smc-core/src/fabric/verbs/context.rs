//! An open device: its limits, its ports, and the news of its asynchronous event channel.

use core::mem::{MaybeUninit, zeroed};
use core::ptr::{NonNull, addr_of};
use std::ffi::{CStr, c_int};
use std::path::PathBuf;
use std::sync::Arc;

use rdma_sys as sys;

use super::error::check;
use super::library::{Library, library};
use super::{Error, Object, Result, Unusable};
use crate::fds;
use crate::sys::{self as os, Errno};
use crate::wire::{Gid, Mtu};

type PostSend = unsafe extern "C" fn(
    *mut sys::ibv_qp,
    *mut sys::ibv_send_wr,
    *mut *mut sys::ibv_send_wr,
) -> c_int;
type PostRecv = unsafe extern "C" fn(
    *mut sys::ibv_qp,
    *mut sys::ibv_recv_wr,
    *mut *mut sys::ibv_recv_wr,
) -> c_int;
type PollCq = unsafe extern "C" fn(*mut sys::ibv_cq, c_int, *mut sys::ibv_wc) -> c_int;
type NotifyCq = unsafe extern "C" fn(*mut sys::ibv_cq, c_int) -> c_int;

/// The calls of the data path, which the device's driver puts into the context.
pub(super) struct Calls {
    pub(super) post_send: PostSend,
    pub(super) post_recv: PostRecv,
    pub(super) poll_cq: PollCq,
    pub(super) req_notify_cq: NotifyCq,
}

/// An open device. Everything made from it keeps it open.
pub struct Context {
    raw: NonNull<sys::ibv_context>,
    pub(super) library: &'static Library,
    pub(super) calls: Calls,
    pub(super) name: Arc<str>,
    pub(super) max_queue_entries: u32,
    /// The process that opened it.
    owner: u32,
}

// SAFETY: the library's objects are safe for access by several threads unless asked otherwise (ibv_alloc_td(3)); the
// other fields never change.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// What a port says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortState {
    /// Whether packets can be sent.
    pub active: bool,
    /// The largest path MTU that its link carries.
    pub mtu: Mtu,
}

/// News of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AsyncEvent {
    /// The queue pair of this number is in the error state, or got a request that put it there.
    QueuePairError(u32),
    /// A completion queue overflowed or broke; its queue pairs are lost.
    QueueError,
    /// The port works (again).
    PortActive(u8),
    /// The port stopped working.
    PortDown(u8),
    /// The port's GID table changed.
    GidChange(u8),
    /// The device is lost: everything made from it has to go.
    DeviceFatal,
    /// Anything else: number of `enum ibv_event_type`.
    Other(u32),
}

impl Context {
    /// Opens a device by name. Its descriptors are made private to this library
    /// ([`fds::make_private`]).
    pub fn open(name: &str) -> core::result::Result<Arc<Context>, Unusable> {
        let library = library()?;
        let object = || Object::Device(name.into());
        let raw = fds::make_private(|keep| {
            fds::trusted(|| {
                library.check_fork()?;
                let raw = open_raw(library, name)?;
                // SAFETY: the context was just opened and nobody else knows it. Library and drivers take
                // the descriptors from these fields, at each call.
                unsafe {
                    let context = raw.as_ptr();
                    (*context).cmd_fd = keep((*context).cmd_fd);
                    (*context).async_fd = keep((*context).async_fd);
                }
                Ok::<_, Unusable>(raw)
            })
        })?;
        // SAFETY: the driver filled the table before the device was handed out.
        let ops = unsafe { &(*raw.as_ptr()).ops };
        let calls = match (ops.post_send, ops.post_recv, ops.poll_cq, ops.req_notify_cq) {
            (Some(post_send), Some(post_recv), Some(poll_cq), Some(req_notify_cq)) => Some(Calls {
                post_send,
                post_recv,
                poll_cq,
                req_notify_cq,
            }),
            _ => None,
        };
        let Some(calls) = calls else {
            close_raw(library, raw);
            return Err(Error::new("ibv_open_device", object(), Errno::EOPNOTSUPP).into());
        };
        let mut context = Context {
            raw,
            library,
            calls,
            name: name.into(),
            max_queue_entries: 0,
            owner: os::getpid(),
        };
        context.max_queue_entries = context.query_device()?;
        context.set_nonblocking(context.async_fd())?;
        Ok(Arc::new(context))
    }

    pub(super) fn raw(&self) -> *mut sys::ibv_context {
        self.raw.as_ptr()
    }

    /// Whether this process opened the device. The child of a fork must not touch its parent's objects: a
    /// destroying call would act on the parent's device, or on whatever got the descriptor's number.
    pub(super) fn is_ours(&self) -> bool {
        self.owner == os::getpid()
    }

    /// The device's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Readable when [`Context::next_event`] has news.
    pub fn async_fd(&self) -> i32 {
        // SAFETY: the context is open.
        unsafe { (*self.raw()).async_fd }
    }

    /// The device's node in /dev.
    ///
    /// # Errors
    /// ENODEV: it is gone, so the device is being removed.
    pub fn node(&self) -> core::result::Result<PathBuf, Errno> {
        // SAFETY: the context is open.
        let fd = unsafe { (*self.raw()).cmd_fd };
        if os::links(fd)? == 0 {
            return Err(Errno::ENODEV);
        }
        std::fs::read_link(format!("/proc/self/fd/{fd}")).map_err(|_| Errno::ENOENT)
    }

    /// Takes the next event; `None` if there is none now.
    pub fn next_event(&self) -> Result<Option<AsyncEvent>> {
        let mut event = MaybeUninit::<sys::ibv_async_event>::uninit();
        // SAFETY: the context is open; the event is written if the call returns 0.
        let code = fds::trusted(|| unsafe {
            (self.library.ibv_get_async_event)(self.raw(), event.as_mut_ptr())
        });
        if code != 0 {
            let error = Error::last("ibv_get_async_event", self.object());
            return match error.errno {
                Errno::EAGAIN | Errno::EINTR => Ok(None),
                _ => Err(error),
            };
        }
        // SAFETY: written by the call. The type is read as a number, since a newer library may have
        // more than rdma-sys's enum knows. Until it is acknowledged, the queue pair exists:
        // ibv_destroy_qp waits for that.
        unsafe {
            let event = event.as_mut_ptr();
            let kind = addr_of!((*event).event_type).cast::<u32>().read();
            let news = decode(
                kind,
                || (*(*event).element.qp).qp_num,
                || (*event).element.port_num as u8,
            );
            (self.library.ibv_ack_async_event)(event);
            Ok(Some(news))
        }
    }

    /// State and MTU of a port.
    pub fn port(&self, port: u8) -> Result<PortState> {
        // SAFETY: plain integers, for which zero is valid.
        let mut attr: sys::ibv_port_attr = unsafe { zeroed() };
        // SAFETY: the context is open; the call writes no more than the attributes.
        let code =
            fds::trusted(|| unsafe { (self.library.ibv_query_port)(self.raw(), port, &mut attr) });
        let object = || Object::Port(self.name.clone(), port);
        check(code, "ibv_query_port", object)?;
        let mtu = u8::try_from(attr.active_mtu)
            .ok()
            .and_then(Mtu::from_code)
            .ok_or_else(|| Error::new("ibv_query_port", object(), Errno::EPROTO))?;
        Ok(PortState {
            active: attr.state == sys::ibv_port_state::IBV_PORT_ACTIVE,
            mtu,
        })
    }

    /// The GID at a place of a port's table, as the device has it now.
    pub fn gid(&self, port: u8, index: u8) -> Result<Gid> {
        let mut gid = sys::ibv_gid { raw: [0; 16] };
        // SAFETY: the context is open; the call writes one GID.
        let code = fds::trusted(|| unsafe {
            (self.library.ibv_query_gid)(self.raw(), port, c_int::from(index), &mut gid)
        });
        check(code, "ibv_query_gid", || {
            Object::Port(self.name.clone(), port)
        })?;
        // SAFETY: any bytes are a valid array.
        Ok(Gid(unsafe { gid.raw }))
    }

    /// The largest completion queue of the device.
    fn query_device(&self) -> Result<u32> {
        // SAFETY: plain integers, for which zero is valid.
        let mut attr: sys::ibv_device_attr = unsafe { zeroed() };
        // SAFETY: the context is open; the call writes the attributes.
        let code =
            fds::trusted(|| unsafe { (self.library.ibv_query_device)(self.raw(), &mut attr) });
        check(code, "ibv_query_device", || self.object())?;
        Ok(attr.max_cqe.unsigned_abs())
    }

    pub(super) fn set_nonblocking(&self, fd: i32) -> Result<()> {
        os::fcntl(fd, libc::F_GETFL, 0)
            .and_then(|flags| os::fcntl(fd, libc::F_SETFL, (flags | libc::O_NONBLOCK) as usize))
            .map(drop)
            .map_err(|errno| Error::new("fcntl O_NONBLOCK", self.object(), errno))
    }

    pub(super) fn object(&self) -> Object {
        Object::Device(self.name.clone())
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.is_ours() {
            close_raw(self.library, self.raw);
        }
    }
}

fn open_raw(
    library: &Library,
    name: &str,
) -> core::result::Result<NonNull<sys::ibv_context>, Unusable> {
    let object = || Object::Device(name.into());
    let mut count: c_int = 0;
    // SAFETY: the call writes the count.
    let list = unsafe { (library.ibv_get_device_list)(&mut count) };
    if list.is_null() {
        return Err(Error::last("ibv_get_device_list", object()).into());
    }
    let wanted = |device: &*mut sys::ibv_device| {
        // SAFETY: a device of the list, whose name lives as long as the list.
        let own = unsafe { CStr::from_ptr((library.ibv_get_device_name)(*device)) };
        own.to_bytes() == name.as_bytes()
    };
    // SAFETY: the list has so many elements, and is freed below only.
    let devices = unsafe { core::slice::from_raw_parts(list, count.unsigned_abs() as usize) };
    let outcome = match devices.iter().find(|device| wanted(device)) {
        None => Err(Unusable::NoProvider),
        Some(device) => {
            // SAFETY: a device of the list.
            let context = unsafe { (library.ibv_open_device)(*device) };
            NonNull::new(context).ok_or_else(|| Error::last("ibv_open_device", object()).into())
        }
    };
    // SAFETY: freed once; open devices survive it (ibv_get_device_list(3)).
    unsafe { (library.ibv_free_device_list)(list) };
    outcome
}

/// Closes a device from which nothing else is left.
fn close_raw(library: &Library, raw: NonNull<sys::ibv_context>) {
    fds::trusted(|| {
        // SAFETY: called once, by the context's only owner. The library closes the descriptors itself.
        unsafe {
            fds::clear((*raw.as_ptr()).cmd_fd);
            fds::clear((*raw.as_ptr()).async_fd);
            (library.ibv_close_device)(raw.as_ptr());
        }
    });
}

/// Event of a type number; `queue_pair` and `port` read the element that this type has.
fn decode(kind: u32, queue_pair: impl FnOnce() -> u32, port: impl FnOnce() -> u8) -> AsyncEvent {
    use sys::ibv_event_type as t;
    const CQ_ERR: u32 = t::IBV_EVENT_CQ_ERR as u32;
    const QP_FATAL: u32 = t::IBV_EVENT_QP_FATAL as u32;
    const QP_REQ_ERR: u32 = t::IBV_EVENT_QP_REQ_ERR as u32;
    const QP_ACCESS_ERR: u32 = t::IBV_EVENT_QP_ACCESS_ERR as u32;
    const DEVICE_FATAL: u32 = t::IBV_EVENT_DEVICE_FATAL as u32;
    const PORT_ACTIVE: u32 = t::IBV_EVENT_PORT_ACTIVE as u32;
    const PORT_ERR: u32 = t::IBV_EVENT_PORT_ERR as u32;
    const GID_CHANGE: u32 = t::IBV_EVENT_GID_CHANGE as u32;
    match kind {
        CQ_ERR => AsyncEvent::QueueError,
        QP_FATAL | QP_REQ_ERR | QP_ACCESS_ERR => AsyncEvent::QueuePairError(queue_pair()),
        DEVICE_FATAL => AsyncEvent::DeviceFatal,
        PORT_ACTIVE => AsyncEvent::PortActive(port()),
        PORT_ERR => AsyncEvent::PortDown(port()),
        GID_CHANGE => AsyncEvent::GidChange(port()),
        other => AsyncEvent::Other(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn event_numbers() {
        let event = |kind| decode(kind, || 17, || 1);
        assert_eq!(event(0), AsyncEvent::QueueError);
        assert_eq!(event(1), AsyncEvent::QueuePairError(17));
        assert_eq!(event(3), AsyncEvent::QueuePairError(17));
        assert_eq!(event(8), AsyncEvent::DeviceFatal);
        assert_eq!(event(9), AsyncEvent::PortActive(1));
        assert_eq!(event(10), AsyncEvent::PortDown(1));
        assert_eq!(event(18), AsyncEvent::GidChange(1));
        assert_eq!(event(1000), AsyncEvent::Other(1000));
    }
}
