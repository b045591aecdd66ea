//! All eigenvalues of a symmetric matrix.

use nalgebra::{DMatrix, SymmetricEigen};

/// Eigenvalues, largest first, and their eigenvectors, one a column.
pub(super) struct Eigen {
    pub(super) values: Vec<f64>,
    pub(super) vectors: DMatrix<f64>,
}

/// All eigenvalues of a symmetric matrix whose numbers are finite.
pub(super) fn eigen(matrix: DMatrix<f64>) -> Eigen {
    if matrix.is_empty() {
        return Eigen {
            values: Vec::new(),
            vectors: matrix,
        };
    }
    let eigen = SymmetricEigen::new(matrix);
    let mut order: Vec<usize> = (0..eigen.eigenvalues.len()).collect();
    order.sort_by(|a, b| eigen.eigenvalues[*b].total_cmp(&eigen.eigenvalues[*a]));
    Eigen {
        values: order.iter().map(|index| eigen.eigenvalues[*index]).collect(),
        vectors: eigen.eigenvectors.select_columns(&order),
    }
}
