//! LLC messages: any bytes decode or are refused, and what decodes says the same after it has been encoded.
//!
//! Run with `cargo +nightly fuzz run llc` in `smc-core`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| smc_core::wire::fuzzing::llc(data));
