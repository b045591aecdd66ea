//! Generates `docs/cli.md` from the command line arguments; a test checks that the file is up to date.

use crate::args::Cli;
use crate::exit::Exit;
use clap::CommandFactory;
use std::fmt::Write as _;

const INTRODUCTION: &str = "# The `aitk` command line

<!-- Made from the program: `AITK_UPDATE_GOLDEN=1 cargo test -p aitk docs`. Do not edit. -->

This page is for everyone who uses `aitk` or writes scripts with it: every command, every option, and the exit codes.

Results and the log of a job (with its warnings) go to standard output. Progress, notices, warnings and errors of `aitk` itself go to
standard error. On a terminal, lists are tables that fit its width; in a pipe the same columns are separated by tabs, and nothing is
shortened (unless `COLUMNS` is set). Without a terminal there are no progress bars, only a plain line every few seconds.

`--json` prints one document with `schema_version` first (that of `bench engine` has none); streams (`run`, `logs`, `watch`, `ps --watch`, `submit --follow`, `clone --follow`) print
one such object per line. Times in JSON are RFC 3339, sizes are bytes. New fields may be added at any time; `schema_version` is
increased when a field changes its meaning or is removed.

To name a job, give its id, its name, or a unique prefix of its id. A name means the job with that name that has not ended, else the
newest one; if several have not ended, the command lists their ids and does nothing. An array (`submit --sweep`, `--array`, or a job
with `cluster.split`) is named the same way and stands for all its members, each of which is also a job: `ID-0`, `ID-1` and so on.
Errors are `error: …` with `hint: …` lines that say what to do.

The coordinator is set by a flag, else by the environment, else by `./aitk.yaml`, else by the settings file
`~/.config/aitk/config.yaml` (`$XDG_CONFIG_HOME`), else by a running `aitk up` of this user. The files have `server:`, `token_file:`
and `ca_file:`, never a token. A server set by `./aitk.yaml` gets no token from the settings file, because somebody else may have written
`./aitk.yaml`.

## Notifications

`run`, `submit --follow`, `clone --follow`, `watch` and `wait` can notify you when the job that they follow has ended. To run a
program of your own, give `--notify-command`. To post a message, for example to a chat, set the address of a webhook: with
`--notify-url`, in `AITK_NOTIFY_URL`, or permanently as `notify_url: https://…` in the settings file. That file must then have mode 0600,
because the address is a secret.

The message is JSON: `text` and `content` have the same line (`my_lora (j3f2a…) completed after 2h 10m`), for chat services
that show one or the other; `job` has `id`, `name`, `kind`, `owner`, `state`, `reason`, `created`, `started`, `ended`, `seconds` and
`checkpoint_step`. No config and no log is sent. The reason of a failure is the message of the error, which may name a file of the config. After a temporary error the message is sent again, up to three
times in all. A notification that fails is a warning and does not change the exit code.

The command that you run sends the message, never a coordinator or a worker, and neither a config nor `./aitk.yaml` can set the
address. Only `https://` is accepted, redirections are not followed, and no proxy is used. Addresses of private networks (loopback,
`10.0.0.0/8`, `192.168.0.0/16`, link-local and similar ones, in any notation and also as the result of a name lookup) are refused. To
allow a server in your own network, set `notify_private: true` in the settings file, or `AITK_NOTIFY_PRIVATE=1`; then `http://` is
accepted too.
";

/// Returns the whole document.
#[must_use]
pub fn markdown() -> String {
    let mut text = INTRODUCTION.to_owned();
    text.push_str("\n## Exit codes\n\n| code | meaning |\n|---:|---|\n");
    for (exit, meaning) in Exit::ALL {
        let _ = writeln!(text, "| {} | {meaning} |", exit.code());
    }
    text.push_str(
        "\nCommands that follow a job (`run`, `submit --follow`, `clone --follow`, `logs -f`, `watch`, `wait`) return the job's exit code: 0 it \
         completed,\n1 it failed, 125 it failed because its machine was lost, 143 it was stopped.\n",
    );
    let mut command = Cli::command().term_width(80);
    command.build();
    section(&mut text, &mut command, 2);
    text
}

fn section(text: &mut String, command: &mut clap::Command, level: usize) {
    let name = command.get_bin_name().unwrap_or_else(|| command.get_name()).to_owned();
    let mut help = command.clone().term_width(80);
    if level > 2 {
        // Global options are documented once, at the top.
        let globals: Vec<clap::Id> = help
            .get_arguments()
            .filter(|arg| arg.is_global_set())
            .map(|arg| arg.get_id().clone())
            .collect();
        for id in globals {
            help = help.mut_arg(id, |arg| arg.hide(true));
        }
    }
    let help = help.render_long_help().to_string();
    let _ = writeln!(
        text,
        "\n{} `{name}`\n\n```text\n{}\n```",
        "#".repeat(level),
        help.trim_end()
    );
    for sub in command.get_subcommands_mut() {
        if !sub.is_hide_set() {
            section(text, sub, 3);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn docs_cli_md_is_up_to_date() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/cli.md");
        let generated = markdown();
        if std::env::var_os("AITK_UPDATE_GOLDEN").is_some() {
            std::fs::create_dir_all(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs")).unwrap();
            std::fs::write(path, &generated).unwrap();
        }
        let found = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            found == generated,
            "docs/cli.md is out of date: run AITK_UPDATE_GOLDEN=1 cargo test -p aitk docs"
        );
        for line in generated.lines().skip_while(|line| !line.starts_with("## `aitk`")) {
            assert!(line.chars().count() <= 80, "too wide for a terminal: {line}");
        }
    }
}
