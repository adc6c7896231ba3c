//! Named weights: which tensors a config has, under which names, how they begin, and how they lie on disk. Inside, matrices
//! lie `[in, out]` and a layer's experts are one tensor `[E, in, out]`; on disk they lie as in Hugging Face's MiniMax files,
//! `[out, in]`, an expert a tensor.

use std::sync::Arc;

use hone_kernels::{Dtype, Tensor, lightning};
use hone_runs::draws;
use rand::RngExt;

use crate::config::{Mixer, ModelConfig, Norm, Router};

/// Named tensors in a fixed order (by name): a decoder's weights, gradients or moments.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Weights {
    names: Arc<Vec<String>>,
    tensors: Vec<Tensor>,
}

impl Weights {
    /// Zeros of the same names, shapes and dtypes.
    pub fn zeros_like(&self) -> Self {
        let zeros = |t: &Tensor| {
            let mut zeros = Tensor::zeros(t.shape());
            zeros.set_dtype(t.dtype());
            zeros
        };
        Self { names: self.names.clone(), tensors: self.tensors.iter().map(zeros).collect() }
    }
    /// (name, tensor) in order. Names are Hugging Face's, without the expert's number.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.names.iter().map(String::as_str).zip(&self.tensors)
    }
    /// (name, tensor) in the same order, mutable.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (&str, &mut Tensor)> {
        self.names.iter().map(String::as_str).zip(&mut self.tensors)
    }
    /// The tensor called `name`.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.find(name).map(|i| &self.tensors[i])
    }
    /// The tensor called `name`, mutable.
    pub fn get_mut(&mut self, name: &str) -> Option<&mut Tensor> {
        self.find(name).map(|i| &mut self.tensors[i])
    }
    /// Number of elements of all tensors.
    pub fn count(&self) -> usize {
        self.tensors.iter().map(Tensor::len).sum()
    }
    /// True where a NaN or an infinity is among them.
    pub fn has_non_finite(&self) -> bool {
        self.tensors.iter().any(|t| t.data().iter().any(|x| !x.is_finite()))
    }

    pub(crate) fn at(&self, index: usize) -> &Tensor {
        &self.tensors[index]
    }
    pub(crate) fn at_mut(&mut self, index: usize) -> &mut Tensor {
        &mut self.tensors[index]
    }
    /// Several tensors at once; panics where two indices are equal.
    pub(crate) fn several_mut<const N: usize>(&mut self, indices: [usize; N]) -> [&mut Tensor; N] {
        self.tensors.get_disjoint_mut(indices).expect("distinct indices of this config")
    }
    pub(crate) fn find(&self, name: &str) -> Option<usize> {
        self.names.binary_search_by(|n| n.as_str().cmp(name)).ok()
    }
}

/// How a tensor lies on disk.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Layout {
    /// As inside.
    Same,
    /// One matrix, transposed; a leading dimension of 1 is dropped.
    Transposed,
    /// A leading dimension of experts: each its own matrix, transposed.
    Experts,
}

/// One tensor of a config.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Planned {
    pub name: String,
    pub shape: Vec<usize>,
    pub layout: Layout,
    begin: Begin,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Begin {
    Zeros,
    Ones,
    /// Uniform with this standard deviation: unlike a normal draw it needs no logarithm or cosine, so it is the same bits everywhere.
    Random(f64),
}

