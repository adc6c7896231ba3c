//! Products of strided matrices: the one door to the `gemm` crate, with the rules that keep bits free of company and threads.
//! It knows no operation; [`crate::linear`], [`crate::experts`] and [`crate::head`] stand on it.
//!
//! What the rules rest on, read in gemm's source and held by the tests here: an element is one accumulator that runs over the
//! inner dimension in order, so tiling of rows and columns and the number of threads leave no trace in it. Three things
//! would: a single row (another kernel; padded to two here), an inner dimension past 512 (cut by a rule that looks at the
//! number of rows; cut here, always at 512), and a single column (another kernel; computed here).

use gemm::Parallelism;

/// The longest run over the inner dimension that gemm accumulates in one piece whatever the other two dimensions.
const DEPTH: usize = 512;

/// A matrix in someone else's memory, as it lies or transposed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix<'a> {
    data: &'a [f32],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a> Matrix<'a> {
    /// `data` as `[rows, cols]`, row-major without gaps.
    pub(crate) fn new(data: &'a [f32], rows: usize, cols: usize) -> Self {
        assert_eq!(data.len(), rows * cols, "{rows} rows of {cols}");
        Self { data, rows, cols, row_stride: cols, col_stride: 1 }
    }

    /// The columns `from..to`.
    pub(crate) fn columns(self, from: usize, to: usize) -> Self {
        assert!(from <= to && to <= self.cols, "columns {from}..{to} of {}", self.cols);
        let start = (from * self.col_stride).min(self.data.len());
        Self { data: &self.data[start..], cols: to - from, ..self }
    }

    /// Rows as columns.
    pub(crate) fn transposed(self) -> Self {
        Self { rows: self.cols, cols: self.rows, row_stride: self.col_stride, col_stride: self.row_stride, ..self }
    }

    /// The run `from..to` of the inner dimension, seen from the left factor.
    fn depth(self, from: usize, to: usize) -> Self {
        self.columns(from, to)
    }

    /// One past the last element that a product reads.
    fn extent(&self) -> usize {
        if self.rows == 0 || self.cols == 0 {
            0
        } else {
            (self.rows - 1) * self.row_stride + (self.cols - 1) * self.col_stride + 1
        }
    }
}

/// Whether a product replaces what stands in its output or is added to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Write {
    /// out = a · b.
    Over,
    /// out += a · b.
    Add,
}

/// `out[m, n] = a[m, k] · b[k, n]`, or `+=`; rows of `out` lie `out_stride` ≥ n apart.
pub(crate) fn multiply(a: Matrix, b: Matrix, write: Write, out: &mut [f32], out_stride: usize) {
    let (m, n, k) = (a.rows, b.cols, a.cols);
    assert_eq!(k, b.rows, "inner dimensions differ");
    if m == 0 || n == 0 {
        return;
    }
    assert!(out_stride >= n && out.len() >= (m - 1) * out_stride + n, "the output holds {m} rows of {n}");
    if m == 1 {
        let mut two = vec![0.0; 2 * n];
        two[..n].copy_from_slice(&out[..n]);
        let twice = Matrix { rows: 2, row_stride: 0, ..a };
        multiply(twice, b, write, &mut two, n);
        out[..n].copy_from_slice(&two[..n]);
        return;
    }
    if n == 1 {
        return single_column(a, b, write, out, out_stride);
    }
    if k == 0 && write == Write::Over {
        out.chunks_mut(out_stride).take(m).for_each(|row| row[..n].fill(0.0));
    }
    let mut from = 0;
    while from < k {
        let to = k.min(from + DEPTH);
        let add = from > 0 || write == Write::Add;
        call(a.depth(from, to), b.transposed().depth(from, to).transposed(), add, out, out_stride);
        from = to;
    }
}

fn call(a: Matrix, b: Matrix, add: bool, out: &mut [f32], out_stride: usize) {
    assert!(a.extent() <= a.data.len() && b.extent() <= b.data.len(), "a factor lies within its memory");
    let threads = if rayon::current_num_threads() == 1 { Parallelism::None } else { Parallelism::Rayon(0) };
    // SAFETY: the shapes agree and every element of the factors lies in their slices (asserted above); `multiply` asserted
    // the same of the output, which is borrowed mutably and so overlaps neither.
    unsafe {
        gemm::gemm(
            a.rows,
            b.cols,
            a.cols,
            out.as_mut_ptr(),
            1,
            out_stride as isize,
            add,
            a.data.as_ptr(),
            a.col_stride as isize,
            a.row_stride as isize,
            b.data.as_ptr(),
            b.col_stride as isize,
            b.row_stride as isize,
            1.0,
            1.0,
            false,
            false,
            false,
            threads,
        );
    }
}

