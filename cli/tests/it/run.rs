//! `aitk run` and `aitk up` with the real engine on the tiny model.

use crate::support::{Home, code, err, out};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/tiny_sd");

pub(crate) fn generate(home: &Home, name: &str) {
    let text = format!(
        "job: generate
config:
  name: {name}
  process:
    - type: to_folder
      output_folder: out/{name}
      device: cpu
      generate:
        sampler: ddim
        width: 64
        height: 64
        sample_steps: 2
        guidance_scale: 4
        seed: 7
        ext: png
        prompts:
          - a red circle
      model:
        name_or_path: {TINY}
        arch: sd15
        dtype: float32
"
    );
    home.write(&format!("{name}.yaml"), &text);
}

fn images(folder: &Path) -> usize {
    let files = std::fs::read_dir(folder)
        .map(|entries| entries.flatten().collect::<Vec<_>>())
        .unwrap_or_default();
    files
        .iter()
        .filter(|entry| entry.path().extension().is_some_and(|ext| ext == "png"))
        .count()
}

#[test]
fn configs_run_in_order_and_recover_continues_after_a_failure() {
    let home = Home::new();
    generate(&home, "one");
    generate(&home, "two");
    home.write("broken.yaml", "job: generate\nconfig: [\n");
    let refused = home
        .aitk()
        .args(["run", "broken.yaml", "one.yaml", "--device", "cpu"])
        .output()
        .unwrap();
    assert_eq!(code(&refused), 1);
    assert!(err(&refused).contains("broken.yaml:"), "{}", err(&refused));
    assert_eq!(
        images(&home.path().join("out/one")),
        0,
        "nothing starts before everything is checked"
    );

    let args = [
        "run",
        "one.yaml",
        "broken.yaml",
        "two.yaml",
        "-r",
        "-l",
        "run.log",
        "--device",
        "cpu",
    ];
    let output = home.aitk().args(args).output().unwrap();
    assert_eq!(code(&output), 1, "{}", err(&output));
    assert_eq!(images(&home.path().join("out/one")), 1, "{}", err(&output));
    assert_eq!(images(&home.path().join("out/two")), 1, "{}", err(&output));
    let log = std::fs::read_to_string(home.path().join("run.log")).unwrap();
    assert!(
        log.contains("error: broken.yaml:") && log.contains("2 of 3 configs completed"),
        "{log}"
    );
    let left = std::fs::read_dir(home.path().join(".local/state/aitk/run"))
        .unwrap()
        .count();
    assert_eq!(left, 0, "the private folder is gone");
}

#[test]
fn a_missing_device_exits_with_code_7_and_a_missing_config_with_3() {
    let home = Home::new();
    generate(&home, "one");
    let output = home
        .aitk()
        .args(["run", "one.yaml", "--device", "cuda:99"])
        .output()
        .unwrap();
    assert_eq!(code(&output), 7, "{}", err(&output));
    assert_eq!(code(&home.aitk().args(["run", "nothing.yaml"]).output().unwrap()), 3);
}

/// `aitk up` in a child process.
struct Up {
    child: Child,
}

impl Up {
    fn start(home: &Home) -> Self {
        Self::start_as(home, Command::new(assert_cmd::cargo::cargo_bin("aitk")))
    }

    fn start_as(home: &Home, mut aitk: Command) -> Self {
        let mut child = aitk
            .args([
                "up",
                "--bind",
                "127.0.0.1:0",
                "--device",
                "cpu",
                "--worker-name",
                "tester",
            ])
            .env_clear()
            .env("HOME", home.path())
            .env("PATH", "/usr/bin:/bin")
            .current_dir(home.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap())
            .read_line(&mut line)
            .unwrap();
        assert!(line.starts_with("server      http://127.0.0.1:"), "{line}");
        Self { child }
    }

    fn send(&self, signal: Signal) {
        kill(Pid::from_raw(i32::try_from(self.child.id()).unwrap()), signal).unwrap();
    }

