//! One layer of the decoder, forward and backward by hand: norm, mixer, norm, feed-forward, with the residual plain or
//! scaled. How rows see each other (a forest, or caches while decoding) is the caller's [`Mixing`]; all else is per row.

pub(crate) mod memory;

use hone_kernels::{Forest, Tensor, experts, lightning, linear, norm, pointwise, rope, router, softmax};

use crate::config::{ModelConfig, Norm, Router};
use crate::weights::{FeedIndex, LayerIndex, MixerIndex, Weights};

/// Eps of the lightning layer's output norm: the class default of MiniMax's code, whatever the block norms use.
const OUTPUT_NORM_EPS: f32 = 1e-6;

/// The id that stands in a replayed route where the router chooses for itself.
pub const FREE: u32 = u32::MAX;

/// How the rows of a batch see each other: over a forest, or each over its own cache.
pub(crate) trait Mixing {
    /// Softmax attention of layer `layer`: `out` and `lse` for `q, k, v`.
    fn softmax(
        &mut self,
        layer: usize,
        heads: softmax::Heads,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        out: &mut Tensor,
        lse: &mut Tensor,
    );
    /// Lightning attention of layer `layer`: `out` for `q, k, v`.
    fn lightning(
        &mut self,
        layer: usize,
        heads: &lightning::Heads,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        out: &mut Tensor,
    );
}

/// Rows that see each other as a forest says.
pub(crate) struct OverForest<'a> {
    pub forest: &'a Forest,
    /// Takes the state after each segment, of the layer mixed last, where that is wanted.
    pub finals: Option<&'a mut Vec<Vec<f32>>>,
}

impl Mixing for OverForest<'_> {
    fn softmax(
        &mut self,
        _: usize,
        heads: softmax::Heads,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        out: &mut Tensor,
        lse: &mut Tensor,
    ) {
        softmax::forward(heads, self.forest, q, k, v, out, lse);
    }
    fn lightning(&mut self, _: usize, heads: &lightning::Heads, q: &Tensor, k: &Tensor, v: &Tensor, out: &mut Tensor) {
        lightning::forward(heads, self.forest, q, k, v, out, self.finals.as_deref_mut());
    }
}

/// What a layer's forward leaves for its backward; T rows, W = heads · head_dim. What follows from these by pointwise work is made
/// again there.
#[derive(Default)]
pub(crate) struct Activations {
    /// Softmax: queries `[T, W]`, as attention sees them.
    q: Tensor,
    /// Softmax: keys `[T, KV]`.
    k: Tensor,
    /// Softmax: values, as wide as keys.
    v: Tensor,
    /// Softmax with QK-norm: queries and keys before it.
    raw: [Tensor; 2],
    /// What attention gives, `[T, W]`.
    mixed: Tensor,
    /// Softmax: log of the denominator `[T, heads]`.
    lse: Tensor,
    /// Lightning: the fused projection before SiLU, `[T, 3W]`.
    qkv: Tensor,
    /// Lightning: the gate before its sigmoid, `[T, W]`.
    gate: Tensor,
    /// The residual stream between mixer and feed-forward, `[T, H]`.
    mid: Tensor,
    /// The experts chosen.
    pub routes: router::Routes,
    /// Rows by expert.
    grouped: experts::Grouped,
}

/// Arrays that live no longer than a layer's pass, shared by all layers.
#[derive(Default)]
pub(crate) struct Scratch {
    /// Normed input of the mixer, then of the feed-forward, `[T, H]`; the other way round in backward.
    h: Tensor,
    /// Lightning's queries, keys and values, `[T, W]`.
    qkv: [Tensor; 3],
    /// Lightning's output after its norm, and gated, `[T, W]`.
    normed: Tensor,
    gated: Tensor,
    branch: Tensor,
    logits: Tensor,
    filled: Vec<u32>,
    // backward
    d_h: Tensor,
    d_branch: Tensor,
    d_mid: Tensor,
    d_width: [Tensor; 3],
    d_fused: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    d_logits: Tensor,
    d_scores: Tensor,
    d_weights: Vec<f32>,
}

/// A layer of a decoder, borrowed for one pass.
#[derive(Clone, Copy)]
pub(crate) struct Layer<'a> {
    pub config: &'a ModelConfig,
    pub number: usize,
    pub index: &'a LayerIndex,
    pub weights: &'a Weights,
    pub buffers: &'a Weights,
}

