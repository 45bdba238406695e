//! The directory: one shared table a runtime directory, from endpoint to the node that uses it.
//!
//! File `directory-2`: a header page, then [`BUCKETS`] buckets of [`PER_BUCKET`] entries of 128 bytes (8 MiB, sparse).
//! Each bucket is in two parts: the first `NEAR` entries of all buckets come first, then the others of all. As
//! few buckets ever need more than the first, all but a very busy host touches a quarter of the memory.
//!
//! An entry needs 72 bytes, so it takes two cache lines; the words that decide a lookup are in the first. All is in
//! native byte order and is for this host only.
//!
//! | header offset | content                                                                |
//! |---------------|------------------------------------------------------------------------|
//! | 0             | magic, version, header size, buckets, entries a bucket, size of an entry |
//! | 1024          | one bit a part: somebody has ever published in it                      |
//! | 2048          | what all nodes have counted, those that have ended as well             |
//!
//! Both ends of a connection hash to one bucket. Who writes what, in which order, what a crash leaves, and why of
//! two racing publishers one finds the other, is in `entry.rs`.
//!
//! The file is only opened when it belongs to this user and nobody else may write it: whoever can write it could
//! also truncate it, and then a load from the mapping would raise SIGBUS. A full tmpfs would do the same on a first
//! write to a page; therefore the page of a part is populated, with an error instead of a signal, before the
//! part's bit is set, and a part without its bit is never touched.

use std::fs::{File, OpenOptions};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use super::atomic::{AtomicU64, Ordering, fence};
use super::endpoint::Endpoint;
use super::entry;
use super::raw;
use super::runtime::{NodeId, RuntimeDir, RuntimeError};
use crate::observe::Counters;
use crate::sys;

#[cfg(test)]
mod tests;

/// Number of buckets.
pub const BUCKETS: usize = 4096;
/// Entries in a bucket: this many ends whose hashes agree can be published at one time.
pub const PER_BUCKET: usize = 16;
/// Entries in the whole table.
pub const ENTRIES: usize = BUCKETS * PER_BUCKET;

/// Entries of a bucket in its first part.
const NEAR: usize = 4;

/// Processes that know another layout have a file of another name.
const NAME: &str = "directory-2";
const MAGIC: u64 = u64::from_ne_bytes(*b"xsmc-dir");
const VERSION: u32 = 2;
const HEADER: usize = 4096;
const USED_AT: usize = 1024;
const USED_WORDS: usize = 2 * BUCKETS / 64;
const TOTALS_AT: usize = 2048;
const LEN: usize = HEADER + ENTRIES * size_of::<Entry>();

/// Words of an entry besides its state and its node.
const FIELDS: usize = 7;
type Fields = [u64; FIELDS];
type Entry = entry::Entry<FIELDS>;
type Snapshot = entry::Snapshot<FIELDS>;

const _: () = assert!(size_of::<Entry>() == 128 && HEADER.is_multiple_of(align_of::<Entry>()));
const _: () = assert!(USED_AT + USED_WORDS * 8 <= TOTALS_AT && BUCKETS.is_power_of_two());
const _: () = assert!(TOTALS_AT + size_of::<Counters>() <= HEADER);

/// A mapping of the table. Closed with the value; entries that were published stay.
#[derive(Debug)]
pub struct Directory {
    base: *mut u8,
    /// All blocks of the file exist: no need to populate before the first write.
    allocated: bool,
}

// SAFETY: `base` is a mapping that this value owns, and it is accessed through atomics only.
unsafe impl Send for Directory {}
// SAFETY: as above; all methods take `&self` and the protocol is made for concurrent use.
unsafe impl Sync for Directory {}

/// Names one publication: an entry, and the generation that it had.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EntryRef {
    index: u32,
    node: NodeId,
    generation: u64,
}

