//! The one decoder: explicit forward and backward over a forest, by config. No autograd graph; a layer's backward is its
//! forward read upside down (`layer`). Sampling is in `rollout`, files in `checkpoint`.

pub(crate) mod memory;

use hone_kernels::{Forest, Prediction, Tensor, embedding, head, head::Scores, norm};
use hone_runs::Result;

use crate::config::ModelConfig;
pub use crate::layer::FREE;
use crate::layer::{Activations, Layer, Mixing, OverForest, Scratch};
pub use crate::weights::Weights;
use crate::weights::{Index, begin, plan, plan_buffers};

/// A model: config, weights, and the buffers that no gradient trains.
#[derive(Clone, Debug)]
pub struct Decoder {
    /// Shape.
    pub config: ModelConfig,
    /// Trained weights.
    pub weights: Weights,
    /// What is kept but not trained by gradient: selection biases of sigmoid routers.
    pub buffers: Weights,
    index: Index,
}

/// Everything forward leaves for backward; grows to the largest batch and is reused.
#[derive(Default)]
pub struct Workspace {
    /// Input of each layer and the last layer's output, `[T, H]`; two in turn where nothing is kept.
    inputs: Vec<Tensor>,
    /// What layers leave: one a layer, or one for all.
    layers: Vec<Activations>,
    /// After the last norm, `[T, H]`.
    hidden: Tensor,
    /// The embedding transposed, where it is the head.
    tied_head: Tensor,
    /// Experts `[T, k]` a layer; none where the feed-forward is dense.
    routes: Vec<Vec<u32>>,
    replay: Option<Vec<Vec<u32>>>,
    kept: Keep,
    rows: usize,
    uses: Vec<u32>,
    scratch: Scratch,
    d_x: Tensor,
    d_hidden: Tensor,
    d_head: Tensor,
}

/// What a forward pass leaves in the workspace.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) enum Keep {
    /// The final hidden states and the routes.
    #[default]
    Outputs,
    /// And each layer's input.
    Inputs,
    /// And all that backward reads.
    Everything,
}

/// What a forward pass is asked beside its forest.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pass<'a> {
    /// Expert ids a layer `[T, k]` to replay; a row with [`FREE`] in it is routed anew.
    pub replay: Option<&'a [Vec<u32>]>,
    /// Keep activations for backward.
    pub train: bool,
    /// Keep only each layer's input and recompute the rest in backward.
    pub recompute: bool,
}

impl Workspace {
    /// Expert ids that the last forward pass took: `[T, k]` a layer, empty where the feed-forward is dense.
    pub fn routes(&self) -> &[Vec<u32>] {
        &self.routes
    }
    /// Final hidden states `[T, H]` of the last forward pass, after the last norm.
    pub fn hidden(&self) -> &Tensor {
        &self.hidden
    }
}

impl Decoder {
    /// Fresh weights from `seed`.
    ///
    /// # Errors
    /// Usage, where the config contradicts itself.
    pub fn new(config: ModelConfig, seed: u64) -> Result<Self> {
        config.validate()?;
        let weights = begin(&plan(&config), seed);
        let buffers = begin(&plan_buffers(&config), seed);
        Ok(Self::from_parts(config, weights, buffers))
    }

    /// A decoder of tensors made after the config's plans.
    pub(crate) fn from_parts(config: ModelConfig, mut weights: Weights, buffers: Weights) -> Self {
        weights.set_dtype(config.dtype.into());
        let index = Index::new(&config, &weights, &buffers);
        Self { config, weights, buffers, index }
    }

