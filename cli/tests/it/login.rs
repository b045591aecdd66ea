//! `aitk login` against a real coordinator.

use crate::support::{Home, code, err, out};
use aitk_coordinator::{Config, PkiConfig, ca_folder, init, start};
use std::process::Output;

async fn login(home: &Home, url: &str, token: &str) -> Output {
    let mut command = home.aitk();
    command.args(["login", url]).write_stdin(format!("{token}\n"));
    tokio::task::spawn_blocking(move || command.output().unwrap())
        .await
        .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn login_without_tls_at_a_tls_coordinator_gives_a_hint() {
    let dir = tempfile::tempdir().unwrap();
    let made = init(dir.path(), &[]).unwrap();
    let config = Config {
        bind: "127.0.0.1:0".parse().unwrap(),
        pki: Some(PkiConfig::new(ca_folder(dir.path()))),
        ..Config::new(dir.path())
    };
    let coordinator = start(config).await.unwrap();
    let home = Home::new();
    let plain = coordinator.url().replace("https://", "http://");
    let pinned = format!("{}.{}", coordinator.token, made.hash);
    // With a token that names the authority, and with one that does not: in both cases the server shows a certificate.
    for token in [&pinned, &coordinator.token] {
        let refused = login(&home, &plain, token).await;
        assert_eq!(code(&refused), 5, "{}", err(&refused));
        assert!(
            err(&refused).contains("requires TLS")
                && err(&refused).contains(&format!("aitk login {}", coordinator.url())),
            "{}",
            err(&refused)
        );
        assert!(!err(&refused).contains(token.as_str()), "the token is shown");
    }
    assert!(!home.path().join(".config/aitk").exists(), "nothing was kept");
    let done = login(&home, &coordinator.url(), &pinned).await;
    assert_eq!(code(&done), 0, "{}", err(&done));
    assert!(!out(&done).contains(&pinned) && !err(&done).contains(&pinned));
    let mut ps = home.aitk();
    ps.args(["ps", "-q"]);
    let ps = tokio::task::spawn_blocking(move || ps.output().unwrap()).await.unwrap();
    assert_eq!(code(&ps), 0, "{}", err(&ps));
    coordinator.shutdown().await;
}
