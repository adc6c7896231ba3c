//! Lightning attention over a forest (MiniMax-01, arXiv:2501.08313): o_t = q_tᵀ KV_t, KV_t = e^{-s} KV_{t-1} + k_t v_tᵀ per head,
//! computed in chunks of `block` tokens counted from each segment's start (a segment boundary is a chunk boundary; a
//! segment starts from its parent's final state). No scale, no denominator. Decoding with a [`State`] equals [`forward`] bit for bit
//! where segmentation is equal: a row reads the state of its chunk's start and the keys and values since.
//!
//! With i, j counted from 0 in a chunk of m rows that starts from KV:
//!
//! - o_i = e^{-s(i+1)} q_iᵀ KV + Σ_{j≤i} e^{-s(i-j)} (q_i·k_j) v_j, added in this order;
//! - KV' = e^{-s m} KV + Σ_j e^{-s(m-1-j)} k_j v_jᵀ, likewise: the true recurrent state, ready for decoding.
//!
//! No exponent is ever positive, so nothing overflows however strong the decay or long the sequence. Cost is linear in length.

use crate::blocks::Rows;
use crate::columns::{BLOCK, Columns, ColumnsMut, mix, pack, panels, parts, parts_mut, scores, spread};
use crate::forest::Span;
use crate::matrix::copy;
use crate::simd::{LANES, Simd, dispatch, dot, exp, map, update};
use crate::trees::for_head_groups;
use crate::{Forest, Tensor, scratch};
use std::ops::Range;

pub mod plain;
#[cfg(test)]
mod tests;

/// Shape of the attention: `q, k, v [T, heads · d]`, one decay rate a head.
#[derive(Clone, Debug, PartialEq)]
pub struct Heads {
    /// Width of a head.
    pub head_dim: usize,
    /// s > 0 a head: a step multiplies the state by e^{-s}. Its length is the number of heads.
    pub slopes: Vec<f32>,
    /// Tokens a chunk, at least 1.
    pub block: usize,
}

impl Heads {
    fn heads(&self) -> usize {
        self.slopes.len()
    }

    /// Floats in one head's state.
    fn square(&self) -> usize {
        self.head_dim * self.head_dim
    }

    /// Panics on shapes that do not fit: a programmer's error.
    #[track_caller]
    fn check(&self, forest: &Forest, q: &Tensor, k: &Tensor, v: &Tensor) {
        assert!(self.block > 0, "a chunk has a token");
        for x in [q, k, v] {
            let shape = [forest.rows(), self.heads() * self.head_dim];
            assert_eq!(x.shape(), shape, "queries, keys and values are rows of the forest");
        }
    }
}

/// What decoding keeps: the state `[heads, d, d]` at the last chunk boundary, and keys and values since (row-major
/// `[n, heads · d]`, n ≤ block).
#[derive(Clone, Debug, Default)]
pub struct State {
    /// KV at the last chunk boundary, f32.
    pub kv: Vec<f32>,
    /// Keys since.
    pub keys: Vec<f32>,
    /// Values since.
    pub values: Vec<f32>,
}

impl State {
    /// The state before the first token.
    pub fn empty(shape: &Heads) -> Self {
        Self { kv: vec![0.0; shape.heads() * shape.square()], keys: Vec::new(), values: Vec::new() }
    }

    /// Folds the open chunk into the state, as a segment's end does; call it before a child segment starts.
    pub fn close(&mut self, shape: &Heads) {
        let (d, width) = (shape.head_dim, shape.heads() * shape.head_dim);
        let rows = self.keys.len() / width.max(1);
        if rows > 0 {
            let decays = Decays::new(shape, rows);
            for (head, kv) in self.kv.chunks_exact_mut(shape.square()).enumerate() {
                let [keys, values] = [&self.keys, &self.values].map(|x| Columns::new(x, width, head * d, d));
                fold(decays.head(head), keys, values, rows, d, kv);
            }
        }
        self.keys.clear();
        self.values.clear();
    }
}

