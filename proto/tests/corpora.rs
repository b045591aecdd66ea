//! Replays the fuzzer's corpora (`fuzz/corpus`) through the fuzz targets' functions, without a fuzzer.

#![allow(
    clippy::unwrap_used,
    unreachable_pub,
    reason = "a test fails by panicking; the fuzzer has these files as a library"
)]

#[path = "../../fuzz/src/config.rs"]
mod config;
#[path = "../../fuzz/src/manifest.rs"]
mod manifest;
#[path = "../../fuzz/src/replay.rs"]
mod replay;
#[path = "../../fuzz/src/unstructured.rs"]
mod unstructured;
#[path = "../../fuzz/src/wire/mod.rs"]
mod wire;

use replay::{replay, repository};

#[test]
fn configs() {
    replay("config", config::run);
}

#[test]
fn manifests() {
    replay("manifest", manifest::run);
}

#[test]
fn messages() {
    replay("wire", wire::run);
}

/// The tests of the engine replay the targets that need it.
#[test]
fn every_target_is_replayed() {
    let text = |path: &str| std::fs::read_to_string(repository().join(path)).unwrap();
    let replays = text("proto/tests/corpora.rs") + &text("engine/tests/corpora.rs");
    let mut seen = 0;
    for target in std::fs::read_dir(repository().join("fuzz/fuzz_targets")).unwrap() {
        let target = target.unwrap().path();
        let name = target.file_stem().unwrap().to_str().unwrap();
        assert!(
            replays.contains(&format!("    replay({name:?}, ")),
            "no test replays {name}"
        );
        seen += 1;
    }
    assert!(seen >= 5, "only {seen} targets");
}

#[test]
fn every_message_of_every_call_is_fuzzed() {
    let proto = std::fs::read_to_string(repository().join("proto/proto/aitk/v1/aitk.proto")).unwrap();
    let calls = proto.lines().filter_map(|line| line.trim().strip_prefix("rpc "));
    let mut seen = 0;
    for call in calls {
        for part in call.split('(').skip(1) {
            let name = part.split(')').next().unwrap().trim_start_matches("stream ");
            assert!(wire::MESSAGES.contains(&name), "{name} of `rpc {call}`");
            seen += 1;
        }
    }
    assert!(seen > 40, "only {seen} messages in the calls");
}
