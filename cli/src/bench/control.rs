//! `aitk bench control`: measures a coordinator with many simulated workers. Processes, TLS connections and durable
//! writes are real; only the jobs are not computed.

use super::server::Server;
use super::simulated_workers::{STUCK, STUCK_LABEL, SimulatedWorkers, WorkerEvent};
use crate::api::Api;
use crate::args::{BenchControlArgs, BenchStore};
use crate::context::Context;
use crate::embedded::PrivateFolder;
use crate::exit::Exit;
use crate::failure::{CommandResult, Failure};
use crate::output::format::size;
use aitk_common::control_plane::Submission;
use aitk_common::id::JobId;
use serde_json::json;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// Number of connections that submit concurrently.
const CLIENTS: usize = 4;
/// Number of concurrent calls on each connection.
const CALLS_PER_CLIENT: usize = 32;
/// Number of jobs that are submitted one by one to measure the latency.
const LATENCY_JOBS: usize = 1000;
/// The benchmark fails after this time without an event.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);

pub(super) async fn run(context: &Context, args: &BenchControlArgs) -> CommandResult {
    let ui = context.ui(true);
    let database = database(args)?;
    let (disk, memory);
    let folder = if args.store == BenchStore::Memory {
        memory = in_memory()?;
        memory.path()
    } else {
        disk = PrivateFolder::new(&context.paths.state)?;
        disk.path()
    };
    let mut server = Server::start(folder, database).await?;
    let token = server.token()?;
    let mut api = Vec::new();
    for _ in 0..CLIENTS {
        api.push(Api::connect(&server.address, &token, Some(&server.ca_file())).await?);
    }
    ui.notice(&format!("registering {} simulated workers", args.workers));
    if !api[0].list(true, 1).await?.is_empty() {
        return Err(Failure::usage("--database has jobs already; give an empty database"));
    }
    let mut workers = SimulatedWorkers::start(&server.address, &token, &server.ca_file(), args.workers + 1).await?;

    let heartbeat_share = match args.heartbeats {
        0 => None,
        seconds => {
            ui.notice(&format!("only heartbeats for {seconds} s"));
            Some(measure_heartbeats(&mut workers, &mut server, Duration::from_secs(seconds)).await?)
        }
    };

    ui.notice(&format!(
        "submitting {} jobs as fast as the coordinator accepts them",
        args.jobs
    ));
    let before = server.usage()?.cpu;
    let elapsed = measure_throughput(&api, &mut workers, args.jobs).await?;
    let cpu = server.usage()?.cpu.saturating_sub(before);

    ui.notice(&format!(
        "submitting {LATENCY_JOBS} jobs one after another while {} wait for a busy worker",
        args.waiting
    ));
    submit_all(&api, args.waiting, slow_job).await?;
    let mut latency = measure_latency(&api[0], &mut workers, LATENCY_JOBS).await?;
    let resident = server.usage()?.resident;
    drop(workers);
    drop(api);

    ui.notice("killing and restarting the coordinator");
    let restarted = server.restart().await?;

    let per_second = args.jobs as f64 / elapsed.as_secs_f64();
    let assign = Quantiles::of(&mut latency.assign);
    let finish_times = Quantiles::of(&mut latency.finish);
    if args.json {
        ui.json(&json!({
            "store": args.store.name(),
            "jobs": args.jobs,
            "workers": args.workers,
            "waiting": args.waiting,
            "heartbeat_cpu_share": heartbeat_share,
            "jobs_per_s": per_second,
            "seconds": elapsed.as_secs_f64(),
            "coordinator_cpu_s": cpu.as_secs_f64(),
            "assign_p50_ms": assign.p50,
            "assign_p99_ms": assign.p99,
            "finish_p50_ms": finish_times.p50,
            "finish_p99_ms": finish_times.p99,
            "coordinator_rss_bytes": resident,
            "restart_s": restarted.ready_after.as_secs_f64(),
        }))?;
        return Ok(Exit::Ok);
    }
    if let Some(share) = heartbeat_share {
        let workers = args.workers;
        ui.data_lines([format!(
            "heartbeats             {:.1}% of a core   {workers} workers, {} s",
            share * 100.0,
            args.heartbeats
        )])?;
    }
    ui.data_lines([
        format!(
            "jobs per second        {per_second:.0}   submit to finish, {} workers, TLS, store: {}",
            args.workers,
            args.store.name()
        ),
        format!(
            "coordinator            {:.2} s of CPU time for {:.2} s",
            cpu.as_secs_f64(),
            elapsed.as_secs_f64()
        ),
        format!(
            "submit to assigned     {:.1} ms median, {:.1} ms p99   while {} jobs wait",
            assign.p50, assign.p99, args.waiting
        ),
        format!(
            "submit to finished     {:.1} ms median, {:.1} ms p99",
            finish_times.p50, finish_times.p99
        ),
        format!("coordinator's memory   {}", size(resident)),
        format!(
            "restart                {:.2} s after SIGKILL, with {} jobs",
            restarted.ready_after.as_secs_f64(),
            args.jobs + args.waiting + LATENCY_JOBS
        ),
    ])?;
    Ok(Exit::Ok)
}

