//! One test suite for both databases.

use crate::support::postgres::Postgres;
use crate::support::{FakeWorker, cpu};
use aitk_common::control_plane::{Artifact, EventBody, JobEvent, JobState, Registration, UnixMillis};
use aitk_common::hash::ContentHash;
use aitk_common::id::{AttemptId, JobId, WorkerId};
use aitk_coordinator::store::{SqlStore, Store};
use aitk_scheduler::{Effect, Event, Job, NewJob, Payload, Record, Requirements, SessionId, Settings, State, Ticket};
use std::collections::{BTreeMap, HashSet};
use std::io::Cursor;
use std::sync::Arc;
use std::time::Duration;

/// How many log lines and metrics a job's log retains in these tests.
const RETAINED: u64 = 50;

/// Where the store's database is, so that it can be opened again.
enum Location<'a> {
    File(&'a std::path::Path),
    Server(&'a Postgres),
}

impl Location<'_> {
    async fn open(&self) -> SqlStore {
        let store = match self {
            Self::File(folder) => SqlStore::sqlite(&folder.join("aitk.db")).await,
            Self::Server(server) => SqlStore::postgres(&server.url().parse().unwrap()).await,
        };
        store.unwrap().with_events_kept(RETAINED)
    }
}

pub(super) fn hash(text: &str) -> ContentHash {
    ContentHash::of(text.as_bytes())
}

fn payload() -> Payload {
    Payload {
        config_text: "name: a\n# \u{1F600} ü\n".into(),
        config_format: "yaml".into(),
        job_json: r#"{"name":"a"}"#.into(),
        inputs: Arc::new(BTreeMap::from([("./data".to_owned(), hash("snapshot"))])),
        shared: None,
    }
}

/// The records of one step of a scheduler.
fn records(state: &mut State, at: u64, event: Event) -> Vec<Record> {
    let persisted = |effect| match effect {
        Effect::Persist(record) => Some(record),
        _ => None,
    };
    state
        .handle(UnixMillis(at), event)
        .into_iter()
        .filter_map(persisted)
        .collect()
}

pub(super) fn submit(state: &mut State, id: &str) -> Vec<Record> {
    let job = NewJob {
        id: JobId::new(id),
        seed: 7,
        name: id.into(),
        kind: "extension".into(),
        requirements: Requirements::default(),
        local: false,
        after: Vec::new(),
        sees_all: true,
        not_before: None,
        trace: None,
        idempotency_key: Some(format!("key of {id}")),
        user_limits_apply: false,
        config_bytes: 0,
        payload: Arc::new(payload()),
    };
    let (ticket, job) = (Ticket(1), Box::new(job));
    records(state, 1000, Event::JobSubmitted { ticket, job })
}

/// Commits the records twice, as after a lost answer.
pub(super) async fn commit(store: &dyn Store, records: &[Record]) {
    store.commit(records, &[]).await.unwrap();
    store.commit(records, &[]).await.unwrap();
}

pub(super) fn job_of(records: &[Record]) -> Job {
    let found = records.iter().rev().find_map(|record| match record {
        Record::NewJob(job, _) | Record::Job(job) => Some(Job::clone(job)),
        _ => None,
    });
    found.unwrap()
}

pub(super) fn event(job: &str, cursor: u64, body: EventBody, seq: Option<u64>) -> Record {
    Record::Event {
        job: JobId::new(job),
        event: Arc::new(JobEvent {
            cursor,
            time: UnixMillis(cursor),
            attempt: seq.map(|_| AttemptId::new(format!("{job}-1"))),
            body,
        }),
        seq,
    }
}

fn line(text: &str) -> EventBody {
    EventBody::Log {
        level: "info".into(),
        message: text.into(),
    }
}

pub(super) fn artifact(name: &str, index: Option<u64>, content: &str) -> Artifact {
    Artifact {
        name: name.into(),
        kind: "sample".into(),
        hash: Some(hash(content)),
        bytes: 1,
        step: Some(1),
        index,
        local_path: None,
    }
}

/// Before, the log of such a job said that it waited without being paused.
#[tokio::test]
async fn a_paused_job_is_shown_as_paused_after_a_restore() {
    let folder = tempfile::tempdir().unwrap();
    let open = async |name: &str| SqlStore::sqlite(&folder.path().join(name)).await.unwrap();
    let (store, restored) = (open("a.db").await, open("b.db").await);
    let mut state = State::new(Settings::from_lease(Duration::from_secs(6)));
    commit(&store, &submit(&mut state, "ja")).await;
    let (ticket, job) = (Ticket(2), "ja".to_owned());
    let paused = records(&mut state, 2000, Event::PauseRequested { ticket, job });
    commit(&store, &paused).await;
    let mut file = Cursor::new(Vec::new());
    store.backup(&mut file).await.unwrap();
    file.set_position(0);
    restored.restore(&mut file, UnixMillis(3000)).await.unwrap();
    let events = restored.events(&JobId::new("ja"), 0, 100).await.unwrap();
    let last = &events.last().unwrap().body;
    assert!(matches!(last, EventBody::State { paused: true, .. }), "{last:?}");
    store.close().await;
    restored.close().await;
}

