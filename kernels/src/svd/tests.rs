//! Decompositions of matrices whose singular values are known.

use super::*;
use crate::rng::TorchGenerator;
use crate::testing::compute_on_this_thread;

/// An orthonormal basis of random vectors, one a column.
fn orthonormal(rows: usize, columns: usize, seed: u64) -> DMatrix<f64> {
    let random = TorchGenerator::manual_seed(seed).randn_f64(rows * columns);
    DMatrix::from_vec(rows, columns, random).qr().q()
}

/// A matrix with these singular values.
fn matrix(rows: usize, columns: usize, values: &[f64]) -> Tensor {
    compute_on_this_thread();
    let (left, right) = (
        orthonormal(rows, values.len(), 1),
        orthonormal(columns, values.len(), 2),
    );
    let product = left * DMatrix::from_diagonal(&nalgebra::DVector::from_row_slice(values)) * right.transpose();
    let by_rows: Vec<f32> = product.transpose().iter().map(|number| *number as f32).collect();
    Tensor::from_vec(by_rows, (rows, columns), &Device::Cpu).unwrap()
}

/// The Frobenius norm of what is lost at this rank.
fn lost(matrix: &Tensor, svd: &Svd, rank: usize) -> f64 {
    let (up, down) = svd.factors(rank).unwrap();
    let rest = (matrix - up.matmul(&down).unwrap())
        .unwrap()
        .to_dtype(DType::F64)
        .unwrap();
    rest.sqr()
        .unwrap()
        .sum_all()
        .unwrap()
        .to_scalar::<f64>()
        .unwrap()
        .sqrt()
}

fn norm(values: &[f64]) -> f64 {
    values.iter().map(|value| value * value).sum::<f64>().sqrt()
}

#[test]
fn singular_values_and_factors_are_those_of_the_matrix() {
    let values: Vec<f64> = (0..24).map(|index| 3.0 * 0.7_f64.powi(index)).collect();
    for (rows, columns) in [(24, 24), (24, 61), (61, 24)] {
        let matrix = matrix(rows, columns, &values);
        let svd = Svd::new(&matrix).unwrap();
        for (found, expected) in svd.values().iter().zip(&values) {
            assert!(
                (found - expected).abs() < 1e-6,
                "{rows} x {columns}: {found} and {expected}"
            );
        }
        for rank in [1, 5, 23] {
            let (lost, min) = (lost(&matrix, &svd, rank), norm(&values[rank..]));
            assert!(
                (lost - min).abs() < 1e-4 * min + 1e-6,
                "rank {rank}: {lost}, at best {min}"
            );
            let (up, down) = svd.factors(rank).unwrap();
            assert_eq!((up.dims(), down.dims()), (&[rows, rank][..], &[rank, columns][..]));
        }
        // At full rank the matrix is rebuilt.
        assert!(lost(&matrix, &svd, 24) < 1e-5 * norm(&values));
        assert!(lost(&matrix, &svd, 1000) < 1e-5 * norm(&values));
    }
}

#[test]
fn a_few_singular_vectors_are_found_without_the_others() {
    // What fine-tunes have: a few large singular values and a long, flat tail; and exactly as many as wanted, and fewer.
    let tail: Vec<f64> = (0..256).map(|index| 1.0 / (1.0 + f64::from(index)).powf(0.6)).collect();
    let flat: Vec<f64> = (0..256).map(|index| 1.0 + 0.001 * f64::from(256 - index)).collect();
    let exact: Vec<f64> = (0..8).map(|index| 2.0 - 0.1 * f64::from(index)).collect();
    for (values, rank) in [(&tail, 10), (&tail, 3), (&flat, 8), (&exact, 8), (&exact, 10)] {
        for (rows, columns) in [(256, 300), (300, 256)] {
            let matrix = matrix(rows, columns, values);
            let iterated = krylov::largest(&gram(&matrix).unwrap(), rank).is_some();
            assert!(iterated || values == &flat, "rank {rank} is not found by the iteration");
            let svd = Svd::largest(&matrix, rank).unwrap();
            let min = norm(&values[rank.min(values.len())..]);
            let lost = lost(&matrix, &svd, rank);
            assert!(lost <= min * (1.0 + 1e-4) + 1e-5, "rank {rank}: {lost}, at best {min}");
            assert_eq!(svd.factors(rank).unwrap().0.dims(), [rows, rank]);
        }
    }
}

#[test]
fn the_same_matrix_gives_the_same_bits() {
    let values: Vec<f64> = (0..200).map(|index| 1.0 / (1.0 + f64::from(index))).collect();
    let matrix = matrix(200, 230, &values);
    let bits = |svd: Svd| {
        let (up, down) = svd.factors(4).unwrap();
        [up, down].map(|factor| factor.flatten_all().unwrap().to_vec1::<f32>().unwrap())
    };
    assert_eq!(
        bits(Svd::largest(&matrix, 4).unwrap()),
        bits(Svd::largest(&matrix, 4).unwrap())
    );
}

#[test]
fn a_matrix_without_singular_values_or_with_nan_is_no_panic() {
    compute_on_this_thread();
    let zero = Tensor::zeros((4, 6), DType::F32, &Device::Cpu).unwrap();
    let (up, down) = Svd::largest(&zero, 2).unwrap().factors(2).unwrap();
    let product = up
        .matmul(&down)
        .unwrap()
        .flatten_all()
        .unwrap()
        .to_vec1::<f32>()
        .unwrap();
    assert_eq!(product, [0.0; 24]);
    let nan = Tensor::full(f32::NAN, (4, 6), &Device::Cpu).unwrap();
    assert!(Svd::new(&nan).unwrap_err().to_string().contains("not finite"));
}
