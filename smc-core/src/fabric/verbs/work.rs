//! Work requests: what their ids carry, how many are outstanding, and what a completion means.
//!
//! Most RDMA WRITEs are unsignalled: their place in the send queue is free again once a later signalled
//! request has completed. So each signalled request's id says how many places its completion frees.

use core::fmt;

use rdma_sys as sys;
use rdma_sys::ibv_wc_status as status;

/// Short messages (CDC, LLC) of a link that may be unacknowledged, as many as Linux has.
pub const MESSAGES: u32 = 16;
/// Places of the send queue: two WRITEs with each short message and the long one, and some for WRITEs alone.
pub const SEND_DEPTH: u32 = 64;
/// Receives kept posted. A Linux peer has at most 17 messages in flight.
pub const RECEIVE_DEPTH: u32 = 48;
/// Bytes of the longest message, in both directions: an LLC ADD LINK with many RMBs.
pub const MESSAGE_MAX: usize = 8192;
/// Bytes of a short message's place; SMC messages have 44.
pub const MESSAGE_SHORT: usize = 64;

/// Index of the place for a long message.
const LONG: u32 = MESSAGES;

const _: () = {
    assert!(SEND_DEPTH >= 3 * (MESSAGES + 1));
    // Indexes fit the id's six bits and the bitmaps, counts its eight bits.
    assert!(SEND_DEPTH < 256 && RECEIVE_DEPTH < 64 && LONG < 64);
};

/// What a work request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A posted receive: index of its buffer.
    Receive(u32),
    /// A message: index of its place.
    Send(u32),
    /// An RDMA WRITE.
    Write,
}

/// The 64 bits that travel with a work request: token (32), places freed (8), index (6), kind (2), serial (16).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WorkId {
    /// The caller's.
    pub(super) token: u32,
    /// Places of the send queue that a completion frees: 0 for unsignalled requests.
    pub(super) frees: u8,
    pub(super) kind: Kind,
    /// Which life of which queue pair: completions of a former one are recognised by it.
    pub(super) serial: u16,
}

impl WorkId {
    pub(super) fn pack(self) -> u64 {
        let (kind, index) = match self.kind {
            Kind::Receive(index) => (0, index),
            Kind::Send(index) => (1, index),
            Kind::Write => (2, 0),
        };
        u64::from(self.token)
            | u64::from(self.frees) << 32
            | u64::from(index & 63) << 40
            | kind << 46
            | u64::from(self.serial) << 48
    }

    /// `None`: not made by `pack`.
    pub(super) fn unpack(id: u64) -> Option<WorkId> {
        let index = (id >> 40) as u32 & 63;
        let kind = match (id >> 46) & 3 {
            0 => Kind::Receive(index),
            1 => Kind::Send(index),
            2 => Kind::Write,
            _ => return None,
        };
        Some(WorkId {
            token: id as u32,
            frees: (id >> 32) as u8,
            kind,
            serial: (id >> 48) as u16,
        })
    }
}

/// One entry of a completion queue, to be given to its queue pair, once.
#[derive(Debug)]
pub struct Completion {
    /// Number of the queue pair.
    pub queue_pair: u32,
    pub(super) id: u64,
    /// Bytes of a received message, or of a WRITE with immediate data.
    pub(super) length: u32,
    /// That immediate data.
    pub(super) immediate: Option<u32>,
    pub(super) failure: Option<Failure>,
}

impl Completion {
    /// # Safety
    /// `entry` must have been written by ibv_poll_cq.
    pub(super) unsafe fn read(entry: *const sys::ibv_wc) -> Completion {
        // SAFETY: promised by the caller. Id, status and queue pair are valid in every entry, the length
        // in successful receives (ibv_poll_cq(3)); it isn't used for others.
        unsafe {
            let failure = Failure::of((*entry).status);
            let written = failure.is_none()
                && (*entry).opcode == rdma_sys::ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM;
            let union = &(*entry).imm_data_invalidated_rkey_union;
            Completion {
                queue_pair: (*entry).qp_num,
                id: (*entry).wr_id,
                length: if failure.is_none() {
                    (*entry).byte_len
                } else {
                    0
                },
                immediate: written.then(|| u32::from_be(union.imm_data)),
                failure,
            }
        }
    }
}

