//! The tags of a caption: wildcards, which tags keep their place, which are dropped, their order. What goes beyond ai-toolkit
//! follows sd-scripts' `process_caption` (`library/train_util.py`).

use crate::rng::TorchGenerator;

/// The text between tags, if the config sets none.
const COMMA: &str = ",";

/// How the tags of every caption are changed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TagRules {
    /// As sd-scripts reads captions: of a file's lines the first, without spaces at its ends (with `wildcards` every line that is not
    /// blank); the text between tags stays as it is, unless tags are dropped or shuffled; then tags lose the spaces at their ends.
    pub sd_scripts_captions: bool,
    /// Text before each caption, followed by a space.
    pub prefix: Option<String>,
    /// Text after each caption, preceded by a space.
    pub suffix: Option<String>,
    /// One line of the caption is chosen, and one alternative of each `{a|b|c}`.
    pub wildcards: bool,
    /// The text between tags; `None`: a comma.
    pub separator: Option<String>,
    /// Probability to drop each tag.
    pub token_dropout_rate: f64,
    /// Leading tags that are never dropped. Ignored in a caption that contains `keep_tokens_separator`.
    pub keep_tokens: usize,
    /// Shuffle the tags.
    pub shuffle: bool,
    /// The leading tags that are never dropped are not shuffled either.
    pub shuffle_keeps_tokens: bool,
    /// Tags before this text, and after it where it stands a second time, are neither dropped nor shuffled.
    pub keep_tokens_separator: Option<String>,
    /// In the result, this text becomes `separator`. It joins several tags to one, which is dropped and shuffled as one.
    pub secondary_separator: Option<String>,
}

impl TagRules {
    /// Whether some tags are not shuffled.
    pub(super) fn keeps_places(&self) -> bool {
        self.shuffle_keeps_tokens || self.keep_tokens_separator.is_some()
    }

    /// Whether the tags are shuffled again after the trigger words were added. ai-toolkit shuffles again; sd-scripts does not. With
    /// sd-scripts' captions or separators we shuffle again only if random triggers were added, which sd-scripts does not have. If some tags
    /// keep their places we never do.
    pub(super) fn shuffles_again(&self, has_random_triggers: bool) -> bool {
        let is_of_ai_toolkit =
            !self.sd_scripts_captions && self.separator.is_none() && self.secondary_separator.is_none();
        self.shuffle && !self.keeps_places() && (is_of_ai_toolkit || has_random_triggers)
    }

    pub(super) fn separator(&self) -> &str {
        self.separator.as_deref().unwrap_or(COMMA)
    }

    /// Whether tags are dropped or shuffled.
    fn changes_tags(&self) -> bool {
        self.shuffle || self.token_dropout_rate > 0.0
    }
}

/// The caption with its tags changed.
///
/// Draws these random numbers, in this order and only where the rule is on: the line `randint(0, lines)` if there are several; of
/// each wildcard `randint(0, alternatives)`; dropout `rand(1)` per tag that can be dropped; shuffling `randperm(tags)` of the tags
/// that are shuffled.
pub(super) fn change_tags(raw: &str, rules: &TagRules, generator: &mut TorchGenerator) -> String {
    let mut caption = match rules.sd_scripts_captions {
        true => lines_of_sd_scripts(raw, rules.wildcards),
        false => raw.to_owned(),
    };
    if let Some(prefix) = &rules.prefix {
        caption = format!("{prefix} {caption}");
    }
    if let Some(suffix) = &rules.suffix {
        caption = format!("{caption} {suffix}");
    }
    if rules.wildcards {
        caption = choose_alternatives(choose_line(&caption, generator), generator);
    } else if rules.sd_scripts_captions {
        caption = first_line(&caption).to_owned();
    }
    if rules.changes_tags() || !rules.sd_scripts_captions {
        caption = split_tags(&caption, rules).joined(rules, generator);
    }
    match &rules.secondary_separator {
        Some(secondary) => caption.replace(secondary.as_str(), rules.separator()),
        None => caption,
    }
}

/// What sd-scripts reads of a caption file.
fn lines_of_sd_scripts(raw: &str, all: bool) -> String {
    if all {
        let lines = raw.lines().map(str::trim).filter(|line| !line.is_empty());
        return lines.collect::<Vec<_>>().join("\n");
    }
    first_line(raw).trim().to_owned()
}

fn first_line(text: &str) -> &str {
    text.split('\n').next().unwrap_or_default()
}

/// The tags of a caption.
struct Tags<'a> {
    first: Vec<&'a str>,
    /// Those that are dropped and shuffled; of these, the first `never_dropped` are shuffled only.
    free: Vec<&'a str>,
    never_dropped: usize,
    last: Vec<&'a str>,
}