/// The trained tensors of `config`, by name.
pub(crate) fn plan(config: &ModelConfig) -> Vec<Planned> {
    let c = config;
    let (h, w, kv, i) = (c.hidden_size, c.width(), c.kv_width(), c.intermediate_size);
    // What a branch adds is damped so that the residual's variance does not grow with depth: GPT-2's 1/√(2N) for pre-norm,
    // DeepNorm's (8N)^-¼ for the scaled post-norm, where MiniMax-01 (§4.2) has it as an initialisation gain.
    let damp = match c.norm {
        Norm::Pre => (2.0 * c.layers as f64).powf(-0.5),
        Norm::Post { .. } => (8.0 * c.layers as f64).powf(-0.25),
    };
    let mut all = Vec::new();
    let mut add = |name: String, shape: &[usize], layout, begin| {
        all.push(Planned { name, shape: shape.to_vec(), layout, begin });
    };
    let fan_in = |n: usize, gain: f64| Begin::Random(gain / (n as f64).sqrt());

    // Embedding and head begin small (the usual 0.02): first predictions are near uniform.
    add("model.embed_tokens.weight".into(), &[c.vocab_size, h], Layout::Same, Begin::Random(0.02));
    add("model.norm.weight".into(), &[h], Layout::Same, Begin::Ones);
    if !c.tie_embeddings {
        add("lm_head.weight".into(), &[h, c.vocab_size], Layout::Transposed, Begin::Random(0.02));
    }
    for l in 0..c.layers {
        let mut layer = |name: &str, shape: &[usize], layout, begin| {
            add(format!("model.layers.{l}.{name}.weight"), shape, layout, begin);
        };
        layer("input_layernorm", &[h], Layout::Same, Begin::Ones);
        layer("post_attention_layernorm", &[h], Layout::Same, Begin::Ones);
        match c.mixer(l) {
            Mixer::Softmax => {
                layer("self_attn.q_proj", &[h, w], Layout::Transposed, fan_in(h, 1.0));
                layer("self_attn.k_proj", &[h, kv], Layout::Transposed, fan_in(h, 1.0));
                layer("self_attn.v_proj", &[h, kv], Layout::Transposed, fan_in(h, 1.0));
                layer("self_attn.o_proj", &[w, h], Layout::Transposed, fan_in(w, damp));
                if c.qk_norm {
                    layer("self_attn.q_norm", &[w], Layout::Same, Begin::Ones);
                    layer("self_attn.k_norm", &[kv], Layout::Same, Begin::Ones);
                }
            }
            Mixer::Lightning => {
                layer("self_attn.qkv_proj", &[h, 3 * w], Layout::Transposed, fan_in(h, 1.0));
                layer("self_attn.output_gate", &[h, w], Layout::Transposed, fan_in(h, 1.0));
                layer("self_attn.out_proj", &[w, h], Layout::Transposed, fan_in(w, damp));
                layer("self_attn.norm", &[w], Layout::Same, Begin::Ones);
            }
        }
        if c.experts == 0 {
            layer("mlp.gate_proj", &[1, h, i], Layout::Transposed, fan_in(h, 1.0));
            layer("mlp.up_proj", &[1, h, i], Layout::Transposed, fan_in(h, 1.0));
            layer("mlp.down_proj", &[1, i, h], Layout::Transposed, fan_in(i, damp));
        } else {
            // A small gate begins with near-equal scores: no expert is starved before it has learned anything.
            layer("block_sparse_moe.gate", &[h, c.experts], Layout::Transposed, Begin::Random(0.02));
            layer("block_sparse_moe.experts.w1", &[c.experts, h, i], Layout::Experts, fan_in(h, 1.0));
            layer("block_sparse_moe.experts.w3", &[c.experts, h, i], Layout::Experts, fan_in(h, 1.0));
            layer("block_sparse_moe.experts.w2", &[c.experts, i, h], Layout::Experts, fan_in(i, damp));
        }
    }
    all.sort_by(|a, b| a.name.cmp(&b.name));
    all
}

/// The tensors of `config` that no gradient trains: the selection bias of a sigmoid router, `[E]` a layer.
pub(crate) fn plan_buffers(config: &ModelConfig) -> Vec<Planned> {
    let biased = if config.experts > 0 && config.router == Router::SigmoidBias { config.layers } else { 0 };
    let mut all: Vec<Planned> = (0..biased)
        .map(|l| Planned {
            name: format!("model.layers.{l}.block_sparse_moe.e_score_correction_bias"),
            shape: vec![config.experts],
            layout: Layout::Same,
            begin: Begin::Zeros,
        })
        .collect();
    all.sort_by(|a, b| a.name.cmp(&b.name));
    all
}

/// Fresh tensors, each drawn by its name.
pub(crate) fn begin(plan: &[Planned], seed: u64) -> Weights {
    let tensors = plan
        .iter()
        .map(|p| {
            let mut tensor = Tensor::zeros(&p.shape);
            match p.begin {
                Begin::Zeros => {}
                Begin::Ones => tensor.fill(1.0),
                Begin::Random(std) => {
                    let mut rng = draws(seed, &format!("init {}", p.name), 0, 0);
                    let half = 3f64.sqrt() * std;
                    for x in tensor.data_mut() {
                        *x = (half * (2.0 * rng.random::<f64>() - 1.0)) as f32;
                    }
                }
            }
            tensor
        })
        .collect();
    Weights { names: Arc::new(plan.iter().map(|p| p.name.clone()).collect()), tensors }
}

/// Takes tensors in the order of `plan`.
pub(crate) fn gather(plan: &[Planned], tensors: Vec<Tensor>) -> Weights {
    Weights { names: Arc::new(plan.iter().map(|p| p.name.clone()).collect()), tensors }
}

