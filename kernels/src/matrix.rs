//! Products of matrices, the one place where numbers meet in bulk; it knows no operation. [`crate::linear`],
//! [`crate::experts`], [`crate::lightning`] and [`crate::head`] stand on it.
//!
//! Bits depend neither on company nor on threads: a sum runs over the inner dimension in order, by fused multiply-adds, in
//! pieces of `lanes::DEPTH` lanes that are added to the output one after another. Tiles, panels and threads cut rows
//! and columns only, and leave no trace in it; so a row alone has the bits that it has among others.
//!
//! In [`Dtype::Bf16`] both factors are rounded to bf16 as they are laid out (or were before, [`Matrix::with_pairs`]), their products
//! are exact, and sums are f32. Where the processor lacks AVX512-BF16 the product is the f32 one.

mod lanes;
mod tile;

pub(crate) use lanes::{copy, pair};

use crate::scratch;
use crate::simd::{Simd, dispatch};
use crate::tensor::Dtype;
use lanes::{F32, Lanes};

/// Swaps the rows and columns of a block.
#[inline(always)]
pub(crate) fn transpose<S: Simd>(s: S, block: &mut [[f32; 16]; 16]) {
    F32(s).transpose(block);
}

/// Multiply-adds below which a product is not worth splitting over threads.
const WORTH_SPLITTING: usize = 128 * 1024;

/// A matrix in someone else's memory, as it lies or transposed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix<'a> {
    data: &'a [f32],
    /// The same elements rounded, two lines in one: `[lines / 2, width]`.
    pairs: Option<&'a [u32]>,
    /// Which lines of `data`, where not all in order.
    picked: Option<&'a [u32]>,
    /// Stored lines, and elements of each.
    lines: usize,
    width: usize,
    stride: usize,
    /// Lines are columns.
    transposed: bool,
}

impl<'a> Matrix<'a> {
    /// `data` as `[rows, cols]`, row-major without gaps.
    pub(crate) fn new(data: &'a [f32], rows: usize, cols: usize) -> Self {
        assert_eq!(data.len(), rows * cols, "{rows} rows of {cols}");
        Self::strided(data, rows, cols, cols)
    }

    /// `rows` rows of `cols` elements, `stride` apart.
    pub(crate) fn strided(data: &'a [f32], rows: usize, cols: usize, stride: usize) -> Self {
        assert!(rows == 0 || data.len() >= (rows - 1) * stride + cols, "{rows} rows of {cols}, {stride} apart");
        Self { data, pairs: None, picked: None, lines: rows, width: cols, stride, transposed: false }
    }

    /// The rows `picked` of this matrix, in that order.
    pub(crate) fn picking(self, picked: &'a [u32]) -> Self {
        assert!(!self.transposed && self.picked.is_none(), "rows as they lie are picked");
        Self { picked: Some(picked), pairs: None, lines: picked.len(), ..self }
    }

    /// With the elements already rounded: each two rows as one of pairs.
    pub(crate) fn with_pairs(self, pairs: Option<&'a [u32]>) -> Self {
        assert!(!self.transposed && self.picked.is_none(), "pairs are of rows as they lie");
        assert!(pairs.is_none_or(|p| p.len() == self.lines.div_ceil(2) * self.stride), "two rows a row of pairs");
        Self { pairs, ..self }
    }

    /// The columns `from..to`.
    pub(crate) fn columns(self, from: usize, to: usize) -> Self {
        assert!(from <= to && to <= self.cols(), "columns {from}..{to} of {}", self.cols());
        if self.transposed { self.some_lines(from, to) } else { self.within_lines(from, to) }
    }

    /// The rows `from..to`.
    pub(crate) fn row_range(self, from: usize, to: usize) -> Self {
        assert!(from <= to && to <= self.rows(), "rows {from}..{to} of {}", self.rows());
        if self.transposed { self.within_lines(from, to) } else { self.some_lines(from, to) }
    }

    fn within_lines(self, from: usize, to: usize) -> Self {
        let pairs = self.pairs.map(|pairs| &pairs[from.min(pairs.len())..]);
        Self { data: &self.data[from.min(self.data.len())..], pairs, width: to - from, ..self }
    }

