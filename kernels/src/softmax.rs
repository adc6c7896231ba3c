//! Causal softmax attention with grouped queries over a forest. Heads lie side by side: `q[T, heads · d]`, `k, v[T, kv_heads · d]`.
//! A row's result depends only on the keys it sees, in order, never on how they are cut into runs; so decoding with a
//! cache ([`row`]) equals [`forward`] bit for bit.
//!
//! A row's scores stand side by side in memory before its softmax is taken, so no running maximum corrects earlier sums:
//! the order of every addition is that of the keys. Backward makes the scores again, from q, k and `lse`.

use crate::blocks::Rows;
use crate::columns::{BLOCK, Columns, ColumnsMut, mix, pack, panels, parts, parts_mut, scores, spread};
use crate::forest::Span;
use crate::simd::{LANES, Simd, dispatch, dot, map, max, sum, update};
use crate::trees::for_heads;
use crate::{Forest, Tensor, scratch};
use std::ops::Range;

pub mod plain;
#[cfg(test)]
mod tests;

/// Shape of the attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Heads {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Multiplies q·k; 1/√d as usual.
    pub scale: f32,
}

impl Heads {
    /// Query heads that share a key head.
    fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Panics on shapes that do not fit: a programmer's error.
    #[track_caller]
    fn check(&self, forest: &Forest, q: &Tensor, k: &Tensor, v: &Tensor) {
        assert_eq!(self.heads, self.group() * self.kv_heads, "kv_heads divides heads");
        let (wide, narrow) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        for (x, width) in [(q, wide), (k, narrow), (v, narrow)] {
            assert_eq!(x.shape(), [forest.rows(), width], "queries, keys and values are rows of the forest");
        }
    }
}

/// A run of cached keys and values, `[n, kv_heads · d]` each.
pub type Run<'a> = (&'a [f32], &'a [f32]);

/// `out[T, heads · d]`, and `lse[T, heads]`, the log of the softmax's denominator with its maximum added back. Panics on
/// shapes that do not fit.
pub fn forward(shape: Heads, forest: &Forest, q: &Tensor, k: &Tensor, v: &Tensor, out: &mut Tensor, lse: &mut Tensor) {
    shape.check(forest, q, k, v);
    out.resize(q.shape());
    lse.resize(&[forest.rows(), shape.heads]);
    let outs = [Rows { cols: q.cols(), data: out.data_mut() }, Rows { cols: shape.heads, data: lse.data_mut() }];
    for_heads(forest, shape.kv_heads, outs, |tree, head, [mut out, mut lse]| {
        let [q, k, v] = [q, k, v].map(|x| Columns::part(x, head, shape.kv_heads).starting_at(tree.rows.start));
        let (packed, room) = room(forest, tree, shape.head_dim);
        scratch::with(packed + BLOCK * (shape.head_dim + room), |memory| {
            let (keys, memory) = memory.split_at_mut(packed);
            dispatch!(|s| forward_head(s, &shape, forest, tree, q, k, v, keys, memory, room, &mut out, &mut lse));
        });
    });
}

/// Gradients (overwritten) from what [`forward`] left: keys run over rows i with j ≤ i < end of j's subtree, in a fixed
/// order. Panics on shapes that do not fit.
pub fn backward(
    shape: Heads,
    forest: &Forest,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    out: &Tensor,
    lse: &Tensor,
    d_out: &Tensor,
    dq: &mut Tensor,
    dk: &mut Tensor,
    dv: &mut Tensor,
) {
    shape.check(forest, q, k, v);
    dq.resize(q.shape());
    dk.resize(k.shape());
    dv.resize(v.shape());
    let outs = [dq, dk, dv].map(|x| Rows { cols: x.cols(), data: x.data_mut() });
    for_heads(forest, shape.kv_heads, outs, |tree, head, mut grads| {
        let inputs = [q, k, v, out, lse, d_out];
        let inputs = inputs.map(|x| Columns::part(x, head, shape.kv_heads).starting_at(tree.rows.start));
        let (packed, room) = room(forest, tree, shape.head_dim);
        scratch::with(2 * packed + BLOCK * (shape.head_dim + 2 * room), |memory| {
            let (packed, memory) = memory.split_at_mut(2 * packed);
            dispatch!(|s| backward_head(s, &shape, forest, tree, inputs, packed, memory, room, &mut grads));
        });
    });
}

