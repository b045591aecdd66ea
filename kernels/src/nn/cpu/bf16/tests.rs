//! Products in bfloat16, compared with products in f64 of the rounded operands, with every implementation that this CPU has.

use super::super::Mat;
use super::simd::available_bf16_isas;
use super::*;
use half::bf16;
use proptest::prelude::*;
use std::ops::Range;

/// Numbers of three sizes, most of which are no numbers of bfloat16.
fn random(seed: usize, length: usize) -> Vec<f32> {
    (0..length)
        .map(|i| {
            let number = ((i * 7919 + seed * 104_729) % 2003) as f32 / 1001.5 - 1.0;
            number * [1.0, 0.03, 7.0][(i / 3 + seed) % 3]
        })
        .collect()
}

/// A number that is rounded to bfloat16, and to zero if it is subnormal.
fn rounded(number: f32) -> f32 {
    let number = bf16::from_f32(number).to_f32();
    if number.is_subnormal() { 0.0 } else { number }
}

/// How an operand lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Rows,
    Transposed,
    /// In bfloat16, as rows.
    Halves,
    /// In bfloat16, transposed. A left operand is never so: then it is [`Form::Transposed`].
    HalvesTransposed,
}

const FORMS: [Form; 4] = [Form::Rows, Form::Transposed, Form::Halves, Form::HalvesTransposed];

/// `[rows][cols]`, transposed.
fn transposed<T: Copy>(data: &[T], rows: usize, cols: usize) -> Vec<T> {
    (0..cols)
        .flat_map(|j| (0..rows).map(move |i| data[i * cols + j]))
        .collect()
}

fn halves(data: &[f32]) -> Vec<[u8; 2]> {
    data.iter()
        .map(|number| bf16::from_f32(*number).to_le_bytes())
        .collect()
}

/// The operands `a` [rows, depth] and `b` [depth, cols] of a product.
struct Operands {
    sizes: Sizes,
    a: Vec<f32>,
    b: Vec<f32>,
}

impl Operands {
    fn random(sizes: Sizes) -> Self {
        Self {
            sizes,
            a: random(1, sizes.rows * sizes.depth),
            b: random(2, sizes.depth * sizes.cols),
        }
    }

    /// Writes the product of the operands in these forms to `out`, whose rows are `stride` elements apart.
    fn write(
        &self,
        isa: Bf16Isa,
        forms: (Form, Form),
        initial: InitialValue<'_>,
        (out, stride): (&mut [f32], usize),
        threads: usize,
    ) {
        let Sizes { rows, cols, depth } = self.sizes;
        let (a_t, b_t) = (transposed(&self.a, rows, depth), transposed(&self.b, depth, cols));
        let (a_halves, b_halves, b_t_halves) = (halves(&self.a), halves(&self.b), halves(&b_t));
        let half_mat = |data, rows, cols| Bf16Mat { data, rows, cols };
        macro_rules! write {
            ($a:expr, $b:expr) => {
                Bf16Product {
                    sizes: self.sizes,
                    a: $a,
                    b: $b,
                    initial,
                }
                .write(isa, out, stride, threads)
                .unwrap()
            };
        }
        macro_rules! with_left {
            ($a:expr) => {
                match forms.1 {
                    Form::Rows => write!($a, &Mat::new(&self.b, depth, cols)),
                    Form::Transposed => write!($a, &Mat::new(&b_t, cols, depth).t()),
                    Form::Halves => write!($a, &half_mat(&b_halves, depth, cols)),
                    Form::HalvesTransposed => write!($a, &Bf16Transposed(half_mat(&b_t_halves, cols, depth))),
                }
            };
        }
        match forms.0 {
            Form::Rows => with_left!(&Mat::new(&self.a, rows, depth)),
            Form::Transposed | Form::HalvesTransposed => with_left!(&Mat::new(&a_t, depth, rows).t()),
            Form::Halves => with_left!(&half_mat(&a_halves, rows, depth)),
        }
    }

    /// The product into zeros.
    fn product(&self, isa: Bf16Isa, forms: (Form, Form), threads: usize) -> Vec<f32> {
        let mut out = vec![f32::NAN; self.sizes.rows * self.sizes.cols];
        self.write(isa, forms, InitialValue::Zero, (&mut out, self.sizes.cols), threads);
        out
    }