impl Layer<'_> {
    fn heads(&self) -> softmax::Heads {
        softmax::Heads {
            heads: self.config.heads,
            kv_heads: self.config.kv_heads,
            head_dim: self.config.head_dim,
            scale: 1.0 / (self.config.head_dim as f32).sqrt(),
        }
    }

    fn scoring(&self) -> router::Scoring {
        match self.config.router {
            Router::Softmax => router::Scoring::Softmax,
            Router::SigmoidBias => router::Scoring::SigmoidBias,
        }
    }

    fn w(&self, index: usize) -> &Tensor {
        self.weights.at(index)
    }

    /// `out[T, H]` from the residual stream `x[T, H]`.
    pub fn forward(
        &self,
        x: &Tensor,
        positions: &[u32],
        replay: Option<&[u32]>,
        mixing: &mut dyn Mixing,
        act: &mut Activations,
        scratch: &mut Scratch,
        out: &mut Tensor,
    ) {
        let c = self.config;
        let h = &mut scratch.h;
        norm::forward(x, self.w(self.index.input_norm), c.norm_eps, h);
        match &self.index.mixer {
            MixerIndex::Softmax { q, k, v, o, norms } => {
                if let Some((q_norm, k_norm)) = norms {
                    linear::forward(h, self.w(*q), &mut act.raw[0]);
                    linear::forward(h, self.w(*k), &mut act.raw[1]);
                    norm::forward(&act.raw[0], self.w(*q_norm), c.norm_eps, &mut act.q);
                    norm::forward(&act.raw[1], self.w(*k_norm), c.norm_eps, &mut act.k);
                } else {
                    linear::forward(h, self.w(*q), &mut act.q);
                    linear::forward(h, self.w(*k), &mut act.k);
                }
                linear::forward(h, self.w(*v), &mut act.v);
                if c.rotary_dim > 0 {
                    rope::forward(&mut act.q, positions, c.head_dim, c.rotary_dim, c.rope_theta);
                    rope::forward(&mut act.k, positions, c.head_dim, c.rotary_dim, c.rope_theta);
                }
                mixing.softmax(self.number, self.heads(), &act.q, &act.k, &act.v, &mut act.mixed, &mut act.lse);
                linear::forward(&act.mixed, self.w(*o), &mut scratch.branch);
            }
            MixerIndex::Lightning { heads, qkv, gate, out: out_proj, norm: out_norm } => {
                linear::forward(h, self.w(*qkv), &mut act.qkv);
                let [q, k, v] = &mut scratch.qkv;
                pointwise::silu_apart(&act.qkv, c.head_dim, [q, k, v]);
                mixing.lightning(self.number, heads, q, k, v, &mut act.mixed);
                norm::forward(&act.mixed, self.w(*out_norm), OUTPUT_NORM_EPS, &mut scratch.normed);
                linear::forward(h, self.w(*gate), &mut act.gate);
                pointwise::gated(&scratch.normed, &act.gate, &mut scratch.gated);
                linear::forward(&scratch.gated, self.w(*out_proj), &mut scratch.branch);
            }
        }
        match c.norm {
            Norm::Pre => pointwise::combine(1.0, x, 1.0, &scratch.branch, &mut act.mid),
            Norm::Post { alpha, beta } => pointwise::combine(alpha, h, beta, &scratch.branch, &mut act.mid),
        }

        norm::forward(&act.mid, self.w(self.index.post_norm), c.norm_eps, &mut scratch.h);
        self.route(replay, act, scratch);
        let FeedIndex { w1, w3, w2, .. } = self.index.feed;
        let weights = experts::Experts { w1: self.w(w1), w3: self.w(w3), w2: self.w(w2) };
        experts::forward(weights, &scratch.h, &act.routes, &mut act.grouped, &mut scratch.branch);
        match c.norm {
            Norm::Pre => pointwise::combine(1.0, &act.mid, 1.0, &scratch.branch, out),
            Norm::Post { alpha, beta } => pointwise::combine(alpha, &scratch.h, beta, &scratch.branch, out),
        }
    }

    /// Chooses experts. A dense feed-forward is one expert that every row takes with weight 1.
    fn route(&self, replay: Option<&[u32]>, act: &mut Activations, scratch: &mut Scratch) {
        let rows = scratch.h.rows();
        let Some(gate) = self.index.feed.gate else {
            act.routes.k = 1;
            act.routes.experts.clear();
            act.routes.experts.resize(rows, 0);
            act.routes.weights.clear();
            act.routes.weights.resize(rows, 1.0);
            return;
        };
        linear::forward(&scratch.h, self.w(gate), &mut scratch.logits);
        let bias = self.index.feed.bias.map(|b| self.buffers.at(b).data());
        let k = self.config.experts_per_token;
        let own = |replay, routes: &mut _| router::forward(self.scoring(), &scratch.logits, bias, k, replay, routes);
        match replay {
            None => own(None, &mut act.routes),
            Some(ids) if !ids.contains(&FREE) => own(Some(ids), &mut act.routes),
            Some(ids) => {
                own(None, &mut act.routes);
                scratch.filled.clear();
                for (own, fixed) in act.routes.experts.chunks(k).zip(ids.chunks(k)) {
                    scratch.filled.extend_from_slice(if fixed.contains(&FREE) { own } else { fixed });
                }
                router::forward(self.scoring(), &scratch.logits, bias, k, Some(&scratch.filled), &mut act.routes);
            }
        }
    }

    /// Turns `d_x[T, H]` from the gradient of the layer's output into that of its input, adds the weights' to `grads`, and
    /// returns the layer's balance loss, whose gradient enters times `aux`. `uses` is one a row.
    pub fn backward(
        &self,
        x: &Tensor,
        forest: &Forest,
        uses: &[u32],
        aux: f32,
        act: &Activations,
        scratch: &mut Scratch,
        d_x: &mut Tensor,
        grads: &mut Weights,
    ) -> f32 {
        let c = self.config;
        let s = scratch;
        norm::forward(&act.mid, self.w(self.index.post_norm), c.norm_eps, &mut s.h);
        // The feed-forward: d_h is the gradient of h2.
        let (alpha, beta) = match c.norm {
            Norm::Pre => (1.0, 1.0),
            Norm::Post { alpha, beta } => (alpha, beta),
        };
        let d_branch = scaled(beta, d_x, &mut s.d_branch);
        let FeedIndex { gate, w1, w3, w2, .. } = self.index.feed;
        let weights = experts::Experts { w1: self.w(w1), w3: self.w(w3), w2: self.w(w2) };
        let [g1, g3, g2] = grads.several_mut([w1, w3, w2]);
        let expert_grads = experts::ExpertGrads { w1: g1, w3: g3, w2: g2 };
        experts::backward(
            weights,
            &s.h,
            &act.routes,
            &act.grouped,
            d_branch,
            &mut s.d_h,
            &mut s.d_weights,
            expert_grads,
        );
        let mut balance = 0.0;
        if let Some(gate) = gate {
            let d_scores = if aux == 0.0 {
                balance = router::balance_loss(&act.routes, uses, 0.0, None);
                None
            } else {
                s.d_scores.resize(act.routes.scores.shape());
                s.d_scores.fill(0.0);
                balance = router::balance_loss(&act.routes, uses, aux, Some(&mut s.d_scores));
                Some(&s.d_scores)
            };
            router::backward(self.scoring(), &act.routes, &s.d_weights, d_scores, &mut s.d_logits);
            linear::backward_weight(&s.h, &s.d_logits, grads.at_mut(gate));
            linear::backward_input_add(&s.d_logits, self.w(gate), &mut s.d_h);
        }
        let post = self.index.post_norm;
        self.norm_backward(&act.mid, post, alpha, d_x, &mut s.d_h, &mut s.d_mid, grads);

        // The mixer: d_h becomes the gradient of h1.
        norm::forward(x, self.w(self.index.input_norm), c.norm_eps, &mut s.h);
        let d_branch = scaled(beta, &s.d_mid, &mut s.d_branch);
        match &self.index.mixer {
            MixerIndex::Softmax { q, k, v, o, norms } => {
                let [d_mixed, d_raw_q, d_raw_k] = &mut s.d_width;
                linear::backward_weight(&act.mixed, d_branch, grads.at_mut(*o));
                linear::backward_input(d_branch, self.w(*o), d_mixed);
                softmax::backward(
                    self.heads(),
                    forest,
                    &act.q,
                    &act.k,
                    &act.v,
                    &act.mixed,
                    &act.lse,
                    d_mixed,
                    &mut s.dq,
                    &mut s.dk,
                    &mut s.dv,
                );
                if c.rotary_dim > 0 {
                    rope::backward(&mut s.dq, forest.positions(), c.head_dim, c.rotary_dim, c.rope_theta);
                    rope::backward(&mut s.dk, forest.positions(), c.head_dim, c.rotary_dim, c.rope_theta);
                }
                let (dq, dk) = if let Some((q_norm, k_norm)) = norms {
                    let eps = c.norm_eps;
                    norm::backward(&act.raw[0], self.w(*q_norm), eps, &s.dq, d_raw_q, grads.at_mut(*q_norm));
                    norm::backward(&act.raw[1], self.w(*k_norm), eps, &s.dk, d_raw_k, grads.at_mut(*k_norm));
                    (&*d_raw_q, &*d_raw_k)
                } else {
                    (&s.dq, &s.dk)
                };
                linear::backward_weight(&s.h, dq, grads.at_mut(*q));
                linear::backward_weight(&s.h, dk, grads.at_mut(*k));
                linear::backward_weight(&s.h, &s.dv, grads.at_mut(*v));
                linear::backward_input(dq, self.w(*q), &mut s.d_h);
                linear::backward_input_add(dk, self.w(*k), &mut s.d_h);
                linear::backward_input_add(&s.dv, self.w(*v), &mut s.d_h);
            }
            MixerIndex::Lightning { heads, qkv, gate, out, norm: out_norm } => {
                let [d_gated, d_normed, d_gate] = &mut s.d_width;
                norm::forward(&act.mixed, self.w(*out_norm), OUTPUT_NORM_EPS, &mut s.normed);
                pointwise::gated(&s.normed, &act.gate, &mut s.gated);
                linear::backward_weight(&s.gated, d_branch, grads.at_mut(*out));
                linear::backward_input(d_branch, self.w(*out), d_gated);
                pointwise::gated_backward(&s.normed, &act.gate, d_gated, d_normed, d_gate);
                let d_mixed = d_gated; // free again
                norm::backward(
                    &act.mixed,
                    self.w(*out_norm),
                    OUTPUT_NORM_EPS,
                    d_normed,
                    d_mixed,
                    grads.at_mut(*out_norm),
                );
                let [q, k, v] = &mut s.qkv;
                pointwise::silu_apart(&act.qkv, c.head_dim, [q, k, v]);
                lightning::backward(heads, forest, q, k, v, d_mixed, &mut s.dq, &mut s.dk, &mut s.dv);
                pointwise::silu_apart_backward(&act.qkv, c.head_dim, [&s.dq, &s.dk, &s.dv], &mut s.d_fused);
                linear::backward_weight(&s.h, &s.d_fused, grads.at_mut(*qkv));
                linear::backward_weight(&s.h, d_gate, grads.at_mut(*gate));
                linear::backward_input(&s.d_fused, self.w(*qkv), &mut s.d_h);
                linear::backward_input_add(d_gate, self.w(*gate), &mut s.d_h);
            }
        }
        let input = self.index.input_norm;
        self.norm_backward(x, input, alpha, &s.d_mid, &mut s.d_h, d_x, grads);
        balance
    }

    /// Through a norm and the residual beside its branch: `d_x` from `d_out`, the gradient of the sum, and `d_h`, the branch's
    /// of the normed rows. Pre-norm adds the residual's gradient behind the norm, post-norm (α) before it.
    fn norm_backward(
        &self,
        x: &Tensor,
        weight: usize,
        alpha: f32,
        d_out: &Tensor,
        d_h: &mut Tensor,
        d_x: &mut Tensor,
        grads: &mut Weights,
    ) {
        let eps = self.config.norm_eps;
        match self.config.norm {
            Norm::Pre => {
                norm::backward(x, self.w(weight), eps, d_h, d_x, grads.at_mut(weight));
                pointwise::add_scaled(1.0, d_out, d_x);
            }
            Norm::Post { .. } => {
                pointwise::add_scaled(alpha, d_out, d_h);
                norm::backward(x, self.w(weight), eps, d_h, d_x, grads.at_mut(weight));
            }
        }
    }
}

/// `beta · d`, without a copy where beta is 1.
fn scaled<'a>(beta: f32, d: &'a Tensor, out: &'a mut Tensor) -> &'a Tensor {
    if beta == 1.0 {
        return d;
    }
    pointwise::combine(beta, d, 0.0, d, out);
    out
}
