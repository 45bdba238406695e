//! Networking with Rust's libraries: `rust_net LIBRARY server` prints "ports N..." and serves until
//! it is ended, `rust_net LIBRARY client N...` uses it and prints a line "ok NAME" or
//! "failed NAME: REASON" for each case.

mod hyper_net;
mod mio_net;
mod tokio_net;

use std::error::Error;
use std::net::Ipv4Addr;

type Outcome<T = ()> = Result<T, Box<dyn Error + Send + Sync>>;

/// Where all listeners are, on a port that is free.
const ANY_PORT: (Ipv4Addr, u16) = (Ipv4Addr::LOCALHOST, 0);

fn check(condition: bool, what: impl FnOnce() -> String) -> Outcome {
    condition.then_some(()).ok_or_else(|| what().into())
}

fn report(name: &str, outcome: Outcome) {
    match outcome {
        Ok(()) => println!("ok {name}"),
        Err(error) => println!("failed {name}: {error}"),
    }
}

fn byte(seed: usize, place: usize) -> u8 {
    ((place ^ (seed << 40)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

/// The bytes of a stream from a place on.
fn bytes(seed: usize, place: usize, size: usize) -> Vec<u8> {
    (place..place + size)
        .map(|place| byte(seed, place))
        .collect()
}

/// Whether these bytes of a stream are what they should be.
fn check_bytes(got: &[u8], seed: usize, place: usize) -> Outcome {
    let differs = (0..got.len()).find(|&i| got[i] != byte(seed, place + i));
    check(differs.is_none(), || {
        format!("stream {seed} differs at {place} + {differs:?}")
    })
}

#[tokio::main(worker_threads = 4)]
async fn main() -> Outcome {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let ports: Vec<u16> = words
        .iter()
        .skip(2)
        .map(|word| word.parse())
        .collect::<Result<_, _>>()?;
    match (words.first().map_or("", String::as_str), &ports[..]) {
        ("mio", []) => mio_net::serve()?,
        ("mio", &[once, anew]) => mio_net::cases(once, anew).await,
        ("tokio", []) => tokio_net::serve().await?,
        ("tokio", &[echo, proxy]) => tokio_net::cases(echo, proxy).await,
        ("hyper", []) => hyper_net::serve().await?,
        ("hyper", &[port]) => hyper_net::cases(port).await,
        _ => return Err("usage: rust_net mio|tokio|hyper server|client PORT...".into()),
    }
    Ok(())
}
