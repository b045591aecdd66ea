//! Weights that are quantised in their files, put together of the tensors that they consist of.
//!
//! | kind | tensors beside `<layer>.weight` | a weight is |
//! |---|---|---|
//! | float8 | none | its code |
//! | float8, scaled (ComfyUI, musubi-tuner) | `<layer>.scale_weight` (or `.weight_scale`): for all, for each output, for runs within each | its code times its scale |
//! | nf4, fp4 (bitsandbytes) | `.weight.absmax`, `.weight.quant_map`, `.weight.quant_state.bitsandbytes__nf4` (JSON); with `nested`, absmax itself in 8 bits with `.nested_absmax`, `.nested_quant_map` and an offset | the map's number times its block's absmax |
//! | int8 (bitsandbytes) | `<layer>.SCB` | its code times its row's scale / 127 |
//! | GGUF | none | as ggml unpacks its block |

use super::bytes::Number;
use super::file::{Kind, TensorFile};
use super::{Entry, Place};
use crate::error::{EngineError, Result};
use crate::nn::quant::{Code, Codes, Quantized};
use candle_core::quantized::GgmlDType;
use candle_core::{DType, Device};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// The JSON beside a weight of 4 bits is longer in no file.
const STATE_LIMIT: usize = 1 << 16;
/// What ends the name of that JSON.
const STATES: [(&str, &str); 2] = [
    (".quant_state.bitsandbytes__nf4", "nf4"),
    (".quant_state.bitsandbytes__fp4", "fp4"),
];

/// How a weight is quantised.
#[derive(Clone, Debug)]
pub(super) enum StoredQuantization {
    /// 8-bit floats, and their scales unless a weight is its code.
    Float8 { number: Number, scale: Option<Place> },
    /// 8-bit integers with a scale for each output.
    Int8 { scale: Place },
    /// 4 bits with a table.
    Four(Arc<Four>),
    /// Blocks of GGUF.
    Blocks(GgmlDType, &'static str),
}

/// A weight of bitsandbytes' 4 bits.
#[derive(Debug)]
pub(super) struct Four {
    kind: &'static str,
    state: State,
    absmax: Place,
    map: Place,
    /// The scales' own scales and table.
    nested: Option<(Place, Place)>,
}

/// What bitsandbytes says of a weight of 4 bits.
#[derive(Debug, Deserialize)]
struct State {
    shape: Vec<usize>,
    blocksize: usize,
    nested_blocksize: Option<usize>,
    nested_offset: Option<f64>,
}

impl StoredQuantization {
    /// What it is called in files and configs.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Float8 { .. } => "float8",
            Self::Int8 { .. } => "int8",
            Self::Four(four) => four.kind,
            Self::Blocks(_, name) => name,
        }
    }

    /// Whether its tensor alone says what its numbers are, so that rows of it can be read.
    pub(super) fn stands_alone(&self) -> bool {
        matches!(self, Self::Blocks(..) | Self::Float8 { scale: None, .. })
    }

    /// The weight, in its few bits, in the shape of its entry.
    pub(super) fn packed(
        &self,
        files: &[Arc<TensorFile>],
        entry: &Entry,
        dtype: DType,
        device: &Device,
    ) -> Result<Arc<Quantized>> {
        let file = &files[entry.place.file];
        let bytes = file.raw(&entry.place.name)?;
        let wrong = |error: candle_core::Error| wrong(file.path(), format!("tensor `{}`: {error}", entry.place.name));
        let outputs = entry.shape.first().copied().unwrap_or(1).max(1);
        let inputs = entry.shape.iter().skip(1).product::<usize>().max(1);
        let (code, scales, per_scale) = match self {
            Self::Blocks(block, name) => {
                return Quantized::from_blocks(name, *block, &bytes, &entry.shape, dtype, device).map_err(wrong);
            }
            Self::Float8 { number, scale } => {
                let scales = match scale {
                    Some(scale) => scale.floats(files)?,
                    None => vec![1.0],
                };
                // One for all becomes one for each output, so that no run is longer than a row.
                let scales = match scales.as_slice() {
                    [only] => vec![*only; outputs],
                    _ => scales,
                };
                let runs = (scales.len() / outputs).max(1);
                (number.code().unwrap_or(Code::E4m3), scales, inputs / runs)
            }
            Self::Int8 { scale } => {
                let scales = scale.floats(files)?.into_iter().map(|scale| scale / 127.0).collect();
                (Code::Signed, scales, inputs)
            }
            Self::Four(four) => {
                let table = four.map.floats(files)?;
                let table = table.try_into().unwrap_or([0.0; 16]);
                (Code::Four(table), four.scales(files)?, four.state.blocksize)
            }
        };
        let codes = Codes {
            code,
            bytes,
            scales,
            per_scale,
        };
        Quantized::from_codes(self.name(), codes, &entry.shape, dtype, device).map_err(wrong)
    }
}

