//! `aitk run` and `aitk up` with extensions: the example, and a hostile program inside the sandbox.

use crate::support::{Home, code, err, out};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

#[path = "../../../tests/src/skip.rs"]
#[allow(dead_code, unreachable_pub)]
mod skip;

const EXAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../config/examples/extension");

/// Python 3 where a sandboxed program finds it. Without it the tests cannot run.
fn has_python() -> bool {
    let found = ["/usr/bin/python3", "/usr/local/bin/python3"]
        .iter()
        .any(|path| Path::new(path).exists());
    if !found {
        skip::skip("python3", "there is no python3 in /usr/bin or /usr/local/bin");
    }
    found
}

/// Copies the example, so that results are written into the home folder.
fn copy_example(home: &Home) {
    for name in ["job.yaml", "program/char_model.py"] {
        home.write(name, &std::fs::read(Path::new(EXAMPLE).join(name)).unwrap());
    }
    for entry in std::fs::read_dir(Path::new(EXAMPLE).join("captions")).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        home.write(&format!("captions/{name}"), &std::fs::read(&path).unwrap());
    }
    make_executable(&home.path().join("program/char_model.py"));
}

fn make_executable(path: &Path) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
}

/// Checks what the example wrote: a safetensors file with a header, and a text.
fn check_results(folder: &Path) {
    let model = std::fs::read(folder.join("model.safetensors")).unwrap();
    let length = u64::from_le_bytes(model[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&model[8..8 + length]).unwrap();
    let size = header["first"]["shape"][0].as_u64().unwrap();
    assert_eq!(header["bias"]["shape"], serde_json::json!([1, size]));
    assert_eq!(model.len() as u64, 8 + length as u64 + 4 * (2 * size * size + size));
    assert!(!std::fs::read_to_string(folder.join("sample.txt")).unwrap().is_empty());
}

#[test]
fn the_example_trains_and_is_refused_unless_it_is_allowed() {
    if !has_python() {
        return;
    }
    let home = Home::new();
    copy_example(&home);
    let refused = home
        .aitk()
        .args(["run", "job.yaml", "--device", "cpu"])
        .output()
        .unwrap();
    assert_eq!(code(&refused), 7, "{}", err(&refused));
    assert!(
        err(&refused).contains("--allow-extension char-model=/PATH/OF/PROGRAM"),
        "{}",
        err(&refused)
    );
    assert!(!home.path().join("output").exists());

    let allow = "--allow-extension=char-model=program/char_model.py";
    let output = home
        .aitk()
        .args(["run", "job.yaml", "--device", "cpu", allow])
        .output()
        .unwrap();
    assert_eq!(code(&output), 0, "{}{}", out(&output), err(&output));
    assert!(out(&output).contains("6 captions"), "{}", out(&output));
    check_results(&home.path().join("output/captions_model"));

    // Wrong settings are an error of the config, before the training.
    let set = ["--set", "config.process[0].config.steps=none"];
    let wrong = home
        .aitk()
        .args(["run", "job.yaml", "--device", "cpu", allow])
        .args(set)
        .output()
        .unwrap();
    assert_eq!(code(&wrong), 1, "{}", err(&wrong));
    let shown = format!("{}{}", out(&wrong), err(&wrong));
    assert!(
        shown.contains("`config.steps` is \"none\"; expected a value of type integer"),
        "{shown}"
    );
}

#[test]
fn wrong_values_of_allow_extension_are_errors_of_the_command_line() {
    let home = Home::new();
    home.write("job.yaml", "job: extension\n");
    home.write("program/not_executable", "");
    for wrong in [
        "py",
        "py=",
        "=x",
        "PY=x",
        "py=nope.py",
        "py=program",
        "py=program/not_executable",
    ] {
        for command in [&["run", "job.yaml"][..], &["up", "--no-worker"]] {
            let output = home
                .aitk()
                .args(command)
                .args(["--allow-extension", wrong])
                .output()
                .unwrap();
            assert_eq!(code(&output), 2, "{command:?} {wrong}: {}", err(&output));
            let expected = format!("--allow-extension {wrong}: ");
            assert!(
                err(&output).contains(&expected),
                "{command:?} {wrong}: {}",
                err(&output)
            );
        }
    }
}

/// A program whose mistakes are chosen by its config.
const HOSTILE: &str = r#"#!/usr/bin/env python3
import json, os, resource, signal, socket, sys, time

def send(**message):
    print(json.dumps(message), flush=True)

def step(number):
    send(type="progress", step=number, total=9)

send(type="hello", version=1)
start = json.loads(sys.stdin.readline())
config, output = start["config"], start["output"]
mode = config["mode"]
with open(os.path.join(output, "new_pid"), "w") as file:
    file.write(str(os.getpid()))
os.rename(os.path.join(output, "new_pid"), os.path.join(output, "pid"))
step(3)

def attempt(name, trial):
    try:
        trial()
        send(type="log", level="info", message=f"TRIAL {name}: possible")
    except OSError as error:
        send(type="log", level="info", message=f"TRIAL {name}: refused ({error.errno})")

if mode == "killed":
    time.sleep(1000)
elif mode == "hung":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1000)
elif mode == "flood":
    while True:
        send(type="log", level="info", message="x")
