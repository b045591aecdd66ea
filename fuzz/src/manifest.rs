//! Checkpoint manifests, and jobs as the coordinator stores them.

use super::unstructured::Unstructured;
use aitk_common::checkpoint::Manifest;
use aitk_common::hash::ContentHash;
use aitk_common::job::JobSpec;
use aitk_common::plan::demand::Demand;
use std::path::Path;

/// The first byte selects what the others are.
pub fn run(data: &[u8]) {
    let Some((&first, bytes)) = data.split_first() else {
        return;
    };
    match first % 4 {
        0 => manifest(bytes),
        1 => manifest(&with_digest(bytes)),
        2 => manifest(&with_digest(&build(&mut Unstructured::new(bytes)))),
        _ => job(bytes),
    }
}

fn manifest(bytes: &[u8]) {
    let name = Path::new("manifest.json");
    match Manifest::from_text(bytes, name) {
        Err(error) => assert!(!error.to_string().is_empty(), "an empty error message"),
        Ok(manifest) => {
            let _ = manifest.total_bytes();
            for file in &manifest.files {
                assert_path_is_inside(&file.path);
            }
            let text = manifest.to_text().expect("a parsed manifest can be serialised");
            assert_eq!(
                Manifest::from_text(text.as_bytes(), name).expect("a serialised manifest can be parsed"),
                manifest
            );
        }
    }
}

/// An accepted path stays below its folder on every operating system.
fn assert_path_is_inside(path: &str) {
    let bad = |part: &str| part.is_empty() || part == "." || part == "..";
    assert!(!path.split(['/', '\\']).any(bad), "{path:?} leaves its folder");
}

/// Appends the correct digest, which a fuzzer could not guess.
fn with_digest(text: &[u8]) -> Vec<u8> {
    let digest = ContentHash::of(&[text, b"}"].concat());
    [text, format!(",\"digest\":\"{digest}\"}}\n").as_bytes()].concat()
}

/// A stored job of any version: its demand is computed from single keys.
fn job(bytes: &[u8]) {
    if let Ok(value) = serde_json::from_slice::<serde_json::Value>(bytes) {
        if let Some(demand) = Demand::of_job(&value, None, &[]) {
            let _ = demand.passes();
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

fn name(input: &mut Unstructured<'_>) -> String {
    match input.byte() % 20 {
        index @ 0..16 => NAMES[usize::from(index)].to_owned(),
        16 => "n".repeat(input.below(256) * 5),
        17 => format!("a/{}", input.chars()),
        _ => input.chars(),
    }
}

fn hash(input: &mut Unstructured<'_>) -> String {
    match input.byte() % 8 {
        0 => "0".repeat(63),
        1 => "A".repeat(64),
        2 => input.chars(),
        seed => ContentHash::of(&[seed]).to_hex(),
    }
}

fn json(input: &mut Unstructured<'_>, depth: usize) -> String {
    match input.byte() % 10 {
        0 => "null".into(),
        1 => "true".into(),
        2 => "-1".into(),
        3 => "1e400".into(),
        4 => format!("{}", input.number()),
        5 => format!("{:?}", input.real()),
        6 if depth < 6 => format!("[{},{}]", json(input, depth + 1), json(input, depth + 1)),
        7 if depth < 6 => format!("{{{:?}:{}}}", input.pick(&["a", "seed", ""]), json(input, depth + 1)),
        _ => serde_json::Value::String(input.chars()).to_string(),
    }
}

fn files(input: &mut Unstructured<'_>) -> String {
    let one = |input: &mut Unstructured<'_>| {
        let path = serde_json::Value::String(name(input));
        let hash = serde_json::Value::String(hash(input));
        format!(
            r#"{{"path":{path},"bytes":{},"sha256":{hash},"role":"adapter"}}"#,
            input.number()
        )
    };
    let files: Vec<String> = (0..input.below(5)).map(|_| one(input)).collect();
    files.join(",")
}

/// A mostly valid manifest without its digest.
fn build(input: &mut Unstructured<'_>) -> Vec<u8> {
    let version = if input.one_in(16) { json(input, 0) } else { "1".into() };
    let created = match input.byte() % 6 {
        0 => serde_json::Value::String(input.chars()).to_string(),
        1 => r#""-9999-01-01T00:00:00Z""#.into(),
        2 => r#""9999-12-30T22:00:00.999999999Z""#.into(),
        _ => r#""2026-08-01T12:00:00Z""#.into(),
    };
    let state = if input.one_in(8) {
        json(input, 0)
    } else {
        format!(r#"{{"s":{}}}"#, json(input, 0))
    };
    let files = files(input);
    format!(
        r#"{{"format_version":{version},"job":{},"step":{},"epoch":{},"created":{created},"state":{state},"files":[{files}]"#,
        serde_json::Value::String(input.chars()),
        input.number(),
        input.number(),
    )
    .into_bytes()
}
