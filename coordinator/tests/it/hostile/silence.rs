//! Connections that begin to speak and stop.

use super::Besieged;
use crate::support::{eventually, within};
use aitk_proto::v1;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// More than a process may have files by default, half of them on each port.
const SILENT: usize = 1200;

/// Reads until the other side hangs up; says a byte more now and then, so as not to look dead.
async fn hung_up(mut stream: TcpStream) {
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
async fn whoever_stops_in_the_middle_of_a_word_keeps_nobody_out() {
    let besieged = Besieged::start().await;
    besieged.works().await;
    let files = besieged.files();
    let beginnings: [(SocketAddr, &[u8]); 4] = [
        (besieged.daemon.address(), b""),
        (besieged.metrics, b"GET /metrics HTTP/1.1\r\nHost: x\r\nX-Slow: "),
        (besieged.daemon.address(), b"PRI * HTTP/2.0\r\n\r\nS"),
        (besieged.metrics, b""),
    ];
    let mut silent = Vec::new();
    for (address, beginning) in beginnings.into_iter().cycle().take(SILENT) {
        let mut stream = within(TcpStream::connect(address)).await.unwrap();
        stream.write_all(beginning).await.unwrap();
        silent.push(stream);
        if silent.len() % 100 == 0 {
            // Somebody with a token comes in between.
            let clients = besieged.daemon.clients().await;
            within(clients.jobs.clone().info(v1::InfoRequest {})).await.unwrap();
        }
    }
    if let (Some(before), Some(now)) = (files, besieged.files()) {
        // 384 strangers on one port, 64 on the other, and a few that are on their way.
        assert!(now <= before + 384 + 64 + 64, "{before} files became {now}");
    }
    besieged.works().await;
    let waiting: Vec<_> = silent.into_iter().map(|stream| tokio::spawn(hung_up(stream))).collect();
    for one in waiting {
        within(one).await.unwrap();
    }
    if let Some(before) = files {
        eventually("the files to be closed", || async {
            (besieged.files()? <= before + 4).then_some(())
        })
        .await;
    }
    besieged.works().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_showed_a_token_may_be_silent() {
    let besieged = Besieged::start().await;
    let clients = besieged.daemon.clients().await;
    within(clients.jobs.clone().info(v1::InfoRequest {})).await.unwrap();
    // Longer than a stranger would have.
    let stranger = within(TcpStream::connect(besieged.daemon.address())).await.unwrap();
    let began = besieged.connections();
    within(hung_up(stranger)).await;
    // Only the stranger's is gone, and the call goes over the one that is left.
    if let (Some(before), Some(now)) = (began, besieged.connections()) {
        assert_eq!((before, now), (2, 1));
    }
    within(clients.jobs.clone().info(v1::InfoRequest {})).await.unwrap();
}
