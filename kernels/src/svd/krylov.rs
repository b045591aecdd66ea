//! The largest eigenvalues of a symmetric matrix by a block Krylov iteration.

use super::eigen::{Eigen, eigen};
use crate::rng::generator_from_text;
use nalgebra::DMatrix;

/// Columns of a block above the number of eigenvectors that are wanted.
const OVERSAMPLING: usize = 8;
/// Smaller matrices are decomposed whole.
const MIN_SIDE: usize = 192;
/// The iteration begins where this many blocks are not wider than the matrix. Flat spectra need more, and then the whole decomposition is
/// not slower.
const MIN_BLOCKS: usize = 14;
/// The iteration ends when a block captures less than this share of what is not captured yet. The next blocks would capture less by
/// orders of magnitude, so that the error of the approximation is that of the exact one to about 1e-5.
const TOLERANCE: f64 = 1e-4;
/// Where this share of everything is not captured, it is rounding error.
const ROUNDING: f64 = 1e-14;

/// The `rank` largest eigenvalues of a symmetric matrix without negative eigenvalues, and their eigenvectors. `None`: all of them
/// together are computed sooner.
pub(super) fn largest(matrix: &DMatrix<f64>, rank: usize) -> Option<Eigen> {
    let side = matrix.nrows();
    let block = rank.saturating_add(OVERSAMPLING);
    if side < MIN_SIDE || block.saturating_mul(MIN_BLOCKS) > side {
        return None;
    }
    let trace = matrix.trace();
    if trace <= 0.0 {
        return None;
    }
    let random = generator_from_text("extract/krylov").randn_f64(side * block);
    let mut next = DMatrix::from_vec(side, block, random);
    let mut basis = DMatrix::<f64>::zeros(side, 0);
    let mut images = DMatrix::<f64>::zeros(side, 0);
    let mut captured = 0.0;
    loop {
        // Once is not enough where the block lies almost in the basis: what is left of it then is rounding error.
        for _ in 0..2 {
            let inside = basis.tr_mul(&next);
            next -= &basis * inside;
            next = next.qr().q();
        }
        if 2 * (basis.ncols() + block) > side {
            return None;
        }
        let image = matrix * &next;
        basis = joined(&basis, &next);
        images = joined(&images, &image);
        let projected = basis.tr_mul(&images);
        let ritz = eigen((&projected + projected.transpose()) * 0.5);
        let sum: f64 = ritz.values.iter().take(rank).sum();
        let is_first = basis.ncols() == block;
        let rest = (trace - sum).max(0.0);
        let is_converged = !is_first && sum - captured <= TOLERANCE * rest;
        if is_converged || rest <= ROUNDING * trace {
            return Some(Eigen {
                vectors: &basis * ritz.vectors.columns(0, rank),
                values: ritz.values.into_iter().take(rank).collect(),
            });
        }
        captured = sum;
        next = image;
    }
}

/// The columns of both matrices.
fn joined(left: &DMatrix<f64>, right: &DMatrix<f64>) -> DMatrix<f64> {
    let columns = left.column_iter().chain(right.column_iter());
    let columns: Vec<_> = columns.map(|column| column.clone_owned()).collect();
    DMatrix::from_columns(&columns)
}
