//! CLC messages: framing and decoding agree, and what decodes says the same after it has been encoded.
//!
//! Run with `cargo +nightly fuzz run clc` in `smc-core`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| smc_core::wire::clc::fuzzing::clc(data));
