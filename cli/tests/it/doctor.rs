//! `aitk doctor --thorough`, on the CPU in the forms that GPUs use.

use crate::support::Home;
use aitk_tests::long_tests::skips_long_tests;
use serde_json::Value;

#[test]
fn the_thorough_check_finds_every_dtype_of_the_portable_cpu_right() {
    if skips_long_tests() {
        return;
    }
    let home = Home::new();
    let report = home.path().join("report.json");
    let output = home
        .aitk()
        .timeout(std::time::Duration::from_secs(600))
        .args([
            "doctor",
            "--thorough",
            "--device",
            "cpu:portable",
            "--steps",
            "5",
            "--json",
        ])
        .arg("--report")
        .arg(&report)
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{stderr}\n{}",
        String::from_utf8_lossy(&output.stdout)
    );
    assert_eq!(std::fs::read(&report).unwrap().trim_ascii(), output.stdout.trim_ascii());
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let device = &report["thorough"]["devices"][0];
    let dtypes = device["dtypes"].as_array().unwrap();
    let names: Vec<_> = dtypes.iter().map(|found| found["dtype"].as_str().unwrap()).collect();
    assert_eq!(names, ["f32", "bf16", "f16"]);
    for found in dtypes {
        assert_eq!(found["comparison"]["failures"], serde_json::json!([]), "{found}");
    }
    // Half precision was really used: its losses are others.
    assert!(
        dtypes[1]["comparison"]["loss_difference"].as_f64().unwrap() > 1e-4,
        "{dtypes:?}"
    );
    for found in device["memory"].as_array().unwrap() {
        assert!(found["taken_gib"].as_f64().unwrap() > 0.1, "{found}");
    }
    let speed = device["speed"].as_array().unwrap();
    assert!(!speed.is_empty());
    for found in speed {
        assert_eq!(found["seconds"].as_object().unwrap().len(), 3, "{found}");
    }
}

#[test]
fn a_device_needs_the_thorough_check() {
    let home = Home::new();
    let output = home.aitk().args(["doctor", "--device", "cpu"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let output = home
        .aitk()
        .args(["doctor", "--thorough", "--device", "cuda:99"])
        .output()
        .unwrap();
    assert_eq!(
        output.status.code(),
        Some(7),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}
