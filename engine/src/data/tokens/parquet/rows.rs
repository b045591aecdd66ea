//! Reads a column of a row group row by row.

use super::super::record::Field;
use super::columns::{ChosenColumn, ColumnKind};
use super::contained::contained;
use super::page_reader::{CheckedPages, ColumnChunk, MAX_ROW_VALUES};
use parquet::column::reader::ColumnReaderImpl;
use parquet::data_type::{ByteArray, ByteArrayType, Int32Type, Int64Type};
use parquet::file::metadata::RowGroupMetaData;
use parquet::schema::types::ColumnDescPtr;
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The longest text of a row, as the longest line of a JSONL file.
const MAX_TEXT_BYTES: usize = 256 << 20;

/// The values of a column, of the type that they have in the file.
enum Values {
    Text(ColumnReaderImpl<ByteArrayType>, Vec<ByteArray>),
    Int32(ColumnReaderImpl<Int32Type>, Vec<i32>),
    Int64(ColumnReaderImpl<Int64Type>, Vec<i64>),
}

/// A column of a row group, read row by row.
pub(super) struct ColumnRows {
    kind: ColumnKind,
    /// The definition level of a value that is there.
    definition: i16,
    values: Values,
    row_values: Arc<AtomicU64>,
    /// The levels of a row.
    definitions: Vec<i16>,
    repetitions: Vec<i16>,
}

impl ColumnRows {
    /// Opens a column of a row group in a file of `length` bytes.
    pub(super) fn open(
        (file, length): (&Arc<File>, u64),
        group: &RowGroupMetaData,
        column: &ChosenColumn,
    ) -> Result<Self, String> {
        let descriptor: ColumnDescPtr = group.schema_descr().column(column.leaf);
        let chunk = chunk(group, column, length)?;
        let row_values = Arc::new(AtomicU64::new(MAX_ROW_VALUES));
        let definition = chunk.definition;
        let kind = chunk.kind;
        let pages = Box::new(CheckedPages::new(Arc::clone(file), chunk, Arc::clone(&row_values)));
        let values = contained(|| {
            Ok(match kind {
                parquet::basic::Type::INT32 => Values::Int32(ColumnReaderImpl::new(descriptor, pages), Vec::new()),
                parquet::basic::Type::INT64 => Values::Int64(ColumnReaderImpl::new(descriptor, pages), Vec::new()),
                _ => Values::Text(ColumnReaderImpl::new(descriptor, pages), Vec::new()),
            })
        })?;
        Ok(Self {
            kind: column.kind,
            definition,
            values,
            row_values,
            definitions: Vec::new(),
            repetitions: Vec::new(),
        })
    }

    /// Reads the next row. `None`: there is none.
    pub(super) fn next_row(&mut self) -> Result<Option<Field>, String> {
        self.row_values.store(MAX_ROW_VALUES, Ordering::Relaxed);
        let (definitions, repetitions) = (&mut self.definitions, &mut self.repetitions);
        definitions.clear();
        repetitions.clear();
        /// Reads the values of the next row into `values`.
        macro_rules! read {
            ($reader:ident, $values:ident) => {{
                $values.clear();
                contained(|| $reader.read_records(1, Some(definitions), Some(repetitions), $values))?
            }};
        }
        let (rows, _, levels) = match &mut self.values {
            Values::Text(reader, values) => read!(reader, values),
            Values::Int32(reader, values) => read!(reader, values),
            Values::Int64(reader, values) => read!(reader, values),
        };
        if rows == 0 {
            return Ok(None);
        }
        self.field(levels).map(Some)
    }

    /// The values of the row that was read, which has this many levels.
    fn field(&self, levels: usize) -> Result<Field, String> {
        let are_present =
            |expected: usize| expected == levels && self.definitions.iter().all(|level| *level == self.definition);
        let (present, is_unsigned) = match (self.kind, &self.values) {
            (ColumnKind::Text, Values::Text(_, values)) => {
                return match values.as_slice() {
                    [text] if are_present(1) => read_text(text.data()).map(Field::Text),
                    _ => Ok(Field::Other),
                };
            }
            (ColumnKind::TokenIds { present, is_unsigned }, _) => (present, is_unsigned),
            // A column of texts has no numbers.
            (ColumnKind::Text, _) => return Ok(Field::Other),
        };
        let ids: Vec<i64> = match &self.values {
            Values::Int32(_, values) if is_unsigned => values.iter().map(|id| i64::from(*id as u32)).collect(),
            Values::Int32(_, values) => values.iter().map(|id| i64::from(*id)).collect(),
            // Too large for any vocabulary.
            Values::Int64(_, values) if is_unsigned => values
                .iter()
                .map(|id| i64::try_from(*id as u64).unwrap_or(i64::MAX))
                .collect(),
            Values::Int64(_, values) => values.clone(),
            Values::Text(..) => return Ok(Field::Other),
        };
        // An empty list has one level, which says that the list is there and has no item.
        let is_empty = self.definitions == [present];
        Ok(match is_empty || are_present(ids.len()) {
            true => Field::Tokens(ids),
            false => Field::Other,
        })
    }
}

fn read_text(bytes: &[u8]) -> Result<String, String> {
    if bytes.len() > MAX_TEXT_BYTES {
        return Err(format!("a text of more than {} MiB", MAX_TEXT_BYTES >> 20));
    }
    match std::str::from_utf8(bytes) {
        Ok(text) => Ok(text.to_owned()),
        Err(error) => Err(format!(
            "it is not UTF-8 text: the byte at position {} is wrong",
            error.valid_up_to() + 1
        )),
    }
}

/// Where a column of a row group is in a file of `length` bytes.
fn chunk(group: &RowGroupMetaData, column: &ChosenColumn, length: u64) -> Result<ColumnChunk, String> {
    let descriptor = group.schema_descr().column(column.leaf);
    let found = group
        .columns()
        .get(column.leaf)
        .ok_or("the row group does not have this column")?;
    if let Some(other) = found.file_path() {
        return Err(format!(
            "its values are in another file, `{other}`, and such files are not read"
        ));
    }
    if found.column_type() != descriptor.physical_type() {
        return Err("its type is another one in the row group than in the list of columns".to_owned());
    }
    // Some writers give 0 where there is no dictionary.
    let dictionary = found.dictionary_page_offset().filter(|offset| *offset > 0);
    let start = dictionary.map_or(found.data_page_offset(), |offset| offset.min(found.data_page_offset()));
    let place = |number: i64| u64::try_from(number).map_err(|_| "its place in the file is below 0".to_owned());
    let chunk = ColumnChunk {
        start: place(start)?,
        bytes: place(found.compressed_size())?,
        values: place(found.num_values())?,
        codec: found.compression(),
        kind: found.column_type(),
        definition: descriptor.max_def_level(),
        repetition: descriptor.max_rep_level(),
    };
    match chunk.start.checked_add(chunk.bytes) {
        Some(end) if end <= length => Ok(chunk),
        _ => Err("its pages end after the end of the file, so this is not all of the file".to_owned()),
    }
}
