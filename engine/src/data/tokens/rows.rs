//! Documents in rows of a fixed length.

use super::documents::Document;
use crate::rng::generator_for;
use std::collections::BTreeMap;

/// Which documents each row has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowPlan {
    /// The index of the first document of each row in `documents`, and their number at the end.
    starts: Vec<u32>,
    documents: Vec<Document>,
    /// Tokens of the longest row.
    longest: usize,
}

impl RowPlan {
    /// A row for each document.
    #[must_use]
    pub fn single(documents: Vec<Document>) -> Self {
        Self::new((0..=documents.len() as u32).collect(), documents)
    }

    fn new(starts: Vec<u32>, documents: Vec<Document>) -> Self {
        let mut plan = Self {
            starts,
            documents,
            longest: 0,
        };
        plan.longest = (0..plan.len()).map(|row| plan.row_length(row)).max().unwrap_or(0);
        plan
    }

    /// Tokens of a row.
    #[must_use]
    pub fn row_length(&self, index: usize) -> usize {
        self.row(index).iter().map(|document| document.length as usize).sum()
    }

    /// Several documents in each row of `context` tokens: the longest first, each into the fullest row in which it fits (best fit
    /// decreasing). Documents of equal length are shuffled by the seed, so that a row has documents of several data sets.
    #[must_use]
    pub fn packed(documents: Vec<Document>, context: usize, seed: u64) -> Self {
        let shuffled = generator_for(seed, "packing", 0, 0).randperm(documents.len());
        let mut order: Vec<usize> = shuffled.into_iter().map(|index| index as usize).collect();
        order.sort_by_key(|index| std::cmp::Reverse(documents[*index].length));
        // The rows with this many free tokens, the latest last.
        let mut free: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
        let mut row_of = vec![0u32; documents.len()];
        let mut rows = 0u32;
        for index in order {
            let length = documents[index].length as usize;
            let fitting = free.range(length..).next().map(|(room, _)| *room);
            let (room, row) = match fitting {
                Some(room) => {
                    let row = free.get_mut(&room).and_then(Vec::pop).unwrap_or(rows);
                    if free.get(&room).is_some_and(Vec::is_empty) {
                        free.remove(&room);
                    }
                    (room, row)
                }
                None => {
                    rows += 1;
                    (context.max(length), rows - 1)
                }
            };
            row_of[index] = row;
            if room - length >= 2 {
                free.entry(room - length).or_default().push(row);
            }
        }
        let mut starts = vec![0u32; rows as usize + 1];
        for row in &row_of {
            starts[*row as usize + 1] += 1;
        }
        for row in 0..rows as usize {
            starts[row + 1] += starts[row];
        }
        let mut sorted: Vec<(u32, usize)> = row_of.into_iter().zip(0..).collect();
        sorted.sort_unstable();
        let documents = sorted.into_iter().map(|(_, index)| documents[index]).collect();
        Self::new(starts, documents)
    }

    /// The number of rows.
    #[must_use]
    pub fn len(&self) -> usize {
        self.starts.len() - 1
    }

    /// Whether there are no rows.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The documents of a row.
    #[must_use]
    pub fn row(&self, index: usize) -> &[Document] {
        &self.documents[self.starts[index] as usize..self.starts[index + 1] as usize]
    }

    /// The length to which rows of up to `longest` tokens are padded: one of eight steps between two powers of two, but not above the longest row.
    /// Batches then have few lengths, and the memory that one frees fits the next one.
    #[must_use]
    pub fn padded_length(&self, longest: usize) -> usize {
        let step = (longest.max(1).next_power_of_two() / 16).max(1);
        longest.next_multiple_of(step).min(self.longest.max(longest))
    }

    /// Only the first rows.
    #[must_use]
    pub fn truncated(mut self, rows: usize) -> Self {
        if rows < self.len() {
            self.starts.truncate(rows + 1);
            self.documents.truncate(self.starts[rows] as usize);
        }
        self
    }

    /// The number of documents.
    #[must_use]
    pub fn documents(&self) -> usize {
        self.documents.len()
    }

    /// The documents, row by row.
    #[must_use]
    pub fn into_documents(self) -> Vec<Document> {
        self.documents
    }

    /// Tokens of the longest document; 0 without documents.
    #[must_use]
    pub fn longest_document(&self) -> usize {
        let lengths = self.documents.iter().map(|document| document.length as usize);
        lengths.max().unwrap_or(0)
    }

    /// The number of tokens of all rows, without padding.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        self.documents.iter().map(|document| u64::from(document.length)).sum()
    }
}
