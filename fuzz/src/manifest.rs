//! The texts that say what a checkpoint consists of, and jobs as the queue keeps them.

use super::dice::Dice;
use aitk_common::checkpoint::Manifest;
use aitk_common::hash::ContentHash;
use aitk_common::job::JobSpec;
use aitk_common::plan::demand::Demand;
use std::path::Path;

/// The first byte says what the others are.
pub fn run(data: &[u8]) {
    let Some((&first, bytes)) = data.split_first() else {
        return;
    };
    match first % 4 {
        0 => manifest(bytes),
        1 => manifest(&sealed(bytes)),
        2 => manifest(&sealed(&built(&mut Dice::new(bytes)))),
        _ => job(bytes),
    }
}

fn manifest(bytes: &[u8]) {
    let name = Path::new("manifest.json");
    match Manifest::from_text(bytes, name) {
        Err(error) => assert!(!error.to_string().is_empty(), "an error without a word"),
        Ok(manifest) => {
            let _ = manifest.total_bytes();
            for file in &manifest.files {
                inside(&file.path);
            }
            let text = manifest.to_text().expect("what was read can be written");
            assert_eq!(
                Manifest::from_text(text.as_bytes(), name).expect("and read back"),
                manifest
            );
        }
    }
}

/// A name that was accepted stays below its folder, whatever system reads it.
fn inside(path: &str) {
    let bad = |part: &str| part.is_empty() || part == "." || part == "..";
    assert!(!path.split(['/', '\\']).any(bad), "{path:?} leaves its folder");
}

/// With the right digest behind it: no fuzzer would ever guess one.
fn sealed(open: &[u8]) -> Vec<u8> {
    let digest = ContentHash::of(&[open, b"}"].concat());
    [open, format!(",\"digest\":\"{digest}\"}}\n").as_bytes()].concat()
}

/// A job as the queue keeps it: whatever version wrote it, its demand is read key by key.
fn job(bytes: &[u8]) {
    if let Ok(value) = serde_json::from_slice::<serde_json::Value>(bytes) {
        if let Some(demand) = Demand::of_job(&value, None) {
            let _ = demand.units();
        }
        if let Ok(spec) = serde_json::from_value::<JobSpec>(value) {
            let _ = spec.inputs();
            let _ = spec.unsupported().to_string();
        }
    }
}

const NAMES: [&str; 16] = [
    "lora.safetensors",
    "a/b",
    "a",
    "A",
    "a/B",
    "../a",
    "/etc/passwd",
    "a//b",
    "a/./b",
    "c:\\x",
    "con",
    "a/aux.txt",
    "manifest.json",
    "e\u{301}",
    "\u{e9}",
    "b.",
];

fn name(dice: &mut Dice<'_>) -> String {
    match dice.byte() % 20 {
        index @ 0..16 => NAMES[usize::from(index)].to_owned(),
        16 => "n".repeat(dice.below(256) * 5),
        17 => format!("a/{}", dice.chars()),
        _ => dice.chars(),
    }
}

fn hash(dice: &mut Dice<'_>) -> String {
    match dice.byte() % 8 {
        0 => "0".repeat(63),
        1 => "A".repeat(64),
        2 => dice.chars(),
        seed => ContentHash::of(&[seed]).to_hex(),
    }
}

fn json(dice: &mut Dice<'_>, depth: usize) -> String {
    match dice.byte() % 10 {
        0 => "null".into(),
        1 => "true".into(),
        2 => "-1".into(),
        3 => "1e400".into(),
        4 => format!("{}", dice.number()),
        5 => format!("{:?}", dice.real()),
        6 if depth < 6 => format!("[{},{}]", json(dice, depth + 1), json(dice, depth + 1)),
        7 if depth < 6 => format!("{{{:?}:{}}}", dice.pick(&["a", "seed", ""]), json(dice, depth + 1)),
        _ => serde_json::Value::String(dice.chars()).to_string(),
    }
}

fn files(dice: &mut Dice<'_>) -> String {
    let one = |dice: &mut Dice<'_>| {
        let path = serde_json::Value::String(name(dice));
        let hash = serde_json::Value::String(hash(dice));
        format!(
            r#"{{"path":{path},"bytes":{},"sha256":{hash},"role":"adapter"}}"#,
            dice.number()
        )
    };
    let files: Vec<String> = (0..dice.below(5)).map(|_| one(dice)).collect();
    files.join(",")
}

/// A manifest's text up to its digest, most of it as it should be.
fn built(dice: &mut Dice<'_>) -> Vec<u8> {
    let version = if dice.one_in(16) { json(dice, 0) } else { "1".into() };
    let created = match dice.byte() % 6 {
        0 => serde_json::Value::String(dice.chars()).to_string(),
        1 => r#""-9999-01-01T00:00:00Z""#.into(),
        2 => r#""9999-12-30T22:00:00.999999999Z""#.into(),
        _ => r#""2026-08-01T12:00:00Z""#.into(),
    };
    let state = if dice.one_in(8) {
        json(dice, 0)
    } else {
        format!(r#"{{"s":{}}}"#, json(dice, 0))
    };
    let files = files(dice);
    format!(
        r#"{{"format_version":{version},"job":{},"step":{},"epoch":{},"created":{created},"state":{state},"files":[{files}]"#,
        serde_json::Value::String(dice.chars()),
        dice.number(),
        dice.number(),
    )
    .into_bytes()
}
