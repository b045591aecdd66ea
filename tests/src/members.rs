//! Several coordinators on one PostgreSQL, with one token and one authority, and the workers that join them.

use crate::place::Place;
use crate::pool::{Endpoint, Pool, Setup};
use crate::programs::program;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);
/// As a coordinator makes it: only such a one can carry the authority's hash.
const TOKEN: &str = "aitk_0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

/// Starts a coordinator for each of these, which say where it listens, on the database and the storage that they name. Everybody
/// gets all addresses. The first one makes the authority, and leads.
///
/// # Panics
/// When one does not start.
#[must_use]
pub fn start(database: &str, setups: Vec<Setup>) -> Vec<Pool> {
    let authority = setups[0].data_dir().join("ca");
    let servers: Vec<String> = setups
        .iter()
        .map(|setup| format!("https://{}", setup.address))
        .collect();
    let servers = servers.join(",");
    let mut pools: Vec<Pool> = Vec::new();
    for mut setup in setups {
        let data = setup.data_dir();
        std::fs::create_dir_all(&data).expect("the folder can be made");
        write_secret(&data.join("token"), TOKEN);
        if authority.exists() {
            // As an administrator copies it, with its rights.
            said(Command::new("cp").arg("-a").arg(&authority).arg(&data));
        } else {
            let mut init = Command::new(program("aitk-coordinator"));
            said(init.args(["init", "--data-dir"]).arg(&data));
        }
        let own = [
            ("AITK_DATABASE", database.to_owned()),
            ("AITK_ADVERTISE", format!("https://{}", setup.address)),
            ("AITK_HOSTNAMES", setup.address.ip().to_string()),
        ];
        let own = own.into_iter().map(|(key, value)| (key.to_owned(), value));
        setup.own_environment.extend(own);
        let first = pools.is_empty();
        let pool = Pool::start_with(setup);
        if first {
            let mut log = pool.coordinator.log_from_start();
            crate::eventually("a leader", LIMIT, &[&pool.coordinator], || {
                log.lines().iter().any(|line| leads(line)).then_some(())
            });
        }
        pools.push(pool);
    }
    let invitation = invite(&pools[0], &servers, "nobody");
    let (_, hash) = invitation.split_once('.').expect("an invitation names the authority");
    for pool in &mut pools {
        let token = pool.setup().folder.join("token");
        write_secret(&token, &format!("{TOKEN}.{hash}"));
        let servers = servers.clone();
        pool.set_endpoint(Endpoint { servers, token });
    }
    pools
}

/// Whether a coordinator says in this line that it leads now.
#[must_use]
pub fn leads(line: &str) -> bool {
    line.contains("this coordinator leads")
}

/// Lets a worker join.
///
/// # Panics
/// When it is not let in.
pub fn join(pool: &Pool, name: &str, place: &Place) {
    let servers = servers(pool);
    let invitation = invite(pool, &servers, name);
    asked(join_command(pool, name, place).arg(invitation), pool);
}

fn servers(pool: &Pool) -> String {
    let servers = pool.setup().endpoint.as_ref().map(|endpoint| endpoint.servers.clone());
    servers.expect("the pool has a endpoint")
}

/// What lets a worker join; the join token follows.
///
/// # Panics
/// When the pool has one coordinator without an authority.
#[must_use]
pub fn join_command(pool: &Pool, name: &str, place: &Place) -> Command {
    let mut join = pool.command_in("aitk-worker", place);
    join.args(["join", "--data-dir"]).arg(pool.worker_dir(name));
    join.arg(servers(pool));
    join
}

/// A command of an administrator; what is to be done follows.
#[must_use]
pub fn admin_command(pool: &Pool) -> Command {
    let mut command = pool.command("aitk-coordinator");
    command
        .env("AITK_TOKEN_FILE", pool.data_dir().join("token"))
        .env("AITK_COORDINATOR_DATA_DIR", pool.data_dir());
    command
}

fn invite(pool: &Pool, servers: &str, name: &str) -> String {
    let mut invite = admin_command(pool);
    invite.env("AITK_SERVER", servers).args(["worker", "join-token", name]);
    asked(&mut invite, pool)
}

/// Asks until it is answered: a crowded machine may change its leader at any time.
fn asked(command: &mut Command, pool: &Pool) -> String {
    crate::eventually("an answer", LIMIT, &[&pool.coordinator], || {
        let output = command.output().expect("the program starts");
        let said = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        output.status.success().then_some(said)
    })
}

/// A secret in a file of its own.
fn write_secret(path: &Path, text: &str) {
    std::fs::write(path, text).expect("the secret can be written");
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).expect("the file is ours");
}

/// Runs a program to its end; what it says.
fn said(command: &mut Command) -> String {
    let output = command.output().expect("the program starts");
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {err}");
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}