/// Why a work request failed: its queue pair is in the error state after any of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The queue pair was already in the error state.
    Flushed,
    /// The peer refused the key or the address.
    RemoteAccess,
    /// The peer found the request malformed, such as a message longer than its buffer.
    RemoteInvalidRequest,
    /// The peer failed to carry it out.
    RemoteOperation,
    /// No acknowledgement: the peer or the path to it is gone.
    RetryExceeded,
    /// The peer posted no receive for too long.
    ReceiverNotReady,
    /// A received message is longer than the buffer.
    LocalLength,
    /// A local key or address was wrong.
    LocalProtection,
    /// Another: number of `enum ibv_wc_status`.
    Other(u32),
}

impl Failure {
    fn of(code: u32) -> Option<Failure> {
        Some(match code {
            status::IBV_WC_SUCCESS => return None,
            status::IBV_WC_WR_FLUSH_ERR => Failure::Flushed,
            status::IBV_WC_REM_ACCESS_ERR => Failure::RemoteAccess,
            status::IBV_WC_REM_INV_REQ_ERR => Failure::RemoteInvalidRequest,
            status::IBV_WC_REM_OP_ERR => Failure::RemoteOperation,
            status::IBV_WC_RETRY_EXC_ERR => Failure::RetryExceeded,
            status::IBV_WC_RNR_RETRY_EXC_ERR => Failure::ReceiverNotReady,
            status::IBV_WC_LOC_LEN_ERR => Failure::LocalLength,
            status::IBV_WC_LOC_PROT_ERR => Failure::LocalProtection,
            other => Failure::Other(other),
        })
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Failure::Flushed => "flushed",
            Failure::RemoteAccess => "the peer refused key or address",
            Failure::RemoteInvalidRequest => "the peer found the request invalid",
            Failure::RemoteOperation => "the peer could not carry it out",
            Failure::RetryExceeded => "the peer does not answer",
            Failure::ReceiverNotReady => "the peer posts no receives",
            Failure::LocalLength => "message longer than the buffer",
            Failure::LocalProtection => "wrong local key or address",
            Failure::Other(code) => return write!(f, "work completion status {code}"),
        })
    }
}

/// Accounts of a send queue.
#[derive(Debug, Default)]
pub(super) struct SendState {
    /// Places in use.
    used: u32,
    /// Of those, posted after the last signalled request.
    unsignalled: u32,
    /// Bit n: message place n is in use.
    places: u64,
}

impl SendState {
    /// A free place for a message of `len` bytes, not yet taken.
    pub(super) fn place(&self, len: usize) -> Option<u32> {
        let free = match len {
            0..=MESSAGE_SHORT => (!self.places).trailing_zeros().min(MESSAGES),
            _ => LONG,
        };
        // (When all short places are taken, a short message may use the long one.)
        (self.places & (1 << free) == 0).then_some(free)
    }

    /// Whether `count` more requests fit.
    pub(super) fn fits(&self, count: u32) -> bool {
        self.used.saturating_add(count) <= SEND_DEPTH
    }

    /// Whether a chain of `count` WRITEs must be signalled, lest the queue fills with requests that
    /// nothing will free.
    pub(super) fn must_signal(&self, count: u32) -> bool {
        self.unsignalled + count >= SEND_DEPTH / 4
    }

    /// Places that the completion of the last of `count` requests to be posted now will free.
    pub(super) fn frees(&self, count: u32) -> u8 {
        u8::try_from(self.unsignalled + count).unwrap_or(u8::MAX)
    }

