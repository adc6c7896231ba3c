//! One head's columns in the rows of a tensor, and the three products that attention is made of: rows against keys
//! ([`scores`]), weighted sums of rows ([`mix`]), and their transpose ([`spread`]). They know neither mask nor forest.
//!
//! Each product has one order of addition, whatever the number of rows taken together: a score adds over the head's width
//! as [`simd::dot`](crate::simd::dot) does, bit for bit; a weighted sum takes its rows one after another by fused
//! multiply-add. Each is a function of its own (not inlined: it is called from many places, and compiled once for each
//! instruction set and number of rows).

use crate::Tensor;
use crate::matrix::{copy, transpose};
use crate::simd::{LANES, Simd, vectorized};
use std::marker::PhantomData;
use std::ops::Range;

/// Rows that are worth taking together: they share the loads of keys and values.
pub(crate) const BLOCK: usize = 4;

/// Columns of a row-major array, for reading.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Columns<'a> {
    data: &'a [f32],
    stride: usize,
    width: usize,
}

impl<'a> Columns<'a> {
    /// `width` columns from column `from` on, of rows of `stride`.
    #[inline(always)]
    pub(crate) fn new(data: &'a [f32], stride: usize, from: usize, width: usize) -> Self {
        assert!(from + width <= stride, "columns {from}..{} of {stride}", from + width);
        Self { data: &data[from.min(data.len())..], stride, width }
    }

    /// Part `part` of `parts` equal parts of a tensor's columns.
    #[inline(always)]
    pub(crate) fn part(tensor: &'a Tensor, part: usize, parts: usize) -> Self {
        let width = tensor.cols() / parts;
        Self::new(tensor.data(), tensor.cols(), part * width, width)
    }

    /// The columns of some neighbours of `all` heads that divide a tensor's columns evenly.
    #[inline(always)]
    pub(crate) fn of_heads(tensor: &'a Tensor, heads: &Range<usize>, all: usize) -> Self {
        let width = tensor.cols() / all;
        Self::new(tensor.data(), tensor.cols(), heads.start * width, heads.len() * width)
    }

    /// The rows from row `first` on.
    #[inline(always)]
    pub(crate) fn starting_at(self, first: usize) -> Self {
        Self { data: &self.data[(first * self.stride).min(self.data.len())..], ..self }
    }

    /// Row `i`.
    #[inline(always)]
    pub(crate) fn row(self, i: usize) -> &'a [f32] {
        &self.data[i * self.stride..][..self.width]
    }

    /// Part `part` of `parts` equal parts of these columns.
    #[inline(always)]
    pub(crate) fn within(self, part: usize, parts: usize) -> Self {
        let width = self.width / parts;
        Self { data: &self.data[(part * width).min(self.data.len())..], width, ..self }
    }

    /// The first `rows` rows, copied side by side into `room`: rows a power of two apart push one another out of the first cache, which
    /// costs whoever reads them often.
    #[inline(always)]
    pub(crate) fn gather(self, rows: usize, room: &mut [f32]) -> Columns<'_> {
        for (i, row) in room.chunks_exact_mut(self.width.max(1)).enumerate().take(rows) {
            copy(self.row(i), row);
        }
        Columns::new(room, self.width, 0, self.width)
    }

    /// Rows `first..first + N`.
    #[inline(always)]
    pub(crate) fn block<const N: usize>(self, first: usize) -> [&'a [f32]; N] {
        std::array::from_fn(|r| self.row(first + r))
    }
}

/// Columns of a row-major array, for writing. Others may hold its other columns at the same time.
#[derive(Debug)]
pub(crate) struct ColumnsMut<'a> {
    start: *mut f32,
    rows: usize,
    stride: usize,
    width: usize,
    lifetime: PhantomData<&'a mut [f32]>,
}

impl<'a> ColumnsMut<'a> {
    /// `width` columns from column `from` on, of rows of `stride`.
    #[inline(always)]
    pub(crate) fn new(data: &'a mut [f32], stride: usize, from: usize, width: usize) -> Self {
        assert!(from + width <= stride, "columns {from}..{} of {stride}", from + width);
        let rows = (data.len() + stride - from - width) / stride;
        // SAFETY: where there is a row, the column is there.
        let start = if rows > 0 { unsafe { data.as_mut_ptr().add(from) } } else { data.as_mut_ptr() };
        Self { start, rows, stride, width, lifetime: PhantomData }
    }

