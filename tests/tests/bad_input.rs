//! Invalid input fails with an error that names what and where, without a panic and without a result.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use aitk_tests::jobs::{self, tiny_model, training_config, write_dataset};
use aitk_tests::namespaces::Namespaces;
use std::fs;
use std::path::Path;
use std::process::Output;

fn run(folder: &Path) -> Output {
    jobs::run_command(&Namespaces::Host, folder, "job.yaml")
        .env_remove("AITK_UNSET_VARIABLE")
        .output()
        .unwrap()
}

/// Changes a valid job with `prepare`, runs it, and expects it to fail with an error that contains all of these texts.
fn assert_refused(what: &str, texts: &[&str], prepare: impl FnOnce(&Path)) {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    write_dataset(&root.join("dataset"), 2);
    fs::write(root.join("job.yaml"), training_config("bad", root, 2, 100)).unwrap();
    prepare(root);
    let output = run(root);
    let err = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{what}: it was accepted\n{err}");
    assert!(!err.contains("panicked"), "{what}: {err}");
    for text in texts {
        assert!(
            err.contains(text),
            "{what}: the message does not contain {text:?}\n{err}"
        );
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

/// A PNG with this size in its header and only the beginning of its data.
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
fn invalid_configs_are_refused() {
    assert_refused("a tab", &["job.yaml", "tab"], |root| {
        edit(root, "      network:", "\t     network:")
    });
    assert_refused("a duplicate key", &["job.yaml", "steps"], |root| {
        edit(root, "        steps: 2", "        steps: 2\n        steps: 3")
    });
    assert_refused("a wrong type", &["job.yaml", "steps", "many"], |root| {
        edit(root, "steps: 2", "steps: many")
    });
    assert_refused("an unset variable", &["AITK_UNSET_VARIABLE"], |root| {
        edit(root, "\"zorb\"", "\"${AITK_UNSET_VARIABLE}\"")
    });
    assert_refused("a misspelt key", &["batch_sise", "batch_size"], |root| {
        edit(root, "batch_size: 2", "batch_sise: 2")
    });
    assert_refused("an unknown architecture", &["sd9", "sd1"], |root| {
        edit(root, "arch: sd1", "arch: sd9")
    });
    assert_refused("no such model", &["no/such/model"], |root| {
        edit(root, &tiny_model().display().to_string(), "/no/such/model");
    });
}

#[test]
fn invalid_data_sets_are_refused() {
    assert_refused("an empty data set", &["dataset"], |root| {
        fs::remove_dir_all(root.join("dataset")).unwrap();
        fs::create_dir(root.join("dataset")).unwrap();
    });
    assert_refused("a missing folder", &["dataset"], |root| {
        fs::remove_dir_all(root.join("dataset")).unwrap()
    });
    assert_refused("images of 0 bytes", &["000.png"], |root| {
        for name in ["000.png", "001.png"] {
            fs::write(root.join("dataset").join(name), b"").unwrap();
        }
    });
    assert_refused("images of 30,000 x 30,000", &["000.png", "30000"], |root| {
        for name in ["000.png", "001.png"] {
            fs::write(root.join("dataset").join(name), png_header(30_000, 30_000)).unwrap();
        }
    });
    assert_refused("a caption that is not UTF-8", &["000.txt", "UTF-8"], |root| {
        fs::write(root.join("dataset/000.txt"), b"caf\xe9").unwrap();
    });
}

#[test]
fn invalid_models_are_refused() {
    let unet = "unet/diffusion_pytorch_model.safetensors";
    assert_refused("a truncated file", &[unet], |root| {
        let path = copy_model(root).join(unet);
        let bytes = fs::read(&path).unwrap();
        fs::write(path, &bytes[..bytes.len() / 2]).unwrap();
    });
    assert_refused("a mislabelled file", &[unet], |root| {
        let path = copy_model(root).join(unet);
        fs::write(path, b"PK\x03\x04 this is a zip archive, whatever its name says").unwrap();
    });
    assert_refused("a missing tensor", &["conv_in.weight"], |root| {
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
    assert_refused("another shape", &["shape"], |root| {
        let path = copy_model(root).join("unet/config.json");
        let text = fs::read_to_string(&path).unwrap();
        let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
        config["cross_attention_dim"] = 48.into();
        fs::write(path, config.to_string()).unwrap();
    });
    assert_refused("a pickle checkpoint", &["ckpt", "safetensors"], |root| {
        fs::write(root.join("model.ckpt"), b"\x80\x02}q\x00.").unwrap();
        edit(
            root,
            &tiny_model().display().to_string(),
            &root.join("model.ckpt").display().to_string(),
        );
    });
}

/// A job that generates one square image with this side, with this `cluster` section.
fn generate_config(name: &str, root: &Path, side: u32, cluster: &str) -> String {
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
fn a_too_small_memory_budget_ends_the_attempt_with_an_error_that_has_the_numbers() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let tight = "cluster: {memory_profile: cpu_only, memory_budget: 128MiB}";
    fs::write(root.join("job.yaml"), generate_config("large", root, 1536, tight)).unwrap();
    fs::write(root.join("next.yaml"), generate_config("small", root, 64, "")).unwrap();
    let output = jobs::run_command(&Namespaces::Host, root, "job.yaml")
        .args(["next.yaml", "--recover"])
        .output()
        .unwrap();
    let err = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && !err.contains("panicked"), "{err}");
    for text in [
        "not enough memory",
        "memory profile cpu_only, predicted to need",
        "0.12 GiB is allowed (`cluster.memory_budget`)",
        "next to try is `cluster.memory_profile: balanced`",
    ] {
        assert!(err.contains(text), "{text}: {err}");
    }
    // The next job runs.
    let images = fs::read_dir(root.join("small")).map(Iterator::count).unwrap_or(0);
    assert!(images > 0, "{err}");
}