    fn some_lines(self, from: usize, to: usize) -> Self {
        match self.picked {
            Some(picked) => Self { picked: Some(&picked[from..to]), lines: to - from, ..self },
            None => {
                let start = (from * self.stride).min(self.data.len());
                // A run of lines from an odd one on has no pairs of its own.
                let pairs =
                    self.pairs.filter(|_| from.is_multiple_of(2)).map(|pairs| &pairs[(start / 2).min(pairs.len())..]);
                Self { data: &self.data[start..], pairs, lines: to - from, ..self }
            }
        }
    }

    /// Rows as columns.
    pub(crate) fn transposed(self) -> Self {
        Self { transposed: !self.transposed, ..self }
    }

    pub(crate) fn rows(&self) -> usize {
        if self.transposed { self.width } else { self.lines }
    }

    pub(crate) fn cols(&self) -> usize {
        if self.transposed { self.lines } else { self.width }
    }

    /// A stored line.
    #[inline(always)]
    fn line(&self, i: usize) -> &'a [f32] {
        let i = self.picked.map_or(i, |picked| picked[i] as usize);
        &self.data[i * self.stride..][..self.width]
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

/// `out[m, n] = a[m, k] · b[k, n]`, or `+=`, in f32; rows of `out` lie `out_stride` ≥ n apart.
pub(crate) fn multiply(a: Matrix, b: Matrix, write: Write, out: &mut [f32], out_stride: usize) {
    multiply_in(Dtype::F32, a, b, write, out, out_stride);
}

/// The same in `dtype`.
pub(crate) fn multiply_in(dtype: Dtype, a: Matrix, b: Matrix, write: Write, out: &mut [f32], out_stride: usize) {
    let out = Out::new(a, b, out, out_stride);
    split(dtype, a, b, write, out, rayon::current_num_threads());
}

/// The same on this thread alone: for parts of work that is split already.
pub(crate) fn multiply_here(dtype: Dtype, a: Matrix, b: Matrix, write: Write, out: &mut [f32], out_stride: usize) {
    let out = Out::new(a, b, out, out_stride);
    run(dtype, a, b, write, out);
}

/// Whether products of bf16 run here: where the processor has AVX512-BF16.
pub fn bf16_available() -> bool {
    #[cfg(target_arch = "x86_64")]
    return matches!(pulp::Arch::new(), pulp::Arch::V4(_)) && std::arch::is_x86_feature_detected!("avx512bf16");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Some rows and columns of an output; of two parts none holds an element of the other.
struct Out<'a> {
    start: *mut f32,
    rows: usize,
    columns: usize,
    stride: usize,
    lifetime: std::marker::PhantomData<&'a mut [f32]>,
}

// SAFETY: it is a mutable borrow of its elements, which no other part holds.
unsafe impl Send for Out<'_> {}

impl<'a> Out<'a> {
    fn new(a: Matrix, b: Matrix, out: &'a mut [f32], stride: usize) -> Self {
        let (rows, columns) = (a.rows(), b.cols());
        assert_eq!(a.cols(), b.rows(), "inner dimensions differ");
        let held = rows == 0 || columns == 0 || (stride >= columns && out.len() >= (rows - 1) * stride + columns);
        assert!(held, "the output holds {rows} rows of {columns}");
        Self { start: out.as_mut_ptr(), rows, columns, stride, lifetime: std::marker::PhantomData }
    }

    #[inline(always)]
    fn row(&mut self, i: usize) -> &mut [f32] {
        assert!(i < self.rows);
        // SAFETY: `new` asserted that the row lies in the slice, and `split_*` gave each element to one part alone.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(i * self.stride), self.columns) }
    }

    fn split_rows(self, at: usize) -> (Self, Self) {
        assert!(at < self.rows);
        // SAFETY: the row is there.
        let start = unsafe { self.start.add(at * self.stride) };
        (Self { rows: at, ..self }, Self { start, rows: self.rows - at, ..self })
    }