/// Jobs, workers and payloads are loaded as a scheduler stored them.
async fn a_schedulers_records_are_loaded_again(location: &Location<'_>) {
    let store = location.open().await;
    let mut state = State::new(Settings::from_lease(Duration::from_secs(6)));
    let first = submit(&mut state, "ja");
    commit(&store, &first).await;
    commit(&store, &submit(&mut state, "jb")).await;
    let registration: Registration = FakeWorker::registration("w1", Some(WorkerId::new("w1")), Vec::new());
    let registered = Event::WorkerRegistered {
        session: SessionId(5),
        fresh_id: WorkerId::new("unused"),
        same_machine: true,
        registration: Box::new(registration),
    };
    // The worker takes the first job.
    commit(&store, &records(&mut state, 2000, registered)).await;
    store.close().await;

    let store = location.open().await;
    let loaded = store.load().await.unwrap();
    assert_eq!((loaded.jobs.len(), loaded.workers.len()), (2, 1));
    assert_eq!(loaded.workers[0].devices, [cpu()]);
    let restored = State::restore(
        Settings::from_lease(Duration::from_secs(6)),
        UnixMillis(3000),
        loaded.jobs,
        loaded.workers,
    );
    for id in ["ja", "jb"] {
        let (was, is) = (
            state.job(&JobId::new(id)).unwrap(),
            restored.job(&JobId::new(id)).unwrap(),
        );
        assert_eq!(
            (was.state, was.cursor, &was.attempts),
            (is.state, is.cursor, &is.attempts)
        );
        assert_eq!(was.idempotency_key, is.idempotency_key);
    }
    assert_eq!(restored.job(&JobId::new("ja")).unwrap().state, JobState::Running);
    assert_eq!(store.payload(&JobId::new("ja")).await.unwrap(), Some(payload()));
    assert_eq!(store.payload(&JobId::new("nobody")).await.unwrap(), None);
    store.close().await;
}

/// Events are read in order and in pages. Old lines are trimmed, checkpoints are not.
async fn event_logs_are_read_by_cursor_and_trimmed(location: &Location<'_>) {
    let store = location.open().await;
    let job = JobId::new("jlog");
    let mut state = State::new(Settings::from_lease(Duration::from_secs(6)));
    let mut made = submit(&mut state, "jlog");
    made.retain(|record| !matches!(record, Record::Event { .. }));
    commit(&store, &made).await;
    for cursor in 1..=4 * RETAINED {
        let body = if cursor == 3 {
            EventBody::Checkpoint {
                step: 9,
                manifest: hash("m"),
            }
        } else {
            line(&format!("line {cursor} \u{0}\u{1F600}"))
        };
        commit(&store, &[event("jlog", cursor, body, Some(cursor))]).await;
    }
    let all = store.events(&job, 0, 1000).await.unwrap();
    let cursors: Vec<u64> = all.iter().map(|event| event.cursor).collect();
    assert_eq!(cursors[0], 3, "a checkpoint is never trimmed");
    assert!(
        cursors.len() as u64 >= RETAINED && (cursors.len() as u64) < 2 * RETAINED,
        "{}",
        cursors.len()
    );
    assert!(cursors.is_sorted() && *cursors.last().unwrap() == 4 * RETAINED);
    assert_eq!(
        cursors[cursors.len() - RETAINED as usize],
        3 * RETAINED + 1,
        "all of the newest lines are retained"
    );
    let mut paged = Vec::new();
    let mut after = 0;
    loop {
        let page = store.events(&job, after, 7).await.unwrap();
        let Some(last) = page.last() else { break };
        after = last.cursor;
        paged.extend(page);
    }
    assert_eq!(paged, all);
    assert_eq!(
        all.last().unwrap().body,
        line(&format!("line {} \u{0}\u{1F600}", 4 * RETAINED))
    );
    let loaded = store.load().await.unwrap();
    let restored = loaded.jobs.iter().find(|restored| restored.job.id == job).unwrap();
    assert_eq!(restored.cursor, 4 * RETAINED);
    store.close().await;
}