    fn interrupt(mut self) -> i32 {
        self.send(Signal::SIGINT);
        let until = Instant::now() + Duration::from_secs(60);
        while Instant::now() < until {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code().unwrap_or(-1);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        -2
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn other_commands_find_aitk_up_until_it_stops() {
    let home = Home::new();
    generate(&home, "one");
    let up = Up::start(&home);
    let workers = home.aitk().args(["workers", "--json"]).output().unwrap();
    let json: serde_json::Value = serde_json::from_str(&out(&workers)).unwrap();
    assert_eq!(json["workers"][0]["name"], "tester", "{}", err(&workers));

    let output = home.aitk().args(["submit", "one.yaml", "--follow"]).output().unwrap();
    assert_eq!(code(&output), 0, "{}", err(&output));
    assert_eq!(out(&output).lines().count(), 1, "only the id: {}", out(&output));
    let id = out(&output).trim().to_owned();
    let files = home.aitk().args(["artifacts", "ls", &id, "-q"]).output().unwrap();
    assert!(
        out(&files).lines().any(|name| name.ends_with(".png")),
        "{}",
        out(&files)
    );
    let get = |args: &[&str]| {
        home.aitk()
            .args(["artifacts", "get", &id, "-o", "got"])
            .args(args)
            .output()
            .unwrap()
    };
    // Without -o into a folder with the job's name, not nested twice.
    let usual = home.aitk().args(["artifacts", "get", &id]).output().unwrap();
    assert_eq!(code(&usual), 0, "{}", err(&usual));
    for path in out(&usual).lines() {
        assert!(path.starts_with("one/") && !path.starts_with("one/one/"), "{path}");
        assert!(home.path().join(path).is_file(), "{path}");
    }
    let fetched = get(&["*.png"]);
    assert_eq!(code(&fetched), 0, "{}", err(&fetched));
    let path = home.path().join(out(&fetched).trim());
    assert!(path.is_file(), "{}", out(&fetched));
    assert!(err(&get(&["*.png"])).contains("existed already"));
    std::fs::write(&path, "mine").unwrap();
    assert_eq!(code(&get(&["*.png"])), 6, "what is there is not overwritten");
    assert_eq!(code(&get(&["*.png", "--force"])), 0);
    assert_eq!(code(&get(&["*.gif"])), 3);

    let doctor = home.aitk().args(["doctor"]).output().unwrap();
    assert!(out(&doctor).contains("`aitk up` on this machine"), "{}", out(&doctor));
    assert_eq!(up.interrupt(), 0);
    let after = home.aitk().arg("ps").output().unwrap();
    assert_eq!(code(&after), 2, "no server is known any more: {}", err(&after));
}

#[test]
fn up_with_nohup_ignores_hangups() {
    let home = Home::new();
    let mut aitk = Command::new("nohup");
    aitk.arg(assert_cmd::cargo::cargo_bin("aitk"));
    let up = Up::start_as(&home, aitk);
    up.send(Signal::SIGHUP);
    assert_eq!(up.interrupt(), 0, "Ctrl-C counts as the first signal");
}

/// Pipes and devices where a config names files are errors with the position in the config, before anything is started
/// or sent.
#[test]
fn special_files_are_refused_before_the_start() {
    let home = Home::new();
    let pipe = home.path().join("words.txt");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    for (path, what) in [
        ("/dev/zero", "a device"),
        ("words.txt", "a pipe"),
        ("/dev/stdin", "not a file or folder"),
    ] {
        generate(&home, "odd");
        let text = std::fs::read_to_string(home.path().join("odd.yaml")).unwrap();
        let line = 1 + text.lines().take_while(|line| !line.contains("prompts:")).count();
        home.write(
            "odd.yaml",
            &text.replace("prompts:\n          - a red circle", &format!("prompts: {path}")),
        );
        for command in ["run", "submit"] {
            let refused = home
                .aitk()
                .args([command, "odd.yaml"])
                .env("AITK_SERVER", "http://127.0.0.1:9")
                .output()
                .unwrap();
            let said = err(&refused);
            assert_eq!(code(&refused), 1, "{said}");
            assert!(
                said.contains(what) && said.contains(&format!("odd.yaml:{line}:")),
                "{command} {path}: {said}"
            );
        }
    }
}
