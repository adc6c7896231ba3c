//! Benchmarks: what the trainer does a second, beside the limit that the same machine shows in the same minutes. Figures are
//! the least of several repeats, taken in turn with the limits', so that a busy moment meets both.

use crate::config::{Dtype, ModelConfig, Preset};
use crate::data::{Batch, Packer};
use crate::decoder::Decoder;
use crate::learner::Learner;
use crate::recipe::OptimizerSpec;
use crate::rollout::{RolloutOptions, generate};
use hone_kernels::adamw::{self, AdamW};
use hone_kernels::limits::Limits;
use hone_kernels::threads::Pool;
use hone_kernels::{Forest, Prediction, Tensor, head, lightning, linear, norm, pointwise};
use hone_runs::{Class, Failure, Result, draws};
use rand::RngExt;
use serde::Serialize;
use std::hint::black_box;
use std::time::Instant;

/// Repeats of each measurement; the first is not counted.
const REPEATS: usize = 6;

/// One line of a benchmark. Rates are per second.
#[derive(Clone, Debug, Serialize)]
pub struct Measurement {
    /// What was measured.
    pub name: String,
    /// On what: rows, widths, the model.
    pub shape: String,
    /// Of the weights and activations.
    pub dtype: &'static str,
    /// Tokens (rows) a second, where that means something.
    pub tokens_per_s: Option<f64>,
    /// 10⁹ operations a second: model operations, recomputed ones not counted.
    pub gflops: Option<f64>,
    /// Of a 1024³ product in this dtype, by the fastest of the implementations linked in.
    pub limit_gflops: f64,
    /// Of f32 multiply-adds in registers: what no f32 product can pass.
    pub register_gflops: f64,
    /// Bytes that must move, a second.
    pub bytes_per_s: Option<f64>,
    /// Of a copy (read and written bytes); of reading, where nothing is written.
    pub limit_bytes_per_s: f64,
    /// The part of its limit that is reached, 1 being all.
    pub of_limit: f64,
    /// Resident memory at its most, beyond that before the first repeat; None where the system does not tell.
    pub peak_bytes: Option<u64>,
}

/// Bytes of weights that some processor's caches may hold from one step to the next.
const CACHED: usize = 64 << 20;

/// What gets each measurement; what it refuses ends the benchmark.
type See<'a> = dyn FnMut(Measurement) -> Result<()> + Send + 'a;

/// What a repeat works on.
#[derive(Clone, Copy, Default)]
struct Work {
    tokens: f64,
    flops: f64,
    bytes: f64,
    /// Nothing is written, so reading is the limit.
    reads: bool,
    dtype: Dtype,
}

/// The least seconds of each limit so far.
struct Machine {
    limits: Limits,
    /// In f32, and in bf16.
    products: [f64; 2],
    copy: f64,
    read: f64,
    registers: f64,
}

impl Machine {
    fn new() -> Self {
        let limits = Limits::default();
        let mut machine = Self { limits, products: [f64::MAX; 2], copy: f64::MAX, read: f64::MAX, registers: 0.0 };
        machine.look(); // and what products work in is resident
        machine
    }

    fn look(&mut self) {
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let least = &mut self.products[dtype as usize];
            *least = least.min(self.limits.product(dtype.into()));
        }
        self.copy = self.copy.min(self.limits.copy());
        self.read = self.read.min(self.limits.read());
        self.registers = self.registers.max(self.limits.multiply_adds());
    }

    /// Repeats `step` in turn with the limits. Its bound is the longer of the time that its operations and its bytes need at the limits.
    fn measure(&mut self, name: &str, shape: String, work: Work, mut step: impl FnMut()) -> Measurement {
        let before = Memory::reset();
        let mut least = f64::MAX;
        for repeat in 0..REPEATS {
            let begun = Instant::now();
            step();
            if repeat > 0 {
                least = least.min(begun.elapsed().as_secs_f64());
                self.look();
            }
        }
        let peak_bytes = before.map(|before| before.peak());
        let rate = |amount: f64| (amount > 0.0).then_some(amount / least);
        let limit_flops = Limits::PRODUCT_FLOPS / self.products[work.dtype as usize];
        let limit_bytes = if work.reads { Limits::READ_BYTES / self.read } else { Limits::COPY_BYTES / self.copy };
        Measurement {
            name: name.into(),
            shape,
            dtype: work.dtype.here(),
            tokens_per_s: rate(work.tokens),
            gflops: rate(work.flops / 1e9),
            limit_gflops: limit_flops / 1e9,
            register_gflops: self.registers / 1e9,
            bytes_per_s: rate(work.bytes),
            limit_bytes_per_s: limit_bytes,
            of_limit: (work.flops / limit_flops + work.bytes / limit_bytes) / least,
            peak_bytes,
        }
    }
}

