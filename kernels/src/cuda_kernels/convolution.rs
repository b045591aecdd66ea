//! Convolutions as products of matrices, some rows of the result at a time.

use super::arguments::{Arg, Launch, Module};
use super::launch::{are_usable, dtype_name, elements_at_once, launch, output};
use candle_core::{DType, Result, Shape, Tensor};

/// The most bytes of the matrix of inputs, if more than one row of the result fits in it. Larger matrices leave
/// larger gaps in the memory of the device; which size is fastest was not measured.
pub(crate) const COLUMN_BYTES: usize = 64 << 20;

/// The steps of a convolution with a kernel of [height, width].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Convolution {
    pub(crate) kernel: [usize; 2],
    pub(crate) padding: usize,
    pub(crate) stride: usize,
    pub(crate) dilation: usize,
    /// Whether the taps of the kernel are in reverse order.
    pub(crate) reversed: bool,
}

/// Some rows of the result.
#[derive(Clone, Copy)]
struct Rows {
    start: usize,
    count: usize,
}

impl Convolution {
    /// Height and width of the result for an input of this height and width.
    pub(crate) fn output_size(&self, size: [usize; 2]) -> Option<[usize; 2]> {
        let along = |axis: usize| {
            let covered = self.dilation * (self.kernel[axis].checked_sub(1)?) + 1;
            let steps = (size[axis] + 2 * self.padding).checked_sub(covered)? / self.stride;
            Some(steps + 1)
        };
        Some([along(0)?, along(1)?])
    }

    /// Whether the matrix of inputs is the image itself.
    fn is_pointwise(&self) -> bool {
        self.kernel == [1, 1] && self.padding == 0 && self.stride == 1
    }

    /// The rows of the result whose matrices of inputs are computed together.
    fn chunks(&self, columns: usize, [height, width]: [usize; 2], dtype: DType) -> impl Iterator<Item = Rows> {
        let bytes_per_row = columns * width * dtype.size_in_bytes();
        let step = match self.is_pointwise() {
            true => height,
            false => (COLUMN_BYTES / bytes_per_row.max(1)).clamp(1, height.max(1)),
        };
        (0..height).step_by(step.max(1)).map(move |start| Rows {
            start,
            count: step.min(height - start),
        })
    }

    /// The inputs of these rows of the result of an image [1, channels, height, width]: [channels * taps, pixels].
    fn columns(&self, image: &Tensor, rows: Rows, out_w: usize) -> Result<Tensor> {
        let (_, channels, height, width) = image.dims4()?;
        let taps = self.kernel[0] * self.kernel[1];
        if self.is_pointwise() {
            return image.reshape((channels, height * width));
        }
        let pixels = rows.count * out_w;
        let Some(dtype) = dtype_name(image.dtype()) else {
            candle_core::bail!("convolution: no kernel for {:?}", image.dtype())
        };
        let columns = output(&Shape::from((channels * taps, pixels)), image.dtype(), image.device())?;
        let at_once = elements_at_once(image.dtype(), &[pixels], &[]);
        let count = columns.elem_count();
        let start = Launch::elements(Module::Im2Col, format!("im2col_{dtype}_{at_once}"), count, at_once);
        let [kernel_h, kernel_w] = self.kernel;
        let numbers = [
            height,
            width,
            kernel_h,
            kernel_w,
            out_w,
            rows.start,
            pixels,
            self.padding,
            self.stride,
            self.dilation,
            usize::from(self.reversed),
        ];
        let tensors = [Arg::Tensor(image), Arg::Tensor(&columns), Arg::I64(count)];
        let args: Vec<_> = tensors.into_iter().chain(numbers.map(Arg::I32)).collect();
        launch(&start, &args)?;
        Ok(columns)
    }
}

