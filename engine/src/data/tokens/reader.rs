//! Reads data sets into a [`DocumentStore`].

use super::document_tokenizer::DocumentTokenizer;
use super::documents::{Document, DocumentStore, MAX_DOCUMENTS};
use super::file_list::{FileFilter, has_ending, list_files};
use super::fill_in_middle::FimRates;
use super::licenses::LicenseFilter;
use super::parquet::read_parquet;
use super::patterns::Patterns;
use super::record::{Columns, Record};
use super::record_file::read_records;
use super::record_folder::{RECORD_ENDINGS, Split, find_record_files};
use crate::error::{EngineError, Result};
use crate::models::causal_lm::FimTokens;
use crate::rng::{TorchGenerator, generator_for};
use aitk_common::fsutil::regular;
use aitk_common::job::lm_trainer::LmDatasetConfig;
use std::path::{Path, PathBuf};

/// The largest text or code file, in bytes.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// What the files of a source contain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceKind {
    /// By the path.
    Auto,
    /// JSON, JSONL and Parquet.
    Records,
    /// Texts.
    Text,
}

/// A data set on this machine.
#[derive(Clone, Debug)]
pub struct DataSource {
    /// The file or folder.
    pub path: PathBuf,
    /// What the files contain.
    pub kind: SourceKind,
    /// Patterns of the files of a folder that belong to it; empty: all.
    pub include: Vec<String>,
    /// Patterns of files that do not.
    pub exclude: Vec<String>,
    /// Licences of the text files of a folder that belong to it; empty: any, or none.
    pub licenses: Vec<String>,
    /// The field of records with a text.
    pub text_column: String,
    /// The field of records with a text that is not trained on.
    pub prompt_column: String,
    /// The field of records with the text after it.
    pub completion_column: String,
    /// How often it is in an epoch.
    pub repeats: u32,
    /// Whether a link that leads out of the folder is an error.
    pub stay_in_folder: bool,
    /// Whether all of its documents are held out.
    pub is_held_out: bool,
}

impl DataSource {
    /// Which split of a data set of Hugging Face it is. `None`: the config chooses the files.
    fn split(&self) -> Option<Split> {
        match (self.include.is_empty(), self.is_held_out) {
            (false, _) => None,
            (true, false) => Some(Split::Train),
            (true, true) => Some(Split::HeldOut),
        }
    }
}

impl DataSource {
    /// The key of a field of records that is not the usual one.
    fn chosen_column(&self) -> Option<&'static str> {
        let usual = LmDatasetConfig::default();
        let columns = [
            ("text_column", &self.text_column, &usual.text_column),
            ("prompt_column", &self.prompt_column, &usual.prompt_column),
            ("completion_column", &self.completion_column, &usual.completion_column),
        ];
        columns
            .into_iter()
            .find(|(_, name, usual)| name != usual)
            .map(|(key, ..)| key)
    }
}

/// How data sets are read.
#[derive(Clone, Copy, Debug)]
pub struct ReadOptions<'a> {
    /// The longest document in tokens.
    pub context: usize,
    /// The number of tokens of the model.
    pub vocabulary: usize,
    /// Fill-in-the-middle.
    pub fim: FimRates,
    /// The seed of cuts and of held-out documents.
    pub seed: u64,
    /// The share of the documents that are held out.
    pub held_out: f64,
    /// The tokenizer, where the model has one.
    pub tokenizer: Option<&'a DocumentTokenizer>,
    /// The model's folder, for messages.
    pub model: &'a Path,
}

/// The documents of data sets.
#[derive(Debug)]
pub struct ReadData {
    /// Their tokens.
    pub store: DocumentStore,
    /// Those that are trained on; with repeats several times.
    pub trained: Vec<Document>,
    /// Those on which the loss is measured.
    pub held_out: Vec<Document>,
    /// What the user should know, each once.
    pub notes: Vec<String>,
}

/// Reads data sets in their order. `folder`: where the temporary file is made. `progress` is called after each file or record, with the
/// number of documents so far; its error ends the reading.
///
/// # Errors
/// When a data set is missing, empty or damaged, has token ids that the model does not have, or needs a tokenizer that is not there.
pub fn read_documents(
    sources: &[DataSource],
    options: ReadOptions<'_>,
    folder: &Path,
    progress: &mut dyn FnMut(usize) -> Result<()>,
) -> Result<ReadData> {
    let fim = match options.fim.rate > 0.0 {
        true => {
            let tokenizer = tokenizer_of(&options)?;
            Some(Fim {
                tokens: tokenizer.fim_tokens()?,
                begin: tokenizer.encode("", true)?,
            })
        }
        false => None,
    };
    let mut reader = Reader {
        options,
        fim,
        data: ReadData {
            store: DocumentStore::new(folder)?,
            trained: Vec::new(),
            held_out: Vec::new(),
            notes: Vec::new(),
        },
        documents: 0,
        counts: Counts::default(),
    };
    for source in sources {
        reader.read_source(source, progress)?;
    }
    reader.finish()
}