elif mode == "long_line":
    sys.stdout.write("x" * 200000)
    sys.stdout.flush()
    time.sleep(1000)
elif mode == "not_utf8":
    os.write(1, b"\xff\xfe\n")
    time.sleep(1000)
elif mode == "backwards":
    step(2)
    time.sleep(1000)
elif mode == "early":
    send(type="done")
elif mode == "outside":
    send(type="artifact", path="../x")
    time.sleep(1000)
elif mode == "exit":
    sys.stderr.write("no more memory for cats\n")
    sys.exit(3)
elif mode == "sandbox":
    attempt("own input", lambda: open(os.path.join(start["inputs"]["data"], "a.txt")).read())
    attempt("own output", lambda: open(os.path.join(output, "mine"), "w").write("x"))
    attempt("own temporary", lambda: open(os.path.join(os.environ["TMPDIR"], "t"), "w").write("x"))
    attempt("own program", lambda: open(__file__).read())
    for path in config["secrets"]:
        attempt("read " + path, lambda: os.listdir(path) if os.path.isdir(path) else open(path).read())
    attempt("write outside", lambda: open(config["outside"], "w").write("x"))
    attempt("change the input", lambda: open(os.path.join(start["inputs"]["data"], "b.txt"), "w").write("x"))
    attempt("socket", lambda: socket.socket())
    attempt("signal", lambda: os.kill(config["parent"], signal.SIGCONT))
    attempt("limits of another", lambda: resource.prlimit(config["parent"], resource.RLIMIT_NOFILE))
    attempt("leave the group", os.setsid)
    attempt("link", lambda: os.symlink("/etc/passwd", os.path.join(output, "link")))
    known = ("PATH", "HOME", "TMPDIR", "LANG", "PYTHONDONTWRITEBYTECODE", "LC_CTYPE", "TZ")
    send(type="log", level="info", message="VARIABLES " + " ".join(name for name in os.environ if name not in known))
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with open(os.path.join(output, "grandchild"), "w") as file:
            file.write(str(os.getpid()))
        time.sleep(1000)
    while not os.path.exists(os.path.join(output, "grandchild")):
        time.sleep(0.01)
    step(9)
    send(type="done")
"#;

fn hostile_home() -> Home {
    let home = Home::new();
    let program = home.write("program/hostile.py", HOSTILE);
    make_executable(&program);
    home.write("data/a.txt", "a caption");
    home.write("secret.txt", "secret");
    home.write("output/other_job/model.safetensors", "x");
    home
}

/// Writes the config of a job in a mode. A silence of `silence` seconds counts as hanging.
fn write_config(home: &Home, mode: &str, more: &str, silence: u64) {
    let text = format!(
        "job: extension\nconfig:\n  name: {mode}\n  training_folder: output\n  process:\n    - type: extension:hostile\n      \
         inputs: {{data: data}}\n      config: {{mode: {mode}{more}}}\ncluster:\n  progress_timeout: {silence}s\n"
    );
    home.write(&format!("{mode}.yaml"), &text);
}

const ALLOW: &str = "--allow-extension=hostile=program/hostile.py";

fn is_alive(pid: i32) -> bool {
    kill(Pid::from_raw(pid), None).is_ok()
}