/// `out[T, heads · d]`. `finals`, where given, gets the state after each segment's last row (its open chunk folded), one
/// `[heads · d · d]` a segment; without it, only the states that children start from are computed. Panics on shapes that do
/// not fit.
pub fn forward(
    shape: &Heads,
    forest: &Forest,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    out: &mut Tensor,
    finals: Option<&mut Vec<Vec<f32>>>,
) {
    shape.check(forest, q, k, v);
    out.resize(q.shape());
    let decays = Decays::of_forest(shape, forest);
    let states = states(shape, forest, &decays, k, v, finals.is_some());
    let outs = [Rows { cols: q.cols(), data: out.data_mut() }];
    for_head_groups(forest, shape.heads(), outs, |tree, heads, [mut out]| {
        let inputs = [q, k, v].map(|x| Columns::of_heads(x, &heads, shape.heads()).starting_at(tree.rows.start));
        scratch::with(needs(decays.longest, shape.head_dim).forward(heads.len()), |memory| {
            dispatch!(|s| forward_heads(s, shape, forest, tree, heads, &decays, &states, inputs, memory, &mut out));
        });
    });
    if let Some(finals) = finals {
        *finals = states;
    }
}

/// Gradients (overwritten). States are recomputed from k and v; the gradient of a segment's final state is the sum over
/// its children. Panics on shapes that do not fit.
pub fn backward(
    shape: &Heads,
    forest: &Forest,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    d_out: &Tensor,
    dq: &mut Tensor,
    dk: &mut Tensor,
    dv: &mut Tensor,
) {
    shape.check(forest, q, k, v);
    let decays = Decays::of_forest(shape, forest);
    let states = states(shape, forest, &decays, k, v, false);
    let outs = [dq, dk, dv].map(|x| {
        x.resize(q.shape());
        Rows { cols: x.cols(), data: x.data_mut() }
    });
    for_head_groups(forest, shape.heads(), outs, |tree, heads, mut grads| {
        let inputs = [q, k, v, d_out].map(|x| Columns::of_heads(x, &heads, shape.heads()).starting_at(tree.rows.start));
        scratch::with(needs(decays.longest, shape.head_dim).backward(heads.len()), |memory| {
            dispatch!(|s| backward_heads(s, shape, forest, tree, heads, &decays, &states, inputs, memory, &mut grads));
        });
    });
}

/// One row `[heads · d]` each: takes its key and value into `state` (folding the chunk before when it was full), writes `out`.
pub fn row(shape: &Heads, q: &[f32], k: &[f32], v: &[f32], state: &mut State, out: &mut [f32]) {
    let (d, width) = (shape.head_dim, shape.heads() * shape.head_dim);
    if state.keys.len() >= shape.block * width {
        state.close(shape);
    }
    state.keys.extend_from_slice(k);
    state.values.extend_from_slice(v);
    let keys = state.keys.len() / width.max(1);
    scratch::with(2 * keys + 1, |memory| {
        let (decay, weights) = memory.split_at_mut(keys + 1);
        dispatch!(|s| for (head, (slope, kv)) in
            shape.slopes.iter().zip(state.kv.chunks_exact(shape.square())).enumerate()
        {
            fill_ending(s, *slope, decay);
            let query = &q[head * d..(head + 1) * d];
            for (weight, key) in weights.iter_mut().zip(state.keys.chunks_exact(width)) {
                *weight = dot(s, query, &key[head * d..(head + 1) * d]);
            }
            update(s, &decay[1..], weights, |decay, w| s.mul_f32s(decay, w));
            let mut out = ColumnsMut::new(&mut out[head * d..(head + 1) * d], d, 0, d);
            out.clear(1);
            mix(s, [query], Columns::new(kv, d, 0, d), &mut out, 0);
            let decay = s.splat_f32s(decay[0]);
            map(s, out.row(0), |x| s.mul_f32s(x, decay));
            mix(s, [&*weights], Columns::new(&state.values, width, head * d, d), &mut out, 0);
        });
    });
}

/// Decay rates of MiniMax's own code: ALiBi slopes (nearest lower power of two, then every second of the doubled count) times
/// `1 − layer/(layers − 1) + 1e-5`, with the absolute layer index; 1 + 1e-5 where `layers` is 1.
///
/// With H heads, H a power of two, head h of 1…H has the slope 2^(−8h/H) (ALiBi: Press et al., arXiv:2108.12409).
/// Hugging Face's port puts 1e-5 into the denominator too and uses 2^(−8h/H) for every H; that is not followed.
pub fn slopes(heads: usize, layer: usize, layers: usize) -> Vec<f32> {
    let of_power = |n: usize| (1..=n).map(move |h| (-8.0 * h as f64 / n as f64).exp2());
    let whole = if heads == 0 { 0 } else { 1 << heads.ilog2() };
    let depth = if layers > 1 { layer as f64 / (layers - 1) as f64 } else { 0.0 };
    let factor = 1.0 - depth + 1e-5;
    let rest = of_power(2 * whole).step_by(2).take(heads - whole);
    of_power(whole).chain(rest).map(|slope| (slope * factor) as f32).collect()
}

