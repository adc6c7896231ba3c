//! The decoder again, in candle at float64: dense masks, no chunks, no caches, every expert on every row. Written from the
//! formulas, not from the code it judges.

use std::collections::BTreeMap;

use candle_core::{D, DType, Device, Result, Tensor, Var};
use hone_kernels::{Forest, Prediction};
use hone_trainer::config::{Mixer, ModelConfig, Norm, Router};
use hone_trainer::decoder::Decoder;

const CPU: &Device = &Device::Cpu;

pub struct Twin<'a> {
    config: &'a ModelConfig,
    pub weights: BTreeMap<String, Var>,
    biases: BTreeMap<String, Vec<f32>>,
}

fn constant(data: Vec<f64>, shape: &[usize]) -> Result<Tensor> {
    Tensor::from_vec(data, shape, CPU)
}

fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let mean = (x.sqr()?.sum_keepdim(D::Minus1)? / x.dim(D::Minus1)? as f64)?;
    x.broadcast_div(&(mean + eps)?.sqrt()?)?.broadcast_mul(weight)
}

fn sigmoid(x: &Tensor) -> Result<Tensor> {
    (x.neg()?.exp()? + 1.0)?.recip()
}

fn silu(x: &Tensor) -> Result<Tensor> {
    x * sigmoid(x)?
}

fn log_softmax(x: &Tensor) -> Result<Tensor> {
    // Logits of these tests are small: no maximum is taken out.
    x.broadcast_sub(&x.exp()?.sum_keepdim(D::Minus1)?.log()?)
}

/// `[T, heads · d]` as `[heads, T, d]`.
fn by_head(x: &Tensor, heads: usize) -> Result<Tensor> {
    let (rows, width) = x.dims2()?;
    x.reshape((rows, heads, width / heads))?.transpose(0, 1)?.contiguous()
}

/// The inverse of [`by_head`].
fn by_row(x: &Tensor) -> Result<Tensor> {
    let (heads, rows, d) = x.dims3()?;
    x.transpose(0, 1)?.contiguous()?.reshape((rows, heads * d))
}

impl<'a> Twin<'a> {
    pub fn new(decoder: &'a Decoder) -> Result<Self> {
        let var = |(name, t): (&str, &hone_kernels::Tensor)| {
            let data = t.data().iter().map(|&x| f64::from(x)).collect();
            Ok((name.to_string(), Var::from_tensor(&constant(data, t.shape())?)?))
        };
        let biases = decoder.buffers.iter().map(|(name, t)| (name.to_string(), t.data().to_vec())).collect();
        let weights = decoder.weights.iter().map(var).collect::<Result<_>>()?;
        Ok(Self { config: &decoder.config, weights, biases })
    }

    fn w(&self, layer: usize, name: &str) -> &Tensor {
        self.weights[&format!("model.layers.{layer}.{name}.weight")].as_tensor()
    }

    /// Log-probs of `predictions`, and the mean of the layers' balance losses, with the experts of `routes`.
    pub fn forward(
        &self,
        forest: &Forest,
        predictions: &[Prediction],
        temperature: f64,
        routes: &[Vec<u32>],
    ) -> Result<(Tensor, Tensor)> {
        let c = self.config;
        let ids = Tensor::new(forest.tokens(), CPU)?;
        let embed = self.weights["model.embed_tokens.weight"].as_tensor();
        let mut x = embed.index_select(&ids, 0)?;
        let mut balance = Tensor::new(0f64, CPU)?;
        let eps = f64::from(c.norm_eps);
        for layer in 0..c.layers {
            let h = rms_norm(&x, self.w(layer, "input_layernorm"), eps)?;
            let mixed = match c.mixer(layer) {
                Mixer::Softmax => self.softmax(layer, forest, &h)?,
                Mixer::Lightning => self.lightning(layer, forest, &h)?,
            };
            x = self.residual(&x, &h, &mixed)?;
            let h = rms_norm(&x, self.w(layer, "post_attention_layernorm"), eps)?;
            let fed = if c.experts == 0 {
                let [w1, w3, w2] = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"].map(|n| self.w(layer, n).get(0));
                swiglu(&h, &w1?, &w3?, &w2?)?
            } else {
                let (fed, loss) = self.experts(layer, forest, &h, &routes[layer])?;
                balance = (balance + (loss / c.layers as f64)?)?;
                fed
            };
            x = self.residual(&x, &h, &fed)?;
        }
        let hidden = rms_norm(&x, self.weights["model.norm.weight"].as_tensor(), eps)?;
        let logits = match self.weights.get("lm_head.weight") {
            Some(head) => hidden.matmul(head)?,
            None => hidden.matmul(&embed.t()?)?,
        };
        let logprobs = log_softmax(&(logits / temperature)?)?;
        let rows = Tensor::new(predictions.iter().map(|p| p.row).collect::<Vec<_>>(), CPU)?;
        let targets = Tensor::new(predictions.iter().map(|p| p.target).collect::<Vec<_>>(), CPU)?;
        let logprobs = logprobs.index_select(&rows, 0)?.gather(&targets.unsqueeze(1)?, 1)?.squeeze(1)?;
        Ok((logprobs, balance))
    }

