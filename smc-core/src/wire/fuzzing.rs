//! Bodies of the fuzz targets, here so that ordinary tests run them too. Each takes any bytes and panics when it
//! finds a bug.

use super::cdc::Cdc;
use super::{RmbSize, llc};

/// A CDC message that decodes says the same after it has been encoded, and its cursors stay within their limits.
pub fn cdc(data: &[u8]) {
    let Ok(cdc) = Cdc::parse(data) else {
        return;
    };
    assert_eq!(Cdc::parse(&cdc.to_bytes()), Ok(cdc));
    for code in 0..=15 {
        let Some(size) = RmbSize::from_code(code) else {
            return;
        };
        let last = u64::from(cdc.token) << 24;
        let limit = last + u64::from(size.bytes());
        for cursor in [cdc.producer, cdc.consumer] {
            if let Ok(offset) = cursor.offset(size, last, limit) {
                assert!((last..=limit).contains(&offset), "{cursor:?}");
            }
        }
    }
}

/// An LLC message that decodes says the same after it has been encoded.
pub fn llc(data: &[u8]) {
    let Ok(message) = llc::Message::parse(data) else {
        return;
    };
    let mut out = [0; llc::MAX];
    let len = message.emit(&mut out).expect("message fits");
    assert!(len <= data.len(), "{message:?}");
    assert_eq!(llc::Message::parse(&out[..len]), Ok(message));
}
