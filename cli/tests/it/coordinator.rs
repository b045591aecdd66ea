//! The program against a real coordinator in this process.

use crate::support::{Home, code, err, out};
use std::io::{BufRead, BufReader};
use std::process::Output;
use std::time::Duration;

/// A coordinator and a home with a job file, a model and a data set.
pub(crate) struct TestCluster {
    pub(crate) home: Home,
    pub(crate) coordinator: aitk_coordinator::CoordinatorHandle,
    pub(crate) data: tempfile::TempDir,
}

impl TestCluster {
    pub(crate) async fn new() -> Self {
        let data = tempfile::tempdir().unwrap();
        let mut config = aitk_coordinator::Config::new(data.path());
        config.bind = "127.0.0.1:0".parse().unwrap();
        let coordinator = aitk_coordinator::start(config).await.unwrap();
        let home = Home::new();
        assert_eq!(code(&home.aitk().arg("init").output().unwrap()), 0);
        let text = std::fs::read_to_string(home.path().join("job.yaml")).unwrap();
        let text = text
            .replace("FILL-IN the path of your model", "models/stable-diffusion-v1-5")
            .replace("FILL-IN the folder of your images", "datasets/my_images");
        home.write("job.yaml", &text);
        home.write_model("models/stable-diffusion-v1-5", 3_000_000);
        for i in 0..20 {
            let path = home.write(&format!("datasets/my_images/{i}.jpg"), "");
            let shade = image::Rgb([u8::try_from(i).unwrap() * 10; 3]);
            image::RgbImage::from_pixel(64, 64, shade).save(&path).unwrap();
            home.write(&format!("datasets/my_images/{i}.txt"), "the same caption");
        }
        Self {
            home,
            coordinator,
            data,
        }
    }

    pub(crate) async fn aitk(&self, args: &[&str]) -> Output {
        self.aitk_with(args, &[]).await
    }

