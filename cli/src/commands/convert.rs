//! `convert`: writes an adapter file with the names of another program.

use crate::args::ConvertArgs;
use crate::context::Context;
use crate::exit::Exit;
use crate::failure::{CommandResult, Failure};
use crate::output::format::printable;
use aitk_common::fsutil;
use aitk_common::job::dtype::DType;
use aitk_engine::adapters::{Conversion, ConvertedAdapter, Dialect, convert_lora, lora_file_bytes};
use std::io::Write;

/// Names of layers that are listed before the rest is counted.
const LISTED: usize = 5;

pub(super) async fn convert(context: &Context, args: ConvertArgs) -> CommandResult {
    let ui = context.ui(false);
    let (input, output) = (
        context.directory.join(&args.input),
        context.directory.join(&args.output),
    );
    let model = context.directory.join(&args.model);
    for path in [&input, &model] {
        if !path.exists() {
            return Err(Failure::not_found(format!(
                "{}: no such file or folder",
                path.display()
            )));
        }
    }
    if output.exists() && !args.force {
        return Err(
            Failure::new(Exit::Conflict, format!("{} exists", output.display())).hint("overwrite it with --force")
        );
    }
    if output.extension().is_none_or(|extension| extension != "safetensors") {
        return Err(Failure::usage(format!(
            "{}: the name of the new file must end with .safetensors",
            output.display()
        )));
    }
    if let Some(folder) = output.parent().filter(|folder| !folder.is_dir()) {
        return Err(Failure::not_found(format!("{}: no such folder", folder.display())));
    }
    let conversion = Conversion {
        dialect: dialect(&args.to)?,
        dtype: args.dtype.as_deref().map(number_format).transpose()?,
        rank: args.rank.map(|rank| rank as usize),
    };
    let work = move || -> Result<(ConvertedAdapter, Vec<u8>), Failure> {
        let failed = |error: aitk_engine::error::EngineError| Failure::failed(error.to_string());
        let converted = convert_lora(&input, &model, conversion).map_err(failed)?;
        let bytes = lora_file_bytes(&converted.tensors, converted.metadata.clone()).map_err(failed)?;
        Ok((converted, bytes))
    };
    let joined = tokio::task::spawn_blocking(work).await;
    let (converted, bytes) = joined.map_err(|error| Failure::failed(error.to_string()))??;
    fsutil::write_atomic(&output, |out| out.write_all(&bytes)).map_err(|error| Failure::failed(error.to_string()))?;
    if !converted.unknown.is_empty() {
        let names: Vec<String> = converted
            .unknown
            .iter()
            .take(LISTED)
            .map(|name| printable(name))
            .collect();
        let more = converted.unknown.len().saturating_sub(LISTED);
        ui.warn(&format!(
            "left out {} names that are not in this model: {}{}",
            converted.unknown.len(),
            names.join(", "),
            if more > 0 {
                format!(" and {more} more")
            } else {
                String::new()
            }
        ));
    }
    if converted.lost_biases > 0 {
        ui.warn(&format!(
            "left out the differences of {} biases, which a LoRA has none of",
            converted.lost_biases
        ));
    }
    ui.notice(&format!(
        "wrote {}: {} layers with the names of {}, {}",
        output.display(),
        converted.layers,
        conversion.dialect.name(),
        converted.dtype.as_str()
    ));
    Ok(Exit::Ok)
}

fn dialect(name: &str) -> Result<Dialect, Failure> {
    let lower = name.to_lowercase();
    let alias = match lower.as_str() {
        "kohya" | "a1111" | "forge" => "sd-scripts",
        "peft" => "diffusers",
        "aitk" => "ai-toolkit",
        other => other,
    };
    Dialect::ALL
        .into_iter()
        .find(|dialect| dialect.name() == alias)
        .ok_or_else(|| {
            let names: Vec<&str> = Dialect::ALL.into_iter().map(Dialect::name).collect();
            Failure::usage(format!(
                "--to {}: expected one of {}",
                printable(name),
                names.join(", ")
            ))
        })
}

fn number_format(name: &str) -> Result<DType, Failure> {
    DType::from_name(name)
        .filter(|dtype| *dtype != DType::F8)
        .ok_or_else(|| {
            Failure::usage(format!(
                "--dtype {}: expected float32, float16 or bfloat16",
                printable(name)
            ))
        })
}
