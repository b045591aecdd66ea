//! Arguments of the commands for a job's files.

use clap::{Args, Subcommand};
use std::path::PathBuf;

/// `aitk artifacts`.
#[derive(Args, Clone, Debug)]
#[command(
    after_help = "Examples:\n  aitk artifacts ls my_lora\n  aitk artifacts get my_lora -o out",
    disable_help_subcommand = true
)]
pub struct ArtifactsArgs {
    /// The subcommand.
    #[command(subcommand)]
    pub command: ArtifactsCommand,
}

/// The subcommands of `aitk artifacts`.
#[derive(Clone, Debug, Subcommand)]
pub enum ArtifactsCommand {
    /// List the files of a job
    Ls(ArtifactsLsArgs),
    /// Download the files of a job
    #[command(
        long_about = "Download the files of a job into a folder.\n\nEvery file is checked against its hash and \
                     appears only when it is \
                  complete. Existing files with the same content are skipped, so the same command continues an \
                  interrupted download. Nothing is written outside the folder. Prints the paths of the files."
    )]
    Get(ArtifactsGetArgs),
}

/// `aitk artifacts ls`.
#[derive(Args, Clone, Debug)]
#[command(
    after_help = "Examples:\n  aitk artifacts ls my_lora '*.safetensors'\n  aitk artifacts ls 3f2a --kind sample -q"
)]
pub struct ArtifactsLsArgs {
    /// Job: its id, its name, or the beginning of its id
    #[arg(value_name = "JOB")]
    pub job: String,
    /// Only these: names, folders, or patterns with * and ?
    #[arg(value_name = "NAME")]
    pub names: Vec<String>,
    /// Only of this kind: lora, sample, image, …; may be given several times
    #[arg(long = "kind", value_name = "KIND")]
    pub kinds: Vec<String>,
    /// Names only
    #[arg(short, long, conflicts_with = "json")]
    pub quiet: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `aitk artifacts get`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:\n  aitk artifacts get my_lora\n  aitk artifacts get 3f2a -o out '*.safetensors'")]
pub struct ArtifactsGetArgs {
    /// Job: its id, its name, or the beginning of its id
    #[arg(value_name = "JOB")]
    pub job: String,
    /// Only these: names, folders, or patterns with * and ?
    #[arg(value_name = "NAME")]
    pub names: Vec<String>,
    /// Only of this kind: lora, sample, image, …; may be given several times
    #[arg(long = "kind", value_name = "KIND")]
    pub kinds: Vec<String>,
    /// Folder to write to, created if necessary [default: a folder with the job's name]
    #[arg(short, long, value_name = "DIR")]
    pub output: Option<PathBuf>,
    /// Replace existing files with other content
    #[arg(long)]
    pub force: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// No progress bar and no progress lines
    #[arg(long)]
    pub no_progress: bool,
}