/// Powers e^{-s t} of each head, for t up to the longest chunk.
struct Decays {
    /// `[heads, longest + 1]` each: t rising, t falling.
    rising: Vec<f32>,
    falling: Vec<f32>,
    longest: usize,
}

/// The powers of one head.
#[derive(Clone, Copy)]
struct Decay<'a> {
    rising: &'a [f32],
    falling: &'a [f32],
}

impl Decays {
    fn new(shape: &Heads, longest: usize) -> Self {
        let len = (longest + 1) * shape.heads();
        let mut decays = Self { rising: Vec::new(), falling: vec![0.0; len], longest };
        dispatch!(|s| for (slope, powers) in shape.slopes.iter().zip(decays.falling.chunks_exact_mut(longest + 1)) {
            fill_ending(s, *slope, powers);
        });
        decays.rising = decays.falling.chunks_exact(longest + 1).flat_map(|p| p.iter().rev()).copied().collect();
        decays
    }

    fn of_forest(shape: &Heads, forest: &Forest) -> Self {
        let longest = forest.segments().iter().map(|s| s.len).max().unwrap_or(0);
        Self::new(shape, longest.min(shape.block))
    }

    fn head(&self, head: usize) -> Decay<'_> {
        let powers = head * (self.longest + 1)..(head + 1) * (self.longest + 1);
        Decay { rising: &self.rising[powers.clone()], falling: &self.falling[powers] }
    }
}

impl<'a> Decay<'a> {
    /// e^{-s t}.
    #[inline(always)]
    fn at(self, t: usize) -> f32 {
        self.rising[t]
    }

    /// The longest chunk.
    #[inline(always)]
    fn longest(self) -> usize {
        self.rising.len() - 1
    }

    /// e^{-s(n-1)}, …, e^{-s}, 1: what the last `n` steps have left of each.
    #[inline(always)]
    fn ending(self, n: usize) -> &'a [f32] {
        &self.falling[self.falling.len() - n..]
    }
}

/// The powers e^{-s t} for t falling to 0 at the end. Each depends on s and t alone.
#[inline(always)]
fn fill_ending<S: Simd>(s: S, slope: f32, powers: &mut [f32]) {
    for (t, power) in powers.iter_mut().rev().enumerate() {
        *power = t as f32;
    }
    let slope = s.splat_f32s(-slope);
    map(
        s,
        powers,
        #[inline(always)]
        |t| exp(s, s.mul_f32s(t, slope)),
    );
}

/// Floats that work on chunks takes: their packed keys, their rows side by side, a row of scores (or of the state), the state and
/// the packed state.
#[derive(Clone, Copy)]
struct Needs {
    packed: usize,
    rows: usize,
    room: usize,
    square: usize,
    square_packed: usize,
}

/// For chunks of up to `rows` rows.
fn needs(rows: usize, d: usize) -> Needs {
    Needs {
        packed: panels(rows) * LANES * d,
        rows: rows * d,
        room: panels(rows.max(d)) * LANES,
        square: d * d,
        square_packed: panels(d) * LANES * d,
    }
}

impl Needs {
    fn fold(self) -> usize {
        self.packed + BLOCK * self.room
    }

    fn forward(self, heads: usize) -> usize {
        self.fold() + self.rows + heads * self.square
    }

    fn backward(self, heads: usize) -> usize {
        2 * self.fold() + 3 * self.rows + heads * self.square + self.square_packed
    }
}

/// `kv = e^{-s rows} kv + Σ_j e^{-s(rows-1-j)} k_j v_jᵀ`: a chunk's keys and values enter the state.
fn fold(decay: Decay, keys: Columns, values: Columns, rows: usize, d: usize, kv: &mut [f32]) {
    let needs = needs(decay.longest(), d);
    scratch::with(needs.fold(), |memory| {
        let (packed, weights) = memory.split_at_mut(needs.packed);
        let (shrink, powers) = (decay.at(rows), decay.ending(rows));
        dispatch!(|s| {
            pack(s, keys, rows, packed);
            fold_packed(s, shrink, powers, packed, values, d, kv, weights, needs.room);
        });
    });
}

