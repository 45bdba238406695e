//! hyper: HTTP/1.1 and HTTP/2 over tokio's sockets. A request for /KIND/SEED/SIZE has a body that
//! is stream SEED, and gets so many bytes of stream SEED + 1.

use crate::tokio_net::{all, connect, echo, exchange};
use crate::{ANY_PORT, Outcome, bytes, check, check_bytes};
use http_body_util::{BodyExt, Either, Full};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::header::{CONNECTION, HOST, UPGRADE};
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode, client, upgrade};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use std::convert::Infallible;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::{Notify, mpsc};

type Body = Either<Full<Bytes>, Pieces>;

/// (`http_body_util::channel`, as of 0.1.5, may lose what is sent right before its sender goes.)
struct Pieces(mpsc::Receiver<Bytes>);

impl hyper::body::Body for Pieces {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0
            .poll_recv(context)
            .map(|piece| piece.map(|piece| Ok(Frame::data(piece))))
    }
}

/// It is known as a whole or comes in pieces, which take a while for the last of a connection.
fn body(kind: &str, seed: usize, size: usize) -> Body {
    if kind == "whole" {
        return Either::Left(Full::new(bytes(seed, 0, size).into()));
    }
    let (sender, pieces) = mpsc::channel(4);
    let pause = Duration::from_millis(if kind == "last" { 5 } else { 0 });
    tokio::spawn(async move {
        for place in (0..size).step_by(9000) {
            tokio::time::sleep(pause).await;
            sender
                .send(bytes(seed, place, 9000.min(size - place)).into())
                .await?;
        }
        Outcome::Ok(())
    });
    Either::Right(Pieces(pieces))
}

/// Receives a body, which must be this stream; gives its size.
async fn receive(mut body: Incoming, seed: usize) -> Outcome<usize> {
    let mut size = 0;
    while let Some(frame) = body.frame().await {
        if let Some(data) = frame?.data_ref() {
            check_bytes(data, seed, size)?;
            size += data.len();
        }
    }
    Ok(size)
}

async fn answer(mut request: Request<Incoming>, last: Arc<Notify>) -> Outcome<Response<Body>> {
    if request.headers().contains_key(UPGRADE) {
        let upgraded = upgrade::on(&mut request);
        tokio::spawn(async { Outcome::Ok(echo(TokioIo::new(upgraded.await?)).await?) });
        let response = Response::builder().status(StatusCode::SWITCHING_PROTOCOLS);
        return Ok(response.header(UPGRADE, "echo").body(body("whole", 0, 0))?);
    }
    let path = request.uri().path().to_owned();
    let words: Vec<&str> = path.split('/').collect();
    let (kind, seed, size) = (words[1], words[2].parse()?, words[3].parse()?);
    let got = receive(request.into_body(), seed).await?;
    if kind == "last" {
        last.notify_one();
    }
    Ok(Response::builder()
        .header("x-got", got)
        .body(body(kind, seed + 1, size))?)
}

pub async fn serve() -> Outcome {
    let listener = TcpListener::bind(ANY_PORT).await?;
    println!("ports {}", listener.local_addr()?.port());
    loop {
        let stream = TokioIo::new(listener.accept().await?.0);
        tokio::spawn(async move {
            let last = Arc::new(Notify::new());
            let service = service_fn(|request| answer(request, last.clone()));
            let builder = auto::Builder::new(TokioExecutor::new());
            let mut connection = pin!(builder.serve_connection_with_upgrades(stream, service));
            tokio::select! {
                ended = connection.as_mut() => return ended,
                () = last.notified() => connection.as_mut().graceful_shutdown(),
            }
            connection.await
        });
    }
}

