//! Nearest-neighbour enlarging, as the up blocks of a U-Net need it.

use super::cpu;
use candle_core::{CpuStorage, CustomOp1, Device, Layout, Shape, Tensor};
use rayon::prelude::*;

/// x [b, c, h, w] -> [b, c, height, width], every pixel from the nearest one by PyTorch's rule
/// (`floor(i * in / out)`, in f32).
///
/// # Errors
/// When x has another rank.
pub fn upsample_nearest(x: &Tensor, height: usize, width: usize) -> candle_core::Result<Tensor> {
    let (_, _, h, w) = x.dims4()?;
    if (h, w) == (height, width) {
        return Ok(x.clone());
    }
    if cpu::runs_here(x) {
        return x.contiguous()?.apply_op1(Nearest {
            from: (h, w),
            to: (height, width),
        });
    }
    x.upsample_nearest2d(height, width)
}

struct Nearest {
    from: (usize, usize),
    to: (usize, usize),
}

fn sources(from: usize, to: usize) -> Vec<usize> {
    let scale = from as f32 / to as f32;
    (0..to)
        .map(|i| ((i as f32 * scale) as usize).min(from.saturating_sub(1)))
        .collect()
}

impl CustomOp1 for Nearest {
    fn name(&self) -> &'static str {
        "upsample-nearest"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let (b, c, h, w) = layout.shape().dims4()?;
        let x = cpu::slice(storage, layout)?;
        let (height, width) = self.to;
        let (ys, xs) = (sources(h, height), sources(w, width));
        let mut y = vec![0f32; b * c * height * width];
        if !y.is_empty() && !x.is_empty() {
            y.par_chunks_mut(height * width)
                .zip(x.par_chunks(h * w))
                .for_each(|(out, plane)| {
                    for (line, iy) in out.chunks_exact_mut(width).zip(&ys) {
                        let source = &plane[iy * w..(iy + 1) * w];
                        line.iter_mut().zip(&xs).for_each(|(value, ix)| *value = source[*ix]);
                    }
                });
        }
        Ok((CpuStorage::F32(y), (b, c, height, width).into()))
    }

    fn bwd(&self, x: &Tensor, _y: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>> {
        let ((h, w), (height, width)) = (self.from, self.to);
        let (ys, xs) = (sources(h, height), sources(w, width));
        let grad = grad.contiguous()?;
        let mut dx = vec![0f32; x.elem_count()];
        if !dx.is_empty() && height * width > 0 {
            cpu::with_slice(&grad, |dy| {
                dx.par_chunks_mut(h * w)
                    .zip(dy.par_chunks(height * width))
                    .for_each(|(plane, dy)| {
                        for (line, iy) in dy.chunks_exact(width).zip(&ys) {
                            let target = &mut plane[iy * w..(iy + 1) * w];
                            line.iter().zip(&xs).for_each(|(value, ix)| target[*ix] += *value);
                        }
                    });
            })?;
        }
        Ok(Some(Tensor::from_vec(dx, x.shape(), &Device::Cpu)?))
    }
}
