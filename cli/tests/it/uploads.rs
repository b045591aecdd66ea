//! Uploads to a real coordinator over connections that break, and to one that has too many calls.

use aitk_cli::api::Api;
use aitk_cli::download::fetch;
use aitk_cli::exit::Exit;
use aitk_cli::output::Ui;
use aitk_cli::upload::{Upload, hash_inputs};
use aitk_proto::client::{Clients, connect};
use aitk_proto::v1;
use aitk_tests::breaking_proxy::BreakingProxy;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

const BYTES: usize = 32 << 20;

/// A connection carries less than the file, so that an upload that starts over never ends.
#[tokio::test(flavor = "multi_thread")]
async fn a_broken_upload_continues_where_it_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = aitk_coordinator::Config::new(folder.path().join("coordinator"));
    config.bind = "127.0.0.1:0".parse().unwrap();
    let coordinator = aitk_coordinator::start(config).await.unwrap();
    // No two megabytes are alike, so that wrong offsets change the content.
    let content: Vec<u8> = (0..BYTES).map(|at| (at ^ (at >> 8) ^ (at >> 16)) as u8).collect();
    let source = folder.path().join("large.bin");
    std::fs::write(&source, &content).unwrap();
    let line = BreakingProxy::to(coordinator.addr, 12 << 20).await.unwrap();
    let api = Api::connect(&line.url, &coordinator.token, None).await.unwrap();
    let ui = Ui::silent();
    let inputs = BTreeMap::from([("large.bin".to_owned(), source)]);
    let staged = hash_inputs(&ui, &inputs).await.unwrap();
    let hash = staged[0].1.snapshot.files[0].sha256;
    let upload = Upload::plan(&api, &ui, staged).await.unwrap();
    upload.send(&api, &ui).await.unwrap();
    assert!(line.broken() >= 2, "{} connections broke", line.broken());

    let direct = Api::connect(&coordinator.url(), &coordinator.token, None)
        .await
        .unwrap();
    let target = folder.path().join("got.bin");
    fetch(&direct, hash, BYTES as u64, &target, |_| {}).await.unwrap();
    assert!(std::fs::read(&target).unwrap() == content, "wrong content");
    coordinator.shutdown().await;
}

/// How many calls of one user the coordinator has at once, and how many of them a connection carries.
const MAX_CALLS: usize = 512;
const CALLS_OF_CONNECTION: usize = 90;

/// Calls of one user that are open until this is dropped.
struct OpenCalls {
    clients: Clients,
    senders: Vec<mpsc::Sender<v1::PutBlobRequest>>,
}

impl OpenCalls {
    /// Opens as many calls as one user may have.
    async fn all(url: &str, token: &str) -> Self {
        let mut calls = Self {
            clients: connect(url, token, None).await.unwrap(),
            senders: Vec::new(),
        };
        for number in 1..=MAX_CALLS {
            calls.open_one();
            if number % CALLS_OF_CONNECTION == 0 {
                calls.clients = connect(url, token, None).await.unwrap();
            }
        }
        calls
    }

    /// Opens another call, for one that came while another client had the last place: it was refused, and its place is free.
    async fn open_one_later(&mut self) {
        tokio::time::sleep(Duration::from_millis(20)).await;
        self.open_one();
    }

    fn open_one(&mut self) {
        assert!(self.senders.len() < 2 * MAX_CALLS, "no call was refused");
        let mut blobs = self.clients.blobs.clone();
        let (sender, receiver) = mpsc::channel(1);
        tokio::spawn(async move { blobs.put(ReceiverStream::new(receiver)).await });
        self.senders.push(sender);
    }
}

async fn start_coordinator(folder: &std::path::Path) -> aitk_coordinator::CoordinatorHandle {
    let mut config = aitk_coordinator::Config::new(folder.join("coordinator"));
    config.bind = "127.0.0.1:0".parse().unwrap();
    aitk_coordinator::start(config).await.unwrap()
}

/// Before, such a call failed at once, with the exit code of a failed command.
#[tokio::test(flavor = "multi_thread")]
async fn calls_and_uploads_wait_while_the_coordinator_is_busy_and_say_so_once() {
    let folder = tempfile::tempdir().unwrap();
    let coordinator = start_coordinator(folder.path()).await;
    let source = folder.path().join("data.bin");
    std::fs::write(&source, [7; 1000]).unwrap();
    let notices = Arc::new(Mutex::new(Vec::new()));
    let printed = notices.clone();
    let connected = Api::connect(&coordinator.url(), &coordinator.token, None)
        .await
        .unwrap();
    let api = connected.with_wait_notice(move |text| printed.lock().unwrap().push(text.to_owned()));
    let ui = Ui::silent();
    let staged = hash_inputs(&ui, &BTreeMap::from([("data.bin".to_owned(), source)]))
        .await
        .unwrap();
    let mut calls = OpenCalls::all(&coordinator.url(), &coordinator.token).await;
    while notices.lock().unwrap().is_empty() {
        // The first calls may come before the last of the others.
        let answer = tokio::time::timeout(Duration::from_millis(100), api.info()).await;
        match answer {
            Ok(Ok(_)) => calls.open_one_later().await,
            Ok(Err(failure)) => panic!("no notice came before {failure:?}"),
            Err(_) => {}
        }
    }
    let upload = async {
        let upload = Upload::plan(&api, &ui, staged).await.unwrap();
        upload.send(&api, &ui).await.unwrap()
    };
    let calls_end = async {
        tokio::time::sleep(Duration::from_secs(2)).await;
        drop(calls);
    };
    let (info, sent, ()) = tokio::join!(api.info(), upload, calls_end);
    info.unwrap();
    assert_eq!(sent[0].sent_bytes, 1000);
    let notices = notices.lock().unwrap().clone();
    assert_eq!(notices.len(), 1, "{notices:?}");
    for part in ["is busy", "waiting"] {
        assert!(notices[0].contains(part), "{part}: {notices:?}");
    }
    coordinator.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_coordinator_that_stays_busy_is_5() {
    let folder = tempfile::tempdir().unwrap();
    let coordinator = start_coordinator(folder.path()).await;
    let api = Api::connect(&coordinator.url(), &coordinator.token, None)
        .await
        .unwrap();
    let mut calls = OpenCalls::all(&coordinator.url(), &coordinator.token).await;
    // The first calls may come before the last of the others.
    let (failure, waited) = loop {
        let began = Instant::now();
        match api.info().await {
            Ok(_) => calls.open_one_later().await,
            Err(failure) => break (failure, began.elapsed()),
        }
    };
    assert_eq!(failure.exit, Exit::Unreachable);
    assert!(
        failure.message.contains("is busy") && !failure.hints.is_empty(),
        "{failure:?}"
    );
    assert!(waited > Duration::from_secs(25), "{waited:?}");
    coordinator.shutdown().await;
}