    fn split_columns(self, at: usize) -> (Self, Self) {
        assert!(at < self.columns);
        // SAFETY: the column is there.
        let start = unsafe { self.start.add(at) };
        (Self { columns: at, ..self }, Self { start, columns: self.columns - at, ..self })
    }
}

/// Cuts the longer side until each thread has a part.
fn split(dtype: Dtype, a: Matrix, b: Matrix, write: Write, out: Out, threads: usize) {
    let (rows, columns) = (out.rows, out.columns);
    if threads <= 1 || rows * columns * a.cols() < WORTH_SPLITTING {
        return run(dtype, a, b, write, out);
    }
    let (first, second) = (threads / 2, threads - threads / 2);
    if rows >= columns.min(64) {
        let at = rows * first / threads;
        let (left, right) = out.split_rows(at);
        rayon::join(
            || split(dtype, a.row_range(0, at), b, write, left, first),
            || split(dtype, a.row_range(at, rows), b, write, right, second),
        );
    } else {
        let at = (columns * first / threads).next_multiple_of(32).min(columns - 1);
        let (left, right) = out.split_columns(at);
        rayon::join(
            || split(dtype, a, b.columns(0, at), write, left, first),
            || split(dtype, a, b.columns(at, columns), write, right, second),
        );
    }
}

fn run(dtype: Dtype, a: Matrix, b: Matrix, write: Write, mut out: Out) {
    if out.rows == 0 || out.columns == 0 {
        return;
    }
    scratch::with(tile::memory(a, b), |memory| {
        #[cfg(target_arch = "x86_64")]
        if dtype == Dtype::Bf16 && bf16_available() {
            let once = crate::simd::Once;
            return lanes::with_bf16(
                #[inline(always)]
                |k| {
                    let _once = once;
                    tile::product(k, a, b, write, &mut out, memory);
                },
            );
        }
        dispatch!(|s| tile::product(F32(s), a, b, write, &mut out, memory));
    });
}

/// The same product, one element at a time in float64: what [`multiply`] is tested against.
#[cfg(test)]
pub(crate) mod plain {
    use super::{Matrix, Write, lanes::to_bf16};
    use crate::Dtype;

    /// What a product in `dtype` multiplies in the place of `x`.
    pub(crate) fn rounded(dtype: Dtype, x: f32) -> f32 {
        if dtype == Dtype::Bf16 && super::bf16_available() { f32::from_bits(to_bf16(x) << 16) } else { x }
    }

    pub(crate) fn multiply(dtype: Dtype, a: Matrix, b: Matrix, write: Write, out: &mut [f32], out_stride: usize) {
        let at = |m: Matrix, i: usize, j: usize| {
            let (line, place) = if m.transposed { (j, i) } else { (i, j) };
            f64::from(rounded(dtype, m.line(line)[place]))
        };
        for i in 0..a.rows() {
            for j in 0..b.cols() {
                let o = &mut out[i * out_stride + j];
                let start = if write == Write::Add { f64::from(*o) } else { 0.0 };
                *o = (0..a.cols()).map(|l| at(a, i, l) * at(b, l, j)).fold(start, |sum, x| sum + x) as f32;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Tensor, oracle, threads::Pool};
    use proptest::prelude::*;

    fn dtypes() -> impl Strategy<Value = Dtype> {
        prop_oneof![Just(Dtype::F32), Just(Dtype::Bf16)]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(96))]
        /// Odd sizes, both layouts of both factors, gaps between rows, picked rows. Products of bf16 are exact: only sums err.
        #[test]
        fn equals_the_plain_product(
            dtype in dtypes(), m in 0usize..40, n in 0usize..70, k in prop_oneof![0usize..40, 500usize..530, 1020usize..1030],
            gap in 0usize..3, at in any::<bool>(), bt in any::<bool>(), add in any::<bool>(), pick in any::<bool>(),
        ) {
            let (a, b) = (oracle::random(1, &[(m + 1) * (k + 1)]), oracle::random(2, &[k * n]));
            let picked: Vec<u32> = (0..if at { k } else { m }).map(|i| (i * 7 % if at { k } else { m }) as u32).collect();
            let a = if at { Matrix::strided(a.data(), k, m, m + 1) } else { Matrix::strided(a.data(), m, k, k + 1) };
            let a = if pick { a.picking(&picked) } else { a };
            let a = if at { a.transposed() } else { a };
            let b = if bt { Matrix::new(b.data(), n, k).transposed() } else { Matrix::new(b.data(), k, n) };
            let write = if add { Write::Add } else { Write::Over };
            let stride = n + gap;
            let mut fast = oracle::random(3, &[m * stride]).data().to_vec();
            let mut slow = fast.clone();
            multiply_in(dtype, a, b, write, &mut fast, stride);
            plain::multiply(dtype, a, b, write, &mut slow, stride);
            oracle::assert_close(&fast, &slow, 1e-5, 5e-5);
        }

        #[test]
        fn pairs_change_no_bit(m in 1usize..30, n in 1usize..70, k in prop_oneof![1usize..40, 1020usize..1030]) {
            let (a, mut b) = (oracle::random(1, &[m * k]), oracle::random(2, &[k, n]));
            let product = |b: &Tensor| {
                let mut out = vec![0.0; m * n];
                let right = Matrix::new(b.data(), k, n).with_pairs(b.pairs_of(0));
                multiply_in(Dtype::Bf16, Matrix::new(a.data(), m, k), right, Write::Over, &mut out, n);
                out
            };
            b.set_dtype(Dtype::Bf16);
            let without = product(&b);
            b.round();
            prop_assert_eq!(b.pairs_of(0).is_some(), bf16_available());
            prop_assert_eq!(without, product(&b));
        }
    }

