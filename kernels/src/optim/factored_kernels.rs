//! The CPU kernels of [`SecondMoment::update`](super::factored::SecondMoment::update) for matrices. They read the
//! gradient twice instead of ten times and allocate one tensor instead of six.
//!
//! Tasks have a fixed size, so that the result does not depend on the number of threads.

use super::kernels::{multiversion, sum_of_squares};
use rayon::prelude::*;

/// The approximate number of elements per task: several small matrices, or some rows of a large one.
const CHUNK_LEN: usize = 1 << 15;

/// The last two dimensions of a tensor.
#[derive(Clone, Copy)]
pub(super) struct Matrix {
    pub(super) rows: usize,
    pub(super) columns: usize,
}

impl Matrix {
    fn size(self) -> usize {
        self.rows * self.columns
    }

    /// The number of whole matrices per task; `None` if a matrix is split over several tasks.
    fn matrices_per_task(self) -> Option<usize> {
        (self.size() <= CHUNK_LEN).then(|| (CHUNK_LEN / self.size().max(1)).max(1))
    }

    /// The rows of a large matrix that one task handles.
    fn row_chunk(self) -> Self {
        Self {
            rows: (CHUNK_LEN / self.columns.max(1)).max(1),
            ..self
        }
    }
}

/// The sums of squares of each row and of each column, for every matrix.
pub(super) fn row_and_column_sums(g: &[f32], matrix: Matrix) -> (Vec<f32>, Vec<f32>) {
    let count = g.len() / matrix.size().max(1);
    let mut rows = vec![0f32; count * matrix.rows];
    let mut columns = vec![0f32; count * matrix.columns];
    if let Some(matrices_per_task) = matrix.matrices_per_task() {
        let chunks = g.par_chunks(matrices_per_task * matrix.size());
        let outputs = rows
            .par_chunks_mut(matrices_per_task * matrix.rows)
            .zip(columns.par_chunks_mut(matrices_per_task * matrix.columns));
        chunks
            .zip(outputs)
            .for_each(|(g, (rows, columns))| add_squares(g, matrix, rows, columns));
        return (rows, columns);
    }
    let row_chunk = matrix.row_chunk();
    let matrices = g.chunks_exact(matrix.size()).zip(rows.chunks_exact_mut(matrix.rows));
    for ((g, rows), columns) in matrices.zip(columns.chunks_exact_mut(matrix.columns)) {
        let parts: Vec<Vec<f32>> = g
            .par_chunks(row_chunk.size())
            .zip(rows.par_chunks_mut(row_chunk.rows))
            .map(|(g, rows)| {
                let rows_of_task = Matrix {
                    rows: rows.len(),
                    ..matrix
                };
                let mut columns = vec![0f32; matrix.columns];
                add_squares(g, rows_of_task, rows, &mut columns);
                columns
            })
            .collect();
        for partial in &parts {
            columns.iter_mut().zip(partial).for_each(|(sum, x)| *sum += x);
        }
    }
    (rows, columns)
}

/// Multiplies every element of `g` by the factors of its row and its column. Returns the products and the sum of their
/// squares.
pub(super) fn scale_rows_and_columns(g: &[f32], matrix: Matrix, rows: &[f32], columns: &[f32]) -> (Vec<f32>, f64) {
    let mut out = vec![0f32; g.len()];
    let partial_sums: Vec<f64> = match matrix.matrices_per_task() {
        Some(matrices_per_task) => {
            let factors = rows
                .par_chunks(matrices_per_task * matrix.rows)
                .zip(columns.par_chunks(matrices_per_task * matrix.columns));
            let chunks = g
                .par_chunks(matrices_per_task * matrix.size())
                .zip(out.par_chunks_mut(matrices_per_task * matrix.size()));
            chunks
                .zip(factors)
                .map(|((g, out), (rows, columns))| scale(g, matrix, rows, columns, out))
                .collect()
        }
        None => {
            let row_chunk = matrix.row_chunk();
            let matrices = g.par_chunks(matrix.size()).zip(out.par_chunks_mut(matrix.size()));
            let factors = rows.par_chunks(matrix.rows).zip(columns.par_chunks(matrix.columns));
            matrices
                .zip(factors)
                .flat_map(|((g, out), (rows, columns))| {
                    let parts = g.par_chunks(row_chunk.size()).zip(out.par_chunks_mut(row_chunk.size()));
                    parts.zip(rows.par_chunks(row_chunk.rows)).map(move |((g, out), rows)| {
                        let rows_of_task = Matrix {
                            rows: rows.len(),
                            ..matrix
                        };
                        scale(g, rows_of_task, rows, columns, out)
                    })
                })
                .collect()
        }
    };
    (out, partial_sums.into_iter().sum())
}