    /// Notes `count` posted requests, the last of them signalled or not.
    pub(super) fn posted(&mut self, count: u32, signalled: bool) {
        self.used += count;
        self.unsignalled = if signalled {
            0
        } else {
            self.unsignalled + count
        };
    }

    pub(super) fn take(&mut self, place: u32) {
        self.places |= 1 << place;
    }

    /// Notes a completion.
    pub(super) fn completed(&mut self, id: &WorkId) {
        self.used = self.used.saturating_sub(u32::from(id.frees));
        if let Kind::Send(place) = id.kind {
            self.places &= !(1 << place);
        }
    }

    /// Places in use.
    pub(super) fn used(&self) -> u32 {
        self.used
    }
}

/// Where a message of this place begins in the area for messages.
pub(super) fn place_offset(place: u32) -> usize {
    place.min(LONG) as usize * MESSAGE_SHORT
}

/// Bytes of the area for messages.
pub(super) const PLACES_LEN: usize = MESSAGES as usize * MESSAGE_SHORT + MESSAGE_MAX;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn id(kind: Kind, frees: u8) -> WorkId {
        WorkId {
            token: 0xdead_beef,
            frees,
            kind,
            serial: 0x1234,
        }
    }

    #[test]
    fn ids_survive_packing() {
        for kind in [Kind::Receive(47), Kind::Send(LONG), Kind::Write] {
            assert_eq!(WorkId::unpack(id(kind, 17).pack()), Some(id(kind, 17)));
        }
        assert_eq!(WorkId::unpack(3 << 46), None);
    }

    #[test]
    fn short_messages_are_bounded_and_the_long_place_is_for_one() {
        let mut state = SendState::default();
        for n in 0..=MESSAGES {
            let place = state.place(44).unwrap();
            assert_eq!(place, n);
            state.take(place);
            state.posted(1, true);
        }
        assert_eq!(state.place(44), None);
        state.completed(&id(Kind::Send(3), 1));
        assert_eq!(state.place(44), Some(3));
        assert_eq!(state.place(MESSAGE_MAX), None, "taken by a short one");
        state.completed(&id(Kind::Send(LONG), 1));
        assert_eq!(state.place(MESSAGE_MAX), Some(LONG));
    }

    #[test]
    fn unsignalled_requests_are_freed_by_the_next_signalled_one() {
        let mut state = SendState::default();
        state.posted(2, false);
        assert_eq!(state.frees(3), 5);
        state.posted(3, true);
        state.posted(1, false);
        assert_eq!(state.used(), 6);
        state.completed(&id(Kind::Write, 5));
        assert_eq!(state.used(), 1);
        assert_eq!(state.frees(1), 2, "the last one is still to be freed");
    }

    #[test]
    fn places_do_not_overlap() {
        assert_eq!(place_offset(1) - place_offset(0), MESSAGE_SHORT);
        assert_eq!(place_offset(LONG) + MESSAGE_MAX, PLACES_LEN);
    }

    #[test]
    fn failures() {
        assert_eq!(Failure::of(0), None);
        assert_eq!(Failure::of(5), Some(Failure::Flushed));
        assert_eq!(Failure::of(10), Some(Failure::RemoteAccess));
        assert_eq!(Failure::of(21), Some(Failure::Other(21)));
    }

    proptest! {
        // Whatever is posted, the queue never overflows and never fills with requests that nothing frees.
        #[test]
        fn never_overflows_nor_gets_stuck(steps in prop::collection::vec((1u32..=2, any::<bool>()), 1..500)) {
            let mut state = SendState::default();
            let mut flying = std::collections::VecDeque::new();
            for (count, signalled) in steps {
                while !state.fits(count) {
                    let frees = flying.pop_front().expect("a signalled request is outstanding");
                    state.completed(&id(Kind::Write, frees));
                }
                let signalled = signalled || state.must_signal(count);
                if signalled {
                    flying.push_back(state.frees(count));
                }
                state.posted(count, signalled);
                prop_assert!(state.used() <= SEND_DEPTH);
            }
        }
    }
}
