//! Training data of language models: documents of tokens, rows of a fixed length, and their order.
//!
//! [`read_documents`] reads files, converts texts to tokens and stores these in a temporary file ([`DocumentStore`]), so that memory is
//! bounded by the longest text. [`RowPlan`] puts documents into rows, [`RowOrder`] says which rows a step trains on, and [`TokenBatch`] has
//! the tokens of some rows. Everything is a function of the files, the config and the seed: a run that resumes has the same batches.

mod batch;
mod document_tokenizer;
mod documents;
mod file_list;
mod fill_in_middle;
mod license_expression;
mod licenses;
mod order;
mod parquet;
mod patterns;
mod reader;
mod record;
mod record_file;
mod record_folder;
mod rows;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
mod texts;

pub use batch::TokenBatch;
pub use document_tokenizer::DocumentTokenizer;
pub use documents::{Document, DocumentStore};
pub use fill_in_middle::FimRates;
pub use order::RowOrder;
pub use reader::{DataSource, ReadData, ReadOptions, SourceKind, read_documents};
pub use rows::RowPlan;
pub use texts::read_texts;
