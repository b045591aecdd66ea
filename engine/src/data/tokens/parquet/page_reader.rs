//! The pages of a column, checked before the crate `parquet` decodes their values: it allocates what a page declares, and has no limits.

use super::decompress::decompress;
use super::delta;
use super::page_header::{PageHeader, PageKind, encoding};
use super::thrift::ThriftError;
use bytes::Bytes;
use parquet::basic::{Compression, Encoding, Type};
use parquet::column::page::{Page, PageMetadata, PageReader};
use parquet::errors::{ParquetError, Result};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The largest page when it is decompressed. Writers of tables fill pages of about 1 MiB, but of no fewer than some 1,000 texts.
const MAX_PAGE_BYTES: u32 = 1 << 30;
/// The longest header of a page: it may have the smallest and the largest text.
const MAX_HEADER_BYTES: u64 = 16 << 20;
/// The bytes that are read for a header at first.
const HEADER_BYTES: u64 = 1 << 12;
/// The most distinct values of a column: each takes some 40 bytes of memory.
const MAX_DICTIONARY: u32 = 1 << 22;
/// The most values of a row, and of a page of lists.
pub(super) const MAX_ROW_VALUES: u64 = 1 << 26;

/// Where a column of a row group is, and what is known of it.
#[derive(Clone, Debug)]
pub(super) struct ColumnChunk {
    /// The first byte in the file, and how many there are.
    pub(super) start: u64,
    pub(super) bytes: u64,
    /// The number of values, nulls included.
    pub(super) values: u64,
    pub(super) codec: Compression,
    pub(super) kind: Type,
    /// The largest levels of the column; 0: its pages have none.
    pub(super) definition: i16,
    pub(super) repetition: i16,
}

/// Reads the pages of a column of a row group.
pub(super) struct CheckedPages {
    file: Arc<File>,
    chunk: ColumnChunk,
    /// The place of the next page, the bytes from there on, and the values in them.
    at: u64,
    bytes: u64,
    values: u64,
    /// The header of the next page, if it was read: `at` is after it.
    next: Option<PageHeader>,
    has_dictionary: bool,
    /// How many values the rows that are being read may still have.
    row_values: Arc<AtomicU64>,
}

impl CheckedPages {
    /// `row_values` is set to [`MAX_ROW_VALUES`] before each row.
    pub(super) fn new(file: Arc<File>, chunk: ColumnChunk, row_values: Arc<AtomicU64>) -> Self {
        Self {
            file,
            at: chunk.start,
            bytes: chunk.bytes,
            values: chunk.values,
            chunk,
            next: None,
            has_dictionary: false,
            row_values,
        }
    }

    /// Reads the header of the next page. `None`: there is none.
    fn header(&mut self) -> Result<Option<PageHeader>> {
        if self.next.is_none() && self.bytes > 0 && self.values > 0 {
            let (header, length) = self.read_header()?;
            self.at += length;
            self.bytes -= length;
            self.next = Some(header);
        }
        Ok(self.next.clone())
    }

    fn read_header(&self) -> Result<(PageHeader, u64)> {
        let mut size = HEADER_BYTES;
        loop {
            let wanted = size.min(self.bytes);
            match PageHeader::read(&self.read(wanted)?) {
                Ok((header, length)) => return Ok((header, length as u64)),
                Err(ThriftError::End) if wanted < self.bytes && wanted < MAX_HEADER_BYTES => size *= 16,
                Err(_) => return Err(wrong("the header of a page is damaged")),
            }
        }
    }

    /// Reads bytes from the next page on.
    fn read(&self, count: u64) -> Result<Vec<u8>> {
        let mut bytes = vec![0; usize::try_from(count).map_err(|_| wrong("a page is too long"))?];
        let read = self.file.read_exact_at(&mut bytes, self.at);
        read.map_err(|error| wrong(format!("its pages cannot be read: {error}")))?;
        Ok(bytes)
    }

