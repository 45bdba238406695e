//! Reliable connected queue pairs: made, brought through their states, destroyed.
//!
//! The attributes are those with which Linux runs its own SMC-R links, since both ends must agree
//! on some of them. How requests are posted is in [`super::post`].

use core::mem::zeroed;
use core::ptr::{NonNull, null_mut};
use core::sync::atomic::{AtomicU16, Ordering::Relaxed};
use std::ffi::c_int;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rdma_sys as sys;
use rdma_sys::ibv_qp_attr_mask as mask;
use rdma_sys::ibv_qp_state as state;

use super::error::check;
use super::memory::Buffer;
use super::post::ReceiveState;
use super::work::{MESSAGE_MAX, PLACES_LEN, RECEIVE_DEPTH, SEND_DEPTH, SendState};
use super::{Error, Object, ProtectionDomain, Queue, Result};
use crate::fds;
use crate::sys::Errno;
use crate::wire::{Gid, Mtu};

/// Bytes that are asked to be carried within the work request. Enough for a message and a small WRITE.
const INLINE_WANTED: u32 = 128;
/// Scatter-gather elements of a WRITE: a send buffer is a ring, so what is sent may lie in two parts.
const SEND_SGE: u32 = 2;

const RECEIVES_LEN: usize = RECEIVE_DEPTH as usize * MESSAGE_MAX;

/// The way to the peer's queue pair: both ends' addresses and what was negotiated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Path {
    /// Own port, from 1.
    pub port: u8,
    /// Place of the own GID in that port's table.
    pub gid_index: u8,
    /// Packets' hop limit: 1 without a gateway, else 64.
    pub hop_limit: u8,
    /// The smaller of both ends' MTUs.
    pub mtu: Mtu,
    /// The peer's GID.
    pub peer_gid: Gid,
    /// The peer's queue pair, 24 bits.
    pub peer_number: u32,
    /// The PSN with which the peer begins, 24 bits.
    pub peer_psn: u32,
}

/// A queue pair with its receive buffers. Threads may post at the same time.
pub struct QueuePair {
    raw: NonNull<sys::ibv_qp>,
    number: u32,
    /// Bytes that the driver granted.
    pub(super) inline_max: u32,
    send: Mutex<SendState>,
    receive: Mutex<ReceiveState>,
    pub(super) serial: AtomicU16,
    // Dropped after the queue pair itself, in this order.
    buffer: Option<Buffer>,
    send_queue: Arc<Queue>,
    receive_queue: Arc<Queue>,
    pub(super) domain: Arc<ProtectionDomain>,
}

// SAFETY: as for `Context`; the accounts are behind locks.
unsafe impl Send for QueuePair {}
// SAFETY: as above.
unsafe impl Sync for QueuePair {}

impl QueuePair {
    /// Makes one in the RESET state. The queues may be the same, and may serve other queue pairs, too.
    pub fn new(
        domain: &Arc<ProtectionDomain>,
        send_queue: &Arc<Queue>,
        receive_queue: &Arc<Queue>,
    ) -> Result<QueuePair> {
        let buffer = Buffer::new(domain, RECEIVES_LEN + PLACES_LEN)?;
        send_queue.reserve(SEND_DEPTH)?;
        let made = receive_queue.reserve(RECEIVE_DEPTH).and_then(|()| {
            create(domain, send_queue, receive_queue)
                .inspect_err(|_| receive_queue.release(RECEIVE_DEPTH))
        });
        let (raw, inline_max) = made.inspect_err(|_| send_queue.release(SEND_DEPTH))?;
        Ok(QueuePair {
            // SAFETY: just made.
            number: unsafe { raw.as_ref().qp_num },
            raw,
            inline_max,
            send: Mutex::default(),
            receive: Mutex::default(),
            serial: AtomicU16::new(new_serial()),
            buffer: Some(buffer),
            send_queue: send_queue.clone(),
            receive_queue: receive_queue.clone(),
            domain: domain.clone(),
        })
    }

