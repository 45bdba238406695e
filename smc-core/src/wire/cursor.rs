//! Cursors: positions in an RMB as CDC messages carry them, and as 64-bit stream offsets.
//!
//! On the wire a cursor is a count below the size of the RMB and the number of times the count has passed its end,
//! modulo 2^16. As an offset of the stream it never wraps, and the producer's minus the consumer's is the number of
//! bytes in the RMB: 0 if empty, its size if full.

use super::{Error, RmbSize};

/// A cursor on the wire.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Cursor {
    /// How often `count` has passed the end of the RMB, modulo 2^16.
    pub wrap: u16,
    /// Position in the RMB, in bytes. A peer may send any number; [`Cursor::offset`] refuses those beyond the end.
    pub count: u32,
}

impl Cursor {
    /// The cursor of stream offset `offset` in an RMB of this size.
    pub fn from_offset(offset: u64, size: RmbSize) -> Cursor {
        let bytes = u64::from(size.bytes());
        Cursor {
            // Both are cut to the width of their field: the wrap counts modulo 2^16, the count is below 2^29.
            wrap: (offset / bytes) as u16,
            count: (offset % bytes) as u32,
        }
    }

    /// The stream offset of a received cursor, `last` if it is no newer than that.
    ///
    /// `last` is the offset of the newest cursor received so far. A cursor counts as older if it lies behind in the
    /// half of the 2^16 rounds that precede `last`, and an older one is not an error: CDC messages may be repeated.
    ///
    /// `limit` is the largest offset that makes sense: for a producer cursor what has been consumed plus the size of
    /// the RMB, for a consumer cursor what has been produced.
    ///
    /// # Errors
    /// [`Error::Field`] if the count is not below the size, or the offset is above `limit`.
    pub fn offset(self, size: RmbSize, last: u64, limit: u64) -> Result<u64, Error> {
        let bytes = u64::from(size.bytes());
        if u64::from(self.count) >= bytes {
            return Err(Error::Field("cursor count"));
        }
        // Positions repeat after 2^16 rounds, at most 2^45 bytes.
        let period = bytes << 16;
        let position = u64::from(self.wrap) * bytes + u64::from(self.count);
        let ahead = position.wrapping_sub(last) % period;
        if ahead >= period / 2 {
            return Ok(last);
        }
        match last.checked_add(ahead) {
            Some(offset) if offset <= limit => Ok(offset),
            _ => Err(Error::Field("cursor")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn size(code: u8) -> RmbSize {
        RmbSize::from_code(code).unwrap()
    }

    const fn cursor(wrap: u16, count: u32) -> Cursor {
        Cursor { wrap, count }
    }

    #[test]
    fn full_and_empty_differ_in_the_wrap_only() {
        let size = size(2);
        assert_eq!(Cursor::from_offset(0, size), cursor(0, 0));
        assert_eq!(Cursor::from_offset(65535, size), cursor(0, 65535));
        assert_eq!(Cursor::from_offset(65536, size), cursor(1, 0));
        assert_eq!(cursor(1, 0).offset(size, 0, 65536), Ok(65536));
        assert_eq!(cursor(0, 0).offset(size, 0, 65536), Ok(0));
        // Full at any position: producer 1/192 against consumer 0/192.
        assert_eq!(cursor(1, 192).offset(size, 192, 192 + 65536), Ok(65728));
    }

    #[test]
    fn the_wrap_count_wraps() {
        for code in [0, 2, 8, 15] {
            let size = size(code);
            let bytes = u64::from(size.bytes());
            let last = 0xffff * bytes + 5;
            assert_eq!(Cursor::from_offset(last, size), cursor(0xffff, 5));
            assert_eq!(Cursor::from_offset(last + bytes, size), cursor(0, 5));
            assert_eq!(
                cursor(0, 5).offset(size, last, last + bytes),
                Ok(last + bytes)
            );
            assert_eq!(
                cursor(0xffff, size.bytes() - 1).offset(size, last, last + bytes),
                Ok(0x1_0000 * bytes - 1)
            );
        }
    }

    #[test]
    fn older_cursors_change_nothing() {
        let size = size(0);
        let last = 3 * 16384 + 100;
        assert_eq!(cursor(3, 100).offset(size, last, last), Ok(last));
        assert_eq!(cursor(3, 99).offset(size, last, last), Ok(last));
        assert_eq!(cursor(2, 16383).offset(size, last, last), Ok(last));
        assert_eq!(cursor(0, 0).offset(size, last, last), Ok(last));
        // Before the wrap count wrapped.
        let last = 0x1_0000 * 16384 + 1;
        assert_eq!(cursor(0xffff, 16383).offset(size, last, last), Ok(last));
    }

    #[test]
    fn cursors_out_of_range_are_refused() {
        let size = size(0);
        for count in [16384, 16385, u32::MAX] {
            assert_eq!(
                cursor(0, count).offset(size, 0, u64::MAX),
                Err(Error::Field("cursor count"))
            );
        }
        assert_eq!(cursor(1, 0).offset(size, 0, 16384), Ok(16384));
        assert_eq!(
            cursor(1, 1).offset(size, 0, 16384),
            Err(Error::Field("cursor"))
        );
        assert_eq!(
            cursor(0, 0).offset(size, u64::MAX, u64::MAX),
            Err(Error::Field("cursor"))
        );
    }

    proptest! {
        /// Whatever the producer sends within its window arrives as the offset it meant.
        #[test]
        fn offsets_survive_the_wire(code in 0u8..=15, last in 0u64..1 << 62, ahead: u64) {
            let size = size(code);
            let window = u64::from(size.bytes());
            let offset = last + ahead % (window + 1);
            let cursor = Cursor::from_offset(offset, size);
            prop_assert_eq!(cursor.offset(size, last, last + window), Ok(offset));
            // And once that one is known, the former counts as old.
            prop_assert_eq!(Cursor::from_offset(last, size).offset(size, offset, offset), Ok(offset));
        }

        /// The answer to any cursor lies between the last one and the limit.
        #[test]
        fn nothing_escapes_the_limits(code in 0u8..=15, wrap: u16, count: u32, last: u64, room: u32) {
            let limit = last.saturating_add(room.into());
            if let Ok(offset) = cursor(wrap, count).offset(size(code), last, limit) {
                prop_assert!((last..=limit).contains(&offset));
            }
        }
    }
}
