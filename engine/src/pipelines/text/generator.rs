//! Generates several texts at a time, each with its own cache of keys and values.

use super::sampling_params::SamplingParams;
use super::text_stream::TextStream;
use crate::device::threads::without_sleep;
use crate::error::{EngineError, Result};
use crate::models::causal_lm::{CausalLm, KeyValueCache, TextTokenizer};
use crate::rng::generator_for;
use candle_core::{DType, Device, Tensor};

/// Tokens of a prompt that are computed at a time, which bounds the memory of long prompts.
const PROMPT_CHUNK: usize = 512;

/// A text to continue.
#[derive(Clone, Debug)]
pub struct TextRequest {
    /// The tokens of the prompt, at least one.
    pub prompt: Vec<u32>,
    /// Its number, which its random draws depend on.
    pub number: u64,
}

/// How texts are generated.
#[derive(Clone, Debug)]
pub struct TextSettings {
    /// How tokens are chosen.
    pub choice: SamplingParams,
    /// The most tokens of a completion.
    pub max_new_tokens: usize,
    /// Texts that end a completion, which ends before them.
    pub stop: Vec<String>,
    /// The seed of random draws.
    pub seed: u64,
    /// Texts that are generated at a time.
    pub batch_size: usize,
}

/// Why a completion ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// The model generated a token that ends a text.
    EndToken,
    /// One of [`TextSettings::stop`] appeared.
    StopText,
    /// It has [`TextSettings::max_new_tokens`].
    MaxNewTokens,
    /// Prompt and completion fill the context of the model.
    Context,
}

impl StopReason {
    /// Its name in results.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::EndToken => "end_token",
            Self::StopText => "stop",
            Self::MaxNewTokens => "max_new_tokens",
            Self::Context => "context",
        }
    }
}

/// A generated text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Completion {
    /// Its tokens, with the one that ended it.
    pub tokens: Vec<u32>,
    /// Its text.
    pub text: String,
    /// Why it ended.
    pub reason: StopReason,
}

/// What a generation reports.
pub trait TextEvents {
    /// Called before each step, which makes one token of each text. `false` stops the generation.
    fn before_step(&mut self) -> bool;

    /// Called with each line of a text, without its end, once it is certain that it stays. The last line comes when the text is complete.
    ///
    /// # Errors
    /// An error ends the generation.
    fn line(&mut self, number: u64, line: &str) -> Result<()>;

    /// Called with each complete text.
    ///
    /// # Errors
    /// An error ends the generation.
    fn complete(&mut self, number: u64, completion: Completion) -> Result<()>;
}

/// Generates a text for each request, in their order as far as there is room in the batch. Returns `false` if it was stopped.
///
/// # Errors
/// When a prompt is empty or fills the model's context, the logits are not numbers, the device fails, or of `events`.
pub fn generate_texts(
    model: &CausalLm,
    tokenizer: &TextTokenizer,
    settings: &TextSettings,
    requests: &[TextRequest],
    events: &mut dyn TextEvents,
) -> Result<bool> {
    match model.device() {
        // A token of a small model is hundreds of short operations.
        Device::Cpu => without_sleep(|| generate_all(model, tokenizer, settings, requests, events)),
        Device::Cuda(_) | Device::Metal(_) => generate_all(model, tokenizer, settings, requests, events),
    }
}

fn generate_all(
    model: &CausalLm,
    tokenizer: &TextTokenizer,
    settings: &TextSettings,
    requests: &[TextRequest],
    events: &mut dyn TextEvents,
) -> Result<bool> {
    let mut batch = Batch {
        model,
        tokenizer,
        settings,
        longest_stop: settings.stop.iter().map(String::len).max().unwrap_or(0),
        texts: Vec::new(),
        caches: Vec::new(),
    };
    let mut waiting = requests.iter();
    loop {
        while batch.texts.len() < settings.batch_size.max(1)
            && let Some(request) = waiting.next()
        {
            if !batch.start(request, events)? {
                return Ok(false);
            }
        }
        if batch.texts.is_empty() {
            return Ok(true);
        }
        if !events.before_step() {
            return Ok(false);
        }
        batch.step(events)?;
    }
}

