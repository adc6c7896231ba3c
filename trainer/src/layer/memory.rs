//! What a layer's arrays take: one list a struct, each array beside its formula, so that a plan and the arrays themselves cannot
//! come apart. An array that is added to a struct does not compile until it stands here.

use hone_kernels::{Tensor, experts, router};

use super::{Activations, Scratch};
use crate::config::{Mixer, ModelConfig, Norm};

/// One array.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Array {
    /// Its field.
    pub name: &'static str,
    /// Bytes allocated.
    pub held: usize,
    /// Bytes that a plan gives it.
    pub planned: usize,
}

/// Bytes allocated for a vector's elements.
pub(crate) fn held<T>(vector: &Vec<T>) -> usize {
    vector.capacity() * size_of::<T>()
}

/// Floats and ids alike.
const ELEMENT: usize = 4;

impl Array {
    /// A tensor of `elements` by plan.
    pub fn tensor(name: &'static str, tensor: &Tensor, elements: usize) -> Self {
        Self { name, held: tensor.bytes(), planned: ELEMENT * elements }
    }

    /// A vector of `elements` by plan.
    pub fn vector<T>(name: &'static str, vector: &Vec<T>, elements: usize) -> Self {
        Self { name, held: held(vector), planned: size_of::<T>() * elements }
    }
}

impl Activations {
    /// Its arrays, as planned for `rows` rows of a layer that mixes by `mixer`.
    pub fn arrays(&self, c: &ModelConfig, mixer: Mixer, rows: usize) -> Vec<Array> {
        let Self {
            q,
            k,
            v,
            raw: [raw_q, raw_k],
            mixed,
            lse,
            qkv,
            gate,
            mid,
            routes: router::Routes { experts, weights, scores, k: _ },
            grouped: experts::Grouped { rows: of_row, slots, starts, places, gate: expert_gate, up },
        } = self;
        let (h, w, kv, i) = (c.hidden_size, c.width(), c.kv_width(), c.intermediate_size);
        let (lightning, softmax) = match mixer {
            Mixer::Lightning => (rows, 0),
            Mixer::Softmax => (0, rows),
        };
        let raw = if c.qk_norm { softmax } else { 0 };
        // A dense feed-forward is one expert that every row takes.
        let chosen = rows * c.experts_per_token.max(1);
        let (each, moe) = (c.experts.max(1), if c.experts > 0 { rows } else { 0 });
        vec![
            Array::tensor("q", q, softmax * w),
            Array::tensor("k", k, softmax * kv),
            Array::tensor("v", v, softmax * kv),
            Array::tensor("raw.0", raw_q, raw * w),
            Array::tensor("raw.1", raw_k, raw * kv),
            Array::tensor("mixed", mixed, rows * w),
            Array::tensor("lse", lse, softmax * c.heads),
            Array::tensor("qkv", qkv, lightning * 3 * w),
            Array::tensor("gate", gate, lightning * w),
            Array::tensor("mid", mid, rows * h),
            Array::vector("routes.experts", experts, chosen),
            Array::vector("routes.weights", weights, chosen),
            Array::tensor("routes.scores", scores, moe * c.experts),
            Array::vector("grouped.rows", of_row, chosen),
            Array::vector("grouped.slots", slots, chosen),
            // A vector begins with room for four.
            Array::vector("grouped.starts", starts, (each + 1).max(4)),
            Array::vector("grouped.places", places, chosen),
            Array::tensor("grouped.gate", expert_gate, chosen * i),
            Array::tensor("grouped.up", up, chosen * i),
        ]
    }
}

impl Scratch {
    /// Its arrays, as planned for `rows` rows forward, and backward too where `train`; `aux` says whether the balance loss has a
    /// gradient.
    pub fn arrays(&self, c: &ModelConfig, rows: usize, train: bool, aux: bool) -> Vec<Array> {
        let Self {
            h: normed_input,
            qkv: [q, k, v],
            normed,
            gated,
            branch,
            logits,
            filled,
            d_h,
            d_branch,
            d_mid,
            d_width: [d_mixed, d_normed, d_gate],
            d_fused,
            dq,
            dk,
            dv,
            d_logits,
            d_scores,
            d_weights,
        } = self;
        let (h, w, kv) = (c.hidden_size, c.width(), c.kv_width());
        let softmax = c.softmax_layers();
        let lightning = softmax < c.layers;
        let back = if train { rows } else { 0 };
        let moe = |rows| if c.experts > 0 { rows } else { 0 };
        // Layers share these: the widest decides.
        let widest = |of_lightning: usize, of_softmax: usize| {
            let of_lightning = if lightning { of_lightning } else { 0 };
            of_lightning.max(if softmax > 0 { of_softmax } else { 0 })
        };
        let raw = |width: usize| if c.qk_norm { width } else { 0 };
        let scaled = matches!(c.norm, Norm::Post { beta, .. } if beta != 1.0);
        vec![
            Array::tensor("h", normed_input, rows * h),
            Array::tensor("qkv.0", q, rows * widest(w, 0)),
            Array::tensor("qkv.1", k, rows * widest(w, 0)),
            Array::tensor("qkv.2", v, rows * widest(w, 0)),
            Array::tensor("normed", normed, rows * widest(w, 0)),
            Array::tensor("gated", gated, rows * widest(w, 0)),
            Array::tensor("branch", branch, rows * h),
            Array::tensor("logits", logits, moe(rows) * c.experts),
            Array::vector("filled", filled, 0),
            Array::tensor("d_h", d_h, back * h),
            Array::tensor("d_branch", d_branch, if scaled { back * h } else { 0 }),
            Array::tensor("d_mid", d_mid, back * h),
            Array::tensor("d_width.0", d_mixed, back * w),
            Array::tensor("d_width.1", d_normed, back * widest(w, raw(w))),
            Array::tensor("d_width.2", d_gate, back * widest(w, raw(kv))),
            Array::tensor("d_fused", d_fused, back * widest(3 * w, 0)),
            Array::tensor("dq", dq, back * w),
            Array::tensor("dk", dk, back * widest(w, kv)),
            Array::tensor("dv", dv, back * widest(w, kv)),
            Array::tensor("d_logits", d_logits, moe(back) * c.experts),
            Array::tensor("d_scores", d_scores, if aux { moe(back) * c.experts } else { 0 }),
            Array::vector("d_weights", d_weights, back * c.experts_per_token.max(1)),
        ]
    }
}