/// What a lookup found. A hint: the named node has to confirm it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// Who published it.
    pub node: NodeId,
    /// That node's number for the socket.
    pub slot: u32,
    /// Generation of `slot`.
    pub slot_gen: u32,
    /// The entry, for [`Directory::is_current`].
    pub entry: EntryRef,
}

/// A successful publication.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Published {
    /// For [`Directory::withdraw`].
    pub entry: EntryRef,
    /// Another node has published the same end of the same connection.
    pub duplicate: Option<Found>,
}

/// No entry is free for this endpoint, or the file system has no memory left for one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no free directory entry for this endpoint")]
pub struct Full;

impl Directory {
    /// Maps the table of a runtime directory, creating it if it isn't there.
    ///
    /// # Errors
    /// [`RuntimeError::BadDirectory`] when a file of that name exists that isn't a table of exactly this version
    /// and geometry, owned by this user and closed to the others; [`RuntimeError::Io`] for failed system calls.
    pub fn open(dir: &RuntimeDir) -> Result<Directory, RuntimeError> {
        // More than one turn only if somebody removes the file at this very moment.
        for _ in 0..8 {
            let path = dir.file(NAME);
            let opened = OpenOptions::new()
                .read(true)
                .write(true)
                .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
                .open(&path);
            match opened {
                Ok(file) => return Directory::from_file(dir, &file),
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                    dir.create_file(NAME, init)?
                }
                Err(e) => return Err(RuntimeError::io("open", &path, e)),
            };
        }
        Err(bad(dir, "it vanishes as soon as it is created"))
    }

    /// A table in private memory, for tests.
    #[doc(hidden)]
    pub fn anonymous() -> Result<Directory, syscalls::Errno> {
        let base = sys::map(-1, LEN)?;
        Ok(Directory {
            base,
            allocated: true,
        })
    }

    fn from_file(dir: &RuntimeDir, file: &File) -> Result<Directory, RuntimeError> {
        let path = dir.file(NAME);
        let meta = file
            .metadata()
            .map_err(|e| RuntimeError::io("stat", &path, e))?;
        if !meta.is_file() {
            return Err(bad(dir, "it isn't a regular file"));
        }
        if meta.uid() != raw::euid() || meta.mode() & 0o022 != 0 {
            return Err(bad(dir, "it isn't this user's own, or others may write it"));
        }
        if meta.len() != LEN as u64 {
            return Err(bad(dir, "its size is not that of this version"));
        }
        let mut found = [0u8; 32];
        file.read_exact_at(&mut found, 0)
            .map_err(|e| RuntimeError::io("read", &path, e))?;
        if found != header() {
            return Err(bad(dir, "its header is not that of this version"));
        }
        let io = |what, e: syscalls::Errno| RuntimeError::io(what, &path, e.into());
        let base = sys::map(file.as_raw_fd(), LEN).map_err(|e| io("map", e))?;
        let mut directory = Directory {
            base,
            allocated: false,
        };
        // SAFETY: the first page of the mapping made just now.
        if unsafe { raw::populate(base, HEADER) }.is_err() {
            // An old kernel, or a filter. Then have all blocks now.
            raw::allocate(file, LEN).map_err(|e| io("allocate", e))?;
            directory.allocated = true;
        }
        Ok(directory)
    }

    /// What all nodes have counted together.
    pub fn totals(&self) -> &Counters {
        // SAFETY: in the header page, which is mapped and populated as long as `self` lives; aligned, all atomics.
        unsafe { &*self.base.add(TOTALS_AT).cast::<Counters>() }
    }

    /// Reads what all nodes of the runtime directory `dir` have counted together, whoever owns it. `None`: there is no
    /// table of this version.
    ///
    /// # Errors
    /// Those of opening and reading the file.
    pub fn read_totals(dir: &Path) -> std::io::Result<Option<Counters>> {
        let opened = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
            .open(dir.join(NAME));
        let file = match opened {
            Ok(file) => file,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e),
        };
        let (mut found, mut totals) = ([0; 32], [0; size_of::<Counters>()]);
        file.read_exact_at(&mut found, 0)?;
        file.read_exact_at(&mut totals, TOTALS_AT as u64)?;
        Ok((found == header()).then(|| Counters::from_bytes(&totals)))
    }

    /// Publishes one end of a connection as `slot` of `node`, and looks whether another node has published that
    /// same end. Look for the other end *after* this with [`Directory::find_mirror`]; if both ends do so, at least
    /// one of them finds the other.
    ///
    /// # Errors
    /// [`Full`] when the endpoint's bucket has no free entry or the file system no free page.
    pub fn publish(
        &self,
        endpoint: &Endpoint,
        node: NodeId,
        slot: u32,
        slot_gen: u32,
    ) -> Result<Published, Full> {
        let bucket = bucket_of(endpoint);
        let fields = encode(endpoint, slot, slot_gen);
        for part in [Part::near(bucket), Part::far(bucket)] {
            self.mark_used(part)?;
            let Some(index) = part.entries().find(|i| self.entry(*i).claim(node.get())) else {
                continue;
            };
            let filled = self.entry(index).fill(node.get(), &fields);
            let entry = EntryRef {
                index: index as u32,
                node,
                generation: filled.ok_or(Full)?,
            };
            return Ok(Published {
                entry,
                duplicate: self.find_same(endpoint, node),
            });
        }
        Err(Full)
    }

    /// Looks for the other end of the connection that `endpoint` is one end of.
    ///
    /// It may be in the same node as this end. A socket that is connected to itself has no other end.
    pub fn find_mirror(&self, endpoint: &Endpoint) -> Option<Found> {
        if endpoint.is_self_connected() {
            return None;
        }
        self.find(&endpoint.mirror(), |_| true)
    }

    /// Looks for the same end of the same connection, published by another node than `except`.
    pub fn find_same(&self, endpoint: &Endpoint, except: NodeId) -> Option<Found> {
        self.find(endpoint, |snapshot| snapshot.node != except.get())
    }

    /// Whether a publication still stands.
    pub fn is_current(&self, entry: EntryRef) -> bool {
        self.checked_entry(entry.index)
            .is_some_and(|e| e.holds(entry.node.get(), entry.generation))
    }

    /// Takes back a publication of one's own. False if it was gone already; then nothing changes, whoever has the
    /// entry now.
    pub fn withdraw(&self, entry: EntryRef) -> bool {
        self.checked_entry(entry.index)
            .is_some_and(|e| e.withdraw(entry.node.get(), entry.generation))
    }

    /// Frees all entries of a node that is dead, half-written ones included. Returns how many.
    ///
    /// Must not be called for a live node: its publications would vanish (no more harm than that).
    pub fn clear_node(&self, node: NodeId) -> usize {
        self.used_entries()
            .filter(|(_, entry)| entry.clear(node.get()))
            .count()
    }

    /// The nodes that hold entries, each once, in order of id.
    pub fn owners(&self) -> Vec<NodeId> {
        let mut ids: Vec<u64> = self
            .used_entries()
            .map(|(_, entry)| entry.owner())
            .collect();
        ids.sort_unstable();
        ids.dedup();
        ids.into_iter().filter_map(NodeId::from_raw).collect()
    }

    /// Calls `each` for every publication.
    pub fn for_each(&self, mut each: impl FnMut(Endpoint, Found)) {
        for (index, entry) in self.used_entries() {
            if let Some(snapshot) = entry.read(|_| true)
                && let Some(found) = found(index, &snapshot)
            {
                each(decode(&snapshot.fields), found);
            }
        }
    }

    fn find(&self, key: &Endpoint, accept: impl Fn(&Snapshot) -> bool) -> Option<Found> {
        // Pairs with the same fence of the other publisher: see entry.rs.
        fence(Ordering::SeqCst);
        let bucket = bucket_of(key);
        let wanted = encode(key, 0, 0);
        self.used_in(bucket).find_map(|index| {
            let snapshot = self
                .entry(index)
                .read(|fields| fields[1..] == wanted[1..])?;
            if accept(&snapshot) {
                found(index, &snapshot)
            } else {
                None
            }
        })
    }

    fn used_entries(&self) -> impl Iterator<Item = (usize, &Entry)> {
        (0..BUCKETS)
            .flat_map(|bucket| self.used_in(bucket))
            .map(|index| (index, self.entry(index)))
    }

    /// Indices of a bucket's entries, those of parts without their bit left out.
    fn used_in(&self, bucket: usize) -> impl Iterator<Item = usize> {
        [Part::near(bucket), Part::far(bucket)]
            .into_iter()
            .filter(|part| self.used(*part))
            .flat_map(Part::entries)
    }

    fn used(&self, part: Part) -> bool {
        self.used_word(part).load(Ordering::Acquire) & part.mask() != 0
    }

    /// Makes sure that the part's memory exists, then sets its bit.
    fn mark_used(&self, part: Part) -> Result<(), Full> {
        if self.used(part) {
            return Ok(());
        }
        if !self.allocated {
            let len = part.entries().len() * size_of::<Entry>();
            let start = HEADER + place(part.entries().start) * size_of::<Entry>();
            // madvise wants the start of a page. The mapping itself starts at one.
            let skew = start % page_size();
            // SAFETY: start - skew .. start + len lies within the mapping, as those entries do.
            unsafe { raw::populate(self.base.add(start - skew), skew + len) }.map_err(|_| Full)?;
        }
        self.used_word(part).fetch_or(part.mask(), Ordering::SeqCst);
        Ok(())
    }

    fn used_word(&self, part: Part) -> &AtomicU64 {
        let word = part.number() / 64;
        assert!(word < USED_WORDS);
        // SAFETY: the word lies in the header page (checked at compile time and above), is aligned as the mapping
        // starts at a page, lives as long as `self`, and is only ever accessed atomically.
        unsafe { &*self.base.add(USED_AT + word * 8).cast::<AtomicU64>() }
    }

    fn entry(&self, index: usize) -> &Entry {
        assert!(index < ENTRIES);
        // SAFETY: index is in range, and so is `place` of it, so the entry lies in the mapping; it is aligned as mapping and header are, it
        // consists of atomics only, for which all bytes are valid, and lives as long as `self`.
        unsafe {
            &*self
                .base
                .add(HEADER + place(index) * size_of::<Entry>())
                .cast::<Entry>()
        }
    }

    /// The entry of a reference, which may come from another table. None in a part that may have no memory yet.
    fn checked_entry(&self, index: u32) -> Option<&Entry> {
        let index = index as usize;
        (index < ENTRIES && self.used(Part::of(index))).then(|| self.entry(index))
    }

    /// Overwrites words of the mapping, as a hostile process could: `at` counts words of 8 bytes and wraps.
    #[doc(hidden)]
    pub fn scribble(&self, at: usize, word: u64) {
        let at = at % (LEN / 8);
        // SAFETY: in range and aligned by construction; all accesses to the mapping are atomic.
        let target = unsafe { &*self.base.add(at * 8).cast::<AtomicU64>() };
        target.store(word, Ordering::Relaxed);
    }

    /// Number of the first word of the bucket that holds `endpoint`, for [`Directory::scribble`].
    #[doc(hidden)]
    pub fn bucket_word(endpoint: &Endpoint) -> usize {
        (HEADER + place(bucket_of(endpoint) * PER_BUCKET) * size_of::<Entry>()) / 8
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        // SAFETY: `base` and LEN are those of the mapping, and no reference into it outlives `self`.
        unsafe { raw::unmap(self.base, LEN) };
    }
}

