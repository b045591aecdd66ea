//! The data of a run: trained and held-out rows.

use super::super::context::Context;
use super::super::rate::Progress;
use crate::data::tokens::DocumentStore;
use crate::data::tokens::{
    DataSource, DocumentTokenizer, FimRates, ReadOptions, RowOrder, RowPlan, SourceKind, TokenBatch, read_documents,
};
use crate::error::{EngineError, Result};
use aitk_common::job::lm_trainer::{LmDatasetConfig, LmDatasetKind, LmTrainerProcess};
use std::path::Path;
use std::time::{Duration, Instant};

/// The rows of a run.
pub(super) struct Data {
    store: DocumentStore,
    trained: RowPlan,
    held_out: RowPlan,
    pub(super) order: RowOrder,
}

impl Data {
    /// Reads the data sets of a process for a model with `vocabulary` tokens. `folder`: where temporary files are made. `limit`: after so much
    /// time it ends with [`EngineError::Stopped`].
    pub(super) fn read(
        process: &LmTrainerProcess,
        (seed, vocabulary, context): (u64, usize, usize),
        (model, tokenizer): (&Path, Option<&DocumentTokenizer>),
        (folder, limit): (&Path, Option<Duration>),
        cx: &mut Context<'_>,
    ) -> Result<Self> {
        cx.phase("reading data");
        let started = Instant::now();
        let sources = sources(process, cx)?;
        let validation = process.validation.as_ref();
        let options = ReadOptions {
            context,
            vocabulary,
            fim: FimRates {
                rate: process.fim_rate,
                spm_rate: process.fim_spm_rate,
            },
            seed,
            held_out: validation.and_then(|validation| validation.share).unwrap_or(0.0),
            tokenizer,
            model,
        };
        let mut progress = Progress::new();
        let steps = process.train.steps.unwrap_or(0);
        let read = read_documents(&sources, options, folder, &mut |_| {
            if cx.stop.is_set() || limit.is_some_and(|limit| started.elapsed() >= limit) {
                return Err(EngineError::Stopped);
            }
            progress.keep_alive(cx, 0, steps);
            Ok(())
        })?;
        for note in read.notes {
            cx.log("warn", note);
        }
        let held_out = read.held_out.len();
        // Which documents are held out depends on the seed, which a check does not know unless the config has it.
        let is_seed_known = limit.is_none() || process.training_seed.is_some();
        if validation.is_some() && held_out == 0 && is_seed_known {
            return Err(EngineError::bad_input(
                "validation: no document is held out: raise `share`, or give a `path` of other documents",
            ));
        }
        Ok(Self {
            store: read.store,
            trained: RowPlan::single(read.trained),
            held_out: RowPlan::single(read.held_out),
            order: RowOrder::new(0, 1, 1, seed),
        })
    }

    /// Tokens of the longest document.
    pub(super) fn longest_document(&self) -> usize {
        self.trained.longest_document().max(self.held_out.longest_document())
    }

    /// Puts the documents into rows of `context` tokens, in the order of the seed.
    pub(super) fn make_rows(
        &mut self,
        process: &LmTrainerProcess,
        (seed, context): (u64, usize),
        cx: &mut Context<'_>,
    ) {
        let rows = |plan: &mut RowPlan| {
            let documents = std::mem::replace(plan, RowPlan::single(Vec::new())).into_documents();
            match process.packing {
                true => RowPlan::packed(documents, context, seed),
                false => RowPlan::single(documents),
            }
        };
        let (documents, held_out) = (self.trained.documents(), self.held_out.documents());
        let (trained, held_out_rows) = (rows(&mut self.trained), rows(&mut self.held_out));
        let max = process
            .validation
            .as_ref()
            .map_or(0, |validation| validation.max_rows as usize);
        (self.trained, self.held_out) = (trained, held_out_rows.truncated(max));
        let train = &process.train;
        let batch = train.batch_size.fixed().unwrap_or(1) as usize;
        self.order = RowOrder::new(self.trained.len(), batch, train.gradient_accumulation as usize, seed);
        cx.log(
            "info",
            format!(
                "documents: {documents}, of {} tokens in {} rows of up to {context}; steps for each epoch: {}; documents held out: {held_out}, in {} \
                 rows that are measured",
                self.trained.tokens(),
                self.trained.len(),
                self.order.steps_per_epoch(),
                self.held_out.len()
            ),
        );
    }

    /// Rows and tokens of a row in the largest batch of a step.
    pub(super) fn largest_batch(&mut self, step: u64) -> [usize; 2] {
        let batches = self.order.batches(step);
        let tokens = |rows: &[usize]| {
            let longest = rows.iter().map(|row| self.trained.row_length(*row)).max();
            self.trained.padded_length(longest.unwrap_or(0))
        };
        let sizes = batches.iter().map(|rows| [rows.len(), tokens(rows)]);
        sizes.max_by_key(|[rows, tokens]| rows * tokens).unwrap_or([1, 1])
    }

    /// A hash of all tokens.
    pub(super) fn fingerprint(&self) -> String {
        self.store.fingerprint()
    }

    /// The batches of a step.
    pub(super) fn batches(&mut self, step: u64) -> Result<Vec<TokenBatch>> {
        let batches = self.order.batches(step).into_iter();
        batches
            .map(|rows| TokenBatch::read(&self.store, &self.trained, &rows))
            .collect()
    }

    /// The rows on which the loss is measured, in batches of `size`.
    pub(super) fn held_out_row_groups(&self, size: usize) -> Vec<Vec<usize>> {
        let rows: Vec<usize> = (0..self.held_out.len()).collect();
        rows.chunks(size.max(1)).map(<[usize]>::to_vec).collect()
    }

    /// Reads rows on which the loss is measured.
    pub(super) fn held_out_batch(&self, rows: &[usize]) -> Result<TokenBatch> {
        TokenBatch::read(&self.store, &self.held_out, rows)
    }
}

/// The data sets on this machine: those of `datasets`, then that of `validation`.
fn sources(process: &LmTrainerProcess, cx: &Context<'_>) -> Result<Vec<DataSource>> {
    let mut sources = Vec::new();
    for dataset in &process.datasets {
        sources.push(source(dataset, false, cx)?);
    }
    if let Some(path) = process
        .validation
        .as_ref()
        .and_then(|validation| validation.path.clone())
    {
        let default = LmDatasetConfig::default();
        let first = process.datasets.first().unwrap_or(&default);
        let dataset = LmDatasetConfig {
            path,
            text_column: first.text_column.clone(),
            prompt_column: first.prompt_column.clone(),
            completion_column: first.completion_column.clone(),
            ..LmDatasetConfig::default()
        };
        sources.push(source(&dataset, true, cx)?);
    }
    Ok(sources)
}

fn source(dataset: &LmDatasetConfig, is_held_out: bool, cx: &Context<'_>) -> Result<DataSource> {
    Ok(DataSource {
        path: cx.local_path(&dataset.path)?,
        kind: match dataset.kind {
            LmDatasetKind::Auto => SourceKind::Auto,
            LmDatasetKind::Records => SourceKind::Records,
            LmDatasetKind::Text => SourceKind::Text,
        },
        include: dataset.include.0.clone(),
        exclude: dataset.exclude.0.clone(),
        licenses: dataset.licenses.0.clone(),
        text_column: dataset.text_column.clone(),
        prompt_column: dataset.prompt_column.clone(),
        completion_column: dataset.completion_column.clone(),
        repeats: dataset.repeats,
        stay_in_folder: cx.has_staged_inputs(),
        is_held_out,
    })
}
