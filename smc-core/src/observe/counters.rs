//! Counters of one node, and of all nodes of a runtime directory together: plain relaxed atomics that any thread may
//! bump at any time.
//!
//! They are statistics, not state: readers may see one counter ahead of another. The totals lie in the directory's
//! file, so the layout of [`Counters`] is part of that file's: what is added goes to the end, or into the room that
//! the tables have.

use super::reason::Reason;
use super::status::{CounterValues, DeclineCount, DiagnosisStatus, ReasonCount};
use crate::wire::clc::Diagnosis;
use std::borrow::Cow;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Room for reasons; the index is the code.
const REASONS: usize = 96;
/// Room for kinds of Declines: the known diagnoses in the order of [`Diagnosis::ALL`], and the last for all others.
const DIAGNOSES: usize = 48;

const _: () = assert!(Reason::SLOTS <= REASONS && Diagnosis::ALL.len() < DIAGNOSES);

/// Counters of one node. `new` is const, nothing allocates, every update is one relaxed add.
#[derive(Debug)]
#[repr(C)]
pub struct Counters {
    /// Times each fallback reason was met; indexed by code, index 0 stays 0.
    reasons: [AtomicU64; REASONS],
    /// Declines of SMC-R that we sent.
    declines_sent: [AtomicU64; DIAGNOSES],
    /// Declines that came, likewise.
    declines_received: [AtomicU64; DIAGNOSES],
    /// Directions switched from tcp to rmb.
    pub upgrades: AtomicU64,
    /// Directions switched from rmb to tcp.
    pub downgrades: AtomicU64,
    /// Connections whose endpoint was put into the directory.
    pub published: AtomicU64,
    /// Doorbells rung to wake a sleeping peer (each is one system call).
    pub doorbells: AtomicU64,
    /// Waits that ended while spinning.
    pub spins: AtomicU64,
    /// Waits that went to sleep in the kernel.
    pub sleeps: AtomicU64,
    /// OPEN messages sent to peers.
    pub opens_sent: AtomicU64,
    /// OPEN messages of ours that a peer accepted.
    pub opens_accepted: AtomicU64,
    /// OPEN messages of ours that a peer declined.
    pub opens_declined: AtomicU64,
    /// Bytes that connections which are over have sent by RMB.
    pub rmb_sent: AtomicU64,
    /// Bytes that connections which are over have received by RMB.
    pub rmb_received: AtomicU64,
}

impl Counters {
    /// All counters at zero.
    pub const fn new() -> Counters {
        Counters {
            reasons: [const { AtomicU64::new(0) }; REASONS],
            declines_sent: [const { AtomicU64::new(0) }; DIAGNOSES],
            declines_received: [const { AtomicU64::new(0) }; DIAGNOSES],
            upgrades: AtomicU64::new(0),
            downgrades: AtomicU64::new(0),
            published: AtomicU64::new(0),
            doorbells: AtomicU64::new(0),
            spins: AtomicU64::new(0),
            sleeps: AtomicU64::new(0),
            opens_sent: AtomicU64::new(0),
            opens_accepted: AtomicU64::new(0),
            opens_declined: AtomicU64::new(0),
            rmb_sent: AtomicU64::new(0),
            rmb_received: AtomicU64::new(0),
        }
    }

    /// Counters as they lie in memory.
    pub fn from_bytes(bytes: &[u8; size_of::<Counters>()]) -> Counters {
        let counters = Counters::new();
        for (counter, bytes) in counters.all().zip(bytes.as_chunks().0) {
            counter.store(u64::from_ne_bytes(*bytes), Relaxed);
        }
        counters
    }

    /// Counts one fallback.
    #[inline]
    pub fn count(&self, reason: Reason) {
        // `code` is below SLOTS by construction; `get` spares the hot path a panic branch.
        if let Some(counter) = self.reasons.get(reason.code() as usize) {
            counter.fetch_add(1, Relaxed);
        }
    }

