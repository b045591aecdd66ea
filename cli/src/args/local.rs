//! Arguments of the commands that work on this machine, without a server.

use super::NotifyArgs;
use aitk_common::sd_scripts::Script;
use clap::Args;
use std::path::PathBuf;

/// `aitk run`.
#[derive(Args, Clone, Debug)]
#[command(
    after_help = "Examples:\n  aitk run my_lora.yaml\n  aitk run a.yaml b.yaml --recover -l run.log\n  aitk run my_lora.yaml --set train.steps=50"
)]
pub struct RunArgs {
    /// Config files, run in this order: names in ./config or paths
    #[arg(required = true, value_name = "CONFIG")]
    pub configs: Vec<PathBuf>,
    /// Continue with the next config when one fails
    #[arg(short, long)]
    pub recover: bool,
    /// Replaces `[name]` in the config
    #[arg(short, long)]
    pub name: Option<String>,
    /// Set a key of the configs to another value, as YAML: 2e-4, [a, b]; may be given several times
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Training script that a config of sd-scripts is for, such as fine_tune [default: found by its options and its model]
    #[arg(long, value_name = "SCRIPT", value_parser = Script::from_name)]
    pub script: Option<Script>,
    /// Also append everything that is shown to this file
    #[arg(short, long = "log", value_name = "LOGFILE")]
    pub log: Option<PathBuf>,
    /// Device to compute on: cuda, cuda:1, metal, cpu
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<String>,
    /// Extensions.
    #[command(flatten)]
    pub extensions: ExtensionArgs,
    /// Notifications.
    #[command(flatten)]
    pub notify: NotifyArgs,
    /// No progress bar and no progress lines
    #[arg(long)]
    pub no_progress: bool,
    /// Print every event as one line of JSON
    #[arg(long)]
    pub json: bool,
}

/// The programs that jobs may run as extensions.
#[derive(Args, Clone, Debug, Default)]
pub struct ExtensionArgs {
    /// Program that jobs may run as the extension NAME, inside their sandbox (`aitk help extensions`); may be given
    /// several times
    #[arg(
        long,
        env = "AITK_ALLOW_EXTENSION",
        value_name = "NAME=PROGRAM",
        value_delimiter = ','
    )]
    pub allow_extension: Vec<String>,
}

/// `aitk init`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:\n  aitk init\n  aitk init config/my_lora.yaml --force")]
pub struct InitArgs {
    /// File to write, or the folder in which to write job.yaml
    #[arg(value_name = "DIR|FILE", default_value = ".")]
    pub path: PathBuf,
    /// Overwrite an existing file
    #[arg(long)]
    pub force: bool,
}

/// `aitk import`.
#[derive(Args, Clone, Debug)]
#[command(
    after_help = "Examples:\n  aitk import config.toml\n  aitk import config.toml --script sdxl_train_network -o my_lora.yaml\n  aitk import \
                  preset.json -o my_lora.yaml"
)]
pub struct ImportArgs {
    /// TOML config of sd-scripts, or JSON preset of the kohya GUI. Paths in it are relative to the current folder
    #[arg(value_name = "FILE")]
    pub config: PathBuf,
    /// Data set config, instead of the one that FILE names
    #[arg(long, value_name = "FILE")]
    pub dataset_config: Option<PathBuf>,
    /// Training script that FILE is for, such as flux_train_network [default: found by its options and its model]
    #[arg(long, value_name = "NAME")]
    pub script: Option<String>,
    /// File to write [default: standard output]
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Overwrite an existing file
    #[arg(long)]
    pub force: bool,
}

/// `aitk convert`.
#[derive(Args, Clone, Debug)]
#[command(
    after_help = "Examples:\n  aitk convert my_lora.safetensors my_lora_comfy.safetensors --to comfyui --model models/flux-dev\n  aitk convert \
                  big.safetensors small.safetensors --to ai-toolkit --model sdxl.safetensors --rank 16 --dtype bf16"
)]
pub struct ConvertArgs {
    /// Adapter file, or a folder of diffusers or peft with one
    #[arg(value_name = "INPUT")]
    pub input: PathBuf,
    /// File to write
    #[arg(value_name = "OUTPUT")]
    pub output: PathBuf,
    /// Program whose names the file gets: ai-toolkit, sd-scripts, diffusers, comfyui, lycoris
    #[arg(long, value_name = "PROGRAM")]
    pub to: String,
    /// Model that the adapter is for: a whole diffusers folder or checkpoint. Of its weights only names and shapes are read
    #[arg(long, value_name = "PATH")]
    pub model: PathBuf,
    /// Number format: float32, float16, bfloat16 [default: that of INPUT]
    #[arg(long, value_name = "DTYPE")]
    pub dtype: Option<String>,
    /// Highest rank. Layers of a higher rank, and those of other types, become LoRAs of this rank. Layers that PROGRAM has as one,
    /// such as q, k and v, have the sum of their ranks
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=16384))]
    pub rank: Option<u32>,
    /// Overwrite an existing file
    #[arg(long)]
    pub force: bool,
}

