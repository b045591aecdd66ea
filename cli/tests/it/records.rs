//! The metrics and the log of `aitk run`, and the commands that read them.

use crate::preflight::{TINY, images, training};
use crate::support::{Home, code, err, out};

#[test]
fn a_run_writes_its_metrics_its_log_and_its_loss_curve() {
    let home = Home::new();
    images(&home, "data", 4);
    training(&home, "cat", TINY, 5, "");
    let run = home
        .aitk()
        .args(["run", "cat.yaml", "--device", "cpu", "-l", "all.log"])
        .output()
        .unwrap();
    assert_eq!(code(&run), 0, "{}", err(&run));
    // `log_every: 1`: a line for each step, on standard error and in the log file.
    let log = std::fs::read_to_string(home.path().join("all.log")).unwrap();
    for said in [&err(&run), &log] {
        for step in 1..=5 {
            assert!(said.contains(&format!("step {step}/5  loss ")), "{step}: {said}");
        }
    }
    assert!(log.contains("1 of 4 images have no caption"), "{log}");

    let folder = home.path().join("out/cat");
    let lines = std::fs::read_to_string(folder.join("metrics.jsonl")).unwrap();
    let steps: Vec<serde_json::Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(steps.len(), 5, "{lines}");
    assert!(
        steps
            .iter()
            .all(|step| step["loss"].is_f64() && step["lr"] == 1e-3 && step["seconds"].is_f64()),
        "{lines}"
    );
    assert!(
        steps.iter().all(|step| step["time"].as_str().unwrap().ends_with('Z')),
        "{lines}"
    );
    let kept = std::fs::read_to_string(folder.join("log.txt")).unwrap();
    for expected in [
        "loading model",
        "step 3/5  loss ",
        "saved cat/cat.safetensors",
        "checkpoint at step 4",
        "completed",
    ] {
        assert!(kept.contains(expected), "{expected}: {kept}");
    }
    let curve = image::open(folder.join("loss.png")).unwrap();
    assert_eq!((curve.width(), curve.height()), (1200, 675));

    // A run with more steps appends to the same files.
    training(&home, "cat", TINY, 7, "");
    let more = home
        .aitk()
        .args(["run", "cat.yaml", "--device", "cpu"])
        .output()
        .unwrap();
    assert_eq!(code(&more), 0, "{}", err(&more));
    let lines = std::fs::read_to_string(folder.join("metrics.jsonl")).unwrap();
    assert_eq!(lines.lines().count(), 7, "{lines}");

    let aitk = |args: &[&str]| home.aitk().args(args).env("COLUMNS", "80").output().unwrap();
    let chart = aitk(&["plot", "out/cat", "--ascii"]);
    assert_eq!(code(&chart), 0, "{}", err(&chart));
    let shown = out(&chart);
    assert!(
        shown.starts_with("cat: 7 losses to step 7") && shown.contains('*'),
        "{shown}"
    );
    assert!(shown.lines().all(|line| line.len() <= 80), "{shown}");
    assert_eq!(code(&aitk(&["plot", "out/cat", "-o", "here.png"])), 0);
    assert!(image::open(home.path().join("here.png")).is_ok());
    let bitmap = aitk(&["plot", "out/cat", "-o", "here.bmp"]);
    assert_eq!(code(&bitmap), 2);
    assert!(err(&bitmap).contains(".png"), "{}", err(&bitmap));
    let unknown = aitk(&["plot", "nope"]);
    assert_eq!(code(&unknown), 2);
    assert!(err(&unknown).contains("named by its run folder"), "{}", err(&unknown));
    let json: serde_json::Value = serde_json::from_str(&out(&aitk(&["plot", "out/cat", "--json"]))).unwrap();
    assert_eq!(json["points"].as_array().unwrap().len(), 7);
    let written = aitk(&["plot", "out/cat", "--tensorboard", "logs"]);
    assert_eq!(code(&written), 0, "{}", err(&written));
    let events = std::fs::read(home.path().join("logs/cat/events.out.tfevents.aitk")).unwrap();
    let losses = events.windows(5).filter(|part| part == b"\x04loss").count();
    assert_eq!(losses, 7);
    let last = aitk(&["logs", "out/cat", "--tail", "1"]);
    assert!(out(&last).trim_end().ends_with("completed"), "{}", out(&last));
    assert_eq!(code(&aitk(&["plot", "data/"])), 3);
    assert_eq!(code(&aitk(&["logs", "data/"])), 3);
}

#[test]
fn an_error_of_a_running_training_names_the_line_of_its_key() {
    let home = Home::new();
    images(&home, "data", 2);
    training(&home, "cat", TINY, 5, "");
    let text = std::fs::read_to_string(home.path().join("cat.yaml")).unwrap();
    let line = 1 + text.lines().take_while(|line| !line.contains("network:")).count();
    let kwargs = "linear_alpha: 4, network_kwargs: {only_if_contains: [nothing_like_it]}";
    home.write("cat.yaml", &text.replace("linear_alpha: 4", kwargs));
    let run = home
        .aitk()
        .args(["run", "cat.yaml", "--device", "cpu"])
        .output()
        .unwrap();
    assert_eq!(code(&run), 1, "{}", err(&run));
    assert!(
        err(&run).contains(&format!("cat.yaml:{line}:")) && err(&run).contains("no layer is left to train"),
        "{}",
        err(&run)
    );
}
