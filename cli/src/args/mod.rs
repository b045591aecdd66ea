//! The command line: every verb, flag and example. `docs/cli.md` is made from here.

mod artifacts;
mod bench;
mod jobs;
mod local;
mod machines;
mod notify;

pub use artifacts::{ArtifactsArgs, ArtifactsCommand, ArtifactsGetArgs, ArtifactsLsArgs};
pub use bench::{BenchArgs, BenchCommand, BenchControlArgs, BenchEngineArgs, BenchStore};
pub use jobs::{CloneArgs, ExplainArgs, FitArgs, LogsArgs, PauseArgs, PriorityArgs, PsArgs};
pub use jobs::{PlotArgs, ValidateArgs};
pub use jobs::{ResumeArgs, RmArgs, StopArgs, SubmitArgs, WaitArgs, WatchArgs};
pub use local::{AttemptArgs, CompletionsArgs, DemoArgs, HelpArgs, InitArgs, RunArgs, UpArgs};
pub use machines::{
    DoctorArgs, DrainArgs, ForgetArgs, LoginArgs, TopArgs, UndrainArgs, WorkerArgs, WorkerCommand, WorkerState,
    WorkersArgs,
};
pub use notify::NotifyArgs;

use crate::exit::help_table;
use clap::{Args, Parser, Subcommand};
use std::path::PathBuf;

const ENVIRONMENT: &str = "Environment:
  AITK_SERVER      address of the coordinator
  AITK_TOKEN_FILE  file with the token, mode 0600; or AITK_TOKEN, the token
  AITK_CA_FILE     CA certificate that signs the coordinator's
  AITK_USER        whose jobs are submitted, for shares and quotas
  AITK_NOTIFY_URL  where to post that a job has ended (--notify-url)
  AITK_LOG_LEVEL   error, warn, info, debug, trace
  NO_COLOR         no colours;  COLUMNS  width of tables
A flag wins over the environment, that over ./aitk.yaml, that over the user file
(~/.config/aitk/config.yaml), that over a running `aitk up`. `aitk doctor` shows
which of them is used.";

fn root_help() -> String {
    format!("{}\n\n{ENVIRONMENT}", help_table())
}

