//! Which jobs may use a model that was fetched with a token.

use super::super::*;
use super::server::{INDEX, Server, submitted_by_others};

#[tokio::test]
async fn the_token_is_used_only_for_repositories_that_its_owner_lists() {
    for gated in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let server = Server::start().await;
        server.publish(&[("config.json", b"{}"), ("model.safetensors", b"secret")]);
        if gated {
            let list = "/api/models/org/tiny/revision/main?blobs=true";
            let mut state = server.state.lock().unwrap();
            let open = String::from_utf8(state.files[list].clone()).unwrap();
            let closed = open.replacen('{', r#"{"gated":"auto","#, 1);
            state.files.insert(list.to_owned(), closed.into_bytes());
            state.gated = true;
        } else {
            server.state.lock().unwrap().private = true;
        }
        let refused = |hub: Hub| async move {
            let error = hub.fetch(&submitted_by_others("org/tiny"), &|_| {}).await.unwrap_err();
            assert!(
                matches!(error, HubError::NotFound { .. } | HubError::Denied { .. })
                    && error.to_string().contains("--hub-allow"),
                "{error}"
            );
        };
        refused(server.hub(folder.path())).await;
        refused(server.hub_with_allow_list(folder.path(), "other/*")).await;
        assert_eq!(server.state.lock().unwrap().tokens, 0, "the token was sent");

        let listed = server.hub_with_allow_list(folder.path(), "org/*");
        let path = listed.fetch(&submitted_by_others("org/tiny"), &|_| {}).await.unwrap();
        assert_eq!(std::fs::read(path.join("model.safetensors")).unwrap(), b"secret");
        assert!(server.state.lock().unwrap().tokens > 0);
        // The cached model is still private, with a connection and without.
        refused(server.hub(folder.path())).await;
        server.state.lock().unwrap().status = Some(503);
        assert!(
            server
                .hub(folder.path())
                .fetch(&submitted_by_others("org/tiny"), &|_| {})
                .await
                .is_err()
        );
        assert_eq!(
            listed.fetch(&submitted_by_others("org/tiny"), &|_| {}).await.unwrap(),
            path
        );
        // The user's own job runs in place and may use the token.
        server.state.lock().unwrap().status = None;
        let own = ModelRequest {
            in_place: true,
            ..submitted_by_others("org/tiny")
        };
        assert_eq!(server.hub(folder.path()).fetch(&own, &|_| {}).await.unwrap(), path);
    }
}

#[tokio::test]
async fn public_models_are_fetched_without_the_token() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start().await;
    server.publish(&[("config.json", b"{}"), ("model.safetensors", b"x")]);
    let hub = server.hub_with_allow_list(folder.path(), "org/*");
    hub.fetch(&submitted_by_others("org/tiny"), &|_| {}).await.unwrap();
    assert_eq!(server.state.lock().unwrap().tokens, 0);
}

#[tokio::test]
async fn models_fetched_with_a_users_token_are_for_their_jobs_only() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start().await;
    server.publish(&[
        ("model_index.json", INDEX),
        ("unet/config.json", b"{}"),
        ("unet/diffusion_pytorch_model.safetensors", b"weights"),
        ("tokenizer/merges.txt", b""),
    ]);
    server.state.lock().unwrap().private = true;
    // The worker has no token of its own.
    let hub = Hub {
        token: None,
        ..server.hub(folder.path())
    };
    let (anna, ben) = (UserName::new("anna"), UserName::new("ben"));
    let request = submitted_by_others("org/tiny");
    let denied = hub.fetch(&request, &|_| {}).await.unwrap_err();
    assert!(denied.to_string().contains("cluster.hub_token"), "{denied}");
    server.state.lock().unwrap().status = None;
    let model = hub.fetch_for(&anna, "t", &request, &|_| {}).await.unwrap();
    assert!(
        model.starts_with(folder.path().join("users").join(ContentHash::of(b"anna").to_hex())),
        "{}",
        model.display()
    );
    for token in ["wrong", ""] {
        server.state.lock().unwrap().status = None;
        assert!(hub.fetch_for(&ben, token, &request, &|_| {}).await.is_err());
    }
    server.state.lock().unwrap().status = None;
    assert!(
        hub.fetch(&request, &|_| {}).await.is_err(),
        "a model fetched with a user's token is private"
    );
    // If the hub is unreachable, only she may use the cached model.
    server.state.lock().unwrap().status = Some(503);
    assert_eq!(hub.fetch_for(&anna, "t", &request, &|_| {}).await.unwrap(), model);
    assert!(hub.fetch_for(&ben, "t", &request, &|_| {}).await.is_err());
}
