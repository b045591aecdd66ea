//! Arguments of the commands that submit, list and control jobs.

use super::NotifyArgs;
use crate::output::format::parse_duration;
use aitk_common::control_plane::JobState;
use aitk_common::sd_scripts::Script;
use clap::Args;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

/// `aitk submit`.
#[derive(Args, Clone, Debug)]
#[command(
    after_help = "Examples:\n  aitk submit my_lora.yaml\n  id=$(aitk submit my_lora.yaml -n ada -y) && aitk wait \"$id\"\n  aitk submit my_lora.yaml --sweep train.lr=1e-4,2e-4 --sweep network.linear=8,16 --at-most 2\n  \
                  aitk submit my_lora.yaml --set train.steps=200 --set cluster.device=cuda"
)]
pub struct SubmitArgs {
    /// Config file: a name in ./config or a path
    #[arg(value_name = "CONFIG")]
    pub config: PathBuf,
    /// Follow the job until it ends
    #[arg(short, long)]
    pub follow: bool,
    /// Notifications, with --follow.
    #[command(flatten)]
    pub notify: NotifyArgs,
    /// Name of the job; also replaces `[name]` in the config
    #[arg(short, long)]
    pub name: Option<String>,
    /// Set a key of the config to another value, as YAML: 2e-4, [a, b]; may be given several times
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Training script that a config of sd-scripts is for, such as fine_tune [default: found by its options and its model]
    #[arg(long, value_name = "SCRIPT", value_parser = Script::from_name)]
    pub script: Option<Script>,
    /// Higher runs first; overrides cluster.priority
    #[arg(long, allow_negative_numbers = true, value_name = "N")]
    pub priority: Option<i32>,
    /// One job per value of this key; with several keys one per combination of values
    #[arg(long, value_name = "KEY=V1,V2,…")]
    pub sweep: Vec<String>,
    /// Submit N jobs that differ in ${AITK_ARRAY_INDEX} and in their seed; with --sweep, N jobs per combination
    #[arg(long, value_name = "N")]
    pub array: Option<NonZeroU32>,
    /// Run at most N jobs of --sweep and --array at the same time
    #[arg(long, value_name = "N")]
    pub at_most: Option<NonZeroU32>,
    /// Owner of the job; for another user, an operator's or admin's token is needed [env: AITK_USER]
    #[arg(long, value_name = "NAME")]
    pub user: Option<String>,
    /// Only show the report of `aitk validate`; nothing is sent
    #[arg(long, conflicts_with = "follow")]
    pub dry_run: bool,
    /// Do not ask before a large upload
    #[arg(short, long)]
    pub yes: bool,
    /// Submitting again with the same key returns the same job
    #[arg(long, value_name = "KEY")]
    pub idempotency_key: Option<String>,
    /// Print JSON: id, name, uploaded bytes; with --follow one line per event
    #[arg(long)]
    pub json: bool,
    /// No progress bars and no progress lines
    #[arg(long)]
    pub no_progress: bool,
}

/// `aitk clone`.
#[derive(Args, Clone, Debug)]
#[command(
    after_help = "Examples:\n  aitk clone my_lora\n  aitk clone 3f2a -n my_lora_16 --set network.linear=16 --follow"
)]
pub struct CloneArgs {
    /// Job: its id, its name, or the beginning of its id
    #[arg(value_name = "JOB")]
    pub job: String,
    /// Follow the copy until it ends
    #[arg(short, long)]
    pub follow: bool,
    /// Notifications, with --follow.
    #[command(flatten)]
    pub notify: NotifyArgs,
    /// Name of the copy [default: the job's name]
    #[arg(short, long)]
    pub name: Option<String>,
    /// Set a key of the job's config to another value; may be given several times
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Higher runs first; overrides cluster.priority
    #[arg(long, allow_negative_numbers = true, value_name = "N")]
    pub priority: Option<i32>,
    /// Owner of the copy, for shares and quotas [env: AITK_USER]
    #[arg(long, value_name = "NAME")]
    pub user: Option<String>,
    /// Do not ask before a large upload
    #[arg(short, long)]
    pub yes: bool,
    /// Print JSON: id, name, id of the copied job; with --follow one line per event
    #[arg(long)]
    pub json: bool,
    /// No progress bars and no progress lines
    #[arg(long)]
    pub no_progress: bool,
}

