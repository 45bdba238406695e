//! One SMC-R connection: what CDC messages tell the peer, and what the peer's tell us. No I/O, no clocks.
//!
//! The program's side of a connection lives in its connection block (`fabric::shm::ConnBlock`), in which the stream
//! code keeps producer and consumer cursors as stream offsets and its flags. [`Conn`] stands between that block
//! and the wire. [`Conn::next`] compares the block with what the peer has been told and gives the RDMA WRITEs
//! and the CDC message that are due; [`Conn::received`] checks a CDC message and says what to put into the
//! block. Positions are 64-bit stream offsets; the wire's (wrap, count) exists only in the messages.
//!
//! Between two xsmc nodes the common case needs no CDC message: a single WRITE that carries 32 bits of immediate data
//! ([`Immediate`]) says all that has changed. It is used only where nothing but cursors has, and is in order with the
//! messages, as all of it goes by one queue pair.
//!
//! The bytes to send lie in a local ring (the *mirror*) at the same offsets as in the peer's RMB, of the
//! same size or, where that is larger than a chunk, of a smaller one that divides it.
//!
//! **Failover.** When its link has died, a connection goes on over another one ([`Conn::fail_over`]), and nobody knows
//! which of the last writes and messages were carried out. So it first says which message it knows to have arrived,
//! for the peer to see whether it lost anything, and then repeats what is not acknowledged: the writes to where they
//! were to go before, so that twice does no harm, and a message, never immediate data, with all there is to say.
//! In the other direction immediate data is only taken from the link on which the peer's last message came: it is a
//! difference to what that said.
//!
//! Linux doesn't repeat a consumer cursor that was lost with the former link, neither by itself nor when it is asked,
//! but answers the question ("consumer cursor update requested") with its program's next read. Where that has read
//! everything before, there must be something more to read. So of the ring to such a peer ([`Peer::forgets`]) the
//! program leaves [`SPARE`] bytes free, and after a change of links it is given one of them at a time, until there is
//! an answer ([`Changes::inquiring`]); several, because the peer may still answer by the link that is dead. A program that
//! has nothing more to send doesn't need to know what the peer has read.
//!
//! **Urgent data.** A message whose flags say "urgent data present" marks the byte before its producer cursor. As
//! Linux speaks SMC-R, nothing behind that byte is announced until the peer's consumer cursor has passed it, and the
//! receiver tells its cursor at once when it has. So there is one mark under way at most; where the program sets
//! another meanwhile, the last of them counts, as with TCP.

use super::Lane;
use crate::fabric::shm::{SLOTS, TX_ABORT, TX_BLOCKED, TX_CLOSED, TX_DONE};
use crate::wire::cdc::{Cdc, ProducerFlags, StateFlags};
use crate::wire::cursor::Cursor;
use crate::wire::{RmbSize, Rtoken};

/// A consumer cursor is told at the latest when this many bytes have been read since the last (RFC 7609 leaves
/// it open; Linux uses the same bound), unless a tenth of the RMB is more.
const UPDATE_MIN: u64 = 2304;

/// Bytes of the ring to a peer that forgets its consumer cursor that are left free: so often can be asked for it.
pub const SPARE: u32 = 8;

/// What the program's side says: the connection block as read for [`Conn::next`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Local {
    /// Stream offset behind the last byte that the program has sent.
    pub prod: u64,
    /// Stream offset of the next byte that the program will read.
    pub cons: u64,
    /// Stream offset just behind the last urgent byte that the program has sent, 0 if there was none. May be
    /// beyond `prod`, which is read first.
    pub urgent: u64,
    /// `TX_*` flags of the direction we send.
    pub flags: u32,
}

/// One RDMA WRITE.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Write {
    /// Offset in the mirror.
    pub from: u32,
    /// Bytes.
    pub len: u32,
    /// Address in the peer's RMB.
    pub to: u64,
}

/// What [`Conn::next`] wants sent: the writes first, then the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outgoing {
    /// At most two: the mirror wraps once. Unused ones have length 0.
    pub writes: [Write; 2],
    /// The CDC message behind them.
    pub cdc: Cdc,
    /// What is acknowledged when its SEND completes.
    pub mark: Mark,
    /// In place of the message: the (single) write's immediate data.
    pub immediate: Option<u32>,
}

/// What the peer's host has when a SEND or WRITE has completed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mark {
    /// All bytes before this producer position.
    pub prod: u64,
    /// The messages up to this sequence number.
    pub seq: u16,
}

