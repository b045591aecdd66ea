//! Downloads from a real coordinator over connections that break.

use aitk_cli::api::Api;
use aitk_cli::download::fetch;
use aitk_cli::output::Ui;
use aitk_cli::upload::{Upload, hash_inputs};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Of this, several times what the client receives before the program reads it (2 MiB, which are lost where the connection breaks meanwhile).
const BYTES: usize = 32 << 20;

/// A TCP proxy to the coordinator. Each connection breaks after `max_bytes_per_connection` bytes from the coordinator.
struct FlakyProxy {
    url: String,
    /// Total bytes from the coordinator.
    received: Arc<AtomicU64>,
    max_bytes_per_connection: Arc<AtomicU64>,
}

impl FlakyProxy {
    async fn to(coordinator: std::net::SocketAddr, max_bytes_per_connection: u64) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (received, max_bytes_per_connection) = (
            Arc::new(AtomicU64::new(0)),
            Arc::new(AtomicU64::new(max_bytes_per_connection)),
        );
        let (counter, limit) = (received.clone(), max_bytes_per_connection.clone());
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let server = TcpStream::connect(coordinator).await.unwrap();
                let (counter, limit) = (counter.clone(), limit.clone());
                tokio::spawn(forward(client, server, counter, limit));
            }
        });
        Self {
            url,
            received,
            max_bytes_per_connection,
        }
    }
}

async fn forward(
    client: TcpStream,
    server: TcpStream,
    received: Arc<AtomicU64>,
    max_bytes_per_connection: Arc<AtomicU64>,
) {
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let mut upwards = tokio::spawn(async move { tokio::io::copy(&mut from_client, &mut to_server).await });
    let (mut piece, mut carried) = (vec![0; 64 << 10], 0_u64);
    while let Ok(read @ 1..) = from_server.read(&mut piece).await {
        carried += read as u64;
        received.fetch_add(read as u64, Ordering::SeqCst);
        if to_client.write_all(&piece[..read]).await.is_err()
            || carried >= max_bytes_per_connection.load(Ordering::SeqCst)
        {
            break;
        }
    }
    // Keep reading from the client: closing with unread data would reset the connection and discard what was sent.
    let _ = to_client.shutdown().await;
    let _ = tokio::time::timeout(Duration::from_secs(10), &mut upwards).await;
    upwards.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broken_download_continues_where_it_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = aitk_coordinator::Config::new(folder.path().join("coordinator"));
    config.bind = "127.0.0.1:0".parse().unwrap();
    let coordinator = aitk_coordinator::start(config).await.unwrap();
    // No two megabytes are alike, so that wrong offsets change the content.
    let content: Vec<u8> = (0..BYTES).map(|at| (at ^ (at >> 8) ^ (at >> 16)) as u8).collect();
    let source = folder.path().join("large.bin");
    std::fs::write(&source, &content).unwrap();
    let direct = Api::connect(&coordinator.url(), &coordinator.token, None)
        .await
        .unwrap();
    let ui = Ui::silent();
    let inputs = BTreeMap::from([("large.bin".to_owned(), source)]);
    let staged = hash_inputs(&ui, &inputs).await.unwrap();
    let hash = staged[0].1.snapshot.files[0].sha256;
    let upload = Upload::plan(&direct, &ui, staged).await.unwrap();
    upload.send(&direct, &ui).await.unwrap();

    // Within one command: the connection breaks after two thirds, and the rest is downloaded.
    let line = FlakyProxy::to(coordinator.addr, 20 << 20).await;
    let api = Api::connect(&line.url, &coordinator.token, None).await.unwrap();
    let target = folder.path().join("got/one.bin");
    let mut steps = Vec::new();
    fetch(&api, hash, BYTES as u64, &target, |more| steps.push(more))
        .await
        .unwrap();
    assert!(std::fs::read(&target).unwrap() == content, "wrong content");
    assert!(steps.iter().all(|more| *more >= 0), "something was fetched again");
    assert_eq!(steps.iter().sum::<i64>(), i64::try_from(BYTES).unwrap());
    // Only the data in flight when the connection broke is sent twice.
    let received = line.received.load(Ordering::SeqCst);
    assert!(received < (BYTES + (BYTES >> 1)) as u64, "{received} bytes for {BYTES}");

    // A connection that breaks more often than a download without progress is attempted.
    let line = FlakyProxy::to(coordinator.addr, 6 << 20).await;
    let api = Api::connect(&line.url, &coordinator.token, None).await.unwrap();
    let target = folder.path().join("got/often.bin");
    fetch(&api, hash, BYTES as u64, &target, |_| {}).await.unwrap();
    assert!(std::fs::read(&target).unwrap() == content, "wrong content");
    std::fs::remove_file(&target).unwrap();

    // Across two commands: the first gives up, and the second continues with its data.
    let line = FlakyProxy::to(coordinator.addr, 6 << 20).await;
    let api = Api::connect(&line.url, &coordinator.token, None).await.unwrap();
    let target = folder.path().join("got/two.bin");
    let mut had = 0;
    let broken = fetch(&api, hash, BYTES as u64, &target, |more| {
        had += more;
        if had >= 2 << 20 {
            // No later connection carries data.
            line.max_bytes_per_connection.store(0, Ordering::SeqCst);
        }
    })
    .await
    .unwrap_err();
    assert_eq!(broken.exit.code(), 5, "{broken}");
    assert!(!target.exists());
    line.max_bytes_per_connection.store(u64::MAX, Ordering::SeqCst);
    let before = line.received.load(Ordering::SeqCst);
    let mut steps = Vec::new();
    fetch(&api, hash, BYTES as u64, &target, |more| steps.push(more))
        .await
        .unwrap();
    assert!(std::fs::read(&target).unwrap() == content, "another content");
    let had = u64::try_from(steps[0]).unwrap();
    assert!(had >= 1 << 20, "what was there was not used: {had}");
    let received = line.received.load(Ordering::SeqCst) - before;
    assert!(
        received < BYTES as u64 - had + (1 << 20),
        "{received} bytes for the rest"
    );
    let left: Vec<_> = std::fs::read_dir(folder.path().join("got"))
        .unwrap()
        .flatten()
        .collect();
    assert_eq!(left.len(), 2, "{left:?}");
    coordinator.shutdown().await;
}
