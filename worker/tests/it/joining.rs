//! `aitk-worker join`, and a daemon that uses the certificate.

use crate::program::{program, run, text};
use crate::support::{TIMEOUT, device, eventually, wait_until_connected};
use aitk_coordinator::{PkiConfig, ca_folder, init};
use aitk_proto::client::{Clients, connect};
use aitk_proto::v1;
use aitk_worker::{Config, JoinOptions, Refusal, WorkerHandle, WorkerIdentity, join};
use std::path::{Path, PathBuf};
use std::time::Duration;

struct TestCluster {
    folder: tempfile::TempDir,
    running: aitk_coordinator::CoordinatorHandle,
    admin: Clients,
}

impl TestCluster {
    async fn start(worker_life: Duration) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let data = folder.path().join("coordinator");
        let ca = init(&data, &[]).unwrap().hash;
        let mut config = aitk_coordinator::Config::new(&data);
        config.bind = "127.0.0.1:0".parse().unwrap();
        config.pki = Some(PkiConfig {
            worker_life,
            ..PkiConfig::new(ca_folder(&data))
        });
        let running = aitk_coordinator::start(config).await.unwrap();
        let token = format!("{}.{ca}", running.token);
        let admin = connect(&running.url(), &token, None).await.unwrap();
        Self { folder, running, admin }
    }

    async fn token(&self, name: &str) -> String {
        let request = v1::CreateJoinTokenRequest {
            name: name.into(),
            expires_in_ms: 600_000,
        };
        self.admin
            .admin
            .clone()
            .create_join_token(request)
            .await
            .unwrap()
            .into_inner()
            .text
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn options(&self, token: &str) -> JoinOptions {
        JoinOptions {
            server: self.running.url(),
            token: token.into(),
            name: None,
            ca_file: None,
            data_dir: self.path("w"),
        }
    }

    async fn worker(&self, joined: &WorkerIdentity) -> WorkerHandle {
        let mut config = Config::new(&joined.server, "", self.path("w"));
        config.identity = Some(joined.clone());
        config.devices = vec![device()];
        aitk_worker::start(config).await.unwrap()
    }

    async fn certificate(&self) -> v1::WorkerCertificateInfo {
        let request = v1::ListCertificatesRequest::default();
        let reply = self.admin.admin.clone().list_certificates(request).await.unwrap();
        reply.into_inner().certificates.remove(0)
    }

    async fn revoke(&self, name: &str) {
        let request = v1::RevokeWorkerRequest { name: name.into() };
        self.admin.admin.clone().revoke_worker(request).await.unwrap();
    }
}

