//! Posting: messages, RDMA WRITEs, receives; and what their completions mean.
//!
//! Nothing here allocates, and one call is one doorbell.

use core::ptr::{copy_nonoverlapping, null_mut};
use core::sync::atomic::Ordering::Relaxed;

use rdma_sys as sys;

use super::error::check;
use super::qp::{PLACES_OFFSET, receive_offset};
use super::work::{
    Completion, Failure, Kind, MESSAGE_MAX, RECEIVE_DEPTH, SendState, WorkId, place_offset,
};
use super::{Error, Piece, QueuePair, Result};
use crate::fds;
use crate::sys::Errno;

/// RDMA WRITEs in one call: what is written to a ring has at most two parts.
pub const WRITES: usize = 2;

/// One RDMA WRITE.
#[derive(Clone, Copy)]
pub struct Write<'a> {
    /// Local bytes, in order: none to two pieces. Without a piece it only probes the peer.
    pub local: &'a [Piece<'a>],
    /// First address of the peer's memory.
    pub address: u64,
    /// Key of the peer's region.
    pub rkey: u32,
}

/// Why nothing was posted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PostError {
    /// Too many requests are outstanding: try again after a completion.
    #[error("the send queue is full")]
    Full,
    /// The message is longer than [`MESSAGE_MAX`], there are too many writes or pieces, or there is nothing to post.
    #[error("message too long, or no writes, or too many writes or pieces")]
    Invalid,
    /// The driver refused; writes that were to go before may have been posted.
    #[error("{0}")]
    Failed(#[from] Error),
}

/// What a completion tells.
pub enum Event<'a> {
    /// A message came.
    Received(Received<'a>),
    /// The peer has written so many bytes to memory of ours, with this immediate data.
    Immediate {
        /// The 32 bits that went with it.
        data: u32,
        /// Bytes written.
        length: u32,
    },
    /// The peer has the message of this token, and what was written before it.
    Sent(u32),
    /// The peer has what the call with this token wrote. Comes for calls that asked for it, and for some others.
    Written(u32),
    /// The queue pair is in the error state. The token is that of the call, 0 for a receive.
    Failed(Failure, u32),
}

/// A received message. Its buffer is posted again when this is dropped.
pub struct Received<'a> {
    queue_pair: &'a QueuePair,
    index: u32,
    bytes: &'a [u8],
}

impl Received<'_> {
    /// The message, 0 to [`MESSAGE_MAX`] bytes.
    pub fn bytes(&self) -> &[u8] {
        self.bytes
    }
}

impl Drop for Received<'_> {
    fn drop(&mut self) {
        let mut state = self.queue_pair.receive_state();
        state.held &= !(1 << self.index);
        self.queue_pair.refill(&mut state);
    }
}

/// Whose the receive buffers are.
#[derive(Debug, Default)]
pub(super) struct ReceiveState {
    /// Bit n: buffer n is the device's.
    posted: u64,
    /// Bit n: buffer n is lent out as [`Received`].
    held: u64,
}

impl ReceiveState {
    /// After a reset no buffer is the device's.
    pub(super) fn forget_posted(&mut self) {
        self.posted = 0;
    }

    /// Bit n: buffer n is neither the device's nor lent out.
    fn idle(&self) -> u64 {
        !(self.posted | self.held) & ((1 << RECEIVE_DEPTH) - 1)
    }

    /// Takes buffer `index` from the device. False: it didn't have it.
    fn take(&mut self, index: u32) -> bool {
        let bit = 1u64.checked_shl(index).unwrap_or(0);
        let posted = self.posted & bit != 0;
        self.posted &= !bit;
        posted
    }
}

impl QueuePair {
    /// Posts all receive buffers that aren't: in INIT or later, before the peer may send.
    pub fn post_receives(&self) -> Result<()> {
        let mut state = self.receive_state();
        while state.idle() != 0 {
            self.post_some_receives(&mut state)?;
        }
        Ok(())
    }

