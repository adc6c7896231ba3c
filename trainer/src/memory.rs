//! What a recipe's training takes of a machine's memory, by part, from shapes alone. What a workspace takes follows its fields
//! (`decoder::memory`, `layer::memory`); here are the parts around it and their sum.

use serde::Serialize;

use crate::config::ModelConfig;
use crate::decoder::Keep;
use crate::decoder::memory::Parts;
use crate::rollout::{ACTIVE, PREFILL_ROWS};
use crate::weights::{plan, plan_buffers, rounded_bytes};

/// Bytes by part, all held at one time at the worst; they add up to [`Self::total`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// Weights, those kept rounded beside them, and the selection biases of routers.
    pub weights: u64,
    /// One gradient a weight.
    pub gradients: u64,
    /// AdamW's two moments a weight.
    pub moments: u64,
    /// What lightning layers, feed-forwards included, leave for backward.
    pub lightning_layers: u64,
    /// What softmax layers, feed-forwards included, leave for backward.
    pub softmax_layers: u64,
    /// The residual stream between layers, its gradient, and expert choices.
    pub stream: u64,
    /// Arrays that layers share.
    pub scratch: u64,
    /// Scores of predictions, tiles of logits, and a tied head with its gradient.
    pub head: u64,
    /// What kernels borrow during a call. An upper estimate: what is lent to one call is lent again to the next.
    pub kernels: u64,
    /// What sampling takes: keys and values, lightning states, distributions, a workspace of its own.
    pub rollout: u64,
    /// A step's packed batches and samples. An estimate.
    pub data: u64,
    /// The largest tensor on its way to a checkpoint file.
    pub checkpoint: u64,
}

/// How much of everything a stage has at once, at most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Load {
    /// Rows a forward pass.
    pub rows: usize,
    /// Predictions a forward pass.
    pub predictions: usize,
    /// Rows packed for a step, over all its passes.
    pub step_rows: usize,
    /// Rows of the longest tree: a sequence, or a prompt with all its completions.
    pub tree_rows: usize,
    /// Trees of several segments in a pass.
    pub branching: usize,
    /// What is sampled; None for a stage that samples nothing.
    pub sampling: Option<Sampling>,
}

/// How much a step samples, at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Sampling {
    /// Prompts a step.
    pub prompts: usize,
    /// Completions a prompt.
    pub group: usize,
    /// Tokens of the longest prompt.
    pub prompt: usize,
    /// Tokens a completion.
    pub completion: usize,
}

const FLOAT: usize = 4;

impl Memory {
    /// Of training a model of `config` under `load` on `threads` workers. `aux` says whether the balance loss has a gradient.
    pub fn plan(config: &ModelConfig, load: &Load, threads: usize, aux: bool) -> Self {
        let c = config;
        let sizes = |of: &[crate::weights::Planned]| -> Vec<usize> {
            of.iter().map(|t| FLOAT * t.shape.iter().product::<usize>()).collect()
        };
        let (trained, buffers) = (sizes(&plan(c)), sizes(&plan_buffers(c)));
        let weights: usize = trained.iter().sum();
        let rounded = plan(c).iter().map(|t| rounded_bytes(c, &t.name, &t.shape)).sum::<usize>();
        let Parts { lightning, softmax, stream, scratch, head } = Parts::plan(c, Keep::Everything, load.rows, aux);
        let bytes = |n: usize| n as u64;
        Self {
            weights: bytes(weights + rounded + buffers.iter().sum::<usize>()),
            gradients: bytes(weights),
            moments: bytes(2 * weights),
            lightning_layers: bytes(lightning),
            softmax_layers: bytes(softmax),
            stream: bytes(stream),
            scratch: bytes(scratch),
            head: bytes(head + scores(c, load)),
            kernels: bytes(kernels(c, load, threads)),
            rollout: bytes(load.sampling.map_or(0, |s| rollout(c, &s))),
            data: bytes(data(c, load)),
            // As floats and as bytes, at the same time.
            checkpoint: bytes(2 * trained.iter().max().copied().unwrap_or(0)),
        }
    }