/// The immediate data of a WRITE: which connection, and how far the sender's consumer cursor has moved. The
/// producer cursor moves by what is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Immediate {
    /// Slot of the connection at the receiver.
    pub slot: u32,
    /// Bytes, less than 2^20.
    pub consumed: u32,
}

impl Immediate {
    /// Bits of the consumed bytes; the others are the slot's.
    const BITS: u32 = u32::BITS - SLOTS.ilog2();

    /// From the 32 bits.
    pub fn unpack(data: u32) -> Immediate {
        Immediate {
            slot: data >> Self::BITS,
            consumed: data & ((1 << Self::BITS) - 1),
        }
    }

    /// The 32 bits; `None` if the bytes are too many.
    pub fn pack(self) -> Option<u32> {
        (self.consumed >> Self::BITS == 0).then_some(self.slot << Self::BITS | self.consumed)
    }
}

/// What a CDC message changes in the connection block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Producer position of the direction we receive.
    pub prod: u64,
    /// Consumer position of the direction we send.
    pub cons: u64,
    /// `TX_*` flags of the direction we receive, to be added.
    pub flags: u32,
    /// Stream offset just behind the last urgent byte of the direction we receive, 0 if there was none; at most
    /// `prod`.
    pub urgent: u64,
    /// Whether anything is new to the program.
    pub news: bool,
    /// Whether [`Conn::next`] has to be asked: bytes need no longer be withheld, or the peer has a question.
    pub resume: bool,
    /// Whether what the program reads may make a message due: only then need it say so.
    pub heeds_reading: bool,
    /// The peer's consumer position may be beyond `cons`, and is learned only by writing more.
    pub inquiring: bool,
}

/// The peer broke the protocol: the connection has to be aborted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Violation;

/// The peer's end of the connection, as its Accept or Confirm says.
#[derive(Clone, Copy, Debug)]
pub struct Peer {
    /// Its alert token: goes into every CDC message to it.
    pub token: u32,
    /// Its RMB.
    pub rmb: Rtoken,
    /// Size of that.
    pub size: RmbSize,
    /// Size of the mirror in bytes, a power of two, at most `size`.
    pub mirror_size: u32,
    /// Its slot, if it understands [`Immediate`]s.
    pub slot: Option<u32>,
    /// It may change links, and doesn't repeat its consumer cursor then.
    pub forgets: bool,
}

/// What is to be said first after a change of links.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Repeat {
    /// Nothing: there was no change, or all has been said.
    No,
    /// Which message the peer must have.
    Validation,
    /// All that it may not have.
    Unacknowledged,
}

/// See the module comment.
#[derive(Debug)]
pub struct Conn {
    /// Size of our RMB.
    own_size: RmbSize,
    /// `None` until its CLC message has come. Messages about the connection may come before.
    peer: Option<Peer>,
    /// Producer position that the peer has been told.
    sent: u64,
    /// The part of it that the peer's host has, as far as is known: what is behind it is repeated after a change of links.
    acked: u64,
    /// Sequence number of the last message whose SEND has completed.
    acked_seq: u16,
    repeat: Repeat,
    /// The peer has said nothing since a change of links, and may have forgotten to say how far it has read.
    inquiring: bool,
    /// The peer's consumer position.
    peer_cons: u64,
    /// Sequence number of the last message we sent.
    seq: u16,
    /// Connection state flags that we have sent; they stay set.
    told: StateFlags,
    /// The last message said that we are blocked.
    told_blocked: bool,
    /// Position just behind the last urgent byte that we have announced, 0 if there was none.
    told_urgent: u64,
    /// Bytes of the program's, and what it has said behind them, wait for the peer to read an urgent byte.
    withheld: bool,
    /// The peer's producer position.
    peer_prod: u64,
    /// Our consumer position that the peer has been told.
    told_cons: u64,
    /// Sequence number of the peer's last message.
    peer_seq: u16,
    /// The link by which that came; at first, the one of the negotiation.
    peer_lane: Lane,
    /// The peer's connection state flags.
    heard: StateFlags,
    /// Position just behind the peer's last urgent byte, 0 if there was none.
    heard_urgent: u64,
    /// The peer has more to send than our RMB has room for.
    peer_blocked: bool,
    /// The peer has asked for our consumer position, and has not been answered.
    question: bool,
    /// Nor has it been told of a new one since: it may mean the one after the next read, as Linux understands that.
    asked: bool,
    /// We broke the connection off: the peer violated the protocol.
    broken: bool,
}

