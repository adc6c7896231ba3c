//! What the decoder's tests share: small configs, weights far from their beginning, forests with every shape of branch.

use hone_kernels::threads::Pool;
use hone_kernels::{Forest, Prediction, Segment};
use hone_runs::draws;
use hone_trainer::config::{Dtype, ModelConfig, Norm, Preset, Router};
use hone_trainer::decoder::Decoder;
use rand::RngExt;

pub const VOCAB: usize = 13;

/// Lightning, softmax, lightning, softmax; 4 heads on 2; 3 experts, top 2; odd widths.
pub fn hybrid() -> ModelConfig {
    ModelConfig {
        hidden_size: 24,
        layers: 4,
        softmax_every: 2,
        heads: 4,
        kv_heads: 2,
        head_dim: 8,
        rotary_dim: 4,
        rope_theta: 50.0,
        block: 3,
        intermediate_size: 20,
        experts: 3,
        ..Preset::HybridTiny.config(VOCAB)
    }
}

/// All that [`hybrid`] is not: scaled post-norm, QK-norm, sigmoid router with bias, tied head, RoPE on whole heads.
pub fn other() -> ModelConfig {
    ModelConfig {
        norm: Norm::Post { alpha: 1.5, beta: 0.7 },
        qk_norm: true,
        router: Router::SigmoidBias,
        tie_embeddings: true,
        rotary_dim: 8,
        experts: 4,
        ..hybrid()
    }
}

/// All lightning with one dense feed-forward, no power of two heads.
pub fn dense() -> ModelConfig {
    ModelConfig { softmax_every: 0, experts: 0, experts_per_token: 0, heads: 3, kv_heads: 1, layers: 2, ..hybrid() }
}

/// The same models with products of bf16, where the processor has them.
pub fn half(config: ModelConfig) -> ModelConfig {
    ModelConfig { dtype: Dtype::Bf16, ..config }
}

/// A decoder whose weights are all random: norms are not ones, embeddings not small, biases not zero.
pub fn decoder(config: ModelConfig, seed: u64) -> Decoder {
    let mut decoder = Decoder::new(config, seed).unwrap();
    for (i, (name, tensor)) in decoder.weights.iter_mut().enumerate() {
        let mut rng = draws(seed, "test weights", 0, i as u64);
        let scale =
            if name.contains("embed") || name.contains("lm_head") || name.contains(".gate.") { 0.5 } else { 0.2 };
        tensor.data_mut().iter_mut().for_each(|x| *x += scale * (2.0 * rng.random::<f32>() - 1.0));
    }
    for (i, (_, tensor)) in decoder.buffers.iter_mut().enumerate() {
        let mut rng = draws(seed, "test buffers", 0, i as u64);
        tensor.data_mut().iter_mut().for_each(|x| *x += 0.2 * (2.0 * rng.random::<f32>() - 1.0));
    }
    decoder
}

pub fn tokens(n: usize, seed: u64) -> Vec<u32> {
    let mut rng = draws(seed, "test tokens", 0, 0);
    (0..n).map(|_| rng.random_range(0..VOCAB as u32)).collect()
}

/// Two trees and a lone token: a segment with three children, a grandchild, segments of length 1; `uses` counts leaves.
pub fn forest(seed: u64) -> Forest {
    let shape = [
        (7, None, 4),
        (1, Some(0), 1),
        (4, Some(0), 2),
        (2, Some(2), 1),
        (5, Some(2), 1),
        (3, Some(0), 1),
        (1, None, 1),
        (4, None, 2),
        (6, Some(7), 1),
        (1, Some(7), 1),
    ];
    let mut start = 0;
    let segments: Vec<Segment> = shape
        .into_iter()
        .map(|(len, parent, uses)| {
            start += len;
            Segment { start: start - len, len, parent, uses }
        })
        .collect();
    Forest::new(tokens(start, seed), segments).unwrap()
}

/// A target for every row: the next row's token within a segment, each child's first token at its end, token 0 at a leaf's.
pub fn predictions(forest: &Forest) -> Vec<Prediction> {
    let mut all = Vec::new();
    for (i, s) in forest.segments().iter().enumerate() {
        for row in s.start..s.start + s.len - 1 {
            all.push(Prediction { row: row as u32, target: forest.tokens()[row + 1] });
        }
        let row = (s.start + s.len - 1) as u32;
        let children = forest.segments().iter().filter(|c| c.parent == Some(i));
        let mut targets: Vec<u32> = children.map(|c| forest.tokens()[c.start]).collect();
        if targets.is_empty() {
            targets.push(0);
        }
        targets.sort();
        targets.dedup();
        all.extend(targets.into_iter().map(|target| Prediction { row, target }));
    }
    all.sort();
    all
}

/// One number a prediction, of both signs.
pub fn coefficients(n: usize) -> Vec<f32> {
    let mut rng = draws(5, "test coefficients", 0, 0);
    (0..n).map(|_| 2.0 * rng.random::<f32>() - 1.0).collect()
}

pub fn pool(threads: usize) -> Pool {
    Pool::new(threads).unwrap()
}

/// ‖a − b‖ / ‖b‖.
pub fn relative(a: &[f32], b: &[f32]) -> f64 {
    let square = |x: f64| x * x;
    let difference: f64 = a.iter().zip(b).map(|(&a, &b)| square(f64::from(a) - f64::from(b))).sum();
    let size: f64 = b.iter().map(|&b| square(f64::from(b))).sum();
    (difference / size).sqrt()
}
