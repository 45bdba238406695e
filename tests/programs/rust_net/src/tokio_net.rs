//! tokio: tasks on several threads, with sockets that are split, joined, handed on and dropped.

use crate::{ANY_PORT, Outcome, bytes, check, check_bytes, report};
use std::future::Future;
use std::net::Ipv4Addr;
use std::time::Duration;
use tokio::io::{
    AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, copy, copy_bidirectional, split,
};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

/// The first port echoes, the second passes on to the first.
pub async fn serve() -> Outcome {
    let (one, two) = (
        TcpListener::bind(ANY_PORT).await?,
        TcpListener::bind(ANY_PORT).await?,
    );
    let port = one.local_addr()?.port();
    println!("ports {port} {}", two.local_addr()?.port());
    loop {
        tokio::select! {
            accepted = one.accept() => drop(tokio::spawn(echo(accepted?.0))),
            accepted = two.accept() => {
                let mut stream = accepted?.0;
                tokio::spawn(async move {
                    copy_bidirectional(&mut stream, &mut connect(port).await?).await
                });
            }
        }
    }
}

pub async fn echo(stream: impl AsyncRead + AsyncWrite) -> std::io::Result<()> {
    let (mut from, mut to) = split(stream);
    copy(&mut from, &mut to).await?;
    to.shutdown().await
}

pub async fn connect(port: u16) -> std::io::Result<TcpStream> {
    TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await
}

/// Sends a stream in pieces, with a pause after each, and its end; at the same time reads it back.
/// Reads that take longer than `patience` are given up and begun again.
pub async fn exchange(
    stream: impl AsyncRead + AsyncWrite + Send + 'static,
    (seed, size, piece): (usize, usize, usize),
    pause: Duration,
    patience: Duration,
) -> Outcome {
    let (mut from, mut to) = split(stream);
    // It is ended with this task.
    let mut writer = JoinSet::new();
    writer.spawn(async move {
        for place in (0..size).step_by(piece) {
            to.write_all(&bytes(seed, place, piece.min(size - place)))
                .await?;
            sleep(pause).await;
        }
        to.shutdown().await
    });
    let (mut buffer, mut place, mut given_up) = (Vec::with_capacity(50_000), 0, 0);
    loop {
        tokio::select! {
            count = from.read_buf(&mut buffer) => {
                check_bytes(&buffer, seed, place)?;
                place += buffer.len();
                buffer.clear();
                if count? == 0 {
                    break;
                }
            }
            () = sleep(patience) => given_up += 1,
        }
    }
    writer
        .join_all()
        .await
        .into_iter()
        .collect::<Result<(), _>>()?;
    check(place == size, || format!("{place} bytes of {size}"))?;
    check(given_up > 0 || patience > pause, || {
        "no read was given up".into()
    })
}

/// Messages to and fro.
async fn messages(stream: &mut TcpStream, seed: usize, count: usize) -> Outcome {
    let mut buffer = vec![0; 500];
    for number in 0..count {
        stream.write_all(&bytes(seed, number, 500)).await?;
        stream.read_exact(&mut buffer).await?;
        check_bytes(&buffer, seed, number)?;
    }
    Ok(())
}

/// A connection goes to another runtime, by way of the standard library, and back.
async fn other_runtime(port: u16) -> Outcome {
    let mut stream = connect(port).await?;
    for seed in 0..6 {
        messages(&mut stream, seed, 30).await?;
        let bare = stream.into_std()?;
        let other = tokio::task::spawn_blocking(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()?;
            runtime.block_on(async {
                let mut stream = TcpStream::from_std(bare)?;
                messages(&mut stream, seed, 30).await?;
                Outcome::Ok(stream.into_std()?)
            })
        });
        stream = TcpStream::from_std(other.await??)?;
    }
    Ok(())
}

/// Tasks that are ended in the middle of what they do don't disturb the others.
async fn abort(port: u16) -> Outcome {
    let mut stream = connect(port).await?;
    for seed in 0..40 {
        let other = connect(port).await?;
        let (time, terms) = (
            Duration::from_millis(seed as u64 % 7),
            (seed, 5 << 20, 20_000),
        );
        let task = tokio::spawn(exchange(other, terms, Duration::ZERO, Duration::MAX));
        sleep(time).await;
        task.abort();
        messages(&mut stream, seed, 10).await?;
    }
    Ok(())
}

/// Runs so many at once, each as a task of its own.
pub async fn all<F: Future<Output = Outcome> + Send + 'static>(
    name: &str,
    count: usize,
    work: impl Fn(usize) -> F,
) {
    let tasks: Vec<_> = (0..count)
        .map(|number| tokio::spawn(work(number)))
        .collect();
    let ended = timeout(Duration::from_secs(50), async {
        for task in tasks {
            task.await??;
        }
        Ok(())
    });
    report(
        name,
        ended
            .await
            .unwrap_or_else(|_| Err("not done in time".into())),
    );
}

/// Cases for each server that echoes.
pub async fn echoes(name: &str, port: u16) {
    const MS: Duration = Duration::from_millis(1);
    all(&format!("{name}-bulk"), 4, move |seed| async move {
        exchange(
            connect(port).await?,
            (seed, 4 << 20, 60_000),
            Duration::ZERO,
            Duration::MAX,
        )
        .await
    })
    .await;
    all(&format!("{name}-select"), 4, move |seed| async move {
        exchange(connect(port).await?, (seed, 70_000, 700), 4 * MS, MS).await
    })
    .await;
    all(&format!("{name}-many"), 150, move |seed| async move {
        messages(&mut connect(port).await?, seed, 60).await
    })
    .await;
    all(&format!("{name}-abort"), 1, move |_| abort(port)).await;
}

pub async fn cases(echo: u16, proxy: u16) {
    echoes("echo", echo).await;
    echoes("proxy", proxy).await;
    all("other-runtime", 2, move |_| other_runtime(echo)).await;
}
