//! `aitk-worker join`, and a daemon that uses what that gave.

use crate::program::{program, run, text};
use crate::support::{PATIENCE, connected, device, eventually};
use aitk_coordinator::{PkiConfig, ca_folder, init};
use aitk_proto::client::{Clients, connect};
use aitk_proto::v1;
use aitk_worker::{Config, JoinOptions, Membership, Refusal, Running, join};
use std::path::{Path, PathBuf};
use std::time::Duration;

struct Lab {
    folder: tempfile::TempDir,
    running: aitk_coordinator::Running,
    admin: Clients,
}

impl Lab {
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

    async fn worker(&self, joined: &Membership) -> Running {
        let mut config = Config::new(&joined.server, "", self.path("w"));
        config.membership = Some(joined.clone());
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
async fn a_machine_joins_once_and_then_needs_no_options() {
    let lab = Lab::start(Duration::from_secs(3600)).await;
    let token = lab.token("basement").await;
    let data = lab.path("w");
    let url = lab.running.url();
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
    let seen = async {
        loop {
            let request = v1::ListWorkersRequest::default();
            let workers = lab
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
    let seen = tokio::time::timeout(PATIENCE, seen).await;
    // Revoked: it ends by itself, and says so.
    lab.revoke("basement").await;
    let mut code = None;
    for _ in 0..PATIENCE.as_millis() / 10 {
        code = daemon.try_wait().unwrap();
        if code.is_some() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let _ = daemon.kill();
    let said = text(&daemon.wait_with_output().unwrap().stderr);
    assert!(seen.is_ok(), "{said}");
    assert_eq!(code.and_then(|code| code.code()), Some(4), "{said}");
    assert!(said.contains("revoked"), "{said}");

    // Others may not read it.
    std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
    let output = run(program().args(["--devices", "cpu", "--data-dir"]).arg(&data)).await;
    assert!(text(&output.stderr).contains("chmod 600"), "{}", text(&output.stderr));
    lab.running.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_wrong_with_a_join_is_said_in_one_line() {
    let lab = Lab::start(Duration::from_secs(3600)).await;
    let other = Lab::start(Duration::from_secs(3600)).await;
    let (url, elsewhere) = (lab.running.url(), other.running.url());
    let (good, spent, taken) = (lab.token("a").await, lab.token("b").await, lab.token("b").await);
    let first = JoinOptions {
        data_dir: lab.path("w0"),
        ..lab.options(&spent)
    };
    join(first).await.unwrap();
    let plain = url.replace("https:", "http:");
    let file = lab.path("token");
    std::fs::write(&file, &good).unwrap();
    let file = file.display().to_string();
    let cases: [(&[&str], i32, &str); 8] = [
        (&[&url, "aitk_join_short"], 1, "this is not a join token"),
        (&[&elsewhere, &good], 1, "nothing was sent"),
        (&[&url, &spent], 4, "used already"),
        (&[&url, &taken], 1, "worker revoke b"),
        (&[&url, &good, "--name", "other"], 4, "this machine is"),
        (&[&url, &good, "--name", "a b"], 1, "cannot be the name"),
        (&[&plain, &good], 1, "without TLS"),
        (&[&url, "--token-file", "/does/not/exist"], 1, "/does/not/exist"),
    ];
    for (arguments, code, words) in cases {
        let output = run(program()
            .arg("join")
            .args(arguments)
            .arg("--data-dir")
            .arg(lab.path("w")))
        .await;
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{said}");
        assert!(said.contains(words), "{words}: {said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        assert!(!said.contains(good.split('.').next().unwrap()), "{said}");
        assert!(!lab.path("w/identity.json").exists());
    }
    // None of that used it up.
    let output = run(program()
        .args(["join", &url, "--token-file", &file, "--data-dir"])
        .arg(lab.path("w2")))
    .await;
    assert!(output.status.success(), "{}", text(&output.stderr));
    lab.running.shutdown().await;
    other.running.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_renews_its_certificate_and_goes_on_with_the_new_one() {
    let lab = Lab::start(Duration::from_secs(30)).await;
    let joined = join(lab.options(&lab.token("box").await)).await.unwrap();
    let before = lab.certificate().await;
    let worker = lab.worker(&joined).await;
    connected(&worker).await;
    // Half of its life later.
    let data = lab.path("w");
    while Membership::read(&data).unwrap() == Some(joined.clone()) {
        assert!(joined.ended().is_none(), "not renewed in time");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let after = lab.certificate().await;
    assert!(after.serial != before.serial && after.id == before.id);
    assert_eq!(mode(&data.join("identity.json")), 0o600);
    // The session is opened again with it.
    let used = async {
        loop {
            let request = v1::ReadAuditRequest { after: 0, limit: 0 };
            let lines = lab
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
    tokio::time::timeout(PATIENCE, used).await.unwrap();
    connected(&worker).await;
    worker.shutdown().await;
    lab.running.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_whose_certificate_ended_says_join_again() {
    let lab = Lab::start(Duration::from_secs(1)).await;
    let joined = join(lab.options(&lab.token("box").await)).await.unwrap();
    eventually("its end", || joined.ended().is_some()).await;
    let mut worker = lab.worker(&joined).await;
    let refused = tokio::time::timeout(PATIENCE, worker.ended())
        .await
        .unwrap()
        .unwrap_err();
    assert!(
        matches!(&refused, Refusal::Config(text) if text.contains("join again")),
        "{refused}"
    );
    // It may join again, under its old name and into its old place.
    let again = join(lab.options(&lab.token("box").await)).await.unwrap();
    assert_eq!(again.worker, joined.worker);
    // Its identity says where that is, should the rest of its folder be gone.
    std::fs::remove_file(lab.path("w").join("worker_id")).unwrap();
    lab.revoke("box").await;
    let third = join(lab.options(&lab.token("box").await)).await.unwrap();
    assert_eq!(third.worker, joined.worker);
    lab.running.shutdown().await;
}