/// `aitk ps`.
#[derive(Args, Clone, Debug)]
#[command(
    after_help = "Examples:\n  aitk ps -a\n  aitk ps --json | jq -r '.jobs[] | select(.state == \"failed\") | .id'"
)]
pub struct PsArgs {
    /// Only this job, or the members of this array: its id, its name, or the beginning of its id
    #[arg(value_name = "JOB", conflicts_with_all = ["all", "members"])]
    pub job: Option<String>,
    /// List the members of arrays instead of one line per array
    #[arg(short, long)]
    pub members: bool,
    /// All jobs, not only the active and the last ones
    #[arg(short, long)]
    pub all: bool,
    /// Only jobs in this state: queued, running, stopping, stopped, completed, failed; may be given several times
    #[arg(long = "state", value_name = "STATE", value_parser = job_state)]
    pub states: Vec<JobState>,
    /// Only this user's jobs
    #[arg(long, value_name = "NAME")]
    pub user: Option<String>,
    /// Only jobs with this text in their name, or in that of their array
    #[arg(long, value_name = "TEXT")]
    pub name: Option<String>,
    /// List at most N jobs [default: 100; all with --all, --json or --quiet]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub limit: Option<u32>,
    /// Repeat every two seconds until Ctrl-C; with --json one line each time
    #[arg(short, long)]
    pub watch: bool,
    /// Print only ids
    #[arg(short, long, conflicts_with = "json")]
    pub quiet: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `aitk logs`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:\n  aitk logs 3f2a --tail 50\n  aitk logs my_lora -f --since 10m")]
pub struct LogsArgs {
    /// Job: its id, its name, or the beginning of its id; or the run folder of a job that ran here
    #[arg(value_name = "JOB|FOLDER")]
    pub job: String,
    /// Follow until the job ends
    #[arg(short, long)]
    pub follow: bool,
    /// Only the last N existing lines
    #[arg(long, value_name = "N")]
    pub tail: Option<usize>,
    /// Only lines since this time: 10m, 2h, or RFC 3339
    #[arg(long, value_name = "WHEN")]
    pub since: Option<String>,
    /// One JSON line per line that the job itself wrote; `aitk watch --json` has every event
    #[arg(long)]
    pub json: bool,
}

/// `aitk watch`.
#[derive(Args, Clone, Debug)]
#[command(
    after_help = "Examples:\n  aitk watch my_lora\n  aitk watch 3f2a --json | jq -c 'select(.event == \"metrics\")'"
)]
pub struct WatchArgs {
    /// Job: its id, its name, or the beginning of its id
    #[arg(value_name = "JOB")]
    pub job: String,
    /// Notifications.
    #[command(flatten)]
    pub notify: NotifyArgs,
    /// One JSON line per event
    #[arg(long)]
    pub json: bool,
    /// No progress bar and no progress lines
    #[arg(long)]
    pub no_progress: bool,
}