/// A restore leaves a gap in a log's cursors, which does not count as lines.
async fn a_gap_in_the_cursors_does_not_count_as_lines(location: &Location<'_>) {
    let store = location.open().await;
    let lines = |from: u64, to: u64| (from..=to).map(|cursor| event("jgap", cursor, line("x"), Some(cursor)));
    let after = 1_000_000;
    let records: Vec<_> = lines(1, RETAINED - 10)
        .chain(lines(after + RETAINED - 9, after + RETAINED))
        .collect();
    commit(&store, &records).await;
    let all = store.events(&JobId::new("jgap"), 0, 1000).await.unwrap();
    assert_eq!(all.len() as u64, RETAINED, "the log has no more lines than it retains");
    store.close().await;
}

/// An artifact replaces an earlier one with the same identity; a removed artifact is not listed.
async fn artifacts_are_replaced_by_identity(location: &Location<'_>) {
    let store = location.open().await;
    let job = JobId::new("jart");
    let record = |artifact| Record::Artifact(job.clone(), Box::new(artifact));
    commit(&store, &[record(artifact("b.png", Some(0), "one"))]).await;
    commit(
        &store,
        &[
            record(artifact("a.png", Some(0), "two")),
            record(artifact("lora", None, "three")),
        ],
    )
    .await;
    let names = |found: Vec<Artifact>| found.into_iter().map(|a| a.name).collect::<Vec<_>>();
    assert_eq!(names(store.artifacts(&job).await.unwrap()), ["a.png", "lora"]);
    commit(&store, &[Record::ArtifactRemoved(job.clone(), "lora".into())]).await;
    assert_eq!(
        store.artifacts(&job).await.unwrap(),
        [artifact("a.png", Some(0), "two")]
    );
    store.close().await;
}

/// A job's snapshots, checkpoints and artifacts are garbage collection roots until the job is removed.
async fn roots_are_what_jobs_can_still_use(location: &Location<'_>) {
    let store = location.open().await;
    let before = store.roots().await.unwrap().len();
    let mut state = State::new(Settings::from_lease(Duration::from_secs(6)));
    let made = submit(&mut state, "jroot");
    let mut job = job_of(&made);
    commit(&store, &made).await;
    let saved = |step: u64| EventBody::Checkpoint {
        step,
        manifest: hash(&format!("m{step}")),
    };
    for step in 1..=4 {
        commit(&store, &[event("jroot", 10 + step, saved(step), None)]).await;
    }
    let record = Record::Artifact(job.id.clone(), Box::new(artifact("x", None, "file")));
    let mut committed = serde_json::to_value(&job).unwrap();
    committed["checkpoint"] = serde_json::json!({ "manifest": hash("m4"), "step": 4 });
    job = serde_json::from_value(committed).unwrap();
    commit(&store, &[record, Record::Job(Arc::new(job.clone()))]).await;
    let mine = async || {
        let mut roots = store.roots().await.unwrap();
        roots.retain(|roots| roots.artifacts.contains(&hash("file")));
        roots.pop().unwrap()
    };
    let live = mine().await;
    assert!(!live.ended);
    assert_eq!(live.snapshots, [hash("snapshot")]);
    assert_eq!(
        live.checkpoints.iter().copied().collect::<HashSet<_>>(),
        [hash("m4"), hash("m3")].into()
    );
    job.state = JobState::Failed;
    job.ended = Some(UnixMillis(5000));
    commit(&store, &[Record::Job(Arc::new(job.clone()))]).await;
    let ended = mine().await;
    assert!(ended.ended);
    assert_eq!(ended.checkpoints, [hash("m4")]);
    commit(&store, &[Record::JobRemoved(job.id.clone())]).await;
    assert_eq!(store.roots().await.unwrap().len(), before);
    assert_eq!(store.events(&job.id, 0, 10).await.unwrap(), []);
    assert_eq!(store.artifacts(&job.id).await.unwrap(), []);
    assert_eq!(store.payload(&job.id).await.unwrap(), None);
    store.close().await;
}

async fn run_suite(location: Location<'_>) {
    a_schedulers_records_are_loaded_again(&location).await;
    event_logs_are_read_by_cursor_and_trimmed(&location).await;
    a_gap_in_the_cursors_does_not_count_as_lines(&location).await;
    artifacts_are_replaced_by_identity(&location).await;
    roots_are_what_jobs_can_still_use(&location).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sqlite() {
    let folder = tempfile::tempdir().unwrap();
    run_suite(Location::File(folder.path())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn postgres() {
    let Some(server) = Postgres::start() else { return };
    run_suite(Location::Server(&server)).await;
}
