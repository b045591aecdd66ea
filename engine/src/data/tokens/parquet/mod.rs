//! Reads Parquet files row by row, as Hugging Face's `datasets` and others write them. Only the columns that are used are decoded, and memory
//! holds a page of each.
//!
//! The crate `parquet` decodes values. It trusts what a file declares: it allocates as many values as a page says that it has, and panics where a
//! slice is out of range. So the lengths and counts of a file are checked here before it sees them (`footer`, `page_reader`, `delta`), pages are
//! decompressed here, to as many bytes as they declare (`decompress`), and what panics remain become errors (`contained`).

mod columns;
mod contained;
mod decompress;
mod delta;
mod footer;
mod page_header;
mod page_reader;
mod rows;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
mod thrift;

use self::columns::chosen_columns;
use self::decompress::check_codec;
use self::footer::read_footer;
use self::rows::ColumnRows;
use super::record::{Columns, Field, RawRecord, Record};
use crate::error::{EngineError, Result};
use aitk_common::fsutil::regular;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// Reads records and passes each to `each`, with its place for messages: `a.parquet: row 3`.
///
/// # Errors
/// When the file is damaged, has none of the columns, or a row is no record, with the row.
pub(super) fn read_parquet(
    path: &Path,
    columns: &Columns,
    vocabulary: usize,
    each: &mut dyn FnMut(Record, &str) -> Result<()>,
) -> Result<()> {
    let bad = |problem: String| EngineError::bad_input(format!("{}: {problem}", path.display()));
    let unreadable = |problem: String| bad(format!("this Parquet file cannot be read: {problem}"));
    let (file, length) = regular::open(path).map_err(|error| EngineError::io(path, error))?;
    let file = Arc::new(file);
    let metadata = read_footer(&file, length).map_err(unreadable)?;
    let chosen = chosen_columns(metadata.file_metadata().schema_descr(), columns).map_err(bad)?;
    let mut row = 0_u64;
    for (index, group) in metadata.row_groups().iter().enumerate() {
        let in_group =
            |name: &str, problem: String| unreadable(format!("row group {}, column `{name}`: {problem}", index + 1));
        let mut open: Vec<(&str, ColumnRows)> = Vec::new();
        for column in &chosen {
            let name = column.name.as_str();
            if let Some(found) = group.columns().get(column.leaf) {
                check_codec(found.compression()).map_err(|problem| in_group(name, problem))?;
            }
            let rows = ColumnRows::open((&file, length), group, column);
            open.push((name, rows.map_err(|problem| in_group(name, problem))?));
        }
        for _ in 0..group.num_rows() {
            row += 1;
            let place = format!("{}: row {row}", path.display());
            let mut fields: BTreeMap<String, Field> = BTreeMap::new();
            for (name, rows) in &mut open {
                let field = rows
                    .next_row()
                    .and_then(|field| field.ok_or_else(|| "it has fewer rows than the row group".to_owned()));
                let field = field.map_err(|problem| {
                    EngineError::bad_input(format!("{place} (row group {}): `{name}`: {problem}", index + 1))
                })?;
                fields.insert((*name).to_owned(), field);
            }
            let record = RawRecord::Fields(fields).read(columns, vocabulary);
            let record = record.map_err(|problem| EngineError::bad_input(format!("{place}: {problem}")))?;
            each(record, &place)?;
        }
        for (name, rows) in &mut open {
            match rows.next_row() {
                Ok(None) => {}
                Ok(Some(_)) => return Err(in_group(name, "it has more rows than the row group".to_owned())),
                Err(problem) => return Err(in_group(name, problem)),
            }
        }
    }
    Ok(())
}