impl Conn {
    /// A connection at its first byte on link `lane`, with an RMB of ours of this size.
    pub fn new(own_size: RmbSize, lane: Lane) -> Conn {
        Conn {
            own_size,
            peer: None,
            sent: 0,
            acked: 0,
            acked_seq: 0,
            repeat: Repeat::No,
            inquiring: false,
            peer_cons: 0,
            seq: 0,
            told: StateFlags::default(),
            told_blocked: false,
            told_urgent: 0,
            withheld: false,
            peer_prod: 0,
            told_cons: 0,
            peer_seq: 0,
            peer_lane: lane,
            heard: StateFlags::default(),
            heard_urgent: 0,
            peer_blocked: false,
            question: false,
            asked: false,
            broken: false,
        }
    }

    /// The peer's end is known: from now on there may be something to send.
    pub fn connect(&mut self, peer: Peer) {
        self.peer = Some(peer);
    }

    /// The peer's end.
    pub fn peer(&self) -> Option<&Peer> {
        self.peer.as_ref()
    }

    /// Whether the peer's closing flag or abort has come and ours has gone: nothing more will be sent or written
    /// by either side.
    pub fn over(&self) -> bool {
        let ended = |f: StateFlags| f.closed || f.abort;
        ended(self.told) && ended(self.heard)
    }

    /// Whether our closing flag or abort has been sent.
    pub fn closed(&self) -> bool {
        self.told.closed || self.told.abort
    }

    /// Whether we have closed or aborted it, and the peer hasn't.
    pub fn awaits_close(&self) -> bool {
        self.closed() && !self.peer_ended()
    }

    /// The link by which the peer's last message came.
    pub fn peer_lane(&self) -> Lane {
        self.peer_lane
    }

    /// Producer position up to which the peer's host has the bytes, as far as is known.
    pub fn delivered(&self) -> u64 {
        self.acked
    }

    /// Whether something that the program has sent waits for the peer to read an urgent byte.
    pub fn withholds(&self) -> bool {
        self.withheld
    }

    /// Whether the peer has not read the last announced urgent byte, as far as is known, and still may.
    fn urgent_unread(&self) -> bool {
        self.peer_cons < self.told_urgent && !self.peer_ended()
    }

    /// Whether that is to be waited for: the peer will tell, or may not have the mark yet.
    fn awaits_urgent(&self) -> bool {
        self.urgent_unread() && (!self.inquiring || self.acked < self.told_urgent)
    }

    /// Whether the peer will read no more.
    fn peer_ended(&self) -> bool {
        self.heard.closed || self.heard.abort
    }

    /// A SEND or WRITE with this mark has completed.
    pub fn acked(&mut self, mark: Mark) {
        if mark.prod > self.acked && mark.prod <= self.sent {
            self.acked = mark.prod;
        }
        if (mark.seq.wrapping_sub(self.acked_seq) as i16) > 0 {
            self.acked_seq = mark.seq;
        }
    }

    /// The connection goes on over another link, by which its peer's RMB is `rmb`. What was sent by the former one
    /// and has not completed never will.
    pub fn fail_over(&mut self, rmb: Rtoken) {
        if let Some(peer) = &mut self.peer {
            peer.rmb = rmb;
            self.inquiring = peer.forgets;
            self.repeat = Repeat::Validation;
        }
    }

    /// Whether something waits for what was sent to complete.
    pub fn waits_for_completion(&self) -> bool {
        self.closed() || self.inquiring
    }

    /// See [`Changes::inquiring`].
    pub fn is_inquiring(&self) -> bool {
        self.inquiring
    }

    /// The peer has read so far. What it has read has arrived, whether or not that has completed here; and should the
    /// device still repeat it, for want of an acknowledgement, the peer's doesn't carry it out twice. So the mirror's bytes
    /// before it may be overwritten.
    fn read_by_peer(&mut self, cons: u64) {
        self.peer_cons = cons;
        self.acked = self.acked.max(cons);
    }