/// The PostgreSQL database, if it is the store.
///
/// # Errors
/// When a database is given and another store is measured.
fn database(args: &BenchControlArgs) -> Result<Option<&str>, Failure> {
    match (args.database.as_deref(), args.store) {
        (database, BenchStore::Postgres) => Ok(database),
        (None, _) => Ok(None),
        (Some(_), store) => Err(Failure::usage(format!(
            "--database is for --store postgres, and the store is {}",
            store.name()
        ))),
    }
}

/// Creates a folder on a file system in memory. It is removed when dropped.
fn in_memory() -> Result<tempfile::TempDir, Failure> {
    let shm = Path::new("/dev/shm");
    if !shm.is_dir() {
        return Err(Failure::usage(
            "--store memory needs /dev/shm, which this machine does not have",
        ));
    }
    let folder = tempfile::Builder::new().prefix("aitk-bench-").tempdir_in(shm);
    folder.map_err(|error| Failure::file("create a folder in", shm, &error))
}

/// Median and 99th percentile in milliseconds.
struct Quantiles {
    p50: f64,
    p99: f64,
}

impl Quantiles {
    /// Computes the quantiles of at least one time.
    fn of(times: &mut [Duration]) -> Self {
        times.sort_unstable();
        let at = |share: f64| {
            let index = ((times.len() as f64 * share).ceil() as usize).clamp(1, times.len()) - 1;
            times[index].as_secs_f64() * 1000.0
        };
        Self {
            p50: at(0.5),
            p99: at(0.99),
        }
    }
}

fn job(name: &str, labels: &BTreeMap<&str, &str>) -> Submission {
    let image = json!({
        "output_folder": "out", "model": { "name_or_path": "bench/none" }, "generate": { "prompts": ["a cat"] }
    });
    let process = json!({ "type": "to_folder", "kind": { "generate": image } });
    let job = json!({
        "job": "generate", "name": name, "meta": {}, "config": {}, "process": [process], "cluster": { "labels": labels }
    });
    Submission {
        config_text: format!("job: generate\nconfig:\n  name: {name}\n"),
        config_format: "yaml".to_owned(),
        job_json: job.to_string(),
        inputs: BTreeMap::new(),
        local: false,
        idempotency_key: None,
        owner: None,
        parameter_counts: None,
        image_batches: Vec::new(),
        images: None,
        longest_prompt: None,
    }
}

fn quick_job() -> Submission {
    job("quick", &BTreeMap::new())
}

/// A job that only the slow worker can run.
fn slow_job() -> Submission {
    job(STUCK, &BTreeMap::from([(STUCK_LABEL, STUCK)]))
}

/// Submits `count` jobs over all connections, and returns when all are stored.
async fn submit_all(api: &[Api], count: usize, make: fn() -> Submission) -> Result<(), Failure> {
    let submitted_count = Arc::new(AtomicUsize::new(0));
    let mut calls = JoinSet::new();
    for call in 0..CLIENTS * CALLS_PER_CLIENT {
        let (api, submitted_count) = (api[call % api.len()].clone(), submitted_count.clone());
        calls.spawn(async move {
            while submitted_count.fetch_add(1, Ordering::Relaxed) < count {
                api.submit(make()).await?;
            }
            Ok::<(), Failure>(())
        });
    }
    while let Some(ended) = calls.join_next().await {
        ended.map_err(|error| Failure::failed(error.to_string()))??;
    }
    Ok(())
}