/// Resident memory, as Linux counts it.
struct Memory(u64);

impl Memory {
    /// Forgets the highest mark; the memory now.
    fn reset() -> Option<Self> {
        std::fs::write("/proc/self/clear_refs", "5").ok()?;
        Self::field("VmRSS").map(Self)
    }

    fn peak(&self) -> u64 {
        Self::field("VmHWM").map_or(0, |peak| peak.saturating_sub(self.0))
    }

    fn field(name: &str) -> Option<u64> {
        let text = std::fs::read_to_string("/proc/self/status").ok()?;
        let line = text.lines().find(|line| line.starts_with(name))?;
        Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? << 10)
    }
}

/// A benchmark by name, in a pool of `threads` (0: one a core); `see` gets each line as it is measured.
///
/// # Errors
/// Usage, where there is no benchmark of the name.
pub fn run(name: &str, threads: usize, see: &mut See) -> Result<()> {
    let bench: fn(&mut Machine, &mut See) -> Result<()> = match name {
        "train-step" => train_step,
        "decode" => decode,
        "kernels" => kernels,
        other => {
            return Err(Failure::new(Class::Usage, format!("There is no benchmark `{other}`."))
                .hint(format!("choose one of {}", NAMES.join(", "))));
        }
    };
    let pool = Pool::new(threads).map_err(|e| Failure::new(Class::Infrastructure, format!("No threads: {e}.")))?;
    pool.run(|| bench(&mut Machine::new(), see))
}

/// The benchmarks.
pub const NAMES: [&str; 3] = ["kernels", "train-step", "decode"];

/// The models that are measured, with sequences a batch and their length: in f32, and in bf16 where the processor has it.
fn models() -> impl Iterator<Item = (&'static str, ModelConfig, usize, usize)> {
    let here = |dtype: &Dtype| *dtype == Dtype::F32 || dtype.here() == "bf16";
    [Dtype::F32, Dtype::Bf16].into_iter().filter(here).flat_map(|dtype| {
        let of = |preset: Preset, vocabulary| ModelConfig { dtype, ..preset.config(vocabulary) };
        [("anchor", of(Preset::Small, 4096), 4, 512), ("small", of(Preset::HybridTiny, 259), 8, 64)]
    })
}

fn tokens(count: usize, vocabulary: usize, of: u64) -> Vec<u32> {
    let mut rng = draws(1, "bench", of, 0);
    (0..count).map(|_| rng.random_range(0..vocabulary as u32)).collect()
}

fn fill(shape: &[usize], of: u64) -> Tensor {
    let mut rng = draws(1, "bench tensor", of, 0);
    let data = (0..shape.iter().product()).map(|_| rng.random::<f32>() - 0.5).collect();
    Tensor::from_vec(data, shape)
}

/// A training step: forward, backward and a fused AdamW update of every weight.
fn train_step(machine: &mut Machine, see: &mut See) -> Result<()> {
    for (name, config, sequences, length) in models() {
        let packed = |sequences: usize, length: usize| {
            let mut packer = Packer::default();
            (0..sequences).for_each(|i| packer.add(&tokens(length + 1, config.vocab_size, i as u64), 0));
            packer.finish()
        };
        let batch = packed(sequences, length);
        let rows = batch.forest.rows();
        let work = Work {
            tokens: rows as f64,
            flops: config.train_flops(rows as u64, (length as f64 + 1.0) / 2.0),
            dtype: config.dtype,
            ..Work::default()
        };
        let few = packed(1, 8);
        let mut learner = Learner::new(Decoder::new(config, 1)?, OptimizerSpec::default());
        let (mut logprob, mut entropy) = (Vec::new(), Vec::new());
        let mut step = |batch: &Batch| {
            let d_term = vec![-1.0 / batch.forest.rows() as f32; batch.terms.len()];
            learner.score(batch, 1.0, &mut logprob, &mut entropy);
            learner.backward(batch, 1.0, &d_term, 1.0);
            learner.update(1e-4, 0.0)
        };
        // Untouched zeros take no memory: this makes gradients and moments resident, so that the peak is what stands above them.
        step(&few)?;
        let mut failed = None;
        let shape = format!("{name}, {sequences} × {length} tokens");
        let measured = machine.measure("train step", shape, work, || failed = step(&batch).err().or(failed.take()));
        failed.map_or(Ok(()), Err)?;
        see(measured)?;
    }
    Ok(())
}

