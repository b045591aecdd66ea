//! `docs/cli.md`, made from the command line itself; a test keeps it true.

use crate::args::Cli;
use crate::exit::Exit;
use clap::CommandFactory;
use std::fmt::Write as _;

const INTRODUCTION: &str = "# The `aitk` command line

<!-- Made from the program: `AITK_UPDATE_GOLDEN=1 cargo test -p aitk docs`. Do not edit. -->

Data goes to standard output, and so does the log of a job, with the warnings in it; progress, notices, warnings and errors of
`aitk` itself go to standard error. On a terminal lists are tables that fit its width; in a pipe the same columns come with tabs between them, nothing shortened (unless `COLUMNS` is set).
Without a terminal there are no bars, only a plain line now and then.

`--json` prints one document with `schema_version` first; streams (`logs`, `watch`, `ps --watch`, `submit --follow`, `clone --follow`) print
one such object per line. Times in JSON are RFC 3339, sizes are bytes. A field may be added at any time; `schema_version`
grows when one changes its meaning or goes away.

A job is named by its id, its name, or a unique beginning of its id. A name means the job of that name that has not
ended, else the newest; when several have not ended, the command lists their ids and does nothing. An array (`submit --sweep`, `--array`, or a job with `cluster.split`) is named the same way and stands
for all its members, each of which is also a job: `ID-0`, `ID-1` and so on. Errors are `error: …` with `hint: …` lines that
say what to do.

Which coordinator: flag, then environment, then `./aitk.yaml`, then the user file `~/.config/aitk/config.yaml`
(`$XDG_CONFIG_HOME`), then a running `aitk up` of this user. The files hold `server:`, `token_file:` and `ca_file:`, never a
token. A server named by `./aitk.yaml` gets no token from the user file: somebody else may have made that folder.

## Being told that a job has ended

`run`, `submit --follow`, `clone --follow`, `watch` and `wait` tell you when the job that they follow has ended. To have a
program of yours run, give `--notify-command`. To have a message posted, to a chat for instance, give its address: with
`--notify-url`, in `AITK_NOTIFY_URL`, or once and for all as `notify_url: https://…` in the user file, which then must have mode
0600, because such an address is as good as a password.

What is posted is JSON: `text` and `content` hold the same line (`my_lora (j3f2a…) completed after 2h 10m`), for chat services
that show one or the other; `job` holds `id`, `name`, `kind`, `owner`, `state`, `reason`, `created`, `started`, `ended`, `seconds` and
`checkpoint_step`. No config, no log and no path of an input is sent. What may work the next time is tried three times; that nobody
could be told is a warning and does not change the exit code.

Your own command posts it, never a coordinator or a worker, and neither a config nor `./aitk.yaml` has a say in where. Only `https://`
is taken, no redirection is followed, no proxy is used, and an address of a private network (loopback, `10.0.0.0/8`, `192.168.0.0/16`,
link-local ones and the like, in whatever form it is written or looked up) is refused. For a server of your own in your own network,
write `notify_private: true` into the user file, or set `AITK_NOTIFY_PRIVATE=1`; then `http://` is taken, too.
";

/// The whole document.
#[must_use]
pub fn markdown() -> String {
    let mut text = INTRODUCTION.to_owned();
    text.push_str("\n## Exit codes\n\n| code | meaning |\n|---:|---|\n");
    for (exit, meaning) in Exit::ALL {
        let _ = writeln!(text, "| {} | {meaning} |", exit.code());
    }
    text.push_str(
        "\nCommands that follow a job (`run`, `submit --follow`, `clone --follow`, `logs -f`, `watch`, `wait`) return the job's own code: 0 it \
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
        // Said once, at the top.
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
    fn docs_cli_md_is_what_the_program_says() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/cli.md");
        let made = markdown();
        if std::env::var_os("AITK_UPDATE_GOLDEN").is_some() {
            std::fs::create_dir_all(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs")).unwrap();
            std::fs::write(path, &made).unwrap();
        }
        let found = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            found == made,
            "docs/cli.md is out of date: run AITK_UPDATE_GOLDEN=1 cargo test -p aitk docs"
        );
        for line in made.lines().skip_while(|line| !line.starts_with("## `aitk`")) {
            assert!(line.chars().count() <= 80, "too wide for a terminal: {line}");
        }
    }
}