/// Whether products with a tensor run in the model's dtype: those with the layers' matrices. Embedding, head and router are f32 in any
/// case (MiniMax-M1, arXiv:2506.13585 §3.2, of the head).
fn in_dtype(name: &str, shape: &[usize]) -> bool {
    name.starts_with("model.layers.") && shape.len() > 1 && !name.ends_with(".block_sparse_moe.gate.weight")
}

/// Bytes of what [`Weights::set_dtype`] keeps of a tensor.
pub(crate) fn rounded_bytes(config: &ModelConfig, name: &str, shape: &[usize]) -> usize {
    match shape {
        [stack @ .., rows, cols] if config.dtype.here() == "bf16" && in_dtype(name, shape) => {
            4 * stack.iter().product::<usize>() * rows.div_ceil(2) * cols
        }
        _ => 0,
    }
}

impl Weights {
    /// Sets what products with the layers' matrices multiply, and keeps those rounded beside them.
    pub(crate) fn set_dtype(&mut self, dtype: Dtype) {
        for (name, tensor) in self.names.iter().zip(&mut self.tensors) {
            if in_dtype(name, tensor.shape()) {
                tensor.set_dtype(dtype);
                tensor.round();
            }
        }
    }
}

/// Where each layer's tensors stand among the weights: found once, so that no step looks names up.
#[derive(Clone, Debug)]
pub(crate) struct Index {
    pub embed: usize,
    /// None where the embedding is the head.
    pub head: Option<usize>,
    pub norm: usize,
    pub layers: Vec<LayerIndex>,
}

#[derive(Clone, Debug)]
pub(crate) struct LayerIndex {
    pub input_norm: usize,
    pub post_norm: usize,
    pub mixer: MixerIndex,
    pub feed: FeedIndex,
}

#[derive(Clone, Debug)]
pub(crate) enum MixerIndex {
    Softmax { q: usize, k: usize, v: usize, o: usize, norms: Option<(usize, usize)> },
    Lightning { heads: lightning::Heads, qkv: usize, gate: usize, out: usize, norm: usize },
}

#[derive(Clone, Debug)]
pub(crate) struct FeedIndex {
    /// None for a dense feed-forward.
    pub gate: Option<usize>,
    /// Among the buffers.
    pub bias: Option<usize>,
    pub w1: usize,
    pub w3: usize,
    pub w2: usize,
}

impl Index {
    /// The index of `config` into `weights` and `buffers` made from its plans.
    pub fn new(config: &ModelConfig, weights: &Weights, buffers: &Weights) -> Self {
        let find = |name: &str| weights.find(name).expect("the plan has every tensor the index names");
        let layers = (0..config.layers)
            .map(|l| {
                let at = |name: &str| find(&format!("model.layers.{l}.{name}.weight"));
                let mixer = match config.mixer(l) {
                    Mixer::Softmax => MixerIndex::Softmax {
                        q: at("self_attn.q_proj"),
                        k: at("self_attn.k_proj"),
                        v: at("self_attn.v_proj"),
                        o: at("self_attn.o_proj"),
                        norms: config.qk_norm.then(|| (at("self_attn.q_norm"), at("self_attn.k_norm"))),
                    },
                    Mixer::Lightning => MixerIndex::Lightning {
                        heads: lightning::Heads {
                            head_dim: config.head_dim,
                            slopes: lightning::slopes(config.heads, l, config.layers),
                            block: config.block,
                        },
                        qkv: at("self_attn.qkv_proj"),
                        gate: at("self_attn.output_gate"),
                        out: at("self_attn.out_proj"),
                        norm: at("self_attn.norm"),
                    },
                };
                let feed = if config.experts == 0 {
                    let (w1, w3, w2) = (at("mlp.gate_proj"), at("mlp.up_proj"), at("mlp.down_proj"));
                    FeedIndex { gate: None, bias: None, w1, w3, w2 }
                } else {
                    FeedIndex {
                        gate: Some(at("block_sparse_moe.gate")),
                        bias: buffers.find(&format!("model.layers.{l}.block_sparse_moe.e_score_correction_bias")),
                        w1: at("block_sparse_moe.experts.w1"),
                        w3: at("block_sparse_moe.experts.w3"),
                        w2: at("block_sparse_moe.experts.w2"),
                    }
                };
                let (input_norm, post_norm) = (at("input_layernorm"), at("post_attention_layernorm"));
                LayerIndex { input_norm, post_norm, mixer, feed }
            })
            .collect();
        let head = weights.find("lm_head.weight");
        Self { embed: find("model.embed_tokens.weight"), head, norm: find("model.norm.weight"), layers }
    }
}
