//! Connections that send the beginning of a request and then stop.

use super::TestServer;
use crate::support::{eventually, within};
use aitk_proto::v1;
use aitk_tests::long_tests::skips_long_tests;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// More than the default limit on open files of a process; half of them to each port.
const SLOW_CONNECTIONS: usize = 1200;

/// Waits until the server closes the connection. Sends a byte each second, so the connection does not look idle.
async fn wait_for_close(mut stream: TcpStream) {
    let mut answer = [0; 4096];
    loop {
        match tokio::time::timeout(Duration::from_secs(1), stream.read(&mut answer)).await {
            Ok(Ok(0) | Err(_)) => return,
            Ok(Ok(_)) => {}
            Err(_) if stream.write_all(b"x").await.is_err() => return,
            Err(_) => {}
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn unfinished_requests_do_not_block_other_clients() {
    if skips_long_tests() {
        return;
    }
    let server = TestServer::start().await;
    server.assert_works().await;
    let files = server.open_files();
    let beginnings: [(SocketAddr, &[u8]); 4] = [
        (server.daemon.address(), b""),
        (server.metrics, b"GET /metrics HTTP/1.1\r\nHost: x\r\nX-Slow: "),
        (server.daemon.address(), b"PRI * HTTP/2.0\r\n\r\nS"),
        (server.metrics, b""),
    ];
    let mut silent = Vec::new();
    for (address, beginning) in beginnings.into_iter().cycle().take(SLOW_CONNECTIONS) {
        let mut stream = within(TcpStream::connect(address)).await.unwrap();
        stream.write_all(beginning).await.unwrap();
        silent.push(stream);
        if silent.len() % 100 == 0 {
            // A client with a token still gets through.
            let clients = server.daemon.clients().await;
            within(clients.jobs.clone().info(v1::InfoRequest {})).await.unwrap();
        }
    }
    if let (Some(before), Some(now)) = (files, server.open_files()) {
        // At most 384 unauthenticated connections on one port and 64 on the other, and a few that are just being accepted.
        assert!(now <= before + 384 + 64 + 64, "{before} files became {now}");
    }
    server.assert_works().await;
    let closed: Vec<_> = silent
        .into_iter()
        .map(|stream| tokio::spawn(wait_for_close(stream)))
        .collect();
    for task in closed {
        within(task).await.unwrap();
    }
    if let Some(before) = files {
        eventually("the files to be closed", || async {
            (server.open_files()? <= before + 4).then_some(())
        })
        .await;
    }
    server.assert_works().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_authenticated_connection_may_stay_idle() {
    let server = TestServer::start().await;
    let clients = server.daemon.clients().await;
    within(clients.jobs.clone().info(v1::InfoRequest {})).await.unwrap();
    // Wait longer than an unauthenticated connection may stay open.
    let unauthenticated = within(TcpStream::connect(server.daemon.address())).await.unwrap();
    // A connection with which the test saw that the server answers may close only now.
    if server.established_connections().is_some() {
        eventually("one idle client and one unauthenticated connection", || async {
            (server.established_connections()? == 2).then_some(())
        })
        .await;
    }
    let before = server.established_connections();
    within(wait_for_close(unauthenticated)).await;
    // Only the unauthenticated connection was closed.
    if let (Some(before), Some(now)) = (before, server.established_connections()) {
        assert_eq!((before, now), (2, 1));
    }
    within(clients.jobs.clone().info(v1::InfoRequest {})).await.unwrap();
}
