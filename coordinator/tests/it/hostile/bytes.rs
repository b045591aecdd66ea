//! Bytes that are no protocol, or the protocol's frames in no order.

use super::{Besieged, Random};
use crate::support::within;
use futures::StreamExt;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const CONNECTIONS: u64 = 2500;
const AT_ONCE: usize = 48;
/// A debug build, its log and the allocator's leftovers.
const GROWTH: u64 = 64 << 20;

/// A frame of HTTP/2, with a length that may be a lie.
fn frame(length: u64, kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = length.min(0xff_ffff) as u32;
    let mut frame = length.to_be_bytes()[1..].to_vec();
    frame.extend([kind, flags]);
    frame.extend(stream.to_be_bytes());
    frame.extend(payload);
    frame
}

fn any_frame(random: &mut Random) -> Vec<u8> {
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

/// What one connection says.
fn speech(random: &mut Random) -> Vec<u8> {
    let mut all = PREFACE.to_vec();
    match random.below(10) {
        0 => {
            let bytes = random.below(5000);
            all = random.bytes(bytes);
        }
        // Cut off anywhere.
        1 => {
            all.extend(any_frame(random));
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
        // Settings without end, and pings.
        4 => {
            for _ in 0..200 {
                let setting = random.bytes(6);
                all.extend(frame(6, 4, 0, 0, &setting));
                all.extend(frame(8, 6, 0, 0, &[0; 8]));
            }
        }
        // Headers that never end.
        5 => {
            all.extend(frame(0, 4, 0, 0, &[]));
            all.extend(frame(1, 1, 0, 1, &[0x82]));
            for _ in 0..100 {
                let block = random.bytes(1000);
                all.extend(frame(1000, 9, 0, 1, &block));
            }
        }
        // Calls that are taken back as fast as they are made.
        6 => {
            all.extend(frame(0, 4, 0, 0, &[]));
            for call in 0..300 {
                all.extend(frame(3, 1, 5, 1 + 2 * call, &[0x83, 0x86, 0x84]));
                all.extend(frame(4, 3, 0, 1 + 2 * call, &[0, 0, 0, 8]));
            }
        }
        // Windows that overflow.
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
                all.extend(any_frame(random));
            }
        }
    }
    all
}

/// Says it, listens for a moment, goes away with or without a word.
async fn speak(address: SocketAddr, words: Vec<u8>, politely: bool) {
    let Ok(mut stream) = TcpStream::connect(address).await else {
        panic!("nobody listens any more");
    };
    // It may hang up in the middle.
    let talk = async {
        let _ = stream.write_all(&words).await;
        if politely {
            let _ = stream.shutdown().await;
            let mut answer = vec![0; 64 << 10];
            while let Ok(1..) = stream.read(&mut answer).await {}
        }
    };
    let _ = tokio::time::timeout(Duration::from_secs(2), talk).await;
}

async fn siege(besieged: &Besieged, random: &mut Random, connections: u64) {
    let calls: Vec<_> = (0..connections)
        .map(|number| {
            let address = if number % 5 == 0 {
                besieged.metrics
            } else {
                besieged.daemon.address()
            };
            (address, speech(random), random.below(3) > 0)
        })
        .collect();
    futures::stream::iter(calls)
        .for_each_concurrent(AT_ONCE, |(address, words, politely)| speak(address, words, politely))
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn thousands_of_connections_that_talk_nonsense_leave_no_trace() {
    let (besieged, mut random) = (Besieged::start().await, Random(7));
    // What grows once: pools, tables, the log's buffers.
    siege(&besieged, &mut random, 300).await;
    besieged.works().await;
    let (memory, files) = (besieged.memory(), besieged.files());
    siege(&besieged, &mut random, CONNECTIONS).await;
    besieged.works().await;
    besieged.has_not_grown(memory, GROWTH);
    // Its connections go when their time is over at the latest.
    if let Some(before) = files {
        crate::support::eventually("the connections to be closed", || async {
            (besieged.files()? <= before + 4).then_some(())
        })
        .await;
    }
    let mut metrics = within(TcpStream::connect(besieged.metrics)).await.unwrap();
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