fn tokenizer_of<'a>(options: &ReadOptions<'a>) -> Result<&'a DocumentTokenizer> {
    options.tokenizer.ok_or_else(|| {
        EngineError::bad_input(format!(
            "{}: the model's folder has no tokenizer.json, which texts need: copy it from the model's repository, or train on token \
             sequences (`[[1, 2, 3], …]` in a .json or .jsonl file, or lists of numbers in a .parquet file)",
            options.model.display()
        ))
    })
}

/// What is said once.
#[derive(Default)]
struct Counts {
    /// Documents that were split, and into how many.
    split: usize,
    pieces: usize,
    /// Documents, or last pieces, of which nothing can be predicted.
    short: usize,
    /// Whether there was a text, and no token to end it with.
    is_without_end: bool,
    /// Documents or pieces of a prompt alone.
    prompt_alone: usize,
    /// Files that are not text, and the first.
    not_text: usize,
    first_not_text: Option<PathBuf>,
    /// Files of other licences, and the first with what is known of its licence.
    not_licensed: usize,
    first_not_licensed: Option<(PathBuf, String)>,
}

/// Tokens of a document, and how many at the beginning are a prompt, which has no loss.
struct Tokens {
    ids: Vec<u32>,
    prompt_length: usize,
}

/// The tokens of documents with a gap.
struct Fim {
    tokens: FimTokens,
    /// What the tokenizer puts at the beginning of a text, such as `<s>` of Code Llama: a document with a gap begins with it, as a prompt with a gap
    /// does.
    begin: Vec<u32>,
}

struct Reader<'a> {
    options: ReadOptions<'a>,
    fim: Option<Fim>,
    data: ReadData,
    /// The number of documents in the files so far.
    documents: u64,
    counts: Counts,
}