impl Four {
    /// A scale for each block.
    fn scales(&self, files: &[Arc<TensorFile>]) -> Result<Vec<f32>> {
        let Some((nested_absmax, nested_map)) = &self.nested else {
            return self.absmax.floats(files);
        };
        let (absmax, map) = (nested_absmax.floats(files)?, nested_map.floats(files)?);
        let run = self.state.nested_blocksize.unwrap_or(256).max(1);
        let offset = self.state.nested_offset.unwrap_or_default() as f32;
        let codes = files[self.absmax.file].raw(&self.absmax.name)?;
        let scale = |(at, code): (usize, &u8)| {
            let most = absmax.get(at / run).copied().unwrap_or_default();
            map.get(usize::from(*code)).copied().unwrap_or_default() * most + offset
        };
        Ok(codes.iter().enumerate().map(scale).collect())
    }
}

impl Place {
    fn floats(&self, files: &[Arc<TensorFile>]) -> Result<Vec<f32>> {
        files[self.file].floats(&self.name)
    }
}

/// Finds what is quantised, and takes the tensors that it consists of out of the list.
pub(super) fn recognise(files: &[Arc<TensorFile>], entries: &mut BTreeMap<String, Entry>) -> Result<()> {
    let names: Vec<String> = entries.keys().cloned().collect();
    for name in &names {
        let Some(entry) = entries.get(name) else {
            continue;
        };
        let quantization = match &entry.kind {
            Kind::Blocks(block, kind) => StoredQuantization::Blocks(*block, kind),
            Kind::Numbers(number) if number.code().is_some() => float8(files, entries, name, *number)?,
            Kind::Signed => match int8(files, entries, name)? {
                Some(quantization) => quantization,
                None => continue,
            },
            Kind::Bytes => {
                let state = STATES
                    .iter()
                    .find_map(|(ending, kind)| Some((name.strip_suffix(ending)?, *kind)));
                if let Some((weight, kind)) = state {
                    let (weight, state) = (weight.to_owned(), name.clone());
                    four(files, entries, &weight, &state, kind)?;
                }
                continue;
            }
            _ => continue,
        };
        if let Some(entry) = entries.get_mut(name) {
            entry.quantization = Some(quantization);
        }
    }
    // What says only that there is something of the kind, or belongs to arithmetic in 8 bits.
    let said = |name: &str| {
        [
            "scaled_fp8",
            "scale_input",
            "input_scale",
            "comfy_quant",
            "weight_format",
        ]
        .contains(&name.rsplit('.').next().unwrap_or(name))
    };
    entries.retain(|name, _| !said(name));
    Ok(())
}

fn float8(
    files: &[Arc<TensorFile>],
    entries: &mut BTreeMap<String, Entry>,
    name: &str,
    number: Number,
) -> Result<StoredQuantization> {
    let layer = name.strip_suffix(".weight");
    let found = layer.and_then(|layer| {
        let names = ["scale_weight", "weight_scale"].map(|scale| format!("{layer}.{scale}"));
        names.into_iter().find_map(|name| entries.remove(&name))
    });
    if let (Some(scale), Some(weight)) = (&found, entries.get(name)) {
        let count: usize = scale.shape.iter().product();
        let outputs = weight.shape.first().copied().unwrap_or(1);
        let inputs: usize = weight.shape.iter().skip(1).product();
        let runs = count.checked_div(outputs).unwrap_or(0);
        let by_row = scale.shape.first() == Some(&outputs) && runs > 0 && count == runs * outputs;
        if count != 1 && !(by_row && inputs.is_multiple_of(runs)) {
            return Err(wrong(
                files[weight.place.file].path(),
                format!(
                    "tensor `{}` of shape {:?} is no scale of `{name}` of shape {:?}: expected one number, one for each \
                     output, or some for each output",
                    scale.place.name, scale.shape, weight.shape
                ),
            ));
        }
    }
    Ok(StoredQuantization::Float8 {
        number,
        scale: found.map(|scale| scale.place),
    })
}

