//! Prometheus metrics, liveness and readiness. docs/monitoring.md describes them.

mod http;

use aitk_common::control_plane::{AttemptState, EventBody, JobState, UnixMillis};
use aitk_common::telemetry::traces::Traces;
use aitk_scheduler::{Record, State};
pub(crate) use http::{OPENMETRICS, serve};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// `state="running"`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabel {
    state: String,
}

/// `kind="cuda",state="busy"`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DeviceLabels {
    kind: String,
    state: String,
}

fn state_label(state: &str) -> StateLabel {
    StateLabel {
        state: state.to_owned(),
    }
}

/// All metrics. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Metrics {
    registry: Arc<Registry>,
    submitted: Counter,
    job_ends: Family<StateLabel, Counter>,
    attempts: Family<StateLabel, Counter>,
    checkpoints: Counter,
    wait: Histogram,
    commit: Histogram,
    records: Counter,
    jobs: Family<StateLabel, Gauge>,
    workers: Family<StateLabel, Gauge>,
    devices: Family<DeviceLabels, Gauge>,
    spans: Family<StateLabel, Gauge>,
    traces: Traces,
    /// Held while gauges are set and written, so that one request does not remove those of another.
    writing: Arc<Mutex<()>>,
}

/// Gauges that are computed when metrics are requested.
#[derive(Debug, Default)]
struct GaugeValues {
    jobs: Vec<(&'static str, i64)>,
    workers: Vec<(&'static str, i64)>,
    devices: Vec<(DeviceLabels, i64)>,
}

impl Metrics {
    /// `traces`: the exporter whose spans are counted as well.
    pub(crate) fn new(traces: &Traces) -> Self {
        let mut registry = Registry::with_prefix("aitk");
        let build = Info::new([("version", env!("CARGO_PKG_VERSION"))]);
        registry.register("build", "The program", build);
        let leading = Gauge::<i64>::default();
        leading.set(1);
        registry.register("leading", "Whether this coordinator leads", leading);
        let mut metrics = Self {
            registry: Arc::default(),
            submitted: Counter::default(),
            job_ends: Family::default(),
            attempts: Family::default(),
            checkpoints: Counter::default(),
            // 10 ms to 12 days.
            wait: Histogram::new(exponential_buckets(0.01, 4.0, 14)),
            // 0.1 ms to 26 s.
            commit: Histogram::new(exponential_buckets(0.0001, 4.0, 10)),
            records: Counter::default(),
            jobs: Family::default(),
            workers: Family::default(),
            devices: Family::default(),
            spans: Family::default(),
            traces: traces.clone(),
            writing: Arc::default(),
        };
        let m = &metrics;
        // Counters begin at zero: an alert on `increase` does not see the first event of one that begins with it.
        for state in [JobState::Completed, JobState::Stopped, JobState::Failed] {
            m.job_ends.get_or_create(&state_label(state.name())).inc_by(0);
        }
        for state in [
            AttemptState::Assigned,
            AttemptState::Running,
            AttemptState::Completed,
            AttemptState::Stopped,
            AttemptState::Failed,
            AttemptState::Lost,
        ] {
            m.attempts.get_or_create(&state_label(state.name())).inc_by(0);
        }
        registry.register("jobs", "Jobs now, by state", m.jobs.clone());
        registry.register("workers", "Workers now, by state", m.workers.clone());
        registry.register("devices", "Devices of connected workers now", m.devices.clone());
        registry.register("jobs_submitted", "Jobs submitted", m.submitted.clone());
        registry.register("jobs_ended", "Jobs that ended, by state", m.job_ends.clone());
        registry.register("attempts", "Attempts that reached a state", m.attempts.clone());
        registry.register("checkpoints_committed", "Checkpoints committed", m.checkpoints.clone());
        registry.register_with_unit(
            "job_first_wait",
            "From a job's submission to its first assignment",
            Unit::Seconds,
            m.wait.clone(),
        );
        registry.register_with_unit(
            "store_commit",
            "Time of a transaction of the store",
            Unit::Seconds,
            m.commit.clone(),
        );
        registry.register("store_records", "Records written to the store", m.records.clone());
        registry.register(
            "spans",
            "Spans since the start that were recorded, sent to the collector, and lost on the way",
            m.spans.clone(),
        );
        metrics.registry = Arc::new(registry);
        metrics
    }

    /// Counts the records and audit lines of one transaction.
    pub(crate) fn record_commit(&self, records: &[Record], audit_lines: usize, took: Duration) {
        let written = records.len() + audit_lines;
        if written == 0 {
            return;
        }
        self.commit.observe(took.as_secs_f64());
        self.records.inc_by(written as u64);
        for record in records {
            match record {
                Record::NewJob(..) => {
                    self.submitted.inc();
                }
                Record::Event { event, .. } => self.count_event(&event.body),
                _ => {}
            }
        }
    }

    fn count_event(&self, body: &EventBody) {
        match body {
            EventBody::State { state, .. } if state.is_ended() => {
                self.job_ends.get_or_create(&state_label(state.name())).inc();
            }
            EventBody::Attempt { state, .. } => {
                self.attempts.get_or_create(&state_label(state.name())).inc();
            }
            EventBody::Checkpoint { .. } => {
                self.checkpoints.inc();
            }
            _ => {}
        }
    }

    /// Records the first assignment of a job that waited since `created`.
    pub(crate) fn record_first_assignment(&self, created: UnixMillis, now: UnixMillis) {
        self.wait.observe(now.since(created).as_secs_f64());
    }

    /// Returns all metrics in the Prometheus text format.
    fn text(&self, now: GaugeValues) -> String {
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        // Remove labels of devices that are gone.
        self.devices.clear();
        for (state, count) in now.jobs {
            self.jobs.get_or_create(&state_label(state)).set(count);
        }
        for (state, count) in now.workers {
            self.workers.get_or_create(&state_label(state)).set(count);
        }
        for (labels, count) in now.devices {
            self.devices.get_or_create(&labels).set(count);
        }
        if self.traces.is_on() {
            let counts = self.traces.counts();
            for (state, count) in [
                ("recorded", counts.recorded),
                ("sent", counts.sent),
                ("lost", counts.lost),
            ] {
                let count = i64::try_from(count).unwrap_or(i64::MAX);
                self.spans.get_or_create(&state_label(state)).set(count);
            }
        }
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}

/// Computes the gauges. Every state is present even when its count is 0, so that alerts always have a value.
fn gauge_values(state: &State) -> GaugeValues {
    let mut now = GaugeValues::default();
    let jobs = state.active_jobs();
    now.jobs = vec![
        (JobState::Queued.name(), jobs.queued as i64),
        (JobState::Running.name(), jobs.running as i64),
        (JobState::Stopping.name(), jobs.stopping as i64),
    ];
    let workers = state.worker_views(|_| true);
    let connected = workers.iter().filter(|worker| worker.connected).count() as i64;
    now.workers = vec![("connected", connected), ("away", workers.len() as i64 - connected)];
    for worker in workers.iter().filter(|worker| worker.connected) {
        for slot in &worker.devices {
            let labels = DeviceLabels {
                kind: slot.device.id.kind.name().to_owned(),
                state: match slot {
                    _ if slot.quarantined => "quarantined",
                    _ if !slot.jobs.is_empty() => "busy",
                    _ if worker.drained || worker.leaving => "drained",
                    _ => "idle",
                }
                .to_owned(),
            };
            match now.devices.iter_mut().find(|(known, _)| *known == labels) {
                Some((_, count)) => *count += 1,
                None => now.devices.push((labels, 1)),
            }
        }
    }
    now
}
