//! The fuzz targets' bodies on random input, so that every test run exercises them.

use proptest::prelude::*;

use super::fuzzing;

proptest! {
    #![proptest_config(ProptestConfig { cases: 20_000, failure_persistence: None, ..Default::default() })]

    #[test]
    fn message_from_any_bytes(data in prop::collection::vec(any::<u8>(), 0..140)) {
        fuzzing::message(&data);
    }

    /// Random bytes hardly ever have a good header, so give them one.
    #[test]
    fn message_from_any_body(code in 0u8..18, body in prop::collection::vec(any::<u8>(), 0..120)) {
        let mut data = vec![code, 0, body.len() as u8 + 4, 0];
        data.extend(body);
        fuzzing::message(&data);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..Default::default() })]

    #[test]
    fn directory_of_any_words(words in prop::collection::vec(any::<u64>(), 0..600)) {
        let data: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        fuzzing::directory(&data);
    }
}