    /// Runs the program with additional environment variables.
    pub(crate) async fn aitk_with(&self, args: &[&str], env: &[(&str, &str)]) -> Output {
        let mut command = self.home.aitk();
        command
            .args(args)
            .env("AITK_SERVER", self.coordinator.url())
            .env("AITK_TOKEN", &self.coordinator.token)
            .envs(env.iter().copied());
        tokio::task::spawn_blocking(move || command.output().unwrap())
            .await
            .unwrap()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_is_submitted_listed_stopped_and_resumed() {
    let cluster = TestCluster::new().await;
    let first = cluster.aitk(&["submit", "job.yaml"]).await;
    assert_eq!(code(&first), 0, "{}", err(&first));
    let id = out(&first).trim().to_owned();
    assert!(
        !id.contains(char::is_whitespace) && id.len() < 20,
        "only the id: {id:?}"
    );
    assert!(err(&first).contains("datasets/my_images: 40 files"), "{}", err(&first));

    let second = cluster.aitk(&["submit", "job.yaml", "--json", "--priority", "7"]).await;
    let json: serde_json::Value = serde_json::from_str(&out(&second)).unwrap();
    let sent: u64 = json["inputs"]
        .as_array()
        .unwrap()
        .iter()
        .map(|i| i["sent_bytes"].as_u64().unwrap())
        .sum();
    assert_eq!(sent, 0, "nothing is sent twice: {json}");
    let third = cluster.aitk(&["submit", "job.yaml"]).await;
    assert!(err(&third).contains("stored already, nothing sent"), "{}", err(&third));

    let jobs: serde_json::Value = serde_json::from_str(&out(&cluster.aitk(&["ps", "--json"]).await)).unwrap();
    assert_eq!(jobs["jobs"].as_array().unwrap().len(), 3);
    let urgent = jobs["jobs"]
        .as_array()
        .unwrap()
        .iter()
        .find(|job| job["priority"] == 7)
        .unwrap();
    assert_eq!((&urgent["id"], &urgent["state"]), (&json["id"], &"queued".into()));

    // A unique prefix of the id is enough.
    let unique = (2..).map(|n| &id[..n]).find(|start| {
        let ids = jobs["jobs"].as_array().unwrap();
        ids.iter()
            .filter(|job| job["id"].as_str().unwrap().starts_with(start))
            .count()
            == 1
    });
    let stopped = cluster.aitk(&["stop", unique.unwrap()]).await;
    assert_eq!(
        (code(&stopped), out(&stopped).trim()),
        (0, id.as_str()),
        "{}",
        err(&stopped)
    );
    assert_eq!(code(&cluster.aitk(&["wait", &id]).await), 143);
    assert_eq!(code(&cluster.aitk(&["logs", "-f", &id]).await), 143);
    assert_eq!(code(&cluster.aitk(&["resume", &id]).await), 0);
    assert_eq!(code(&cluster.aitk(&["resume", &id]).await), 6, "it waits already");
    assert_eq!(code(&cluster.aitk(&["wait", &id, "--timeout", "1s"]).await), 124);
    assert_eq!(code(&cluster.aitk(&["stop", "nobody"]).await), 3);
    assert_eq!(code(&cluster.aitk(&["artifacts", "get", &id, "-o", "out"]).await), 3);
    assert_eq!(out(&cluster.aitk(&["workers", "-q"]).await), "");
    cluster.coordinator.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sweep_is_an_array() {
    let cluster = TestCluster::new().await;
    let sweep = [
        "submit",
        "job.yaml",
        "--sweep",
        "train.lr=1e-4,2e-4",
        "--sweep",
        "network.linear=4,8",
    ];
    let submitted = cluster
        .aitk(&[&sweep[..], &["--at-most", "2", "--json"]].concat())
        .await;
    assert_eq!(code(&submitted), 0, "{}", err(&submitted));
    let json: serde_json::Value = serde_json::from_str(&out(&submitted)).unwrap();
    assert_eq!(
        json["array"],
        serde_json::json!({"size": 4, "at_most": 2, "split": false})
    );
    let id = json["id"].as_str().unwrap().to_owned();
    let name = json["name"].as_str().unwrap().to_owned();

    let list = cluster.aitk(&["ps"]).await;
    assert_eq!(out(&list).lines().count(), 2, "one line: {}", out(&list));
    assert!(out(&list).contains("4 waiting"), "{}", out(&list));
    let members = cluster.aitk(&["ps", &id, "--json"]).await;
    let json: serde_json::Value = serde_json::from_str(&out(&members)).unwrap();
    let names: Vec<&str> = json["jobs"]
        .as_array()
        .unwrap()
        .iter()
        .map(|job| job["name"].as_str().unwrap())
        .collect();
    assert_eq!(names[0], format!("{name}_lr1e-4_linear4"));
    assert_eq!(names[3], format!("{name}_lr2e-4_linear8"));
    assert_eq!(json["jobs"][3]["array"]["index"], 3);
    assert_eq!(out(&cluster.aitk(&["ps", "--members", "-q"]).await).lines().count(), 4);
    let one = cluster.aitk(&["ps", names[0], "-q"]).await;
    assert_eq!(out(&one).trim(), format!("{id}-0"), "a member by its name");

    // By name, by a prefix of its id, and as a job to wait for.
    let text = std::fs::read_to_string(cluster.home.path().join("job.yaml")).unwrap();
    cluster
        .home
        .write("later.yaml", &format!("{text}\ncluster: {{after: [{name}]}}\n"));
    let later = cluster.aitk(&["submit", "later.yaml", "-n", "later"]).await;
    assert_eq!(code(&later), 0, "{}", err(&later));
    let explained = out(&cluster.aitk(&["explain", out(&later).trim()]).await);
    assert!(explained.contains("waits for the array"), "{explained}");
    let explained = out(&cluster.aitk(&["explain", &id[..6]]).await);
    assert!(
        explained.starts_with("4 waiting; no worker is connected"),
        "{explained}"
    );
    let logs = cluster.aitk(&["logs", &id]).await;
    assert!(
        out(&logs).lines().any(|line| line.starts_with("[3] ")),
        "{}",
        out(&logs)
    );
    assert_eq!(code(&cluster.aitk(&["pause", &id]).await), 0);
    assert_eq!(code(&cluster.aitk(&["resume", &id]).await), 0);
    assert_eq!(
        code(&cluster.aitk(&["artifacts", "get", &id, "-o", "out"]).await),
        3,
        "nothing yet"
    );
    let stopped = cluster.aitk(&["stop", &id]).await;
    assert_eq!(
        (code(&stopped), out(&stopped).trim()),
        (0, id.as_str()),
        "{}",
        err(&stopped)
    );
    assert_eq!(code(&cluster.aitk(&["wait", &id]).await), 143);
    assert_eq!(code(&cluster.aitk(&["logs", "-f", &id]).await), 143);
    assert_eq!(code(&cluster.aitk(&["watch", &id]).await), 143);

    // An error in one member is reported before anything is sent.
    for (args, exit, says) in [
        (&["--sweep", "train.stepz=1,2"][..], 1, "did you mean `steps`?"),
        (&["--sweep", "train.no_such_key=1,2"], 1, "has no key"),
        (&["--sweep", "train.steps=10,many"], 1, "train.steps"),
        (&["--sweep", "train.steps"], 2, "no '='"),
        (&["--at-most", "2"], 2, "--sweep or --array"),
    ] {
        let wrong = cluster.aitk(&[&["submit", "job.yaml"], args].concat()).await;
        assert!(
            code(&wrong) == exit && err(&wrong).contains(says),
            "{args:?}: {}",
            err(&wrong)
        );
    }
    let same = cluster.aitk(&["submit", "job.yaml", "--array", "3", "-q"]).await;
    assert_eq!(code(&same), 2, "there is no -q");
    let same = cluster.aitk(&["submit", "job.yaml", "--array", "3"]).await;
    let names = out(&cluster.aitk(&["ps", out(&same).trim()]).await);
    assert!(
        names.contains(&format!("{name}_0")) && names.contains(&format!("{name}_2")),
        "{names}"
    );
    cluster.coordinator.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_idempotency_key_gives_the_same_job() {
    let cluster = TestCluster::new().await;
    let submit = ["submit", "job.yaml", "--idempotency-key", "monday"];
    let (first, again) = (cluster.aitk(&submit).await, cluster.aitk(&submit).await);
    assert_eq!((code(&first), code(&again)), (0, 0), "{}", err(&again));
    assert_eq!(out(&first), out(&again));
    assert!(
        err(&again).contains("was submitted with this key before"),
        "{}",
        err(&again)
    );
    cluster.coordinator.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_config_that_cannot_run_is_not_submitted() {
    let cluster = TestCluster::new().await;
    let text = std::fs::read_to_string(cluster.home.path().join("job.yaml")).unwrap();
    let try_text = async |name: &str, text: &str| {
        cluster.home.write(name, text);
        cluster.aitk(&["submit", name]).await
    };
    let typo = try_text("typo.yaml", &text.replace("save_every:", "save_evry:")).await;
    assert_eq!(code(&typo), 1);
    assert!(
        err(&typo).contains("typo.yaml:") && err(&typo).contains("save_every"),
        "{}",
        err(&typo)
    );
    let later = try_text("later.yaml", &text.replace("arch: \"sd15\"", "arch: \"auraflow\"")).await;
    assert_eq!(code(&later), 1);
    assert!(
        err(&later).contains("not supported yet") && err(&later).contains("later.yaml:"),
        "{}",
        err(&later)
    );
    let gone = try_text("gone.yaml", &text.replace("datasets/my_images", "datasets/nothing")).await;
    assert_eq!(code(&gone), 3);
    assert!(
        err(&gone).contains("gone.yaml:") && err(&gone).contains("'datasets/nothing'"),
        "{}",
        err(&gone)
    );
    assert_eq!(code(&cluster.aitk(&["submit", "no_such"]).await), 3);
    assert_eq!(out(&cluster.aitk(&["ps", "-aq"]).await), "", "nothing was submitted");
    cluster.coordinator.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_token_is_4_and_doctor_shows_its_origin() {
    let cluster = TestCluster::new().await;
    let mut command = cluster.home.aitk();
    command
        .arg("ps")
        .env("AITK_SERVER", cluster.coordinator.url())
        .env("AITK_TOKEN", "aitk_not_the_right_token");
    let output = tokio::task::spawn_blocking(move || command.output().unwrap())
        .await
        .unwrap();
    assert_eq!(code(&output), 4, "{}", err(&output));

    let doctor = cluster.aitk(&["doctor", "--json"]).await;
    let json: serde_json::Value = serde_json::from_str(&out(&doctor)).unwrap();
    assert_eq!(json["token"]["origin"], "environment variable AITK_TOKEN");
    assert!(!out(&doctor).contains(&cluster.coordinator.token));
    assert_eq!(json["coordinator"]["workers_connected"], 0);
    let problems = json["problems"].as_array().unwrap();
    assert!(
        problems
            .iter()
            .any(|problem| problem["what"].as_str().unwrap().contains("no workers")),
        "{json}"
    );
    assert_eq!(code(&doctor), 1);
    cluster.coordinator.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_is_explained_reordered_and_paused() {
    let cluster = TestCluster::new().await;
    // No worker is connected, so no device fits.
    let fit = cluster.aitk(&["fit", "job.yaml"]).await;
    assert_eq!(code(&fit), 7, "{}", err(&fit));
    assert!(out(&fit).starts_with("no worker is connected"), "{}", out(&fit));
    assert!(!err(&fit).contains("would stop here"), "{}", err(&fit));
    let fit = cluster.aitk(&["fit", "job.yaml", "--json"]).await;
    let json: serde_json::Value = serde_json::from_str(&out(&fit)).unwrap();
    assert_eq!(json["devices"], serde_json::json!([]));
    // What `submit` refuses is a warning here: the images may be elsewhere.
    let text = std::fs::read_to_string(cluster.home.path().join("job.yaml")).unwrap();
    cluster
        .home
        .write("elsewhere.yaml", &text.replace("datasets/my_images", "datasets/none"));
    let fit = cluster.aitk(&["fit", "elsewhere.yaml"]).await;
    assert_eq!(code(&fit), 7, "{}", err(&fit));
    let said = err(&fit).split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(
        said.contains("warning: `aitk submit` would stop here:") && said.contains("datasets/none"),
        "{said}"
    );

    let id = out(&cluster.aitk(&["submit", "job.yaml", "--user", "ada"]).await)
        .trim()
        .to_owned();
    let explained = cluster.aitk(&["explain", &id]).await;
    assert_eq!(code(&explained), 0, "{}", err(&explained));
    assert!(
        out(&explained).starts_with("no worker is connected"),
        "{}",
        out(&explained)
    );
    let paused = cluster.aitk(&["pause", &id]).await;
    assert_eq!(
        (code(&paused), out(&paused).trim()),
        (0, id.as_str()),
        "{}",
        err(&paused)
    );
    assert!(err(&paused).contains("waits until it is resumed"), "{}", err(&paused));
    let moved = cluster.aitk(&["priority", &id, "-3", "--json"]).await;
    let json: serde_json::Value = serde_json::from_str(&out(&moved)).unwrap();
    assert_eq!(
        (&json["jobs"][0]["priority"], &json["jobs"][0]["paused"]),
        (&(-3).into(), &true.into())
    );
    assert_eq!(json["jobs"][0]["owner"], "ada");
    let resumed = cluster.aitk(&["resume", &id]).await;
    assert_eq!(code(&resumed), 0, "{}", err(&resumed));
    let nobody = cluster.aitk(&["worker", "drain", "nobody"]).await;
    assert_eq!(code(&nobody), 3, "{}", err(&nobody));
    let bad = cluster.aitk(&["submit", "job.yaml", "--user", "a b"]).await;
    assert_eq!(code(&bad), 2, "{}", err(&bad));
}

#[tokio::test(flavor = "multi_thread")]
async fn following_a_waiting_job_shows_why_it_waits() {
    let cluster = TestCluster::new().await;
    let mut child = std::process::Command::new(assert_cmd::cargo::cargo_bin("aitk"))
        .args(["submit", "job.yaml", "-n", "waiting", "--follow"])
        .env_clear()
        .env("HOME", cluster.home.path())
        .env("AITK_SERVER", cluster.coordinator.url())
        .env("AITK_TOKEN", &cluster.coordinator.token)
        .current_dir(cluster.home.path())
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let reading = tokio::task::spawn_blocking(move || {
        let mut lines = lines.map_while(Result::ok);
        let found = lines.find(|line| line.starts_with("waits: "));
        // Read the rest too, so that the program does not block on a full pipe.
        (found, std::thread::spawn(move || lines.count()))
    });
    let found = tokio::time::timeout(Duration::from_secs(60), reading).await;
    let stopped = cluster.aitk(&["stop", "waiting"]).await;
    assert_eq!(code(&stopped), 0, "{}", err(&stopped));
    let ended = tokio::task::spawn_blocking(move || child.wait().unwrap())
        .await
        .unwrap();
    assert_eq!(ended.code(), Some(143));
    let (found, rest) = found.unwrap().unwrap();
    assert!(found.unwrap().contains("no worker is connected"));
    rest.join().unwrap();
    cluster.coordinator.shutdown().await;
}
