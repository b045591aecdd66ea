//! Notifications that a job has ended, over real HTTP.

use crate::coordinator::TestCluster;
use crate::run::generate;
use crate::support::{Home, code, err, out};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::sync::{Arc, Mutex};

type ReceivedPosts = Arc<Mutex<Vec<(String, serde_json::Value)>>>;

/// Starts an HTTP server that records the first line and the body of each request.
fn start_webhook_server() -> (String, ReceivedPosts) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/hook/s3cret", listener.local_addr().unwrap());
    let received = ReceivedPosts::default();
    let shared = received.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(stream) = stream else { return };
            let mut reader = BufReader::new(&stream);
            let (mut first, mut length) = (String::new(), 0);
            loop {
                let mut line = String::new();
                if reader.read_line(&mut line).unwrap_or(0) == 0 || line == "\r\n" {
                    break;
                }
                if let Some(value) = line.to_lowercase().strip_prefix("content-length: ") {
                    length = value.trim().parse().unwrap();
                }
                if first.is_empty() {
                    first = line.trim().to_owned();
                }
            }
            let mut body = vec![0; length];
            reader.read_exact(&mut body).unwrap();
            let body = serde_json::from_slice(&body).unwrap_or_default();
            shared.lock().unwrap().push((first, body));
            let _ = (&stream).write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok");
        }
    });
    (url, received)
}

const ALLOWED: (&str, &str) = ("AITK_NOTIFY_PRIVATE", "1");

#[tokio::test(flavor = "multi_thread")]
async fn an_ended_job_is_posted_to_the_webhook_and_private_addresses_need_permission() {
    let cluster = TestCluster::new().await;
    let (url, received) = start_webhook_server();
    let id = out(&cluster.aitk(&["submit", "job.yaml", "-n", "cat"]).await)
        .trim()
        .to_owned();
    assert_eq!(code(&cluster.aitk(&["stop", &id]).await), 0);

    // Private addresses are refused before any lookup unless the user allows them.
    let refused = cluster.aitk(&["wait", &id, "--notify-url", &url]).await;
    assert_eq!(code(&refused), 2, "{}", err(&refused));
    assert!(
        err(&refused).contains("no TLS") && err(&refused).contains("AITK_NOTIFY_PRIVATE"),
        "{}",
        err(&refused)
    );
    let secure = url.replace("http://", "https://");
    let private = cluster.aitk(&["wait", &id, "--notify-url", &secure]).await;
    assert_eq!(code(&private), 143, "the job's own code: {}", err(&private));
    assert!(
        err(&private).contains("an address of a private network"),
        "{}",
        err(&private)
    );
    assert!(
        !err(&private).contains("s3cret"),
        "the path is a secret: {}",
        err(&private)
    );
    assert_eq!(received.lock().unwrap().len(), 0);

    let waited = cluster
        .aitk_with(&["wait", &id, "--notify-url", &url], &[ALLOWED])
        .await;
    assert_eq!(code(&waited), 143, "{}", err(&waited));
    {
        let received = received.lock().unwrap();
        let [(first, body)] = received.as_slice() else {
            panic!("{received:?}")
        };
        assert_eq!(first, "POST /hook/s3cret HTTP/1.1");
        assert_eq!(
            (&body["job"]["id"], &body["job"]["state"]),
            (&id.as_str().into(), &"stopped".into())
        );
        let line = body["text"].as_str().unwrap();
        assert!(line.starts_with(&format!("cat ({id}) stopped")), "{line}");
        assert!(!body.to_string().contains("my_images"), "no config and no path: {body}");
    }
    // `watch`, from the environment; and by the settings file, which others must not read.
    let env = [("AITK_NOTIFY_URL", url.as_str()), ALLOWED];
    assert_eq!(code(&cluster.aitk_with(&["watch", &id], &env).await), 143);
    assert_eq!(received.lock().unwrap().len(), 2);
    let file = cluster.home.write(
        ".config/aitk/config.yaml",
        &format!("notify_url: {url}\nnotify_private: true\n"),
    );
    let mode = |mode| std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
    mode(0o644);
    let exposed = cluster.aitk(&["watch", &id]).await;
    assert!(
        code(&exposed) == 1 && err(&exposed).contains("chmod 600"),
        "{}",
        err(&exposed)
    );
    mode(0o600);
    assert_eq!(code(&cluster.aitk(&["watch", &id]).await), 143);
    assert_eq!(received.lock().unwrap().len(), 3);
    // A command that does not follow a job sends no notification.
    assert_eq!(code(&cluster.aitk(&["ps"]).await), 0);
    // The project file cannot set the webhook.
    cluster.home.write("aitk.yaml", &format!("notify_url: {url}\n"));
    let project = cluster.aitk(&["watch", &id]).await;
    assert!(
        code(&project) == 1 && err(&project).contains("settings of the settings file"),
        "{}",
        err(&project)
    );
    assert_eq!(received.lock().unwrap().len(), 3);
    cluster.coordinator.shutdown().await;
}

#[test]
fn a_run_on_this_machine_is_posted_when_it_ends() {
    let home = Home::new();
    generate(&home, "one");
    let (url, received) = start_webhook_server();
    let run = home
        .aitk()
        .args(["run", "one.yaml", "--device", "cpu", "--notify-url", &url])
        .envs([ALLOWED])
        .output()
        .unwrap();
    assert_eq!(code(&run), 0, "{}", err(&run));
    let received = received.lock().unwrap();
    assert_eq!(received.len(), 1);
    assert_eq!(
        (&received[0].1["job"]["name"], &received[0].1["job"]["state"]),
        (&"one".into(), &"completed".into())
    );
}
