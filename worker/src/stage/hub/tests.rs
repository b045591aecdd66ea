//! The hub client against a small server with faults.

mod access;
mod server;
mod shared_folders;

use super::*;
use futures::FutureExt;
use serde_json::json;
use server::{INDEX, Server, submitted_by_others};
use std::sync::Mutex;

#[tokio::test]
async fn a_model_is_fetched_once_and_an_interrupted_download_is_resumed() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start().await;
    let weights: Vec<u8> = (0..100_000_u32).flat_map(|at| at.to_le_bytes()).collect();
    server.publish(&[
        ("model_index.json", INDEX),
        ("README.md", b"x"),
        ("v1-5-pruned.safetensors", b"a single file"),
        ("unet/config.json", b"{}"),
        ("unet/diffusion_pytorch_model.safetensors", &weights),
        ("unet/diffusion_pytorch_model.fp16.safetensors", b"half"),
        ("unet/diffusion_pytorch_model.bin", b"pickle"),
        ("tokenizer/merges.txt", b""),
        ("safety_checker/model.safetensors", b"no"),
    ]);
    let big = "/org/tiny/resolve/abc123/unet/diffusion_pytorch_model.safetensors".to_owned();
    server.state.lock().unwrap().cut = Some(big.clone());
    let hub = server.hub(folder.path());
    let model = hub.fetch(&submitted_by_others("org/tiny"), &|_| {}).await.unwrap();
    assert_eq!(
        std::fs::read(model.join("unet/diffusion_pytorch_model.safetensors")).unwrap(),
        weights
    );
    assert!(model.join("tokenizer/merges.txt").exists() && model.join("model_index.json").exists());
    for absent in [
        "README.md",
        "v1-5-pruned.safetensors",
        "safety_checker",
        "unet/diffusion_pytorch_model.bin",
    ] {
        assert!(!model.join(absent).exists(), "{absent}");
    }
    assert!(!model.join("unet/diffusion_pytorch_model.fp16.safetensors").exists());
    let requests = server.requests();
    assert!(
        requests
            .iter()
            .any(|request| request.starts_with(&format!("{big} from "))),
        "{requests:?}"
    );

    assert_eq!(
        hub.fetch(&submitted_by_others("org/tiny"), &|_| {}).await.unwrap(),
        model
    );
    assert_eq!(server.requests().len(), 1);
    server.state.lock().unwrap().status = Some(503);
    assert_eq!(
        hub.fetch(&submitted_by_others("org/tiny"), &|_| {}).await.unwrap(),
        model
    );
    assert!(matches!(
        hub.fetch(&submitted_by_others("org/other"), &|_| {}).await,
        Err(HubError::Unavailable { .. })
    ));
}

#[tokio::test]
async fn a_download_that_gets_further_is_resumed_however_often_it_breaks() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start().await;
    let weights: Vec<u8> = (0..100_000_u32).flat_map(|at| at.to_le_bytes()).collect();
    let name = "unet/diffusion_pytorch_model.safetensors";
    server.publish(&[
        ("model_index.json", INDEX),
        ("unet/config.json", b"{}"),
        (name, &weights),
    ]);
    {
        let mut state = server.state.lock().unwrap();
        state.cut = Some(format!("/org/tiny/resolve/abc123/{name}"));
        state.more_cuts = MAX_TRIES + 2;
    }
    let hub = server.hub(folder.path());
    let model = hub.fetch(&submitted_by_others("org/tiny"), &|_| {}).await.unwrap();
    assert_eq!(std::fs::read(model.join(name)).unwrap(), weights);
    assert_eq!(server.state.lock().unwrap().cut, None);
}