    /// Posts up to two WRITEs, unsignalled, and a message of up to [`MESSAGE_MAX`] bytes after them, signalled and
    /// solicited. Its completion is [`Event::Sent`] with `token`. The pieces' memory may change after that, or
    /// at once if they are [`QueuePair::inline_max`] bytes or fewer.
    ///
    /// At most 16 short messages (64 bytes) and one longer are outstanding.
    pub fn send(
        &self,
        writes: &[Write<'_>],
        message: &[u8],
        token: u32,
    ) -> core::result::Result<(), PostError> {
        if message.len() > MESSAGE_MAX {
            return Err(PostError::Invalid);
        }
        let mut chain = self.chain::<{ WRITES + 1 }>(writes, token)?;
        let mut state = self.send_state();
        let count = chain.length as u32 + 1;
        let place = state.place(message.len()).filter(|_| state.fits(count));
        let place = place.ok_or(PostError::Full)?;
        let offset = PLACES_OFFSET + place_offset(place);
        let buffer = self.buffer().ok_or(PostError::Invalid)?;
        let (Some(pointer), Some(piece)) = (
            buffer.pointer(offset, message.len()),
            buffer.piece(offset, message.len()),
        ) else {
            return Err(PostError::Invalid);
        };
        // SAFETY: the place is within the buffer and ours: no outstanding request uses it, and the lock keeps
        // other threads away.
        unsafe { copy_nonoverlapping(message.as_ptr(), pointer, message.len()) };
        let id = WorkId {
            token,
            frees: state.frees(count),
            kind: Kind::Send(place),
            serial: self.serial.load(Relaxed),
        };
        let flags =
            sys::ibv_send_flags::IBV_SEND_SIGNALED | sys::ibv_send_flags::IBV_SEND_SOLICITED;
        chain.push(id, &[piece], self.inline_max, |request| {
            request.opcode = sys::ibv_wr_opcode::IBV_WR_SEND;
            request.send_flags |= flags.0;
        });
        self.post(&mut chain, &mut state, true)?;
        state.take(place);
        Ok(())
    }

    /// Posts up to two WRITEs. With `signal`, their completion is [`Event::Written`] with `token`. Without it there
    /// may be none: a later signalled call's completion tells that these are done, too.
    pub fn write(
        &self,
        writes: &[Write<'_>],
        token: u32,
        signal: bool,
    ) -> core::result::Result<(), PostError> {
        let mut chain = self.chain::<WRITES>(writes, token)?;
        if chain.length == 0 {
            return Err(PostError::Invalid);
        }
        self.post_writes(&mut chain, token, signal)
    }

    fn post_writes<const N: usize>(
        &self,
        chain: &mut Chain<N>,
        token: u32,
        signal: bool,
    ) -> core::result::Result<(), PostError> {
        let count = chain.length as u32;
        let mut state = self.send_state();
        if !state.fits(count) {
            return Err(PostError::Full);
        }
        let signal = signal || state.must_signal(count);
        if signal && let Some(last) = chain.last() {
            last.send_flags |= sys::ibv_send_flags::IBV_SEND_SIGNALED.0;
            last.wr_id = WorkId {
                token,
                frees: state.frees(count),
                kind: Kind::Write,
                serial: self.serial.load(Relaxed),
            }
            .pack();
        }
        self.post(chain, &mut state, signal)
    }

    /// Whether [`QueuePair::send`] would take a short message and the most writes now.
    pub fn has_room(&self) -> bool {
        let state = self.send_state();
        state.place(0).is_some() && state.fits(WRITES as u32 + 1)
    }

    /// Posts one WRITE with 32 bits of immediate data, solicited: the peer gets [`Event::Immediate`] out of one packet
    /// where [`QueuePair::send`] takes two. With `signal`, its completion is [`Event::Written`] with `token`; without it as
    /// with [`QueuePair::write`].
    pub fn write_immediate(
        &self,
        write: Write<'_>,
        data: u32,
        token: u32,
        signal: bool,
    ) -> core::result::Result<(), PostError> {
        let mut chain = self.chain::<1>(&[write], token)?;
        if let Some(request) = chain.last() {
            request.opcode = sys::ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM;
            request.imm_data_invalidated_rkey_union.imm_data = data.to_be();
            request.send_flags |= sys::ibv_send_flags::IBV_SEND_SOLICITED.0;
        }
        self.post_writes(&mut chain, token, signal)
    }

    /// Places of the send queue in use, of [`super::SEND_DEPTH`].
    pub fn outstanding(&self) -> u32 {
        self.send_state().used()
    }

    /// What a completion of this queue pair tells. `None`: nothing, such as one from before a reset, or of another
    /// queue pair.
    pub fn complete(&self, completion: Completion) -> Option<Event<'_>> {
        let id = WorkId::unpack(completion.id)?;
        if completion.queue_pair != self.number() {
            return None;
        }
        // (Asked under the lock, as a reset changes the serial under it.)
        let current = || id.serial == self.serial.load(Relaxed);
        match id.kind {
            Kind::Receive(index) => {
                let mut state = self.receive_state();
                if !current() || !state.take(index) {
                    return None;
                }
                if let Some(failure) = completion.failure {
                    return Some(Event::Failed(failure, 0));
                }
                if let Some(data) = completion.immediate {
                    // The buffer was used up, though nothing is in it.
                    self.refill(&mut state);
                    return Some(Event::Immediate {
                        data,
                        length: completion.length,
                    });
                }
                let length = (completion.length as usize).min(MESSAGE_MAX);
                let pointer = self.buffer()?.pointer(receive_offset(index), length)?;
                state.held |= 1 << index;
                Some(Event::Received(Received {
                    queue_pair: self,
                    index,
                    // SAFETY: the device has given the buffer back, and gets it again when `Received` is dropped.
                    bytes: unsafe { core::slice::from_raw_parts(pointer, length) },
                }))
            }
            Kind::Send(_) | Kind::Write => {
                let mut state = self.send_state();
                if !current() {
                    return None;
                }
                state.completed(&id);
                Some(match (completion.failure, id.kind) {
                    (Some(failure), _) => Event::Failed(failure, id.token),
                    (None, Kind::Write) => Event::Written(id.token),
                    (None, _) => Event::Sent(id.token),
                })
            }
        }
    }

    /// A chain of unsignalled WRITEs.
    fn chain<const N: usize>(
        &self,
        writes: &[Write<'_>],
        token: u32,
    ) -> core::result::Result<Chain<N>, PostError> {
        let mut chain = Chain::new();
        if writes.len() > WRITES || writes.iter().any(|write| write.local.len() > PIECES) {
            return Err(PostError::Invalid);
        }
        let id = WorkId {
            token,
            frees: 0,
            kind: Kind::Write,
            serial: self.serial.load(Relaxed),
        };
        for write in writes {
            chain.push(id, write.local, self.inline_max, |request| {
                request.opcode = sys::ibv_wr_opcode::IBV_WR_RDMA_WRITE;
                request.wr.rdma = sys::rdma_t {
                    remote_addr: write.address,
                    rkey: write.rkey,
                };
            });
        }
        Ok(chain)
    }

    /// Posts a chain whose last request is signalled or not.
    fn post<const N: usize>(
        &self,
        chain: &mut Chain<N>,
        state: &mut SendState,
        signalled: bool,
    ) -> core::result::Result<(), PostError> {
        let Some(first) = chain.link() else {
            return Ok(());
        };
        let mut refused = null_mut();
        // SAFETY: the queue pair exists; the chain and its lists live until the call returns, after which the driver
        // doesn't look at them. The pieces are of regions; what is inline is copied.
        let code = fds::trusted(|| unsafe {
            (self.domain.context.calls.post_send)(self.raw(), first, &mut refused)
        });
        match check(code, "ibv_post_send", || self.object()) {
            Ok(()) => {
                state.posted(chain.length as u32, signalled);
                Ok(())
            }
            Err(error) => {
                state.posted(chain.before(refused), false);
                Err(error.into())
            }
        }
    }

    /// Posts receive buffers that are the program's, once there are enough of them to be worth a call.
    fn refill(&self, state: &mut ReceiveState) {
        if state.idle().count_ones() as usize >= REFILL {
            // Fails only where the queue pair is not in a state for receives, which its other completions or its owner
            // tell; `post_receives` posts the buffers when it is used again.
            let _ = self.post_some_receives(state);
        }
    }

    /// Posts up to [`REFILL`] receive buffers that are neither posted nor lent out.
    fn post_some_receives(&self, state: &mut ReceiveState) -> Result<()> {
        // SAFETY: integers and null pointers, for which zero is valid.
        let (mut requests, mut elements): ([sys::ibv_recv_wr; REFILL], [sys::ibv_sge; REFILL]) =
            unsafe { core::mem::zeroed() };
        let mut idle = state.idle();
        let (mut first, mut chosen) = (null_mut(), 0);
        for (request, element) in requests.iter_mut().zip(&mut elements) {
            let index = idle.trailing_zeros();
            if index >= RECEIVE_DEPTH {
                break;
            }
            let piece = self
                .buffer()
                .and_then(|buffer| buffer.piece(receive_offset(index), MESSAGE_MAX))
                .ok_or_else(|| Error::new("ibv_post_recv", self.object(), Errno::EINVAL))?;
            *element = piece.sge();
            let id = WorkId {
                token: 0,
                frees: 0,
                kind: Kind::Receive(index),
                serial: self.serial.load(Relaxed),
            };
            *request = sys::ibv_recv_wr {
                wr_id: id.pack(),
                next: first,
                sg_list: element,
                num_sge: 1,
            };
            first = request;
            chosen |= 1 << index;
            idle &= idle - 1;
        }
        let mut refused = null_mut();
        // SAFETY: the queue pair exists; the requests are read during the call. The buffers are neither posted nor lent
        // out: the callers have the lock of `state`.
        let code = fds::trusted(|| unsafe {
            (self.domain.context.calls.post_recv)(self.raw(), first, &mut refused)
        });
        // Where the device refuses one, it may have those before. They are not posted again.
        state.posted |= chosen;
        check(code, "ibv_post_recv", || self.object())
    }
}

/// Receives that are posted by one call.
const REFILL: usize = 8;

/// Pieces of a WRITE.
const PIECES: usize = 2;

/// A list of up to N work requests, on the stack.
struct Chain<const N: usize> {
    requests: [sys::ibv_send_wr; N],
    elements: [[sys::ibv_sge; PIECES]; N],
    length: usize,
}

impl<const N: usize> Chain<N> {
    fn new() -> Self {
        // SAFETY: integers, null pointers and unions of them, for which zero is valid.
        unsafe { core::mem::zeroed() }
    }

    /// Adds a request for `pieces`, inline if they are small, that `fill` completes. Ignored beyond the
    /// bounds, which callers have checked.
    fn push(
        &mut self,
        id: WorkId,
        pieces: &[Piece<'_>],
        inline_max: u32,
        fill: impl FnOnce(&mut sys::ibv_send_wr),
    ) {
        let (Some(request), Some(elements)) = (
            self.requests.get_mut(self.length),
            self.elements.get_mut(self.length),
        ) else {
            return;
        };
        let mut bytes = 0u64;
        // (Devices take an element of length 0 for 2 GiB, so there is none.)
        for piece in pieces.iter().filter(|piece| piece.length() > 0) {
            if let Some(element) = elements.get_mut(request.num_sge as usize) {
                *element = piece.sge();
                request.num_sge += 1;
                bytes += u64::from(piece.length());
            }
        }
        request.wr_id = id.pack();
        if bytes > 0 && bytes <= u64::from(inline_max) {
            request.send_flags = sys::ibv_send_flags::IBV_SEND_INLINE.0;
        }
        fill(request);
        self.length += 1;
    }

    fn last(&mut self) -> Option<&mut sys::ibv_send_wr> {
        self.requests.get_mut(self.length.checked_sub(1)?)
    }

    /// Sets the pointers between the parts, which must not move any more. `None`: the list is empty.
    fn link(&mut self) -> Option<*mut sys::ibv_send_wr> {
        let length = self.length;
        let mut next = null_mut();
        let parts = self.requests.iter_mut().zip(&mut self.elements);
        for (request, elements) in parts.take(length).rev() {
            request.sg_list = elements.as_mut_ptr();
            request.next = next;
            next = request;
        }
        (length > 0).then_some(next)
    }

    /// How many requests come before the one at `refused`.
    fn before(&self, refused: *const sys::ibv_send_wr) -> u32 {
        let requests = self.requests.iter().take(self.length);
        requests
            .take_while(|request| !core::ptr::eq(*request, refused))
            .count() as u32
    }
}
