//! Body of the fuzz target, here so that ordinary tests run it too. It takes any bytes and panics when it finds a
//! bug.

use super::{HEADER, MAX_EMIT, Message, missing};

/// What decodes can be encoded, and means the same then; [`missing`] agrees with the decoder.
pub fn clc(data: &[u8]) {
    let framed = missing(data);
    let parsed = Message::parse(data);
    if framed != Ok(0) {
        assert!(parsed.is_err(), "{framed:?}, but {parsed:?}");
        return;
    }
    // Up to the header's end only the header is asked for, then exactly the rest of the message.
    assert!(data.len() >= HEADER);
    for at in 0..HEADER {
        assert_eq!(missing(&data[..at]), Ok(HEADER - at));
    }
    let length = HEADER + missing(&data[..HEADER]).expect("the header was found good");
    assert!(length <= data.len());
    assert_eq!(missing(&data[..length]), Ok(0));
    assert_eq!(missing(&data[..length - 1]), Ok(1));

    let Ok(message) = parsed else {
        return;
    };
    assert_eq!(length, data.len());
    let mut buf = [0; MAX_EMIT];
    match (message, message.emit(&mut buf)) {
        (Message::SmcD(_), None) => {}
        (_, Some(len)) => assert_eq!(Message::parse(&buf[..len]), Ok(message)),
        (_, None) => panic!("{message:?} doesn't fit"),
    }
}