    /// AVX-512, AVX2 and none of them: the sums are the same, in the same order.
    #[test]
    fn every_instruction_set_gives_the_same_bits() {
        fn on<S: Simd>(s: S, a: Matrix, b: Matrix) -> Vec<f32> {
            let mut out = vec![0.5; a.rows() * b.cols()];
            let stride = b.cols();
            let mut part = Out::new(a, b, &mut out, stride);
            tile::product(F32(s), a, b, Write::Add, &mut part, &mut vec![f32::NAN; tile::memory(a, b)]);
            out
        }
        for (m, k, n) in [(1, 40, 33), (8, 20, 70), (13, 530, 5), (50, 17, 300)] {
            let (a, b) = (oracle::random(1, &[m * k]), oracle::random(2, &[k * n]));
            let as_it_lies = (Matrix::new(a.data(), m, k), Matrix::new(b.data(), k, n));
            let turned = (Matrix::new(a.data(), k, m).transposed(), Matrix::new(b.data(), n, k).transposed());
            for (a, b) in [as_it_lies, turned] {
                let plain = on(pulp::Scalar::new(), a, b);
                assert_eq!(dispatch!(|s| on(s, a, b)), plain, "{m} {k} {n}");
                #[cfg(target_arch = "x86_64")]
                if let Some(v3) = pulp::x86::V3::try_new() {
                    assert_eq!(on(v3, a, b), plain, "AVX2, {m} {k} {n}");
                }
            }
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

    /// Rows of x[T, k] · w[k, n] have the bits they have in any company, on any number of threads; weights' gradients too.
    #[test]
    fn bits_do_not_depend_on_company_or_threads() {
        for dtype in [Dtype::F32, Dtype::Bf16] {
            for (k, n) in [(1, 3), (2, 64), (7, 1), (32, 14), (64, 65), (200, 96), (513, 40), (600, 300), (1100, 17)] {
                let (x, mut w) = (oracle::random(1, &[130, k]), oracle::random(2, &[k, n]));
                w.set_dtype(dtype);
                w.round();
                let right = Matrix::new(w.data(), k, n).with_pairs(w.pairs_of(0));
                let product = |rows: std::ops::Range<usize>, threads: usize| {
                    let mut out = vec![f32::NAN; rows.len() * n];
                    let a = Matrix::new(&x.data()[rows.start * k..rows.end * k], rows.len(), k);
                    Pool::new(threads).expect("threads").run(|| multiply_in(dtype, a, right, Write::Over, &mut out, n));
                    out
                };
                let whole = product(0..130, 1);
                for rows in [1, 2, 3, 8, 9, 17, 64, 65, 130] {
                    for (start, threads) in [(0, 1), (1, 2), (50, 3)] {
                        let start = start.min(130 - rows);
                        let part = product(start..start + rows, threads);
                        assert_eq!(part, whole[start * n..(start + rows) * n], "{rows} rows at {start}, k {k}, n {n}");
                    }
                }
                let gradient = |threads: usize| {
                    let mut out = vec![1.0; k * n];
                    let (x, d) = (Matrix::new(x.data(), 130, k), Matrix::new(&whole, 130, n));
                    let run = || multiply_in(dtype, x.transposed(), d, Write::Add, &mut out, n);
                    Pool::new(threads).expect("threads").run(run);
                    out
                };
                assert_eq!(gradient(1), gradient(3));
            }
        }
    }
}