    /// Row `i`.
    #[inline(always)]
    pub(crate) fn row(&mut self, i: usize) -> &mut [f32] {
        assert!(i < self.rows, "row {i} of {}", self.rows);
        // SAFETY: the row is there, and nobody else holds these columns of it.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(i * self.stride), self.width) }
    }

    /// The rows from row `first` on.
    #[inline(always)]
    pub(crate) fn starting_at(&mut self, first: usize) -> ColumnsMut<'_> {
        let first = first.min(self.rows);
        ColumnsMut { start: self.start.wrapping_add(first * self.stride), rows: self.rows - first, ..*self }
    }

    /// Part `part` of `parts` equal parts of these columns.
    #[inline(always)]
    pub(crate) fn within(&mut self, part: usize, parts: usize) -> ColumnsMut<'_> {
        assert!(part < parts);
        let width = self.width / parts;
        ColumnsMut { start: self.start.wrapping_add(part * width), width, ..*self }
    }

    /// Sets the first `rows` rows to 0.
    #[inline(always)]
    pub(crate) fn clear(&mut self, rows: usize) {
        for i in 0..rows {
            self.row(i).fill(0.0);
        }
    }
}

/// A row-major array whose columns go to different threads.
#[derive(Clone, Copy)]
pub(crate) struct Shared<'a> {
    start: *mut f32,
    len: usize,
    stride: usize,
    lifetime: PhantomData<&'a mut [f32]>,
}

// SAFETY: it stands for a mutable borrow; `columns` demands that its parts are disjoint.
unsafe impl Send for Shared<'_> {}
unsafe impl Sync for Shared<'_> {}

impl<'a> Shared<'a> {
    /// Rows of `stride`.
    pub(crate) fn new(data: &'a mut [f32], stride: usize) -> Self {
        Self { start: data.as_mut_ptr(), len: data.len(), stride, lifetime: PhantomData }
    }

    /// Part `part` of `parts` equal parts of the columns, of rows `rows`.
    ///
    /// # Safety
    /// No element may be in two parts that live at the same time.
    pub(crate) unsafe fn columns(&self, rows: Range<usize>, part: usize, parts: usize) -> ColumnsMut<'a> {
        assert!(rows.start <= rows.end && rows.end * self.stride <= self.len && part < parts);
        let width = self.stride / parts;
        let start = self.start.wrapping_add(rows.start * self.stride + part * width);
        ColumnsMut { start, rows: rows.len(), stride: self.stride, width, lifetime: PhantomData }
    }
}

/// The first `R` runs of `len` floats.
#[inline(always)]
pub(crate) fn parts<const R: usize>(x: &[f32], len: usize) -> [&[f32]; R] {
    std::array::from_fn(|r| &x[r * len..(r + 1) * len])
}

/// The first `R` runs of `len` floats, for writing.
#[inline(always)]
pub(crate) fn parts_mut<const R: usize>(x: &mut [f32], len: usize) -> [&mut [f32]; R] {
    let mut parts = x.chunks_exact_mut(len);
    std::array::from_fn(|_| parts.next().expect("room for R parts"))
}

/// Panels that `keys` keys take.
#[inline(always)]
pub(crate) fn panels(keys: usize) -> usize {
    keys.div_ceil(LANES)
}

/// Lays the first `keys` rows of `x` out as [`scores`] reads them: panels of [`LANES`] keys, each `[width, LANES]`, the
/// last filled up with zeros.
#[inline(always)]
pub(crate) fn pack<S: Simd>(s: S, x: Columns, keys: usize, panels: &mut [f32]) {
    if x.width == 0 {
        return;
    }
    for (p, panel) in panels.chunks_exact_mut(x.width * LANES).take(keys.div_ceil(LANES)).enumerate() {
        let (panel, _) = panel.as_chunks_mut::<LANES>();
        let first = p * LANES;
        for (begin, places) in (0..x.width).step_by(LANES).zip(panel.chunks_mut(LANES)) {
            let mut block = [[0.0; LANES]; LANES];
            for (lane, block) in block.iter_mut().enumerate().take(keys - first) {
                copy(&x.row(first + lane)[begin..begin + places.len()], &mut block[..places.len()]);
            }
            transpose(s, &mut block);
            places.copy_from_slice(&block[..places.len()]);
        }
    }
}

