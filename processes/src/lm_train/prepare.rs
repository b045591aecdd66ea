//! Prepares a run: reads the data, loads the model and finds the state to resume from.

use super::super::context::Context;
use super::super::run_folder::{FolderNames, RunFolder};
use super::super::step_recorder::StepRecorder;
use super::checkpoint::{resumed_choice, resumed_seed};
use super::data::Data;
use super::fit::RunFit;
use super::run::{Run, trainer};
use super::target::TrainedParameters;
use crate::data::tokens::DocumentTokenizer;
use crate::device::allocator::FreedMemory;
use crate::device::{self, Compute};
use crate::error::{EngineError, Result};
use crate::models::causal_lm::{CausalLm, CausalLmConfig, CausalLmOptions, PositionKind, read_config};
use crate::weights::{QuantizationConfig, TrainableFilter};
use aitk_common::capability::DeviceKind;
use aitk_common::fsutil;
use aitk_common::gguf::model_file;
use aitk_common::job::dtype::DType as ConfigDType;
use aitk_common::job::limits::MAX_CONTEXT;
use aitk_common::job::lm_trainer::LmTrainerProcess;
use aitk_common::plan::memory_options::MemoryOptions;
use aitk_common::step_metrics::LOG_FILE;
use std::path::{Path, PathBuf};
use std::time::Duration;

impl<'a> Run<'a> {
    /// Reads the data, loads the model and finds the state to resume from.
    ///
    /// # Errors
    /// [`EngineError::Stopped`] when the run was told to stop.
    pub(super) fn prepare(process: &'a LmTrainerProcess, cx: &mut Context<'_>) -> Result<Self> {
        let job = cx.job.name.clone();
        let names = FolderNames {
            training_folder: process.training_folder.as_deref(),
            name: process.name.as_deref(),
            stem: ("config.name", &job),
            saves_are_folders: true,
        };
        let folder = RunFolder::open_as(&names, cx)?;
        cx.log_file.open(&folder.path.join(LOG_FILE))?;
        let seed = process
            .training_seed
            .and_then(|seed| u64::try_from(seed).ok())
            .or_else(|| resumed_seed(cx.spec, &folder))
            .unwrap_or(cx.spec.seed);
        cx.artifact("config", &folder.root, &folder.config, None, None);

        // The data is read first, so that errors in it are reported before the weights are loaded.
        let (model_folder, config, tokenizer) = open_model(process, cx)?;
        let temporary = folder.path.join(".aitk");
        fsutil::create_dir_all(&temporary)?;
        let stored = resumed_choice(cx.spec, &folder);
        let mut fit = RunFit::new(process, (&model_folder, &config), stored, cx)?;
        let mut data = Data::read(
            process,
            (seed, config.vocab_size, fit.context()),
            (&model_folder, tokenizer.as_ref()),
            (&temporary, None),
            cx,
        )?;
        fit.shorten_context(data.longest_document(), cx);
        data.make_rows(process, (seed, fit.context()), cx);
        fit.choose(cx);
        let steps = process.train.total_steps(data.order.steps_per_epoch());
        cx.log_file.set_total(steps);

        let (compute, memory_options) = (open_device(process, cx)?, MemoryOptions::of(cx.spec.profile));
        cx.phase("loading model");
        let options = CausalLmOptions {
            device: compute.device.clone(),
            dtype: compute.dtype,
            trained: match process.network {
                Some(_) => TrainableFilter::Nothing,
                None => TrainableFilter::everything(),
            },
            quantization: process.model.quantization().map(|qtype| QuantizationConfig {
                qtype,
                exclude: Vec::new(),
                adapted: None,
            }),
            streamed: memory_options.denoiser_streamed,
            keeps_stored_table: false,
            shapes_only: false,
        };
        FreedMemory::Release.apply();
        let mut model = match process.model.from_config {
            true => CausalLm::from_config(&model_folder, &options, seed)?,
            false => CausalLm::load(&model_folder, &options)?,
        };
        if !memory_options.returns_freed_memory {
            FreedMemory::Retain.apply();
        }
        let target = TrainedParameters::new(process, &mut model, seed, cx)?;
        let eval_model = model.detached()?;
        let trainer = trainer(process, &target, (compute.dtype, steps, seed), &memory_options, cx)?;
        let metrics = StepRecorder::new(&folder.path, None);
        let mut run = Self {
            process,
            seed,
            folder,
            compute,
            model_folder,
            tokenizer,
            model,
            eval_model,
            target,
            trainer,
            memory_options,
            data,
            fit,
            steps,
            start_step: 0,
            last_checkpoint: None,
            kept_saves: Vec::new(),
            non_finite_steps: 0,
            validation_is_pending: false,
            metrics,
        };
        run.apply_fit();
        run.resume(cx)?;
        run.metrics.open(run.start_step)?;
        Ok(run)
    }
}

/// How long a check reads data sets: longer ones are tokenised by the run alone.
const CHECK_TIME: Duration = Duration::from_secs(10);

