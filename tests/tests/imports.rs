//! Imports run one way: no file of a crate imports from a file that imports from it, directly or through others.
//!
//!     cargo test -p aitk-tests --test imports -- --nocapture     # prints the circles that are left
//!
//! Files are read as Rust's own grammar has them. A name that a module only passes on (`pub use`) is an import of the file
//! that defines it. Tests are left out. Methods are not followed: `impl State` in several files ties none of them to another.

use proc_macro2::{TokenStream, TokenTree};
use quote::ToTokens;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use syn::{Attribute, Item, UseTree, Visibility};

/// Files that are in a circle, for each crate that still has some. A crate that is not named has none, and these numbers
/// only ever become smaller.
const LEFT: [(&str, usize); 5] = [("cli", 3), ("common", 10), ("engine", 78), ("tests", 9), ("worker", 15)];

type Name = Vec<String>;

/// A name that a file imports.
struct Import {
    /// As it is written: `super::a::B`.
    path: Name,
    /// What it is called here; `*` for all names.
    name: String,
    passed_on: bool,
}

struct File {
    path: PathBuf,
    imports: Vec<Import>,
    /// Paths that stand in the code: `crate::a::b`.
    paths: BTreeSet<Name>,
    /// All words of the code.
    words: BTreeSet<String>,
    defined: BTreeSet<String>,
}

/// The files of a crate by the names of their modules.
#[derive(Default)]
struct Crate(BTreeMap<Name, File>);

