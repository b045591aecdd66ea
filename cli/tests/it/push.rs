//! `aitk push` and `save.push_to_hub`, over real HTTP to a hub that takes uploads as Hugging Face does.

use crate::preflight::{TINY, images};
use crate::run::generate;
use crate::support::{Home, code, err, out};
use aitk_common::hub::push::{HubWriter, PushError, Source, Upload};
use aitk_tests::upload_hub::{TOKEN, UploadHub};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::collections::BTreeMap;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

/// Content that is the same for the same number, and not the same for others.
fn content(length: usize, seed: u8) -> Vec<u8> {
    (0..length).map(|at| (at * 31 % 251) as u8 ^ seed).collect()
}

fn uploads(folder: &Home, files: &[(&str, Vec<u8>)]) -> Vec<Upload> {
    let write = |(name, content): &(&str, Vec<u8>)| Upload {
        name: (*name).to_owned(),
        source: Source::File(folder.write(name, content)),
    };
    files.iter().map(write).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repository_has_the_bytes_that_were_pushed_small_and_large_whole_and_in_parts() {
    let home = Home::new();
    let files = [
        ("README.md", content(999, 1)),
        ("empty.txt", Vec::new()),
        ("a/b/model.safetensors", content(1000, 2)),
        ("exact.safetensors", content(4096 * 3, 3)),
        ("odd.safetensors", content(3_000_001, 4)),
        ("same.safetensors", content(3_000_001, 4)),
    ];
    let expected: BTreeMap<String, Vec<u8>> = files
        .iter()
        .map(|(name, bytes)| ((*name).to_owned(), bytes.clone()))
        .collect();
    for part_bytes in [None, Some(4096), Some(2_999_999)] {
        let hub = UploadHub::start().await.unwrap();
        hub.contents().part_bytes = part_bytes;
        // The hub is busy for a while.
        hub.contents().busy = 2;
        let writer = HubWriter::new(&hub.endpoint(), TOKEN, "me/cat").unwrap();
        writer.create(true).await.unwrap();
        let uploads = uploads(&home, &files);
        let sent = std::sync::atomic::AtomicU64::new(0);
        let add = |bytes| {
            sent.fetch_add(bytes, std::sync::atomic::Ordering::Relaxed);
        };
        let pushed = writer.push(&uploads, "first", &add).await.unwrap();
        assert_eq!(pushed.page, format!("{}/me/cat", hub.endpoint()));
        // Equal content is sent once.
        assert_eq!(pushed.sent_bytes, 1000 + 4096 * 3 + 3_000_001);
        assert_eq!(
            sent.load(std::sync::atomic::Ordering::Relaxed),
            pushed.sent_bytes + 3_000_001
        );
        let stored = hub.contents().stored;
        // What is there already is not sent again, and a repository that exists is not an error.
        writer.create(false).await.unwrap();
        let again = writer.push(&uploads, "second", &|_| {}).await.unwrap();
        assert_eq!(again.sent_bytes, 0);
        let contents = hub.contents();
        assert_eq!(contents.stored, stored);
        let repository = &contents.repositories["me/cat"];
        assert!(repository.files == expected, "{:?}", repository.files.keys());
        assert!(repository.private);
        assert_eq!(repository.commits, ["first", "second"]);
        assert_eq!(contents.leaked_tokens, 0, "the token is not for the storage");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn many_files_become_several_commits() {
    let home = Home::new();
    let hub = UploadHub::start().await.unwrap();
    let files: Vec<Upload> = (0..600)
        .map(|index| Upload {
            name: format!("samples/{index}.txt"),
            source: Source::Text(index.to_string()),
        })
        .collect();
    let writer = HubWriter::new(&hub.endpoint(), TOKEN, "me/cat").unwrap();
    writer.create(false).await.unwrap();
    writer.push(&files, "all", &|_| {}).await.unwrap();
    let contents = hub.contents();
    let repository = &contents.repositories["me/cat"];
    assert_eq!((repository.files.len(), repository.commits.len()), (600, 3));
    assert_eq!(repository.files["samples/599.txt"], b"599");
    drop(home);
}

#[tokio::test(flavor = "multi_thread")]
async fn refusals_have_the_hubs_reason_and_hostile_addresses_get_nothing() {
    let home = Home::new();
    let hub = UploadHub::start().await.unwrap();
    let refused = HubWriter::new(&hub.endpoint(), "wrong", "me/cat")
        .unwrap()
        .create(true)
        .await;
    let message = refused.unwrap_err().to_string();
    assert!(
        message.contains("Invalid credentials") && message.contains("/settings/tokens"),
        "{message}"
    );
    let refused = HubWriter::new(&hub.endpoint(), TOKEN, "others/cat")
        .unwrap()
        .create(true)
        .await;
    assert!(matches!(refused, Err(PushError::NotAllowed { .. })), "{refused:?}");
    let writer = HubWriter::new(&hub.endpoint(), TOKEN, "me/cat").unwrap();
    let large = uploads(&home, &[("model.safetensors", content(5000, 1))]);
    // The repository was not made.
    assert!(matches!(
        writer.push(&large, "m", &|_| {}).await,
        Err(PushError::Refused(_))
    ));
    writer.create(true).await.unwrap();
    for address in [
        hub.storage_endpoint(),
        "ftp://127.0.0.1/x".into(),
        "nonsense".into(),
        "file:///etc".into(),
    ] {
        hub.contents().storage_address = Some(address.clone());
        let refused = writer.push(&large, "m", &|_| {}).await.unwrap_err();
        let message = refused.to_string();
        assert!(message.contains("without TLS"), "{address}: {message}");
        let host = address.split("://").last().unwrap().split('/').next().unwrap();
        assert!(address == "nonsense" || message.contains(host), "{address}: {message}");
    }
    hub.contents().storage_address = None;
    // A proxy's page, or an answer that names no commit, is not a commit.
    for answer in ["<html>please log in</html>", "null", "{}", "{\"commitOid\": null}", ""] {
        hub.contents().commit_answer = Some(answer.into());
        let refused = writer.push(&large, "m", &|_| {}).await.unwrap_err();
        assert!(refused.to_string().contains("commit/main"), "{answer}: {refused}");
    }
    hub.contents().commit_answer = None;
    assert!(hub.contents().repositories["me/cat"].commits.is_empty());
    (hub.contents().stored, hub.contents().large) = (0, BTreeMap::new());
    // Parts that are none: no division by zero, no million requests.
    hub.contents().part_bytes = Some(5000 + 1);
    assert!(writer.push(&large, "m", &|_| {}).await.is_ok());
    let other = uploads(&home, &[("other.safetensors", content(30_000, 2))]);
    hub.contents().part_bytes = Some(2);
    let refused = writer.push(&other, "m", &|_| {}).await.unwrap_err();
    assert!(refused.to_string().contains("no usable parts"), "{refused}");
    let contents = hub.contents();
    assert_eq!(contents.stored, 1);
    assert!(!contents.repositories["me/cat"].files.contains_key("other.safetensors"));
}

/// Runs the program with the hub's address and a token.
async fn aitk(home: &Home, hub: &UploadHub, token: Option<&str>, args: &[&str]) -> Output {
    let mut command = home.aitk();
    command.args(args).env("HF_ENDPOINT", hub.endpoint());
    if let Some(token) = token {
        command.env("HF_TOKEN", token);
    }
    tokio::task::spawn_blocking(move || command.output().unwrap())
        .await
        .unwrap()
}

/// The config of a training that is uploaded to a private repository at its end.
fn training() -> String {
    format!(
        "job: extension
config:
  name: cat
  process:
    - type: sd_trainer
      training_folder: out
      trigger_word: zxc
      network: {{type: lora, linear: 4, linear_alpha: 4}}
      save: {{save_every: 2, push_to_hub: true, hf_repo_id: me/cat, hf_private: true}}
      datasets: [{{folder_path: data, resolution: [32]}}]
      train: {{batch_size: 1, steps: 3, lr: 1e-3, dtype: float32, skip_first_sample: true}}
      sample: {{prompts: [\"a photo of [trigger]\"], width: 32, height: 32, sample_steps: 1, sample_every: 3, sampler: ddim}}
      model: {{name_or_path: {TINY}}}
"
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn ctrl_c_stops_an_upload_and_names_the_command_that_continues_it() {
    let home = Home::new();
    let hub = UploadHub::start().await.unwrap();
    hub.contents().ignores_create = true;
    images(&home, "data", 2);
    home.write("cat.yaml", &training());
    let mut child = Command::new(assert_cmd::cargo::cargo_bin("aitk"))
        .args(["run", "cat.yaml", "--device", "cpu"])
        .env_clear()
        .env("HOME", home.path())
        .env("PATH", "/usr/bin:/bin")
        .env("HF_ENDPOINT", hub.endpoint())
        .env("HF_TOKEN", TOKEN)
        .current_dir(home.path())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    while hub.contents().unanswered == 0 {
        assert!(child.try_wait().unwrap().is_none(), "it ended before the upload");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    kill(Pid::from_raw(i32::try_from(child.id()).unwrap()), Signal::SIGINT).unwrap();
    let stopped = tokio::task::spawn_blocking(move || child.wait_with_output().unwrap());
    let stopped = stopped.await.unwrap();
    assert_eq!(code(&stopped), 130, "{}", err(&stopped));
    assert!(
        err(&stopped).contains("/out/cat --repo me/cat --private\n"),
        "{}",
        err(&stopped)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_training_is_uploaded_at_its_end_with_a_model_card_and_can_be_pushed_again() {
    let home = Home::new();
    let hub = UploadHub::start().await.unwrap();
    images(&home, "data", 2);
    home.write("cat.yaml", &training());
    let run = ["run", "cat.yaml", "--device", "cpu"];
    let early = aitk(&home, &hub, None, &run).await;
    assert_eq!(code(&early), 4, "{}", err(&early));
    assert!(err(&early).contains("HF_TOKEN"), "{}", err(&early));
    assert!(!home.path().join("out/cat").exists(), "refused before the training");
    // With `--recover` the other configs run.
    generate(&home, "one");
    let both = ["run", "cat.yaml", "one.yaml", "--recover", "--device", "cpu"];
    let recovered = aitk(&home, &hub, None, &both).await;
    assert_eq!(code(&recovered), 4, "{}", err(&recovered));
    assert!(
        err(&recovered).contains("cat.yaml: there is no token"),
        "{}",
        err(&recovered)
    );
    assert!(!home.path().join("out/cat").exists() && home.path().join("out/one").exists());

    let done = aitk(&home, &hub, Some(TOKEN), &run).await;
    assert_eq!(code(&done), 0, "{}", err(&done));
    assert!(err(&done).contains("/me/cat"), "{}", err(&done));
    let card = {
        let contents = hub.contents();
        let repository = &contents.repositories["me/cat"];
        assert!(repository.private);
        let names: Vec<&String> = repository.files.keys().collect();
        assert_eq!(names.len(), 5, "{names:?}");
        for name in ["README.md", "cat.safetensors", "cat_000000002.safetensors", "loss.png"] {
            assert!(repository.files.contains_key(name), "{name}: {names:?}");
        }
        let on_disk = std::fs::read(home.path().join("out/cat/cat.safetensors")).unwrap();
        assert_eq!(repository.files["cat.safetensors"], on_disk);
        String::from_utf8(repository.files["README.md"].clone()).unwrap()
    };
    // The model is a folder of this machine, whose path is nobody's business.
    assert!(!card.contains(TINY) && !card.contains("base_model"), "{card}");
    assert!(
        card.contains("instance_prompt: \"zxc\"") && card.contains("\"lora\""),
        "{card}"
    );
    assert!(
        card.contains("\"text\":\"a photo of zxc\"") && card.contains("__000000003_0."),
        "{card}"
    );

    // A README.md of the user's stays.
    home.write("out/cat/README.md", "# Mine");
    let push = ["push", "out/cat", "--repo", "me/cat", "--json"];
    let listed = aitk(
        &home,
        &hub,
        None,
        &["push", "out/cat", "--repo", "me/cat", "--dry-run", "--json"],
    )
    .await;
    assert_eq!(code(&listed), 0, "{}", err(&listed));
    let listed: serde_json::Value = serde_json::from_str(&out(&listed)).unwrap();
    assert_eq!(listed["files"].as_array().unwrap().len(), 5);
    let pushed = aitk(&home, &hub, Some(TOKEN), &push).await;
    assert_eq!(code(&pushed), 0, "{}", err(&pushed));
    let pushed: serde_json::Value = serde_json::from_str(&out(&pushed)).unwrap();
    assert_eq!(
        (pushed["files"].as_u64(), pushed["sent_bytes"].as_u64()),
        (Some(5), Some(0))
    );
    assert_eq!(hub.contents().repositories["me/cat"].files["README.md"], b"# Mine");

    // A token that the hub does not accept, or that may only read, is refused before the training.
    let again = std::fs::read_to_string(home.path().join("cat.yaml")).unwrap();
    home.write("new.yaml", &again.replace("name: cat", "name: new"));
    for (token, role) in [("wrong", "write"), (TOKEN, "read")] {
        hub.contents().role = role.into();
        let refused = aitk(&home, &hub, Some(token), &["run", "new.yaml", "--device", "cpu"]).await;
        assert_eq!(code(&refused), 4, "{}", err(&refused));
        assert!(!home.path().join("out/new").exists(), "{}", err(&refused));
    }
    hub.contents().role = "fineGrained".into();
    // A hub that refuses at the end: the training stays complete, and the code says so.
    home.write("cat.yaml", &again.replace("me/cat", "others/cat"));
    let refused = aitk(&home, &hub, Some(TOKEN), &run).await;
    assert_eq!(code(&refused), 4, "{}", err(&refused));
    assert!(
        err(&refused).contains("training is complete")
            && err(&refused).contains("aitk push")
            && err(&refused).contains("--repo others/cat --private`"),
        "{}",
        err(&refused)
    );
    for (args, expected) in [
        (vec!["push", "nowhere", "--repo", "me/cat"], 3),
        (vec!["push", "data", "--repo", "me/cat"], 3),
        (vec!["push", "out/cat", "--repo", "cat"], 2),
        (vec!["push", "out/cat", "--repo", "me/../cat"], 2),
    ] {
        let refused = aitk(&home, &hub, Some(TOKEN), &args).await;
        assert_eq!(code(&refused), expected, "{args:?}: {}", err(&refused));
    }
}