    /// How often `reason` was counted.
    pub fn counted(&self, reason: Reason) -> u64 {
        self.reasons
            .get(reason.code() as usize)
            .map_or(0, |c| c.load(Relaxed))
    }

    /// The reasons that were met at least once, in the order of their codes.
    pub fn fallbacks(&self) -> Vec<ReasonCount> {
        Reason::ALL
            .iter()
            .map(|&reason| ReasonCount {
                code: reason.code(),
                name: Cow::Borrowed(reason.name()),
                count: self.counted(reason),
            })
            .filter(|entry| entry.count != 0)
            .collect()
    }

    /// Counts a Decline of SMC-R that was sent.
    pub fn decline_sent(&self, diagnosis: Diagnosis) {
        count_diagnosis(&self.declines_sent, diagnosis);
    }

    /// Counts a Decline of SMC-R that came.
    pub fn decline_received(&self, diagnosis: Diagnosis) {
        count_diagnosis(&self.declines_received, diagnosis);
    }

    /// The diagnoses that were sent or received at least once, in the order of their codes, then all unknown ones
    /// together as code 0.
    pub fn declines(&self) -> Vec<DeclineCount> {
        let known = Diagnosis::ALL.iter().copied().zip(0..);
        known
            .chain([(Diagnosis::Unknown(0), DIAGNOSES - 1)])
            .map(|(diagnosis, i)| DeclineCount {
                diagnosis: DiagnosisStatus::from(diagnosis),
                sent: self.declines_sent[i].load(Relaxed),
                received: self.declines_received[i].load(Relaxed),
            })
            .filter(|entry| entry.sent != 0 || entry.received != 0)
            .collect()
    }

    /// The node counters as plain numbers.
    pub fn values(&self) -> CounterValues {
        CounterValues {
            upgrades: self.upgrades.load(Relaxed),
            downgrades: self.downgrades.load(Relaxed),
            published: self.published.load(Relaxed),
            doorbells: self.doorbells.load(Relaxed),
            spins: self.spins.load(Relaxed),
            sleeps: self.sleeps.load(Relaxed),
            opens_sent: self.opens_sent.load(Relaxed),
            opens_accepted: self.opens_accepted.load(Relaxed),
            opens_declined: self.opens_declined.load(Relaxed),
            rmb_sent: self.rmb_sent.load(Relaxed),
            rmb_received: self.rmb_received.load(Relaxed),
        }
    }

    /// Adds what was counted since the last time to `totals`; `added` remembers what has been. Any thread: each
    /// difference is added once, whoever is first to put its reading into `added`.
    pub fn add_to(&self, totals: &Counters, added: &Counters) {
        for ((now, added), total) in self.all().zip(added.all()).zip(totals.all()) {
            let now = now.load(Relaxed);
            if now != added.load(Relaxed) {
                let before = added.swap(now, Relaxed);
                // A thread that read later may have been first: then this takes away what it added too much.
                total.fetch_add(now.wrapping_sub(before), Relaxed);
            }
        }
    }

    /// Sets everything back to zero, for a forked child that starts as a node of its own.
    pub fn reset(&self) {
        for counter in self.all() {
            counter.store(0, Relaxed);
        }
    }

    /// All counters in the order of their places in memory.
    fn all(&self) -> impl Iterator<Item = &AtomicU64> {
        let tables = self.reasons.iter().chain(&self.declines_sent);
        tables.chain(&self.declines_received).chain([
            &self.upgrades,
            &self.downgrades,
            &self.published,
            &self.doorbells,
            &self.spins,
            &self.sleeps,
            &self.opens_sent,
            &self.opens_accepted,
            &self.opens_declined,
            &self.rmb_sent,
            &self.rmb_received,
        ])
    }
}

