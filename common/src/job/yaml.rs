//! Parses YAML text into a [`Node`], with anchors and merge keys. Stops at the first error.

use super::error::Finding;
use super::limits::{MAX_DEPTH, MAX_EXPANDED, NODE_BYTES, finding, too_deep, too_large};
use super::node::{Entry, Mark, Node, Value, shorten};
use super::scalar::resolve;
use super::yaml_errors::scan_error;
use saphyr_parser::{Event, Marker, Parser, ScalarStyle, Span, Tag};
use std::collections::HashMap;

/// Parses one YAML document.
///
/// # Errors
/// The first error, with its position.
pub(super) fn parse(text: &str, file: Option<&str>) -> Result<Node, Finding> {
    let mut builder = Builder {
        file,
        frames: Vec::new(),
        anchors: HashMap::new(),
        root: None,
        expanded_bytes: 0,
        documents: 0,
    };
    let mut depth = 0_usize;
    for event in Parser::new_from_str(text) {
        let (event, span) = event.map_err(|error| scan_error(text, file, mark(error.marker()), error.info()))?;
        match event {
            Event::MappingStart(..) | Event::SequenceStart(..) => depth += 1,
            Event::MappingEnd | Event::SequenceEnd => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > MAX_DEPTH {
            return Err(finding(file, mark(&span.start), "", too_deep()));
        }
        builder.handle_event(event, span)?;
    }
    match builder.root {
        Some(root) => Ok(root),
        None => Err(finding(file, Mark { line: 1, column: 1 }, "", "the config is empty")),
    }
}

fn mark(marker: &Marker) -> Mark {
    Mark {
        line: u32::try_from(marker.line()).unwrap_or(u32::MAX).max(1),
        column: u32::try_from(marker.col() + 1).unwrap_or(u32::MAX),
    }
}

enum Frame {
    List {
        mark: Mark,
        anchor: usize,
        items: Vec<Node>,
    },
    Map(MapFrame),
}

struct MapFrame {
    mark: Mark,
    anchor: usize,
    entries: Vec<Entry>,
    seen: HashMap<String, Mark>,
    pending: Option<(String, Mark, bool)>,
    merges: Vec<Node>,
}

struct AnchoredNode {
    node: Node,
    bytes: usize,
    depth: usize,
}

struct Builder<'a> {
    file: Option<&'a str>,
    frames: Vec<Frame>,
    anchors: HashMap<usize, AnchoredNode>,
    root: Option<Node>,
    expanded_bytes: usize,
    documents: usize,
}