/// Before, a list that the hub refused for a moment ended the attempt, and a file was asked for again after half a second, whatever the hub
/// said.
#[tokio::test]
async fn a_busy_hub_is_asked_again_when_it_says_so_unless_that_is_too_late() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start().await;
    let weights = "unet/diffusion_pytorch_model.safetensors";
    server.publish(&[
        ("model_index.json", INDEX),
        ("unet/config.json", b"{}"),
        (weights, b"weights"),
    ]);
    let list = "/api/models/org/tiny/revision/main?blobs=true".to_owned();
    let file = format!("/org/tiny/resolve/abc123/{weights}");
    let hub = server.hub(folder.path());
    server.state.lock().unwrap().busy = Some((file.clone(), 1, 86_400));
    let error = hub.fetch(&submitted_by_others("org/tiny"), &|_| {}).await.unwrap_err();
    let HubError::Unavailable { problem, .. } = &error else {
        panic!("{error}");
    };
    assert!(
        problem.contains("429") && problem.ends_with("asks to wait 86400 s"),
        "{problem}"
    );
    assert_eq!(server.requests().iter().filter(|path| **path == file).count(), 1);

    server.state.lock().unwrap().busy = Some((list.clone(), MAX_TRIES - 1, 0));
    let log = Mutex::new(Vec::new());
    let model = hub
        .fetch(&submitted_by_others("org/tiny"), &|line| log.lock().unwrap().push(line))
        .await
        .unwrap();
    assert_eq!(std::fs::read(model.join(weights)).unwrap(), b"weights");
    let lists = server.requests().iter().filter(|path| **path == list).count();
    assert_eq!(lists, MAX_TRIES as usize);
    let log = log.into_inner().unwrap();
    assert_eq!(log[0], "the hub is busy and asks to wait 0 s");
    // A version that is here is used at once.
    server.state.lock().unwrap().busy = Some((list.clone(), 1, 300));
    assert_eq!(
        hub.fetch(&submitted_by_others("org/tiny"), &|_| {}).await.unwrap(),
        model
    );
    assert_eq!(server.requests(), [list]);
}

/// Before, the request was for the name up to its `?` or `#`.
#[tokio::test]
async fn names_with_characters_that_mean_something_in_urls_are_fetched() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start().await;
    server.publish(&[
        ("model_index.json", INDEX),
        ("unet/model.safetensors", b"weights"),
        ("tokenizer/what?#1 %.txt", b"odd"),
    ]);
    {
        let files = &mut server.state.lock().unwrap().files;
        let odd = files
            .remove("/org/tiny/resolve/abc123/tokenizer/what?#1 %.txt")
            .unwrap();
        files.insert(
            "/org/tiny/resolve/abc123/tokenizer/what%3F%231%20%25.txt".to_owned(),
            odd,
        );
    }
    let hub = server.hub(folder.path());
    let model = hub.fetch(&submitted_by_others("org/tiny"), &|_| {}).await.unwrap();
    assert_eq!(std::fs::read(model.join("tokenizer/what?#1 %.txt")).unwrap(), b"odd");
}

#[tokio::test]
async fn without_requests_to_the_hub_the_models_that_are_here_are_used() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start().await;
    server.publish(&[
        ("model_index.json", INDEX),
        ("unet/config.json", b"{}"),
        ("unet/diffusion_pytorch_model.safetensors", b"weights"),
    ]);
    let request = submitted_by_others("org/tiny");
    let model = server.hub(folder.path()).fetch(&request, &|_| {}).await.unwrap();
    assert!(!server.requests().is_empty());
    let hub = Hub {
        offline: true,
        ..server.hub(folder.path())
    };
    let log = Mutex::new(Vec::new());
    let found = hub.fetch(&request, &|line| log.lock().unwrap().push(line)).await;
    assert_eq!(found.unwrap(), model);
    let log = log.into_inner().unwrap();
    assert_eq!(log, ["HF_HUB_OFFLINE is set; using the cached version of org/tiny"]);
    let other = hub.fetch(&submitted_by_others("org/other"), &|_| {}).await;
    assert!(matches!(other, Err(HubError::Offline { .. })), "{other:?}");
    assert!(server.requests().is_empty());
}

/// Before, nothing removed the download of a model that no later job needed, and it could keep a disk full.
#[tokio::test]
async fn an_interrupted_download_that_nobody_resumes_is_removed() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start().await;
    server.publish(&[
        ("model_index.json", INDEX),
        ("unet/config.json", b"{}"),
        ("unet/model.safetensors", b"weights"),
    ]);
    // `unet/config.json.part` is changed last, so that its age counts.
    let interrupted = |below: &str, name: &str, age: Duration| {
        let partial = folder.path().join(below).join(name);
        let file = partial.join("unet/config.json.part");
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(&file, "{").unwrap();
        let old = SystemTime::now() - PARTIAL_AGE * 2;
        for folder in [partial.clone(), partial.join("unet")] {
            File::open(folder).unwrap().set_modified(old).unwrap();
        }
        let written = File::options().write(true).open(&file).unwrap();
        written.set_modified(SystemTime::now() - age).unwrap();
        partial
    };
    let day = Duration::from_secs(24 * 3600);
    let hub = server.hub(folder.path());
    let resumed = interrupted("", "partial-org--tiny@abc123", day * 30);
    let (old, new) = (
        interrupted("", "partial-org--old@1", day * 8),
        interrupted("", "partial-org--new@1", day),
    );
    let model = hub.fetch(&submitted_by_others("org/tiny"), &|_| {}).await.unwrap();
    assert!(model.is_dir() && !resumed.exists());
    assert!(!old.exists() && new.is_dir());

    // At the start of the worker, in every folder in which nothing is fetched.
    let below = ["", EXTRAS_FOLDER, PRIVATE_FOLDER, "users/1234", "users/1234/extras"];
    let all = below.map(|below| {
        let partial = interrupted(below, "partial-org--old@1", day * 8);
        std::fs::write(folder.path().join(below).join(LOCK_FILE), "").unwrap();
        partial
    });
    let lock = File::open(folder.path().join(PRIVATE_FOLDER).join(LOCK_FILE)).unwrap();
    lock.try_lock().unwrap();
    hub.clean_up();
    assert_eq!(all.map(|partial| partial.exists()), [false, false, true, false, false]);
    assert!(new.is_dir() && model.is_dir());
    assert_eq!(version_name("partial-org/x", "1"), "model-partial-org--x@1");
}