/// `out[r][j] = queries[r] · key j` for the first `keys` keys of packed `panels`; what lies after them in `out`, up to a
/// whole panel, is overwritten with unspecified numbers.
#[inline(never)]
pub(crate) fn scores<S: Simd, const R: usize>(
    s: S,
    queries: [&[f32]; R],
    panels: &[f32],
    keys: usize,
    mut out: [&mut [f32]; R],
) {
    vectorized!(s, scores_inlined(s, queries, panels, keys, &mut out));
}

#[inline(always)]
fn scores_inlined<S: Simd, const R: usize>(
    s: S,
    queries: [&[f32]; R],
    panels: &[f32],
    keys: usize,
    out: &mut [&mut [f32]; R],
) {
    let width = queries[0].len();
    let queries = queries.map(|q| &q[..width]);
    for p in 0..keys.div_ceil(LANES) {
        let (panel, _) = panels[p * width * LANES..(p + 1) * width * LANES].as_chunks::<LANES>();
        for part in 0..LANES / S::F32_LANES {
            let total = Dots { s, queries, panel, part }.total();
            let at = p * LANES + part * S::F32_LANES;
            for r in 0..R {
                S::as_mut_simd_f32s(&mut out[r][at..at + S::F32_LANES]).0[0] = total[r];
            }
        }
    }
}

/// `R` queries against the keys in part `part` of a panel, one key in each lane of a register.
#[derive(Clone, Copy)]
struct Dots<'a, S: Simd, const R: usize> {
    s: S,
    queries: [&'a [f32]; R],
    panel: &'a [[f32; LANES]],
    part: usize,
}

impl<S: Simd, const R: usize> Dots<'_, S, R> {
    /// Lane `l` of a dot product: the sum over columns c ≡ l modulo [`LANES`].
    #[inline(always)]
    fn lane(self, l: usize) -> [S::f32s; R] {
        let s = self.s;
        let mut sum = [s.splat_f32s(0.0); R];
        let mut c = l;
        while c < self.panel.len() {
            let key = S::as_simd_f32s(&self.panel[c]).0[self.part];
            for r in 0..R {
                sum[r] = s.mul_add_f32s(s.splat_f32s(self.queries[r][c]), key, sum[r]);
            }
            c += LANES;
        }
        sum
    }

    #[inline(always)]
    fn add(self, mut a: [S::f32s; R], b: [S::f32s; R]) -> [S::f32s; R] {
        for r in 0..R {
            a[r] = self.s.add_f32s(a[r], b[r]);
        }
        a
    }

    // The lanes added by halves, depth first, so that few sums are under way at a time.
    #[inline(always)]
    fn by_8(self, l: usize) -> [S::f32s; R] {
        self.add(self.lane(l), self.lane(l + 8))
    }
    #[inline(always)]
    fn by_4(self, l: usize) -> [S::f32s; R] {
        self.add(self.by_8(l), self.by_8(l + 4))
    }
    #[inline(always)]
    fn by_2(self, l: usize) -> [S::f32s; R] {
        self.add(self.by_4(l), self.by_4(l + 2))
    }
    #[inline(always)]
    fn total(self) -> [S::f32s; R] {
        self.add(self.by_2(0), self.by_2(1))
    }
}

/// `out row (first + r) += Σ_j weights[r][j] · values row j`, j in order.
#[inline(never)]
pub(crate) fn mix<S: Simd, const R: usize>(
    s: S,
    weights: [&[f32]; R],
    values: Columns,
    out: &mut ColumnsMut,
    first: usize,
) {
    vectorized!(s, mix_inlined(s, weights, values, out, first));
}