    fn residual(&self, x: &Tensor, h: &Tensor, branch: &Tensor) -> Result<Tensor> {
        match self.config.norm {
            Norm::Pre => x + branch,
            Norm::Post { alpha, beta } => (h * f64::from(alpha))? + (branch * f64::from(beta))?,
        }
    }

    /// `f(steps from key to query)` where row i sees row j, else `hidden`: `[T, T]`.
    fn seen(&self, forest: &Forest, hidden: f64, f: impl Fn(u32) -> f64) -> Result<Tensor> {
        let rows = forest.rows();
        let mut mask = vec![hidden; rows * rows];
        for i in 0..rows {
            for j in 0..=i {
                if i < forest.subtree_end(forest.segment_of()[j] as usize) {
                    mask[i * rows + j] = f(forest.positions()[i] - forest.positions()[j]);
                }
            }
        }
        constant(mask, &[rows, rows])
    }

    fn softmax(&self, layer: usize, forest: &Forest, h: &Tensor) -> Result<Tensor> {
        let c = self.config;
        let mut q = h.matmul(self.w(layer, "self_attn.q_proj"))?;
        let mut k = h.matmul(self.w(layer, "self_attn.k_proj"))?;
        if c.qk_norm {
            q = rms_norm(&q, self.w(layer, "self_attn.q_norm"), f64::from(c.norm_eps))?;
            k = rms_norm(&k, self.w(layer, "self_attn.k_norm"), f64::from(c.norm_eps))?;
        }
        let v = h.matmul(self.w(layer, "self_attn.v_proj"))?;
        let group: Vec<u32> = (0..c.heads).map(|head| (head / (c.heads / c.kv_heads)) as u32).collect();
        let group = Tensor::new(group, CPU)?;
        let q = self.rotate(forest, &by_head(&q, c.heads)?)?;
        let k = self.rotate(forest, &by_head(&k, c.kv_heads)?)?.index_select(&group, 0)?;
        let v = by_head(&v, c.kv_heads)?.index_select(&group, 0)?;
        let scores = (q.matmul(&k.transpose(1, 2)?.contiguous()?)? / (c.head_dim as f64).sqrt())?;
        let masked = scores.broadcast_add(&self.seen(forest, f64::NEG_INFINITY, |_| 0.0)?)?.exp()?;
        let weights = masked.broadcast_div(&masked.sum_keepdim(D::Minus1)?)?;
        by_row(&weights.matmul(&v)?)?.matmul(self.w(layer, "self_attn.o_proj"))
    }

    /// Partial rotate-half RoPE on `[heads, T, d]`.
    fn rotate(&self, forest: &Forest, x: &Tensor) -> Result<Tensor> {
        let (r, d) = (self.config.rotary_dim, self.config.head_dim);
        let angle = |p: &u32, i: usize| f64::from(*p) * self.config.rope_theta.powf(-2.0 * i as f64 / r as f64);
        let angles: Vec<f64> = forest.positions().iter().flat_map(|p| (0..r / 2).map(move |i| angle(p, i))).collect();
        let angles = constant(angles, &[forest.rows(), r / 2])?;
        let (cos, sin) = (angles.cos()?, angles.sin()?);
        let (a, b) = (x.narrow(2, 0, r / 2)?, x.narrow(2, r / 2, r / 2)?);
        let turned_a = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
        let turned_b = (b.broadcast_mul(&cos)? + a.broadcast_mul(&sin)?)?;
        if r == d {
            return Tensor::cat(&[turned_a, turned_b], 2);
        }
        Tensor::cat(&[turned_a, turned_b, x.narrow(2, r, d - r)?], 2)
    }

