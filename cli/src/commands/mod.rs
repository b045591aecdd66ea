//! The commands.

mod artifacts;
mod clone;
#[cfg(feature = "embedded")]
mod convert;
mod doctor;
mod forecast;
mod help;
mod import;
mod init;
mod jobs;
mod login;
mod logs;
mod plot;
mod push;
mod submit;
#[cfg(feature = "embedded")]
mod up;
mod validate;
mod workers;

#[cfg(feature = "embedded")]
pub mod run;

use crate::args::{ArtifactsCommand, Cli, Command, WorkerCommand};
use crate::context::Context;
use crate::exit::Exit;
use crate::failure::{CommandResult, Failure};
use clap::CommandFactory;

/// Runs the command of the command line.
///
/// # Errors
/// The error of the command.
pub async fn dispatch(cli: Cli) -> CommandResult {
    let context = Context::new(cli.global)?;
    match cli.command {
        #[cfg(feature = "embedded")]
        Command::Run(args) => Box::pin(run::run(&context, args)).await,
        Command::Submit(args) => Box::pin(submit::submit(&context, args)).await,
        Command::Clone(args) => Box::pin(clone::clone(&context, args)).await,
        Command::Ps(args) => jobs::ps(&context, args).await,
        Command::Logs(args) => logs::logs(&context, args).await,
        Command::Watch(args) => logs::watch(&context, args).await,
        Command::Wait(args) => jobs::wait(&context, args).await,
        Command::Stop(args) => jobs::stop(&context, args).await,
        Command::Rm(args) => jobs::rm(&context, args).await,
        Command::Resume(args) => jobs::resume(&context, args).await,
        Command::Pause(args) => jobs::pause(&context, args).await,
        Command::Save(args) => jobs::save(&context, args).await,
        Command::Sample(args) => jobs::sample(&context, args).await,
        Command::Priority(args) => jobs::priority(&context, args).await,
        Command::Explain(args) => forecast::explain(&context, args).await,
        Command::Fit(args) => Box::pin(forecast::fit(&context, args)).await,
        Command::Validate(args) => Box::pin(validate::validate(&context, args)).await,
        Command::Plot(args) => Box::pin(plot::plot(&context, args)).await,
        Command::Push(args) => Box::pin(push::push(&context, args)).await,
        #[cfg(feature = "embedded")]
        Command::Convert(args) => Box::pin(convert::convert(&context, args)).await,
        Command::Artifacts(args) => match args.command {
            ArtifactsCommand::Ls(args) => artifacts::ls(&context, args).await,
            ArtifactsCommand::Get(args) => Box::pin(artifacts::get(&context, args)).await,
        },
        Command::Top(args) => Box::pin(crate::top::run(&context, &args)).await,
        Command::Workers(args) => workers::workers(&context, args).await,
        Command::Worker(args) => match args.command {
            WorkerCommand::Drain(args) => workers::drain(&context, args).await,
            WorkerCommand::Undrain(args) => workers::undrain(&context, args).await,
            WorkerCommand::Forget(args) => workers::forget(&context, args).await,
        },
        Command::Doctor(args) => Box::pin(doctor::doctor(&context, args)).await,
        Command::Login(args) => Box::pin(login::login(&context, args)).await,
        Command::Init(args) => init::init(&context, &args),
        Command::Import(args) => import::import(&context, &args),
        #[cfg(feature = "embedded")]
        Command::Up(args) => Box::pin(up::up(&context, args)).await,
        #[cfg(feature = "embedded")]
        Command::Bench(args) => Box::pin(crate::bench::run(&context, args)).await,
        Command::Help(args) => help::help(&context, &args),
        Command::Completions(args) => completions(&context, args.shell),
        #[cfg(not(feature = "embedded"))]
        Command::Run(_) => Err(not_embedded("run")),
        #[cfg(not(feature = "embedded"))]
        Command::Up(_) => Err(not_embedded("up")),
        #[cfg(not(feature = "embedded"))]
        Command::Demo(_) => Err(not_embedded("demo")),
        #[cfg(not(feature = "embedded"))]
        Command::Bench(_) => Err(not_embedded("bench")),
        #[cfg(feature = "embedded")]
        Command::Demo(args) => Box::pin(crate::demo::run(&context, args)).await,
        Command::Attempt(_) => Err(Failure::failed("`attempt` has to be started without an async runtime")),
    }
}

fn completions(context: &Context, shell: clap_complete::Shell) -> CommandResult {
    context.ui(true).data(completion_text(shell).trim_end())?;
    Ok(Exit::Ok)
}

/// The completions of a shell. The command that only aitk itself starts is left out: the generators offer hidden commands too.
fn completion_text(shell: clap_complete::Shell) -> String {
    let all = Cli::command();
    let shown = all.get_subcommands().filter(|command| !command.is_hide_set());
    let mut command = clap::Command::new("aitk")
        .version(env!("CARGO_PKG_VERSION"))
        .disable_help_subcommand(true)
        .args(all.get_arguments().cloned())
        .subcommands(shown.cloned());
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut command, "aitk", &mut text);
    String::from_utf8_lossy(&text).into_owned()
}

/// Returns the error of commands that need an embedded coordinator and worker, for a build without them.
#[cfg(not(feature = "embedded"))]
fn not_embedded(command: &str) -> Failure {
    Failure::failed(format!(
        "this aitk was built as a small client, without `aitk {command}`"
    ))
    .hint("build it with the default features: cargo install --locked --path cli")
    .hint("or submit to a coordinator: aitk submit CONFIG --server URL")
}