/// The convolution of x [b, in, h, w] with a weight [out, in, kernel height, kernel width].
///
/// # Errors
/// When the device fails.
pub(crate) fn convolve(convolution: &Convolution, x: &Tensor, weight: &Tensor) -> Result<Option<Tensor>> {
    let (batch, channels, height, width) = x.dims4()?;
    let (outputs, inputs, ..) = weight.dims4()?;
    let Some(size) = convolution.output_size([height, width]) else {
        return Ok(None);
    };
    if !are_usable(&[x, weight]) || x.dtype() != weight.dtype() || channels != inputs {
        return Ok(None);
    }
    let [out_h, out_w] = size;
    let columns = channels * convolution.kernel[0] * convolution.kernel[1];
    let weight = weight.reshape((outputs, columns))?;
    let shape = Shape::from((batch, outputs, out_h, out_w));
    let part = |image: usize, rows: Rows| {
        let image = x.narrow(0, image, 1)?;
        weight.matmul(&convolution.columns(&image, rows, out_w)?)
    };
    let chunks: Vec<_> = convolution.chunks(columns, size, x.dtype()).collect();
    if let ([rows], 1) = (chunks.as_slice(), batch) {
        return part(0, *rows)?.reshape(shape).map(Some);
    }
    let y = output(&shape, x.dtype(), x.device())?;
    for image in 0..batch {
        let result = y.narrow(0, image, 1)?.reshape((outputs, out_h * out_w))?;
        for rows in &chunks {
            result.slice_set(&part(image, *rows)?, 1, rows.start * out_w)?;
        }
    }
    Ok(Some(y))
}

/// The gradient of the weight of [`convolve`] in f32, from that of the result: dy [b, out, out h, out w] -> [out, in, kh, kw].
///
/// # Errors
/// When the device fails.
pub(crate) fn weight_gradient(convolution: &Convolution, x: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
    let (batch, channels, height, width) = x.dims4()?;
    let (_, outputs, out_h, out_w) = dy.dims4()?;
    if !are_usable(&[x, dy])
        || x.dtype() != dy.dtype()
        || convolution.output_size([height, width]) != Some([out_h, out_w])
    {
        return Ok(None);
    }
    let [kernel_h, kernel_w] = convolution.kernel;
    let columns = channels * kernel_h * kernel_w;
    let mut sum: Option<Tensor> = None;
    for image in 0..batch {
        let gradient = dy.narrow(0, image, 1)?.reshape((outputs, out_h * out_w))?;
        let image = x.narrow(0, image, 1)?;
        for rows in convolution.chunks(columns, [out_h, out_w], x.dtype()) {
            let gradient = gradient.narrow(1, rows.start * out_w, rows.count * out_w)?;
            let columns = convolution.columns(&image, rows, out_w)?;
            let part = gradient.contiguous()?.matmul(&columns.t()?)?.to_dtype(DType::F32)?;
            sum = Some(match sum {
                Some(sum) => (sum + part)?,
                None => part,
            });
        }
    }
    match sum {
        Some(sum) => Ok(Some(sum.reshape((outputs, channels, kernel_h, kernel_w))?)),
        None => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn convolution(kernel: usize, padding: usize, stride: usize) -> Convolution {
        Convolution {
            kernel: [kernel; 2],
            padding,
            stride,
            dilation: 1,
            reversed: false,
        }
    }

    #[test]
    fn the_size_of_the_result_is_that_of_a_convolution() {
        assert_eq!(convolution(3, 1, 1).output_size([5, 7]), Some([5, 7]));
        assert_eq!(convolution(3, 1, 2).output_size([5, 8]), Some([3, 4]));
        assert_eq!(convolution(3, 0, 1).output_size([2, 8]), None);
    }

    #[test]
    fn chunks_cover_all_rows_within_their_bytes() {
        for (columns, size) in [(1152, [1024, 1024]), (9, [3, 5]), (4608, [1000, 100_000])] {
            let convolution = convolution(3, 1, 1);
            let mut next = 0;
            for rows in convolution.chunks(columns, size, DType::F32) {
                assert_eq!(rows.start, next);
                assert!(rows.count == 1 || rows.count * columns * size[1] * 4 <= COLUMN_BYTES);
                next += rows.count;
            }
            assert_eq!(next, size[0]);
        }
        assert_eq!(convolution(1, 0, 1).chunks(4000, [1024, 1024], DType::F32).count(), 1);
    }
}