    /// Element (i, j) of the product of the rounded operands, and the sum of the absolute values of its terms.
    fn exact(&self, i: usize, j: usize) -> (f64, f64) {
        let Sizes { cols, depth, .. } = self.sizes;
        let terms =
            (0..depth).map(|k| f64::from(rounded(self.a[i * depth + k])) * f64::from(rounded(self.b[k * cols + j])));
        terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()))
    }
}

fn check_product(isa: Bf16Isa, sizes: Sizes, forms: (Form, Form), initial: u8) {
    let Sizes { rows, cols, depth } = sizes;
    let operands = Operands::random(sizes);
    let (bias, stride) = (random(3, rows), cols + 3);
    let before = random(4, rows * stride);
    let mut out = before.clone();
    let value = match initial {
        0 => InitialValue::Zero,
        1 => InitialValue::Output,
        _ => InitialValue::PerRow(&bias),
    };
    operands.write(isa, forms, value, (&mut out, stride), 1);
    for i in 0..rows {
        for j in 0..cols {
            let begin = match initial {
                0 => 0.0,
                1 => before[i * stride + j],
                _ => bias[i],
            };
            let (sum, size) = operands.exact(i, j);
            let (expected, got) = (f64::from(begin) + sum, f64::from(out[i * stride + j]));
            // Rounding of f32 sums: each of them by at most half a unit of the last place.
            let bound = f64::from(f32::EPSILON) * (1.0 + depth as f64).sqrt() * 4.0 * (size + f64::from(begin.abs()));
            assert!(
                (expected - got).abs() <= bound,
                "{isa:?} {sizes:?} {forms:?} at {i}, {j}: {got}, not {expected}"
            );
        }
        assert_eq!(
            out[i * stride + cols..][..3],
            before[i * stride + cols..][..3],
            "elements beyond the row are unchanged"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn products_equal_those_of_rounded_operands(
        rows in 1usize..60, cols in 1usize..120, depth in 0usize..1200,
        forms in (0usize..4, 0usize..4), initial in 0u8..3,
    ) {
        let forms = (FORMS[forms.0], FORMS[forms.1]);
        for isa in available_bf16_isas() {
            check_product(isa, Sizes { rows, cols, depth }, forms, initial);
        }
    }
}

/// Sizes around the edges of tiles, vectors and blocks of depth, in all forms.
#[test]
fn products_at_the_edges_of_tiles_and_blocks() {
    for isa in available_bf16_isas() {
        for (rows, cols, depth) in [
            (1, 1, 1),
            (14, 32, 512),
            (15, 33, 513),
            (13, 16, 511),
            (2, 17, 31),
            (28, 31, 1025),
            (1, 40, 66),
        ] {
            for left in FORMS {
                for right in FORMS {
                    check_product(isa, Sizes { rows, cols, depth }, (left, right), 0);
                }
            }
        }
    }
}

/// Neither the number of threads, the forms of the operands, nor which one is the left operand changes a bit; nor do other rows and columns.
#[test]
fn the_bits_of_an_element_depend_on_its_row_and_column_alone() {
    let sizes = Sizes {
        rows: 333,
        cols: 530,
        depth: 1111,
    };
    let operands = Operands::random(sizes);
    for isa in available_bf16_isas() {
        let whole = operands.product(isa, (Form::Rows, Form::Rows), 1);
        for threads in [2, 5] {
            assert!(
                operands.product(isa, (Form::Rows, Form::Rows), threads) == whole,
                "{isa:?} {threads}"
            );
        }
        for forms in [
            (Form::Rows, Form::Transposed),
            (Form::Transposed, Form::Rows),
            (Form::Halves, Form::HalvesTransposed),
            (Form::Rows, Form::Halves),
        ] {
            assert!(operands.product(isa, forms, 3) == whole, "{isa:?} {forms:?}");
        }
        let swapped = Operands {
            sizes: Sizes {
                rows: sizes.cols,
                cols: sizes.rows,
                depth: sizes.depth,
            },
            a: transposed(&operands.b, sizes.depth, sizes.cols),
            b: transposed(&operands.a, sizes.rows, sizes.depth),
        };
        let found = swapped.product(isa, (Form::Rows, Form::Transposed), 2);
        assert!(
            transposed(&found, sizes.cols, sizes.rows) == whole,
            "{isa:?}: operands exchanged"
        );
        for rows in [1, 13, 200] {
            let part = Operands {
                sizes: Sizes { rows, ..sizes },
                a: operands.a[..rows * sizes.depth].to_vec(),
                b: operands.b.clone(),
            };
            let found = part.product(isa, (Form::Rows, Form::Transposed), 2);
            assert!(found[..] == whole[..rows * sizes.cols], "{isa:?}: {rows} rows");
        }
    }
}

/// Rounding to nearest even, of numbers halfway between two of bfloat16 and beside them, in every position of a vector.
#[test]
fn operands_are_rounded_to_nearest_even() {
    let ulp = 2f32.powi(-7);
    let cases = [
        (1.0 + 0.5 * ulp, 1.0),
        (1.0 + 1.5 * ulp, 1.0 + 2.0 * ulp),
        (1.0 + 0.51 * ulp, 1.0 + ulp),
        (-(1.0 + 0.5 * ulp), -1.0),
        (-(1.0 + 2.5 * ulp), -(1.0 + 2.0 * ulp)),
        (f32::MAX, f32::INFINITY),
        (f32::MIN_POSITIVE, f32::MIN_POSITIVE),
    ];
    for isa in available_bf16_isas() {
        for (number, expected) in cases {
            // One factor in each place of depth at a time, the others zero.
            let depth = 67;
            for place in 0..depth {
                let mut line = vec![0f32; depth];
                line[place] = number;
                let ones = vec![1f32; depth];
                for (a, b) in [(&line, &ones), (&ones, &line)] {
                    let operands = Operands {
                        sizes: Sizes {
                            rows: 1,
                            cols: 1,
                            depth,
                        },
                        a: a.clone(),
                        b: b.clone(),
                    };
                    for right in [Form::Rows, Form::Transposed] {
                        for left in [Form::Rows, Form::Transposed] {
                            assert_eq!(
                                operands.product(isa, (left, right), 1),
                                [expected],
                                "{isa:?} {number} {place}"
                            );
                        }
                    }
                }
            }
        }
    }
}

/// NaN and infinities reach their own rows and columns alone, also where depth is odd and panels are not full.
#[test]
fn numbers_that_are_not_finite_stay_in_their_rows_and_columns() {
    let sizes = Sizes {
        rows: 17,
        cols: 35,
        depth: 33,
    };
    for isa in available_bf16_isas() {
        for forms in [
            (Form::Rows, Form::Transposed),
            (Form::Transposed, Form::Rows),
            (Form::Halves, Form::Halves),
        ] {
            for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut operands = Operands {
                    sizes,
                    a: vec![1.0; sizes.rows * sizes.depth],
                    b: vec![1.0; sizes.depth * sizes.cols],
                };
                operands.a[16 * sizes.depth + 32] = value;
                operands.b[32 * sizes.cols + 34] = value;
                let found = operands.product(isa, forms, 1);
                for (at, found) in found.iter().enumerate() {
                    let is_hit = at / sizes.cols == 16 || at % sizes.cols == 34;
                    let expected = match is_hit {
                        // The product of both is positive, and at the only element that has it.
                        true if at / sizes.cols == 16 && at % sizes.cols == 34 => value * value,
                        true => value,
                        false => 33.0,
                    };
                    assert!(
                        *found == expected || found.is_nan() && expected.is_nan(),
                        "{isa:?} {forms:?} {value} at {at}: {found}"
                    );
                }
            }
        }
    }
}

/// Subnormal operands count as zero, of which the instruction leaves no choice; the smallest normal numbers do not.
#[test]
fn subnormal_operands_are_zero() {
    let sizes = Sizes {
        rows: 1,
        cols: 1,
        depth: 2,
    };
    for isa in available_bf16_isas() {
        for (number, expected) in [
            (f32::MIN_POSITIVE / 2.0, 0.0),
            (-f32::MIN_POSITIVE / 4.0, 0.0),
            (f32::MIN_POSITIVE, 1.0),
        ] {
            let operands = Operands {
                sizes,
                a: vec![number, number],
                b: vec![2f32.powi(125), 2f32.powi(125)],
            };
            for forms in [(Form::Rows, Form::Rows), (Form::Halves, Form::HalvesTransposed)] {
                // 2^-126 times 2^125, twice.
                assert_eq!(
                    operands.product(isa, forms, 1),
                    [expected],
                    "{isa:?} {number:e} {forms:?}"
                );
            }
        }
    }
}

#[test]
fn operands_and_outputs_that_are_too_short_are_an_error() {
    let sizes = Sizes {
        rows: 3,
        cols: 5,
        depth: 7,
    };
    let (a, b) = (vec![0f32; 21], vec![0f32; 35]);
    for isa in available_bf16_isas() {
        let write = |a: &[f32], b: &[f32], initial, out: usize, stride| {
            let product = Bf16Product {
                sizes,
                a: &Mat::new(a, 3, 7),
                b: &Mat::new(b, 7, 5),
                initial,
            };
            product.write(isa, &mut vec![0f32; out], stride, 1)
        };
        write(&a, &b, InitialValue::Zero, 15, 5).unwrap();
        write(&a[1..], &b, InitialValue::Zero, 15, 5).unwrap_err();
        write(&a, &b[1..], InitialValue::Zero, 15, 5).unwrap_err();
        write(&a, &b, InitialValue::Zero, 14, 5).unwrap_err();
        write(&a, &b, InitialValue::Zero, 15, 4).unwrap_err();
        write(&a, &b, InitialValue::PerRow(&[0.0; 2]), 15, 5).unwrap_err();
        let rows = [[0u8; 2]; 20];
        let product = Bf16Product {
            sizes,
            a: &Bf16Mat {
                data: &rows,
                rows: 3,
                cols: 7,
            },
            b: &Mat::new(&b, 7, 5),
            initial: InitialValue::Zero,
        };
        product.write(isa, &mut [0f32; 15], 5, 1).unwrap_err();
    }
}

/// Packs a panel of a left operand, or of a right one.
struct Pack<'a, A, B> {
    left: Option<&'a A>,
    right: Option<&'a B>,
    lines: Range<usize>,
    depth: Range<usize>,
    panel: &'a mut [u32],
}