/// Checks a process before it starts: its data sets as far as they can be read in [`CHECK_TIME`], its tokenizer, and that its network has a
/// layer. A model that cannot be loaded is reported elsewhere.
///
/// # Errors
/// The error with which the run would end before its first step.
pub(in super::super) fn check(process: &LmTrainerProcess, cx: &mut Context<'_>) -> Result<()> {
    let folder = cx.local_path(&process.model.name_or_path)?;
    check_gguf(process, &folder)?;
    if process.model.from_config {
        CausalLmConfig::read_new(&folder)?;
    } else {
        let options = CausalLmOptions {
            keeps_stored_table: false,
            shapes_only: true,
            ..CausalLmOptions::cpu()
        };
        let Ok(mut model) = CausalLm::load(&folder, &options) else {
            return Ok(());
        };
        if let Some(network) = &process.network {
            TrainedParameters::check_network(network, &mut model)?;
        }
    }
    let (model_folder, config, tokenizer) = open_model(process, cx)?;
    let seed = process
        .training_seed
        .and_then(|seed| u64::try_from(seed).ok())
        .unwrap_or(0);
    // A chosen context is at most as long as the model's, and cuts fewer documents than a short one.
    let longest = config.max_positions.min(MAX_CONTEXT as usize);
    let context = process.context.fixed().map_or(longest, |context| context as usize);
    let read = Data::read(
        process,
        (seed, config.vocab_size, context),
        (&model_folder, tokenizer.as_ref()),
        (&std::env::temp_dir(), Some(CHECK_TIME)),
        cx,
    );
    match read {
        Ok(mut data) => {
            data.make_rows(process, (seed, context), cx);
            Ok(())
        }
        Err(EngineError::Stopped) => Ok(()),
        Err(error) => Err(error),
    }
}

/// The path and config of the model, and its tokenizer, if it has one. The weights are not read.
fn open_model(
    process: &LmTrainerProcess,
    cx: &mut Context<'_>,
) -> Result<(PathBuf, CausalLmConfig, Option<DocumentTokenizer>)> {
    let model_folder = cx.local_path(&process.model.name_or_path)?;
    check_gguf(process, &model_folder)?;
    let config = read_config(&model_folder)?;
    check_context(process, &config, cx)?;
    let tokenizer = DocumentTokenizer::open(&model_folder, config.vocab_size)?;
    if tokenizer.is_none() && !process.sample.prompts.is_empty() {
        return Err(EngineError::bad_input(format!(
            "sample.prompts: {} has no tokenizer.json, which prompts need: copy it from the model's repository, or remove the prompts",
            model_folder.display()
        )));
    }
    Ok((model_folder, config, tokenizer))
}

/// Checks that a model in a GGUF file is the frozen base of a LoRA, with the bits of the file.
fn check_gguf(process: &LmTrainerProcess, model: &Path) -> Result<()> {
    if model_file(model).is_none() {
        return Ok(());
    }
    let found = if process.model.from_config {
        "model.from_config: a new model is made from a folder with config.json"
    } else if process.network.is_none() {
        "network: only a LoRA can be trained on a GGUF file: add a `network` section, or give the folder of the model that the file was made of"
    } else if process.model.quantize {
        "model.quantize: the layers of a GGUF file keep its bits: remove this key, or give the folder of the model that the file was made of"
    } else {
        return Ok(());
    };
    Err(EngineError::bad_input(format!(
        "{found} ({} is a GGUF file)",
        model.display()
    )))
}

/// Checks that the model has this many positions.
fn check_context(process: &LmTrainerProcess, config: &CausalLmConfig, cx: &mut Context<'_>) -> Result<()> {
    let Some(context) = process.context.fixed().map(|context| context as usize) else {
        return Ok(());
    };
    let max = config.max_positions;
    if context <= max {
        return Ok(());
    }
    match config.positions {
        PositionKind::Learned => Err(EngineError::bad_input(format!(
            "context: {context} tokens are more than the {max} positions of the model's table: set it to {max} or less"
        ))),
        PositionKind::Rotary(_) => {
            let message = format!(
                "context: {context} tokens are more than the {max} that the model was trained with (`max_position_embeddings`): other programs \
                 may cut texts there"
            );
            cx.log("warn", message);
            Ok(())
        }
    }
}

/// Opens the device in the dtype of the arithmetic. A model's own weights are trained in float32 on a GPU too, so that small updates are not
/// rounded away, or in bfloat16 with stochastic rounding.
fn open_device(process: &LmTrainerProcess, cx: &mut Context<'_>) -> Result<Compute> {
    let configured = process.model.dtype;
    let is_full = process.network.is_none() && cx.spec.device.kind != DeviceKind::Cpu;
    let dtype = match is_full && configured != ConfigDType::BF16 {
        true => ConfigDType::F32,
        false => configured,
    };
    if dtype != configured {
        let message =
            format!("computing in {dtype} (the config asks for {configured}): the model's own weights are trained");
        cx.log("info", message);
    }
    let compute = device::open_with_dtype(cx.spec.device, dtype.name())?;
    for note in &compute.notes {
        cx.log("info", note.clone());
    }
    Ok(compute)
}
