//! Random numbers that a seed repeats.

/// A small generator; not for secrets.
#[derive(Clone)]
pub(crate) struct Rng(u64);

impl Rng {
    /// The sequence of this seed.
    pub(crate) fn new(seed: u64) -> Rng {
        Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5851_f42d_4c95_7f2d)
    }

    /// Any number.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `n`, which is not 0.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        ((self.next() >> 11) % n as u64) as usize
    }

    /// One of the elements.
    pub(crate) fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }

    /// So many bytes.
    pub(crate) fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.next() as u8).collect()
    }

    /// A number of the kind that breaks things: small, around `near`, a power of two, extreme, or any.
    pub(crate) fn odd(&mut self, near: u64) -> u64 {
        let some = self.next();
        match self.below(8) {
            0 => some % 4,
            1 => near.wrapping_add(some % 4),
            2 => near.wrapping_sub(some % 4),
            3 => 1 << (some % 64),
            4 => u64::MAX - some % 4,
            5 => i64::MAX as u64 + some % 3,
            6 => near.wrapping_add(some % (1 << 23)),
            _ => some,
        }
    }
}