/// Train and run generative models on the machines you already own.
#[derive(Debug, Parser)]
#[command(
    name = "aitk",
    bin_name = "aitk",
    version,
    about,
    after_help = root_help(),
    disable_help_subcommand = true,
    subcommand_required = true,
    arg_required_else_help = true,
    max_term_width = 100
)]
pub struct Cli {
    /// Flags of every command.
    #[command(flatten)]
    pub global: Global,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Flags of every command.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Global options")]
pub struct Global {
    /// Address of the coordinator; of several that share their work all, with commas between [env: AITK_SERVER]
    #[arg(long, global = true, value_name = "URL")]
    pub server: Option<String>,
    /// File that holds the token, mode 0600 [env: AITK_TOKEN_FILE]
    #[arg(long, global = true, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// CA certificate (PEM) that signs the coordinator's [env: AITK_CA_FILE]
    #[arg(long, global = true, value_name = "FILE")]
    pub ca_file: Option<PathBuf>,
    /// No colours
    #[arg(long, global = true)]
    pub no_color: bool,
    /// Say more: -v what the program does, -vv details
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub verbose: u8,
    /// error, warn, info, debug, trace, or tracing directives [env: AITK_LOG_LEVEL]
    #[arg(long, global = true, value_name = "LEVEL")]
    pub log_level: Option<String>,
}

/// The verbs.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run configs on this machine, with no server
    #[command(
        long_about = "Run configs on this machine, with no server.\n\nDoes what `python run.py CONFIG…` did: same folders and file \
                  names under training_folder/name. Run the same command again to resume. The first Ctrl-C saves and \
                  stops (exit code 130), a second one kills (137)."
    )]
    Run(RunArgs),
    /// Submit a config to a coordinator; prints the job's id
    #[command(
        long_about = "Submit a config to a coordinator; prints the job's id.\n\nThe config is checked here first. Local inputs \
                  (data sets, models) are uploaded as snapshots: what the store already has is not sent again. From then \
                  on nothing depends on this machine. With --follow, Ctrl-C detaches (exit code 130) and the job goes on; \
                  otherwise the exit code is the job's."
    )]
    Submit(SubmitArgs),
    /// Submit a copy of a job; prints the copy's id
    #[command(
        long_about = "Submit a copy of a job; prints the copy's id.\n\nThe copy has the config of the job as it was submitted (what \
                      variables and `[name]` stood for included), its inputs as they are stored, and its models at the same \
                      commits. It is another job: it starts from the beginning, and its seed is another one where the config \
                      has none. --set and --name change it as in `aitk submit`; an input that --set brings in is taken from \
                      this machine. A job of `aitk run`, and an array as a whole, cannot be copied."
    )]
    Clone(CloneArgs),
    /// List jobs
    #[command(
        visible_alias = "status",
        long_about = "List jobs: the active ones and the last ones that ended.\n\nOn a terminal a table; in a pipe the same \
                  columns with tabs between them."
    )]
    Ps(PsArgs),
    /// Show what happened to a job
    #[command(
        long_about = "Show what happened to a job, with its time: what it wrote, where it ran, its phases, its loss (every \
                  logging.log_every steps), and the files it saved; or the log.txt of a run folder.\n\nWith -f the command follows the job until it ends and returns the job's exit \
                  code; Ctrl-C detaches (130) and the job goes on. A broken connection is taken up where it stopped."
    )]
    Logs(LogsArgs),
    /// Follow a job until it ends
    #[command(
        long_about = "Follow a job until it ends: progress, log lines, files.\n\nReturns the job's exit code. Ctrl-C detaches \
                  (130) and the job goes on. A broken connection is taken up where it stopped."
    )]
    Watch(WatchArgs),
    /// Wait for jobs to end
    #[command(
        long_about = "Wait for jobs to end.\n\nThe exit code is that of the first job, in the order given, that did not \
                  complete; 0 when all did; 124 when the time is over first."
    )]
    Wait(WaitArgs),
    /// Stop a job after saving its state
    #[command(
        visible_alias = "cancel",
        long_about = "Stop a job after saving its state.\n\n`aitk resume` lets it go on from there. The command returns when the \
                  job is asked to stop; `aitk wait` waits until it has."
    )]
    Stop(StopArgs),
    /// Forget a job that has ended, with its log, its checkpoints and its files
    #[command(
        long_about = "Forget a job that has ended, with its log, its checkpoints and its files.\n\nWhat no other job needs is removed \
                      from storage by the coordinator's next collection. An array is removed as a whole."
    )]
    Rm(RmArgs),
    /// Let a stopped, paused or failed job go on from its last checkpoint
    #[command(
        long_about = "Let a stopped, paused or failed job go on from its last checkpoint, on whatever machine fits."
    )]
    Resume(ResumeArgs),
    /// Let a job wait, saved, until it is resumed
    #[command(
        long_about = "Let a job wait, saved, until it is resumed.\n\nA waiting job is not started; a running one saves its state \
                      first and leaves its device to others. Either keeps its place in the queue."
    )]
    Pause(PauseArgs),
    /// Give a job another priority
    #[command(
        long_about = "Give a job another priority: higher goes first.\n\nA running job keeps its device, unless it yields \
                      (cluster.yields) to those who are now above it."
    )]
    Priority(PriorityArgs),
    /// Say why a job waits, device by device
    Explain(ExplainArgs),
    /// Say where a config could run, before it is submitted
    #[command(
        long_about = "Say where a config could run, before it is submitted: which machines, with which memory profile, how much \
                      memory and about how long.\n\nNothing is stored and nothing is sent but the config. The exit code is 7 \
                      when no connected device fits."
    )]
    Fit(FitArgs),
    /// Check a config, its model and its data; nothing is sent or trained
    #[command(
        long_about = "Check a config, its model and its data; nothing is sent or trained.\n\nShows what its keys give rise to, \
                      the family of its model (from configs and headers, never weights), its images, captions and sizes \
                      as training will see them, how many passes its steps make, what it will write, and where it could \
                      run. The exit code is 1 when something would end the job, and 3 when there is no such config."
    )]
    Validate(ValidateArgs),
    /// Show the curve of a training's loss
    #[command(
        long_about = "Show the curve of a training's loss: of a job (the steps that it told, see logging.log_every), or every step \
                      of a run folder on this machine, from its metrics.jsonl."
    )]
    Plot(PlotArgs),
    /// List or fetch what a job made
    Artifacts(ArtifactsArgs),
    /// Show machines and jobs, live
    #[command(
        long_about = "Show machines and jobs, live: devices with what runs on them, jobs with how far they are, and below them the \
                      chosen job, with why it waits, device by device.\n\nKeys: arrows or j and k choose a job, q leaves."
    )]
    Top(TopArgs),
    /// List workers and their devices
    Workers(WorkersArgs),
    /// Let a worker take no more work, or work again
    Worker(WorkerArgs),
    /// Check this machine, its settings and the way to the coordinator
    #[command(
        long_about = "Check this machine, its settings and the way to the coordinator.\n\nEach problem comes with what to do \
                  about it. The exit code is 0 when jobs can run, here or there; 1 when there is a problem."
    )]
    Doctor(DoctorArgs),
    /// Remember a coordinator and a token, for every command of this user
    #[command(
        long_about = "Remember a coordinator and a token, for every command of this user.\n\nThe token comes from standard input (or \
                      --token-file). One from a coordinator with a certificate authority names that authority: nothing else \
                      is needed, and whoever else answers at the address gets nothing. Both are tried, then kept beside the \
                      user file (~/.config/aitk/config.yaml), the token with mode 0600."
    )]
    Login(LoginArgs),
    /// Write a commented job file to start from
    Init(InitArgs),
    /// Start a coordinator and a worker here
    #[command(
        long_about = "Start a coordinator and a worker here.\n\nOther aitk commands of this user find it by themselves. The first \
                  Ctrl-C lets running jobs save and goes; they are taken up at the next `aitk up`. An address other than \
                  loopback needs --tls-cert and --tls-key."
    )]
    Up(UpArgs),
    /// Train a tiny model in two minutes and show the result
    Demo(DemoArgs),
    /// Measure how fast the parts of aitk are here
    Bench(BenchArgs),
    /// Show the documentation that comes with the program, or the help of a command
    #[command(
        long_about = "Show the documentation that comes with the program, or the help of a command.\n\nWithout a topic: all commands and \
                  all topics. On a terminal the text is shown in $PAGER, or less."
    )]
    Help(HelpArgs),
    /// Write shell completions
    Completions(CompletionsArgs),
    /// Run one attempt (started by the worker)
    #[command(hide = true)]
    Attempt(AttemptArgs),
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn upstream_spellings_of_run_parse() {
        let cli = Cli::parse_from(["aitk", "run", "a.yaml", "b", "-r", "-n", "ada", "-l", "x.log"]);
        let Command::Run(run) = cli.command else { panic!() };
        assert!(run.recover && run.configs.len() == 2);
        assert_eq!((run.name.as_deref(), run.log), (Some("ada"), Some("x.log".into())));
    }

    #[test]
    fn every_verb_shows_two_examples() {
        fn check(command: &clap::Command, path: &str) {
            for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
                let path = format!("{path} {}", sub.get_name());
                let text = sub.get_after_help().map(ToString::to_string).unwrap_or_default();
                let examples = text.lines().filter(|line| line.contains("aitk ")).count();
                assert!(examples >= 2, "{path} has {examples} examples");
                check(sub, &path);
            }
        }
        check(&Cli::command(), "aitk");
    }

    #[test]
    fn global_flags_go_anywhere() {
        for line in [
            ["aitk", "--server", "http://x", "ps"],
            ["aitk", "ps", "--server", "http://x"],
        ] {
            assert_eq!(Cli::parse_from(line).global.server.as_deref(), Some("http://x"));
        }
    }
}
