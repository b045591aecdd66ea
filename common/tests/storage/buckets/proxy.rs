//! A TCP proxy that injects faults. Changing the mode closes the existing connections.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// The fault to inject into connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// No fault.
    Pass,
    /// Responds to every request with 500.
    Respond500,
    /// Responds to every request with 404 because the bucket does not exist.
    RespondNoBucket,
    /// Reads requests and never responds.
    Hang,
    /// Closes the connection immediately.
    Refuse,
    /// Closes the connection after this many bytes from the server.
    CutResponsesAfter(usize),
    /// Closes the connection after this many bytes from the server, for this many connections. Later ones are not cut.
    CutFirstResponses(usize, usize),
    /// Closes the connection after this many bytes from the client.
    CutRequestsAfter(usize),
    /// Waits this many milliseconds after each 64 KiB from the client.
    SlowRequests(u64),
}

pub(super) struct Proxy {
    port: u16,
    mode: watch::Sender<Mode>,
    task: JoinHandle<()>,
}

impl Proxy {
    /// Starts a proxy in front of `host:port`.
    pub(super) async fn start(server: &str, mode: Mode) -> Self {
        let server = server.to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (mode, watched) = watch::channel(mode);
        let cuts = Arc::new(AtomicUsize::new(0));
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (mut watched, cuts, server) = (watched.clone(), Arc::clone(&cuts), server.clone());
                let mode = *watched.borrow_and_update();
                tokio::spawn(async move {
                    tokio::select! {
                        () = serve(client, &server, mode, &cuts) => {}
                        _ = watched.changed() => {}
                    }
                });
            }
        });
        Self { port, mode, task }
    }

    pub(super) fn set(&self, mode: Mode) {
        self.mode.send_replace(mode);
    }

    pub(super) fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(mut client: TcpStream, server: &str, mode: Mode, cuts: &AtomicUsize) {
    let (from_client, from_server) = match mode {
        Mode::Refuse => return,
        Mode::Hang => {
            let mut sink = vec![0; 65_536];
            while client.read(&mut sink).await.is_ok_and(|read| read > 0) {}
            return;
        }
        Mode::Respond500 => return respond(client, "500 Internal Server Error", "").await,
        Mode::RespondNoBucket => return respond(client, "404 Not Found", NO_BUCKET).await,
        Mode::Pass => (usize::MAX, usize::MAX),
        Mode::CutResponsesAfter(bytes) => (usize::MAX, bytes),
        Mode::CutFirstResponses(bytes, times) => {
            let is_cut = cuts.fetch_add(1, Ordering::Relaxed) < times;
            (usize::MAX, if is_cut { bytes } else { usize::MAX })
        }
        Mode::CutRequestsAfter(bytes) => (bytes, usize::MAX),
        Mode::SlowRequests(_) => (usize::MAX, usize::MAX),
    };
    let pause = match mode {
        Mode::SlowRequests(millis) => Duration::from_millis(millis),
        _ => Duration::ZERO,
    };
    let Ok(mut upstream) = TcpStream::connect(server).await else {
        return;
    };
    let (mut client_read, mut client_write) = client.split();
    let (mut server_read, mut server_write) = upstream.split();
    tokio::select! {
        () = forward(&mut client_read, &mut server_write, from_client, pause) => {}
        () = forward(&mut server_read, &mut client_write, from_server, Duration::ZERO) => {}
    }
}

async fn forward(
    from: &mut (impl AsyncReadExt + Unpin),
    to: &mut (impl AsyncWriteExt + Unpin),
    mut left: usize,
    pause: Duration,
) {
    let mut buffer = vec![0; 65_536];
    while left > 0 {
        let end = buffer.len().min(left);
        let Ok(read) = from.read(&mut buffer[..end]).await else {
            return;
        };
        if read == 0 || to.write_all(&buffer[..read]).await.is_err() {
            return;
        }
        left -= read;
        if !pause.is_zero() {
            tokio::time::sleep(pause).await;
        }
    }
}

const NO_BUCKET: &str = "<?xml version=\"1.0\"?><Error><Code>NoSuchBucket</Code><Message>The specified bucket does not exist</Message></Error>";

/// Reads the head of one request, responds, and then reads until the client closes the connection.
async fn respond(mut client: TcpStream, status: &str, body: &str) {
    let mut head = Vec::new();
    let mut buffer = vec![0; 65_536];
    while !head.windows(4).any(|end| end == b"\r\n\r\n") {
        match client.read(&mut buffer).await {
            Ok(read) if read > 0 => head.extend_from_slice(&buffer[..read]),
            _ => return,
        }
    }
    let length = body.len();
    let response = format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}");
    let _ = client.write_all(response.as_bytes()).await;
    let _ = client.shutdown().await;
    while client.read(&mut buffer).await.is_ok_and(|read| read > 0) {}
}