    fn layer(&self, number: usize) -> Layer<'_> {
        let index = &self.index.layers[number];
        Layer { config: &self.config, number, index, weights: &self.weights, buffers: &self.buffers }
    }

    /// Fills `ws` with the final hidden states `[T, H]` (after the last norm). Call inside a pool. Panics on tokens past the
    /// vocabulary and on replays of other shapes: programmers' errors.
    pub fn forward(&self, forest: &Forest, pass: &Pass, ws: &mut Workspace) {
        let keep = match (pass.train, pass.recompute) {
            (false, _) => Keep::Outputs,
            (true, true) => Keep::Inputs,
            (true, false) => Keep::Everything,
        };
        ws.replay = match (keep, pass.replay) {
            (Keep::Inputs, Some(replay)) => Some(replay.to_vec()),
            _ => None,
        };
        self.prepare_head(ws);
        let mut mixing = OverForest { forest, finals: None };
        self.run(forest.tokens(), forest.positions(), &mut mixing, keep, pass.replay, ws);
    }

    /// The pass itself: rows of `tokens` at `positions` that see each other through `mixing`.
    pub(crate) fn run(
        &self,
        tokens: &[u32],
        positions: &[u32],
        mixing: &mut dyn Mixing,
        keep: Keep,
        replay: Option<&[Vec<u32>]>,
        ws: &mut Workspace,
    ) {
        let layers = self.config.layers;
        let (inputs, kept) = match keep {
            Keep::Outputs => (2, 1),
            Keep::Inputs => (layers + 1, 1),
            Keep::Everything => (layers + 1, layers),
        };
        // Grown, never shrunk: a pass that keeps less uses the first ones.
        ws.inputs.resize_with(ws.inputs.len().max(inputs), Tensor::default);
        ws.layers.resize_with(ws.layers.len().max(kept), Activations::default);
        ws.routes.resize_with(if self.config.experts > 0 { layers } else { 0 }, Vec::new);
        (ws.kept, ws.rows) = (keep, tokens.len());
        embedding::forward(self.weights.at(self.index.embed), tokens, &mut ws.inputs[0]);
        for l in 0..layers {
            let [x, out] =
                ws.inputs.get_disjoint_mut([l % inputs, (l + 1) % inputs]).expect("two places, and more than one");
            let act = &mut ws.layers[l % kept];
            let replay = replay.map(|r| r[l].as_slice());
            self.layer(l).forward(x, positions, replay, mixing, act, &mut ws.scratch, out);
            if let Some(routes) = ws.routes.get_mut(l) {
                routes.clone_from(&act.routes.experts);
            }
        }
        let last = &ws.inputs[layers % inputs];
        norm::forward(last, self.weights.at(self.index.norm), self.config.norm_eps, &mut ws.hidden);
    }

    /// Lays the head ready in `ws`: a tied one is the embedding transposed, anew after each change of weights.
    pub(crate) fn prepare_head(&self, ws: &mut Workspace) {
        if self.index.head.is_none() {
            let embed = self.weights.at(self.index.embed);
            let (v, h) = (embed.rows(), embed.cols());
            ws.tied_head.resize(&[h, v]);
            let out = ws.tied_head.data_mut();
            for (id, row) in embed.data().chunks_exact(h).enumerate() {
                for (i, &x) in row.iter().enumerate() {
                    out[i * v + id] = x;
                }
            }
        }
    }

    fn head<'a>(&'a self, tied: &'a Tensor) -> &'a Tensor {
        self.index.head.map_or(tied, |head| self.weights.at(head))
    }

    /// Log-prob and entropy of each prediction (sorted by row), and the `top` most probable tokens there, after [`Self::forward`].
    /// Logits are divided by `temperature` > 0.
    pub fn score(
        &self,
        predictions: &[Prediction],
        temperature: f32,
        top: usize,
        ws: &mut Workspace,
        scores: &mut Scores,
    ) {
        head::forward(&ws.hidden, self.head(&ws.tied_head), predictions, temperature, top, scores);
    }

    /// Log-probs of the whole vocabulary for each row of `hidden[N, H]`: `out[N, V]`, after [`Self::prepare_head`].
    pub(crate) fn distributions(&self, hidden: &Tensor, temperature: f32, ws: &Workspace, out: &mut Tensor) {
        head::distributions(hidden, self.head(&ws.tied_head), temperature, out);
    }

    /// Adds to `grads` the gradient for `d_logprob` a prediction, and `aux` times the balance loss's; returns the balance loss
    /// (mean over MoE layers; 0 where there are none). Follows a [`Self::forward`] with `train` on the same forest and weights.
    pub fn backward(
        &self,
        forest: &Forest,
        predictions: &[Prediction],
        temperature: f32,
        scores: &Scores,
        d_logprob: &[f32],
        aux: f32,
        ws: &mut Workspace,
        grads: &mut Weights,
    ) -> f32 {
        assert!(ws.kept != Keep::Outputs && ws.rows == forest.rows(), "backward follows a training forward");
        let layers = self.config.layers;
        ws.uses.clear();
        ws.uses.reserve_exact(forest.rows());
        for segment in forest.segments() {
            ws.uses.extend(std::iter::repeat_n(segment.uses, segment.len));
        }

        let head = self.head(&ws.tied_head);
        let d_head = match self.index.head {
            Some(index) => grads.at_mut(index),
            None => {
                ws.d_head.set_dtype(self.config.dtype.into());
                ws.d_head.resize(head.shape());
                ws.d_head.fill(0.0);
                &mut ws.d_head
            }
        };
        head::backward(&ws.hidden, head, predictions, temperature, scores, d_logprob, &mut ws.d_hidden, d_head);
        if self.index.head.is_none() {
            let d_embed = grads.at_mut(self.index.embed);
            let (v, h) = (d_embed.rows(), d_embed.cols());
            for (id, row) in d_embed.data_mut().chunks_exact_mut(h).enumerate() {
                for (i, d) in row.iter_mut().enumerate() {
                    *d += ws.d_head.data()[i * v + id];
                }
            }
        }
        let last_norm = self.index.norm;
        norm::backward(
            &ws.inputs[layers],
            self.weights.at(last_norm),
            self.config.norm_eps,
            &ws.d_hidden,
            &mut ws.d_x,
            grads.at_mut(last_norm),
        );

        let routed = if self.config.experts > 0 { layers } else { 0 };
        let aux = aux / routed.max(1) as f32;
        let mut balance = 0.0;
        for l in (0..layers).rev() {
            let layer = self.layer(l);
            let act = if ws.kept == Keep::Inputs {
                let [x, out] = ws.inputs.get_disjoint_mut([l, l + 1]).expect("neighbours");
                let replay = ws.replay.as_ref().map(|r| r[l].as_slice());
                let mut mixing = OverForest { forest, finals: None };
                layer.forward(x, forest.positions(), replay, &mut mixing, &mut ws.layers[0], &mut ws.scratch, out);
                &ws.layers[0]
            } else {
                &ws.layers[l]
            };
            balance += layer.backward(&ws.inputs[l], forest, &ws.uses, aux, act, &mut ws.scratch, &mut ws.d_x, grads);
        }
        embedding::backward(forest.tokens(), &ws.d_x, grads.at_mut(self.index.embed));
        balance / routed.max(1) as f32
    }
}
