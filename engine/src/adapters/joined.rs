//! Splits the LoRA of a layer of an original release onto the layers of the model that it consists of.
//!
//! Original files of FLUX.1 have one layer for q, k and v of a double block, and one for q, k, v and the MLP of a single block. A
//! LoRA of such a layer has one `down` matrix for all of them, whose rows each part uses. Programs that convert a LoRA with
//! different `down` matrices write them below each other, and the `up` matrices as blocks of one matrix; there each part uses
//! only its own block.

use super::lora::LoraTensors;
use super::names::NamedLayers;
use candle_core::{Result, Tensor};

/// Splits the tensors of a file's layer: one LoRA for each of `named.layers`. `up` has as many rows as they have together.
///
/// # Errors
/// When it has not.
pub(super) fn split(tensors: LoraTensors, named: &NamedLayers) -> Result<Vec<LoraTensors>> {
    let parts = named.layers.len();
    if named.halves_swapped {
        let rows = tensors.up.dim(0)?;
        let half = rows / 2;
        let up = &tensors.up;
        let up = Tensor::cat(&[&up.narrow(0, half, rows - half)?, &up.narrow(0, 0, half)?], 0)?;
        return Ok(vec![LoraTensors { up, ..tensors }]);
    }
    if parts == 1 {
        return Ok(vec![tensors]);
    }
    let mut ups = Vec::with_capacity(parts);
    let mut start = 0;
    for (_, rows) in &named.layers {
        ups.push(tensors.up.narrow(0, start, *rows)?);
        start += rows;
    }
    let rank = tensors.up.dim(1)?;
    let in_blocks = tensors.mid.is_none() && rank.is_multiple_of(parts) && are_blocks(&ups, rank / parts)?;
    let mut split = Vec::with_capacity(parts);
    for (index, up) in ups.into_iter().enumerate() {
        let (down, up, alpha) = match in_blocks {
            false => (tensors.down.clone(), up, tensors.alpha),
            true => {
                let block = rank / parts;
                // The scale of the update is alpha / rank, and stays the same.
                let alpha = tensors.alpha.map(|alpha| alpha / parts as f64);
                let (down, up) = (&tensors.down, &up);
                (
                    down.narrow(0, index * block, block)?,
                    up.narrow(1, index * block, block)?,
                    alpha,
                )
            }
        };
        split.push(LoraTensors {
            down: down.contiguous()?,
            up: up.contiguous()?,
            mid: tensors.mid.clone(),
            alpha,
            scalar: tensors.scalar,
        });
    }
    Ok(split)
}

/// Whether the `up` matrix of each part has numbers other than zero in its own `block` columns, and only there.
fn are_blocks(ups: &[Tensor], block: usize) -> Result<bool> {
    for (index, up) in ups.iter().enumerate() {
        let columns = up.abs()?.flatten_from(1)?.max(0)?.to_vec1::<f32>()?;
        let own = index * block..(index + 1) * block;
        let is_block = columns
            .iter()
            .enumerate()
            .all(|(column, largest)| own.contains(&column) || *largest == 0.0);
        let is_zero = columns.iter().all(|largest| *largest == 0.0);
        if !is_block || is_zero {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use candle_core::Device;

    fn named(rows: &[usize], halves_swapped: bool) -> NamedLayers {
        NamedLayers {
            part: "transformer",
            layers: rows.iter().map(|rows| (format!("of {rows} rows"), *rows)).collect(),
            halves_swapped,
        }
    }

    fn lora(up: &[[f32; 4]]) -> LoraTensors {
        LoraTensors {
            down: Tensor::arange(0f32, 12.0, &Device::Cpu)
                .unwrap()
                .reshape((4, 3))
                .unwrap(),
            up: Tensor::from_vec(up.concat(), (up.len(), 4), &Device::Cpu).unwrap(),
            mid: None,
            alpha: Some(8.0),
            scalar: 1.0,
        }
    }

    fn update(lora: &LoraTensors) -> Vec<Vec<f32>> {
        let scale = lora.alpha.unwrap() / lora.down.dim(0).unwrap() as f64;
        (lora.up.matmul(&lora.down).unwrap() * scale)
            .unwrap()
            .to_vec2()
            .unwrap()
    }

    #[test]
    fn the_parts_together_are_the_whole() {
        for (up, ranks) in [
            (
                [[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0], [0.0, 1.0, 0.0, 2.0]],
                [4, 4],
            ),
            (
                [[1.0, 2.0, 0.0, 0.0], [0.0, 0.0, 7.0, 8.0], [0.0, 0.0, 0.0, 2.0]],
                [2, 2],
            ),
            ([[0.0; 4]; 3], [4, 4]),
        ] {
            let whole = lora(&up);
            let parts = split(whole.clone(), &named(&[1, 2], false)).unwrap();
            assert_eq!(
                parts.iter().map(|part| part.down.dim(0).unwrap()).collect::<Vec<_>>(),
                ranks
            );
            let joined: Vec<Vec<f32>> = parts.iter().flat_map(update).collect();
            assert_eq!(joined, update(&whole));
        }
    }

    #[test]
    fn halves_are_swapped_and_other_row_counts_are_refused() {
        let whole = lora(&[[1.0; 4], [2.0; 4]]);
        let swapped = split(whole.clone(), &named(&[2], true)).unwrap().remove(0);
        assert_eq!(swapped.up.to_vec2::<f32>().unwrap(), [[2.0; 4], [1.0; 4]]);
        assert!(split(whole, &named(&[1, 2], false)).is_err());
    }
}
