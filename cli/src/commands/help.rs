//! `help`: shows the embedded documentation and the help of commands.

use crate::args::{Cli, HelpArgs};
use crate::context::Context;
use crate::exit::Exit;
use crate::failure::{CommandResult, Failure};
use crate::output::Ui;
use clap::CommandFactory;
use include_dir::{Dir, include_dir};
use std::io::{IsTerminal, Write};
use std::process::{Command, Stdio};

/// All pages of documentation, embedded because an installed program has no `docs` folder.
static DOCS: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/../docs");

/// A page of documentation.
struct Topic {
    name: String,
    title: String,
    text: &'static str,
}

fn topics() -> Vec<Topic> {
    let to_topic = |file: &'static include_dir::File<'_>| {
        let name = file.path().to_str()?.strip_suffix(".md")?;
        let text = file.contents_utf8()?;
        let title = text.lines().find_map(|line| line.strip_prefix("# ")).unwrap_or(name);
        Some(Topic {
            name: name.to_owned(),
            title: title.replace('`', ""),
            text,
        })
    };
    let mut topics: Vec<Topic> = DOCS.files().filter_map(to_topic).collect();
    topics.sort_by(|a, b| a.name.cmp(&b.name));
    topics
}

pub(super) fn help(context: &Context, args: &HelpArgs) -> CommandResult {
    let ui = context.ui(true);
    let wanted: Vec<&str> = args.topic.iter().map(String::as_str).collect();
    match wanted.as_slice() {
        [] => {
            let mut text = Cli::command().render_help().to_string();
            text.push_str("\nTopics (aitk help TOPIC):\n");
            text.push_str(&topic_list());
            show_in_pager(&ui, &text)?;
        }
        ["topics"] => ui.data(topic_list().trim_end())?,
        [topic, ..] => {
            if let (Some(found), 1) = (topics().iter().find(|known| known.name == *topic), wanted.len()) {
                show_in_pager(&ui, &without_comments(found.text))?;
            } else {
                show_in_pager(&ui, &command_help(&wanted)?)?;
            }
        }
    }
    Ok(Exit::Ok)
}

fn topic_list() -> String {
    let topics = topics();
    let longest = topics.iter().map(|topic| topic.name.len()).max().unwrap_or(0);
    let line = |topic: &Topic| format!("  {:longest$}  {}\n", topic.name, topic.title);
    topics.iter().map(line).collect()
}

/// Returns the help of a command: `aitk help worker drain`.
fn command_help(path: &[&str]) -> Result<String, Failure> {
    let mut command = Cli::command();
    command.build();
    for name in path {
        let found = command.find_subcommand(name).cloned();
        command = found.ok_or_else(|| {
            let text = crate::output::format::printable(&path.join(" "));
            Failure::not_found(format!("there is no topic or command '{text}'"))
                .hint("`aitk help` lists all commands and topics")
        })?;
    }
    Ok(command.render_long_help().to_string())
}

/// Removes the HTML comments of a page.
fn without_comments(text: &str) -> String {
    let lines = text.lines().filter(|line| !line.trim_start().starts_with("<!--"));
    lines.flat_map(|line| [line, "\n"]).collect()
}

/// Shows a text in the user's pager if there is a terminal. `PAGER` is a program and its arguments; it is not run by a
/// shell.
fn show_in_pager(ui: &Ui, text: &str) -> Result<(), Failure> {
    let text = text.trim_end();
    if std::io::stdout().is_terminal() && std::io::stdin().is_terminal() {
        let pager = crate::context::env("PAGER").filter(|pager| !pager.trim().is_empty());
        let pager = pager.unwrap_or_else(|| "less -FRX".to_owned());
        let mut words = pager.split_whitespace();
        if let Some(program) = words.next()
            && let Ok(mut child) = Command::new(program).args(words).stdin(Stdio::piped()).spawn()
        {
            if let Some(mut input) = child.stdin.take() {
                // Writing fails when the user quits the pager early.
                let _ = writeln!(input, "{text}");
            }
            if child.wait().is_ok_and(|status| status.success()) {
                return Ok(());
            }
        }
    }
    ui.data(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_page_of_documentation_is_a_topic() {
        let mut files = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs"))
            .unwrap()
            .filter_map(|entry| entry.unwrap().file_name().into_string().ok())
            .filter_map(|name| name.strip_suffix(".md").map(str::to_owned))
            .collect::<Vec<_>>();
        files.sort();
        let topics = topics();
        let names: Vec<&str> = topics.iter().map(|topic| topic.name.as_str()).collect();
        assert_eq!(names, files);
        assert!(
            names.contains(&"config-keys") && topic_list().lines().all(|line| line.len() <= 80),
            "{}",
            topic_list()
        );
        assert!(!without_comments(topics[1].text).contains("<!--"));
    }

    #[test]
    fn commands_and_subcommands_have_help() {
        assert!(command_help(&["worker", "drain"]).unwrap().contains("--now"));
        assert!(command_help(&["cancel"]).unwrap().contains("after saving"));
        assert_eq!(command_help(&["nonsense"]).unwrap_err().exit, Exit::NotFound);
    }
}
