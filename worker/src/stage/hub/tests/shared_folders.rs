//! Folders that several programs use: the cache of Hugging Face's libraries, and a worker's own.

use super::super::*;
use super::server::{Server, submitted_by_others};

/// A cache as Hugging Face's libraries write it: files are links to `blobs`.
fn write_shared_cache(folder: &Path, files: &[(&str, &[u8])]) {
    let repo = folder.join("models--org--tiny");
    std::fs::create_dir_all(repo.join("blobs")).unwrap();
    for (number, (name, content)) in files.iter().enumerate() {
        let blob = repo.join("blobs").join(number.to_string());
        std::fs::write(&blob, content).unwrap();
        let link = repo.join("snapshots/abc123").join(name);
        std::fs::create_dir_all(link.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(blob, link).unwrap();
    }
}

#[tokio::test]
async fn a_job_in_place_takes_what_hugging_faces_libraries_have_downloaded() {
    let (folder, shared) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let server = Server::start().await;
    let files: &[(&str, &[u8])] = &[
        ("config.json", b"{\"a\": 1}"),
        ("diffusion_pytorch_model.safetensors", b"whole"),
        ("other.safetensors", b"right"),
        ("cut.safetensors", b"all of it"),
        ("outside.json", b"{}"),
    ];
    server.publish(files);
    write_shared_cache(
        shared.path(),
        &[
            files[0],
            files[1],
            ("other.safetensors", b"wrong"),
            ("cut.safetensors", b"all"),
        ],
    );
    // A link that leads out of the repository's folder.
    let outside = shared.path().join("outside.json");
    std::fs::write(&outside, b"[]").unwrap();
    let snapshot = shared.path().join("models--org--tiny/snapshots/abc123");
    std::os::unix::fs::symlink(&outside, snapshot.join("outside.json")).unwrap();

    let hub = |name: &str| Hub {
        shared_cache: Some(SharedCache::new(shared.path().to_owned())),
        ..server.hub(&folder.path().join(name))
    };
    let downloaded = |requests: Vec<String>| -> Vec<String> {
        let files = requests.into_iter().filter_map(|request| {
            let (_, file) = request.split_once("/resolve/abc123/")?;
            Some(file.split(' ').next().unwrap_or(file).to_owned())
        });
        let mut files: Vec<String> = files.collect();
        files.sort();
        files
    };
    let in_place = ModelRequest {
        in_place: true,
        ..submitted_by_others("org/tiny")
    };
    // A file that is linked takes no space, whatever its content: 2 bytes of outside.json and 9 of cut.safetensors are missing.
    let on_disk = |disk_space: fn(&Path) -> Option<DiskSpace>| Hub {
        disk_space,
        ..hub("run")
    };
    let small = on_disk(|_| Some(DiskSpace { free: 10, reserve: 0 }));
    let error = small.fetch(&in_place, &|_| {}).await.unwrap_err();
    assert!(matches!(error, HubError::DiskFull { .. }), "{error}");
    server.requests();
    let large = on_disk(|_| Some(DiskSpace { free: 11, reserve: 0 }));
    let model = large.fetch(&in_place, &|_| {}).await.unwrap();
    for (name, content) in files {
        assert_eq!(std::fs::read(model.join(name)).unwrap(), *content, "{name}");
    }
    assert_eq!(
        downloaded(server.requests()),
        ["cut.safetensors", "other.safetensors", "outside.json"]
    );
    let entries = std::fs::read_dir(&model).unwrap();
    assert_eq!(entries.count(), files.len(), "nothing else lies there");

    // Jobs of other users do not see what this user has.
    hub("submitted")
        .fetch(&submitted_by_others("org/tiny"), &|_| {})
        .await
        .unwrap();
    assert_eq!(downloaded(server.requests()).len(), files.len());
}

#[tokio::test]
async fn two_programs_with_one_folder_fetch_a_model_once() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start().await;
    server.publish(&[("config.json", b"{}"), ("model.safetensors", b"x")]);
    let (first, second) = (server.hub(folder.path()), server.hub(folder.path()));
    let request = submitted_by_others("org/tiny");
    let (one, two) = tokio::join!(first.fetch(&request, &|_| {}), second.fetch(&request, &|_| {}));
    assert_eq!(one.unwrap(), two.unwrap());
    let requests = server.requests();
    let of_weights = requests.iter().filter(|request| request.contains("model.safetensors"));
    assert_eq!(of_weights.count(), 1, "{requests:?}");
}
