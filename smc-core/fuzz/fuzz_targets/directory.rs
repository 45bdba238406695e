//! The endpoint table: operations on a mapping that holds any bytes never fail in an uncontrolled way.
//!
//! Run with `cargo +nightly fuzz run directory` in `smc-core`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| smc_core::negotiate::fuzzing::directory(data));