fn int8(
    files: &[Arc<TensorFile>],
    entries: &mut BTreeMap<String, Entry>,
    name: &str,
) -> Result<Option<StoredQuantization>> {
    let layer = name.strip_suffix(".weight");
    let Some(scale) = layer.and_then(|layer| entries.remove(&format!("{layer}.SCB"))) else {
        return Ok(None);
    };
    let outputs = entries
        .get(name)
        .and_then(|weight| weight.shape.first())
        .copied()
        .unwrap_or(1);
    if scale.shape.iter().product::<usize>() != outputs {
        return Err(wrong(
            files[scale.place.file].path(),
            format!(
                "tensor `{}` has shape {:?}: expected a scale for each of the {outputs} outputs of `{name}`",
                scale.place.name, scale.shape
            ),
        ));
    }
    Ok(Some(StoredQuantization::Int8 { scale: scale.place }))
}

/// Makes one entry of a weight of 4 bits and what lies beside it.
fn four(
    files: &[Arc<TensorFile>],
    entries: &mut BTreeMap<String, Entry>,
    name: &str,
    state_name: &str,
    kind: &'static str,
) -> Result<()> {
    let Some(state) = entries.remove(state_name) else {
        return Ok(());
    };
    let path = files[state.place.file].path();
    let said = |what: String| {
        wrong(
            path,
            format!("the {kind} weight `{name}` {what}: download or copy it again"),
        )
    };
    if state.shape.iter().product::<usize>() > STATE_LIMIT {
        return Err(said("has a description that is too long".into()));
    }
    let text = files[state.place.file].raw(&state.place.name)?;
    let state: State =
        serde_json::from_slice(&text).map_err(|e| said(format!("has a description that is wrong ({e})")))?;
    let mut part = |part: &str| {
        let name = format!("{name}.{part}");
        entries.remove(&name).ok_or_else(|| said(format!("lacks `{name}`")))
    };
    let (absmax, map) = (part("absmax")?, part("quant_map")?);
    let nested = match state.nested_blocksize {
        Some(_) => Some((part("nested_absmax")?, part("nested_quant_map")?)),
        None => None,
    };
    let counted = |entry: &Entry| entry.shape.iter().product::<usize>();
    let mut sides = state.shape.iter();
    let count = sides
        .try_fold(1_usize, |all, side| all.checked_mul(*side))
        .unwrap_or(usize::MAX);
    let Some(weight) = entries.get_mut(name) else {
        return Err(said("is missing itself".into()));
    };
    let blocks = count
        .checked_div(state.blocksize)
        .map(|blocks| blocks + usize::from(count % state.blocksize > 0));
    let floats = |entry: &Entry| matches!(entry.kind, Kind::Numbers(_));
    let nested_fits = nested.as_ref().is_none_or(|(absmax, map)| {
        let run = state.nested_blocksize.unwrap_or(256).max(1);
        floats(absmax) && floats(map) && counted(map) == 256 && Some(counted(absmax)) == blocks.map(|n| n.div_ceil(run))
    });
    let fits = weight.kind == Kind::Bytes
        && counted(weight) == count.div_ceil(2)
        && state.blocksize.is_multiple_of(2)
        && Some(counted(&absmax)) == blocks
        && (if nested.is_some() {
            absmax.kind == Kind::Bytes
        } else {
            floats(&absmax)
        })
        && floats(&map)
        && counted(&map) == 16
        && nested_fits;
    if !fits {
        return Err(said(format!(
            "of shape {:?} in blocks of {} does not fit its {} bytes and {} scales",
            state.shape,
            state.blocksize,
            counted(weight),
            counted(&absmax)
        )));
    }
    weight.shape.clone_from(&state.shape);
    weight.quantization = Some(StoredQuantization::Four(Arc::new(Four {
        kind,
        state,
        absmax: absmax.place,
        map: map.place,
        nested: nested.map(|(absmax, map)| (absmax.place, map.place)),
    })));
    Ok(())
}

fn wrong(path: &Path, reason: String) -> EngineError {
    EngineError::WeightsFile {
        path: path.to_path_buf(),
        reason,
    }
}
