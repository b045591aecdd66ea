//! Flags of the verbs for a job's files.

use clap::{Args, Subcommand};
use std::path::PathBuf;

/// `aitk artifacts`.
#[derive(Args, Clone, Debug)]
#[command(
    after_help = "Examples:\n  aitk artifacts ls my_lora\n  aitk artifacts get my_lora -o out",
    disable_help_subcommand = true
)]
pub struct ArtifactsArgs {
    /// List or fetch.
    #[command(subcommand)]
    pub command: ArtifactsCommand,
}

/// The verbs below `aitk artifacts`.
#[derive(Clone, Debug, Subcommand)]
pub enum ArtifactsCommand {
    /// List what a job made
    Ls(ArtifactsLsArgs),
    /// Fetch what a job made
    #[command(
        long_about = "Fetch what a job made into a folder.\n\nEvery file is checked against its hash and appears only when it is \
                  complete. Files that are there already with the same content are skipped, so the same command goes on \
                  after a break. Nothing is ever written outside the folder. Prints the paths of the files."
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
    /// Folder to write into; it is made if need be [default: one with the job's name, here]
    #[arg(short, long, value_name = "DIR")]
    pub output: Option<PathBuf>,
    /// Replace files that are there with another content
    #[arg(long)]
    pub force: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// No progress bar and no progress lines
    #[arg(long)]
    pub no_progress: bool,
}
