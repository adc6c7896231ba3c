//! What every stage trains: the decoder with its gradient, optimizer and buffers, and the few moves that stages are made of:
//! score a batch, send a gradient back, update. Not for which batch or which loss.

use crate::{
    budget::Spent,
    config::ModelConfig,
    data::Batch,
    decoder::{Decoder, Pass, Weights, Workspace},
    optimizer::{Optimizer, Update, learning_rate},
    recipe::OptimizerSpec,
};
use hone_kernels::head::Scores;
use hone_runs::{Class, Failure, Result};

/// A step's metrics, by name.
pub(crate) type Metrics = Vec<(&'static str, f64)>;

/// A model in training.
pub(crate) struct Learner {
    pub decoder: Decoder,
    pub optimizer: Optimizer,
    /// What the run has spent so far.
    pub spent: Spent,
    spec: OptimizerSpec,
    grads: Weights,
    workspace: Workspace,
    scores: Scores,
    d_prediction: Vec<f32>,
    load: Load,
    balance: f64,
}

/// Expert choices of the passes since the last update, `[layers, experts]`.
#[derive(Default)]
struct Load {
    counts: Vec<u64>,
    experts: usize,
}

/// What an update did, for the metrics.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    pub update: Update,
    pub lr: f64,
    /// The balance loss, averaged over the update's passes; None where the feed-forward is dense.
    pub balance: Option<f64>,
    /// Most loaded expert of any layer, as a multiple of its even share; None where the feed-forward is dense.
    pub max_load: Option<f64>,
    /// Least loaded, likewise.
    pub min_load: Option<f64>,
}

impl Learner {
    /// A learner of `decoder`, nothing spent, moments zero.
    pub fn new(decoder: Decoder, spec: OptimizerSpec) -> Self {
        let optimizer = Optimizer::new(spec, &decoder.weights);
        let mut grads = decoder.weights.zeros_like();
        if let Some(head) = grads.get_mut("lm_head.weight") {
            head.set_dtype(decoder.config.dtype.into()); // its logits are f32, its gradient need not be
        }
        let load =
            Load { counts: vec![0; decoder.config.layers * decoder.config.experts], experts: decoder.config.experts };
        Self {
            decoder,
            optimizer,
            spent: Spent::default(),
            spec,
            grads,
            workspace: Workspace::default(),
            scores: Scores::default(),
            d_prediction: Vec::new(),
            load,
            balance: 0.0,
        }
    }

    /// Zero moments and no updates, as at a stage's start.
    pub fn reset_optimizer(&mut self) {
        self.optimizer = Optimizer::new(self.spec, &self.decoder.weights);
    }

    /// A training forward pass: each term's log-prob at `temperature` into `logprob`, its row's entropy into `entropy`.
    pub fn score(&mut self, batch: &Batch, temperature: f32, logprob: &mut Vec<f32>, entropy: &mut Vec<f32>) {
        let pass = Pass { train: true, ..Pass::default() };
        self.decoder.forward(&batch.forest, &pass, &mut self.workspace);
        self.decoder.score(&batch.predictions, temperature, 0, &mut self.workspace, &mut self.scores);
        batch.gather(&self.scores.logprob, logprob);
        batch.gather(&self.scores.entropy, entropy);
        self.spent.train(&self.decoder.config, &batch.forest);
        self.load.add(&batch.forest, self.workspace.routes(), &self.decoder.config);
    }

    /// Expert ids of the last pass, `[T, k]` a layer.
    pub fn routes(&self) -> &[Vec<u32>] {
        self.workspace.routes()
    }

    /// Adds the gradient of a batch just scored, for `d_term` a term; `share` is the batch's part of the update's rows, which
    /// weighs its balance loss.
    pub fn backward(&mut self, batch: &Batch, temperature: f32, d_term: &[f32], share: f64) {
        batch.scatter(d_term, &mut self.d_prediction);
        let aux = (self.spec.balance * share) as f32;
        let balance = self.decoder.backward(
            &batch.forest,
            &batch.predictions,
            temperature,
            &self.scores,
            &self.d_prediction,
            aux,
            &mut self.workspace,
            &mut self.grads,
        );
        self.balance += share * f64::from(balance);
    }

    /// Updates the weights with the gradient gathered since the last update, and forgets it. `highest` is the stage's learning
    /// rate, `progress` how much of its compute is spent.
    ///
    /// # Errors
    /// Candidate, where the gradient is not finite; the weights are then as before.
    pub fn update(&mut self, highest: f64, progress: f64) -> Result<Step> {
        let lr = learning_rate(&self.spec, highest, self.optimizer.updates + 1, progress);
        let update = self.optimizer.update(&mut self.decoder.weights, &mut self.grads, lr);
        let update = update.ok_or_else(|| diverged("the gradient is not finite"))?;
        self.load.steer(&mut self.decoder.buffers, self.spec.bias_rate);
        let (max_load, min_load) = self.load.extremes();
        let balance = (self.decoder.config.experts > 0).then_some(self.balance);
        self.load.counts.fill(0);
        self.balance = 0.0;
        Ok(Step { update, lr, balance, max_load, min_load })
    }
}

impl Load {
    fn add(&mut self, forest: &hone_kernels::Forest, routes: &[Vec<u32>], config: &ModelConfig) {
        for (layer, experts) in routes.iter().enumerate() {
            let counts = &mut self.counts[layer * self.experts..][..self.experts];
            for (row, chosen) in experts.chunks_exact(config.experts_per_token.max(1)).enumerate() {
                let uses = u64::from(forest.uses(row));
                chosen.iter().for_each(|&e| counts[e as usize] += uses);
            }
        }
    }

    fn layers(&self) -> impl Iterator<Item = &[u64]> {
        self.counts.chunks_exact(self.experts.max(1)).filter(|counts| counts.iter().any(|&n| n > 0))
    }

    /// (most, least) loaded expert over all layers, in multiples of the even share.
    fn extremes(&self) -> (Option<f64>, Option<f64>) {
        let relative = |counts: &[u64], pick: Option<&u64>| {
            let even = counts.iter().sum::<u64>() as f64 / counts.len() as f64;
            pick.map_or(0.0, |&n| n as f64 / even)
        };
        let most = self.layers().map(|c| relative(c, c.iter().max())).reduce(f64::max);
        let least = self.layers().map(|c| relative(c, c.iter().min())).reduce(f64::min);
        (most, least)
    }

    /// Moves each selection bias by `rate` against its expert's load, and keeps a layer's biases at mean zero (loss-free
    /// balancing, arXiv:2408.15664). Choices are counted in training passes only, each once.
    fn steer(&self, buffers: &mut Weights, rate: f64) {
        for (name, bias) in buffers.iter_mut() {
            let layer =
                name.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
            let Some(counts) = layer.and_then(|l| self.counts.chunks_exact(self.experts.max(1)).nth(l)) else {
                continue;
            };
            let even = counts.iter().sum::<u64>() as f64 / counts.len() as f64;
            let bias = bias.data_mut();
            for (b, &n) in bias.iter_mut().zip(counts) {
                let against = even - n as f64;
                if against != 0.0 {
                    *b += (rate * against.signum()) as f32;
                }
            }
            let mean = bias.iter().map(|&b| f64::from(b)).sum::<f64>() / bias.len() as f64;
            bias.iter_mut().for_each(|b| *b -= mean as f32);
        }
    }
}

/// The failure of a model that has left the numbers.
pub(crate) fn diverged(what: &str) -> Failure {
    Failure::new(Class::Candidate, format!("Training diverged: {what}."))
        .hint("lower the learning rate or optimizer.clip, or raise optimizer.warmup")
}