impl Builder<'_> {
    fn fail<T>(&self, at: Mark, message: impl Into<String>) -> Result<T, Finding> {
        Err(finding(self.file, at, &self.path(), message))
    }

    /// The key path of the current node.
    fn path(&self) -> String {
        let mut path = String::new();
        for frame in &self.frames {
            match frame {
                Frame::List { items, .. } => path.push_str(&format!("[{}]", items.len())),
                Frame::Map(map) => {
                    if let Some((key, ..)) = &map.pending {
                        path = super::schema::join(&path, &shorten(key));
                    }
                }
            }
        }
        path
    }

    fn add_bytes(&mut self, bytes: usize, at: Mark) -> Result<(), Finding> {
        self.expanded_bytes = self.expanded_bytes.saturating_add(bytes);
        if self.expanded_bytes > MAX_EXPANDED {
            self.fail(at, too_large())
        } else {
            Ok(())
        }
    }

    fn handle_event(&mut self, event: Event<'_>, span: Span) -> Result<(), Finding> {
        let at = mark(&span.start);
        match event {
            Event::DocumentStart(_) => {
                self.documents += 1;
                if self.documents > 1 {
                    return self.fail(at, "a second document (`---`) in one file; a config is one document");
                }
            }
            Event::Scalar(text, style, anchor, tag) => {
                self.add_bytes(NODE_BYTES + text.len(), at)?;
                let node = self.scalar(text.into_owned(), style, tag.as_deref(), at)?;
                self.add_node(node, anchor)?;
            }
            Event::SequenceStart(anchor, tag) => {
                self.add_bytes(NODE_BYTES, at)?;
                self.check_collection_tag(tag.as_deref(), "seq", at)?;
                self.frames.push(Frame::List {
                    mark: at,
                    anchor,
                    items: Vec::new(),
                });
            }
            Event::MappingStart(anchor, tag) => {
                self.add_bytes(NODE_BYTES, at)?;
                self.check_collection_tag(tag.as_deref(), "map", at)?;
                self.frames.push(Frame::Map(MapFrame {
                    mark: at,
                    anchor,
                    entries: Vec::new(),
                    seen: HashMap::new(),
                    pending: None,
                    merges: Vec::new(),
                }));
            }
            Event::SequenceEnd => {
                if let Some(Frame::List { mark, anchor, items }) = self.frames.pop() {
                    self.add_node(
                        Node {
                            mark,
                            value: Value::List(items),
                            plain: None,
                        },
                        anchor,
                    )?;
                }
            }
            Event::MappingEnd => {
                if let Some(Frame::Map(map)) = self.frames.pop() {
                    let (mark, anchor) = (map.mark, map.anchor);
                    let entries = self.resolve_merges(map)?;
                    self.add_node(
                        Node {
                            mark,
                            value: Value::Map(entries),
                            plain: None,
                        },
                        anchor,
                    )?;
                }
            }
            Event::Alias(id) => {
                let Some(anchored) = self.anchors.get(&id) else {
                    return self.fail(at, "this alias is inside its own anchor, or its anchor does not exist");
                };
                if self.frames.len() + anchored.depth > MAX_DEPTH {
                    return self.fail(at, too_deep());
                }
                let bytes = anchored.bytes;
                self.add_bytes(bytes, at)?;
                if let Some(mut node) = self.anchors.get(&id).map(|anchored| anchored.node.clone()) {
                    node.mark = at;
                    self.add_node(node, 0)?;
                }
            }
            Event::Nothing | Event::StreamStart | Event::StreamEnd | Event::DocumentEnd => {}
        }
        Ok(())
    }

    fn check_collection_tag(&self, tag: Option<&Tag>, expected: &str, at: Mark) -> Result<(), Finding> {
        match tag {
            Some(tag) if !(tag.is_yaml_core_schema() && tag.suffix == expected) => self.unknown_tag(tag, at),
            _ => Ok(()),
        }
    }

    fn unknown_tag<T>(&self, tag: &Tag, at: Mark) -> Result<T, Finding> {
        self.fail(
            at,
            format!(
                "the tag `{}` has no meaning in a config; remove it",
                shorten(&tag.to_string())
            ),
        )
    }

    fn scalar(&self, text: String, style: ScalarStyle, tag: Option<&Tag>, at: Mark) -> Result<Node, Finding> {
        let plain = style == ScalarStyle::Plain;
        let value = match tag {
            None if plain => resolve(&text),
            None => Value::Text(text.clone()),
            Some(tag) if tag.is_yaml_core_schema() => {
                let resolved = resolve(&text);
                match (tag.suffix.as_str(), resolved) {
                    ("str", _) => Value::Text(text.clone()),
                    ("int", value @ Value::Int(_))
                    | ("bool", value @ Value::Bool(_))
                    | ("null", value @ Value::Null) => value,
                    #[allow(clippy::cast_precision_loss)]
                    ("float", Value::Int(value)) => Value::Float(value as f64),
                    ("float", value @ Value::Float(_)) => value,
                    ("int" | "bool" | "null" | "float", _) => {
                        return self.fail(at, format!("\"{}\" is not a `{tag}`", shorten(&text)));
                    }
                    _ => return self.unknown_tag(tag, at),
                }
            }
            Some(tag) if tag.handle == "!" && tag.suffix.is_empty() => Value::Text(text.clone()),
            Some(tag) => return self.unknown_tag(tag, at),
        };
        Ok(Node {
            mark: at,
            value,
            plain: plain.then_some(text),
        })
    }

    fn add_node(&mut self, node: Node, anchor: usize) -> Result<(), Finding> {
        if anchor != 0 {
            let (bytes, depth) = measure_tree(&node);
            self.add_bytes(bytes, node.mark)?;
            self.anchors.insert(
                anchor,
                AnchoredNode {
                    node: node.clone(),
                    bytes,
                    depth,
                },
            );
        }
        match self.frames.last_mut() {
            None => self.root = Some(node),
            Some(Frame::List { items, .. }) => items.push(node),
            Some(Frame::Map(map)) => match map.pending.take() {
                None => return self.add_key(&node),
                Some((_, _, true)) => map.merges.push(node),
                Some((key, mark, false)) => map.entries.push(Entry { key, mark, node }),
            },
        }
        Ok(())
    }

    fn add_key(&mut self, node: &Node) -> Result<(), Finding> {
        let text = match (&node.value, &node.plain) {
            (_, Some(plain)) => plain.clone(),
            (Value::Text(text), None) => text.clone(),
            _ => return self.fail(node.mark, format!("a key must be text, found {}", node.describe())),
        };
        let at = node.mark;
        let is_merge = text == "<<" && node.plain.is_some();
        let path = self.path();
        let Some(Frame::Map(map)) = self.frames.last_mut() else {
            return Ok(());
        };
        if let Some(first) = map.seen.get(&text)
            && !is_merge
        {
            let message = format!(
                "the key `{}` is given twice in this section, first in line {}; remove one of them",
                shorten(&text),
                first.line
            );
            return Err(finding(
                self.file,
                at,
                &super::schema::join(&path, &shorten(&text)),
                message,
            ));
        }
        map.seen.insert(text.clone(), at);
        map.pending = Some((text, at, is_merge));
        Ok(())
    }

    /// Returns the entries of a map with its `<<` resolved. The map's own keys win, then those of the first merged map.
    fn resolve_merges(&mut self, map: MapFrame) -> Result<Vec<Entry>, Finding> {
        let MapFrame {
            mut entries,
            mut seen,
            merges,
            ..
        } = map;
        if merges.is_empty() {
            return Ok(entries);
        }
        let mut sources = Vec::new();
        for merge in merges {
            match merge.value {
                Value::Map(source) => sources.push(source),
                Value::List(items) => {
                    for item in items {
                        let at = item.mark;
                        match item.value {
                            Value::Map(source) => sources.push(source),
                            _ => return self.fail(at, "`<<` merges maps, so its list may hold only maps"),
                        }
                    }
                }
                _ => return self.fail(merge.mark, format!("`<<` merges a map, found {}", merge.describe())),
            }
        }
        for source in sources {
            for entry in source {
                if !seen.contains_key(&entry.key) {
                    seen.insert(entry.key.clone(), entry.mark);
                    entries.push(entry);
                }
            }
        }
        Ok(entries)
    }
}

/// Returns the bytes that a copy of this tree counts for, and its depth.
fn measure_tree(node: &Node) -> (usize, usize) {
    let text = node.plain.as_ref().map_or(0, String::len);
    match &node.value {
        Value::Text(value) => (NODE_BYTES + value.len() + text, 0),
        Value::List(items) => {
            let (bytes, depth) = items
                .iter()
                .map(measure_tree)
                .fold((0, 0), |(c, d), (bytes, depth)| (c + bytes, d.max(depth)));
            (NODE_BYTES + bytes, depth + 1)
        }
        Value::Map(entries) => {
            let (bytes, depth) = entries.iter().fold((0, 0), |(c, d), entry| {
                let (bytes, depth) = measure_tree(&entry.node);
                (c + bytes + entry.key.len() + NODE_BYTES, d.max(depth))
            });
            (NODE_BYTES + bytes, depth + 1)
        }
        _ => (NODE_BYTES + text, 0),
    }
}
