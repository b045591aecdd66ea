//! What the importer knows about an option: its values, which scripts use it, what becomes of it.

use super::document::Value;

/// The values that an option takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// `true` or `false`.
    Flag,
    Text,
    /// A whole number.
    Whole,
    /// A number.
    Number,
    /// A list of texts, or one text.
    Texts,
    /// A list of numbers, or one number.
    Numbers,
    /// One of these texts.
    Choice(&'static [&'static str]),
    /// A side of a square, `"width,height"`, or a list of both.
    Size,
    /// A table.
    Table,
}

impl Kind {
    /// Whether an option of this kind takes the value.
    pub(super) fn takes(self, value: &Value) -> bool {
        let is_text = |value: &Value| matches!(value, Value::Text(_));
        match self {
            Self::Flag => matches!(value, Value::Bool(_)),
            Self::Text => is_text(value),
            Self::Whole => matches!(value, Value::Whole(_)),
            Self::Number => value.as_number().is_some(),
            Self::Texts => match value {
                Value::List(items) => items.iter().all(is_text),
                other => is_text(other),
            },
            Self::Numbers => match value {
                Value::List(items) => items.iter().all(|item| item.as_number().is_some()),
                other => other.as_number().is_some(),
            },
            // An empty text is an option that is not set.
            Self::Choice(names) => {
                matches!(value, Value::Text(text) if text.is_empty() || names.contains(&text.as_str()))
            }
            Self::Size => size_of(value).is_some(),
            Self::Table => matches!(value, Value::Table(_)),
        }
    }

    /// How the values are described in messages.
    pub(super) fn expected(self) -> String {
        let described = self.described();
        match self {
            Self::Whole | Self::Number | Self::Table | Self::Texts | Self::Numbers | Self::Size => {
                format!("a {described}")
            }
            Self::Flag | Self::Text | Self::Choice(_) => described,
        }
    }

    /// How the values are described in the documentation.
    pub(super) fn described(self) -> String {
        match self {
            Self::Flag => "true or false".to_owned(),
            Self::Text => "text".to_owned(),
            Self::Whole => "whole number".to_owned(),
            Self::Number => "number".to_owned(),
            Self::Texts => "list of text".to_owned(),
            Self::Numbers => "number, or list of numbers".to_owned(),
            Self::Choice(names) => names.join(", "),
            Self::Size => "side, or width and height".to_owned(),
            Self::Table => "table".to_owned(),
        }
    }
}

/// Width and height of a value of [`Kind::Size`].
pub(super) fn size_of(value: &Value) -> Option<(u32, u32)> {
    let whole = |value: &Value| match value {
        Value::Whole(number) => u32::try_from(*number).ok(),
        _ => None,
    };
    let sides: Vec<u32> = match value {
        Value::Whole(_) => vec![whole(value)?],
        Value::Text(text) => text
            .split(',')
            .map(|side| side.trim().parse().ok())
            .collect::<Option<_>>()?,
        Value::List(items) => items.iter().map(whole).collect::<Option<_>>()?,
        _ => return None,
    };
    match *sides.as_slice() {
        [side] if side > 0 => Some((side, side)),
        [width, height] if width > 0 && height > 0 => Some((width, height)),
        _ => None,
    }
}

/// What becomes of an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// It decides these keys of the config, or what the text says.
    Translated(&'static str),
    /// It has no influence on the result, for this reason. There is no message.
    NoInfluence(&'static str),
    /// It is ignored with a note, for this reason.
    Noted(&'static str),
    /// Ignoring it would change the result: it is an error unless it is off or has this value.
    Refused { unless: &'static str, why: &'static str },
}

/// Which scripts use an option: a family in the lower half, and LoRA, the whole model or an embedding (textual inversion) in the upper half.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct UsedBy(pub u8);

impl UsedBy {
    pub(super) const ALL: Self = Self(0xff);
    pub(super) const LORA: Self = Self(0x1f);
    pub(super) const EMBEDDING: Self = Self(0x43);
    pub(super) const FULL: Self = Self(0x2f);
    pub(super) const SD: Self = Self(0x71);
    pub(super) const SDXL: Self = Self(0x72);
    pub(super) const UNET: Self = Self(0x73);
    pub(super) const FLUX: Self = Self(0x34);
    pub(super) const SD3: Self = Self(0x38);
    pub(super) const FLOW: Self = Self(0x3c);
    pub(super) const FULL_SD: Self = Self(0x21);
    pub(super) const NOT_SD: Self = Self(0x7e);
    pub(super) const NOT_SD3: Self = Self(0x77);

    /// Whether a script with these bits is among them.
    pub(super) fn includes(self, script: Self) -> bool {
        let both = self.0 & script.0;
        both & 0x0f != 0 && both & 0xf0 != 0
    }
}

/// An option of sd-scripts.
#[derive(Clone, Copy, Debug)]
pub(super) struct OptionRow {
    pub name: &'static str,
    pub kind: Kind,
    /// sd-scripts' default, for the documentation; empty for none.
    pub default: &'static str,
    pub used_by: UsedBy,
    pub fate: Fate,
}

/// A group of options, as the documentation lists them.
pub(super) struct Group {
    pub title: &'static str,
    pub options: &'static [OptionRow],
}

pub(super) const fn row(
    name: &'static str,
    kind: Kind,
    default: &'static str,
    used_by: UsedBy,
    fate: Fate,
) -> OptionRow {
    OptionRow {
        name,
        kind,
        default,
        used_by,
        fate,
    }
}

/// The known name nearest to an unknown one. Short names are near only to those that they differ from in one place.
pub(super) fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let name: String = name.chars().take(100).collect();
    let limit = |candidate: &str| match name.len() {
        0..=1 => 0,
        2..=4 => 1,
        _ => 2.max(candidate.len() / 3),
    };
    known
        .map(|candidate| (strsim::damerau_levenshtein(&name, candidate), candidate))
        .min()
        .filter(|(distance, candidate)| *distance <= limit(candidate))
        .map(|(_, candidate)| candidate)
}