/// Waits until a file of the program has a number.
fn wait_for_number(path: &Path) -> i32 {
    let until = Instant::now() + Duration::from_secs(100);
    loop {
        if let Some(number) = std::fs::read_to_string(path).ok().and_then(|text| text.parse().ok()) {
            return number;
        }
        assert!(Instant::now() < until, "{} did not appear", path.display());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Waits until a process has ended.
fn wait_for_end(pid: i32) {
    let until = Instant::now() + Duration::from_secs(60);
    while is_alive(pid) {
        assert!(Instant::now() < until, "process {pid} outlives its attempt");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_program_that_hangs_floods_lies_or_dies_ends_its_attempt_with_a_message() {
    if !has_python() {
        return;
    }
    let home = hostile_home();
    let cases = [
        (
            "hung",
            "the extension `hostile` hangs: it sent no message for 2 s at step 3 of 9",
        ),
        ("flood", "the extension `hostile` floods the attempt with messages"),
        (
            "long_line",
            "the extension `hostile` sent a line of more than 65536 bytes",
        ),
        ("not_utf8", "the extension `hostile` sent a line that is not UTF-8"),
        (
            "backwards",
            "the extension `hostile` reported step 2 of 9 after step 3: progress went backwards",
        ),
        ("early", "the extension `hostile` sent `done` at step 3 of 9"),
        ("outside", "the extension `hostile` announced the file `../x`"),
        (
            "exit",
            "the extension `hostile` exited with code 3 at step 3 of 9, before it sent `done`; the end of its standard error: no more \
             memory for cats",
        ),
    ];
    for (mode, _) in cases {
        write_config(&home, mode, "", if mode == "hung" { 2 } else { 100 });
    }
    let configs = cases.map(|(mode, _)| format!("{mode}.yaml"));
    let output = home
        .aitk()
        .arg("run")
        .args(&configs)
        .args(["-r", "--device", "cpu", ALLOW])
        .output()
        .unwrap();
    let shown = format!("{}{}", out(&output), err(&output));
    assert_ne!(code(&output), 0, "{shown}");
    for (mode, expected) in cases {
        assert!(shown.contains(expected), "{mode}: {expected} is not in\n{shown}");
        let pid = wait_for_number(&home.path().join(format!("output/{mode}/pid")));
        wait_for_end(pid);
    }
}

#[test]
fn a_program_that_is_killed_from_outside_ends_its_attempt_with_a_message() {
    if !has_python() {
        return;
    }
    let home = hostile_home();
    write_config(&home, "killed", "", 100);
    let child = spawn(&home, &["run", "killed.yaml", "--device", "cpu", ALLOW]);
    let pid = wait_for_number(&home.path().join("output/killed/pid"));
    kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
    let output = child.wait_with_output().unwrap();
    let shown = format!("{}{}", out(&output), err(&output));
    let expected = "the extension `hostile` was killed by signal 9 (SIGKILL) at step 3 of 9, before it sent `done`";
    assert!(shown.contains(expected), "{shown}");
}

fn spawn(home: &Home, args: &[&str]) -> Child {
    Command::new(assert_cmd::cargo::cargo_bin("aitk"))
        .args(args)
        .env_clear()
        .env("HOME", home.path())
        .env("PATH", "/usr/bin:/bin")
        .env("HF_TOKEN", "hf_not_for_programs")
        .current_dir(home.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

#[test]
fn a_program_reads_and_writes_its_own_folders_only_and_leaves_no_process() {
    if !has_python() {
        return;
    }
    let home = hostile_home();
    let at = |name: &str| home.path().canonicalize().unwrap().join(name);
    let secrets: Vec<PathBuf> = vec![
        at("secret.txt"),
        at(""),
        at("output"),
        at("output/other_job/model.safetensors"),
        at("sandbox.yaml"),
        "/etc/passwd".into(),
        "/etc".into(),
        "/proc/1/environ".into(),
    ];
    let listed: Vec<_> = secrets.iter().map(|path| path.to_str().unwrap()).collect();
    let more = format!(
        ", secrets: {listed:?}, outside: {:?}, parent: {}",
        at("written"),
        std::process::id()
    );
    write_config(&home, "sandbox", &more, 100);
    let output = spawn(&home, &["run", "sandbox.yaml", "--device", "cpu", ALLOW])
        .wait_with_output()
        .unwrap();
    let shown = format!("{}{}", out(&output), err(&output));
    assert_eq!(code(&output), 0, "{shown}");
    let pid = wait_for_number(&home.path().join("output/sandbox/grandchild"));
    wait_for_end(pid);
    if !shown.contains("files: Landlock") && !shown.contains("files: sandbox-exec") {
        return skip::skip("landlock", "the files of attempts are not confined here");
    }
    let trials: Vec<&str> = shown
        .lines()
        .filter_map(|line| line.split_once("TRIAL ").map(|(_, trial)| trial))
        .collect();
    assert_eq!(trials.len(), 4 + secrets.len() + 7, "{shown}");
    for trial in trials {
        assert_eq!(
            trial.contains(": possible"),
            trial.starts_with("own "),
            "{trial}\n{shown}"
        );
    }
    assert!(!at("written").exists() && !at("data/b.txt").exists());
    let variables = shown
        .lines()
        .find_map(|line| line.split_once("VARIABLES ").map(|(_, names)| names.trim()));
    // Its folder for compiled kernels is below its own temporary folder.
    assert_eq!(variables.unwrap_or_default(), "CUDA_CACHE_PATH", "{shown}");
}

/// `aitk up` in a child process.
struct Up(Child);

impl Up {
    fn start(home: &Home, args: &[&str]) -> Self {
        use std::io::BufRead;
        let bind = ["up", "--bind", "127.0.0.1:0", "--device", "cpu"];
        let mut child = spawn(home, &[&bind, args].concat());
        let mut line = String::new();
        let mut output = std::io::BufReader::new(child.stdout.take().unwrap());
        output.read_line(&mut line).unwrap();
        assert!(line.starts_with("server      http://127.0.0.1:"), "{line}");
        // Its pipes stay open and are read, so that it is never blocked.
        std::thread::spawn(move || std::io::copy(&mut output, &mut std::io::sink()));
        let mut errors = child.stderr.take().unwrap();
        std::thread::spawn(move || std::io::copy(&mut errors, &mut std::io::sink()));
        Self(child)
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_cluster_runs_extensions_that_a_worker_allows_and_keeps_their_results() {
    if !has_python() {
        return;
    }
    let home = hostile_home();
    copy_example(&home);
    let char_model = "--allow-extension=char-model=program/char_model.py";
    let _up = Up::start(&home, &[char_model, ALLOW]);
    let submitted = home.aitk().args(["submit", "job.yaml", "--follow"]).output().unwrap();
    assert_eq!(code(&submitted), 0, "{}{}", out(&submitted), err(&submitted));
    let id = out(&submitted).trim().to_owned();
    let got = home
        .aitk()
        .args(["artifacts", "get", &id, "-o", "got"])
        .output()
        .unwrap();
    assert_eq!(code(&got), 0, "{}", err(&got));
    let model = out(&got)
        .lines()
        .find(|path| path.ends_with("model.safetensors"))
        .map(PathBuf::from);
    let model = model.unwrap_or_else(|| panic!("{}", out(&got)));
    check_results(home.path().join(model).parent().unwrap());

    // The same attacks from an attempt whose inputs were sent.
    let data = home.path().canonicalize().unwrap();
    let secrets = [
        data.join("secret.txt"),
        data.join(".local/share/aitk"),
        "/etc/passwd".into(),
        "/proc/1/environ".into(),
    ];
    let listed: Vec<_> = secrets.iter().map(|path| path.to_str().unwrap()).collect();
    let outside = data.join("written");
    let more = format!(
        ", secrets: {listed:?}, outside: {outside:?}, parent: {}",
        std::process::id()
    );
    write_config(&home, "sandbox", &more, 100);
    let submitted = home
        .aitk()
        .args(["submit", "sandbox.yaml", "--follow"])
        .output()
        .unwrap();
    assert_eq!(code(&submitted), 0, "{}{}", out(&submitted), err(&submitted));
    let log = home.aitk().args(["logs", out(&submitted).trim()]).output().unwrap();
    let trials = out(&log)
        .lines()
        .filter_map(|line| Some(line.split_once("TRIAL ")?.1.to_owned()))
        .collect::<Vec<_>>();
    assert_eq!(trials.len(), 4 + secrets.len() + 7, "{}", out(&log));
    if out(&log).contains("files: Landlock") || out(&log).contains("files: sandbox-exec") {
        for trial in trials {
            assert_eq!(
                trial.contains(": possible"),
                trial.starts_with("own "),
                "{trial}\n{}",
                out(&log)
            );
        }
    }

    // A job whose extension no worker allows waits, and says why.
    let text = std::fs::read_to_string(home.path().join("job.yaml")).unwrap();
    home.write("other.yaml", &text.replace("extension:char-model", "extension:other"));
    let waiting = home.aitk().args(["submit", "other.yaml"]).output().unwrap();
    let id = out(&waiting).trim().to_owned();
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let shown = home.aitk().args(["explain", &id]).output().unwrap();
        if out(&shown).contains("no connected worker allows the extension `other`") {
            break;
        }
        assert!(Instant::now() < until, "{}", out(&shown));
        std::thread::sleep(Duration::from_millis(100));
    }
}