fn split_tags<'a>(caption: &'a str, rules: &TagRules) -> Tags<'a> {
    let separator = rules.separator();
    let keep_separator = rules.keep_tokens_separator.as_deref().filter(|_| rules.changes_tags());
    if let Some((first, rest)) = keep_separator.and_then(|kept| caption.split_once(kept)) {
        let parts = keep_separator.and_then(|kept| rest.split_once(kept));
        let (free, last) = parts.unwrap_or((rest, ""));
        let trimmed = |part: &'a str| {
            let tags = part.split(separator).map(str::trim);
            tags.filter(|tag| !tag.is_empty()).collect()
        };
        return Tags {
            first: trimmed(first),
            free: trimmed(free),
            never_dropped: 0,
            last: trimmed(last),
        };
    }
    if rules.changes_tags() && (rules.shuffle_keeps_tokens || rules.sd_scripts_captions) {
        let mut tags: Vec<&str> = caption.trim().split(separator).map(str::trim).collect();
        if rules.shuffle_keeps_tokens {
            let free = tags.split_off(rules.keep_tokens.min(tags.len()));
            return Tags {
                first: tags,
                free,
                never_dropped: 0,
                last: Vec::new(),
            };
        }
        return Tags {
            first: Vec::new(),
            free: tags,
            never_dropped: rules.keep_tokens,
            last: Vec::new(),
        };
    }
    Tags {
        first: Vec::new(),
        free: caption.split(separator).collect(),
        never_dropped: rules.keep_tokens,
        last: Vec::new(),
    }
}

impl Tags<'_> {
    fn joined(mut self, rules: &TagRules, generator: &mut TorchGenerator) -> String {
        if rules.token_dropout_rate > 0.0 {
            let mut index = 0;
            self.free.retain(|_| {
                index += 1;
                index <= self.never_dropped || f64::from(generator.rand(1)[0]) >= rules.token_dropout_rate
            });
        }
        if rules.shuffle {
            self.free = shuffle(&self.free, generator);
        }
        // ai-toolkit and sd-scripts join with a comma and a space, sd-scripts with any separator. Tags are trimmed only where some keep their
        // places or captions are sd-scripts'; otherwise `a, b` becomes `a,  b`, as in ai-toolkit.
        let all = [self.first, self.free, self.last].concat();
        all.join(", ")
    }
}

/// Shuffles with one draw of `torch.randperm`.
pub(super) fn shuffle<T: Clone>(items: &[T], generator: &mut TorchGenerator) -> Vec<T> {
    generator
        .randperm(items.len())
        .into_iter()
        .filter_map(|i| items.get(usize::try_from(i).ok()?).cloned())
        .collect()
}

/// One of several texts.
fn choose<'a>(texts: &[&'a str], generator: &mut TorchGenerator) -> &'a str {
    let drawn = generator.randint(0, texts.len() as i64, 1)[0];
    usize::try_from(drawn)
        .ok()
        .and_then(|i| texts.get(i).copied())
        .unwrap_or_default()
}

fn choose_line<'a>(caption: &'a str, generator: &mut TorchGenerator) -> &'a str {
    let lines: Vec<&str> = caption.split('\n').collect();
    match lines.len() {
        1 => caption,
        _ => choose(&lines, generator),
    }
}

/// Stand-ins for escaped braces: Unicode noncharacters, which a caption is not expected to contain.
const OPEN: &str = "\u{FFFE}";
const CLOSE: &str = "\u{FFFF}";

/// Replaces each `{a|b|c}` by one of its alternatives. `{{` and `}}` stand for braces, and do so before a wildcard is looked for:
/// `{a|{b|c}}` has no end.
fn choose_alternatives(caption: &str, generator: &mut TorchGenerator) -> String {
    let caption = caption.replace("{{", OPEN).replace("}}", CLOSE);
    let mut out = String::with_capacity(caption.len());
    let mut rest = caption.as_str();
    while let Some(at) = rest.find('{') {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        if let Some((alternatives, after)) = alternatives_at(rest) {
            out.push_str(choose(&alternatives.split('|').collect::<Vec<_>>(), generator));
            rest = after;
        } else {
            // A brace without a partner, or `{}`.
            out.push('{');
            rest = &rest[1..];
        }
    }
    out.push_str(rest);
    out.replace(OPEN, "{").replace(CLOSE, "}")
}

/// The text in the braces at the start of `text`, and what follows them.
fn alternatives_at(text: &str) -> Option<(&str, &str)> {
    let inner = text.strip_prefix('{')?;
    let end = inner.find('}').filter(|end| *end > 0)?;
    Some((&inner[..end], &inner[end + 1..]))
}