/// A text that is generated.
struct RunningText<'a> {
    request: &'a TextRequest,
    tokens: Vec<u32>,
    stream: TextStream,
    /// The bytes of the text that were reported as lines.
    reported: usize,
}

/// The texts that are generated at the same time.
struct Batch<'a> {
    model: &'a CausalLm,
    tokenizer: &'a TextTokenizer,
    settings: &'a TextSettings,
    /// Bytes of the longest text that ends a completion.
    longest_stop: usize,
    texts: Vec<RunningText<'a>>,
    /// One for each text.
    caches: Vec<KeyValueCache>,
}

impl<'a> Batch<'a> {
    /// Computes a prompt and the first token after it. Returns `false` if it was stopped.
    fn start(&mut self, request: &'a TextRequest, events: &mut dyn TextEvents) -> Result<bool> {
        check_prompt(request, self.model.config().max_positions)?;
        let mut cache = self.model.new_cache();
        cache.set_known_length(request.prompt.len());
        let mut last = None;
        for chunk in request.prompt.chunks(PROMPT_CHUNK) {
            if !events.before_step() {
                return Ok(false);
            }
            let ids = Tensor::from_slice(chunk, (1, chunk.len()), &Device::Cpu)?;
            let hidden = self.model.next(&ids, std::slice::from_mut(&mut cache))?;
            last = Some(hidden.narrow(1, chunk.len() - 1, 1)?.contiguous()?);
        }
        let Some(last) = last else {
            return Err(EngineError::Internal("a prompt without tokens was accepted".into()));
        };
        let mut text = RunningText {
            request,
            tokens: Vec::new(),
            stream: TextStream::new(&request.prompt),
            reported: 0,
        };
        let mut scores = rows_of_logits(self.model, &last)?;
        let Some(scores) = scores.first_mut() else {
            return Err(EngineError::Internal("there are no logits".into()));
        };
        if !self.extend(&mut text, scores, events)? {
            self.texts.push(text);
            self.caches.push(cache);
        }
        Ok(true)
    }

    /// Computes the next token of each text.
    fn step(&mut self, events: &mut dyn TextEvents) -> Result<()> {
        let last = self.texts.iter().filter_map(|text| text.tokens.last().copied());
        let ids: Vec<u32> = last.collect();
        let count = ids.len();
        let ids = Tensor::from_vec(ids, (count, 1), &Device::Cpu)?;
        let hidden = self.model.next(&ids, &mut self.caches)?;
        let rows = rows_of_logits(self.model, &hidden)?;
        let texts = std::mem::take(&mut self.texts);
        let caches = std::mem::take(&mut self.caches);
        for ((mut text, cache), mut scores) in texts.into_iter().zip(caches).zip(rows) {
            if !self.extend(&mut text, &mut scores, events)? {
                self.texts.push(text);
                self.caches.push(cache);
            }
        }
        Ok(())
    }

