//! Authentication of connections, and the handling of misbehaving clients.

use crate::support::{self, FakeWorker, TIMEOUT, TestCoordinator, config, eventually, held_attempt, within};
use aitk_common::control_plane::{JobState, ToCoordinator};
use aitk_coordinator::{Config, DataFolderError, StartError, TlsFiles, start};
use aitk_proto::client::{ConnectError, Credentials, connect, connect_with};
use aitk_proto::v1;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tonic::Code;

const LONG_LEASE: Duration = Duration::from_secs(60);

/// Writes a self-signed certificate for 127.0.0.1 and its key. Returns their paths.
pub(crate) fn self_signed_certificate(folder: &Path) -> (PathBuf, PathBuf) {
    let names = ["127.0.0.1".to_owned(), "localhost".to_owned()];
    let made = rcgen::generate_simple_self_signed(names).expect("these names can be certified");
    let (cert, key) = (folder.join("cert.pem"), folder.join("key.pem"));
    std::fs::write(&cert, made.cert.pem()).expect("the folder is ours");
    std::fs::write(&key, made.signing_key.serialize_pem()).expect("the folder is ours");
    (cert, key)
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_need_the_right_token_and_protocol_version() {
    let coordinator = TestCoordinator::start(LONG_LEASE).await;
    let url = coordinator.running.url();
    let token = coordinator.running.token.clone();
    let last = if token.ends_with('0') { '1' } else { '0' };
    let almost_right = format!("{}{last}", &token[..token.len() - 1]);
    for (credentials, code, expected) in [
        (
            Credentials::new("wrong-but-long-enough").unwrap(),
            Code::Unauthenticated,
            "AITK_TOKEN",
        ),
        (
            Credentials::new(&almost_right).unwrap(),
            Code::Unauthenticated,
            "AITK_TOKEN",
        ),
        (
            Credentials::with_protocol(&token, 2).unwrap(),
            Code::FailedPrecondition,
            "same version",
        ),
    ] {
        let clients = within(connect_with(&url, credentials, None)).await.unwrap();
        let mut errors = vec![
            within(clients.jobs.clone().info(v1::InfoRequest {})).await.unwrap_err(),
            within(clients.blobs.clone().has(v1::HasRequest::default()))
                .await
                .unwrap_err(),
        ];
        let first = ToCoordinator::Register(Box::new(FakeWorker::registration("w", None, Vec::new())));
        errors.push(FakeWorker::open(&clients, Some(first)).await.unwrap_err());
        for error in errors {
            assert_eq!(error.code(), code, "{error}");
            assert!(error.message().contains(expected), "{error}");
            assert!(!error.message().contains(&token), "the answer must not hold the token");
        }
    }
    let without_token = tonic::transport::Endpoint::from_shared(url)
        .unwrap()
        .connect()
        .await
        .unwrap();
    let error = within(v1::jobs_client::JobsClient::new(without_token).info(v1::InfoRequest {}))
        .await
        .unwrap_err();
    assert_eq!(error.code(), Code::Unauthenticated);
    let info = within(coordinator.clients.jobs.clone().info(v1::InfoRequest {}))
        .await
        .unwrap()
        .into_inner();
    assert_eq!((info.protocol, info.storage.as_str()), (1, "file"));
    within(coordinator.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_invalid_worker_message_closes_only_its_session() {
    let coordinator = TestCoordinator::start(Duration::from_millis(900)).await;
    let register = |protocol| {
        let mut registration = FakeWorker::registration("w", None, Vec::new());
        registration.protocol = protocol;
        ToCoordinator::Register(Box::new(registration))
    };
    let mut duplicate_device = FakeWorker::registration("w", None, Vec::new());
    duplicate_device.devices.push(support::cpu());
    for (first, code) in [
        (
            Some(ToCoordinator::Heartbeat { running: Vec::new() }),
            Code::InvalidArgument,
        ),
        (Some(register(99)), Code::FailedPrecondition),
        (
            Some(ToCoordinator::Register(Box::new(duplicate_device))),
            Code::InvalidArgument,
        ),
        (None, Code::DeadlineExceeded),
    ] {
        let (_sender, mut messages) = FakeWorker::open(&coordinator.clients, first).await.unwrap();
        let error = within(messages.message()).await.unwrap_err();
        assert_eq!(error.code(), code, "{error}");
    }
    // Invalid messages after the registration.
    let invalid = [
        v1::WorkerMessage::default(),
        register(1).into(),
        v1::WorkerMessage {
            request_id: 1,
            message: Some(v1::worker_message::Message::Finished(v1::Finished {
                attempt_id: "../../etc".into(),
                epoch: u64::MAX,
                outcome: None,
            })),
        },
    ];
    for message in invalid {
        let (sender, mut messages) = FakeWorker::open(&coordinator.clients, Some(register(1))).await.unwrap();
        sender.send(message).await.unwrap();
        let error = within(async {
            loop {
                if let Err(error) = messages.message().await {
                    break error;
                }
            }
        });
        assert_eq!(error.await.code(), Code::InvalidArgument);
    }
    // Wait until those sessions are closed, so that none of them can be assigned the job.
    eventually("all sessions to be closed", || async {
        let info = coordinator.clients.jobs.clone().info(v1::InfoRequest {}).await.unwrap();
        (info.into_inner().workers_connected == 0).then_some(())
    })
    .await;
    // A worker that stops sending heartbeats: its session ends, and its job goes back to the queue.
    let job = coordinator.submit("shapes").await.job;
    let mut silent = FakeWorker::new(&coordinator, "silent").await;
    let work = silent.next_assignment().await;
    silent.heartbeat(&[held_attempt(&work)]).await;
    while silent.next().await.is_some() {}
    let view = coordinator.in_state(job.as_str(), JobState::Queued).await;
    // More than once if the machine is so busy that a heartbeat came too late.
    assert!(view.failures >= 1);
    within(coordinator.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn garbage_bytes_only_close_their_connection() {
    let coordinator = TestCoordinator::start(LONG_LEASE).await;
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    let mut garbage = preface.to_vec();
    garbage.extend((0..4096_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8));
    let mut huge_lengths = preface.to_vec();
    huge_lengths.extend([0xff; 64]);
    for bytes in [
        &b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"[..],
        &[0; 4096],
        &garbage,
        &huge_lengths,
        b"\x16\x03\x01\x02\x00",
        b"",
    ] {
        let mut stream = within(TcpStream::connect(coordinator.running.addr)).await.unwrap();
        // The server may close the connection before everything is written.
        let _ = stream.write_all(bytes).await;
        let _ = stream.shutdown().await;
        let mut answer = Vec::new();
        let _ = tokio::time::timeout(TIMEOUT, stream.read_to_end(&mut answer))
            .await
            .expect("the server closes the connection");
        assert!(answer.len() < 4096);
    }
    let info = within(coordinator.clients.jobs.clone().info(v1::InfoRequest {})).await;
    assert!(info.is_ok(), "the coordinator still answers: {info:?}");
    within(coordinator.running.shutdown()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_settings_and_data_folders_prevent_the_start() {
    let dir = tempfile::tempdir().unwrap();
    let open = Config {
        bind: "0.0.0.0:0".parse().unwrap(),
        ..Config::new(dir.path())
    };
    let error = start(open).await.unwrap_err();
    assert!(matches!(error, StartError::Plaintext { .. }), "{error}");
    for remedy in ["--tls-cert", "aitk-coordinator init"] {
        assert!(error.to_string().contains(remedy), "{error}");
    }
    assert!(
        std::fs::read_dir(dir.path()).unwrap().next().is_none(),
        "nothing was created"
    );

    let first = start(config(dir.path(), LONG_LEASE)).await.unwrap();
    let error = start(config(dir.path(), LONG_LEASE)).await.unwrap_err();
    assert!(
        matches!(error, StartError::DataFolder(DataFolderError::InUse { .. })),
        "{error}"
    );
    let other = tempfile::tempdir().unwrap();
    let error = start(Config {
        bind: first.addr,
        ..Config::new(other.path())
    })
    .await
    .unwrap_err();
    assert!(matches!(error, StartError::Bind { .. }), "{error}");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        // The data folder may exist before, with permissions for others.
        for (name, expected) in [
            ("token", 0o600),
            ("aitk.db", 0o600),
            ("aitk.db-wal", 0o600),
            ("storage", 0o700),
            ("transit", 0o700),
        ] {
            let mode = std::fs::metadata(dir.path().join(name)).unwrap().permissions().mode() & 0o777;
            assert_eq!(mode, expected, "{name}");
        }
    }
    within(first.shutdown()).await;
    let restarted = start(config(dir.path(), LONG_LEASE)).await.unwrap();
    within(restarted.shutdown()).await;

    std::fs::write(
        dir.path().join("aitk.db"),
        b"this is not a database, but it is long enough to look",
    )
    .unwrap();
    for extra in ["aitk.db-wal", "aitk.db-shm"] {
        let _ = std::fs::remove_file(dir.path().join(extra));
    }
    let error = start(config(dir.path(), LONG_LEASE)).await.unwrap_err();
    assert!(matches!(error, StartError::Store(_)), "{error}");
    assert!(error.to_string().contains("aitk.db"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_check_the_tls_certificate() {
    let dir = tempfile::tempdir().unwrap();
    let made = tempfile::tempdir().unwrap();
    let (cert, key) = self_signed_certificate(made.path());
    let files = TlsFiles {
        cert: cert.clone(),
        key: key.clone(),
    };
    let settings = Config {
        tls: Some(files),
        ..config(dir.path(), LONG_LEASE)
    };
    let running = start(settings).await.unwrap();
    assert!(running.url().starts_with("https://"));
    let clients = within(connect(&running.url(), &running.token, Some(&cert)))
        .await
        .unwrap();
    within(clients.jobs.clone().info(v1::InfoRequest {})).await.unwrap();
    // Without the certificate as a trusted root, and without TLS.
    let untrusted = within(connect(&running.url(), &running.token, None)).await;
    assert!(
        matches!(untrusted, Err(ConnectError::Unreachable { .. })),
        "{untrusted:?}"
    );
    let plain_url = running.url().replace("https://", "http://");
    let answered = match within(connect(&plain_url, &running.token, None)).await {
        Ok(clients) => within(clients.jobs.clone().info(v1::InfoRequest {})).await.is_ok(),
        Err(_) => false,
    };
    assert!(!answered);
    let mut bytes = within(TcpStream::connect(running.addr)).await.unwrap();
    bytes.write_all(&[0xff; 100]).await.unwrap();
    within(clients.jobs.clone().info(v1::InfoRequest {})).await.unwrap();
    drop((bytes, clients));
    within(running.shutdown()).await;

    let swapped = TlsFiles { cert: key, key: cert };
    let error = start(Config {
        tls: Some(swapped),
        ..config(dir.path(), LONG_LEASE)
    })
    .await
    .unwrap_err();
    assert!(matches!(error, StartError::Tls(_)), "{error}");
}