#[tokio::test]
async fn files_that_differ_from_the_announcement_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start().await;
    server.publish(&[("model_index.json", INDEX), ("unet/model.safetensors", b"right")]);
    let key = "/org/tiny/resolve/abc123/unet/model.safetensors".to_owned();
    server
        .state
        .lock()
        .unwrap()
        .files
        .insert(key.clone(), b"wrong".to_vec());
    let hub = server.hub(folder.path());
    let error = hub.fetch(&submitted_by_others("org/tiny"), &|_| {}).await.unwrap_err();
    assert!(
        matches!(&error, HubError::Damaged { file, .. } if file == "unet/model.safetensors"),
        "{error}"
    );
    server
        .state
        .lock()
        .unwrap()
        .files
        .insert(key, b"right and more".to_vec());
    assert!(matches!(
        hub.fetch(&submitted_by_others("org/tiny"), &|_| {}).await,
        Err(HubError::Damaged { .. })
    ));

    server.publish(&[("model_index.json", INDEX), ("unet/model.bin", b"pickle")]);
    let error = hub.fetch(&submitted_by_others("org/tiny"), &|_| {}).await.unwrap_err();
    assert!(
        matches!(&error, HubError::Layout { problem, .. } if problem.contains("pickle")),
        "{error}"
    );
    server.publish(&[
        ("model_index.json", INDEX),
        ("unet/model.safetensors", b"x"),
        ("unet/..\\x.json", b"x"),
    ]);
    let error = hub.fetch(&submitted_by_others("org/tiny"), &|_| {}).await.unwrap_err();
    assert!(matches!(&error, HubError::Layout { .. }), "{error}");
    server.publish(&[("config.json", b"{}"), ("vae.safetensors", b"x"), ("sub/y.json", b"{}")]);
    let part = hub.fetch(&submitted_by_others("org/tiny"), &|_| {}).await.unwrap();
    assert!(part.join("vae.safetensors").exists() && !part.join("sub").exists());
    for (status, expected) in [(401, "licence"), (404, "not found")] {
        server.state.lock().unwrap().status = Some(status);
        let message = hub
            .fetch(&submitted_by_others("org/tiny"), &|_| {})
            .await
            .unwrap_err()
            .to_string();
        assert!(message.contains(expected), "{message}");
    }
}

#[tokio::test]
async fn a_model_that_is_larger_than_its_worker_allows_is_not_downloaded() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start().await;
    server.publish(&[("config.json", b"{}"), ("model.safetensors", &[7; 100])]);
    let hub = |largest_model| Hub {
        largest_model,
        ..server.hub(folder.path())
    };
    let request = submitted_by_others("org/tiny");
    let error = hub(101).fetch(&request, &|_| {}).await.unwrap_err();
    let message = error.to_string();
    assert!(
        matches!(error, HubError::TooLarge { .. }) && message.contains("--largest-model-gib"),
        "{message}"
    );
    let requests = server.requests();
    assert!(
        !requests.iter().any(|request| request.contains("/resolve/")),
        "{requests:?}"
    );
    // The user of a job in place owns the machine.
    let own = ModelRequest {
        in_place: true,
        ..request
    };
    let elsewhere = Hub {
        folder: folder.path().join("own"),
        ..hub(101)
    };
    elsewhere.fetch(&own, &|_| {}).await.unwrap();
    hub(102).fetch(&request, &|_| {}).await.unwrap();

    // Sizes whose sum has more than 64 bits.
    let sibling = |name: &str| json!({"rfilename": name, "size": u64::MAX});
    let siblings = [
        json!({"rfilename": "config.json", "size": 2}),
        sibling("a.safetensors"),
        sibling("b.safetensors"),
    ];
    let list = json!({"sha": "def456", "siblings": siblings}).to_string().into_bytes();
    let url = "/api/models/org/tiny/revision/main?blobs=true".to_owned();
    server.state.lock().unwrap().files.insert(url, list);
    let error = hub(102).fetch(&request, &|_| {}).await.unwrap_err();
    assert!(matches!(error, HubError::TooLarge { .. }), "{error}");
    let error = hub(102).fetch(&own, &|_| {}).await.unwrap_err();
    assert!(matches!(error, HubError::DiskFull { .. }), "{error}");
}

