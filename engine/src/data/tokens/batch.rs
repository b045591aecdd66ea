//! The tokens of some rows.

use super::documents::DocumentStore;
use super::rows::RowPlan;
use crate::error::Result;
use candle_core::{Device, Tensor};

/// The tokens of some rows, and what is predicted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenBatch {
    /// The number of rows.
    pub rows: usize,
    /// Tokens of a row.
    pub length: usize,
    /// [rows * length]. Rows are padded with the token 0.
    pub ids: Vec<u32>,
    /// The number of the document of each token in its row, [rows * length]. The padding counts as a document of its own.
    pub documents: Vec<u32>,
    /// The positions, in [rows * length], whose next token is predicted.
    pub positions: Vec<u32>,
    /// The next token of each of these positions.
    pub targets: Vec<u32>,
    /// The number of tokens without padding.
    pub tokens: usize,
}

impl TokenBatch {
    /// Reads rows of a plan.
    ///
    /// # Errors
    /// When the temporary file cannot be read.
    pub fn read(store: &DocumentStore, plan: &RowPlan, rows: &[usize]) -> Result<Self> {
        let longest: usize = rows.iter().map(|row| plan.row_length(*row)).max().unwrap_or(0);
        let length = plan.padded_length(longest);
        let mut batch = Self {
            rows: rows.len(),
            length,
            ids: vec![0; rows.len() * length],
            documents: vec![0; rows.len() * length],
            positions: Vec::new(),
            targets: Vec::new(),
            tokens: 0,
        };
        for (number, row) in rows.iter().enumerate() {
            let documents = plan.row(*row);
            let mut at = number * length;
            for (index, document) in documents.iter().enumerate() {
                let tokens = store.read(*document)?;
                for (offset, token) in tokens.iter().enumerate() {
                    batch.ids[at + offset] = token.id;
                    batch.documents[at + offset] = index as u32;
                    if offset > 0 && token.has_loss {
                        batch.positions.push((at + offset - 1) as u32);
                        batch.targets.push(token.id);
                    }
                }
                at += tokens.len();
                batch.tokens += tokens.len();
            }
            batch.documents[at..(number + 1) * length].fill(documents.len() as u32);
        }
        Ok(batch)
    }

    /// The ids, [rows, length].
    ///
    /// # Errors
    /// When the device fails.
    pub fn ids(&self, device: &Device) -> candle_core::Result<Tensor> {
        Tensor::from_slice(&self.ids, (self.rows, self.length), device)
    }

    /// The numbers of documents, [rows, length].
    ///
    /// # Errors
    /// When the device fails.
    pub fn document_numbers(&self, device: &Device) -> candle_core::Result<Tensor> {
        Tensor::from_slice(&self.documents, (self.rows, self.length), device)
    }
}
