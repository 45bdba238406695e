//! RMBs: rings of bytes, and the pool that hands them out.
//!
//! A ring's size is a power of two and byte `n` of the stream lives at `n mod size`, so a cursor
//! is a plain stream offset and a ring needs no start. Cursors are kept elsewhere (the connection
//! block on shm, CDC messages on verbs); a [`Ring`] only moves bytes.

pub mod budget;
pub mod pool;

use core::ptr::copy_nonoverlapping;

use libc::iovec;

/// Smallest RMB: SMC size class 0.
pub const MIN_SIZE: u32 = 16 << 10;
/// RMBs are carved from chunks of this size, so it is also the largest RMB.
pub const CHUNK: u32 = 4 << 20;

/// SMC size class of `size` bytes: the smallest n with `16 KiB << n >= size`, at most a chunk.
pub fn size_class(size: u32) -> u8 {
    let mut n = 0;
    while (MIN_SIZE << n) < size.min(CHUNK) {
        n += 1;
    }
    n
}

/// Bytes of size class `n`.
pub fn class_size(n: u8) -> u32 {
    MIN_SIZE << n
}

/// A mapped ring.
#[derive(Clone, Copy)]
pub struct Ring {
    base: *mut u8,
    size: u32,
}

// SAFETY: a Ring is an address; the callers' direction locks order the accesses.
unsafe impl Send for Ring {}
// SAFETY: as above.
unsafe impl Sync for Ring {}

impl Ring {
    /// No ring.
    pub const NONE: Ring = Ring {
        base: core::ptr::null_mut(),
        size: 0,
    };

    /// A ring over `size` bytes (a power of two) at `base`.
    ///
    /// # Safety
    /// The memory must stay mapped, readable and writable for as long as the ring is used.
    pub unsafe fn new(base: *mut u8, size: u32) -> Ring {
        debug_assert!(size.is_power_of_two());
        Ring { base, size }
    }

    /// Capacity in bytes; 0 for [`Ring::NONE`].
    pub fn size(&self) -> u32 {
        self.size
    }

    /// The contiguous bytes at stream offset `off`: at most `len`, less where the ring wraps.
    #[inline]
    pub fn span(&self, off: u64, len: usize) -> (*mut u8, usize) {
        let at = (off & u64::from(self.size - 1)) as usize;
        // SAFETY: `at < size`, within the mapping.
        (
            unsafe { self.base.add(at) },
            len.min(self.size as usize - at),
        )
    }

    /// Copies `n <= size` bytes from the caller's gather list, skipping its first `skip` bytes, to
    /// stream offset `off`.
    ///
    /// # Safety
    /// The list must describe at least `skip + n` readable bytes.
    pub unsafe fn write(&self, off: u64, iov: &[iovec], skip: usize, n: usize) {
        // SAFETY: promised by the caller; `each_span` stays within ring and list.
        unsafe {
            self.each_span(off, iov, skip, n, |ring, user, k| {
                copy_nonoverlapping(user, ring, k)
            })
        }
    }

    /// Copies `n <= size` bytes from stream offset `off` to the caller's scatter list, skipping its
    /// first `skip` bytes.
    ///
    /// # Safety
    /// The list must describe at least `skip + n` writable bytes.
    #[inline(always)]
    pub unsafe fn read(&self, off: u64, iov: &[iovec], skip: usize, n: usize) {
        // SAFETY: as in `write`.
        unsafe {
            self.each_span(off, iov, skip, n, |ring, user, k| {
                copy_nonoverlapping(ring, user, k)
            })
        }
    }

    /// # Safety
    /// The list must describe at least `skip + n` bytes.
    #[inline]
    unsafe fn each_span(
        &self,
        mut off: u64,
        iov: &[iovec],
        mut skip: usize,
        mut n: usize,
        f: impl Fn(*mut u8, *mut u8, usize),
    ) {
        for v in iov {
            if n == 0 {
                return;
            }
            if skip >= v.iov_len {
                skip -= v.iov_len;
                continue;
            }
            // SAFETY: skip < iov_len.
            let mut user = unsafe { v.iov_base.cast::<u8>().add(skip) };
            let mut left = (v.iov_len - skip).min(n);
            skip = 0;
            n -= left;
            while left > 0 {
                let (ring, k) = self.span(off, left);
                f(ring, user, k);
                // SAFETY: k <= left bytes remain in this element.
                user = unsafe { user.add(k) };
                off += k as u64;
                left -= k;
            }
        }
    }
}

/// Total bytes of a scatter or gather list.
pub fn iov_len(iov: &[iovec]) -> usize {
    iov.iter().map(|v| v.iov_len).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn classes() {
        assert_eq!(size_class(1), 0);
        assert_eq!(size_class(16 << 10), 0);
        assert_eq!(size_class((16 << 10) + 1), 1);
        assert_eq!(size_class(256 << 10), 4);
        assert_eq!(class_size(size_class(u32::MAX)), CHUNK);
    }

    fn list(mem: &mut [u8], cuts: &[usize]) -> Vec<iovec> {
        let mut v = Vec::new();
        let mut rest = mem;
        for &c in cuts {
            let (a, b) = rest.split_at_mut(c.min(rest.len()));
            v.push(iovec {
                iov_base: a.as_mut_ptr().cast(),
                iov_len: a.len(),
            });
            rest = b;
        }
        v.push(iovec {
            iov_base: rest.as_mut_ptr().cast(),
            iov_len: rest.len(),
        });
        v
    }

    proptest! {
        /// What is written at any offset through any list is read back through any other.
        #[test]
        fn round_trip(
            off in any::<u64>(), data in proptest::collection::vec(any::<u8>(), 1..200),
            cuts_w in proptest::collection::vec(0usize..40, 0..8),
            cuts_r in proptest::collection::vec(0usize..40, 0..8), skip in 0usize..20,
        ) {
            let mut mem = vec![0u8; 256];
            // SAFETY: `mem` outlives the ring.
            let ring = unsafe { Ring::new(mem.as_mut_ptr(), 256) };
            let off = off >> 1;
            let mut src = vec![0xaa; skip];
            src.extend(&data);
            let w = list(&mut src, &cuts_w);
            // SAFETY: the list covers skip + data.len() bytes.
            unsafe { ring.write(off, &w, skip, data.len()) };
            let mut dst = vec![0u8; skip + data.len()];
            let r = list(&mut dst, &cuts_r);
            // SAFETY: as above.
            unsafe { ring.read(off, &r, skip, data.len()) };
            prop_assert_eq!(&dst[skip..], &data[..]);
            prop_assert!(dst[..skip].iter().all(|&b| b == 0));
        }
    }
}