    /// Checks a message of the peer's that came by `lane`. Where it is to validate a failover, everything that came
    /// by other links before has been handed in.
    pub fn received(&mut self, m: &Cdc, lane: Lane) -> Result<Changes, Violation> {
        // Only the difference counts: numbers wrap. Equal ones and jumps ahead are in order.
        let ahead = m.seq.wrapping_sub(self.peer_seq) as i16;
        if m.flags.failover_validation && ahead > 0 {
            // The last message that the peer knows to have come by another link is unknown here: data is lost.
            self.broken = true;
            return Err(Violation);
        }
        if ahead < 0 || m.flags.failover_validation {
            return Ok(self.changes(false));
        }
        let own = self.own_size;
        let room = self.told_cons + u64::from(own.bytes());
        let prod = m.producer.offset(own, self.peer_prod, room);
        let cons = match self.peer {
            Some(peer) => m.consumer.offset(peer.size, self.peer_cons, self.sent),
            // We have sent nothing.
            None => Ok(0),
        };
        let (Ok(prod), Ok(cons)) = (prod, cons) else {
            self.broken = true;
            return Err(Violation);
        };
        let state = |c: &Conn| (c.peer_prod, c.peer_cons, c.heard, c.heard_urgent);
        let before = state(self);
        self.peer_seq = m.seq;
        self.peer_lane = lane;
        self.peer_prod = prod;
        self.read_by_peer(cons);
        self.inquiring = false;
        self.heard = union(self.heard, m.state);
        self.peer_blocked = m.flags.write_blocked;
        self.question |= m.flags.update_requested;
        self.asked |= m.flags.update_requested;
        if m.flags.urgent_present && prod > self.told_cons {
            self.heard_urgent = prod;
        }
        Ok(self.changes(before != state(self)))
    }

    /// Takes a WRITE of the peer's with immediate data that came by `lane`.
    pub fn written(
        &mut self,
        length: u32,
        consumed: u32,
        lane: Lane,
    ) -> Result<Changes, Violation> {
        if lane != self.peer_lane {
            // Of a link that the peer has left. A message that includes this has come already.
            return Ok(self.changes(false));
        }
        let prod = self.peer_prod + u64::from(length);
        let cons = self.peer_cons + u64::from(consumed);
        if prod > self.told_cons + u64::from(self.own_size.bytes()) || cons > self.sent {
            self.broken = true;
            return Err(Violation);
        }
        self.peer_prod = prod;
        self.read_by_peer(cons);
        self.peer_blocked = false;
        Ok(self.changes(true))
    }

    fn changes(&self, news: bool) -> Changes {
        let mut flags = 0;
        if self.heard.done {
            flags |= TX_DONE;
        }
        if self.heard.closed {
            flags |= TX_DONE | TX_CLOSED;
        }
        if self.heard.abort {
            flags |= TX_ABORT | TX_CLOSED;
        }
        Changes {
            prod: self.peer_prod,
            cons: self.peer_cons,
            flags,
            urgent: self.heard_urgent,
            news,
            resume: self.withheld && !self.awaits_urgent() || self.question,
            heeds_reading: self.heeds_reading(),
            inquiring: self.inquiring,
        }
    }

    /// The peer is gone, as if it had sent an abort.
    pub fn lost(&mut self) {
        self.heard.abort = true;
    }

    /// Has an abort sent.
    pub fn abort(&mut self) {
        self.broken = true;
    }

