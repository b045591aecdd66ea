//! Certificates: each violation over real TLS is refused and found in the audit log.

mod commands;
mod expiry;
mod joining;
mod listener;
mod unauthenticated;

use crate::support::{eventually, within};
use aitk_common::hash::ContentHash;
use aitk_common::id::UserName;
use aitk_common::security::ca::CertificateRequestWithKey;
use aitk_coordinator::{Config, CoordinatorHandle, PkiConfig, TlsFiles, ca_folder, init, start};
use aitk_proto::client::{Clients, ConnectError, Credentials, Trust, connect, connect_with};
use aitk_proto::v1;
use std::time::Duration;
use tonic::Status;

/// A coordinator with a certificate authority, on loopback.
pub(crate) struct PkiServer {
    pub(crate) running: CoordinatorHandle,
    /// Clients with the administrator's token.
    pub(crate) admin: Clients,
    pub(crate) dir: tempfile::TempDir,
    pub(crate) ca: ContentHash,
    config: Config,
}

/// A worker that joined: what its files contain.
#[derive(Clone)]
pub(crate) struct JoinedWorker {
    pub(crate) name: String,
    pub(crate) worker_id: String,
    certificate: String,
    key: String,
    trust: Trust,
}

impl PkiServer {
    pub(crate) async fn start() -> Self {
        Self::start_with(|_| {}).await
    }

    pub(crate) async fn start_with(change: impl FnOnce(&mut PkiConfig)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let ca = init(dir.path(), &[]).unwrap();
        assert!(ca.created);
        let mut pki = PkiConfig::new(ca_folder(dir.path()));
        change(&mut pki);
        let config = Config {
            bind: "127.0.0.1:0".parse().unwrap(),
            pki: Some(pki),
            ..Config::new(dir.path())
        };
        Self::run(dir, config, ca.hash).await
    }

    async fn run(dir: tempfile::TempDir, config: Config, ca: ContentHash) -> Self {
        let running = start(config.clone()).await.unwrap();
        let token = format!("{}.{ca}", running.token);
        let admin = within(connect(&running.url(), &token, None)).await.unwrap();
        Self {
            running,
            admin,
            dir,
            ca,
            config,
        }
    }

    /// Shuts the coordinator down and starts it again on the same folder, on another port.
    pub(crate) async fn restart(self) -> Self {
        let Self {
            running,
            dir,
            config,
            ca,
            admin,
        } = self;
        drop(admin);
        within(running.shutdown()).await;
        Self::run(dir, config, ca).await
    }

    pub(crate) fn url(&self) -> String {
        self.running.url()
    }

    /// Creates a join token. Returns its text and its id.
    pub(crate) async fn join_token(&self, name: &str) -> (String, String) {
        self.join_token_for(name, Duration::from_secs(600)).await
    }

    pub(crate) async fn join_token_for(&self, name: &str, lifetime: Duration) -> (String, String) {
        let request = v1::CreateJoinTokenRequest {
            name: name.into(),
            expires_in_ms: lifetime.as_millis() as u64,
        };
        let reply = within(self.admin.admin.clone().create_join_token(request))
            .await
            .unwrap()
            .into_inner();
        (reply.text, reply.id)
    }

    /// Joins with a token, and asks for this name if there is one.
    pub(crate) async fn join(&self, text: &str, name: Option<&str>) -> Result<JoinedWorker, Status> {
        self.join_as(text, name, "").await
    }

    pub(crate) async fn join_as(
        &self,
        text: &str,
        name: Option<&str>,
        worker_id: &str,
    ) -> Result<JoinedWorker, Status> {
        let request = CertificateRequestWithKey::new(name.map(UserName::new).as_ref()).unwrap();
        let wire = v1::JoinRequest {
            request: Some(request.request.into()),
            host: "gpu.lab".into(),
            worker_id: worker_id.into(),
        };
        let clients = within(connect(&self.url(), text, None)).await.unwrap();
        let reply = within(clients.workers.clone().join(wire)).await?.into_inner();
        assert_eq!(reply.ca_sha256, self.ca.to_hex());
        Ok(JoinedWorker {
            name: reply.name,
            worker_id: reply.worker_id,
            certificate: reply.certificate.unwrap().certificate,
            key: request.key_pem,
            trust: Trust::Authority(self.ca),
        })
    }

    /// Lets a worker with this name join.
    pub(crate) async fn join_worker(&self, name: &str) -> JoinedWorker {
        let (text, _) = self.join_token(name).await;
        self.join(&text, None).await.unwrap()
    }

    pub(crate) async fn certificates(&self) -> Vec<v1::WorkerCertificateInfo> {
        let request = v1::ListCertificatesRequest::default();
        let reply = within(self.admin.admin.clone().list_certificates(request)).await;
        reply.unwrap().into_inner().certificates
    }

    pub(crate) async fn revoke(&self, name: &str) -> Result<v1::RevokeWorkerReply, Status> {
        let request = v1::RevokeWorkerRequest { name: name.into() };
        Ok(within(self.admin.admin.clone().revoke_worker(request))
            .await?
            .into_inner())
    }
}

impl JoinedWorker {
    pub(crate) async fn connect(&self, server: &PkiServer) -> Result<Clients, ConnectError> {
        let credentials = Credentials::with_certificate(&self.certificate, &self.key, self.trust.clone());
        within(connect_with(&server.url(), credentials, None)).await
    }

    /// A channel without tokens or other headers.
    pub(crate) async fn channel(&self, server: &PkiServer) -> tonic::transport::Channel {
        use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity};
        let ca = std::fs::read(server.dir.path().join("ca/ca.pem")).unwrap();
        let tls = ClientTlsConfig::new()
            .ca_certificate(Certificate::from_pem(ca))
            .identity(Identity::from_pem(&self.certificate, &self.key));
        let endpoint = Endpoint::from_shared(server.url()).unwrap().tls_config(tls).unwrap();
        endpoint.connect().await.unwrap()
    }

    /// Renews the certificate over a connection that uses the current one.
    pub(crate) async fn renew(&self, clients: &Clients, name: &str) -> Result<Self, Status> {
        let request = CertificateRequestWithKey::new(Some(&UserName::new(name))).unwrap();
        let wire = v1::RenewRequest {
            request: Some(request.request.into()),
        };
        let reply = within(clients.workers.clone().renew(wire)).await?.into_inner();
        Ok(Self {
            certificate: reply.certificate.unwrap().certificate,
            key: request.key_pem,
            ..self.clone()
        })
    }

    /// Connects and makes a small call. The error says why TLS or the coordinator refused the certificate.
    pub(crate) async fn try_call(&self, server: &PkiServer) -> Result<(), String> {
        let clients = self.connect(server).await.map_err(|error| error.to_string())?;
        let info = within(clients.jobs.clone().info(v1::InfoRequest {})).await;
        info.map(drop)
            .map_err(|status| format!("{:?}: {}", status.code(), status.message()))
    }
}

/// Waits for a matching line of the audit log.
pub(crate) async fn wait_for_audit_line(
    server: &PkiServer,
    what: &str,
    fits: impl Fn(&v1::AuditLine) -> bool,
) -> v1::AuditLine {
    crate::access::wait_for_audit_line(&server.admin, what, fits).await
}