impl Reader<'_> {
    fn read_source(&mut self, source: &DataSource, progress: &mut dyn FnMut(usize) -> Result<()>) -> Result<()> {
        let name = source.path.to_string_lossy();
        let is_folder = source.path.is_dir();
        let mut filter = FileFilter {
            include: Patterns::new(&source.include),
            exclude: Patterns::new(&source.exclude),
            endings: &[],
        };
        // The files of a data set of Hugging Face.
        let found = match source.kind == SourceKind::Auto && is_folder {
            true => {
                let files = list_files(&source.path, &filter, source.stay_in_folder)?;
                find_record_files(&source.path, &files, source.split())?
            }
            false => None,
        };
        let has_records = match source.kind {
            SourceKind::Records => true,
            SourceKind::Text => false,
            SourceKind::Auto if is_folder => found.is_some(),
            SourceKind::Auto => RECORD_ENDINGS.iter().any(|ending| has_ending(&name, ending)),
        };
        if has_records {
            filter.endings = &RECORD_ENDINGS;
        }
        let has_patterns = !source.include.is_empty() || !source.exclude.is_empty();
        if !is_folder && has_patterns {
            return Err(EngineError::bad_input(format!(
                "{name}: `include` and `exclude` choose files of a folder, and this is a file: remove them"
            )));
        }
        if !source.licenses.is_empty() && (!is_folder || has_records) {
            return Err(EngineError::bad_input(format!(
                "{name}: `licenses` chooses text files of a folder, and this is a data set of another kind: remove it"
            )));
        }
        if !has_records && let Some(key) = source.chosen_column() {
            return Err(EngineError::bad_input(format!(
                "{name}: `{key}` names a field of records, and this is read as text: set `kind: records`, or remove `{key}`"
            )));
        }
        let files = match found {
            Some(found) => {
                self.data.notes.push(found.note);
                found.files
            }
            None => list_files(&source.path, &filter, source.stay_in_folder)?,
        };
        let mut licenses = (!source.licenses.is_empty()).then(|| LicenseFilter::new(&source.path, &source.licenses));
        let (before, not_text, not_licensed) = (self.documents, self.counts.not_text, self.counts.not_licensed);
        for file in &files {
            match has_records {
                true => self.read_record_file(file, source, progress)?,
                false => self.read_text_file(file, source, licenses.as_mut())?,
            }
            progress(self.data.trained.len() + self.data.held_out.len())?;
        }
        if self.documents == before {
            let what = match (files.len(), has_records) {
                (0, _) => nothing_chosen(source, has_records)?,
                (count, false) if self.counts.not_text - not_text == count => format!(
                    "none of its {count} files is UTF-8 text, such as {}: choose files of text or code with `include`",
                    files.first().map(|file| file.display().to_string()).unwrap_or_default()
                ),
                (count, _) if self.counts.not_licensed - not_licensed == count => {
                    format!(
                        "none of its {count} files has one of the `licenses`; docs/code-models.md says how a licence is found"
                    )
                }
                (1, _) => "there is no document in it".to_owned(),
                (count, _) => format!("there is no document in its {count} files"),
            };
            return Err(EngineError::bad_input(format!("{name}: {what}")));
        }
        Ok(())
    }

    fn read_record_file(
        &mut self,
        file: &Path,
        source: &DataSource,
        progress: &mut dyn FnMut(usize) -> Result<()>,
    ) -> Result<()> {
        let columns = Columns {
            text: source.text_column.clone(),
            prompt: source.prompt_column.clone(),
            completion: source.completion_column.clone(),
        };
        let vocabulary = self.options.vocabulary;
        let read = match has_ending(&file.to_string_lossy(), "parquet") {
            true => read_parquet,
            false => read_records,
        };
        read(file, &columns, vocabulary, &mut |record, place| {
            self.add_record(record, source).map_err(|error| match error {
                EngineError::BadInput(message) if !message.contains(place) => {
                    EngineError::bad_input(format!("{place}: {message}"))
                }
                other => other,
            })?;
            progress(self.data.trained.len() + self.data.held_out.len())
        })
    }

    fn read_text_file(&mut self, file: &Path, source: &DataSource, licenses: Option<&mut LicenseFilter>) -> Result<()> {
        let (_, bytes) = regular::open(file).map_err(|error| EngineError::io(file, error))?;
        if bytes > MAX_FILE_BYTES {
            return Err(EngineError::bad_input(format!(
                "{}: a text of {} MiB; the longest is {} MiB: split it, or leave it out with `exclude`",
                file.display(),
                bytes >> 20,
                MAX_FILE_BYTES >> 20
            )));
        }
        let bytes = regular::read(file, MAX_FILE_BYTES).map_err(|error| EngineError::io(file, error))?;
        match String::from_utf8(bytes) {
            // A zero byte is in no source file, and in most binary ones.
            Ok(text) if !text.contains('\0') => {
                let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
                if let Some(Err(license)) = licenses.map(|licenses| licenses.check(file, text)) {
                    self.counts.not_licensed += 1;
                    let first = || (file.to_path_buf(), license);
                    self.counts.first_not_licensed.get_or_insert_with(first);
                    return Ok(());
                }
                self.add_text(text, source)
            }
            _ => {
                self.counts.not_text += 1;
                self.counts.first_not_text.get_or_insert_with(|| file.to_path_buf());
                Ok(())
            }
        }
    }

    fn add_record(&mut self, record: Record, source: &DataSource) -> Result<()> {
        match record {
            Record::Text(text) => self.add_text(&text, source),
            Record::Tokens(ids) => {
                self.add_document(source, |reader, generator| Ok(reader.cut_tokens(&ids, generator)))
            }
            Record::Pair { prompt, completion } => {
                let tokenizer = tokenizer_of(&self.options)?;
                self.counts.is_without_end |= tokenizer.end().is_none();
                let mut ids = tokenizer.encode(&prompt, true)?;
                let prompt_length = ids.len();
                ids.extend(tokenizer.encode_continuation(&completion)?);
                ids.extend(tokenizer.end());
                let context = self.options.context;
                self.add_document(source, |_, _| Ok(split_into_pieces(&ids, prompt_length, context)))
            }
        }
    }

    fn add_text(&mut self, text: &str, source: &DataSource) -> Result<()> {
        let tokenizer = tokenizer_of(&self.options)?;
        self.counts.is_without_end |= tokenizer.end().is_none();
        if self.fim.is_some() {
            return self.add_document(source, |reader, generator| reader.cut_text(tokenizer, text, generator));
        }
        let mut ids = tokenizer.encode(text, true)?;
        ids.extend(tokenizer.end());
        let context = self.options.context;
        self.add_document(source, |_, _| Ok(split_into_pieces(&ids, 0, context)))
    }

    /// Adds a document of the files: its pieces as `pieces` makes them, for each repeat with another generator.
    fn add_document(
        &mut self,
        source: &DataSource,
        pieces: impl Fn(&Self, &mut TorchGenerator) -> Result<Vec<Tokens>>,
    ) -> Result<()> {
        let (options, index) = (self.options, self.documents);
        self.documents += 1;
        let is_held_out = source.is_held_out
            || (options.held_out > 0.0
                && generator_for(options.seed, "held-out", index, 0).rand_f64(1)[0] < options.held_out);
        let repeats = if is_held_out { 1 } else { source.repeats };
        // Without cuts all repeats are the same.
        let stored = if self.fim.is_some() { repeats } else { 1 };
        for repeat in 0..stored {
            let mut generator = generator_for(options.seed, "fim", index, u64::from(repeat));
            let pieces = pieces(self, &mut generator)?;
            if repeat == 0 {
                self.counts.split += usize::from(pieces.len() > 1);
                self.counts.pieces += if pieces.len() > 1 { pieces.len() } else { 0 };
                let short = pieces.iter().filter(|piece| piece.ids.len() < 2).count();
                self.counts.short += if pieces.is_empty() { 1 } else { short };
            }
            for piece in pieces {
                if piece.ids.len() < 2 {
                    continue;
                }
                if piece.prompt_length >= piece.ids.len() {
                    self.counts.prompt_alone += usize::from(repeat == 0);
                    continue;
                }
                let document = self.data.store.add(&piece.ids, piece.prompt_length)?;
                let (list, times) = match is_held_out {
                    true => (&mut self.data.held_out, 1),
                    false => (&mut self.data.trained, (repeats / stored) as usize),
                };
                if list.len() + times > MAX_DOCUMENTS {
                    return Err(EngineError::bad_input(format!(
                        "{}: the data sets have more than {MAX_DOCUMENTS} documents of up to `context` tokens, counted with `repeats`: use \
                         fewer of them",
                        source.path.display()
                    )));
                }
                list.extend(std::iter::repeat_n(document, times));
            }
        }
        Ok(())
    }

    /// The pieces of a text for fill-in-the-middle, each cut between characters or left as it is.
    fn cut_text(
        &self,
        tokenizer: &DocumentTokenizer,
        text: &str,
        generator: &mut TorchGenerator,
    ) -> Result<Vec<Tokens>> {
        let Some(Fim { tokens: fim, begin }) = &self.fim else {
            return Ok(Vec::new());
        };
        let max = self.options.context;
        let (ids, starts) = tokenizer.encode_with_starts(text)?;
        // A cut splits tokens, and adds those of the parts and of the end.
        let added = CUT_TOKENS + begin.len();
        let length = match ids.len() + added <= max {
            true => ids.len().max(1),
            false => max.saturating_sub(added).max(1),
        };
        let mut pieces = Vec::new();
        for first in (0..ids.len()).step_by(length) {
            let last = (first + length).min(ids.len());
            let start = if first == 0 { 0 } else { boundary(text, starts[first]) };
            let end = starts.get(last).map_or(text.len(), |end| boundary(text, *end));
            let piece = text.get(start..end).unwrap_or_default();
            let positions: Vec<usize> = piece.char_indices().map(|(at, _)| at).chain([piece.len()]).collect();
            let cut = self.options.fim.draw(positions.len() - 1, generator);
            let mut tokens = match cut {
                None if ids.len() == length => tokenizer.encode(text, true)?,
                // The first piece begins as the text does. The others are its continuation.
                None if first == 0 => [begin, &ids[..last]].concat(),
                None => ids[first..last].to_vec(),
                Some(cut) => {
                    let parts = cut.parts.map(|part| &piece[positions[part.start]..positions[part.end]]);
                    let [prefix, middle, suffix] = tokenizer.encode_fim_parts(*fim, parts)?;
                    // It says where the middle ends.
                    let end = fim.end.or(tokenizer.end());
                    let limit = max.saturating_sub(begin.len() + usize::from(end.is_some()));
                    let mut joined = begin.clone();
                    joined.extend(fim.join([&prefix, &middle, &suffix], cut.is_spm, limit));
                    joined.extend(end);
                    joined.truncate(max);
                    pieces.push(Tokens {
                        ids: joined,
                        prompt_length: 0,
                    });
                    continue;
                }
            };
            if last == ids.len() {
                tokens.extend(tokenizer.end());
            }
            tokens.truncate(max);
            pieces.push(Tokens {
                ids: tokens,
                prompt_length: 0,
            });
        }
        Ok(pieces)
    }

    /// The pieces of a token sequence, cut between tokens where fill-in-the-middle is on.
    fn cut_tokens(&self, ids: &[u32], generator: &mut TorchGenerator) -> Vec<Tokens> {
        let context = self.options.context;
        let Some(Fim { tokens: fim, begin }) = &self.fim else {
            return split_into_pieces(ids, 0, context);
        };
        let added = fim.marks() + begin.len();
        let length = match ids.len() + added <= context {
            true => ids.len().max(1),
            false => context.saturating_sub(added).max(1),
        };
        let pieces = ids.chunks(length).map(|piece| {
            // A sequence may begin as texts do. These tokens are before the marks, not in the prefix.
            let body = piece.strip_prefix(begin.as_slice()).unwrap_or(piece);
            let ids = match self.options.fim.draw(body.len(), generator) {
                None => piece.to_vec(),
                Some(cut) => {
                    let max = context.saturating_sub(begin.len());
                    let mut ids = begin.clone();
                    ids.extend(fim.join(cut.parts.map(|part| &body[part]), cut.is_spm, max));
                    ids.truncate(context);
                    ids
                }
            };
            Tokens { ids, prompt_length: 0 }
        });
        pieces.collect()
    }

    fn finish(mut self) -> Result<ReadData> {
        let (counts, context) = (&self.counts, self.options.context);
        let notes = &mut self.data.notes;
        if let Some(first) = &counts.first_not_text {
            notes.push(format!(
                "{} files are not UTF-8 text and are left out, such as {}",
                counts.not_text,
                first.display()
            ));
        }
        if let Some((first, license)) = &counts.first_not_licensed {
            notes.push(format!(
                "{} files have none of the `licenses` and are left out, such as {} ({license})",
                counts.not_licensed,
                first.display()
            ));
        }
        if counts.is_without_end {
            notes.push(
                "the model has no token that ends a text (`eos_token` of its tokenizer, `eos_token_id` of its config or GGUF file), so no text is \
                 ended with one"
                    .to_owned(),
            );
        }
        if counts.split > 0 {
            notes.push(format!(
                "documents that are longer than the context of {context} tokens: {}, which are split into {} pieces",
                counts.split, counts.pieces
            ));
        }
        if counts.short > 0 {
            notes.push(format!(
                "documents of fewer than two tokens, or such ends of longer ones, in which nothing can be predicted, are left out: {}",
                counts.short
            ));
        }
        if counts.prompt_alone > 0 {
            notes.push(format!(
                "pieces of {context} tokens that consist of a prompt alone are left out: {}; raise `context` for longer prompts",
                counts.prompt_alone
            ));
        }
        if self.data.trained.is_empty() {
            let why = notes.join("; ");
            return Err(EngineError::bad_input(format!(
                "datasets: there is nothing to train on{}",
                if why.is_empty() {
                    String::new()
                } else {
                    format!(": {why}")
                }
            )));
        }
        self.data.store.finish()?;
        Ok(self.data)
    }
}

