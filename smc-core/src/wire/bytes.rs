//! Reading and writing the fields of a message in the order of its layout table.

use super::Error;

/// Takes fields from the front of a message.
pub(crate) struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Reader<'a> {
        Reader { rest: bytes }
    }

    /// The next `n` bytes.
    pub(crate) fn slice(&mut self, n: usize) -> Result<&'a [u8], Error> {
        let (field, rest) = self.rest.split_at_checked(n).ok_or(Error::Truncated)?;
        self.rest = rest;
        Ok(field)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], Error> {
        let (field, rest) = self.rest.split_first_chunk().ok_or(Error::Truncated)?;
        self.rest = rest;
        Ok(*field)
    }

    /// The next `count` fields of `N` bytes each.
    pub(crate) fn arrays<const N: usize>(&mut self, count: usize) -> Result<&'a [[u8; N]], Error> {
        let len = count.checked_mul(N).ok_or(Error::Truncated)?;
        Ok(self.slice(len)?.as_chunks().0)
    }

    /// Number of bytes not yet taken.
    pub(crate) fn left(&self) -> usize {
        self.rest.len()
    }

    /// Passes over `n` bytes.
    pub(crate) fn skip(&mut self, n: usize) -> Result<(), Error> {
        self.slice(n).map(|_| ())
    }

    pub(crate) fn u8(&mut self) -> Result<u8, Error> {
        self.array().map(u8::from_be_bytes)
    }

    pub(crate) fn u16(&mut self) -> Result<u16, Error> {
        self.array().map(u16::from_be_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, Error> {
        self.array().map(u32::from_be_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, Error> {
        self.array().map(u64::from_be_bytes)
    }
}

/// Appends fields to a message.
///
/// Writing past the end of the buffer is no error until [`Writer::finish`].
pub(crate) struct Writer<'a> {
    buf: &'a mut [u8],
    at: usize,
}

impl<'a> Writer<'a> {
    pub(crate) fn new(buf: &'a mut [u8]) -> Writer<'a> {
        Writer { buf, at: 0 }
    }

    pub(crate) fn put(&mut self, field: &[u8]) {
        let end = self.at.saturating_add(field.len());
        if let Some(place) = self.buf.get_mut(self.at..end) {
            place.copy_from_slice(field);
        }
        self.at = end;
    }

    /// Appends `n` bytes of zero.
    pub(crate) fn zeros(&mut self, n: usize) {
        let end = self.at.saturating_add(n);
        if let Some(place) = self.buf.get_mut(self.at..end) {
            place.fill(0);
        }
        self.at = end;
    }

    pub(crate) fn u8(&mut self, value: u8) {
        self.put(&[value]);
    }

    pub(crate) fn u16(&mut self, value: u16) {
        self.put(&value.to_be_bytes());
    }

    pub(crate) fn u32(&mut self, value: u32) {
        self.put(&value.to_be_bytes());
    }

    pub(crate) fn u64(&mut self, value: u64) {
        self.put(&value.to_be_bytes());
    }

    /// Length of the message; `None` if the buffer is too short for it.
    pub(crate) fn finish(self) -> Option<usize> {
        Some(self.at).filter(|at| *at <= self.buf.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_up_to_the_end_and_not_beyond() {
        let mut reader = Reader::new(&[1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(reader.u8(), Ok(1));
        assert_eq!(reader.u16(), Ok(0x0203));
        reader.skip(1).unwrap();
        assert_eq!(reader.u32(), Err(Error::Truncated));
        assert_eq!(reader.slice(3), Ok(&[5, 6, 7][..]));
        assert_eq!(reader.u8(), Err(Error::Truncated));
    }

    #[test]
    fn a_message_too_long_for_its_buffer_is_noticed() {
        let mut buf = [0xff; 7];
        let mut writer = Writer::new(&mut buf);
        writer.u16(0x0102);
        writer.zeros(1);
        writer.u32(0x0304_0506);
        assert_eq!(writer.finish(), Some(7));
        assert_eq!(buf, [1, 2, 0, 3, 4, 5, 6]);
        let mut writer = Writer::new(&mut buf);
        writer.u64(0);
        assert_eq!(writer.finish(), None);
    }
}
