//! Uploads to a real coordinator over connections that break.

use aitk_cli::api::Api;
use aitk_cli::download::fetch;
use aitk_cli::output::Ui;
use aitk_cli::upload::{Upload, hash_inputs};
use aitk_tests::breaking_proxy::BreakingProxy;
use std::collections::BTreeMap;

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