/// Decoding: a prompt of 64 tokens and 32 new ones, alone and eight at once. Its bound: the weights that a step touches are read once a
/// step, and the prompt's operations run as fast as a product. Where the weights stay in the caches, operations alone are the bound.
fn decode(machine: &mut Machine, see: &mut See) -> Result<()> {
    const PROMPT: usize = 64;
    const NEW: usize = 32;
    for (name, config, ..) in models() {
        let decoder = Decoder::new(config.clone(), 1)?;
        for many in [1, 8] {
            let prompts: Vec<Vec<u32>> = (0..many).map(|i| tokens(PROMPT, config.vocab_size, i as u64)).collect();
            let options = RolloutOptions { max_tokens: NEW, ..RolloutOptions::default() };
            let forward = |rows: usize, before: f64| config.forward_flops((many * rows) as u64, before);
            let prompt = forward(PROMPT, (PROMPT as f64 + 1.0) / 2.0);
            let width = if config.dtype.here() == "bf16" { 2 } else { 4 };
            let work = if width * decoder.weights.count() > CACHED {
                let bytes = (NEW * touched_bytes(&config, many)) as f64;
                Work { flops: prompt, bytes, ..Work::default() }
            } else {
                Work { flops: prompt + forward(NEW, PROMPT as f64 + (NEW as f64 + 1.0) / 2.0), ..Work::default() }
            };
            let work = Work { tokens: (many * NEW) as f64, reads: true, dtype: config.dtype, ..work };
            let shape = format!("{name}, batch {many}, prompt {PROMPT}, {NEW} new");
            see(machine.measure("decode", shape, work, || {
                black_box(generate(&decoder, &prompts, &options));
            }))?;
        }
    }
    Ok(())
}

/// Weights that a decoding step of `rows` rows reads: of each layer's experts as many as the rows can choose.
fn touched(config: &ModelConfig, rows: usize) -> usize {
    let chosen = (rows * config.experts_per_token).min(config.experts);
    let one = 3 * config.hidden_size * config.intermediate_size * config.layers;
    config.active_matmul_weights() as usize - one * config.experts_per_token + one * chosen
}

/// Their bytes: the head is f32 in any case.
fn touched_bytes(config: &ModelConfig, rows: usize) -> usize {
    let head = config.hidden_size * config.vocab_size;
    let width = if config.dtype.here() == "bf16" { 2 } else { 4 };
    width * (touched(config, rows) - head) + 4 * head
}

/// The operations that take most of a step, each alone.
fn kernels(machine: &mut Machine, see: &mut See) -> Result<()> {
    for dtype in [Dtype::F32, Dtype::Bf16].into_iter().filter(|d| *d == Dtype::F32 || d.here() == "bf16") {
        let (x, mut w) = (fill(&[2048, 256], 1), fill(&[256, 512], 2));
        w.set_dtype(dtype.into());
        let mut out = Tensor::default();
        let work = Work { tokens: 2048.0, flops: 2.0 * (2048 * 256 * 512) as f64, dtype, ..Work::default() };
        see(machine.measure("linear forward", "[2048, 256] · [256, 512]".into(), work, || {
            linear::forward(&x, &w, &mut out);
        }))?;
    }

    let count = 16 << 20;
    let mut grad = vec![1e-3f32; count];
    let (mut param, mut first, mut second) = (vec![0.1f32; count], vec![1e-9f32; count], vec![1e-9f32; count]);
    let settings = AdamW { lr: 1e-3, betas: (0.9, 0.95), eps: 1e-15, weight_decay: 0.1 };
    let mut t = 0;
    // Four arrays are read and written.
    let work = Work { bytes: 32.0 * count as f64, ..Work::default() };
    see(machine.measure("AdamW", format!("{count} parameters"), work, || {
        t += 1;
        adamw::step(settings, t, 1.0, &mut param, &mut grad, &mut first, &mut second);
    }))?;

    for length in [4096, 65_536] {
        let shape = lightning::Heads { head_dim: 64, slopes: lightning::slopes(4, 0, 8), block: 64 };
        let forest = Forest::from_sequences([&tokens(length, 4096, 3)[..]]);
        let [q, k, v, d_out] = [4, 5, 6, 7].map(|of| fill(&[length, 256], of));
        let (mut out, mut grads) = (Tensor::default(), [Tensor::default(), Tensor::default(), Tensor::default()]);
        // Per row and head: 2·d² to read the state and 2·d² to write it, thrice with backward.
        let flops = 12.0 * (length * 4 * 64 * 64) as f64;
        let work = Work { tokens: length as f64, flops, ..Work::default() };
        see(machine.measure("lightning, forward and backward", format!("{length} rows, 4 heads of 64"), work, || {
            lightning::forward(&shape, &forest, &q, &k, &v, &mut out, None);
            let [dq, dk, dv] = &mut grads;
            lightning::backward(&shape, &forest, &q, &k, &v, &d_out, dq, dk, dv);
        }))?;
    }

    streams(machine, see)?;
    head_and_products(machine, see)
}