    /// An error of an operation on it.
    pub fn error(&self, operation: &'static str, errno: Errno) -> Error {
        Error::new(operation, self.object(), errno)
    }

    /// Its number, 24 bits.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Bytes up to which WRITEs and messages are carried within the work request.
    pub fn inline_max(&self) -> u32 {
        self.inline_max
    }

    /// RESET to INIT, on a port. Receives may be posted from now on.
    pub fn to_init(&self, port: u8) -> Result<()> {
        let mut attr = attributes(state::IBV_QPS_INIT);
        attr.pkey_index = 0;
        attr.port_num = port;
        attr.qp_access_flags = (sys::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE
            | sys::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE)
            .0;
        let set = mask::IBV_QP_PKEY_INDEX | mask::IBV_QP_PORT | mask::IBV_QP_ACCESS_FLAGS;
        self.modify("ibv_modify_qp to INIT", &mut attr, set)
    }

    /// INIT to RTR: the peer may write and send. EINVAL for numbers of more than 24 bits.
    pub fn to_rtr(&self, path: &Path) -> Result<()> {
        const OPERATION: &str = "ibv_modify_qp to RTR";
        if path.peer_number >> 24 != 0 || path.peer_psn >> 24 != 0 {
            return Err(Error::new(OPERATION, self.object(), Errno::EINVAL));
        }
        let mut attr = attributes(state::IBV_QPS_RTR);
        attr.path_mtu = sys::ibv_mtu::Type::from(path.mtu.code());
        attr.dest_qp_num = path.peer_number;
        attr.rq_psn = path.peer_psn;
        attr.max_dest_rd_atomic = 1;
        attr.min_rnr_timer = 5;
        attr.ah_attr.is_global = 1;
        attr.ah_attr.port_num = path.port;
        attr.ah_attr.grh.dgid.raw = path.peer_gid.0;
        attr.ah_attr.grh.sgid_index = path.gid_index;
        attr.ah_attr.grh.hop_limit = path.hop_limit;
        let set = mask::IBV_QP_AV
            | mask::IBV_QP_PATH_MTU
            | mask::IBV_QP_DEST_QPN
            | mask::IBV_QP_RQ_PSN
            | mask::IBV_QP_MAX_DEST_RD_ATOMIC
            | mask::IBV_QP_MIN_RNR_TIMER;
        self.modify(OPERATION, &mut attr, set)
    }

    /// RTR to RTS: requests may be posted. `psn` (24 bits) is the one that the peer was told.
    pub fn to_rts(&self, psn: u32) -> Result<()> {
        const OPERATION: &str = "ibv_modify_qp to RTS";
        if psn >> 24 != 0 {
            return Err(Error::new(OPERATION, self.object(), Errno::EINVAL));
        }
        let mut attr = attributes(state::IBV_QPS_RTS);
        attr.sq_psn = psn;
        // 4.096 µs · 2^15, some 134 ms, until a packet is sent again.
        attr.timeout = 15;
        attr.retry_cnt = 7;
        // 7: without end.
        attr.rnr_retry = 7;
        attr.max_rd_atomic = 1;
        let set = mask::IBV_QP_SQ_PSN
            | mask::IBV_QP_TIMEOUT
            | mask::IBV_QP_RETRY_CNT
            | mask::IBV_QP_RNR_RETRY
            | mask::IBV_QP_MAX_QP_RD_ATOMIC;
        self.modify(OPERATION, &mut attr, set)
    }

    /// Any state to ERROR: what is posted completes as [`super::Failure::Flushed`].
    pub fn to_error(&self) -> Result<()> {
        let mut attr = attributes(state::IBV_QPS_ERR);
        self.modify("ibv_modify_qp to ERR", &mut attr, mask(0))
    }