/// One of the two parts of a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    bucket: usize,
    far: bool,
}

impl Part {
    fn near(bucket: usize) -> Part {
        Part { bucket, far: false }
    }

    fn far(bucket: usize) -> Part {
        Part { bucket, far: true }
    }

    /// The part of an entry.
    fn of(index: usize) -> Part {
        Part {
            bucket: index / PER_BUCKET,
            far: index % PER_BUCKET >= NEAR,
        }
    }

    /// Indices of its entries.
    fn entries(self) -> Range<usize> {
        let first = self.bucket * PER_BUCKET;
        if self.far {
            first + NEAR..first + PER_BUCKET
        } else {
            first..first + NEAR
        }
    }

    /// Number of its bit in the header.
    fn number(self) -> usize {
        self.bucket + if self.far { BUCKETS } else { 0 }
    }

    /// The bit, in its word.
    fn mask(self) -> u64 {
        1 << (self.number() % 64)
    }
}

/// Where in the file an entry lies, counted in entries.
fn place(index: usize) -> usize {
    let (bucket, i) = (index / PER_BUCKET, index % PER_BUCKET);
    if i < NEAR {
        bucket * NEAR + i
    } else {
        BUCKETS * NEAR + bucket * (PER_BUCKET - NEAR) + (i - NEAR)
    }
}

