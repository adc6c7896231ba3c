//! What a decoder is made of: the model config, its presets, and the counts that follow from it (weights, floating-point
//! operations). Holds no tensor; the names of weights are in `weights`.

use hone_runs::{Class, Failure, Result};
use serde::{Deserialize, Serialize};

/// How a layer mixes tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Mixer {
    /// Softmax attention with grouped queries and partial RoPE.
    Softmax,
    /// Lightning attention with decay, output norm and sigmoid gate.
    Lightning,
}

/// Where the norms stand.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Norm {
    /// x + f(norm(x)).
    Pre,
    /// MiniMax-01's scaled post-norm: h = norm(x); x = α·h + β·f(h).
    Post {
        /// Multiplies the normalised residual.
        alpha: f32,
        /// Multiplies the branch.
        beta: f32,
    },
}

/// How a router's scores become choices and weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Router {
    /// Softmax over all experts, the top k renormalised (MiniMax-01).
    Softmax,
    /// Sigmoid scores; a bias that no weight sees picks the top k (MiniMax-M2).
    SigmoidBias,
}

/// Models with a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Preset {
    /// 3 lightning layers and 1 softmax, width 32, 4 experts: trains on small tasks in seconds.
    HybridNano,
    /// 7 lightning layers and 1 softmax, width 64, 8 experts.
    HybridTiny,
    /// 4 softmax layers with a dense feed-forward, width 64.
    SoftmaxTiny,
    /// 7 lightning layers and 1 softmax, width 256, 8 experts: 30 million weights with a vocabulary of 4,096.
    Small,
}

/// What products multiply; they add in f32, and weights, moments, head, router and attention's state are f32 in any case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// 32 bits.
    #[default]
    F32,
    /// Rounded to bfloat16, about twice as fast, where the processor multiplies it (AVX512-BF16); f32 elsewhere.
    Bf16,
}

impl From<Dtype> for hone_kernels::Dtype {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F32 => Self::F32,
            Dtype::Bf16 => Self::Bf16,
        }
    }
}

impl Dtype {
    /// What is multiplied on this machine: bf16 only where the processor can.
    pub fn here(self) -> &'static str {
        match self {
            Dtype::Bf16 if hone_kernels::bf16_available() => "bf16",
            _ => "f32",
        }
    }
}

