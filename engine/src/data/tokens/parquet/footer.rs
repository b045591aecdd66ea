//! Reads the footer of a Parquet file: its columns and row groups. The lengths in it are checked before the crate `parquet` allocates what they
//! declare.

use super::contained::contained;
use super::thrift::{ThriftError, ThriftReader, ThriftType};
use parquet::file::metadata::{ParquetMetaData, ParquetMetaDataReader};
use std::fs::File;
use std::os::unix::fs::FileExt;

/// The longest footer. One of 1,000 row groups of 50 columns has some 8 MB.
const MAX_FOOTER_BYTES: u64 = 64 << 20;
/// The most columns and groups of columns, as the most fields of a JSON record.
const MAX_COLUMNS: usize = 10_000;
/// The deepest nesting of columns.
const MAX_NESTING: usize = 64;
/// What stands at the end of a file: the length of the footer, and this.
const MAGIC: &[u8; 4] = b"PAR1";
/// As `MAGIC`, of a file whose footer is encrypted.
const ENCRYPTED_MAGIC: &[u8; 4] = b"PARE";

/// Reads the footer of a file of `length` bytes.
pub(super) fn read_footer(file: &File, length: u64) -> Result<ParquetMetaData, String> {
    let read = |bytes: &mut [u8], at: u64| file.read_exact_at(bytes, at).map_err(|error| error.to_string());
    let mut end = [0; 8];
    let footer_end = length
        .checked_sub(8)
        .filter(|_| length >= 12)
        .ok_or("it has no footer, so it is not a Parquet file, or not all of one")?;
    read(&mut end, footer_end)?;
    let (declared, magic) = end.split_at(4);
    if magic == ENCRYPTED_MAGIC {
        return Err("it is encrypted, and encrypted files are not read".to_owned());
    }
    if magic != MAGIC {
        return Err("it does not end with `PAR1`, so it is not a Parquet file, or not all of one".to_owned());
    }
    let declared = u64::from(u32::from_le_bytes([declared[0], declared[1], declared[2], declared[3]]));
    if declared > MAX_FOOTER_BYTES {
        return Err(format!(
            "its footer has {declared} bytes, and footers of up to {} MiB are read",
            MAX_FOOTER_BYTES >> 20
        ));
    }
    let start = footer_end
        .checked_sub(declared)
        .ok_or_else(|| format!("its footer has {declared} bytes and the file has {length}"))?;
    let mut bytes = vec![0; usize::try_from(declared).map_err(|error| error.to_string())?];
    read(&mut bytes, start)?;
    check_footer(&bytes)?;
    contained(|| ParquetMetaDataReader::decode_metadata(&bytes))
}

/// Checks that every list has the items that it declares, and that the columns are not too many and not nested too deeply.
fn check_footer(bytes: &[u8]) -> Result<(), String> {
    let damaged = |_: ThriftError| "its footer is damaged".to_owned();
    let mut reader = ThriftReader::new(bytes);
    let mut last = 0;
    while let Some((id, kind)) = reader.field(&mut last).map_err(damaged)? {
        if (id, kind) == (2, ThriftType::List) {
            // The walk below reads it again, without looking into it.
            check_columns(&mut reader.clone())?;
        }
        reader.skip(kind).map_err(damaged)?;
    }
    Ok(())
}

/// Checks the list of columns, in which a group is followed by its columns.
fn check_columns(reader: &mut ThriftReader<'_>) -> Result<(), String> {
    let damaged = |_: ThriftError| "the list of columns in its footer is damaged".to_owned();
    let (count, _) = reader.list().map_err(damaged)?;
    let count = usize::try_from(count).unwrap_or(usize::MAX);
    if count > MAX_COLUMNS {
        return Err(format!(
            "it has {count} columns, and files with up to {MAX_COLUMNS} are read"
        ));
    }
    // For each open group, how many of its columns are missing.
    let mut missing: Vec<usize> = Vec::new();
    for index in 0..count {
        let children = children(reader).map_err(damaged)?;
        if children > count - index - 1 {
            return Err("a group of columns in its footer has more columns than there are".to_owned());
        }
        if let Some(open) = missing.last_mut() {
            *open -= 1;
        }
        if children > 0 {
            missing.push(children);
        }
        if missing.len() > MAX_NESTING {
            return Err(format!(
                "its columns are nested in more than {MAX_NESTING} groups, and such files are not read"
            ));
        }
        while missing.last() == Some(&0) {
            missing.pop();
        }
    }
    match missing.is_empty() {
        true => Ok(()),
        false => Err("a group of columns in its footer has more columns than there are".to_owned()),
    }
}

/// The number of columns of a group, 0 for a column itself.
fn children(reader: &mut ThriftReader<'_>) -> Result<usize, ThriftError> {
    let (mut last, mut children) = (0, 0);
    while let Some((id, kind)) = reader.field(&mut last)? {
        match (id, kind) {
            (5, ThriftType::Int) => {
                children = usize::try_from(reader.int()?).map_err(|_| ThriftError::Invalid)?;
            }
            _ => reader.skip(kind)?,
        }
    }
    Ok(children)
}
