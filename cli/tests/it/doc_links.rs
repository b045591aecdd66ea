//! Links in the documentation: each relative link leads to a file of the repository, and each anchor to a heading.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Reads the Markdown files of a folder, with those of the folders below it if `is_deep`.
fn read_pages(folder: &Path, is_deep: bool, pages: &mut BTreeMap<PathBuf, String>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            if is_deep {
                read_pages(&path, is_deep, pages);
            }
        } else if path.extension().is_some_and(|extension| extension == "md") {
            let text = std::fs::read_to_string(&path).unwrap();
            pages.insert(path, without_code_blocks(&text));
        }
    }
}

fn without_code_blocks(text: &str) -> String {
    let mut is_code = false;
    let is_prose = |line: &&str| {
        let is_fence = line.starts_with("```");
        is_code ^= is_fence;
        !is_code && !is_fence
    };
    let lines: Vec<&str> = text.lines().filter(is_prose).collect();
    lines.join("\n")
}

/// The targets of the links to files and headings, as they are written.
fn relative_links(text: &str) -> impl Iterator<Item = &str> {
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
    targets
        .map(|(target, _)| target)
        .filter(|target| !target.contains(':') && !target.contains(char::is_whitespace))
}

/// The anchors that GitHub gives to the headings of a page.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut anchors = BTreeSet::new();
    for line in text.lines().filter(|line| line.starts_with('#')) {
        let heading = line.trim_start_matches('#').trim().to_lowercase();
        let anchor: String = heading
            .chars()
            .filter(|c| c.is_alphanumeric() || " -_".contains(*c))
            .map(|c| if c == ' ' { '-' } else { c })
            .collect();
        let repeated = (1..).map(|number| format!("{anchor}-{number}"));
        let free = std::iter::once(anchor.clone())
            .chain(repeated)
            .find(|anchor| !anchors.contains(anchor));
        anchors.extend(free);
    }
    anchors
}

#[test]
fn links_of_the_documentation_lead_to_files_and_headings() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().unwrap();
    let mut pages = BTreeMap::new();
    read_pages(&root, false, &mut pages);
    for folder in ["config", "deploy", "docs"] {
        read_pages(&root.join(folder), true, &mut pages);
    }
    let (mut count, mut broken) = (0, Vec::new());
    for (page, text) in &pages {
        for link in relative_links(text) {
            count += 1;
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = match file {
                "" => Ok(page.clone()),
                file => page.parent().unwrap().join(file).canonicalize(),
            };
            let leads_there = target.is_ok_and(|target| {
                anchor.is_empty() || pages.get(&target).is_some_and(|text| anchors(text).contains(anchor))
            });
            if !leads_there {
                broken.push(format!("{}: {link}", page.display()));
            }
        }
    }
    assert!(count > 200, "only {count} links were found");
    assert!(broken.is_empty(), "{broken:#?}");
}

#[test]
fn anchors_are_those_of_github() {
    let text = "# What ran, and what did not\n## `aitk run`\n## A_b\ntext\n## `aitk run`\n";
    let expected = ["what-ran-and-what-did-not", "aitk-run", "a_b", "aitk-run-1"];
    assert_eq!(anchors(text), expected.map(str::to_owned).into());
    let links: Vec<&str> = relative_links("[a](b.md#c), [d](https://e.f), [g](#h)").collect();
    assert_eq!(links, ["b.md#c", "#h"]);
}
