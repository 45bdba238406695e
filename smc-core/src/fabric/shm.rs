//! The shared-memory fabric: layout of everything that two processes map together.
//!
//! - [`BellPage`]: one a node, shared with all its peers: who of the node sleeps, and which of its links
//!   have news. Hints only: a peer that scribbles here can cause spurious or missed wake-ups of its
//!   own user's processes, nothing else.
//! - [`Segment`]: one a link: pending bits and a [`ConnBlock`] for each connection.
//! - RMB chunks: 4 MiB of rings (see [`crate::ring`]), made by the receiver, one list a side of a link.
//!
//! Nothing in these pages is trusted: cursors are compared with private copies before use, and
//! everything is an atomic, so that a peer's concurrent scribbling is not undefined behaviour.
//! The mappings are sealed memfds, so a peer can't make an access fault by shrinking them.

use core::sync::atomic::{AtomicU32, AtomicU64};

use crate::bitmap::Bitmap;

/// Wakeable contexts of a node. Number 0 is the engine.
pub const BELLS: usize = 64;

/// Connections of one link.
pub const SLOTS: u32 = crate::bitmap::BITS as u32;

/// Entries of a switch log.
pub const LOG: usize = 8;

const MAGIC: u64 = 0x786d_7363_3031_6b6c;

/// One cache line with a flag: non-zero while a thread sleeps (or may be about to) and wants its
/// eventfd written.
#[repr(C, align(64))]
pub struct Sleep(pub AtomicU32);

/// See the module comment.
#[repr(C, align(64))]
pub struct BellPage {
    /// Links with news: index as announced in Hello.
    pub links: Bitmap,
    /// Who sleeps: the number of the nap. Set by its node before sleeping, set to 0 by whoever has rung.
    pub sleep: [Sleep; BELLS],
}

/// Bytes to map for a [`BellPage`].
pub const BELL_PAGE_LEN: usize = 8192;

/// Sender's line of one direction: written by the sender only.
#[repr(C, align(64))]
pub struct TxLine {
    /// Producer cursor: stream offset of the next byte to be written to the RMB.
    pub prod: AtomicU64,
    /// `TX_*` flags.
    pub flags: AtomicU32,
    /// Switches ever logged; odd means that the direction is on the RMB after the last of them.
    pub switches: AtomicU32,
    /// SMC-R: stream offset just behind the last urgent byte (tcp(7)), 0 if there was none. Stored before
    /// the cursor that covers it.
    pub urgent: AtomicU64,
}

/// Receiver's line of one direction: written by the receiver only.
#[repr(C, align(64))]
pub struct RxLine {
    /// Consumer cursor: stream offset of the next byte to be read, whatever the carrier.
    pub cons: AtomicU64,
    /// `RX_*` flags.
    pub flags: AtomicU32,
    /// Switches that the receiver has passed.
    pub passed: AtomicU32,
    /// Non-zero while the receiver is in a TCP read that no known switch bounds.
    pub unbounded: AtomicU32,
    /// How to tell this side that something changed: 0 not at all, else bell index + 1.
    pub notify: AtomicU32,
    /// SMC-R: bytes of the ring that the sender leaves free.
    pub spare: AtomicU32,
}

/// One direction of a connection.
#[repr(C, align(64))]
pub struct Direction {
    /// Written by the sender.
    pub tx: TxLine,
    /// Stream offsets of the last [`LOG`] switches; written by the sender before `tx.switches`.
    pub log: [AtomicU64; LOG],
    /// Written by the receiver.
    pub rx: RxLine,
}

/// Shared state of a connection: direction `i` is sent by side `i` of the link.
#[repr(C, align(64))]
pub struct ConnBlock {
    /// The two directions.
    pub dir: [Direction; 2],
    _pad: [u64; 16],
}

/// CDC "write blocked": the sender found the RMB full and wants to hear of room. A link group sets it on behalf of its peer
/// whenever what the program reads may make a message due.
pub const TX_BLOCKED: u32 = 1;
/// CDC "sending done": no more bytes will come in this direction.
pub const TX_DONE: u32 = 2;
/// CDC "peer connection closed": this side will touch neither the block nor the peer's RMB again.
pub const TX_CLOSED: u32 = 4;
/// CDC "abnormal close".
pub const TX_ABORT: u32 = 8;

/// The receiver reads through intercepted calls and agrees to the RMB.
pub const RX_READY: u32 = 1;
/// The receiver wants this direction on TCP (until the flag is cleared).
pub const RX_PINNED: u32 = 2;
/// SMC-R: the sender is to write more however little room there is, as nothing else brings news of more room.
pub const RX_ANY_ROOM: u32 = 4;

/// A link's control segment. Side 0 is the process that connected.
#[repr(C, align(4096))]
pub struct Segment {
    magic: AtomicU64,
    _pad: [u64; 511],
    /// Connections with news for side `i`.
    pub pending: [Bitmap; 2],
    _pad2: [u64; 382],
    /// Connection blocks, by slot.
    pub conns: [ConnBlock; SLOTS as usize],
}

/// Bytes of a control segment.
pub const SEGMENT_LEN: usize = size_of::<Segment>();

const _: () = {
    assert!(size_of::<ConnBlock>() == 512);
    assert!(size_of::<BellPage>() <= BELL_PAGE_LEN);
    assert!(SEGMENT_LEN <= 4 << 20);
};

impl Segment {
    /// Marks a fresh segment as ours.
    pub fn stamp(&self) {
        self.magic
            .store(MAGIC, core::sync::atomic::Ordering::Release);
    }
    /// Whether a mapped segment has the right layout.
    pub fn valid(&self) -> bool {
        self.magic.load(core::sync::atomic::Ordering::Acquire) == MAGIC
    }
}