    /// What is due now. The caller sends it, or doesn't ask.
    pub fn next(&mut self, local: Local) -> Option<Outgoing> {
        let repeating = self.repeat != Repeat::No;
        let peer = self.peer.filter(|_| repeating || !self.closed())?;
        if self.repeat == Repeat::Validation {
            self.repeat = Repeat::Unacknowledged;
            return Some(self.validation(&peer));
        }
        // An abort is answered with an abort.
        let abort = self.broken
            || local.flags & TX_CLOSED != 0 && (local.flags & TX_ABORT != 0 || self.heard.abort);
        // The stream code writes no more than fits, and never moves a cursor back.
        let fits = self.peer_cons + u64::from(peer.mirror_size);
        let end = if abort || self.awaits_urgent() {
            self.sent
        } else if local.urgent > self.sent && !self.peer_ended() {
            fits.min(local.urgent)
        } else {
            fits
        };
        let prod = local.prod.clamp(self.sent, end.max(self.sent));
        self.withheld = !abort && prod < local.prod;
        let urgent_present = prod > self.sent && prod == local.urgent
            || repeating && prod == self.told_urgent && self.urgent_unread();
        let mut flags = StateFlags::default();
        if abort {
            flags.abort = true;
        }
        // "No more" is said with the last byte.
        if !self.withheld {
            flags.done = local.flags & TX_DONE != 0;
            flags.closed = !abort && local.flags & TX_CLOSED != 0;
        }
        let flags = union(self.told, flags);
        let cons = local.cons.clamp(self.told_cons, self.peer_prod);
        let due = repeating || prod != self.sent || flags != self.told || self.update_due(cons);
        if !due {
            return None;
        }
        let spare = if peer.forgets { SPARE } else { 0 };
        let full = prod + u64::from(spare) >= fits;
        // What the peer has read needs no repetition; and one that has closed may use its RMB otherwise.
        let from = match repeating {
            true if self.peer_ended() => prod,
            true => self.acked,
            false => self.sent,
        };
        let writes = self.writes(&peer, from, prod);
        let blocked = local.flags & TX_BLOCKED != 0 || full;
        let urgent_pending = urgent_present || local.urgent > prod;
        let plain = !blocked && !urgent_pending && flags == self.told;
        let short = plain && !repeating && writes[0].len > 0 && writes[1].len == 0;
        let immediate = peer.slot.filter(|_| short).and_then(|slot| {
            let consumed = u32::try_from(cons - self.told_cons).ok()?;
            Immediate { slot, consumed }.pack()
        });
        if immediate.is_none() {
            self.seq = self.seq.wrapping_add(1);
        }
        self.told_blocked = blocked;
        if urgent_present {
            self.told_urgent = prod;
        }
        self.sent = prod;
        self.told = flags;
        self.asked &= cons == self.told_cons;
        self.question = false;
        self.told_cons = cons;
        self.repeat = Repeat::No;
        Some(Outgoing {
            writes,
            cdc: Cdc {
                seq: self.seq,
                token: peer.token,
                producer: Cursor::from_offset(prod, peer.size),
                consumer: Cursor::from_offset(cons, self.own_size),
                flags: ProducerFlags {
                    write_blocked: self.told_blocked,
                    urgent_pending,
                    urgent_present,
                    update_requested: self.inquiring,
                    ..ProducerFlags::default()
                },
                state: flags,
            },
            mark: Mark {
                prod,
                seq: self.seq,
            },
            immediate,
        })
    }

    /// The message that tells which one the peer must have. The rest of it has no meaning.
    fn validation(&self, peer: &Peer) -> Outgoing {
        Outgoing {
            writes: [Write::default(); 2],
            cdc: Cdc {
                seq: self.acked_seq,
                token: peer.token,
                producer: Cursor::default(),
                consumer: Cursor::default(),
                flags: ProducerFlags {
                    failover_validation: true,
                    ..ProducerFlags::default()
                },
                state: StateFlags::default(),
            },
            mark: Mark::default(),
            immediate: None,
        }
    }

    /// Whether [`Conn::update_due`] may be true once the program reads more. Becomes true by what the peer says only.
    fn heeds_reading(&self) -> bool {
        self.asked || self.peer_blocked || self.told_cons < self.heard_urgent || self.runs_short()
    }

    /// Whether half of our RMB or less is free, as far as the peer knows.
    fn runs_short(&self) -> bool {
        let size = u64::from(self.own_size.bytes());
        (self.told_cons + size).saturating_sub(self.peer_prod) <= size / 2
    }

    /// Whether the peer must hear of our consumer position although there is nothing else to say. At least as
    /// often as Linux does it, as a blocked peer counts on that.
    fn update_due(&self, cons: u64) -> bool {
        let unconfirmed = cons - self.told_cons;
        if unconfirmed == 0 {
            return self.question;
        }
        let size = u64::from(self.own_size.bytes());
        let drained = cons == self.peer_prod;
        self.asked
            || self.told_cons < self.heard_urgent && self.heard_urgent <= cons
            || unconfirmed > UPDATE_MIN.max(size / 10) && (self.runs_short() || self.peer_blocked)
            || self.peer_blocked && drained
    }

    fn writes(&self, peer: &Peer, from: u64, prod: u64) -> [Write; 2] {
        let mut out = [Write::default(); 2];
        let mut at = from;
        for w in &mut out {
            let from = (at & u64::from(peer.mirror_size - 1)) as u32;
            let len = (prod - at).min(u64::from(peer.mirror_size - from)) as u32;
            *w = Write {
                from,
                len,
                to: peer
                    .rmb
                    .addr
                    .wrapping_add(at & u64::from(peer.size.bytes() - 1)),
            };
            at += u64::from(len);
        }
        out
    }
}

fn union(a: StateFlags, b: StateFlags) -> StateFlags {
    StateFlags {
        done: a.done || b.done,
        closed: a.closed || b.closed,
        abort: a.abort || b.abort,
    }
}