/// Measures the share of a CPU core that the coordinator uses for heartbeats alone.
async fn measure_heartbeats(
    workers: &mut SimulatedWorkers,
    server: &mut Server,
    time: Duration,
) -> Result<f64, Failure> {
    let (before, start) = (server.usage()?.cpu, Instant::now());
    // The only possible event is a session that breaks.
    let events = async {
        loop {
            workers.next().await?;
        }
    };
    if let Ok(broken) = tokio::time::timeout(time, events).await {
        return broken;
    }
    let cpu = server.usage()?.cpu.saturating_sub(before);
    Ok(cpu.as_secs_f64() / start.elapsed().as_secs_f64())
}

/// Measures the time from the first submission until the last job is stored as finished.
async fn measure_throughput(api: &[Api], workers: &mut SimulatedWorkers, count: usize) -> Result<Duration, Failure> {
    let start = Instant::now();
    let finish = async {
        let mut finished = 0;
        let mut last = start;
        while finished < count {
            if let WorkerEvent::Finished(at) = next_event(workers).await? {
                finished += 1;
                last = last.max(at);
            }
        }
        Ok::<Instant, Failure>(last)
    };
    let (submitted, last) = tokio::join!(submit_all(api, count, quick_job), finish);
    submitted?;
    Ok(last?.saturating_duration_since(start))
}

struct Latency {
    assign: Vec<Duration>,
    finish: Vec<Duration>,
}

/// Submits jobs one after another, and measures the time until each is assigned and until it is stored as finished.
async fn measure_latency(api: &Api, workers: &mut SimulatedWorkers, count: usize) -> Result<Latency, Failure> {
    let mut latency = Latency {
        assign: Vec::with_capacity(count),
        finish: Vec::with_capacity(count),
    };
    for _ in 0..count {
        let start = Instant::now();
        let job: JobId = api.submit(quick_job()).await?.job;
        loop {
            match next_event(workers).await? {
                WorkerEvent::Assigned(which, at) if which == job => {
                    latency.assign.push(at.saturating_duration_since(start));
                }
                WorkerEvent::Finished(at) => {
                    latency.finish.push(at.saturating_duration_since(start));
                    break;
                }
                _ => {}
            }
        }
    }
    Ok(latency)
}

async fn next_event(workers: &mut SimulatedWorkers) -> Result<WorkerEvent, Failure> {
    let silent = |_| Failure::failed(format!("nothing happened for {} s", IDLE_TIMEOUT.as_secs()));
    tokio::time::timeout(IDLE_TIMEOUT, workers.next())
        .await
        .map_err(silent)?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_database_is_for_postgres_alone() {
        let args = |store, database: Option<&str>| BenchControlArgs {
            jobs: 1,
            workers: 1,
            waiting: 0,
            heartbeats: 0,
            store,
            database: database.map(str::to_owned),
            json: false,
        };
        let url = "postgres://aitk@localhost/bench";
        assert_eq!(database(&args(BenchStore::Postgres, Some(url))).unwrap(), Some(url));
        assert_eq!(database(&args(BenchStore::Memory, None)).unwrap(), None);
        let failure = database(&args(BenchStore::Sqlite, Some(url))).unwrap_err();
        assert_eq!(failure.exit, Exit::Usage);
        assert!(failure.message.contains("the store is sqlite"), "{}", failure.message);
    }

    #[test]
    fn quantiles_are_measured_times() {
        let mut times: Vec<Duration> = (1..=200).rev().map(Duration::from_millis).collect();
        let quantiles = Quantiles::of(&mut times);
        assert!((quantiles.p50 - 100.0).abs() < 1e-9 && (quantiles.p99 - 198.0).abs() < 1e-9);
        let one = Quantiles::of(&mut [Duration::from_millis(7)]);
        assert!((one.p50 - 7.0).abs() < 1e-9 && (one.p99 - 7.0).abs() < 1e-9);
    }
}
