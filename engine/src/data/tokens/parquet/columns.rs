//! Which columns of a file are used, and what they contain.

use super::super::record::{Columns, TOKEN_FIELDS};
use parquet::basic::{ConvertedType, Repetition, Type as PhysicalType};
use parquet::schema::types::{SchemaDescriptor, Type};

/// Names of columns that a message lists.
const MAX_LISTED: usize = 50;

/// What the values of a column are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ColumnKind {
    /// Texts.
    Text,
    /// Lists of token ids. A list is there, though it may be empty, where the definition level is `present` or more.
    TokenIds { present: i16, is_unsigned: bool },
}

/// A column that is used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ChosenColumn {
    pub(super) name: String,
    pub(super) kind: ColumnKind,
    /// The index of the column among all that have values.
    pub(super) leaf: usize,
}

/// The columns of a file that are used.
///
/// # Errors
/// When there is none of them, or one contains neither texts nor lists of token ids, as its name requires.
pub(super) fn chosen_columns(schema: &SchemaDescriptor, columns: &Columns) -> Result<Vec<ChosenColumn>, String> {
    let texts = [&columns.text, &columns.prompt, &columns.completion].map(String::as_str);
    let fields = schema.root_schema().get_fields();
    let mut chosen: Vec<ChosenColumn> = Vec::new();
    for (index, field) in fields.iter().enumerate() {
        let name = field.name();
        let kind = match (TOKEN_FIELDS.contains(&name), texts.contains(&name)) {
            (true, _) => {
                token_ids(field).ok_or_else(|| unsuitable(field, "a list of token ids, which are whole numbers"))?
            }
            (false, true) => text(field).ok_or_else(|| unsuitable(field, "text"))?,
            (false, false) => continue,
        };
        if chosen.iter().any(|column| column.name == name) {
            return Err(format!("it has two columns `{name}`"));
        }
        let leaf = (0..schema.num_columns()).find(|leaf| schema.get_column_root_idx(*leaf) == index);
        chosen.push(ChosenColumn {
            name: name.to_owned(),
            kind,
            leaf: leaf.ok_or_else(|| format!("the column `{name}` has no values"))?,
        });
    }
    if chosen.is_empty() {
        return Err(format!(
            "it has none of the columns `{}`, `{}`, `{}`, and `{}` with `{}`; its columns are: {}. `text_column`, `prompt_column` and \
             `completion_column` name others",
            TOKEN_FIELDS[0],
            TOKEN_FIELDS[1],
            columns.text,
            columns.prompt,
            columns.completion,
            listed(fields.iter().map(|field| field.name())),
        ));
    }
    Ok(chosen)
}

fn unsuitable(field: &Type, expected: &str) -> String {
    format!("`{}`: expected {expected}, found {}", field.name(), description(field))
}

fn listed<'a>(names: impl ExactSizeIterator<Item = &'a str>) -> String {
    let more = names.len().saturating_sub(MAX_LISTED);
    let mut listed: Vec<String> = names.take(MAX_LISTED).map(|name| format!("`{name}`")).collect();
    if more > 0 {
        listed.push(format!("and {more} more"));
    }
    match listed.is_empty() {
        true => "none".to_owned(),
        false => listed.join(", "),
    }
}

fn is_repeated(field: &Type) -> bool {
    field.get_basic_info().has_repetition() && field.get_basic_info().repetition() == Repetition::REPEATED
}

fn is_optional(field: &Type) -> bool {
    field.get_basic_info().has_repetition() && field.get_basic_info().repetition() == Repetition::OPTIONAL
}

/// The only field of a group.
fn only_field(field: &Type) -> Option<&Type> {
    match field.is_group() {
        true if field.get_fields().len() == 1 => Some(&field.get_fields()[0]),
        _ => None,
    }
}

fn text(field: &Type) -> Option<ColumnKind> {
    let is_text = field.is_primitive()
        && field.get_physical_type() == PhysicalType::BYTE_ARRAY
        && matches!(
            field.get_basic_info().converted_type(),
            ConvertedType::NONE | ConvertedType::UTF8 | ConvertedType::ENUM | ConvertedType::JSON
        );
    (is_text && !is_repeated(field)).then_some(ColumnKind::Text)
}

/// A list of numbers in one of its forms: a repeated number; a group of a repeated number; a group of a repeated group of a number, which
/// writers use today.
fn token_ids(field: &Type) -> Option<ColumnKind> {
    let present = i16::from(is_optional(field));
    let element = match is_repeated(field) {
        true => field,
        false => {
            let repeated = only_field(field).filter(|field| is_repeated(field))?;
            match repeated.is_group() {
                true => only_field(repeated).filter(|field| !is_repeated(field))?,
                false => repeated,
            }
        }
    };
    let is_whole =
        element.is_primitive() && matches!(element.get_physical_type(), PhysicalType::INT32 | PhysicalType::INT64);
    let is_unsigned = match element.get_basic_info().converted_type() {
        ConvertedType::UINT_8 | ConvertedType::UINT_16 | ConvertedType::UINT_32 | ConvertedType::UINT_64 => true,
        ConvertedType::NONE
        | ConvertedType::INT_8
        | ConvertedType::INT_16
        | ConvertedType::INT_32
        | ConvertedType::INT_64 => false,
        _ => return None,
    };
    is_whole.then_some(ColumnKind::TokenIds { present, is_unsigned })
}

/// What a column contains, for messages.
fn description(field: &Type) -> String {
    if field.is_primitive() {
        let kind = match field.get_basic_info().converted_type() {
            ConvertedType::NONE => field.get_physical_type().to_string(),
            kind => kind.to_string(),
        };
        return match is_repeated(field) {
            true => format!("a list of {kind}"),
            false => kind,
        };
    }
    let repeated = only_field(field).filter(|field| is_repeated(field));
    let element = repeated.and_then(|repeated| match repeated.is_group() {
        true => only_field(repeated),
        false => Some(repeated),
    });
    match element {
        Some(element) if element.is_primitive() => {
            let kind = match element.get_basic_info().converted_type() {
                ConvertedType::NONE => element.get_physical_type().to_string(),
                kind => kind.to_string(),
            };
            format!("a list of {kind}")
        }
        Some(_) => "a list of groups or lists".to_owned(),
        None => format!(
            "a group of {}",
            listed(field.get_fields().iter().map(|field| field.name()))
        ),
    }
}