/// Writes the fields once for the two types that have them: `ModelConfig`, where each has a value, and `ModelSpec`, where
/// a recipe names only what differs from its preset.
macro_rules! model_fields {
    ($($(#[$meta:meta])* $name:ident: $type:ty,)*) => {
        /// The shape of a decoder, every field given: what a checkpoint keeps.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
        #[serde(deny_unknown_fields)]
        pub struct ModelConfig {
            /// Number of token ids; the tokenizer decides it.
            pub vocab_size: usize,
            $($(#[$meta])* pub $name: $type,)*
        }

        /// The `model` of a recipe: a preset, fields that differ from it, or a checkpoint to start from.
        #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
        #[serde(deny_unknown_fields, default)]
        pub struct ModelSpec {
            /// The preset that gives every field not named here; `hybrid-tiny` where absent.
            #[serde(skip_serializing_if = "Option::is_none")]
            pub preset: Option<Preset>,
            /// A checkpoint folder to start from, with its own shape and tokenizer; then no other field may stand here.
            #[serde(skip_serializing_if = "Option::is_none")]
            pub from: Option<String>,
            $($(#[$meta])* #[serde(skip_serializing_if = "Option::is_none")] pub $name: Option<$type>,)*
        }

        impl ModelSpec {
            /// True where a field besides `from` is named.
            fn names_shape(&self) -> bool {
                self.preset.is_some() $(|| self.$name.is_some())*
            }

            fn apply(&self, config: &mut ModelConfig) {
                $(if let Some(value) = &self.$name {
                    config.$name = value.clone();
                })*
            }
        }
    };
}

model_fields! {
    /// Width of the residual stream.
    #[schemars(extend("x-tunable" = {"choices": [48, 64, 96, 128], "scale": "choice"}))]
    hidden_size: usize,
    /// Number of layers.
    #[schemars(extend("x-tunable" = {"low": 2, "high": 12, "scale": "linear"}))]
    layers: usize,
    /// Layer i is softmax where (i + 1) is a multiple of this, else lightning: 8 is MiniMax-01's 7:1, 1 all softmax, 0 all lightning.
    #[schemars(extend("x-tunable" = {"choices": [1, 2, 4, 8], "scale": "choice"}))]
    softmax_every: usize,
    /// The mixer of each layer, where a period does not say it; empty otherwise.
    mixers: Vec<Mixer>,
    /// Query heads of a softmax layer, and heads of a lightning layer.
    #[schemars(extend("x-tunable" = {"choices": [1, 2, 4], "scale": "choice"}))]
    heads: usize,
    /// Key and value heads of a softmax layer; divides `heads`.
    kv_heads: usize,
    /// Width of a head.
    #[schemars(extend("x-tunable" = {"choices": [16, 32, 64], "scale": "choice"}))]
    head_dim: usize,
    /// How many dimensions of a head RoPE turns (softmax layers only); even.
    rotary_dim: usize,
    /// Base of RoPE.
    #[schemars(extend("x-tunable" = {"low": 100.0, "high": 1e6, "scale": "log"}))]
    rope_theta: f64,
    /// RMSNorm over the full width of queries and keys, before RoPE (MiniMax-M2).
    #[schemars(extend("x-tunable" = {"choices": [false, true], "scale": "choice"}))]
    qk_norm: bool,
    /// Tokens a chunk of lightning attention.
    block: usize,
    /// Width of an expert, or of the dense feed-forward.
    #[schemars(extend("x-tunable" = {"choices": [64, 96, 128, 192, 256], "scale": "choice"}))]
    intermediate_size: usize,
    /// Experts a layer; 0 is one dense feed-forward.
    #[schemars(extend("x-tunable" = {"choices": [0, 2, 4, 8], "scale": "choice"}))]
    experts: usize,
    /// Experts a token.
    #[schemars(extend("x-tunable" = {"choices": [1, 2], "scale": "choice"}))]
    experts_per_token: usize,
    /// How experts are chosen.
    router: Router,
    /// Where the norms stand.
    norm: Norm,
    /// Added to the mean square in every RMSNorm.
    norm_eps: f32,
    /// The head is the embedding, transposed.
    #[schemars(extend("x-tunable" = {"choices": [false, true], "scale": "choice"}))]
    tie_embeddings: bool,
    /// What the layers' products multiply.
    #[serde(default)]
    dtype: Dtype,
}

impl Preset {
    /// The preset's config for a vocabulary of `vocab_size`.
    pub fn config(self, vocab_size: usize) -> ModelConfig {
        let tiny = ModelConfig {
            vocab_size,
            hidden_size: 64,
            layers: 8,
            softmax_every: 8,
            mixers: Vec::new(),
            heads: 2,
            kv_heads: 1,
            head_dim: 32,
            rotary_dim: 16,
            rope_theta: 10_000.0,
            qk_norm: false,
            block: 64,
            intermediate_size: 128,
            experts: 8,
            experts_per_token: 2,
            router: Router::Softmax,
            norm: Norm::Pre,
            norm_eps: 1e-5,
            tie_embeddings: false,
            dtype: Dtype::F32,
        };
        match self {
            Preset::HybridTiny => tiny,
            Preset::HybridNano => {
                let heads = ModelConfig { heads: 2, kv_heads: 1, head_dim: 16, rotary_dim: 8, ..tiny };
                ModelConfig { hidden_size: 32, layers: 4, softmax_every: 4, intermediate_size: 64, experts: 4, ..heads }
            }
            Preset::SoftmaxTiny => ModelConfig {
                layers: 4,
                softmax_every: 1,
                intermediate_size: 192,
                experts: 0,
                experts_per_token: 0,
                ..tiny
            },
            Preset::Small => ModelConfig {
                hidden_size: 256,
                heads: 4,
                kv_heads: 2,
                head_dim: 64,
                rotary_dim: 32,
                intermediate_size: 512,
                ..tiny
            },
        }
    }
}

impl ModelSpec {
    /// The config of a fresh model for a vocabulary of `vocab_size`, validated.
    ///
    /// # Errors
    /// Usage, where the fields contradict each other, or where `from` names a checkpoint (which has its own shape).
    pub fn resolve(&self, vocab_size: usize) -> Result<ModelConfig> {
        self.check_from()?;
        if let Some(from) = &self.from {
            return Err(Failure::new(Class::Usage, format!("The model starts from {from}, which has its own shape."))
                .hint("Load that checkpoint, or name a preset instead of `from`."));
        }
        let mut config = self.preset.unwrap_or(Preset::HybridTiny).config(vocab_size);
        self.apply(&mut config);
        config.validate()?;
        Ok(config)
    }

    /// Refuses a shape beside `from`.
    ///
    /// # Errors
    /// Usage.
    pub fn check_from(&self) -> Result<()> {
        match &self.from {
            Some(from) if self.names_shape() => Err(Failure::new(
                Class::Usage,
                format!("The model starts from {from} and names a preset or fields beside it."),
            )
            .hint("A checkpoint has its own shape: keep either `from` or the others.")),
            _ => Ok(()),
        }
    }
}

/// Bounds far above what is trained here: a slip of some zeros is refused before it takes all memory.
const MOST_LAYERS: usize = 4096;
const MOST_WEIGHTS: f64 = 1e12;

impl ModelConfig {
    /// Refuses shapes that cannot be built.
    ///
    /// # Errors
    /// Usage, with the first contradiction, or the first absurd size.
    pub fn validate(&self) -> Result<()> {
        let refuse = |message: String| Err(Failure::new(Class::Usage, message).hint("Change the `model` section."));
        for (name, value) in [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("layers", self.layers),
            ("heads", self.heads),
            ("kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("block", self.block),
            ("intermediate_size", self.intermediate_size),
        ] {
            if value == 0 {
                return refuse(format!("`{name}` is 0."));
            }
        }
        if self.layers > MOST_LAYERS {
            return refuse(format!("`layers` ({}) is above {MOST_LAYERS}.", self.layers));
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return refuse(format!("`heads` ({}) is not a multiple of `kv_heads` ({}).", self.heads, self.kv_heads));
        }
        if !self.rotary_dim.is_multiple_of(2) || self.rotary_dim > self.head_dim {
            return refuse(format!(
                "`rotary_dim` ({}) is not an even number up to `head_dim` ({}).",
                self.rotary_dim, self.head_dim
            ));
        }
        if !self.mixers.is_empty() && self.mixers.len() != self.layers {
            return refuse(format!("`mixers` names {} layers of {}.", self.mixers.len(), self.layers));
        }
        if self.experts > 0 && !(1..=self.experts).contains(&self.experts_per_token) {
            return refuse(format!(
                "`experts_per_token` ({}) is not between 1 and `experts` ({}).",
                self.experts_per_token, self.experts
            ));
        }
        if !(self.norm_eps > 0.0 && self.norm_eps.is_finite()) {
            return refuse(format!("`norm_eps` ({}) is not a positive number.", self.norm_eps));
        }
        if !(self.rope_theta > 1.0 && self.rope_theta.is_finite()) {
            return refuse(format!("`rope_theta` ({}) is not a number above 1.", self.rope_theta));
        }
        if let Norm::Post { alpha, beta } = self.norm
            && !(alpha.is_finite() && beta.is_finite() && beta != 0.0)
        {
            return refuse(format!("The post-norm's alpha ({alpha}) and beta ({beta}) are not usable numbers."));
        }
        let weights = self.about_weights();
        if weights > MOST_WEIGHTS {
            return refuse(format!(
                "The model would have {weights:.0e} weights, above {MOST_WEIGHTS:.0e}: `vocab_size` {}, `layers` {}, \
                 `hidden_size` {}, `heads` {} of `head_dim` {}, `intermediate_size` {}, `experts` {}.",
                self.vocab_size,
                self.layers,
                self.hidden_size,
                self.heads,
                self.head_dim,
                self.intermediate_size,
                self.experts,
            ));
        }
        Ok(())
    }

    /// Number of weights but for norms, in floating point: sizes not yet checked may overflow integers.
    fn about_weights(&self) -> f64 {
        let [h, i, d] = [self.hidden_size, self.intermediate_size, self.head_dim].map(|n| n as f64);
        let (w, kv) = (self.heads as f64 * d, self.kv_heads as f64 * d);
        let feed = if self.experts == 0 { 3.0 * h * i } else { self.experts as f64 * (h + 3.0 * h * i) };
        let softmax = self.softmax_layers() as f64;
        let mixers = softmax * (2.0 * h * w + 2.0 * h * kv) + (self.layers as f64 - softmax) * 5.0 * h * w;
        let embeddings = if self.tie_embeddings { 1.0 } else { 2.0 };
        mixers + self.layers as f64 * feed + embeddings * h * self.vocab_size as f64
    }

    /// The mixer of layer `layer`.
    pub fn mixer(&self, layer: usize) -> Mixer {
        match self.mixers.get(layer) {
            Some(&mixer) => mixer,
            None if self.softmax_every > 0 && (layer + 1).is_multiple_of(self.softmax_every) => Mixer::Softmax,
            None => Mixer::Lightning,
        }
    }

    /// Width of attention: heads × head_dim.
    pub fn width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Width of keys and values in a softmax layer.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Number of softmax layers.
    pub fn softmax_layers(&self) -> usize {
        (0..self.layers).filter(|&l| self.mixer(l) == Mixer::Softmax).count()
    }

    /// Weights that one token is multiplied with: the chosen experts' only, the head in, the embedding (a gather) out.
    pub fn active_matmul_weights(&self) -> u64 {
        let (h, w, kv, i) = (self.hidden_size, self.width(), self.kv_width(), self.intermediate_size);
        let feed = if self.experts == 0 { 3 * h * i } else { h * self.experts + self.experts_per_token * 3 * h * i };
        let softmax = 2 * h * w + 2 * h * kv; // q, o; k, v
        let lightning = 5 * h * w; // qkv, gate, out
        let s = self.softmax_layers();
        (s * softmax + (self.layers - s) * lightning + self.layers * feed + h * self.vocab_size) as u64
    }

    /// Floating-point operations of training on `tokens` rows of which each sees `mean_visible` rows on average (itself
    /// in): a token costs 6 a matmul weight (2 forward, 4 backward), 12·d²·heads a lightning layer (its state is written
    /// and read, chunking not counted), and 12·width·visible a softmax layer. Norms, routing and pointwise work are left out.
    pub fn train_flops(&self, tokens: u64, mean_visible: f64) -> f64 {
        let lightning = (self.layers - self.softmax_layers()) as f64;
        let per_token = 6.0 * self.active_matmul_weights() as f64
            + 12.0 * lightning * (self.head_dim * self.head_dim * self.heads) as f64
            + 12.0 * self.softmax_layers() as f64 * self.width() as f64 * mean_visible;
        per_token * tokens as f64
    }

    /// Floating-point operations of a forward pass alone (scoring, generation): a third of [`Self::train_flops`].
    pub fn forward_flops(&self, tokens: u64, mean_visible: f64) -> f64 {
        self.train_flops(tokens, mean_visible) / 3.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spec_names_what_differs_from_its_preset() {
        let spec: ModelSpec = serde_json::from_str(
            r#"{"preset": "hybrid-nano", "hidden_size": 48, "norm": {"post": {"alpha": 2, "beta": 1}}}"#,
        )
        .unwrap();
        let config = spec.resolve(20).unwrap();
        let norm = Norm::Post { alpha: 2.0, beta: 1.0 };
        assert_eq!(config, ModelConfig { hidden_size: 48, norm, ..Preset::HybridNano.config(20) });
        assert_eq!(ModelSpec::default().resolve(20).unwrap(), Preset::HybridTiny.config(20));
        assert!(serde_json::from_str::<ModelSpec>(r#"{"hidden": 48}"#).is_err(), "unknown keys are refused");
        assert!(serde_json::from_str::<ModelSpec>(r#"{"norm": {"post": {"alpha": 2, "bta": 1}}}"#).is_err());
        let from = ModelSpec { from: Some("runs/a".into()), ..ModelSpec::default() };
        assert!(from.check_from().is_ok());
        assert!(from.resolve(20).is_err());
        assert!(ModelSpec { layers: Some(2), ..from }.check_from().is_err());
    }

    #[test]
    fn seven_lightning_layers_stand_to_one_softmax() {
        let config = ModelConfig { layers: 16, ..Preset::HybridTiny.config(20) };
        let softmax: Vec<usize> = (0..16).filter(|&l| config.mixer(l) == Mixer::Softmax).collect();
        assert_eq!(softmax, [7, 15]);
        assert_eq!(ModelConfig { softmax_every: 1, ..config.clone() }.softmax_layers(), 16);
        assert_eq!(ModelConfig { softmax_every: 0, ..config.clone() }.softmax_layers(), 0);
        let mixers = vec![Mixer::Softmax, Mixer::Lightning];
        assert_eq!(ModelConfig { layers: 2, mixers, ..config }.softmax_layers(), 1);
    }

    #[test]
    fn contradictions_are_refused() {
        for preset in [Preset::HybridNano, Preset::HybridTiny, Preset::SoftmaxTiny, Preset::Small] {
            preset.config(20).validate().unwrap();
        }
        let good = Preset::HybridTiny.config(20);
        for bad in [
            ModelConfig { vocab_size: 0, ..good.clone() },
            ModelConfig { kv_heads: 3, ..good.clone() },
            ModelConfig { rotary_dim: 5, ..good.clone() },
            ModelConfig { rotary_dim: 34, ..good.clone() },
            ModelConfig { experts_per_token: 9, ..good.clone() },
            ModelConfig { mixers: vec![Mixer::Softmax], ..good.clone() },
            ModelConfig { norm_eps: f32::NAN, ..good.clone() },
            ModelConfig { norm: Norm::Post { alpha: f32::NAN, beta: 1.0 }, ..good.clone() },
        ] {
            assert_eq!(bad.validate().unwrap_err().class, Class::Usage, "{bad:?}");
        }
    }

    #[test]
    fn absurd_sizes_are_refused_by_name() {
        let refused = |config: ModelConfig| {
            let failure = config.validate().unwrap_err();
            assert_eq!(failure.class, Class::Usage, "{failure}");
            failure.message
        };
        let good = Preset::HybridTiny.config(20);
        ModelConfig { layers: MOST_LAYERS, ..good.clone() }.validate().unwrap();
        let deep = refused(ModelConfig { layers: 100_000_000, hidden_size: 1_000_000, ..good.clone() });
        assert!(deep.contains("`layers` (100000000) is above 4096"), "{deep}");
        for (wide, name) in [
            (ModelConfig { hidden_size: usize::MAX, ..good.clone() }, "`hidden_size` 18446744073709551615"),
            (ModelConfig { vocab_size: 1 << 40, ..good.clone() }, "`vocab_size` 1099511627776"),
            (ModelConfig { heads: 1 << 40, head_dim: 1 << 40, ..good.clone() }, "`heads` 1099511627776"),
            (ModelConfig { intermediate_size: 1 << 60, ..good.clone() }, "`intermediate_size` 1152921504606846976"),
            (ModelConfig { experts: 1 << 50, ..good.clone() }, "`experts` 1125899906842624"),
        ] {
            let message = refused(wide);
            assert!(message.contains(name) && message.contains("above 1e12"), "{message}");
        }
        // Where no bound is near, the count is that of the weights that are made.
        let made: usize = crate::weights::plan(&good).iter().map(|t| t.shape.iter().product::<usize>()).sum();
        assert!((good.about_weights() / made as f64 - 1.0).abs() < 0.02, "{} of {made}", good.about_weights());
    }

    /// hidden 2, one lightning and one softmax layer of 1 head of 4, 3 experts of 5 (top 1), vocabulary 7.
    #[test]
    fn flops_by_hand() {
        let config = ModelConfig {
            hidden_size: 2,
            layers: 2,
            softmax_every: 2,
            heads: 1,
            head_dim: 4,
            rotary_dim: 2,
            intermediate_size: 5,
            experts: 3,
            experts_per_token: 1,
            ..Preset::HybridTiny.config(7)
        };
        // Lightning 2·12 + 2·4 + 4·2 = 40, softmax 2·(4 + 4 + 4) + 4·2 = 32, two routers of 6 and two experts of 30, head 14.
        assert_eq!(config.active_matmul_weights(), 40 + 32 + 12 + 60 + 14);
        let per_token = 6.0 * 158.0 + 12.0 * 16.0 + 12.0 * 4.0 * 9.0;
        assert_eq!(config.train_flops(10, 9.0), 10.0 * per_token);
        assert_eq!(config.forward_flops(3, 9.0), per_token);
    }

    #[test]
    fn the_schema_marks_what_a_search_may_turn() {
        let schema = serde_json::to_value(schemars::schema_for!(ModelSpec)).unwrap();
        assert_eq!(schema["properties"]["layers"]["x-tunable"]["high"], 12);
        assert_eq!(schema["properties"]["experts"]["x-tunable"]["scale"], "choice");
        assert!(schema["properties"]["norm_eps"].get("x-tunable").is_none());
        assert_eq!(schema["additionalProperties"], false);
    }
}