#[inline(always)]
fn mix_inlined<S: Simd, const R: usize>(
    s: S,
    weights: [&[f32]; R],
    values: Columns,
    out: &mut ColumnsMut,
    first: usize,
) {
    let mut at = 0;
    while let Some(wide) = next_tile::<S>(out.width - at) {
        match wide {
            4 => mix_tile::<S, R, 4>(s, weights, values, out, first, at),
            2 => mix_tile::<S, R, 2>(s, weights, values, out, first, at),
            _ => mix_tile::<S, R, 1>(s, weights, values, out, first, at),
        }
        at += wide * S::F32_LANES;
    }
    if at < out.width {
        let mut sum = [s.splat_f32s(0.0); R];
        for (r, sum) in sum.iter_mut().enumerate() {
            *sum = s.partial_load_f32s(&out.row(first + r)[at..]);
        }
        for j in 0..weights[0].len() {
            let value = s.partial_load_f32s(&values.row(j)[at..out.width]);
            for r in 0..R {
                sum[r] = s.mul_add_f32s(s.splat_f32s(weights[r][j]), value, sum[r]);
            }
        }
        for (r, sum) in sum.into_iter().enumerate() {
            s.partial_store_f32s(&mut out.row(first + r)[at..], sum);
        }
    }
}

/// Registers side by side in the next tile of columns: as many accumulators as an instruction set has room for.
#[inline(always)]
fn next_tile<S: Simd>(columns: usize) -> Option<usize> {
    let most = if S::REGISTER_COUNT >= 32 { 4 } else { 2 };
    [4, 2, 1].into_iter().find(|&n| n <= most && n * S::F32_LANES <= columns)
}

#[inline(always)]
fn mix_tile<S: Simd, const R: usize, const C: usize>(
    s: S,
    weights: [&[f32]; R],
    values: Columns,
    out: &mut ColumnsMut,
    first: usize,
    at: usize,
) {
    let to = at + C * S::F32_LANES;
    let n = weights[0].len();
    let weights = weights.map(|w| &w[..n]);
    let mut sum = [[s.splat_f32s(0.0); C]; R];
    for (r, sum) in sum.iter_mut().enumerate() {
        sum.copy_from_slice(&S::as_simd_f32s(&out.row(first + r)[at..to]).0[..C]);
    }
    for j in 0..n {
        let value = &S::as_simd_f32s(&values.data[j * values.stride + at..][..C * S::F32_LANES]).0[..C];
        for r in 0..R {
            let weight = s.splat_f32s(weights[r][j]);
            for c in 0..C {
                sum[r][c] = s.mul_add_f32s(weight, value[c], sum[r][c]);
            }
        }
    }
    for (r, sum) in sum.iter().enumerate() {
        S::as_mut_simd_f32s(&mut out.row(first + r)[at..to]).0[..C].copy_from_slice(sum);
    }
}

/// `out row j += Σ_r weights[r][j] · x[r]`, r in order, for all j of `weights`.
#[inline(never)]
pub(crate) fn spread<S: Simd, const R: usize>(s: S, weights: [&[f32]; R], x: [&[f32]; R], out: &mut ColumnsMut) {
    vectorized!(s, spread_inlined(s, weights, x, out));
}

#[inline(always)]
fn spread_inlined<S: Simd, const R: usize>(s: S, weights: [&[f32]; R], x: [&[f32]; R], out: &mut ColumnsMut) {
    let mut at = 0;
    while let Some(wide) = next_tile::<S>(out.width - at) {
        match wide {
            4 => spread_tile::<S, R, 4>(s, weights, x, out, at),
            2 => spread_tile::<S, R, 2>(s, weights, x, out, at),
            _ => spread_tile::<S, R, 1>(s, weights, x, out, at),
        }
        at += wide * S::F32_LANES;
    }
    if at < out.width {
        let mut tail = [s.splat_f32s(0.0); R];
        for (tail, x) in tail.iter_mut().zip(x) {
            *tail = s.partial_load_f32s(&x[at..out.width]);
        }
        for j in 0..weights[0].len() {
            let place = &mut out.row(j)[at..];
            let mut sum = s.partial_load_f32s(place);
            for r in 0..R {
                sum = s.mul_add_f32s(s.splat_f32s(weights[r][j]), tail[r], sum);
            }
            s.partial_store_f32s(place, sum);
        }
    }
}

