//! Several coordinators on one PostgreSQL, with one token and one authority, and the workers that join them.

use crate::cluster::{Endpoint, Setup, TestCluster};
use crate::namespaces::Namespaces;
use crate::programs::program;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);
/// In the coordinator's own format, because only such a token can contain the authority's hash.
const TOKEN: &str = "aitk_0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

/// Starts a coordinator for each setup, on one database. Workers and clients get all addresses. The first coordinator creates
/// the certificate authority, and leads.
///
/// # Panics
/// When one does not start.
#[must_use]
pub fn start(database: &str, setups: Vec<Setup>) -> Vec<TestCluster> {
    let authority = setups[0].data_dir().join("ca");
    let servers: Vec<String> = setups
        .iter()
        .map(|setup| format!("https://{}", setup.address))
        .collect();
    let servers = servers.join(",");
    let mut clusters: Vec<TestCluster> = Vec::new();
    for mut setup in setups {
        let data = setup.data_dir();
        std::fs::create_dir_all(&data).expect("the folder can be made");
        write_secret(&data.join("token"), TOKEN);
        if authority.exists() {
            // Copied with its permissions, as an administrator does.
            run(Command::new("cp").arg("-a").arg(&authority).arg(&data));
        } else {
            let mut init = Command::new(program("aitk-coordinator"));
            run(init.args(["init", "--data-dir"]).arg(&data));
        }
        let variables = [
            ("AITK_DATABASE", database.to_owned()),
            ("AITK_ADVERTISE", format!("https://{}", setup.address)),
            ("AITK_HOSTNAMES", setup.address.ip().to_string()),
        ];
        let variables = variables.into_iter().map(|(key, value)| (key.to_owned(), value));
        setup.coordinator_environment.extend(variables);
        let is_first = clusters.is_empty();
        let cluster = TestCluster::start_with(setup);
        if is_first {
            let mut log = cluster.coordinator.log_from_start();
            crate::eventually("a leader", LIMIT, &[&cluster.coordinator], || {
                log.lines().iter().any(|line| leads(line)).then_some(())
            });
        }
        clusters.push(cluster);
    }
    let invitation = invite(&clusters[0], &servers, "nobody");
    let (_, hash) = invitation
        .split_once('.')
        .expect("an invitation contains the authority's hash");
    for cluster in &mut clusters {
        let token = cluster.setup().folder.join("token");
        write_secret(&token, &format!("{TOKEN}.{hash}"));
        let servers = servers.clone();
        cluster.set_endpoint(Endpoint { servers, token });
    }
    clusters
}

/// Whether this log line says that the coordinator leads now.
#[must_use]
pub fn leads(line: &str) -> bool {
    line.contains("this coordinator leads")
}

/// Lets a worker join.
///
/// # Panics
/// When it cannot join.
pub fn join(cluster: &TestCluster, name: &str, namespaces: &Namespaces) {
    let servers = servers(cluster);
    let invitation = invite(cluster, &servers, name);
    run_until_success(join_command(cluster, name, namespaces).arg(invitation), cluster);
}

fn servers(cluster: &TestCluster) -> String {
    let servers = cluster
        .setup()
        .endpoint
        .as_ref()
        .map(|endpoint| endpoint.servers.clone());
    servers.expect("the cluster has an endpoint")
}

/// The command with which a worker joins. Its last argument, the join token, has to be added.
///
/// # Panics
/// When the cluster has one coordinator without an authority.
#[must_use]
pub fn join_command(cluster: &TestCluster, name: &str, namespaces: &Namespaces) -> Command {
    let mut join = cluster.command_in("aitk-worker", namespaces);
    join.args(["join", "--data-dir"]).arg(cluster.worker_dir(name));
    join.arg(servers(cluster));
    join
}

/// `aitk-coordinator` with an administrator's token. The subcommand has to be added.
#[must_use]
pub fn admin_command(cluster: &TestCluster) -> Command {
    let mut command = cluster.command("aitk-coordinator");
    command
        .env("AITK_TOKEN_FILE", cluster.data_dir().join("token"))
        .env("AITK_COORDINATOR_DATA_DIR", cluster.data_dir());
    command
}

fn invite(cluster: &TestCluster, servers: &str, name: &str) -> String {
    let mut invite = admin_command(cluster);
    invite.env("AITK_SERVER", servers).args(["worker", "join-token", name]);
    run_until_success(&mut invite, cluster)
}

/// Repeats the command until it succeeds. On a busy machine the leader may change at any time.
fn run_until_success(command: &mut Command, cluster: &TestCluster) -> String {
    crate::eventually("the command to succeed", LIMIT, &[&cluster.coordinator], || {
        let output = command.output().expect("the program starts");
        let stdout = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        output.status.success().then_some(stdout)
    })
}

/// Writes a secret to a file that only its owner can read.
fn write_secret(path: &Path, text: &str) {
    std::fs::write(path, text).expect("the secret can be written");
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).expect("the file is ours");
}

/// Runs a program and returns its standard output.
fn run(command: &mut Command) -> String {
    let output = command.output().expect("the program starts");
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {err}");
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}
