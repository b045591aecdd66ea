//! The command line arguments: all commands, flags and examples. `docs/cli.md` is generated from them.

mod artifacts;
mod bench;
mod jobs;
mod local;
mod machines;
mod notify;

pub use artifacts::{ArtifactsArgs, ArtifactsCommand, ArtifactsGetArgs, ArtifactsLsArgs};
pub use bench::{BenchArgs, BenchCommand, BenchControlArgs, BenchEngineArgs, BenchStore};
pub use jobs::{CloneArgs, ExplainArgs, FitArgs, LogsArgs, PauseArgs, PriorityArgs, PsArgs, SampleArgs, SaveArgs};
pub use jobs::{PUSH_MESSAGE, PlotArgs, PushArgs, ValidateArgs};
pub use jobs::{ResumeArgs, RmArgs, StopArgs, SubmitArgs, WaitArgs, WatchArgs};
pub use local::{
    AttemptArgs, CompletionsArgs, ConvertArgs, DemoArgs, DemoKind, HelpArgs, ImportArgs, InitArgs, RunArgs, UpArgs,
};
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
  AITK_CA_FILE     CA certificate that signed the coordinator's
  AITK_USER        owner of submitted jobs, for shares and quotas
  AITK_NOTIFY_URL  webhook that is called when a job has ended (--notify-url)
  AITK_LOG_LEVEL   error, warn, info, debug, trace
  NO_COLOR         no colours;  COLUMNS  width of tables
Precedence: flag, environment, ./aitk.yaml, settings file
(~/.config/aitk/config.yaml), running `aitk up`. `aitk doctor` shows which one
is used.";

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
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

