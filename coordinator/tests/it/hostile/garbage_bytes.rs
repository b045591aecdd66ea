//! Random bytes, and HTTP/2 frames in invalid orders.

use super::{Random, TestServer};
use crate::support::within;
use futures::StreamExt;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const CONNECTIONS: u64 = 2500;
const CONCURRENT: usize = 48;
/// Allowed for a debug build, its log and allocator fragmentation.
const GROWTH: u64 = 64 << 20;

/// An HTTP/2 frame. `length` need not be the length of the payload.
fn frame(length: u64, kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = length.min(0xff_ffff) as u32;
    let mut frame = length.to_be_bytes()[1..].to_vec();
    frame.extend([kind, flags]);
    frame.extend(stream.to_be_bytes());
    frame.extend(payload);
    frame
}

fn random_frame(random: &mut Random) -> Vec<u8> {
    let bytes = random.below(600);
    let payload = random.bytes(bytes);
    let length = match random.below(8) {
        0 => random.next(),
        1 => payload.len() as u64 + random.below(9),
        _ => payload.len() as u64,
    };
    let kind = random.below(12) as u8;
    let stream = match random.below(4) {
        0 => 0,
        1 => random.next() as u32,
        _ => 1 + 2 * random.below(8) as u32,
    };
    frame(length, kind, random.next() as u8, stream, &payload)
}

/// The bytes that one connection sends.
fn random_payload(random: &mut Random) -> Vec<u8> {
    let mut all = PREFACE.to_vec();
    match random.below(10) {
        0 => {
            let bytes = random.below(5000);
            all = random.bytes(bytes);
        }
        // A frame that is cut off at a random byte.
        1 => {
            all.extend(random_frame(random));
            all.truncate(random.below(all.len() as u64) as usize);
        }
        2 => {
            all = b"GET /metrics HTTP/1.1\r\nHost: x\r\nX: "
                .iter()
                .copied()
                .chain(random.bytes(20_000))
                .collect()
        }
        3 => {
            all = b"POST /aitk.v1.Jobs/Submit HTTP/1.1\r\nHost: x\r\nContent-Length: 18446744073709551615\r\n\r\n"
                .to_vec();
            all.extend(random.bytes(4000));
        }
        // Many SETTINGS and PING frames.
        4 => {
            for _ in 0..200 {
                let setting = random.bytes(6);
                all.extend(frame(6, 4, 0, 0, &setting));
                all.extend(frame(8, 6, 0, 0, &[0; 8]));
            }
        }
        // CONTINUATION frames without END_HEADERS.
        5 => {
            all.extend(frame(0, 4, 0, 0, &[]));
            all.extend(frame(1, 1, 0, 1, &[0x82]));
            for _ in 0..100 {
                let block = random.bytes(1000);
                all.extend(frame(1000, 9, 0, 1, &block));
            }
        }
        // Requests that are reset at once (rapid reset).
        6 => {
            all.extend(frame(0, 4, 0, 0, &[]));
            for call in 0..300 {
                all.extend(frame(3, 1, 5, 1 + 2 * call, &[0x83, 0x86, 0x84]));
                all.extend(frame(4, 3, 0, 1 + 2 * call, &[0, 0, 0, 8]));
            }
        }
        // WINDOW_UPDATE frames that overflow the window.
        7 => {
            all.extend(frame(0, 4, 0, 0, &[]));
            for stream in [0, 1, 3] {
                all.extend(frame(4, 8, 0, stream, &0x7fff_ffff_u32.to_be_bytes()));
                all.extend(frame(4, 8, 0, stream, &0x7fff_ffff_u32.to_be_bytes()));
            }
        }
        _ => {
            if random.below(2) == 0 {
                all.extend(frame(0, 4, 0, 0, &[]));
            }
            for _ in 0..random.below(30) {
                all.extend(random_frame(random));
            }
        }
    }
    all
}

/// Sends the bytes. With `orderly`, shuts the connection down and reads the answer; otherwise just closes it.
async fn send(address: SocketAddr, bytes: Vec<u8>, orderly: bool) {
    let Ok(mut stream) = TcpStream::connect(address).await else {
        panic!("{address} refuses connections");
    };
    // The server may close the connection in between.
    let exchange = async {
        let _ = stream.write_all(&bytes).await;
        if orderly {
            let _ = stream.shutdown().await;
            let mut answer = vec![0; 64 << 10];
            while let Ok(1..) = stream.read(&mut answer).await {}
        }
    };
    let _ = tokio::time::timeout(Duration::from_secs(2), exchange).await;
}

async fn send_garbage(server: &TestServer, random: &mut Random, connections: u64) {
    let payloads: Vec<_> = (0..connections)
        .map(|number| {
            let address = if number % 5 == 0 {
                server.metrics
            } else {
                server.daemon.address()
            };
            (address, random_payload(random), random.below(3) > 0)
        })
        .collect();
    futures::stream::iter(payloads)
        .for_each_concurrent(CONCURRENT, |(address, bytes, orderly)| send(address, bytes, orderly))
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn thousands_of_garbage_connections_leak_no_memory_and_no_files() {
    let (server, mut random) = (TestServer::start().await, Random(7));
    // Warm-up: pools, tables and log buffers grow once.
    send_garbage(&server, &mut random, 300).await;
    server.assert_works().await;
    let (memory, files) = (server.resident_memory(), server.open_files());
    send_garbage(&server, &mut random, CONNECTIONS).await;
    server.assert_works().await;
    server.assert_memory_growth(memory, GROWTH);
    // Connections are closed after their time limit at the latest.
    if let Some(before) = files {
        crate::support::eventually("the connections to be closed", || async {
            (server.open_files()? <= before + 4).then_some(())
        })
        .await;
    }
    let mut metrics = within(TcpStream::connect(server.metrics)).await.unwrap();
    metrics
        .write_all(b"GET /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        .await
        .unwrap();
    let mut answer = String::new();
    within(metrics.read_to_string(&mut answer)).await.unwrap();
    assert!(
        answer.starts_with("HTTP/1.1 200") && answer.ends_with("ready\n"),
        "{answer}"
    );
}
