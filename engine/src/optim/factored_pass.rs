//! [`SecondMoment::update`](super::factored::SecondMoment::update) of matrices on the CPU: twice over the gradient
//! instead of ten times, and one tensor made instead of six.
//!
//! Work is cut into pieces of fixed sizes, so that the result does not depend on how many threads there are.

use super::kernels::{for_every_unit, squares};
use rayon::prelude::*;

/// Numbers that a task takes, about: many matrices where they are small, rows of one where it is large.
const PIECE: usize = 1 << 15;

/// Rows and columns of the matrices that a tensor ends in.
#[derive(Clone, Copy)]
pub(super) struct Matrix {
    pub(super) rows: usize,
    pub(super) columns: usize,
}

impl Matrix {
    fn size(self) -> usize {
        self.rows * self.columns
    }

    /// How many whole matrices a task takes; `None` where one is cut.
    fn together(self) -> Option<usize> {
        (self.size() <= PIECE).then(|| (PIECE / self.size().max(1)).max(1))
    }

    /// A part of it, of as many rows as a task takes.
    fn part(self) -> Self {
        Self {
            rows: (PIECE / self.columns.max(1)).max(1),
            ..self
        }
    }
}

/// The sums of the squares of each row and of each column, of every matrix.
pub(super) fn sums(g: &[f32], matrix: Matrix) -> (Vec<f32>, Vec<f32>) {
    let count = g.len() / matrix.size().max(1);
    let mut rows = vec![0f32; count * matrix.rows];
    let mut columns = vec![0f32; count * matrix.columns];
    if let Some(together) = matrix.together() {
        let pieces = g.par_chunks(together * matrix.size());
        let sums = rows
            .par_chunks_mut(together * matrix.rows)
            .zip(columns.par_chunks_mut(together * matrix.columns));
        pieces
            .zip(sums)
            .for_each(|(g, (rows, columns))| add_squares(g, matrix, rows, columns));
        return (rows, columns);
    }
    let part = matrix.part();
    let matrices = g.chunks_exact(matrix.size()).zip(rows.chunks_exact_mut(matrix.rows));
    for ((g, rows), columns) in matrices.zip(columns.chunks_exact_mut(matrix.columns)) {
        let parts: Vec<Vec<f32>> = g
            .par_chunks(part.size())
            .zip(rows.par_chunks_mut(part.rows))
            .map(|(g, rows)| {
                let here = Matrix {
                    rows: rows.len(),
                    ..matrix
                };
                let mut columns = vec![0f32; matrix.columns];
                add_squares(g, here, rows, &mut columns);
                columns
            })
            .collect();
        for part in &parts {
            columns.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
        }
    }
    (rows, columns)
}

/// Every number of `g` times the factors of its row and of its column, and the sum of the squares of that.
pub(super) fn scaled(g: &[f32], matrix: Matrix, rows: &[f32], columns: &[f32]) -> (Vec<f32>, f64) {
    let mut out = vec![0f32; g.len()];
    let squares: Vec<f64> = match matrix.together() {
        Some(together) => {
            let factors = rows
                .par_chunks(together * matrix.rows)
                .zip(columns.par_chunks(together * matrix.columns));
            let pieces = g
                .par_chunks(together * matrix.size())
                .zip(out.par_chunks_mut(together * matrix.size()));
            pieces
                .zip(factors)
                .map(|((g, out), (rows, columns))| scale(g, matrix, rows, columns, out))
                .collect()
        }
        None => {
            let part = matrix.part();
            let matrices = g.par_chunks(matrix.size()).zip(out.par_chunks_mut(matrix.size()));
            let factors = rows.par_chunks(matrix.rows).zip(columns.par_chunks(matrix.columns));
            matrices
                .zip(factors)
                .flat_map(|((g, out), (rows, columns))| {
                    let parts = g.par_chunks(part.size()).zip(out.par_chunks_mut(part.size()));
                    parts.zip(rows.par_chunks(part.rows)).map(move |((g, out), rows)| {
                        let here = Matrix {
                            rows: rows.len(),
                            ..matrix
                        };
                        scale(g, here, rows, columns, out)
                    })
                })
                .collect()
        }
    };
    (out, squares.into_iter().sum())
}

/// All numbers times a factor.
pub(super) fn times(numbers: &mut [f32], factor: f32) {
    numbers
        .par_chunks_mut(PIECE)
        .for_each(|piece| piece.iter_mut().for_each(|x| *x *= factor));
}

for_every_unit! {
    fn add_squares(g: &[f32], matrix: Matrix, rows: &mut [f32], columns: &mut [f32]) {
        const LANES: usize = 16;
        let matrices = g.chunks_exact(matrix.size()).zip(rows.chunks_exact_mut(matrix.rows));
        for ((g, rows), columns) in matrices.zip(columns.chunks_exact_mut(matrix.columns)) {
            for (g, row) in g.chunks_exact(matrix.columns).zip(rows) {
                let mut sums = [0f32; LANES];
                let (blocks, rest) = g.as_chunks::<LANES>();
                let (columns, last) = columns.as_chunks_mut::<LANES>();
                for (x, columns) in blocks.iter().zip(columns) {
                    for ((sum, column), x) in sums.iter_mut().zip(columns).zip(x) {
                        let square = x * x;
                        *sum += square;
                        *column += square;
                    }
                }
                let mut sum = sums.iter().sum::<f32>();
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

for_every_unit! {
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
        squares(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::TorchGenerator;

    /// Small ones, several tasks of them, large ones that are cut, and lines.
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
    fn sums_and_products_are_those_of_every_row_and_column() {
        for (count, matrix) in MATRICES {
            let Matrix { rows, columns } = matrix;
            let numbers = |seed: u64, of: usize| TorchGenerator::manual_seed(seed).randn(of);
            let g = numbers(1, count * rows * columns);
            let (of_rows, of_columns) = sums(&g, matrix);
            let (by_row, by_column) = (numbers(2, count * rows), numbers(3, count * columns));
            let (products, squares) = scaled(&g, matrix, &by_row, &by_column);
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
            assert!((squares / want_squares - 1.0).abs() < 1e-5, "{rows} x {columns}");
        }
    }
}
