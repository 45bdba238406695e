//! Link messages: any bytes decode or are refused, and what decodes encodes to the same bytes.
//!
//! Run with `cargo +nightly fuzz run message` in `smc-core`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| smc_core::negotiate::fuzzing::message(data));