/// `aitk up`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:\n  aitk up\n  aitk up --bind 0.0.0.0:7420 --tls-cert cert.pem --tls-key key.pem")]
pub struct UpArgs {
    /// Address to listen on; port 0 selects a free port
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:7420")]
    pub bind: std::net::SocketAddr,
    /// Folder for jobs, checkpoints and the token [default: ~/.local/share/aitk]
    #[arg(long, value_name = "DIR")]
    pub data_dir: Option<PathBuf>,
    /// PostgreSQL database of the coordinator: postgres://USER@HOST/NAME [default: SQLite below --data-dir]
    #[arg(long, value_name = "URL")]
    pub database: Option<String>,
    /// Object storage: file:///…, s3://bucket/prefix, gs://…, az://… [default: below --data-dir]
    #[arg(long, value_name = "URL")]
    pub storage: Option<String>,
    /// TLS certificate (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// TLS key (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// Start only the coordinator, no worker
    #[arg(long)]
    pub no_worker: bool,
    /// The worker's device: cuda, cuda:1, metal, cpu, cpu:portable [default: the best device]
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<String>,
    /// The worker's name [default: the name of this machine]
    #[arg(long, value_name = "NAME")]
    pub worker_name: Option<String>,
    /// Refuse to start if the files and the network of jobs cannot be confined (`aitk help security`)
    #[arg(long, env = "AITK_REQUIRE_SANDBOX", value_parser = clap::builder::BoolishValueParser::new(), num_args = 0..=1,
          default_missing_value = "true", default_value = "false", require_equals = true, value_name = "BOOL",
          hide_default_value = true, hide_possible_values = true)]
    pub require_sandbox: bool,
    /// A repository on Hugging Face, ORG/NAME or ORG/*, for which jobs may use this machine's token of it (HF_TOKEN,
    /// or that of `hf auth login`); may be given several times
    #[arg(long, env = "AITK_HUB_ALLOW", value_name = "REPOSITORY", value_delimiter = ',')]
    pub hub_allow: Vec<String>,
    /// Largest model that is downloaded from Hugging Face for a job, in GiB
    #[arg(long, env = "AITK_LARGEST_MODEL_GIB", value_name = "GIB", default_value_t = 200)]
    pub largest_model_gib: u64,
    /// Folder with the users' Hugging Face tokens, in files USER/NAME with mode 0600
    #[arg(long, env = "AITK_HUB_SECRETS", value_name = "DIR")]
    pub hub_secrets: Option<PathBuf>,
    /// Extensions.
    #[command(flatten)]
    pub extensions: ExtensionArgs,
}

/// What `aitk demo` trains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum DemoKind {
    /// A LoRA for a tiny Stable Diffusion
    Image,
    /// A small code model, from scratch
    Code,
}

/// `aitk demo`.
#[derive(Args, Clone, Debug)]
#[command(
    after_help = "Examples:\n  aitk demo\n  aitk demo -o my_demo\n  aitk demo code\n  aitk demo code --data my_project/src"
)]
pub struct DemoArgs {
    /// What to train
    #[arg(value_name = "WHAT", value_enum, default_value = "image")]
    pub what: DemoKind,
    /// Output folder: a new or empty one, or one of an earlier demo [default: aitk-demo, or aitk-code-demo]
    #[arg(short, long, value_name = "DIR")]
    pub output: Option<PathBuf>,
    /// For `code`: folder of Rust files to train on [default: some of aitk's own, which the program contains]
    #[arg(long, value_name = "DIR")]
    pub data: Option<PathBuf>,
    /// Device to compute on: cuda, cuda:1, metal, cpu
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<String>,
    /// No progress bars and no progress lines
    #[arg(long)]
    pub no_progress: bool,
}

/// `aitk completions`.
#[derive(Args, Clone, Debug)]
#[command(
    after_help = "Examples:\n  aitk completions bash > ~/.local/share/bash-completion/completions/aitk\n  aitk completions zsh \
                  > ~/.zfunc/_aitk"
)]
pub struct CompletionsArgs {
    /// Which shell
    pub shell: clap_complete::Shell,
}

/// `aitk attempt`, hidden.
#[derive(Args, Clone, Debug)]
pub struct AttemptArgs {
    /// The attempt's spec, written by the worker
    #[arg(long, value_name = "FILE", required_unless_present = "try_sandbox")]
    pub spec: Option<PathBuf>,
    /// Confine this process to a folder, try forbidden operations, and print which protections are in force
    #[arg(long, value_name = "FOLDER", conflicts_with = "spec")]
    pub try_sandbox: Option<PathBuf>,
}

/// `aitk help`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:\n  aitk help topics\n  aitk help config-keys\n  aitk help worker drain")]
pub struct HelpArgs {
    /// A topic, or a command
    #[arg(value_name = "TOPIC|COMMAND")]
    pub topic: Vec<String>,
}
