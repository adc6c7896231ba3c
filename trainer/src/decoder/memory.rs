//! What a workspace takes, by part: the arrays as they are, and as planned for a number of rows. Beside the decoder, because the
//! lists follow its fields.

use super::{Keep, Workspace};
use crate::config::{Mixer, ModelConfig};
use crate::layer::memory::{Array, held};
use crate::layer::{Activations, Scratch};

/// A workspace's bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Parts {
    /// What lightning layers leave for backward.
    pub lightning: usize,
    /// What softmax layers leave for backward.
    pub softmax: usize,
    /// The residual stream between layers, routes, and what goes with rows.
    pub stream: usize,
    /// What layers share, none of it outliving its layer's pass.
    pub scratch: usize,
    /// A tied head and its gradient.
    pub head: usize,
}

impl Parts {
    /// Of a pass of `rows` rows that leaves `keep`, backward included where it leaves what backward needs. `aux` says whether the
    /// balance loss has a gradient.
    pub fn plan(c: &ModelConfig, keep: Keep, rows: usize, aux: bool) -> Self {
        let train = keep != Keep::Outputs;
        let of = |mixer| Activations::default().arrays(c, mixer, rows);
        let layer = |mixer| of(mixer).iter().map(|a| a.planned).sum::<usize>();
        let softmax = c.softmax_layers();
        let row = 4 * c.hidden_size;
        let inputs = if train { c.layers + 1 } else { 2 };
        let routes = if c.experts > 0 { 4 * c.layers * c.experts_per_token } else { 0 };
        // The normed output; its gradient, the stream's, and the uses.
        let ends = row + if train { 2 * row + 4 } else { 0 };
        let tied = if c.tie_embeddings { 4 * c.hidden_size * c.vocab_size } else { 0 };
        let mut scratch: usize = Scratch::default().arrays(c, rows, train, aux).iter().map(|a| a.planned).sum();
        let (mut kept_lightning, mut kept_softmax) = (0, 0);
        if keep == Keep::Everything {
            kept_lightning = (c.layers - softmax) * layer(Mixer::Lightning);
            kept_softmax = softmax * layer(Mixer::Softmax);
        } else {
            // One set of arrays for all layers, each as large as the layer that wants most.
            let both = [(softmax < c.layers, Mixer::Lightning), (softmax > 0, Mixer::Softmax)];
            let lists: Vec<Vec<Array>> = both.into_iter().filter(|(any, _)| *any).map(|(_, m)| of(m)).collect();
            scratch += (0..lists[0].len())
                .map(|array| lists.iter().map(|list| list[array].planned).max().unwrap_or(0))
                .sum::<usize>();
        }
        Self {
            lightning: kept_lightning,
            softmax: kept_softmax,
            stream: rows * (inputs * row + routes + ends),
            scratch,
            head: if train { 2 * tied } else { tied },
        }
    }

    /// Of a workspace as it is, after a pass.
    pub fn held(c: &ModelConfig, ws: &Workspace) -> Self {
        let Workspace {
            inputs,
            layers,
            hidden,
            tied_head,
            routes,
            replay,
            kept,
            rows: _,
            uses,
            scratch,
            d_x,
            d_hidden,
            d_head,
        } = ws;
        let mut parts = Self {
            stream: inputs.iter().chain([hidden, d_x, d_hidden]).map(|t| t.bytes()).sum::<usize>()
                + routes.iter().chain(replay.iter().flatten()).map(held).sum::<usize>()
                + held(uses),
            scratch: scratch.arrays(c, 0, true, true).iter().map(|a| a.held).sum(),
            head: tied_head.bytes() + d_head.bytes(),
            ..Self::default()
        };
        for (number, layer) in layers.iter().enumerate() {
            let bytes: usize = layer.arrays(c, c.mixer(number), 0).iter().map(|a| a.held).sum();
            match (kept, c.mixer(number)) {
                (Keep::Everything, Mixer::Lightning) => parts.lightning += bytes,
                (Keep::Everything, Mixer::Softmax) => parts.softmax += bytes,
                _ => parts.scratch += bytes,
            }
        }
        parts
    }