/// A column alone: each row its own dot product, in order.
fn single_column(a: Matrix, b: Matrix, write: Write, out: &mut [f32], out_stride: usize) {
    for i in 0..a.rows {
        let row = &a.data[i * a.row_stride..];
        let mut sum = if write == Write::Add { out[i * out_stride] } else { 0.0 };
        for j in 0..a.cols {
            sum += row[j * a.col_stride] * b.data[j * b.row_stride];
        }
        out[i * out_stride] = sum;
    }
}

/// The same product, one element at a time in float64: what [`multiply`] is tested against.
#[cfg(test)]
pub(crate) mod plain {
    use super::{Matrix, Write};

    pub(crate) fn multiply(a: Matrix, b: Matrix, write: Write, out: &mut [f32], out_stride: usize) {
        for i in 0..a.rows {
            for j in 0..b.cols {
                let term = |l: usize| {
                    let (a, b) =
                        (a.data[i * a.row_stride + l * a.col_stride], b.data[l * b.row_stride + j * b.col_stride]);
                    f64::from(a) * f64::from(b)
                };
                let o = &mut out[i * out_stride + j];
                let start = if write == Write::Add { f64::from(*o) } else { 0.0 };
                *o = (0..a.cols).map(term).fold(start, |sum, x| sum + x) as f32;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{oracle, threads::Pool};
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn equals_the_plain_product(
            m in 0usize..40, n in 0usize..40, k in prop_oneof![0usize..40, 500usize..530], gap in 0usize..3,
            at in any::<bool>(), bt in any::<bool>(), add in any::<bool>(),
        ) {
            let (a, b) = (oracle::random(1, &[m * k]), oracle::random(2, &[k * n]));
            let a = if at { Matrix::new(a.data(), k, m).transposed() } else { Matrix::new(a.data(), m, k) };
            let b = if bt { Matrix::new(b.data(), n, k).transposed() } else { Matrix::new(b.data(), k, n) };
            let write = if add { Write::Add } else { Write::Over };
            let stride = n + gap;
            let mut fast = oracle::random(3, &[m * stride]).data().to_vec();
            let mut slow = fast.clone();
            multiply(a, b, write, &mut fast, stride);
            plain::multiply(a, b, write, &mut slow, stride);
            oracle::assert_close(&fast, &slow, 1e-5, 3e-5);
        }
    }

    #[test]
    fn a_tile_of_columns_is_a_tile_of_the_product() {
        let (a, b) = (oracle::random(1, &[5, 7]), oracle::random(2, &[7, 20]));
        let (a, b) = (Matrix::new(a.data(), 5, 7), Matrix::new(b.data(), 7, 20));
        let mut whole = vec![0.0; 5 * 20];
        multiply(a, b, Write::Over, &mut whole, 20);
        let mut tile = vec![0.0; 5 * 6];
        multiply(a, b.columns(11, 17), Write::Over, &mut tile, 6);
        for i in 0..5 {
            assert_eq!(tile[i * 6..(i + 1) * 6], whole[i * 20 + 11..i * 20 + 17]);
        }
    }

    /// Rows of x[T, k] · w[k, n] have the bits they have in any company, on any number of threads.
    #[test]
    fn bits_do_not_depend_on_company_or_threads() {
        for (k, n) in [(1, 3), (2, 64), (7, 1), (32, 14), (64, 65), (200, 96), (513, 40), (600, 300), (1100, 17)] {
            let (x, w) = (oracle::random(1, &[130, k]), oracle::random(2, &[k, n]));
            let product = |rows: std::ops::Range<usize>, threads: usize| {
                let mut out = vec![f32::NAN; rows.len() * n];
                let a = Matrix::new(&x.data()[rows.start * k..rows.end * k], rows.len(), k);
                let run = || multiply(a, Matrix::new(w.data(), k, n), Write::Over, &mut out, n);
                Pool::new(threads).expect("threads").run(run);
                out
            };
            let whole = product(0..130, 1);
            assert_eq!(whole, product(0..130, 2), "threads, k {k}, n {n}");
            for rows in [1, 2, 3, 17, 64, 65] {
                for start in [0, 1, 50] {
                    let part = product(start..start + rows, 1);
                    assert_eq!(part, whole[start * n..(start + rows) * n], "{rows} rows at {start}, k {k}, n {n}");
                }
            }
        }
    }
}