    /// Any state to RESET, to be used again. What is posted is forgotten, and completions that
    /// still come of it are not events ([`QueuePair::complete`]).
    pub fn to_reset(&self) -> Result<()> {
        let (mut send, mut receive) = (self.send_state(), self.receive_state());
        let mut attr = attributes(state::IBV_QPS_RESET);
        self.modify("ibv_modify_qp to RESET", &mut attr, mask(0))?;
        self.serial.store(new_serial(), Relaxed);
        *send = SendState::default();
        receive.forget_posted();
        Ok(())
    }

    pub(super) fn raw(&self) -> *mut sys::ibv_qp {
        self.raw.as_ptr()
    }

    pub(super) fn object(&self) -> Object {
        Object::QueuePair(self.number)
    }

    // A lock can't be poisoned: panics abort.
    pub(super) fn send_state(&self) -> MutexGuard<'_, SendState> {
        self.send.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn receive_state(&self) -> MutexGuard<'_, ReceiveState> {
        self.receive.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn buffer(&self) -> Option<&Buffer> {
        self.buffer.as_ref()
    }

    fn modify(
        &self,
        operation: &'static str,
        attr: &mut sys::ibv_qp_attr,
        set: mask,
    ) -> Result<()> {
        let set = (set | mask::IBV_QP_STATE).0 as c_int;
        let library = self.domain.context.library;
        // SAFETY: the queue pair exists; the attributes are read.
        let code = fds::trusted(|| unsafe { (library.ibv_modify_qp)(self.raw(), attr, set) });
        check(code, operation, || self.object())
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        let context = &self.domain.context;
        let destroyed = context.is_ours() && {
            // SAFETY: made by ibv_create_qp, used by nobody else any more.
            let code = fds::trusted(|| unsafe { (context.library.ibv_destroy_qp)(self.raw()) });
            check(code, "ibv_destroy_qp", || self.object())
                .inspect_err(|error| log::warn!("{error}"))
                .is_ok()
        };
        if destroyed {
            self.send_queue.release(SEND_DEPTH);
            self.receive_queue.release(RECEIVE_DEPTH);
        } else {
            // The device may still write into it.
            core::mem::forget(self.buffer.take());
        }
    }
}

/// Where receive buffer `index` begins in a queue pair's buffer.
pub(super) fn receive_offset(index: u32) -> usize {
    index as usize * MESSAGE_MAX
}

/// Where the area for messages begins.
pub(super) const PLACES_OFFSET: usize = RECEIVES_LEN;

/// The queue pair and the bytes it takes inline.
fn create(
    domain: &ProtectionDomain,
    send_queue: &Queue,
    receive_queue: &Queue,
) -> Result<(NonNull<sys::ibv_qp>, u32)> {
    let library = domain.context.library;
    let mut inline = INLINE_WANTED;
    loop {
        let mut attr = sys::ibv_qp_init_attr {
            qp_context: null_mut(),
            send_cq: send_queue.raw(),
            recv_cq: receive_queue.raw(),
            srq: null_mut(),
            cap: sys::ibv_qp_cap {
                max_send_wr: SEND_DEPTH,
                max_recv_wr: RECEIVE_DEPTH,
                max_send_sge: SEND_SGE,
                max_recv_sge: 1,
                max_inline_data: inline,
            },
            qp_type: sys::ibv_qp_type::IBV_QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: domain and queues exist; the call writes back what it granted.
        let raw = fds::trusted(|| unsafe { (library.ibv_create_qp)(domain.raw(), &mut attr) });
        match NonNull::new(raw) {
            Some(raw) => return Ok((raw, attr.cap.max_inline_data)),
            // Some devices refuse instead of granting less.
            None if inline > 0 => inline = 0,
            None => return Err(Error::last("ibv_create_qp", Object::QueuePair(0))),
        }
    }
}

fn attributes(state: state::Type) -> sys::ibv_qp_attr {
    // SAFETY: integers and arrays of them, for which zero is valid; the call reads what its mask names.
    let mut attr: sys::ibv_qp_attr = unsafe { zeroed() };
    attr.qp_state = state;
    attr
}

/// A number that the last 65535 lives of queue pairs of this process did not have.
fn new_serial() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    NEXT.fetch_add(1, Relaxed)
}