fn count_diagnosis(counts: &[AtomicU64; DIAGNOSES], diagnosis: Diagnosis) {
    let known = Diagnosis::ALL.iter().position(|d| *d == diagnosis);
    if let Some(count) = counts.get(known.unwrap_or(DIAGNOSES - 1)) {
        count.fetch_add(1, Relaxed);
    }
}

impl Default for Counters {
    fn default() -> Self {
        Counters::new()
    }
}

/// Adds one to a counter, relaxed. Reads better than `fetch_add` at the call sites.
#[inline]
pub fn bump(counter: &AtomicU64) {
    counter.fetch_add(1, Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    static STATIC: Counters = Counters::new();

    #[test]
    fn counts_per_reason() {
        STATIC.count(Reason::NoPeer);
        STATIC.count(Reason::NoPeer);
        STATIC.count(Reason::Idle);
        assert_eq!(STATIC.counted(Reason::NoPeer), 2);
        assert_eq!(STATIC.counted(Reason::Urgent), 0);
        let list = STATIC.fallbacks();
        let list: Vec<_> = list.iter().map(|r| (r.code, &*r.name, r.count)).collect();
        assert_eq!(list, [(1, "no-peer", 2), (35, "idle", 1)]);
    }

    #[test]
    fn every_reason_has_its_own_cell() {
        let counters = Counters::new();
        for &reason in Reason::ALL {
            counters.count(reason);
        }
        assert_eq!(counters.fallbacks().len(), Reason::ALL.len());
        assert!(counters.fallbacks().iter().all(|r| r.count == 1));
    }

    #[test]
    fn declines_by_diagnosis() {
        let counters = Counters::new();
        counters.decline_received(Diagnosis::Unknown(7));
        counters.decline_received(Diagnosis::NoSmcDev);
        counters.decline_sent(Diagnosis::NoSmcDev);
        counters.decline_sent(Diagnosis::NoSmcDev);
        counters.decline_received(Diagnosis::Unknown(8));
        let list = counters.declines();
        let list: Vec<_> = list
            .iter()
            .map(|d| (d.diagnosis.code, &*d.diagnosis.name, d.sent, d.received))
            .collect();
        assert_eq!(
            list,
            [(0x0303_0000, "NOSMCDEV", 2, 1), (0, "unknown", 0, 2)]
        );
        counters.reset();
        assert!(counters.declines().is_empty());
    }

    #[test]
    fn totals_get_each_difference_once() {
        let (node, added, totals) = (Counters::new(), Counters::new(), Counters::new());
        totals.upgrades.store(10, Relaxed);
        for _ in 0..2 {
            bump(&node.upgrades);
            node.count(Reason::Idle);
            node.decline_sent(Diagnosis::NoSmcDev);
            node.add_to(&totals, &added);
            node.add_to(&totals, &added);
        }
        assert_eq!(totals.values().upgrades, 12);
        assert_eq!(totals.counted(Reason::Idle), 2);
        assert_eq!(totals.declines()[0].sent, 2);

        // SAFETY: Counters is made of AtomicU64 alone, has no padding, and nobody else uses this one.
        let bytes: &[u8; size_of::<Counters>()] = unsafe { &*(&raw const totals).cast() };
        assert_eq!(totals.all().count() * 8, bytes.len());
        let copy = Counters::from_bytes(bytes);
        assert_eq!(copy.values(), totals.values());
        assert_eq!(copy.fallbacks(), totals.fallbacks());
        assert_eq!(copy.declines(), totals.declines());
    }

    #[test]
    fn values_and_reset() {
        let counters = Counters::new();
        bump(&counters.upgrades);
        bump(&counters.opens_declined);
        counters.count(Reason::Closed);
        assert_eq!(
            counters.values(),
            CounterValues {
                upgrades: 1,
                opens_declined: 1,
                ..CounterValues::default()
            }
        );
        counters.reset();
        assert_eq!(counters.values(), CounterValues::default());
        assert!(counters.fallbacks().is_empty());
    }
}