#[tokio::test]
async fn a_download_starts_only_if_the_disk_has_space_for_what_is_missing() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start().await;
    server.publish(&[("config.json", b"{}"), ("model.safetensors", &[7; 100])]);
    let hub = Hub {
        disk_space: |_| Some(DiskSpace { free: 70, reserve: 10 }),
        ..server.hub(folder.path())
    };
    let request = submitted_by_others("org/tiny");
    let error = hub.fetch(&request, &|_| {}).await.unwrap_err();
    let message = error.to_string();
    assert!(
        matches!(error, HubError::DiskFull { .. }) && message.contains(&folder.path().display().to_string()),
        "{message}"
    );
    let requests = server.requests();
    assert!(
        !requests.iter().any(|request| request.contains("/resolve/")),
        "{requests:?}"
    );
    // 42 bytes of an earlier download: 58 of the weights and 2 of the config are missing.
    let part = folder.path().join("partial-org--tiny@abc123/model.safetensors.part");
    std::fs::write(part, [7_u8; 42]).unwrap();
    let model = hub.fetch(&request, &|_| {}).await.unwrap();
    assert_eq!(std::fs::read(model.join("model.safetensors")).unwrap(), [7_u8; 100]);
}

#[tokio::test]
async fn a_model_that_is_here_does_not_wait_for_the_download_of_another_job() {
    let folder = tempfile::tempdir().unwrap();
    let commit = "a".repeat(40);
    let cached = folder.path().join(version_name("org/tiny", &commit));
    std::fs::create_dir(&cached).unwrap();
    let nowhere = "http://127.0.0.1:1".to_owned();
    let hub = Hub::new(folder.path().to_owned(), nowhere, None, AllowList::default());
    let _downloading = hub.download_lock.lock().await;
    let request = ModelRequest {
        revision: Some(&commit),
        ..submitted_by_others("org/tiny")
    };
    let log = |_: String| {};
    let found = hub.fetch(&request, &log).now_or_never().expect("it waits for nothing");
    assert_eq!(found.unwrap(), cached);
    let of_user = UserName::new("ada");
    let name = ContentHash::of(of_user.as_str().as_bytes()).to_hex();
    let private = folder
        .path()
        .join(USERS_FOLDER)
        .join(name)
        .join(version_name("org/tiny", &commit));
    std::fs::create_dir_all(&private).unwrap();
    let found = hub.fetch_for(&of_user, "t", &request, &log).now_or_never();
    assert_eq!(found.expect("it waits for nothing").unwrap(), private);
}

#[tokio::test]
async fn another_job_waits_for_a_download_and_its_log_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start().await;
    server.publish(&[
        ("config.json", b"{}"),
        ("diffusion_pytorch_model.safetensors", b"weights"),
    ]);
    let hub = server.hub(folder.path());
    let downloading = hub.download_lock.lock().await;
    let lines = Mutex::new(Vec::new());
    let (waiting, mut waits) = tokio::sync::mpsc::channel(1);
    let log = |line: String| {
        if line.starts_with("waiting") {
            let _ = waiting.try_send(());
        }
        lines.lock().unwrap().push(line);
    };
    let request = submitted_by_others("org/tiny");
    let other_job = async {
        waits.recv().await;
        drop(downloading);
    };
    let (fetched, ()) = tokio::join!(hub.fetch(&request, &log), other_job);
    fetched.unwrap();
    assert!(lines.lock().unwrap()[0].contains("for another job"));
}