/// `kv = shrink · kv + Σ_j powers[j] · x_j y_jᵀ`, with the x packed.
#[inline(always)]
fn fold_packed<S: Simd>(
    s: S,
    shrink: f32,
    powers: &[f32],
    packed: &[f32],
    y: Columns,
    d: usize,
    kv: &mut [f32],
    weights: &mut [f32],
    room: usize,
) {
    let shrink = s.splat_f32s(shrink);
    map(s, kv, |x| s.mul_f32s(x, shrink));
    let mut kv = ColumnsMut::new(kv, d, 0, d);
    let rows = powers.len();
    let mut at = 0;
    while at + BLOCK <= d {
        for (r, weights) in parts_mut::<BLOCK>(weights, room).into_iter().enumerate() {
            weigh(s, powers, packed, d, at + r, weights);
        }
        mix(s, parts::<BLOCK>(weights, room).map(|w| &w[..rows]), y, &mut kv, at);
        at += BLOCK;
    }
    while at < d {
        weigh(s, powers, packed, d, at, weights);
        mix(s, [&weights[..rows]], y, &mut kv, at);
        at += 1;
    }
}

/// One tree and some heads: rows and columns are theirs alone.
#[inline(always)]
fn forward_heads<S: Simd>(
    s: S,
    shape: &Heads,
    forest: &Forest,
    tree: &Span,
    heads: Range<usize>,
    decays: &Decays,
    states: &[Vec<f32>],
    inputs: [Columns; 3],
    memory: &mut [f32],
    out: &mut ColumnsMut,
) {
    let d = shape.head_dim;
    let Needs { packed, rows: chunk, room, square, .. } = needs(decays.longest, d);
    let (packed, memory) = memory.split_at_mut(packed);
    let (values, memory) = memory.split_at_mut(chunk);
    let (weights, kvs) = memory.split_at_mut(BLOCK * room);
    for segment in tree.segments.clone() {
        let rows = within(tree, forest, segment);
        let mut live = enter(forest, segment, &heads, states, kvs);
        for start in rows.clone().step_by(shape.block) {
            let len = shape.block.min(rows.end - start);
            let last = start + len == rows.end;
            let before = live;
            live |= !last;
            for (h, kv) in kvs.chunks_exact_mut(square).enumerate() {
                let decay = decays.head(heads.start + h);
                let [q, k, v] = inputs.map(|x| x.within(h, heads.len()));
                let mut out = out.within(h, heads.len());
                pack(s, k.starting_at(start), len, packed);
                let v = v.starting_at(start).gather(len, values);
                let state = before.then_some(&*kv);
                let mut t = 0;
                while t + BLOCK <= len {
                    forward_rows::<S, BLOCK>(s, decay, q, v, packed, state, start, t, weights, room, &mut out);
                    t += BLOCK;
                }
                while t < len {
                    forward_rows::<S, 1>(s, decay, q, v, packed, state, start, t, weights, room, &mut out);
                    t += 1;
                }
                if !last {
                    revive(before, kv);
                    let (shrink, powers) = (decay.at(len), decay.ending(len));
                    fold_packed(s, shrink, powers, packed, v, d, kv, weights, room);
                }
            }
        }
    }
}

/// A segment's rows, counted from its tree's first.
fn within(tree: &Span, forest: &Forest, segment: usize) -> Range<usize> {
    let rows = forest.rows_of(segment);
    rows.start - tree.rows.start..rows.end - tree.rows.start
}

/// Takes up the states that a segment starts from. A root starts from nothing, which costs nothing; says whether there is one.
#[inline(always)]
fn enter(forest: &Forest, segment: usize, heads: &Range<usize>, states: &[Vec<f32>], kvs: &mut [f32]) -> bool {
    let parent = forest.segments()[segment].parent;
    if let Some(parent) = parent {
        let square = kvs.len() / heads.len();
        kvs.copy_from_slice(&states[parent][heads.start * square..heads.end * square]);
    }
    parent.is_some()
}

/// Where there was no state, nothing becomes a state of zeros.
#[inline(always)]
fn revive(live: bool, kv: &mut [f32]) {
    if !live {
        kv.fill(0.0);
    }
}