/// One row: `out[heads · d]` for `q[heads · d]` over all keys in `runs`, oldest first, its own the last.
pub fn row(shape: Heads, q: &[f32], runs: &[Run], out: &mut [f32]) {
    let seen: usize = runs.iter().map(|(keys, _)| keys.len() / (shape.kv_heads * shape.head_dim)).sum();
    scratch::with(shape.head_dim + seen, |memory| dispatch!(|s| decode(s, &shape, q, runs, memory, out)));
}

/// Keys that rows see: their place among a tree's rows, and their first panel.
#[derive(Clone)]
struct Seen {
    rows: Range<usize>,
    panel: usize,
}

/// The segments of a tree in order, each with the keys that its rows see before their own.
struct Walk<'a> {
    forest: &'a Forest,
    first_row: usize,
    panel: usize,
    path: Vec<(usize, Seen)>,
}

impl<'a> Walk<'a> {
    fn new(forest: &'a Forest, tree: &Span) -> Self {
        Self { forest, first_row: tree.rows.start, panel: 0, path: Vec::new() }
    }

    /// Goes to `segment`, which follows the one before: the runs seen before its own, and its own.
    fn visit(&mut self, segment: usize) -> (&[(usize, Seen)], Seen) {
        let parent = self.forest.segments()[segment].parent;
        while self.path.last().is_some_and(|&(s, _)| Some(s) != parent) {
            self.path.pop();
        }
        let rows = self.forest.rows_of(segment);
        let own = Seen { rows: rows.start - self.first_row..rows.end - self.first_row, panel: self.panel };
        self.panel += panels(rows.len());
        if self.forest.has_children(segment) {
            self.path.push((segment, own.clone()));
            (&self.path[..self.path.len() - 1], own)
        } else {
            (&self.path, own)
        }
    }
}

/// Floats that a tree's packed keys take, and that the scores of one of its rows take.
fn room(forest: &Forest, tree: &Span, width: usize) -> (usize, usize) {
    let (mut packed, mut deepest) = (0, 0);
    for segment in tree.segments.clone() {
        let rows = forest.rows_of(segment);
        packed += panels(rows.len()) * LANES * width;
        deepest = deepest.max(forest.positions()[rows.end - 1] as usize + 1);
    }
    (packed, deepest + LANES + BLOCK)
}

/// `q · scale` of `R` rows.
#[inline(always)]
fn scaled<'a, S: Simd, const R: usize>(s: S, scale: f32, q: [&[f32]; R], room: &'a mut [f32]) -> [&'a [f32]; R] {
    let width = q[0].len();
    let scale = s.splat_f32s(scale);
    for (q, scaled) in q.into_iter().zip(room.chunks_exact_mut(width)) {
        update(s, q, scaled, |q, _| s.mul_f32s(q, scale));
    }
    parts(room, width)
}

/// The products of `R` queries with all keys of `path` and the first `own_keys` keys of `own`, in the order of keys.
#[inline(always)]
fn all_scores<S: Simd, const R: usize>(
    s: S,
    queries: [&[f32]; R],
    packed: &[f32],
    path: &[(usize, Seen)],
    own: &Seen,
    own_keys: usize,
    out: &mut [f32],
    room: usize,
) {
    let mut at = 0;
    let runs = path.iter().map(|(_, run)| (run, run.rows.len())).chain([(own, own_keys)]);
    for (run, keys) in runs {
        let panels = &packed[run.panel * LANES * queries[0].len()..];
        scores(s, queries, panels, keys, parts_mut::<R>(out, room).map(|x| &mut x[at..]));
        at += keys;
    }
}

/// `scores` become `e^(scores − most)`; returns their sum.
#[inline(always)]
fn exponentiate<S: Simd>(s: S, scores: &mut [f32], most: f32) -> f32 {
    let most = s.splat_f32s(most);
    map(
        s,
        scores,
        #[inline(always)]
        |x| crate::simd::exp(s, s.sub_f32s(x, most)),
    );
    sum(s, scores)
}