fn mode(path: &Path) -> u32 {
    use std::os::unix::fs::PermissionsExt;
    std::fs::metadata(path).unwrap().permissions().mode() & 0o777
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_that_joined_needs_no_options() {
    let cluster = TestCluster::start(Duration::from_secs(3600)).await;
    let token = cluster.token("basement").await;
    let data = cluster.path("w");
    let url = cluster.running.url();
    let output = run(program().args(["join", &url, &token, "--data-dir"]).arg(&data)).await;
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout).trim(), "basement");
    let file = data.join("identity.json");
    assert_eq!(mode(&file), 0o600);
    let secret = token.split('.').next().unwrap();
    assert!(!text(&std::fs::read(&file).unwrap()).contains(secret));

    let mut daemon = program()
        .args(["--devices", "cpu", "--data-dir"])
        .arg(&data)
        .spawn()
        .unwrap();
    let registered = async {
        loop {
            let request = v1::ListWorkersRequest::default();
            let workers = cluster
                .admin
                .jobs
                .clone()
                .list_workers(request)
                .await
                .unwrap()
                .into_inner()
                .workers;
            if workers
                .iter()
                .any(|worker| worker.name == "basement" && worker.connected)
            {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let registered = tokio::time::timeout(TIMEOUT, registered).await;
    // After the revocation the daemon ends with a message.
    cluster.revoke("basement").await;
    let mut code = None;
    for _ in 0..TIMEOUT.as_millis() / 10 {
        code = daemon.try_wait().unwrap();
        if code.is_some() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let _ = daemon.kill();
    let stderr = text(&daemon.wait_with_output().unwrap().stderr);
    assert!(registered.is_ok(), "{stderr}");
    assert_eq!(code.and_then(|code| code.code()), Some(4), "{stderr}");
    assert!(stderr.contains("revoked"), "{stderr}");

    // An identity that others can read is refused.
    std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
    let output = run(program().args(["--devices", "cpu", "--data-dir"]).arg(&data)).await;
    assert!(text(&output.stderr).contains("chmod 600"), "{}", text(&output.stderr));
    cluster.running.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_join_has_a_one_line_message() {
    let cluster = TestCluster::start(Duration::from_secs(3600)).await;
    let other = TestCluster::start(Duration::from_secs(3600)).await;
    let (url, elsewhere) = (cluster.running.url(), other.running.url());
    let (unused, spent, taken) = (
        cluster.token("a").await,
        cluster.token("b").await,
        cluster.token("b").await,
    );
    let first = JoinOptions {
        data_dir: cluster.path("w0"),
        ..cluster.options(&spent)
    };
    join(first).await.unwrap();
    let plain = url.replace("https:", "http:");
    let file = cluster.path("token");
    std::fs::write(&file, &unused).unwrap();
    let file = file.display().to_string();
    let cases: [(&[&str], i32, &str); 8] = [
        (&[&url, "aitk_join_short"], 1, "this is not a join token"),
        (&[&elsewhere, &unused], 1, "nothing was sent"),
        (&[&url, &spent], 4, "used already"),
        (&[&url, &taken], 1, "worker revoke b"),
        (&[&url, &unused, "--name", "other"], 4, "this machine is"),
        (&[&url, &unused, "--name", "a b"], 1, "cannot be the name"),
        (&[&plain, &unused], 1, "without TLS"),
        (&[&url, "--token-file", "/does/not/exist"], 1, "/does/not/exist"),
    ];
    for (arguments, code, expected) in cases {
        let output = run(program()
            .arg("join")
            .args(arguments)
            .arg("--data-dir")
            .arg(cluster.path("w")))
        .await;
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{stderr}");
        assert!(stderr.contains(expected), "{expected}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
        assert!(!stderr.contains(unused.split('.').next().unwrap()), "{stderr}");
        assert!(!cluster.path("w/identity.json").exists());
    }
    // None of the failed joins used up the token.
    let output = run(program()
        .args(["join", &url, "--token-file", &file, "--data-dir"])
        .arg(cluster.path("w2")))
    .await;
    assert!(output.status.success(), "{}", text(&output.stderr));
    cluster.running.shutdown().await;
    other.running.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_renews_its_certificate_and_reconnects_with_it() {
    let cluster = TestCluster::start(Duration::from_secs(30)).await;
    let joined = join(cluster.options(&cluster.token("box").await)).await.unwrap();
    let before = cluster.certificate().await;
    let worker = cluster.worker(&joined).await;
    wait_until_connected(&worker).await;
    // The renewal is due after half of its life.
    let data = cluster.path("w");
    while WorkerIdentity::read(&data).unwrap() == Some(joined.clone()) {
        assert!(joined.expired_at().is_none(), "not renewed in time");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let after = cluster.certificate().await;
    assert!(after.serial != before.serial && after.id == before.id);
    assert_eq!(mode(&data.join("identity.json")), 0o600);
    // The session is reopened with the new certificate.
    let used = async {
        loop {
            let request = v1::ReadAuditRequest { after: 0, limit: 0 };
            let lines = cluster
                .admin
                .admin
                .clone()
                .read_audit(request)
                .await
                .unwrap()
                .into_inner()
                .lines;
            if lines
                .iter()
                .any(|line| line.action == "certificate.use" && line.object == after.serial)
            {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(TIMEOUT, used).await.unwrap();
    wait_until_connected(&worker).await;
    worker.shutdown().await;
    cluster.running.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_with_an_expired_certificate_asks_to_join_again() {
    let cluster = TestCluster::start(Duration::from_secs(1)).await;
    let joined = join(cluster.options(&cluster.token("box").await)).await.unwrap();
    eventually("the certificate did not expire", || joined.expired_at().is_some()).await;
    let mut worker = cluster.worker(&joined).await;
    let refused = tokio::time::timeout(TIMEOUT, worker.ended())
        .await
        .unwrap()
        .unwrap_err();
    assert!(
        matches!(&refused, Refusal::Config(text) if text.contains("join again")),
        "{refused}"
    );
    // It may join again, with its old name and id.
    let rejoined = join(cluster.options(&cluster.token("box").await)).await.unwrap();
    assert_eq!(rejoined.worker, joined.worker);
    // The identity also holds the id, if the file with the id is lost.
    std::fs::remove_file(cluster.path("w").join("worker_id")).unwrap();
    cluster.revoke("box").await;
    let third = join(cluster.options(&cluster.token("box").await)).await.unwrap();
    assert_eq!(third.worker, joined.worker);
    cluster.running.shutdown().await;
}