#[tokio::test]
async fn the_commit_of_the_job_is_fetched_even_if_main_has_moved() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start().await;
    let (old, new) = ("a".repeat(40), "b".repeat(40));
    let files = |text: &'static [u8]| [("config.json", b"{}".as_slice()), ("model.safetensors", text)];
    server.publish_at(&old, &files(b"old"));
    server.publish_at(&new, &files(b"new"));
    server.publish(&files(b"main"));
    let hub = server.hub(folder.path());
    let at = |revision| ModelRequest {
        revision,
        ..submitted_by_others("org/tiny")
    };
    for (revision, content) in [
        (Some(old.as_str()), b"old".as_slice()),
        (Some(&new), b"new"),
        (None, b"main"),
        // A retry, after other versions were fetched.
        (Some(&old), b"old"),
    ] {
        let path = hub.fetch(&at(revision), &|_| {}).await.unwrap();
        assert_eq!(std::fs::read(path.join("model.safetensors")).unwrap(), content);
    }
    // If the hub is unreachable, a job gets its commit or an error.
    server.state.lock().unwrap().status = Some(503);
    let path = hub.fetch(&at(Some(&old)), &|_| {}).await.unwrap();
    assert_eq!(std::fs::read(path.join("model.safetensors")).unwrap(), b"old");
    let absent = "c".repeat(40);
    assert!(matches!(
        hub.fetch(&at(Some(&absent)), &|_| {}).await,
        Err(HubError::Unavailable { .. })
    ));
    // An answer for another commit is an error.
    server.state.lock().unwrap().status = None;
    let list = json!({"sha": new, "siblings": []}).to_string().into_bytes();
    server
        .state
        .lock()
        .unwrap()
        .files
        .insert(format!("/api/models/org/tiny/revision/{absent}?blobs=true"), list);
    let error = hub.fetch(&at(Some(&absent)), &|_| {}).await.unwrap_err().to_string();
    assert!(error.contains("instead of"), "{error}");
}

#[tokio::test]
async fn an_answer_that_is_not_json_means_that_the_hub_is_unavailable() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start().await;
    let hub = server.hub(folder.path());
    for (page, is_away) in [
        ("<html>log in</html>", true),
        (r#"{"sha": "abc1"#, true),
        (r#"{"sha": 7}"#, false),
    ] {
        server.state.lock().unwrap().files.insert(
            "/api/models/org/tiny/revision/main?blobs=true".to_owned(),
            page.as_bytes().to_vec(),
        );
        let error = hub.fetch(&submitted_by_others("org/tiny"), &|_| {}).await.unwrap_err();
        assert_eq!(
            matches!(error, HubError::Unavailable { .. }),
            is_away,
            "{page}: {error}"
        );
    }
}

#[test]
fn the_commit_is_read_from_the_name_of_the_cached_folder() {
    let commit = "0a".repeat(20);
    let at = |name: &str| commit_of(&Path::new("/hub").join(name)).map(str::to_owned);
    assert_eq!(at(&format!("org--tiny@{commit}")), Some(commit.clone()));
    assert_eq!(at("org--tiny@abc123"), None);
    assert_eq!(at("org--tiny"), None);
}

#[tokio::test]
async fn of_extras_everything_but_the_denoiser_is_fetched() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start().await;
    server.publish(&[
        (
            "model_index.json",
            br#"{"transformer": ["d", "X"], "text_encoder": ["t", "Y"], "vae": ["d", "Z"]}"#,
        ),
        ("transformer/config.json", b"{}"),
        ("transformer/diffusion_pytorch_model.safetensors", b"large"),
        ("text_encoder/model.safetensors", b"text"),
        ("vae/diffusion_pytorch_model.safetensors", b"vae"),
    ]);
    let hub = server.hub(folder.path());
    let whole = submitted_by_others("org/tiny");
    let extras = ModelRequest {
        parts: RepositoryParts::of_key("config.process[0].model.extras_name_or_path"),
        ..whole
    };
    assert_eq!(
        RepositoryParts::of_key("config.process[0].model.name_or_path"),
        whole.parts
    );

    let fetched = hub.fetch(&extras, &|_| {}).await.unwrap();
    assert!(fetched.join("vae/diffusion_pytorch_model.safetensors").exists());
    let transformer = std::fs::read_dir(fetched.join("transformer")).unwrap().flatten();
    let names: Vec<_> = transformer.map(|entry| entry.file_name()).collect();
    assert_eq!(names, ["config.json"]);
    assert!(
        !server
            .requests()
            .iter()
            .any(|request| request.contains("transformer/diff"))
    );
    // Without the hub they are found again; the whole model is not there.
    server.state.lock().unwrap().status = Some(503);
    assert_eq!(hub.fetch(&extras, &|_| {}).await.unwrap(), fetched);
    assert!(matches!(
        hub.fetch(&whole, &|_| {}).await,
        Err(HubError::Unavailable { .. })
    ));
    // A whole model serves as extras too.
    server.state.lock().unwrap().status = None;
    let model = hub.fetch(&whole, &|_| {}).await.unwrap();
    assert!(model.join("transformer/diffusion_pytorch_model.safetensors").exists());
    assert_eq!(hub.fetch(&extras, &|_| {}).await.unwrap(), model);
}