/// One tree and key head: everything begins at the tree's first row; `q`, `out` and `lse` hold the group's query heads.
#[inline(always)]
fn forward_head<S: Simd>(
    s: S,
    shape: &Heads,
    forest: &Forest,
    tree: &Span,
    q: Columns,
    k: Columns,
    v: Columns,
    keys: &mut [f32],
    memory: &mut [f32],
    room: usize,
    out: &mut ColumnsMut,
    lse: &mut ColumnsMut,
) {
    let (d, group) = (shape.head_dim, shape.group());
    let mut walk = Walk::new(forest, tree);
    for segment in tree.segments.clone() {
        let (path, own) = walk.visit(segment);
        let len = own.rows.len();
        pack(s, k.starting_at(own.rows.start), len, &mut keys[own.panel * LANES * d..]);
        for head in 0..group {
            let (q, mut out, mut lse) = (q.within(head, group), out.within(head, group), lse.within(head, group));
            let mut t = 0;
            while t + BLOCK <= len {
                forward_rows::<S, BLOCK>(s, shape, q, v, keys, path, &own, t, memory, room, &mut out, &mut lse);
                t += BLOCK;
            }
            while t < len {
                forward_rows::<S, 1>(s, shape, q, v, keys, path, &own, t, memory, room, &mut out, &mut lse);
                t += 1;
            }
        }
    }
}

/// `R` rows from row `t` of a segment on. The later of them see keys that the earlier do not: there the earlier weigh 0.
#[inline(always)]
fn forward_rows<S: Simd, const R: usize>(
    s: S,
    shape: &Heads,
    q: Columns,
    v: Columns,
    keys: &[f32],
    path: &[(usize, Seen)],
    own: &Seen,
    t: usize,
    memory: &mut [f32],
    room: usize,
    out: &mut ColumnsMut,
    lse: &mut ColumnsMut,
) {
    let first = own.rows.start + t;
    let before: usize = path.iter().map(|(_, run)| run.rows.len()).sum();
    let (weights, queries) = memory.split_at_mut(R * room);
    let queries = scaled(s, shape.scale, q.block::<R>(first), queries);
    all_scores(s, queries, keys, path, own, t + R, weights, room);

    let total = before + t + R;
    let mut sums = [0.0; R];
    for (r, weights) in parts_mut::<R>(weights, room).into_iter().enumerate() {
        let seen = before + t + r + 1;
        let most = max(s, &weights[..seen]);
        sums[r] = exponentiate(s, &mut weights[..seen], most);
        weights[seen..total].fill(0.0);
        lse.row(first + r)[0] = most + sums[r].ln();
        out.row(first + r).fill(0.0);
    }
    let weights = parts::<R>(weights, room);
    let mut at = 0;
    for (_, run) in path {
        let keys = run.rows.len();
        mix(s, weights.map(|w| &w[at..at + keys]), v.starting_at(run.rows.start), out, first);
        at += keys;
    }
    mix(s, weights.map(|w| &w[at..total]), v.starting_at(own.rows.start), out, first);
    for (r, sum) in sums.into_iter().enumerate() {
        let share = s.splat_f32s(1.0 / sum);
        map(s, out.row(first + r), |x| s.mul_f32s(x, share));
    }
}

/// One row over cached keys: what [`forward_rows`] does for one row, with keys as they lie in the cache.
#[inline(always)]
fn decode<S: Simd>(s: S, shape: &Heads, q: &[f32], runs: &[Run], memory: &mut [f32], out: &mut [f32]) {
    let (d, group, stride) = (shape.head_dim, shape.group(), shape.kv_heads * shape.head_dim);
    let scale = s.splat_f32s(shape.scale);
    let (query, weights) = memory.split_at_mut(d);
    for head in 0..shape.heads {
        let from = head / group * d;
        update(s, &q[head * d..(head + 1) * d], query, |q, _| s.mul_f32s(q, scale));
        let mut at = 0;
        for (keys, _) in runs {
            for key in keys.chunks_exact(stride) {
                weights[at] = dot(s, query, &key[from..from + d]);
                at += 1;
            }
        }
        let most = max(s, weights);
        let share = s.splat_f32s(1.0 / exponentiate(s, weights, most));
        let mut out = ColumnsMut::new(&mut out[head * d..(head + 1) * d], d, 0, d);
        out.clear(1);
        let mut at = 0;
        for (keys, values) in runs {
            let n = keys.len() / stride;
            mix(s, [&weights[at..at + n]], Columns::new(values, stride, from, d), &mut out, 0);
            at += n;
        }
        map(s, out.row(0), |x| s.mul_f32s(x, share));
    }
}

