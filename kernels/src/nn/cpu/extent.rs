//! How much of a slice a matrix with strides takes. Code that reads and writes through raw pointers relies on it.

/// The number of elements from the first to the last element of a matrix, with the gaps between. If it is more than a `usize` holds, the
/// largest one, which no slice has.
pub(super) fn extent(rows: usize, cols: usize, row_stride: usize, col_stride: usize) -> usize {
    if rows == 0 || cols == 0 {
        return 0;
    }
    let to_last_row = (rows - 1).saturating_mul(row_stride);
    let to_last_col = (cols - 1).saturating_mul(col_stride);
    to_last_row.saturating_add(to_last_col).saturating_add(1)
}

#[cfg(test)]
mod tests {
    use super::super::{Mat, MatMut, gemm};
    use super::extent;

    #[test]
    fn gaps_count_and_empty_matrices_take_nothing() {
        assert_eq!(extent(3, 4, 10, 2), 2 * 10 + 3 * 2 + 1);
        assert_eq!(extent(1, 1, usize::MAX, usize::MAX), 1);
        assert_eq!([extent(0, 4, 9, 1), extent(4, 0, 9, 1)], [0, 0]);
    }

    /// A product of strides that is too large must not become a small number.
    #[test]
    fn strides_beyond_the_largest_number_fit_no_slice() {
        for (rows, cols, row_stride, col_stride) in [
            (3, 1, usize::MAX / 2 + 1, 1),
            (1, 3, 1, usize::MAX / 2 + 1),
            (2, 2, usize::MAX / 2, usize::MAX / 2 + 2),
        ] {
            assert_eq!(
                extent(rows, cols, row_stride, col_stride),
                usize::MAX,
                "{row_stride} {col_stride}"
            );
        }
        let data = [0f32; 8];
        let far = Mat {
            row_stride: usize::MAX / 2 + 1,
            ..Mat::new(&data, 3, 1)
        };
        assert!(!far.fits_slice());
        let mut out = [0f32; 3];
        gemm(MatMut::new(&mut out, 3, 1), far, Mat::new(&[1.0], 1, 1), 1.0, 0.0, 1).unwrap_err();
    }
}
