//! A TCP proxy whose connections break while the client sends.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// How long a broken connection is kept, so that the server reads what was sent before it broke.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);

/// A proxy to one server. Each connection breaks after a number of bytes from the client.
#[derive(Debug)]
pub struct BreakingProxy {
    /// Its address, with `http://`.
    pub url: String,
    broken: Arc<AtomicU64>,
}

impl BreakingProxy {
    /// Starts a proxy to `server`, in the current runtime.
    ///
    /// # Errors
    /// When it cannot listen.
    pub async fn to(server: SocketAddr, max_bytes_per_connection: u64) -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}", listener.local_addr()?);
        let broken = Arc::new(AtomicU64::new(0));
        let counter = broken.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let Ok(server) = TcpStream::connect(server).await else {
                    continue;
                };
                let counter = counter.clone();
                tokio::spawn(async move {
                    if forward(client, server, max_bytes_per_connection).await {
                        counter.fetch_add(1, Ordering::SeqCst);
                    }
                });
            }
        });
        Ok(Self { url, broken })
    }

    /// How many connections it broke.
    #[must_use]
    pub fn broken(&self) -> u64 {
        self.broken.load(Ordering::SeqCst)
    }
}

/// Forwards a connection. Returns whether it was broken, and not ended by the client.
async fn forward(client: TcpStream, server: TcpStream, max_bytes: u64) -> bool {
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let mut downwards = tokio::spawn(async move { tokio::io::copy(&mut from_server, &mut to_client).await });
    let (mut piece, mut carried) = (vec![0; 64 << 10], 0_u64);
    while let Ok(read @ 1..) = from_client.read(&mut piece).await {
        if to_server.write_all(&piece[..read]).await.is_err() {
            break;
        }
        carried += read as u64;
        if carried >= max_bytes {
            break;
        }
    }
    let is_broken = carried >= max_bytes;
    drop(from_client);
    // The server reads the end of the connection after all bytes.
    let _ = to_server.shutdown().await;
    let _ = tokio::time::timeout(DRAIN_TIMEOUT, &mut downwards).await;
    downwards.abort();
    is_broken
}