/// Multiplies all numbers by a factor.
pub(super) fn scale_in_place(numbers: &mut [f32], factor: f32) {
    numbers
        .par_chunks_mut(CHUNK_LEN)
        .for_each(|chunk| chunk.iter_mut().for_each(|x| *x *= factor));
}

multiversion! {
    fn add_squares(g: &[f32], matrix: Matrix, rows: &mut [f32], columns: &mut [f32]) {
        const LANES: usize = 16;
        let matrices = g.chunks_exact(matrix.size()).zip(rows.chunks_exact_mut(matrix.rows));
        for ((g, rows), columns) in matrices.zip(columns.chunks_exact_mut(matrix.columns)) {
            for (g, row) in g.chunks_exact(matrix.columns).zip(rows) {
                let mut partial = [0f32; LANES];
                let (blocks, rest) = g.as_chunks::<LANES>();
                let (columns, last) = columns.as_chunks_mut::<LANES>();
                for (x, columns) in blocks.iter().zip(columns) {
                    for ((sum, column), x) in partial.iter_mut().zip(columns).zip(x) {
                        let square = x * x;
                        *sum += square;
                        *column += square;
                    }
                }
                let mut sum = partial.iter().sum::<f32>();
                for (column, x) in last.iter_mut().zip(rest) {
                    let square = x * x;
                    sum += square;
                    *column += square;
                }
                *row += sum;
            }
        }
    }
}

multiversion! {
    fn scale(g: &[f32], matrix: Matrix, rows: &[f32], columns: &[f32], out: &mut [f32]) -> f64 {
        let matrices = g.chunks_exact(matrix.size()).zip(out.chunks_exact_mut(matrix.size()));
        let factors = rows.chunks_exact(matrix.rows).zip(columns.chunks_exact(matrix.columns));
        for ((g, out), (rows, columns)) in matrices.zip(factors) {
            let lines = g.chunks_exact(matrix.columns).zip(out.chunks_exact_mut(matrix.columns));
            for ((g, out), row) in lines.zip(rows) {
                for ((out, g), column) in out.iter_mut().zip(g).zip(columns) {
                    *out = row * column * g;
                }
            }
        }
        sum_of_squares(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::TorchGenerator;

    /// Small matrices, several tasks of them, large matrices that are split, and vectors.
    const MATRICES: [(usize, Matrix); 7] = {
        const fn of(count: usize, rows: usize, columns: usize) -> (usize, Matrix) {
            (count, Matrix { rows, columns })
        }
        [
            of(24, 3, 3),
            of(4096, 3, 3),
            of(1, 300, 211),
            of(3, 300, 211),
            of(5, 7, 1),
            of(2, 1, 40_000),
            of(2, 40_000, 1),
        ]
    };

    #[test]
    fn sums_and_products_match_a_loop_over_the_elements() {
        for (count, matrix) in MATRICES {
            let Matrix { rows, columns } = matrix;
            let numbers = |seed: u64, of: usize| TorchGenerator::manual_seed(seed).randn(of);
            let g = numbers(1, count * rows * columns);
            let (of_rows, of_columns) = row_and_column_sums(&g, matrix);
            let (by_row, by_column) = (numbers(2, count * rows), numbers(3, count * columns));
            let (products, sum_of_squares) = scale_rows_and_columns(&g, matrix, &by_row, &by_column);
            let (mut want_rows, mut want_columns) = (vec![0f64; count * rows], vec![0f64; count * columns]);
            let mut want_squares = 0f64;
            for (at, x) in g.iter().enumerate() {
                let (row, column) = (at / columns, at / (rows * columns) * columns + at % columns);
                want_rows[row] += f64::from(x * x);
                want_columns[column] += f64::from(x * x);
                let product = by_row[row] * by_column[column] * x;
                want_squares += f64::from(product * product);
                assert_eq!(products[at], product, "{rows} x {columns}: product {at}");
            }
            for (ours, want) in [(of_rows, want_rows), (of_columns, want_columns)] {
                assert_eq!(ours.len(), want.len());
                for (ours, want) in ours.iter().zip(&want) {
                    let off = (f64::from(*ours) - want).abs() / want;
                    assert!(off < 1e-5, "{rows} x {columns}: {ours} instead of {want}");
                }
            }
            assert!((sum_of_squares / want_squares - 1.0).abs() < 1e-5, "{rows} x {columns}");
        }
    }
}