/// `R` rows from row `t` of the chunk on that begins at `start` with the state `before`; `v` holds the chunk's values alone. The later rows see keys that the
/// earlier do not: there the earlier weigh 0.
#[inline(always)]
fn forward_rows<S: Simd, const R: usize>(
    s: S,
    decay: Decay,
    q: Columns,
    v: Columns,
    packed: &[f32],
    before: Option<&[f32]>,
    start: usize,
    t: usize,
    weights: &mut [f32],
    room: usize,
    out: &mut ColumnsMut,
) {
    let (first, keys) = (start + t, t + R);
    let queries = q.block::<R>(first);
    let d = queries[0].len();
    for r in 0..R {
        out.row(first + r).fill(0.0);
    }
    if let Some(kv) = before {
        mix(s, queries, Columns::new(kv, d, 0, d), out, first);
        for r in 0..R {
            let decay = s.splat_f32s(decay.at(t + r + 1));
            map(s, out.row(first + r), |x| s.mul_f32s(x, decay));
        }
    }
    scores(s, queries, packed, keys, parts_mut::<R>(weights, room));
    for (r, weights) in parts_mut::<R>(weights, room).into_iter().enumerate() {
        fade(s, decay, &mut weights[..keys], t + r + 1);
    }
    mix(s, parts::<R>(weights, room).map(|w| &w[..keys]), v, out, first);
}

/// The weights of the `seen` first keys decay with their distance to the last of them; the others become 0.
#[inline(always)]
fn fade<S: Simd>(s: S, decay: Decay, weights: &mut [f32], seen: usize) {
    update(s, decay.ending(seen), &mut weights[..seen], |decay, w| s.mul_f32s(decay, w));
    weights[seen..].fill(0.0);
}