    /// The parts by name, in the order in which they are shown.
    pub fn parts(&self) -> [(&'static str, u64); 12] {
        [
            ("weights", self.weights),
            ("gradients", self.gradients),
            ("optimizer moments", self.moments),
            ("kept by lightning layers", self.lightning_layers),
            ("kept by softmax layers", self.softmax_layers),
            ("residual stream", self.stream),
            ("shared by layers", self.scratch),
            ("head and scores", self.head),
            ("kernels, at most", self.kernels),
            ("rollout caches", self.rollout),
            ("batches, about", self.data),
            ("writing a checkpoint", self.checkpoint),
        ]
    }

    /// The sum of all parts.
    pub fn total(&self) -> u64 {
        self.parts().iter().map(|(_, bytes)| bytes).sum()
    }

    /// The larger of two, part by part: a run's arrays grow from stage to stage and never shrink.
    #[must_use]
    pub fn or_larger(self, other: Self) -> Self {
        Self {
            weights: self.weights.max(other.weights),
            gradients: self.gradients.max(other.gradients),
            moments: self.moments.max(other.moments),
            lightning_layers: self.lightning_layers.max(other.lightning_layers),
            softmax_layers: self.softmax_layers.max(other.softmax_layers),
            stream: self.stream.max(other.stream),
            scratch: self.scratch.max(other.scratch),
            head: self.head.max(other.head),
            kernels: self.kernels.max(other.kernels),
            rollout: self.rollout.max(other.rollout),
            data: self.data.max(other.data),
            checkpoint: self.checkpoint.max(other.checkpoint),
        }
    }
}

/// Log-prob, entropy, denominator and gradient a prediction, and the tiles of logits with the rows that they are made of: the head
/// has about 1 Mi logits at hand at a time, whatever the vocabulary.
fn scores(c: &ModelConfig, load: &Load) -> usize {
    const TILE: usize = 1024;
    const LOGITS: usize = 1024 * 1024;
    let tile = c.vocab_size.min(TILE);
    let block = load.predictions.min(LOGITS / tile);
    FLOAT * (4 * load.predictions + block * (2 * c.hidden_size + tile))
}

/// What backward of the experts borrows once, and attention on every worker, with the states that branching trees begin from.
fn kernels(c: &ModelConfig, load: &Load, threads: usize) -> usize {
    let (softmax, d) = (c.softmax_layers(), c.head_dim);
    let experts = load.rows * c.experts_per_token.max(1) * (c.hidden_size + 3 * c.intermediate_size + 1);
    // Keys and values packed by lanes, and four rows of scores; with decay, rows side by side and the states of all heads too.
    let attend = if softmax > 0 { 2 * (load.tree_rows + 32) * d + 8 * (load.tree_rows + d + 64) } else { 0 };
    let chunk = c.block.min(load.rows);
    let decay =
        if softmax < c.layers { 5 * (chunk + 32) * d + 8 * (chunk.max(d) + 32) + (c.heads + 2) * d * d } else { 0 };
    let states = if softmax < c.layers { load.branching * c.heads * d * d } else { 0 };
    // A product lays out 256 columns of one factor by 512 lanes, and 48 rows of the other.
    let product = 256 * 512 + 128 * 32 + 48 * 528;
    FLOAT * (experts + threads * (attend.max(decay) + product) + states)
}

/// Tokens, positions, segments, predictions and terms of a step; with sampling the samples and what goes with a term.
fn data(c: &ModelConfig, load: &Load) -> usize {
    const ROW: usize = 48;
    let routes = c.layers * c.experts_per_token;
    let sampled = load.sampling.map_or(0, |s| s.prompts * s.group * s.completion);
    // Token, log-prob and a list of routes; behaviour, advantage, weight and a reference to the routes.
    load.step_rows * ROW + sampled * (2 * (8 + 24) + FLOAT * routes + 28)
}

/// Caches of the sequences decoded at once, those of their prompts, and the arrays that a decoding step and a prefill work on.
fn rollout(c: &ModelConfig, s: &Sampling) -> usize {
    let sequences = (s.prompts * s.group).min(ACTIVE);
    let prompts = s.prompts.min(sequences.div_ceil(s.group) + 1);
    let (softmax, state) = (c.softmax_layers(), c.heads * c.head_dim * c.head_dim);
    let lightning = c.layers - softmax;
    // What grows by a row at a time has up to twice the room.
    let grown = |rows: usize| rows.next_power_of_two();
    let open = 2 * c.width() * grown(c.block.min(s.completion));
    let own = lightning * (state + open) + softmax * 2 * c.kv_width() * grown(s.completion);
    let shared = lightning * state + softmax * 2 * c.kv_width() * s.prompt;
    let rows = sequences.max((prompts * s.prompt).min(PREFILL_ROWS)).max(s.prompt);
    let finals = prompts * state;
    let workspace = Parts::plan(c, Keep::Outputs, rows, false).total();
    FLOAT * (sequences * (own + c.vocab_size) + prompts * shared + finals) + workspace
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Preset;

    #[test]
    fn every_part_is_in_the_sum_and_grows_alone() {
        let c = Preset::HybridNano.config(100);
        let sampling = Sampling { prompts: 4, group: 2, prompt: 6, completion: 8 };
        let load =
            Load { rows: 64, predictions: 64, step_rows: 64, tree_rows: 20, branching: 4, sampling: Some(sampling) };
        let plan = Memory::plan(&c, &load, 1, true);
        assert!(plan.parts().iter().all(|(name, bytes)| *bytes > 0 || panic!("{name} is nothing")));
        let json = serde_json::to_value(plan).unwrap();
        let sum: u64 = json.as_object().unwrap().values().map(|v| v.as_u64().unwrap()).sum();
        assert_eq!(sum, plan.total());
        assert_eq!((plan.gradients, plan.moments), (plan.weights, 2 * plan.weights));

        let twice = Memory::plan(&c, &Load { rows: 128, ..load }, 1, true);
        assert_eq!(plan.or_larger(twice), twice);
        assert_eq!(twice.weights, plan.weights);
        assert!(twice.lightning_layers > plan.lightning_layers * 19 / 10);
        let sft = Memory::plan(&c, &Load { sampling: None, ..load }, 1, true);
        assert_eq!((sft.rollout, sft.or_larger(plan)), (0, plan));
    }
}