    /// All of it.
    pub fn total(&self) -> usize {
        let Self { lightning, softmax, stream, scratch, head } = self;
        lightning + softmax + stream + scratch + head
    }
}

impl Workspace {
    /// Bytes allocated for the arrays of a decoder of `config`, after a pass.
    pub fn bytes(&self, config: &ModelConfig) -> usize {
        Parts::held(config, self).total()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Norm, Preset, Router};
    use crate::decoder::{Decoder, Pass};
    use crate::toy;
    use hone_kernels::head::Scores;
    use hone_kernels::{Forest, Prediction};

    fn hybrid() -> ModelConfig {
        ModelConfig {
            layers: 5,
            softmax_every: 2,
            vocab_size: 40,
            experts: 4,
            block: 3,
            ..Preset::HybridNano.config(40)
        }
    }

    /// A training step on 30 rows, then what the workspace holds.
    fn step(config: &ModelConfig, recompute: bool, aux: f32) -> Workspace {
        let (decoder, mut ws) = (Decoder::new(config.clone(), 1).unwrap(), Workspace::default());
        let tokens: Vec<u32> = (0..15).collect();
        let forest = Forest::from_sequences([&tokens[..], &tokens]);
        let predictions: Vec<Prediction> = (0..30).map(|row| Prediction { row, target: row }).collect();
        let (mut scores, mut grads) = (Scores::default(), decoder.weights.zeros_like());
        toy::pooled(|| {
            decoder.forward(&forest, &Pass { train: true, recompute, ..Pass::default() }, &mut ws);
            decoder.score(&predictions, 1.0, 0, &mut ws, &mut scores);
            decoder.backward(&forest, &predictions, 1.0, &scores, &[-0.1; 30], aux, &mut ws, &mut grads);
        });
        ws
    }

    #[test]
    fn a_plan_is_what_a_step_takes_to_the_byte() {
        let post = Norm::Post { alpha: 1.5, beta: 0.7 };
        let configs = [
            hybrid(),
            ModelConfig { softmax_every: 1, ..hybrid() },
            ModelConfig { softmax_every: 1, qk_norm: true, norm: post, ..hybrid() },
            ModelConfig { softmax_every: 0, experts: 0, experts_per_token: 0, ..hybrid() },
            ModelConfig { qk_norm: true, tie_embeddings: true, router: Router::SigmoidBias, norm: post, ..hybrid() },
        ];
        for c in configs {
            for (keep, recompute) in [(Keep::Everything, false), (Keep::Inputs, true)] {
                for aux in [0.0, 0.1] {
                    let ws = step(&c, recompute, aux);
                    // Array by array first: a difference then has a name.
                    for array in ws.scratch.arrays(&c, 30, true, aux > 0.0) {
                        assert_eq!(array.held, array.planned, "{} of {c:?}", array.name);
                    }
                    if keep == Keep::Everything {
                        for (number, layer) in ws.layers.iter().enumerate() {
                            for array in layer.arrays(&c, c.mixer(number), 30) {
                                assert_eq!(array.held, array.planned, "{} of layer {number} of {c:?}", array.name);
                            }
                        }
                    }
                    let planned = Parts::plan(&c, keep, 30, aux > 0.0);
                    assert_eq!((Parts::held(&c, &ws), ws.bytes(&c)), (planned, planned.total()), "{keep:?} of {c:?}");
                }
            }
        }
    }

    #[test]
    fn recomputing_layers_takes_less_and_scoring_least() {
        let c = hybrid();
        let of = |keep| Parts::plan(&c, keep, 100, true).total();
        let [outputs, inputs, everything] = [Keep::Outputs, Keep::Inputs, Keep::Everything].map(of);
        assert!(outputs < inputs && inputs < everything, "{outputs} {inputs} {everything}");
    }
}
