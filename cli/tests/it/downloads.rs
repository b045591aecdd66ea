//! Downloads over a line that breaks, from a real coordinator.

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

const BYTES: usize = 12 << 20;

/// A line to the coordinator. Each connection breaks after `most` bytes from there.
struct Line {
    url: String,
    /// How many bytes have come in all.
    came: Arc<AtomicU64>,
    most: Arc<AtomicU64>,
}

impl Line {
    async fn to(coordinator: std::net::SocketAddr, most: u64) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (came, most) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(most)));
        let (counter, limit) = (came.clone(), most.clone());
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let server = TcpStream::connect(coordinator).await.unwrap();
                let (counter, limit) = (counter.clone(), limit.clone());
                tokio::spawn(carry(client, server, counter, limit));
            }
        });
        Self { url, came, most }
    }
}

async fn carry(client: TcpStream, server: TcpStream, came: Arc<AtomicU64>, most: Arc<AtomicU64>) {
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let mut upwards = tokio::spawn(async move { tokio::io::copy(&mut from_client, &mut to_server).await });
    let (mut piece, mut carried) = (vec![0; 64 << 10], 0_u64);
    while let Ok(read @ 1..) = from_server.read(&mut piece).await {
        carried += read as u64;
        came.fetch_add(read as u64, Ordering::SeqCst);
        if to_client.write_all(&piece[..read]).await.is_err() || carried >= most.load(Ordering::SeqCst) {
            break;
        }
    }
    // What was carried arrives, however slowly it is read: with words of the client unread, closing would throw it away.
    let _ = to_client.shutdown().await;
    let _ = tokio::time::timeout(Duration::from_secs(10), &mut upwards).await;
    upwards.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_download_that_breaks_goes_on_where_it_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = aitk_coordinator::Config::new(folder.path().join("coordinator"));
    config.bind = "127.0.0.1:0".parse().unwrap();
    let coordinator = aitk_coordinator::start(config).await.unwrap();
    // Nothing that could be mended by chance: no two megabytes are alike.
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

    // Within one command: two thirds come, the line breaks, the rest comes.
    let line = Line::to(coordinator.addr, 8 << 20).await;
    let api = Api::connect(&line.url, &coordinator.token, None).await.unwrap();
    let target = folder.path().join("got/one.bin");
    let mut steps = Vec::new();
    fetch(&api, hash, BYTES as u64, &target, |more| steps.push(more))
        .await
        .unwrap();
    assert!(std::fs::read(&target).unwrap() == content, "another content");
    assert!(steps.iter().all(|more| *more >= 0), "something was fetched again");
    assert_eq!(steps.iter().sum::<i64>(), i64::try_from(BYTES).unwrap());
    // More than all of it by what was under way when the line broke, and no more.
    let came = line.came.load(Ordering::SeqCst);
    assert!(came < (BYTES + (BYTES >> 1)) as u64, "{came} bytes for {BYTES}");

    // Across two of them: the first gives up, and what it has is what the second begins with.
    let line = Line::to(coordinator.addr, 2 << 20).await;
    let api = Api::connect(&line.url, &coordinator.token, None).await.unwrap();
    let target = folder.path().join("got/two.bin");
    let broken = fetch(&api, hash, BYTES as u64, &target, |_| {}).await.unwrap_err();
    assert_eq!(broken.exit.code(), 5, "{broken}");
    assert!(!target.exists());
    line.most.store(u64::MAX, Ordering::SeqCst);
    let before = line.came.load(Ordering::SeqCst);
    let mut steps = Vec::new();
    fetch(&api, hash, BYTES as u64, &target, |more| steps.push(more))
        .await
        .unwrap();
    assert!(std::fs::read(&target).unwrap() == content, "another content");
    let had = u64::try_from(steps[0]).unwrap();
    assert!(had >= 1 << 20, "what was there was not used: {had}");
    let came = line.came.load(Ordering::SeqCst) - before;
    assert!(came < BYTES as u64 - had + (1 << 20), "{came} bytes for the rest");
    let left: Vec<_> = std::fs::read_dir(folder.path().join("got"))
        .unwrap()
        .flatten()
        .collect();
    assert_eq!(left.len(), 2, "{left:?}");
    coordinator.shutdown().await;
}