impl<A: Bf16Left, B: Bf16Right> Bf16Kernel for Pack<'_, A, B> {
    type Output = ();

    #[inline(always)]
    fn run<S: Bf16Simd>(self) {
        let Self {
            lines, depth, panel, ..
        } = self;
        if let Some(left) = self.left {
            left.pack_pairs::<S>(lines.clone(), depth.clone(), panel);
        }
        if let Some(right) = self.right {
            right.pack_pairs::<S>(lines, depth, 2 * S::LANES, panel);
        }
    }
}

/// Whether these lines and this depth of a left operand, or of a right one, are packed.
fn is_packed(
    isa: Bf16Isa,
    (left, right): (Option<&impl Bf16Left>, Option<&impl Bf16Right>),
    (lines, depth): (Range<usize>, Range<usize>),
) -> bool {
    let mut panel = vec![0; 8 * LEFT_STRIDE];
    let pack = Pack {
        left,
        right,
        lines,
        depth,
        panel: &mut panel,
    };
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run_bf16_on(isa, pack))).is_ok()
}

/// Packing reads through raw pointers, so that it must not rely on its caller.
#[test]
fn a_panel_outside_of_its_matrix_is_not_packed() {
    let (numbers, halves) = (vec![0f32; 21], vec![[0u8; 2]; 21]);
    let (floats, short) = (Mat::new(&numbers, 3, 7), Mat::new(&numbers[1..], 3, 7));
    let stored = Bf16Mat {
        data: &halves,
        rows: 3,
        cols: 7,
    };
    let (transposed, stored_transposed) = (floats.t(), Bf16Transposed(stored));
    let (no_left, no_right) = (None::<&Mat<'_>>, None::<&Mat<'_>>);
    for isa in available_bf16_isas() {
        for (lines, depth, fits) in [(0..3, 0..7, true), (1..4, 0..7, false), (0..3, 1..8, false)] {
            let place = || (lines.clone(), depth.clone());
            let found = [
                is_packed(isa, (Some(&floats), no_right), place()),
                is_packed(isa, (Some(&stored), no_right), place()),
                is_packed(isa, (no_left, Some(&transposed)), place()),
                is_packed(isa, (no_left, Some(&stored_transposed)), place()),
            ];
            assert_eq!(found, [fits; 4], "{isa:?} {lines:?} {depth:?}");
            assert!(!is_packed(isa, (Some(&short), no_right), place()), "{isa:?}");
        }
    }
}