/// Flags of every command.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Global options")]
pub struct Global {
    /// Address of the coordinator, or the addresses of several that form one cluster, separated by commas [env:
    /// AITK_SERVER]
    #[arg(long, global = true, value_name = "URL")]
    pub server: Option<String>,
    /// File with the token, mode 0600 [env: AITK_TOKEN_FILE]
    #[arg(long, global = true, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// CA certificate (PEM) that signed the coordinator's certificate [env: AITK_CA_FILE]
    #[arg(long, global = true, value_name = "FILE")]
    pub ca_file: Option<PathBuf>,
    /// Do not use colours
    #[arg(long, global = true)]
    pub no_color: bool,
    /// Log more: -v info, -vv debug, -vvv trace
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub verbose: u8,
    /// Log level: error, warn, info, debug, trace, or tracing directives [env: AITK_LOG_LEVEL]
    #[arg(long, global = true, value_name = "LEVEL")]
    pub log_level: Option<String>,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run configs on this machine, without a server
    #[command(
        long_about = "Run configs on this machine, without a server.\n\nReplaces `python run.py CONFIG…` of \
                     ai-toolkit: same folders and file names under training_folder/name. Run the same command again \
                     to resume a training; other jobs start from the beginning. The first Ctrl-C saves \
                     and stops (exit code 130), a second one kills (137)."
    )]
    Run(RunArgs),
    /// Submit a config to a coordinator and print the job's id
    #[command(
        long_about = "Submit a config to a coordinator and print the job's id.\n\nThe config is checked here first. Local inputs \
                  (data sets, models) are uploaded as snapshots: files that are stored already are not sent again. \
                  From then on the job does not depend on this machine. With --follow the exit code is the job's; Ctrl-C \
                  detaches (exit code 130), and the job continues."
    )]
    Submit(SubmitArgs),
    /// Submit a copy of a job and print the copy's id
    #[command(
        long_about = "Submit a copy of a job and print the copy's id.\n\nThe copy has the job's config as submitted \
                     (with the values of variables and `[name]`), its stored inputs, and its models at the same \
                     commits. It is a new job: it starts from the beginning, and gets another seed if the config has \
                     none. --set and --name change it as in `aitk submit`; a new input of --set is uploaded from this \
                     machine. A job of `aitk run`, or a whole array, cannot be copied."
    )]
    Clone(CloneArgs),
    /// List jobs
    #[command(
        visible_alias = "status",
        long_about = "List jobs: active ones, and those that ended last.\n\nOn a terminal the output is a table; in a \
                     pipe the same columns are separated by tabs."
    )]
    Ps(PsArgs),
    /// Show the log of a job
    #[command(
        long_about = "Show the log of a job, each line with its time: log lines, devices, phases, losses (every \
                     logging.log_every steps) and saved files; or the log.txt of a run folder.\n\nWith -f the command \
                     follows the job until it ends and returns the job's exit \
                  code; Ctrl-C detaches (130) and the job continues. After a broken connection it continues where it stopped."
    )]
    Logs(LogsArgs),
    /// Follow a job until it ends
    #[command(
        long_about = "Follow a job until it ends: progress, log lines, files.\n\nReturns the job's exit code. Ctrl-C \
                     detaches (130) and the job continues. After a broken connection it continues where it stopped."
    )]
    Watch(WatchArgs),
    /// Wait for jobs to end
    #[command(
        long_about = "Wait for jobs to end.\n\nThe exit code is that of the first job, in the order given, that did not \
                  complete; 0 if all did; 124 if the time of --timeout has passed. Each job is printed with its state, then \
                  also those that have not ended (with --quiet only those that have)."
    )]
    Wait(WaitArgs),
    /// Stop a job after saving its state
    #[command(
        visible_alias = "cancel",
        long_about = "Stop a job after saving its state.\n\n`aitk resume` continues it from there. The command \
                     returns as soon as the stop is requested; `aitk wait` waits until the job has stopped."
    )]
    Stop(StopArgs),
    /// Delete a job that has ended, with its log, checkpoints and files
    #[command(
        long_about = "Delete a job that has ended, with its log, checkpoints and files.\n\nThe coordinator's next \
                     garbage collection removes the files from storage, except those that other jobs need. An array \
                     is deleted as a whole."
    )]
    Rm(RmArgs),
    /// Resume a stopped, paused or failed job from its last checkpoint
    #[command(
        long_about = "Resume a stopped, paused or failed job from its last checkpoint, on any machine that fits."
    )]
    Resume(ResumeArgs),
    /// Pause a job until it is resumed
    #[command(
        long_about = "Pause a job until it is resumed.\n\nA queued job is not started; a running one \
                     saves its state and frees its device. Both keep their position in the queue."
    )]
    Pause(PauseArgs),
    /// Save a running training now, without stopping it
    #[command(
        long_about = "Save a running training now, without stopping it.\n\nAfter its current step, the training writes a \
                      checkpoint and a save, named by its step, as `save_every` does, and goes on; the results are the same as \
                      without. The save counts for max_step_saves_to_keep. The command returns as soon as the request is on its \
                      way: `aitk logs` says when it is done, `aitk artifacts ls` lists the file. A second request before that \
                      changes nothing, and a request is lost if its worker is lost or the job stops before. The exit code is 6 \
                      if the job does not run or is not a training."
    )]
    Save(SaveArgs),
    /// Make the samples of a running training now
    #[command(
        long_about = "Make the samples of a running training now.\n\nAfter its current step, the training makes the \
                      samples of its config, named by its step, as `sample_every` does, and goes on; the results are the same \
                      as without. The command returns as soon as the request is on its way: `aitk logs` says when it is done, \
                      `aitk artifacts ls` lists the files. A second request before that changes nothing, and a request is lost if \
                      its worker is lost or the job stops before. The exit code is 6 if the job does not run, is not a training, \
                      or has no samples."
    )]
    Sample(SampleArgs),
    /// Change the priority of a job
    #[command(
        long_about = "Change the priority of a job: higher runs first.\n\nA running job keeps its device, unless it \
                     yields (cluster.yields) to jobs that now have a higher priority."
    )]
    Priority(PriorityArgs),
    /// Show why a job waits, device by device
    Explain(ExplainArgs),
    /// Show where a config could run, before it is submitted
    #[command(
        long_about = "Show where a config could run, before it is submitted: which machines, with which memory profile, how much \
                      memory and about how long.\n\nOnly the config is sent, and nothing is stored. The exit code is \
                      7 if no connected device fits."
    )]
    Fit(FitArgs),
    /// Check a config, its model and its data; nothing is sent or trained
    #[command(
        long_about = "Check a config, its model and its data; nothing is sent or trained.\n\nShows warnings about its \
                     keys, the family of its model (from configs and headers, not from weights), its images, captions \
                     and buckets as training will use them, the number of epochs, the files that it will write, and \
                     where it could run. The exit code is 1 if a problem would make the job fail, and 3 if there is \
                     no such config."
    )]
    Validate(ValidateArgs),
    /// Show the loss curve of a training
    #[command(
        long_about = "Show the loss curve of a training: of a job (the steps that its last training reported, see \
                     logging.log_every), or of a run folder on this machine (all steps, from its metrics.jsonl)."
    )]
    Plot(PlotArgs),
    /// Upload the results of a training to Hugging Face
    #[command(
        long_about = "Upload the results of a training to a model repository on Hugging Face, which is made if it does not exist.\n\nUploaded \
                     are the saves, the samples, the curve of the loss, and a model card with the base model, the trigger word, and the \
                     newest samples with their prompts; a README.md in the folder is taken instead. Not uploaded are the config and the log, \
                     which name folders of this machine, and checkpoints. What the hub has already is not sent again.\n\nThe token comes from \
                     HF_TOKEN, or from `hf auth login`, and needs the right to write. `aitk artifacts get my_lora -o results` \
                     downloads a job of `aitk submit` into results/my_lora. A training of `aitk run` with save.push_to_hub uploads at its end."
    )]
    Push(PushArgs),
    /// Import a config of sd-scripts or the kohya GUI
    #[command(
        long_about = "Import a config of sd-scripts (TOML, as --config_file takes it) or a preset of the kohya GUI (JSON), and print \
                     the YAML that it becomes.\n\nrun, submit, validate and fit take such a file directly. Notes about options that are \
                     ignored or have a slightly other effect go to standard error. An option that would change the result, and for which aitk \
                     has no counterpart, is an error. `aitk help sd-scripts` says what becomes of each option."
    )]
    Import(ImportArgs),
    /// Convert a LoRA file to the names of another program
    #[cfg(feature = "embedded")]
    #[command(
        long_about = "Convert a file of a LoRA, or of another type of adapter, to the names that another program reads, and \
                     to another number format or rank.\n\nLayers are matched by the names and shapes of the model; weights \
                     of the model are not read. docs/models.md#convert-files lists what each program reads."
    )]
    Convert(ConvertArgs),
    /// List or download the files of a job
    Artifacts(ArtifactsArgs),
    /// Show machines and jobs, live
    #[command(
        long_about = "Show machines and jobs, live: devices and their jobs, jobs and their progress, and below them \
                     why the selected job waits, device by device.\n\nKeys: arrows or j and k select a job, q quits."
    )]
    Top(TopArgs),
    /// List workers and their devices
    Workers(WorkersArgs),
    /// Drain, undrain or forget a worker
    Worker(WorkerArgs),
    /// Check this machine, its settings and the connection to the coordinator
    #[command(
        long_about = "Check this machine, its settings and the connection to the coordinator.\n\nEach problem is \
                     shown with a fix. The exit code is 0 if no problem was found, else 1.\n\n--thorough also trains the \
                     demo's LoRA for 20 steps and generates its images in each dtype that works, compares losses and \
                     images with the CPU's, compares the memory of larger jobs with the predictions, and measures \
                     the benchmarks of `aitk bench engine`. Run it on a new GPU, and attach its --json to a report \
                     of a problem."
    )]
    Doctor(DoctorArgs),
    /// Save a coordinator and a token for all commands of this user
    #[command(
        long_about = "Save a coordinator and a token for all commands of this user.\n\nThe token comes from standard input (or \
                      --token-file). A token from a coordinator with a certificate authority names that authority: no \
                      CA file is needed, and the token is not sent to any other server. Address and token are tested, \
                      then saved: the address in the settings file (~/.config/aitk/config.yaml), the token beside it with mode 0600."
    )]
    Login(LoginArgs),
    /// Write a commented job file to start from
    Init(InitArgs),
    /// Start a coordinator and a worker here
    #[command(
        long_about = "Start a coordinator and a worker here.\n\nOther aitk commands of this user find it \
                     automatically. The first Ctrl-C lets running jobs save, then stops; they resume at the next \
                     `aitk up`. An address other than \
                  loopback needs --tls-cert and --tls-key."
    )]
    Up(UpArgs),
    /// Train a tiny model in two minutes and show the result
    Demo(DemoArgs),
    /// Measure the speed of aitk on this machine
    Bench(BenchArgs),
    /// Show the documentation that comes with the program, or the help of a command
    #[command(
        long_about = "Show the documentation that comes with the program, or the help of a command.\n\nWithout a \
                     topic it lists all commands and topics. On a terminal the text is shown in $PAGER, or less."
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
    fn clap_accepts_the_definitions() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_flags_of_ai_toolkits_run_py_parse() {
        let cli = Cli::parse_from(["aitk", "run", "a.yaml", "b", "-r", "-n", "ada", "-l", "x.log"]);
        let Command::Run(run) = cli.command else { panic!() };
        assert!(run.recover && run.configs.len() == 2);
        assert_eq!((run.name.as_deref(), run.log), (Some("ada"), Some("x.log".into())));
    }

    #[test]
    fn every_command_has_two_examples() {
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
    fn global_flags_are_accepted_before_and_after_the_command() {
        for line in [
            ["aitk", "--server", "http://x", "ps"],
            ["aitk", "ps", "--server", "http://x"],
        ] {
            assert_eq!(Cli::parse_from(line).global.server.as_deref(), Some("http://x"));
        }
    }
}
