//! Runs the processes of a job in order.

use crate::context::Context;
use crate::device::parse_dtype;
use crate::device::portable::{is_portable, portable};
use crate::device::precision::MatmulPrecision;
use crate::error::{EngineError, Result};
use crate::events::{EventSink, OutputRequests, StopSignal};
use crate::log_file::{self, LogFile};
use crate::{extension, extract, generate, img2img, lm_export, lm_generate, lm_train, rescale_lora, train};
use aitk_common::attempt::{AttemptSpec, ChildEvent, FailureCause, Outcome};
use aitk_common::capability::DeviceRef;
use aitk_common::job::{JobSpec, Process, ProcessKind};

/// Runs all processes of an attempt's job, without requests for saves or samples ([`run_with_requests`]).
pub fn run(spec: &AttemptSpec, events: &mut dyn EventSink, stop: &StopSignal) -> Outcome {
    run_with_requests(spec, events, stop, &OutputRequests::new())
}

/// Runs all processes of an attempt's job. Its trainings make the outputs that `requests` asks for, each after the step that it
/// computes when the request arrives.
pub fn run_with_requests(
    spec: &AttemptSpec,
    events: &mut dyn EventSink,
    stop: &StopSignal,
    requests: &OutputRequests,
) -> Outcome {
    if spec.device.is_portable() && !is_portable() {
        return portable(|| run_with_requests(spec, events, stop, requests));
    }
    let job: JobSpec = match serde_json::from_value(spec.job.clone()) {
        Ok(job) => job,
        Err(error) => {
            let message = format!("cannot read the job, which another version of aitk may have made: {error}");
            return Outcome::Failed {
                cause: FailureCause::Internal,
                message,
            };
        }
    };
    let log_file = LogFile::default();
    let mut sink = log_file::LoggingSink {
        events,
        log: log_file.clone(),
    };
    for process in &job.process {
        let mut context = Context {
            spec,
            job: &job,
            events: &mut sink,
            stop,
            requests,
            log_file: log_file.clone(),
        };
        match run_process(process, &mut context) {
            Ok(Outcome::Completed) => log_file.write("completed"),
            Ok(other) => return other,
            Err(error) => {
                log_file.write(&format!("failed: {error}"));
                return Outcome::Failed {
                    cause: error.cause(),
                    message: error.to_string(),
                };
            }
        }
    }
    let unserved = requests.take();
    if !unserved.is_empty() {
        sink.emit(ChildEvent::Log {
            level: "warn".into(),
            message: format!("the request to {unserved} came when no training followed, so nothing was done for it"),
        });
    }
    Outcome::Completed
}

/// The precision in which the layers of a process multiply on a CPU.
fn matmul_precision(kind: &ProcessKind, device: DeviceRef) -> Result<MatmulPrecision> {
    let dtype = match kind {
        ProcessKind::Train(process) => process.train.dtype,
        ProcessKind::LmTrain(process) => process.model.dtype,
        ProcessKind::Generate(process) => process.model.dtype,
        ProcessKind::Img2Img(process) => process.model.dtype,
        ProcessKind::LmGenerate(process) => process.model.dtype,
        // These compute no model.
        _ => return Ok(MatmulPrecision::F32),
    };
    Ok(MatmulPrecision::of(device, parse_dtype(dtype.name())?))
}

fn run_process(process: &Process, context: &mut Context<'_>) -> Result<Outcome> {
    let precision = matmul_precision(&process.kind, context.spec.device)?;
    precision.run(|| run_in_precision(process, context))
}

fn run_in_precision(process: &Process, context: &mut Context<'_>) -> Result<Outcome> {
    match &process.kind {
        ProcessKind::Train(trainer) => train::run(trainer, context),
        ProcessKind::LmTrain(process) => lm_train::run(process, context),
        ProcessKind::Generate(process) => generate::run(process, context),
        ProcessKind::Img2Img(process) => img2img::run(process, context),
        ProcessKind::LmGenerate(process) => lm_generate::run(process, context),
        ProcessKind::LmExport(process) => lm_export::run(process, context),
        ProcessKind::Extract(process) => extract::run(process, context),
        ProcessKind::RescaleLora(process) => rescale_lora::run(process, context),
        ProcessKind::Extension(process) => extension::run(process, context),
        _ => Err(EngineError::Unsupported(format!(
            "the process type `{}` is not supported yet",
            process.process_type.name()
        ))),
    }
}