fn is_test(attributes: &[Attribute]) -> bool {
    attributes
        .iter()
        .any(|one| one.path().is_ident("cfg") && one.meta.to_token_stream().to_string().contains("test"))
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

fn defined(item: &Item) -> Option<String> {
    Some(match item {
        Item::Const(item) => item.ident.to_string(),
        Item::Enum(item) => item.ident.to_string(),
        Item::Fn(item) => item.sig.ident.to_string(),
        Item::Macro(item) => item.ident.as_ref()?.to_string(),
        Item::Static(item) => item.ident.to_string(),
        Item::Struct(item) => item.ident.to_string(),
        Item::Trait(item) => item.ident.to_string(),
        Item::Type(item) => item.ident.to_string(),
        _ => return None,
    })
}

fn imports(tree: &UseTree, before: &[String], passed_on: bool, all: &mut Vec<Import>) {
    let with = |last: String| [before, &[last]].concat();
    let mut add = |path: Name, name: String| all.push(Import { path, name, passed_on });
    match tree {
        UseTree::Path(path) => imports(&path.tree, &with(path.ident.to_string()), passed_on, all),
        UseTree::Name(name) if name.ident == "self" => add(before.to_vec(), before.last().cloned().unwrap_or_default()),
        UseTree::Name(name) => add(with(name.ident.to_string()), name.ident.to_string()),
        UseTree::Rename(name) => add(with(name.ident.to_string()), name.rename.to_string()),
        UseTree::Glob(_) => add(before.to_vec(), "*".into()),
        UseTree::Group(group) => {
            for tree in &group.items {
                imports(tree, before, passed_on, all);
            }
        }
    }
}

/// Reads words, and paths of several words, inside macros as well.
fn read_tokens(tokens: TokenStream, file: &mut File) {
    let mut path: Name = Vec::new();
    let mut colons = 0;
    for token in tokens {
        match token {
            TokenTree::Ident(word) => {
                let word = word.to_string();
                file.words.insert(word.clone());
                if colons != 2 {
                    file.paths.insert(std::mem::take(&mut path));
                }
                path.push(word);
                colons = 0;
                continue;
            }
            TokenTree::Punct(sign) if sign.as_char() == ':' && !path.is_empty() => {
                colons += 1;
                continue;
            }
            TokenTree::Group(group) => read_tokens(group.stream(), file),
            _ => {}
        }
        file.paths.insert(std::mem::take(&mut path));
        colons = 0;
    }
    file.paths.insert(path);
}

impl Crate {
    fn read(root: &Path) -> Self {
        let mut files = Self::default();
        files.add(root, Vec::new());
        files
    }

    fn add(&mut self, path: &Path, name: Name) {
        let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let parsed = syn::parse_file(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let own = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let beside = path.parent().unwrap_or(Path::new("."));
        let below = match own {
            "mod.rs" | "lib.rs" | "main.rs" => beside.to_owned(),
            other => beside.join(other.trim_end_matches(".rs")),
        };
        let mut file = File {
            path: path.to_owned(),
            imports: Vec::new(),
            paths: BTreeSet::new(),
            words: BTreeSet::new(),
            defined: BTreeSet::new(),
        };
        for item in parsed.items.iter().filter(|item| !is_test(attributes(item))) {
            file.defined.extend(defined(item));
            match item {
                Item::Use(item) => {
                    let passed_on = !matches!(item.vis, Visibility::Inherited);
                    imports(&item.tree, &[], passed_on, &mut file.imports);
                }
                Item::Mod(item) if item.content.is_none() => {
                    let module = item.ident.to_string();
                    let places = [below.join(format!("{module}.rs")), below.join(&module).join("mod.rs")];
                    if let Some(place) = places.iter().find(|place| place.is_file()) {
                        self.add(place, [name.as_slice(), &[module]].concat());
                    }
                }
                other => read_tokens(other.to_token_stream(), &mut file),
            }
        }
        self.0.insert(name, file);
    }

    /// A path as the crate's root has it; none when it leads out of the crate.
    fn absolute(&self, here: &[String], path: &[String]) -> Option<Name> {
        let mut base = here.to_vec();
        let mut rest = path;
        match path.first()?.as_str() {
            "crate" => return Some(path[1..].to_vec()),
            "self" | "super" => {
                while let Some(word @ ("self" | "super")) = rest.first().map(String::as_str) {
                    if word == "super" {
                        base.pop()?;
                    }
                    rest = &rest[1..];
                }
            }
            child => {
                base.push(child.to_owned());
                if !self.0.contains_key(&base) {
                    return None;
                }
                base.pop();
            }
        }
        base.extend_from_slice(rest);
        Some(base)
    }

    /// The module that defines what a path names; the second is false when the path names a module itself.
    fn resolve(&self, path: &[String], depth: u32) -> (Name, bool) {
        let known = (0..=path.len()).rev().find(|end| self.0.contains_key(&path[..*end]));
        let (module, rest) = path.split_at(known.unwrap_or(0));
        let (Some(first), Some(file)) = (rest.first(), self.0.get(module)) else {
            return (module.to_vec(), false);
        };
        let passed_on = file.imports.iter().filter(|import| import.passed_on && depth < 8);
        for import in passed_on {
            let Some(target) = self.absolute(module, &import.path) else {
                continue;
            };
            if import.name == *first {
                return self.resolve(&[&target, &rest[1..]].concat(), depth + 1);
            }
            let all = import.name == "*" && self.0.get(&target).is_some_and(|file| file.defined.contains(first));
            if all {
                return (target, true);
            }
        }
        (module.to_vec(), true)
    }

    /// What a file needs of others: their names, with an example.
    fn needs(&self, name: &Name) -> BTreeMap<Name, String> {
        let file = &self.0[name];
        let mut needed = BTreeMap::new();
        let mut add = |target: Name, what: &str| {
            if target != *name {
                needed.entry(target).or_insert_with(|| what.to_owned());
            }
        };
        // Modules that are imported under a name, and those below this one.
        let mut modules: BTreeMap<String, Name> = BTreeMap::new();
        for import in &file.imports {
            let Some(path) = self.absolute(name, &import.path) else {
                continue;
            };
            // What is only passed on is needed by whoever imports it from here.
            if import.passed_on && !file.words.contains(&import.name) {
                continue;
            }
            match self.resolve(&path, 0) {
                (module, false) if import.name != "*" => {
                    modules.insert(import.name.clone(), module);
                }
                (_, false) if import.passed_on => {}
                (module, _) => add(module, &import.name),
            }
        }
        for path in file.paths.iter().filter(|path| path.len() > 1) {
            let whole = match modules.get(&path[0]) {
                Some(module) => Some([module.as_slice(), &path[1..]].concat()),
                None => self.absolute(name, path),
            };
            if let Some(whole) = whole {
                let (module, _) = self.resolve(&whole, 0);
                add(module, &path.join("::"));
            }
        }
        needed
    }

    /// Files that reach themselves.
    fn circles(&self) -> Vec<String> {
        let needs: BTreeMap<&Name, BTreeMap<Name, String>> =
            self.0.keys().map(|name| (name, self.needs(name))).collect();
        let reached = |from: &Name| {
            let mut reached: BTreeSet<&Name> = BTreeSet::new();
            let mut next: Vec<&Name> = needs[from].keys().collect();
            while let Some(name) = next.pop() {
                if needs.contains_key(name) && reached.insert(name) {
                    next.extend(needs[name].keys());
                }
            }
            reached
        };
        let all: BTreeMap<&Name, BTreeSet<&Name>> = needs.keys().map(|name| (*name, reached(name))).collect();
        let mut circles = Vec::new();
        for (name, reached) in &all {
            if !reached.contains(name) {
                continue;
            }
            let back = needs[name]
                .iter()
                .filter(|(other, _)| all.get(other).is_some_and(|of| of.contains(name)));
            let back: Vec<String> = back
                .map(|(other, what)| format!("{} ({what})", other.join("::")))
                .collect();
            circles.push(format!("{} needs {}", self.0[*name].path.display(), back.join(", ")));
        }
        circles
    }
}

#[test]
fn no_file_imports_itself_through_others() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let crates = [
        "cli",
        "common",
        "coordinator",
        "coordinator/scheduler",
        "engine",
        "proto",
        "tests",
        "worker",
    ];
    let mut wrong = Vec::new();
    for one in crates {
        let src = root.join(one).join("src");
        let roots = ["lib.rs", "main.rs"].map(|file| src.join(file));
        let circles: Vec<String> = roots
            .iter()
            .filter(|root| root.is_file())
            .flat_map(|root| Crate::read(root).circles())
            .collect();
        for line in &circles {
            println!("{line}");
        }
        let left = LEFT.iter().find(|(name, _)| *name == one).map_or(0, |(_, left)| *left);
        match circles.len() {
            found if found == left => {}
            found if found < left => wrong.push(format!(
                "{one}: {found} files are left in circles; write that number into LEFT"
            )),
            found => wrong.push(format!(
                "{one}: {found} files import each other, {left} did:\n{}",
                circles.join("\n")
            )),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_circle_is_found_and_a_name_that_is_passed_on_makes_none() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    write(
        "lib.rs",
        "mod a; mod b; mod c; pub use a::One; use b::two;\n#[cfg(test)] mod tests { use super::a; }",
    );
    write("a.rs", "pub struct One;");
    write("b.rs", "use crate::One; pub fn two() -> One { One }");
    write("c.rs", "pub fn three() { println!(\"{:?}\", crate::b::two()); }");
    let circles = || Crate::read(&folder.path().join("lib.rs")).circles().len();
    assert_eq!(circles(), 0);
    write(
        "b.rs",
        "use crate::One; pub fn two() -> One { format!(\"{:?}\", super::c::three()); One }",
    );
    assert_eq!(circles(), 2);
    write(
        "a.rs",
        "#[cfg(test)] mod tests { fn f() { crate::b::two(); } }\npub struct One;",
    );
    assert_eq!(circles(), 2);
    write("a.rs", "pub struct One; impl One { fn f() { crate::b::two(); } }");
    assert_eq!(circles(), 3);
}
