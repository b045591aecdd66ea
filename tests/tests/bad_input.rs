//! Bad input gets one clear error: what, where, what was expected; no panic, a documented exit code, nothing half written.

#![allow(clippy::unwrap_used, reason = "a test may stop where it stands")]

use aitk_tests::jobs::{self, draw_dataset, tiny_model, training};
use aitk_tests::place::Place;
use std::fs;
use std::path::Path;
use std::process::Output;

fn run(folder: &Path) -> Output {
    jobs::run(&Place::Here, folder, "job.yaml")
        .env_remove("AITK_UNSET_VARIABLE")
        .output()
        .unwrap()
}

/// Runs the prepared job and expects it to fail with all of these words in its message.
fn refused(what: &str, words: &[&str], prepare: impl FnOnce(&Path)) {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    draw_dataset(&root.join("dataset"), 2);
    fs::write(root.join("job.yaml"), training("bad", root, 2, 100)).unwrap();
    prepare(root);
    let output = run(root);
    let err = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{what}: it was accepted\n{err}");
    assert!(!err.contains("panicked"), "{what}: {err}");
    for word in words {
        assert!(err.contains(word), "{what}: the message does not say {word:?}\n{err}");
    }
    assert!(!root.join("bad/bad.safetensors").exists(), "{what}: a LoRA was written");
}

fn edit(root: &Path, from: &str, to: &str) {
    let path = root.join("job.yaml");
    let text = fs::read_to_string(&path).unwrap();
    assert!(text.contains(from), "{from}");
    fs::write(path, text.replace(from, to)).unwrap();
}

fn copy_model(root: &Path) -> std::path::PathBuf {
    let target = root.join("model");
    copy_folder(&tiny_model(), &target);
    edit(root, &tiny_model().display().to_string(), &target.display().to_string());
    target
}

fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().flatten() {
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy_folder(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}

/// A PNG whose header promises this size; of its data only the beginning is there.
fn png_header(width: u32, height: u32) -> Vec<u8> {
    let mut head = Vec::new();
    head.extend(width.to_be_bytes());
    head.extend(height.to_be_bytes());
    head.extend([8, 2, 0, 0, 0]);
    let mut png = b"\x89PNG\r\n\x1a\n".to_vec();
    for (kind, data) in [(b"IHDR", head.as_slice()), (b"IDAT", &[0x78, 0x9c, 0xed, 0xc1])] {
        png.extend(u32::try_from(data.len()).unwrap().to_be_bytes());
        let body = [kind.as_slice(), data].concat();
        png.extend(&body);
        png.extend(crc32fast::hash(&body).to_be_bytes());
    }
    png
}

#[test]
fn configs() {
    refused("a tab", &["job.yaml", "tab"], |root| {
        edit(root, "      network:", "\t     network:")
    });
    refused("a duplicate key", &["job.yaml", "steps"], |root| {
        edit(root, "        steps: 2", "        steps: 2\n        steps: 3")
    });
    refused("a wrong type", &["job.yaml", "steps", "many"], |root| {
        edit(root, "steps: 2", "steps: many")
    });
    refused("an unset variable", &["AITK_UNSET_VARIABLE"], |root| {
        edit(root, "\"zorb\"", "\"${AITK_UNSET_VARIABLE}\"")
    });
    refused("a key with a slip", &["batch_sise", "batch_size"], |root| {
        edit(root, "batch_size: 2", "batch_sise: 2")
    });
    refused("an unknown architecture", &["sd9", "sd1"], |root| {
        edit(root, "arch: sd1", "arch: sd9")
    });
    refused("no such model", &["no/such/model"], |root| {
        edit(root, &tiny_model().display().to_string(), "/no/such/model");
    });
}

#[test]
fn data_sets() {
    refused("an empty data set", &["dataset"], |root| {
        fs::remove_dir_all(root.join("dataset")).unwrap();
        fs::create_dir(root.join("dataset")).unwrap();
    });
    refused("a missing folder", &["dataset"], |root| {
        fs::remove_dir_all(root.join("dataset")).unwrap()
    });
    refused("images of 0 bytes", &["000.png"], |root| {
        for name in ["000.png", "001.png"] {
            fs::write(root.join("dataset").join(name), b"").unwrap();
        }
    });
    refused("images of 30,000 x 30,000", &["000.png", "30000"], |root| {
        for name in ["000.png", "001.png"] {
            fs::write(root.join("dataset").join(name), png_header(30_000, 30_000)).unwrap();
        }
    });
    refused("a caption that is not UTF-8", &["000.txt", "UTF-8"], |root| {
        fs::write(root.join("dataset/000.txt"), b"caf\xe9").unwrap();
    });
}

#[test]
fn models() {
    let unet = "unet/diffusion_pytorch_model.safetensors";
    refused("a truncated file", &[unet], |root| {
        let path = copy_model(root).join(unet);
        let bytes = fs::read(&path).unwrap();
        fs::write(path, &bytes[..bytes.len() / 2]).unwrap();
    });
    refused("a mislabelled file", &[unet], |root| {
        let path = copy_model(root).join(unet);
        fs::write(path, b"PK\x03\x04 this is a zip archive, whatever its name says").unwrap();
    });
    refused("a missing tensor", &["conv_in.weight"], |root| {
        let path = copy_model(root).join(unet);
        let bytes = fs::read(&path).unwrap();
        let at = bytes
            .windows(14)
            .position(|window| window == b"conv_in.weight")
            .unwrap();
        let mut changed = bytes;
        changed[at..at + 14].copy_from_slice(b"conv_xx.weight");
        fs::write(path, changed).unwrap();
    });
    refused("another shape", &["shape"], |root| {
        let path = copy_model(root).join("unet/config.json");
        let text = fs::read_to_string(&path).unwrap();
        let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
        config["cross_attention_dim"] = 48.into();
        fs::write(path, config.to_string()).unwrap();
    });
    refused("a pickle checkpoint", &["ckpt", "safetensors"], |root| {
        fs::write(root.join("model.ckpt"), b"\x80\x02}q\x00.").unwrap();
        edit(
            root,
            &tiny_model().display().to_string(),
            &root.join("model.ckpt").display().to_string(),
        );
    });
}

/// An image of this side, with these wishes about the machine.
fn drawing(name: &str, root: &Path, side: u32, cluster: &str) -> String {
    format!(
        "job: generate\nconfig:\n  name: {name}\n  process:\n  - type: to_folder\n    output_folder: {}\n    model: \
         {{name_or_path: {}, arch: sd1, dtype: float32}}\n    generate: {{sampler: ddim, sample_steps: 1, width: {side}, \
         height: {side}, prompts: [a zorb]}}\n{cluster}\n",
        root.join(name).display(),
        tiny_model().display()
    )
}

#[cfg(target_os = "linux")]
#[test]
fn a_memory_budget_that_is_too_small_ends_the_attempt_with_the_numbers() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let tight = "cluster: {memory_profile: cpu_only, memory_budget: 128MiB}";
    fs::write(root.join("job.yaml"), drawing("large", root, 1536, tight)).unwrap();
    fs::write(root.join("next.yaml"), drawing("small", root, 64, "")).unwrap();
    let output = jobs::run(&Place::Here, root, "job.yaml")
        .args(["next.yaml", "--recover"])
        .output()
        .unwrap();
    let err = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && !err.contains("panicked"), "{err}");
    for words in [
        "not enough memory",
        "memory profile cpu_only, predicted to need",
        "0.12 GiB is allowed (`cluster.memory_budget`)",
        "next to try is `cluster.memory_profile: balanced`",
    ] {
        assert!(err.contains(words), "{words}: {err}");
    }
    // The one after it has what it needs.
    let drawn = fs::read_dir(root.join("small")).map(Iterator::count).unwrap_or(0);
    assert!(drawn > 0, "{err}");
}