/// One tree and some heads, as in [`forward_heads`]. A sweep along the rows gives dq, and what reaches dk and dv inside a chunk;
/// a sweep against them carries d(KV) and adds what reaches dk and dv through it.
#[inline(always)]
fn backward_heads<S: Simd>(
    s: S,
    shape: &Heads,
    forest: &Forest,
    tree: &Span,
    heads: Range<usize>,
    decays: &Decays,
    states: &[Vec<f32>],
    inputs: [Columns; 4],
    memory: &mut [f32],
    grads: &mut [ColumnsMut; 3],
) {
    let d = shape.head_dim;
    let Needs { packed, rows: chunk, room, square, square_packed, .. } = needs(decays.longest, d);
    let (keys, memory) = memory.split_at_mut(packed);
    let (values, memory) = memory.split_at_mut(packed);
    let (gathered, memory) = memory.split_at_mut(chunk);
    let (sums, memory) = memory.split_at_mut(2 * chunk);
    let (weights, memory) = memory.split_at_mut(2 * BLOCK * room);
    let (kv_packed, kvs) = memory.split_at_mut(square_packed);

    for segment in tree.segments.clone() {
        let rows = within(tree, forest, segment);
        let mut live = enter(forest, segment, &heads, states, kvs);
        for start in rows.clone().step_by(shape.block) {
            let len = shape.block.min(rows.end - start);
            let last = start + len == rows.end;
            let before = live;
            live |= !last;
            for (h, kv) in kvs.chunks_exact_mut(square).enumerate() {
                let decay = decays.head(heads.start + h);
                let [q, k, v, d_out] = inputs.map(|x| x.within(h, heads.len()));
                let [mut dq, mut dk, mut dv] = grads.each_mut().map(|x| x.within(h, heads.len()));
                pack(s, k.starting_at(start), len, keys);
                pack(s, v.starting_at(start), len, values);
                if before {
                    pack(s, Columns::new(kv, d, 0, d), d, kv_packed);
                }
                let packed = [&*keys, &*values];
                let state = before.then_some(&*kv_packed);
                let k = k.starting_at(start).gather(len, gathered);
                sums.fill(0.0);
                let mut sums = parts_mut::<2>(sums, chunk).map(|sum| ColumnsMut::new(sum, d, 0, d));
                let inputs = [q, k, d_out];
                let mut t = 0;
                while t + BLOCK <= len {
                    backward_rows::<S, BLOCK>(
                        s, decay, inputs, packed, state, start, t, weights, room, &mut dq, &mut sums,
                    );
                    t += BLOCK;
                }
                while t < len {
                    backward_rows::<S, 1>(s, decay, inputs, packed, state, start, t, weights, room, &mut dq, &mut sums);
                    t += 1;
                }
                for (sum, grad) in sums.iter_mut().zip([&mut dk, &mut dv]) {
                    for t in 0..len {
                        copy(sum.row(t), grad.row(start + t));
                    }
                }
                if !last {
                    revive(before, kv);
                    let (shrink, powers) = (decay.at(len), decay.ending(len));
                    let v = v.starting_at(start).gather(len, gathered);
                    fold_packed(s, shrink, powers, keys, v, d, kv, weights, room);
                }
            }
        }
    }

    // From here on `kvs` hold d(KV).
    let mut pending = vec![Vec::new(); if tree.segments.len() > 1 { tree.segments.len() } else { 0 }];
    for segment in tree.segments.clone().rev() {
        let rows = within(tree, forest, segment);
        let parent = forest.segments()[segment].parent;
        let from_children = pending.get(segment - tree.segments.start).filter(|d_kv| !d_kv.is_empty());
        let mut live = from_children.is_some();
        if let Some(d_kv) = from_children {
            kvs.copy_from_slice(d_kv);
        }
        for start in rows.clone().step_by(shape.block).rev() {
            let len = shape.block.min(rows.end - start);
            let wanted = start > rows.start || parent.is_some();
            let after = live;
            live |= wanted;
            for (h, kv) in kvs.chunks_exact_mut(square).enumerate() {
                let decay = decays.head(heads.start + h);
                let inputs = inputs.map(|x| x.within(h, heads.len()));
                if after {
                    let mut grads = grads.each_mut().map(|x| x.within(h, heads.len()));
                    pack(s, Columns::new(kv, d, 0, d), d, kv_packed);
                    let mut t = 0;
                    while t + BLOCK <= len {
                        leave_rows::<S, BLOCK>(
                            s, decay, inputs, kv, kv_packed, start, len, t, weights, room, &mut grads,
                        );
                        t += BLOCK;
                    }
                    while t < len {
                        leave_rows::<S, 1>(s, decay, inputs, kv, kv_packed, start, len, t, weights, room, &mut grads);
                        t += 1;
                    }
                }
                if wanted {
                    revive(after, kv);
                    let [q, _, _, d_out] = inputs.map(|x| x.starting_at(start));
                    pack(s, q, len, keys);
                    let (shrink, powers) = (decay.at(len), &decay.rising[1..=len]);
                    fold_packed(s, shrink, powers, keys, d_out.gather(len, gathered), d, kv, weights, room);
                }
            }
        }
        if let Some(parent) = parent {
            let sum = &mut pending[parent - tree.segments.start];
            if sum.is_empty() {
                sum.extend_from_slice(kvs);
            } else {
                update(s, kvs, sum, |a, b| s.add_f32s(a, b));
            }
        }
    }
}

/// `R` rows from row `t` of a chunk on, as in [`forward_rows`], with the state before the chunk packed: all of dq, and what
/// reaches dk and dv inside the chunk. `k`, `dk` and `dv` hold the chunk's rows alone.
#[inline(always)]
fn backward_rows<S: Simd, const R: usize>(
    s: S,
    decay: Decay,
    [q, k, d_out]: [Columns; 3],
    [keys, values]: [&[f32]; 2],
    before: Option<&[f32]>,
    start: usize,
    t: usize,
    weights: &mut [f32],
    room: usize,
    dq: &mut ColumnsMut,
    [dk, dv]: &mut [ColumnsMut; 2],
) {
    let (first, seen) = (start + t, t + R);
    let (queries, d_outs) = (q.block::<R>(first), d_out.block::<R>(first));
    let (weights, slopes) = weights.split_at_mut(R * room);
    for r in 0..R {
        dq.row(first + r).fill(0.0);
    }
    if let Some(kv) = before {
        scores(s, d_outs, kv, queries[0].len(), parts_mut::<R>(weights, room));
        for (r, through) in parts::<R>(weights, room).into_iter().enumerate() {
            let decay = s.splat_f32s(decay.at(t + r + 1));
            update(s, through, dq.row(first + r), |x, _| s.mul_f32s(x, decay));
        }
    }
    scores(s, queries, keys, seen, parts_mut::<R>(weights, room));
    scores(s, d_outs, values, seen, parts_mut::<R>(slopes, room));
    for r in 0..R {
        fade(s, decay, &mut weights[r * room..][..seen], t + r + 1);
        fade(s, decay, &mut slopes[r * room..][..seen], t + r + 1);
    }
    let weights = parts::<R>(weights, room).map(|w| &w[..seen]);
    let slopes = parts::<R>(slopes, room).map(|w| &w[..seen]);
    mix(s, slopes, k, dq, first);
    spread(s, slopes, queries, dk);
    spread(s, weights, d_outs, dv);
}