/// `aitk wait`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:\n  aitk wait my_lora\n  aitk wait 3f2a 91bc --timeout 2h")]
pub struct WaitArgs {
    /// Jobs: ids, names, or beginnings of ids
    #[arg(required = true, value_name = "JOB")]
    pub jobs: Vec<String>,
    /// Notifications.
    #[command(flatten)]
    pub notify: NotifyArgs,
    /// Give up after this long: 90s, 10m, 2h
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub timeout: Option<Duration>,
    /// Print the jobs' ids and nothing else
    #[arg(short, long, conflicts_with = "json")]
    pub quiet: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `aitk stop`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:\n  aitk stop my_lora\n  aitk stop 3f2a --now")]
pub struct StopArgs {
    /// Jobs: ids, names, or beginnings of ids
    #[arg(required = true, value_name = "JOB")]
    pub jobs: Vec<String>,
    /// Stop immediately, without saving: work since the last checkpoint is lost
    #[arg(long)]
    pub now: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `aitk rm`.
#[derive(Args, Clone, Debug)]
#[command(
    after_help = "Examples:\n  aitk rm my_lora\n  aitk ps -a --json | jq -r '.jobs[] | select(.state == \"failed\") | .id' | xargs aitk rm"
)]
pub struct RmArgs {
    /// Jobs: ids, names, or beginnings of ids
    #[arg(required = true, value_name = "JOB")]
    pub jobs: Vec<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `aitk resume`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:\n  aitk resume my_lora\n  aitk resume 3f2a && aitk watch 3f2a")]
pub struct ResumeArgs {
    /// Jobs: ids, names, or beginnings of ids
    #[arg(required = true, value_name = "JOB")]
    pub jobs: Vec<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `aitk pause`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:\n  aitk pause my_lora\n  aitk pause 3f2a && aitk resume 3f2a")]
pub struct PauseArgs {
    /// Jobs: ids, names, or beginnings of ids
    #[arg(required = true, value_name = "JOB")]
    pub jobs: Vec<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `aitk save`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:\n  aitk save my_lora\n  aitk save 3f2a && aitk logs 3f2a -f")]
pub struct SaveArgs {
    /// Jobs: ids, names, or beginnings of ids
    #[arg(required = true, value_name = "JOB")]
    pub jobs: Vec<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `aitk sample`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:\n  aitk sample my_lora\n  aitk sample 3f2a && aitk logs 3f2a -f")]
pub struct SampleArgs {
    /// Jobs: ids, names, or beginnings of ids
    #[arg(required = true, value_name = "JOB")]
    pub jobs: Vec<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `aitk priority`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:\n  aitk priority my_lora 10\n  aitk priority 3f2a -5")]
pub struct PriorityArgs {
    /// Job: its id, its name, or the beginning of its id
    #[arg(value_name = "JOB")]
    pub job: String,
    /// Higher runs first; the default is 0
    #[arg(value_name = "N", allow_negative_numbers = true)]
    pub priority: i32,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `aitk explain`.
#[derive(Args, Clone, Debug)]
#[command(
    after_help = "Examples:\n  aitk explain my_lora\n  aitk explain 3f2a --json | jq '.devices[] | select(.fits)'"
)]
pub struct ExplainArgs {
    /// Job: its id, its name, or the beginning of its id
    #[arg(value_name = "JOB")]
    pub job: String,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `aitk fit`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:\n  aitk fit my_lora.yaml\n  aitk fit my_lora.yaml --json | jq -r .summary")]
pub struct FitArgs {
    /// Config file: a name in ./config or a path
    #[arg(value_name = "CONFIG")]
    pub config: PathBuf,
    /// Replaces `[name]` in the config
    #[arg(short, long)]
    pub name: Option<String>,
    /// Set a key of the config to another value, as YAML: 2e-4, [a, b]; may be given several times
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Training script that a config of sd-scripts is for, such as fine_tune [default: found by its options and its model]
    #[arg(long, value_name = "SCRIPT", value_parser = Script::from_name)]
    pub script: Option<Script>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

fn job_state(text: &str) -> Result<JobState, String> {
    let all = [
        JobState::Queued,
        JobState::Running,
        JobState::Stopping,
        JobState::Stopped,
        JobState::Completed,
        JobState::Failed,
    ];
    all.into_iter().find(|state| state.name() == text).ok_or_else(|| {
        let names: Vec<&str> = all.iter().map(|state| state.name()).collect();
        let hint = match text {
            "paused" => "; a paused job is `queued`",
            "pausing" => "; a job that is being paused is `running`",
            _ => "",
        };
        format!("expected one of {}{hint}", names.join(", "))
    })
}

/// `aitk validate`.
#[derive(Args, Clone, Debug)]
#[command(
    after_help = "Examples:\n  aitk validate my_lora.yaml\n  aitk validate my_lora.yaml --json | jq '.trainings[].data.datasets[].captioned'"
)]
pub struct ValidateArgs {
    /// Config file: a name in ./config or a path
    #[arg(value_name = "CONFIG")]
    pub config: PathBuf,
    /// Replaces `[name]` in the config
    #[arg(short, long)]
    pub name: Option<String>,
    /// Set a key of the config to another value, as YAML: 2e-4, [a, b]; may be given several times
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Training script that a config of sd-scripts is for, such as fine_tune [default: found by its options and its model]
    #[arg(long, value_name = "SCRIPT", value_parser = Script::from_name)]
    pub script: Option<Script>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `aitk plot`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:\n  aitk plot output/my_lora\n  aitk plot 3f2a -o loss.png")]
pub struct PlotArgs {
    /// Job (its id, its name, or the beginning of its id), or the run folder of a job that ran here
    #[arg(value_name = "JOB|FOLDER")]
    pub job: String,
    /// Write the curve to an image file instead
    #[arg(short, long, value_name = "FILE.png")]
    pub output: Option<PathBuf>,
    /// Write all metrics into a folder for TensorBoard instead
    #[arg(long, value_name = "DIR", conflicts_with_all = ["output", "metric", "json", "ascii"])]
    pub tensorboard: Option<PathBuf>,
    /// Show this metric instead of the loss, such as val/loss, lr or grad_norm (docs/run-folder.md#metricsjsonl)
    #[arg(long, value_name = "NAME")]
    pub metric: Option<String>,
    /// Use ASCII characters only
    #[arg(long)]
    pub ascii: bool,
    /// Print the values as JSON
    #[arg(long, conflicts_with = "output")]
    pub json: bool,
}

/// The message of a commit on the hub, unless the user gives another.
pub const PUSH_MESSAGE: &str = "Upload with aitk";

/// `aitk push`.
#[derive(Args, Clone, Debug)]
#[command(
    after_help = "Examples:\n  aitk push output/my_lora --repo me/my_lora --private\n  aitk push output/my_lora --repo me/my_lora --dry-run"
)]
pub struct PushArgs {
    /// The run folder of a training
    #[arg(value_name = "FOLDER")]
    pub folder: String,
    /// Repository to upload to, made if it does not exist
    #[arg(long, value_name = "USER/NAME")]
    pub repo: String,
    /// Make a new repository private
    #[arg(long)]
    pub private: bool,
    /// Message of the commit
    #[arg(short, long, value_name = "TEXT", default_value = PUSH_MESSAGE)]
    pub message: String,
    /// Only list the files
    #[arg(long)]
    pub dry_run: bool,
    /// No progress bar and no progress lines
    #[arg(long)]
    pub no_progress: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}