/// Sends request `number` of `count`, and checks the answer. Of `kind` "graceful", the last one lets
/// the server end the connection.
macro_rules! ask {
    ($sender:expr, $kind:expr, $number:expr, $count:expr, $size:expr) => {{
        let (kind, seed) = ($kind.replace("graceful", "chunked"), $number);
        let last = $kind == "graceful" && seed + 1 == $count;
        let kind = if last { "last" } else { &kind };
        let (sent, size) = ($size * (seed % 3) / 2, $size * (seed % 5) / 2);
        let uri = format!("http://localhost/{kind}/{seed}/{size}");
        let request = Request::post(uri)
            .header(HOST, "localhost")
            .body(body(kind, seed, sent))?;
        $sender.ready().await?;
        let response = $sender.send_request(request).await?;
        let got = response
            .headers()
            .get("x-got")
            .map(|got| got.to_str())
            .transpose()?;
        check(got == Some(&sent.to_string()), || {
            format!("{got:?} bytes of {sent} got there")
        })?;
        let got = receive(response.into_body(), seed + 1).await?;
        check(got == size, || format!("{got} bytes of {size} came back"))?;
    }};
}

/// Requests one after the other on one connection.
async fn one_by_one(port: u16, kind: &str, count: usize, size: usize) -> Outcome {
    let stream = TokioIo::new(connect(port).await?);
    let (mut sender, connection) = client::conn::http1::handshake(stream).await?;
    let connection = tokio::spawn(connection);
    for number in 0..count {
        ask!(sender, kind, number, count, size);
    }
    if kind == "graceful" {
        connection.await??;
    }
    Ok(())
}

/// Requests at the same time on one connection, as streams of it.
async fn streams(port: u16, kind: &'static str, count: usize, size: usize) -> Outcome {
    let stream = TokioIo::new(connect(port).await?);
    let executor = TokioExecutor::new();
    let (sender, connection) = client::conn::http2::handshake(executor, stream).await?;
    let connection = tokio::spawn(connection);
    let mut tasks = tokio::task::JoinSet::new();
    for number in 0..count {
        let mut sender = sender.clone();
        tasks.spawn(async move {
            ask!(sender, kind, number, count, size);
            Outcome::Ok(())
        });
    }
    while let Some(ended) = tasks.join_next().await {
        ended??;
    }
    if kind == "graceful" {
        connection.await??;
    }
    Ok(())
}

/// A connection that HTTP leaves to something else.
async fn upgraded(port: u16) -> Outcome {
    let stream = TokioIo::new(connect(port).await?);
    let (mut sender, connection) = client::conn::http1::handshake(stream).await?;
    tokio::spawn(connection.with_upgrades());
    ask!(sender, "whole", 2, 3, 5000);
    sender.ready().await?;
    let request = Request::get("/")
        .header(HOST, "localhost")
        .header(CONNECTION, "upgrade");
    let request = request.header(UPGRADE, "echo").body(body("whole", 0, 0))?;
    let response = sender.send_request(request).await?;
    check(response.status() == StatusCode::SWITCHING_PROTOCOLS, || {
        response.status().to_string()
    })?;
    let stream = TokioIo::new(upgrade::on(response).await?);
    exchange(stream, (3, 2 << 20, 30_000), Duration::ZERO, Duration::MAX).await
}

pub async fn cases(port: u16) {
    all("http1-keep-alive", 8, move |_| {
        one_by_one(port, "whole", 100, 3000)
    })
    .await;
    all("http1-chunked", 4, move |_| {
        one_by_one(port, "chunked", 10, 300_000)
    })
    .await;
    all("http1-big", 1, move |_| {
        one_by_one(port, "whole", 5, 8 << 20)
    })
    .await;
    all("http1-upgrade", 2, move |_| upgraded(port)).await;
    all("http1-graceful", 2, move |_| {
        one_by_one(port, "graceful", 3, 400_000)
    })
    .await;
    all("http2-streams", 2, move |_| {
        streams(port, "whole", 100, 5000)
    })
    .await;
    all("http2-chunked", 1, move |_| {
        streams(port, "chunked", 30, 200_000)
    })
    .await;
    all("http2-big", 1, move |_| streams(port, "whole", 5, 4 << 20)).await;
    all("http2-graceful", 2, move |_| {
        streams(port, "graceful", 20, 400_000)
    })
    .await;
}