    /// Adds a token to a text. Returns whether the text is complete, which was reported then.
    fn extend(&self, text: &mut RunningText<'_>, scores: &mut [f32], events: &mut dyn TextEvents) -> Result<bool> {
        let (settings, request) = (self.settings, text.request);
        let earlier = request.prompt.iter().chain(&text.tokens).copied();
        let step = text.tokens.len() as u64;
        let draw = || generator_for(settings.seed, "lm_generate", request.number, step).rand_f64(1)[0];
        let Some(token) = settings.choice.choose(scores, earlier, draw) else {
            return Err(EngineError::bad_input(format!(
                "text {}, token {step}: the model's logits are not numbers: its numbers exceed the range of the dtype (set `dtype: float32` or \
                 `bfloat16`), or its weights are damaged",
                request.number
            )));
        };
        text.tokens.push(token);
        // A model that names no end token was trained with that of its tokenizer.
        let is_end = match self.model.config().eos_token_ids.as_slice() {
            [] => self.tokenizer.end() == Some(token),
            ids => ids.contains(&token),
        };
        // So does the end of what fills a gap.
        let is_end = is_end || self.tokenizer.fim_tokens().is_some_and(|fim| fim.end == Some(token));
        let before = text.stream.text().len();
        if !is_end {
            text.stream.push(self.tokenizer, token)?;
        }
        let length = request.prompt.len() + text.tokens.len();
        let mut reason = if is_end {
            Some(StopReason::EndToken)
        } else if text.tokens.len() >= settings.max_new_tokens {
            Some(StopReason::MaxNewTokens)
        } else if length >= self.model.config().max_positions {
            Some(StopReason::Context)
        } else {
            None
        };
        if reason.is_some() {
            text.stream.finish(self.tokenizer)?;
        }
        let stop = self.find_stop(text.stream.text(), before);
        if stop.is_some() {
            reason = Some(StopReason::StopText);
        }
        let end = stop.unwrap_or(text.stream.text().len());
        self.report_lines(text, end, reason.is_some(), events)?;
        let Some(reason) = reason else { return Ok(false) };
        let completion = Completion {
            text: text.stream.text().get(..end).unwrap_or_default().to_owned(),
            tokens: std::mem::take(&mut text.tokens),
            reason,
        };
        events.complete(request.number, completion)?;
        Ok(true)
    }

    /// Where the first stop text begins, if one appeared with the text after byte `before`.
    fn find_stop(&self, text: &str, before: usize) -> Option<usize> {
        // It may have begun earlier.
        let mut from = before.saturating_sub(self.longest_stop);
        while !text.is_char_boundary(from) {
            from -= 1;
        }
        let tail = text.get(from..)?;
        let found = self.settings.stop.iter().filter_map(|stop| tail.find(stop.as_str()));
        found.min().map(|at| from + at)
    }

    /// Reports the lines before byte `end` that no stop text can shorten any more.
    fn report_lines(
        &self,
        text: &mut RunningText<'_>,
        end: usize,
        is_complete: bool,
        events: &mut dyn TextEvents,
    ) -> Result<()> {
        let number = text.request.number;
        let Some(certain) = text.stream.text().get(..end) else {
            return Ok(());
        };
        while let Some(length) = certain.get(text.reported..).and_then(|rest| rest.find('\n')) {
            let line_end = text.reported + length;
            if !is_complete && line_end + self.longest_stop > certain.len() {
                break;
            }
            events.line(number, &certain[text.reported..line_end])?;
            text.reported = line_end + 1;
        }
        match certain.get(text.reported..) {
            Some(rest) if is_complete && !rest.is_empty() => events.line(number, rest),
            _ => Ok(()),
        }
    }
}

/// Checks that a prompt has tokens and leaves room for another one.
///
/// # Errors
/// When it does not. The error has both lengths.
pub fn check_prompt(request: &TextRequest, max_positions: usize) -> Result<()> {
    let length = request.prompt.len();
    if length == 0 {
        return Err(EngineError::bad_input(format!(
            "text {}: the prompt has no tokens: expected at least one",
            request.number
        )));
    }
    if length >= max_positions {
        return Err(EngineError::bad_input(format!(
            "text {}: the prompt has {length} tokens, and the model's context has {max_positions}, of which at least one is for the completion: \
             shorten the prompt",
            request.number
        )));
    }
    Ok(())
}

/// States [b, 1, width] -> the logits of each row, in f32 on the CPU.
fn rows_of_logits(model: &CausalLm, hidden: &Tensor) -> Result<Vec<Vec<f32>>> {
    let logits = model.logits(hidden)?.squeeze(1)?;
    Ok(logits.to_dtype(DType::F32)?.to_device(&Device::Cpu)?.to_vec2()?)
}