/// Why no file of a folder belongs to a data set.
fn nothing_chosen(source: &DataSource, has_records: bool) -> Result<String> {
    let everything = FileFilter {
        include: Patterns::default(),
        exclude: Patterns::default(),
        endings: &[],
    };
    let all = list_files(&source.path, &everything, source.stay_in_folder)?;
    let Some(first) = all.first() else {
        return Ok("there is no file in this folder".to_owned());
    };
    let first = first.strip_prefix(&source.path).unwrap_or(first).display();
    let count = all.len();
    if source.include.is_empty() && has_records {
        return Ok(format!(
            "none of its {count} files, such as `{first}`, ends in .json, .jsonl or .parquet: choose others with `include`, or use `kind: text`"
        ));
    }
    Ok(format!(
        "`include` and `exclude` choose none of its {count} files, such as `{first}`. Patterns are for paths below the folder and have `*`, `?` \
         and `**`: `*.rs`, `src/**/*.py`; several are a list"
    ))
}

/// Tokens that a cut adds at most, besides those of the document: three marks, the end, and tokens that were split at both ends of the middle.
const CUT_TOKENS: usize = 8;

/// The nearest boundary of a character at or before a position.
fn boundary(text: &str, at: usize) -> usize {
    (0..=at.min(text.len()))
        .rev()
        .find(|at| text.is_char_boundary(*at))
        .unwrap_or(0)
}

/// The pieces of a document, of at most `context` tokens each. `prompt_length`: the number of tokens at its beginning without a loss.
fn split_into_pieces(ids: &[u32], prompt_length: usize, context: usize) -> Vec<Tokens> {
    let pieces = ids.chunks(context).enumerate().map(|(index, piece)| Tokens {
        ids: piece.to_vec(),
        prompt_length: prompt_length.saturating_sub(index * context).min(piece.len()),
    });
    pieces.collect()
}