/// What reaches dk and dv of `R` rows from row `t` of a chunk of `len` on through the state after the chunk, whose gradient
/// is `d_kv`: dk_j += e^{-s(len-1-j)} d(KV) v_j, dv_j += e^{-s(len-1-j)} k_jᵀ d(KV).
#[inline(always)]
fn leave_rows<S: Simd, const R: usize>(
    s: S,
    decay: Decay,
    [_, k, v, _]: [Columns; 4],
    d_kv: &[f32],
    d_kv_packed: &[f32],
    start: usize,
    len: usize,
    t: usize,
    weights: &mut [f32],
    room: usize,
    [_, dk, dv]: &mut [ColumnsMut; 3],
) {
    let first = start + t;
    let (keys, values) = (k.block::<R>(first), v.block::<R>(first));
    let d = keys[0].len();
    scores(s, values, d_kv_packed, d, parts_mut::<R>(weights, room));
    for (r, weights) in parts_mut::<R>(weights, room).into_iter().enumerate() {
        let decay = s.splat_f32s(decay.at(len - 1 - (t + r)));
        update(s, weights, dk.row(first + r), |x, dk| s.mul_add_f32s(decay, x, dk));
        update(s, keys[r], weights, |k, _| s.mul_f32s(decay, k));
    }
    mix(s, parts::<R>(weights, room).map(|w| &w[..d]), Columns::new(d_kv, d, 0, d), dv, first);
}

/// Column `c` of packed rows of width `d`, each times its power.
#[inline(always)]
fn weigh<S: Simd>(s: S, powers: &[f32], packed: &[f32], d: usize, c: usize, weights: &mut [f32]) {
    for (p, powers) in powers.chunks(LANES).enumerate() {
        let weights = &mut weights[p * LANES..][..powers.len()];
        weights.copy_from_slice(&packed[(p * d + c) * LANES..][..powers.len()]);
        update(s, powers, weights, |power, x| s.mul_f32s(power, x));
    }
}

/// The state after each segment: of all, or of those alone that have children (the others' are empty).
fn states(shape: &Heads, forest: &Forest, decays: &Decays, k: &Tensor, v: &Tensor, all: bool) -> Vec<Vec<f32>> {
    use rayon::prelude::*;
    let d = shape.head_dim;
    let mut states = vec![Vec::new(); forest.segments().len()];
    let wanted = |segment| all || forest.has_children(segment);
    let of_tree = |(tree, states): (Span, &mut [Vec<f32>])| {
        for segment in tree.segments.clone().filter(|&segment| wanted(segment)) {
            let (before, state) = states.split_at_mut(segment - tree.segments.start);
            state[0] = match forest.segments()[segment].parent {
                Some(parent) => before[parent - tree.segments.start].clone(),
                None => vec![0.0; shape.heads() * shape.square()],
            };
            let rows = forest.rows_of(segment);
            let fold_head = |(head, kv): (usize, &mut [f32])| {
                for start in rows.clone().step_by(shape.block) {
                    let [k, v] = [k, v].map(|x| Columns::part(x, head, shape.heads()).starting_at(start));
                    fold(decays.head(head), k, v, shape.block.min(rows.end - start), d, kv);
                }
            };
            if shape.square() > 0 {
                state[0].par_chunks_exact_mut(shape.square()).enumerate().for_each(fold_head);
            }
        }
    };
    let mut rest = &mut states[..];
    let trees: Vec<(Span, &mut [Vec<f32>])> = forest
        .trees()
        .map(|tree| {
            let own = rest.split_off_mut(..tree.segments.len()).expect("a state a segment");
            (tree, own)
        })
        .filter(|(tree, _)| tree.segments.clone().any(wanted))
        .collect();
    trees.into_par_iter().for_each(of_tree);
    states
}