    fn lightning(&self, layer: usize, forest: &Forest, h: &Tensor) -> Result<Tensor> {
        let c = self.config;
        // Per head: q, k and v side by side.
        let qkv = by_head(&silu(&h.matmul(self.w(layer, "self_attn.qkv_proj"))?)?, c.heads)?;
        let part = |i: usize| qkv.narrow(2, i * c.head_dim, c.head_dim)?.contiguous();
        let (q, k, v) = (part(0)?, part(1)?, part(2)?);
        let factor = 1.0 - layer as f64 / (c.layers - 1) as f64 + 1e-5;
        let decays: Vec<Tensor> = alibi(c.heads)
            .into_iter()
            .map(|slope| self.seen(forest, 0.0, |steps| (-slope * factor * f64::from(steps)).exp()))
            .collect::<Result<_>>()?;
        let scores = (q.matmul(&k.transpose(1, 2)?.contiguous()?)? * Tensor::stack(&decays, 0)?)?;
        let mixed = rms_norm(&by_row(&scores.matmul(&v)?)?, self.w(layer, "self_attn.norm"), 1e-6)?;
        let gate = sigmoid(&h.matmul(self.w(layer, "self_attn.output_gate"))?)?;
        (mixed * gate)?.matmul(self.w(layer, "self_attn.out_proj"))
    }

    /// The experts' output, and the layer's balance loss.
    fn experts(&self, layer: usize, forest: &Forest, h: &Tensor, routes: &[u32]) -> Result<(Tensor, Tensor)> {
        let c = self.config;
        let (rows, k) = (forest.rows(), c.experts_per_token);
        let logits = h.matmul(self.w(layer, "block_sparse_moe.gate"))?;
        let scores = match c.router {
            Router::Softmax => log_softmax(&logits)?.exp()?,
            Router::SigmoidBias => sigmoid(&logits)?,
        };
        // The routes are the best k: the twin checks the choice, then takes it.
        let values = scores.to_vec2::<f64>()?;
        let bias = self.biases.get(&format!("model.layers.{layer}.block_sparse_moe.e_score_correction_bias"));
        let mut chosen = vec![0.0; rows * c.experts];
        for row in 0..rows {
            let ranked = |e: usize| values[row][e] + bias.map_or(0.0, |b| f64::from(b[e]));
            let taken = &routes[row * k..(row + 1) * k];
            taken.iter().for_each(|&e| chosen[row * c.experts + e as usize] = 1.0);
            let worst = taken.iter().map(|&e| ranked(e as usize)).fold(f64::INFINITY, f64::min);
            let left = (0..c.experts).filter(|&e| !taken.contains(&(e as u32))).map(ranked);
            assert!(left.fold(f64::NEG_INFINITY, f64::max) <= worst + 1e-5, "row {row} of layer {layer} is misrouted");
        }
        let uses: Vec<f64> = (0..rows).map(|row| f64::from(forest.uses(row))).collect();
        let total: f64 = uses.iter().sum();
        let share = |e: usize| (0..rows).map(|r| uses[r] * chosen[r * c.experts + e]).sum::<f64>() / total;
        let shares = constant((0..c.experts).map(share).collect(), &[c.experts])?;
        let mean = scores.broadcast_mul(&constant(uses, &[rows, 1])?)?.sum(0)?;
        let balance = ((mean * shares)?.sum_all()? * (c.experts as f64 / total))?;

        let picked = (scores * constant(chosen, &[rows, c.experts])?)?;
        let weights = picked.broadcast_div(&picked.sum_keepdim(1)?)?;
        let mut out = Tensor::zeros((rows, c.hidden_size), DType::F64, CPU)?;
        for e in 0..c.experts {
            let [w1, w3, w2] =
                ["w1", "w3", "w2"].map(|n| self.w(layer, &format!("block_sparse_moe.experts.{n}")).get(e));
            out = (out + swiglu(h, &w1?, &w3?, &w2?)?.broadcast_mul(&weights.narrow(1, e, 1)?)?)?;
        }
        Ok((out, balance))
    }
}

fn swiglu(x: &Tensor, gate: &Tensor, up: &Tensor, down: &Tensor) -> Result<Tensor> {
    (silu(&x.matmul(gate)?)? * x.matmul(up)?)?.matmul(down)
}

/// 2^(-8h/H); between powers of two, those of the lower one, then every second of the doubled count.
fn alibi(heads: usize) -> Vec<f64> {
    let power = |n: usize| (1..=n).map(move |h| 2f64.powf(-8.0 * h as f64 / n as f64));
    let lower = if heads.is_power_of_two() { heads } else { heads.next_power_of_two() / 2 };
    power(lower).chain(power(2 * lower).step_by(2).take(heads - lower)).collect()
}