    /// Reads the content of a page.
    fn content(&mut self, header: &PageHeader) -> Result<Vec<u8>> {
        let compressed = u64::from(header.compressed_bytes);
        if compressed > self.bytes {
            return Err(wrong(format!(
                "a page of {compressed} bytes, and the column has {} more",
                self.bytes
            )));
        }
        for bytes in [header.compressed_bytes, header.uncompressed_bytes] {
            if bytes > MAX_PAGE_BYTES {
                return Err(wrong(format!(
                    "a page of {bytes} bytes, and pages of up to {} MiB are read: write the file with smaller pages",
                    MAX_PAGE_BYTES >> 20
                )));
            }
        }
        let content = match header.kind {
            PageKind::Other => Vec::new(),
            _ => self.read(compressed)?,
        };
        self.at += compressed;
        self.bytes -= compressed;
        if let Some(crc) = header.crc
            && header.kind != PageKind::Other
            && crc32fast::hash(&content) != crc
        {
            return Err(wrong("a page does not have its checksum"));
        }
        Ok(content)
    }

    /// Takes the values of a page from those that the column and the row may have.
    fn take_values(&mut self, header: &PageHeader) -> Result<()> {
        let values = u64::from(header.values);
        self.values = self
            .values
            .checked_sub(values)
            .ok_or_else(|| wrong("its pages have more values than it declares"))?;
        if self.chunk.repetition == 0 {
            return Ok(());
        }
        let left = self.row_values.load(Ordering::Relaxed).checked_sub(values).ok_or_else(|| {
            wrong(format!(
                "a row or a page has more than {MAX_ROW_VALUES} values, which are not read: write the file with shorter rows and smaller pages"
            ))
        })?;
        self.row_values.store(left, Ordering::Relaxed);
        Ok(())
    }

    fn dictionary(&mut self, header: &PageHeader, content: Vec<u8>) -> Result<Page> {
        let encoding = known_encoding(header)?;
        let smallest = match self.chunk.kind {
            Type::INT64 => 8,
            _ => 4,
        };
        let values = header.values;
        if u64::from(values) * smallest > content.len() as u64 {
            return Err(wrong(format!(
                "{values} distinct values do not fit into {} bytes",
                content.len()
            )));
        }
        if values > MAX_DICTIONARY {
            return Err(wrong(format!(
                "a dictionary of {values} values, and dictionaries of up to {MAX_DICTIONARY} are read: write the file without dictionaries"
            )));
        }
        self.has_dictionary = true;
        Ok(Page::DictionaryPage {
            buf: Bytes::from(content),
            num_values: values,
            encoding,
            is_sorted: false,
        })
    }

    fn data(&mut self, header: &PageHeader, content: Vec<u8>, levels: (i64, i64)) -> Result<Page> {
        let (definition, repetition) = levels;
        let mut at = 0;
        for (largest, kind) in [(self.chunk.repetition, repetition), (self.chunk.definition, definition)] {
            if largest == 0 {
                continue;
            }
            if encoding(kind) != Some(Encoding::RLE) {
                return Err(wrong(format!(
                    "its levels are encoded as {}, and RLE is read: write the file again with a newer program",
                    encoding_name(kind)
                )));
            }
            at = content
                .get(at..at + 4)
                .and_then(|length| Some(u32::from_le_bytes(length.try_into().ok()?) as usize))
                .and_then(|length| (at + 4).checked_add(length))
                .filter(|end| *end <= content.len())
                .ok_or_else(|| wrong("a page ends within its levels"))?;
        }
        let encoding = self.check_values(header, &content[at..])?;
        Ok(Page::DataPage {
            buf: Bytes::from(content),
            num_values: header.values,
            encoding,
            def_level_encoding: Encoding::RLE,
            rep_level_encoding: Encoding::RLE,
            statistics: None,
        })
    }

