//! CDC messages: any bytes decode or are refused, and cursors stay within their limits.
//!
//! Run with `cargo +nightly fuzz run cdc` in `smc-core`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| smc_core::wire::fuzzing::cdc(data));