fn bucket_of(endpoint: &Endpoint) -> usize {
    endpoint.hash() as usize & (BUCKETS - 1)
}

fn found(index: usize, snapshot: &Snapshot) -> Option<Found> {
    let node = NodeId::from_raw(snapshot.node)?;
    let [slots, ..] = snapshot.fields;
    let entry = EntryRef {
        index: index as u32,
        node,
        generation: snapshot.generation,
    };
    Some(Found {
        node,
        slot: (slots >> 32) as u32,
        slot_gen: slots as u32,
        entry,
    })
}

/// Word 0 is the value, the others are the key. With `state` and `node` before them, all but the last share the
/// first cache line.
fn encode(endpoint: &Endpoint, slot: u32, slot_gen: u32) -> Fields {
    let local = u128::from_be_bytes(endpoint.local);
    let peer = u128::from_be_bytes(endpoint.peer);
    [
        u64::from(slot) << 32 | u64::from(slot_gen),
        u64::from(endpoint.local_port) << 16 | u64::from(endpoint.peer_port),
        local as u64,
        peer as u64,
        (local >> 64) as u64,
        (peer >> 64) as u64,
        endpoint.netns,
    ]
}

fn decode(fields: &Fields) -> Endpoint {
    let [_, ports, local, peer, local_high, peer_high, netns]: [u64; FIELDS] = *fields;
    let join = |high: u64, low: u64| (u128::from(high) << 64 | u128::from(low)).to_be_bytes();
    Endpoint {
        netns,
        local: join(local_high, local),
        peer: join(peer_high, peer),
        local_port: (ports >> 16) as u16,
        peer_port: ports as u16,
    }
}

/// First bytes of a good file.
fn header() -> [u8; 32] {
    let mut bytes = [0u8; 32];
    bytes[..8].copy_from_slice(&MAGIC.to_ne_bytes());
    let words = [
        VERSION,
        HEADER as u32,
        BUCKETS as u32,
        PER_BUCKET as u32,
        size_of::<Entry>() as u32,
    ];
    for (at, word) in bytes[8..].chunks_exact_mut(4).zip(words) {
        at.copy_from_slice(&word.to_ne_bytes());
    }
    bytes
}

/// Makes an empty file a table without entries.
fn init(file: &File) -> std::io::Result<()> {
    file.set_len(LEN as u64)?;
    file.write_all_at(&header(), 0)
}

fn bad(dir: &RuntimeDir, why: &'static str) -> RuntimeError {
    RuntimeError::BadDirectory {
        path: dir.file(NAME),
        why,
    }
}

fn page_size() -> usize {
    // SAFETY: getauxval only reads the vector that the kernel set up at exec.
    (unsafe { libc::getauxval(libc::AT_PAGESZ) } as usize).max(4096)
}