    /// Checks the values of a page, which follow its levels. Returns their encoding.
    fn check_values(&self, header: &PageHeader, values: &[u8]) -> Result<Encoding> {
        let encoding = known_encoding(header)?;
        let is_text = self.chunk.kind == Type::BYTE_ARRAY;
        match encoding {
            Encoding::RLE_DICTIONARY | Encoding::PLAIN_DICTIONARY if !self.has_dictionary => {
                return Err(wrong("a page refers to a dictionary, and there is none before it"));
            }
            Encoding::DELTA_BINARY_PACKED if !is_text => delta::check_header(values, header.values).map_err(wrong)?,
            Encoding::DELTA_LENGTH_BYTE_ARRAY if is_text => {
                delta::check_numbers(values, header.values).map_err(wrong)?;
            }
            Encoding::DELTA_BYTE_ARRAY if is_text => delta::check_texts(values, header.values).map_err(wrong)?,
            _ => {}
        }
        Ok(encoding)
    }
}

impl PageReader for CheckedPages {
    fn get_next_page(&mut self) -> Result<Option<Page>> {
        loop {
            let Some(header) = self.header()? else {
                return Ok(None);
            };
            self.next = None;
            let content = self.content(&header)?;
            let (codec, uncompressed) = (self.chunk.codec, header.uncompressed_bytes as usize);
            let page = match header.kind {
                PageKind::Other => continue,
                // The crate takes a page without values for the end of the column.
                PageKind::Data { .. } | PageKind::DataV2 { .. } if header.values == 0 => continue,
                PageKind::Dictionary => {
                    let content = decompress(codec, &content, uncompressed).map_err(wrong)?;
                    self.dictionary(&header, content)?
                }
                PageKind::Data {
                    definition_levels,
                    repetition_levels,
                } => {
                    self.take_values(&header)?;
                    let content = decompress(codec, &content, uncompressed).map_err(wrong)?;
                    self.data(&header, content, (definition_levels, repetition_levels))?
                }
                PageKind::DataV2 {
                    nulls,
                    rows,
                    definition_bytes,
                    repetition_bytes,
                    is_compressed,
                } => {
                    self.take_values(&header)?;
                    let levels = definition_bytes as usize + repetition_bytes as usize;
                    if levels > content.len() || levels > uncompressed {
                        return Err(wrong("a page ends within its levels"));
                    }
                    let content = match is_compressed && codec != Compression::UNCOMPRESSED {
                        true => {
                            let mut whole = content[..levels].to_vec();
                            // A page of nulls has no values, and some writers then write nothing at all.
                            if uncompressed > levels {
                                let values = decompress(codec, &content[levels..], uncompressed - levels);
                                whole.extend_from_slice(&values.map_err(wrong)?);
                            }
                            whole
                        }
                        false => content,
                    };
                    let encoding = self.check_values(&header, &content[levels..])?;
                    Page::DataPageV2 {
                        buf: Bytes::from(content),
                        num_values: header.values,
                        encoding,
                        num_nulls: nulls,
                        num_rows: rows,
                        def_levels_byte_len: definition_bytes,
                        rep_levels_byte_len: repetition_bytes,
                        is_compressed,
                        statistics: None,
                    }
                }
            };
            return Ok(Some(page));
        }
    }

    fn peek_next_page(&mut self) -> Result<Option<PageMetadata>> {
        let metadata = |header: PageHeader| PageMetadata {
            num_rows: match header.kind {
                PageKind::DataV2 { rows, .. } => Some(rows as usize),
                _ => None,
            },
            num_levels: Some(header.values as usize),
            is_dict: header.kind == PageKind::Dictionary,
        };
        Ok(self.header()?.map(metadata))
    }

    fn skip_next_page(&mut self) -> Result<()> {
        Err(wrong("pages are not skipped"))
    }
}

impl Iterator for CheckedPages {
    type Item = Result<Page>;

    fn next(&mut self) -> Option<Self::Item> {
        self.get_next_page().transpose()
    }
}

fn known_encoding(header: &PageHeader) -> Result<Encoding> {
    encoding(header.encoding).ok_or_else(|| {
        wrong(format!(
            "its values are encoded as {}, which is not known",
            encoding_name(header.encoding)
        ))
    })
}

fn encoding_name(number: i64) -> String {
    encoding(number).map_or_else(|| format!("number {number}"), |encoding| encoding.to_string())
}

fn wrong(problem: impl Into<String>) -> ParquetError {
    ParquetError::General(problem.into())
}
