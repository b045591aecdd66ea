//! Files of a crate have no import cycles: no file imports from a file that imports from it, directly or indirectly.
//!
//!     cargo test -p aitk-tests --test imports -- --nocapture     # prints the remaining cycles
//!
//! Files are parsed with `syn`. A re-export (`pub use`) counts as an import from the file that defines the name. Tests are left
//! out. Methods are not resolved: `impl State` in several files makes no dependency between them.

use proc_macro2::{TokenStream, TokenTree};
use quote::ToTokens;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use syn::{Attribute, Item, UseTree, Visibility};

/// How many files of a crate may be in import cycles; a crate that is not listed must have none.
const ALLOWED: [(&str, usize); 0] = [];

type Name = Vec<String>;

/// A name that a file imports.
struct Import {
    /// The path as written: `super::a::B`.
    path: Name,
    /// The imported name in this file; `*` for a glob import.
    name: String,
    is_reexport: bool,
}

struct File {
    path: PathBuf,
    imports: Vec<Import>,
    /// Paths in the code: `crate::a::b`.
    paths: BTreeSet<Name>,
    /// All identifiers in the code.
    identifiers: BTreeSet<String>,
    defined: BTreeSet<String>,
}

/// The files of a crate by their module paths.
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

fn imports(tree: &UseTree, before: &[String], is_reexport: bool, all: &mut Vec<Import>) {
    let with = |last: String| [before, &[last]].concat();
    let mut add = |path: Name, name: String| {
        all.push(Import {
            path,
            name,
            is_reexport,
        })
    };
    match tree {
        UseTree::Path(path) => imports(&path.tree, &with(path.ident.to_string()), is_reexport, all),
        UseTree::Name(name) if name.ident == "self" => add(before.to_vec(), before.last().cloned().unwrap_or_default()),
        UseTree::Name(name) => add(with(name.ident.to_string()), name.ident.to_string()),
        UseTree::Rename(name) => add(with(name.ident.to_string()), name.rename.to_string()),
        UseTree::Glob(_) => add(before.to_vec(), "*".into()),
        UseTree::Group(group) => {
            for tree in &group.items {
                imports(tree, before, is_reexport, all);
            }
        }
    }
}

/// Collects identifiers and paths, inside macros as well.
fn read_tokens(tokens: TokenStream, file: &mut File) {
    let mut path: Name = Vec::new();
    let mut colons = 0;
    for token in tokens {
        match token {
            TokenTree::Ident(word) => {
                let word = word.to_string();
                file.identifiers.insert(word.clone());
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
            identifiers: BTreeSet::new(),
            defined: BTreeSet::new(),
        };
        for item in parsed.items.iter().filter(|item| !is_test(attributes(item))) {
            file.defined.extend(defined(item));
            match item {
                Item::Use(item) => {
                    let is_reexport = !matches!(item.vis, Visibility::Inherited);
                    imports(&item.tree, &[], is_reexport, &mut file.imports);
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

    /// A path relative to the crate's root; `None` if it leads out of the crate.
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

    /// The module that defines the item of a path. The second value is false if the path names a module itself.
    fn resolve(&self, path: &[String], depth: u32) -> (Name, bool) {
        let known = (0..=path.len()).rev().find(|end| self.0.contains_key(&path[..*end]));
        let (module, rest) = path.split_at(known.unwrap_or(0));
        let (Some(first), Some(file)) = (rest.first(), self.0.get(module)) else {
            return (module.to_vec(), false);
        };
        let is_reexport = file.imports.iter().filter(|import| import.is_reexport && depth < 8);
        for import in is_reexport {
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

    /// The modules that a file depends on, each with an example of a name.
    fn dependencies(&self, name: &Name) -> BTreeMap<Name, String> {
        let file = &self.0[name];
        let mut dependencies = BTreeMap::new();
        let mut add = |target: Name, what: &str| {
            if target != *name {
                dependencies.entry(target).or_insert_with(|| what.to_owned());
            }
        };
        // Imported modules by their names.
        let mut modules: BTreeMap<String, Name> = BTreeMap::new();
        for import in &file.imports {
            let Some(path) = self.absolute(name, &import.path) else {
                continue;
            };
            // A name that is only re-exported is a dependency of the file that imports it from here.
            if import.is_reexport && !file.identifiers.contains(&import.name) {
                continue;
            }
            match self.resolve(&path, 0) {
                (module, false) if import.name != "*" => {
                    modules.insert(import.name.clone(), module);
                }
                (_, false) if import.is_reexport => {}
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
        dependencies
    }

    /// Descriptions of the files that depend on themselves indirectly.
    fn cycles(&self) -> Vec<String> {
        let needs: BTreeMap<&Name, BTreeMap<Name, String>> =
            self.0.keys().map(|name| (name, self.dependencies(name))).collect();
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
        let mut cycles = Vec::new();
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
            cycles.push(format!(
                "{} depends on {}",
                self.0[*name].path.display(),
                back.join(", ")
            ));
        }
        cycles
    }
}

#[test]
fn the_number_of_files_in_import_cycles_does_not_grow() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let crates = [
        "cli",
        "common",
        "coordinator",
        "coordinator/scheduler",
        "engine",
        "kernels",
        "processes",
        "proto",
        "tests",
        "worker",
    ];
    let mut wrong = Vec::new();
    for name in crates {
        let src = root.join(name).join("src");
        let roots = ["lib.rs", "main.rs"].map(|file| src.join(file));
        let cycles: Vec<String> = roots
            .iter()
            .filter(|root| root.is_file())
            .flat_map(|root| Crate::read(root).cycles())
            .collect();
        for line in &cycles {
            println!("{line}");
        }
        let left = ALLOWED
            .iter()
            .find(|(other, _)| *other == name)
            .map_or(0, |(_, left)| *left);
        match cycles.len() {
            found if found == left => {}
            found if found < left => wrong.push(format!(
                "{name}: {found} files are in import cycles, fewer than allowed; write that number into ALLOWED"
            )),
            found => wrong.push(format!(
                "{name}: {found} files are in import cycles, at most {left} are allowed:\n{}",
                cycles.join("\n")
            )),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_cycle_is_found_and_a_reexport_makes_none() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    write(
        "lib.rs",
        "mod a; mod b; mod c; pub use a::One; use b::two;\n#[cfg(test)] mod tests { use super::a; }",
    );
    write("a.rs", "pub struct One;");
    write("b.rs", "use crate::One; pub fn two() -> One { One }");
    write("c.rs", "pub fn three() { println!(\"{:?}\", crate::b::two()); }");
    let cycles = || Crate::read(&folder.path().join("lib.rs")).cycles().len();
    assert_eq!(cycles(), 0);
    write(
        "b.rs",
        "use crate::One; pub fn two() -> One { format!(\"{:?}\", super::c::three()); One }",
    );
    assert_eq!(cycles(), 2);
    write(
        "a.rs",
        "#[cfg(test)] mod tests { fn f() { crate::b::two(); } }\npub struct One;",
    );
    assert_eq!(cycles(), 2);
    write("a.rs", "pub struct One; impl One { fn f() { crate::b::two(); } }");
    assert_eq!(cycles(), 3);
}
