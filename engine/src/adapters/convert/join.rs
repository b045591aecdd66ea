//! Joins the LoRAs of layers that are one layer in another program: the reverse of `joined.rs`.

use super::super::lora::LoraTensors;
use candle_core::{DType, Device, Result, Tensor};

/// The LoRA of a layer that consists of these, in the order of their rows; `None`: a layer without a LoRA, with its number of rows. If
/// all have the same `down` matrix and scale, it is shared; otherwise the `down` matrices are below each other, and the `up` matrices are
/// blocks of one matrix.
///
/// # Errors
/// When the shapes do not match.
pub(super) fn join(parts: &[(Option<LoraTensors>, usize)]) -> Result<Option<LoraTensors>> {
    let present: Vec<&LoraTensors> = parts.iter().filter_map(|(lora, _)| lora.as_ref()).collect();
    let Some(first) = present.first() else {
        return Ok(None);
    };
    let shares_down = present.len() == parts.len()
        && present
            .iter()
            .map(|lora| Ok(scale(lora) == scale(first) && is_equal(&lora.down, &first.down)?))
            .collect::<Result<Vec<_>>>()?
            .into_iter()
            .all(|equal| equal);
    if shares_down {
        let ups: Vec<&Tensor> = present.iter().map(|lora| &lora.up).collect();
        return Ok(Some(LoraTensors {
            up: Tensor::cat(&ups, 0)?,
            ..(*first).clone()
        }));
    }
    let downs: Vec<&Tensor> = present.iter().map(|lora| &lora.down).collect();
    let rank: usize = present.iter().map(|lora| lora.rank()).sum();
    let (mut rows_of_up, mut column) = (Vec::new(), 0);
    for (lora, rows) in parts {
        let zeros = |columns: usize| Tensor::zeros((*rows, columns), DType::F32, &Device::Cpu);
        let Some(lora) = lora else {
            rows_of_up.push(zeros(rank)?);
            continue;
        };
        let own = lora.rank();
        // The scale of the whole is 1.
        let up = (lora.up.reshape((*rows, own))? * scale(lora))?;
        rows_of_up.push(Tensor::cat(&[zeros(column)?, up, zeros(rank - column - own)?], 1)?);
        column += own;
    }
    Ok(Some(LoraTensors {
        down: Tensor::cat(&downs, 0)?,
        up: Tensor::cat(&rows_of_up, 0)?,
        mid: None,
        alpha: Some(rank as f64),
        scalar: 1.0,
    }))
}

/// What the product of both matrices is multiplied with.
pub(super) fn scale(lora: &LoraTensors) -> f64 {
    let rank = lora.rank() as f64;
    lora.alpha.unwrap_or(rank) * lora.scalar / rank
}

fn is_equal(a: &Tensor, b: &Tensor) -> Result<bool> {
    if a.dims() != b.dims() {
        return Ok(false);
    }
    Ok(a.flatten_all()?.to_vec1::<f32>()? == b.flatten_all()?.to_vec1::<f32>()?)
}