/// What moves bytes and computes little: its bound is the copy.
fn streams(machine: &mut Machine, see: &mut See) -> Result<()> {
    let (rows, width) = (32_768, 512);
    let (x, gate) = (fill(&[rows, width], 11), fill(&[rows, width], 12));
    let mut out = x.clone();
    let bytes = 4.0 * x.len() as f64;
    let shape = format!("[{rows}, {width}]");

    let weight = Tensor::from_vec(vec![1.0; width], &[width]);
    let work = Work { tokens: rows as f64, bytes: 2.0 * bytes, ..Work::default() };
    see(machine.measure("RMSNorm, forward", shape.clone(), work, || norm::forward(&x, &weight, 1e-5, &mut out)))?;

    let work = Work { bytes: 3.0 * bytes, ..work };
    see(machine.measure("output gate, forward", shape, work, || pointwise::gated(&x, &gate, &mut out)))
}

/// The head beside the four products that it cannot do without, over the same shapes: the ratio of both rows is what its softmax,
/// its tiles and its gathering cost.
fn head_and_products(machine: &mut Machine, see: &mut See) -> Result<()> {
    let (rows, width, vocabulary) = (8192, 256, 131_072);
    let (hidden, weights) = (fill(&[rows, width], 8), fill(&[width, vocabulary], 9));
    let targets = tokens(rows, vocabulary, 10);
    let predictions: Vec<Prediction> =
        targets.iter().enumerate().map(|(row, &target)| Prediction { row: row as u32, target }).collect();
    let d_logprob = vec![-1.0 / rows as f32; rows];
    let mut scores = head::Scores::default();
    // Written, so that both are resident and the peak is what stands above them.
    let mut d_hidden = Tensor::from_vec(vec![1.0; rows * width], &[rows, width]);
    let mut d_head = Tensor::from_vec(vec![1.0; width * vocabulary], &[width, vocabulary]);
    // The logits, again in backward, and their two gradients.
    let work = Work { tokens: rows as f64, flops: 8.0 * (rows * width) as f64 * vocabulary as f64, ..Work::default() };
    let shape = format!("[{rows}, {width}] · [{width}, {vocabulary}]");
    see(machine.measure("head, forward and backward", shape, work, || {
        head::forward(&hidden, &weights, &predictions, 1.0, 0, &mut scores);
        head::backward(&hidden, &weights, &predictions, 1.0, &scores, &d_logprob, &mut d_hidden, &mut d_head);
    }))?;

    // A quarter of the rows, so many at a time that the logits of all, 4 GiB, never stand together.
    const BLOCK: usize = 1024;
    let blocks = hidden.data().chunks(BLOCK * width).take(rows / BLOCK / 4);
    let blocks: Vec<Tensor> = blocks.map(|x| Tensor::from_vec(x.to_vec(), &[BLOCK, width])).collect();
    let (mut logits, mut dx) = (Tensor::default(), Tensor::default());
    let work = Work { tokens: work.tokens / 4.0, flops: work.flops / 4.0, ..work };
    let shape = format!("[{}, {width}] · [{width}, {vocabulary}]", rows / 4);
    see(machine.measure("head, its four products alone", shape, work, || {
        for x in &blocks {
            linear::forward(x, &weights, &mut logits);
            linear::forward(x, &weights, &mut logits);
            linear::backward_input(&logits, &weights, &mut dx);
            linear::backward_weight(x, &logits, &mut d_head);
        }
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_decoding_step_touches_no_more_experts_than_there_are() {
        let config = Preset::Small.config(4096);
        let one = 3 * 256 * 512 * 8;
        assert_eq!(touched(&config, 1), config.active_matmul_weights() as usize);
        assert_eq!(touched(&config, 2), touched(&config, 1) + 2 * one);
        assert_eq!(touched(&config, 100), touched(&config, 4));
    }

    #[test]
    fn an_unknown_benchmark_is_refused_by_name() {
        let failure = run("kernel", 1, &mut |_| Ok(())).unwrap_err();
        assert!(failure.class == Class::Usage && failure.hint.unwrap().contains("train-step"));
    }
}