/// One tree and key head, as in [`forward_head`]. Rows are taken in order, so each key's gradient is a sum over the rows
/// that see it, in order (and within a segment by query head).
#[inline(always)]
fn backward_head<S: Simd>(
    s: S,
    shape: &Heads,
    forest: &Forest,
    tree: &Span,
    inputs: [Columns; 6],
    packed: &mut [f32],
    memory: &mut [f32],
    room: usize,
    grads: &mut [ColumnsMut; 3],
) {
    let (d, group) = (shape.head_dim, shape.group());
    let [q, k, v, out, lse, d_out] = inputs;
    let [dq, dk, dv] = grads;
    dk.clear(tree.rows.len());
    dv.clear(tree.rows.len());
    let (keys, values) = packed.split_at_mut(packed.len() / 2);
    let mut walk = Walk::new(forest, tree);
    for segment in tree.segments.clone() {
        let (path, own) = walk.visit(segment);
        let len = own.rows.len();
        pack(s, k.starting_at(own.rows.start), len, &mut keys[own.panel * LANES * d..]);
        pack(s, v.starting_at(own.rows.start), len, &mut values[own.panel * LANES * d..]);
        for head in 0..group {
            let inputs = [q, out, lse, d_out].map(|x| x.within(head, group));
            let packed = [&*keys, &*values];
            let mut dq = dq.within(head, group);
            let mut t = 0;
            while t + BLOCK <= len {
                backward_rows::<S, BLOCK>(s, shape, inputs, k, packed, path, &own, t, memory, room, &mut dq, dk, dv);
                t += BLOCK;
            }
            while t < len {
                backward_rows::<S, 1>(s, shape, inputs, k, packed, path, &own, t, memory, room, &mut dq, dk, dv);
                t += 1;
            }
        }
    }
}

/// `R` rows from row `t` of a segment on: with p = e^(score − lse) and ds = p (d_out·v − d_out·out),
/// dq = scale Σ ds k, dk += ds (scale q), dv += p d_out.
#[inline(always)]
fn backward_rows<S: Simd, const R: usize>(
    s: S,
    shape: &Heads,
    [q, out, lse, d_out]: [Columns; 4],
    k: Columns,
    [keys, values]: [&[f32]; 2],
    path: &[(usize, Seen)],
    own: &Seen,
    t: usize,
    memory: &mut [f32],
    room: usize,
    dq: &mut ColumnsMut,
    dk: &mut ColumnsMut,
    dv: &mut ColumnsMut,
) {
    let first = own.rows.start + t;
    let before: usize = path.iter().map(|(_, run)| run.rows.len()).sum();
    let (weights, memory) = memory.split_at_mut(R * room);
    let (slopes, queries) = memory.split_at_mut(R * room);
    let queries = scaled(s, shape.scale, q.block::<R>(first), queries);
    let d_outs = d_out.block::<R>(first);
    all_scores(s, queries, keys, path, own, t + R, weights, room);
    all_scores(s, d_outs, values, path, own, t + R, slopes, room);

    let total = before + t + R;
    let pairs = parts_mut::<R>(weights, room).into_iter().zip(parts_mut::<R>(slopes, room));
    for (r, (weights, slopes)) in pairs.enumerate() {
        let seen = before + t + r + 1;
        exponentiate(s, &mut weights[..seen], lse.row(first + r)[0]);
        let delta = s.splat_f32s(dot(s, d_outs[r], out.row(first + r)));
        update(s, &weights[..seen], &mut slopes[..seen], |p, dp| s.mul_f32s(p, s.sub_f32s(dp, delta)));
        weights[seen..total].fill(0.0);
        slopes[seen..total].fill(0.0);
        dq.row(first + r).fill(0.0);
    }
    let (weights, slopes) = (parts::<R>(weights, room), parts::<R>(slopes, room));
    let mut at = 0;
    let runs = path.iter().map(|(_, run)| (run.rows.start, run.rows.len())).chain([(own.rows.start, t + R)]);
    for (row, keys) in runs {
        let (weights, slopes) = (weights.map(|w| &w[at..at + keys]), slopes.map(|w| &w[at..at + keys]));
        mix(s, slopes, k.starting_at(row), dq, first);
        spread(s, slopes, queries, &mut dk.starting_at(row));
        spread(s, weights, d_outs, &mut dv.starting_at(row));
        at += keys;
    }
    let scale = s.splat_f32s(shape.scale);
    for r in 0..R {
        map(s, dq.row(first + r), |x| s.mul_f32s(x, scale));
    }
}