#[inline(always)]
fn spread_tile<S: Simd, const R: usize, const C: usize>(
    s: S,
    weights: [&[f32]; R],
    x: [&[f32]; R],
    out: &mut ColumnsMut,
    at: usize,
) {
    let width = C * S::F32_LANES;
    let n = weights[0].len();
    let weights = weights.map(|w| &w[..n]);
    let mut tile = [[s.splat_f32s(0.0); C]; R];
    for (tile, x) in tile.iter_mut().zip(x) {
        tile.copy_from_slice(&S::as_simd_f32s(&x[at..at + width]).0[..C]);
    }
    for j in 0..n {
        let place = &mut S::as_mut_simd_f32s(&mut out.row(j)[at..at + width]).0[..C];
        for c in 0..C {
            let mut sum = place[c];
            for r in 0..R {
                sum = s.mul_add_f32s(s.splat_f32s(weights[r][j]), tile[r][c], sum);
            }
            place[c] = sum;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oracle::random;
    use crate::simd::{dispatch, dot};
    use proptest::prelude::*;

    fn bits(x: &[f32]) -> Vec<u32> {
        x.iter().map(|x| x.to_bits()).collect()
    }

    fn scores_bits<const R: usize>(q: &Tensor, k: &Tensor, packed: &[f32]) -> Vec<Vec<u32>> {
        let keys = k.rows();
        let mut out = vec![vec![0.0; panels(keys) * LANES]; R];
        let queries = Columns::part(q, 0, 1).block::<R>(0);
        let outs: &mut [_; R] = (&mut out[..]).try_into().expect("R of them");
        dispatch!(|s| scores(s, queries, packed, keys, outs.each_mut().map(|o| &mut o[..])));
        out.iter().map(|o| bits(&o[..keys])).collect()
    }

    proptest! {
        #[test]
        fn a_score_is_a_dot_product(seed: u64, keys in 1usize..40, width in 1usize..70) {
            let (q, k) = (random(seed, &[4, width]), random(!seed, &[keys, width]));
            let mut packed = vec![f32::NAN; panels(keys) * LANES * width];
            dispatch!(|s| pack(s, Columns::part(&k, 0, 1), keys, &mut packed));
            let plain: Vec<Vec<u32>> = (0..4)
                .map(|r| (0..keys).map(|j| dispatch!(|s| dot(s, q.row(r), k.row(j))).to_bits()).collect())
                .collect();
            prop_assert_eq!(&scores_bits::<4>(&q, &k, &packed)[..], &plain[..]);
            prop_assert_eq!(&scores_bits::<1>(&q, &k, &packed)[..], &plain[..1]);
        }

        /// Both products are chains of fused multiply-adds, written out here, in columns 1.. of wider arrays.
        #[test]
        fn sums_run_in_order(seed: u64, n in 0usize..20, width in 1usize..150) {
            let (w, x) = (random(seed, &[4, n]), random(!seed, &[n.max(4), width + 1]));
            let start = random(seed ^ 1, &[n.max(4), width + 2]);
            let weights = Columns::part(&w, 0, 1).block::<4>(0);

            let mut mixed = start.clone();
            let values = Columns::new(x.data(), width + 1, 1, width);
            let mut out = ColumnsMut::new(mixed.data_mut(), width + 2, 2, width);
            dispatch!(|s| mix(s, weights, values, &mut out, 0));
            let mut plain = start.clone();
            for (r, weights) in weights.iter().enumerate() {
                for (j, weight) in weights.iter().enumerate() {
                    for c in 0..width {
                        let place = &mut plain.row_mut(r)[2 + c];
                        *place = weight.mul_add(x.row(j)[1 + c], *place);
                    }
                }
            }
            prop_assert_eq!(bits(mixed.data()), bits(plain.data()));

            let mut spreaded = start.clone();
            let mut out = ColumnsMut::new(spreaded.data_mut(), width + 2, 2, width);
            dispatch!(|s| spread(s, weights, values.block::<4>(0), &mut out));
            let mut plain = start;
            for j in 0..n {
                for (r, weights) in weights.iter().enumerate() {
                    for c in 0..width {
                        let place = &mut plain.row_mut(j)[2 + c];
                        *place = weights[j].mul_add(x.row(r)[1 + c], *place);
                    }
                }
            }
            prop_assert_eq!(bits(spreaded.data()), bits(plain.data()));
        }
    }
}
