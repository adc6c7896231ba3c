//! The decoder against its float64 twin and finite differences, and the laws it keeps: merged equals unmerged, recomputing
//! and threads change no bit, every weight gets a gradient.

use crate::common::*;
use crate::twin::Twin;
use hone_kernels::head::Scores;
use hone_kernels::{Forest, Prediction};
use hone_runs::draws;
use hone_trainer::config::{ModelConfig, Preset};
use hone_trainer::decoder::{Decoder, FREE, Pass, Weights, Workspace};
use rand::RngExt;

/// One forward and backward with the coefficients `d` on log-probs.
struct Step {
    scores: Scores,
    grads: Weights,
    balance: f32,
    routes: Vec<Vec<u32>>,
}

fn step(
    decoder: &Decoder,
    forest: &Forest,
    predictions: &[Prediction],
    d: &[f32],
    temperature: f32,
    pass: Pass,
    threads: usize,
) -> Step {
    pool(threads).run(|| {
        let (mut ws, mut scores, mut grads) = (Workspace::default(), Scores::default(), decoder.weights.zeros_like());
        decoder.forward(forest, &Pass { train: true, ..pass }, &mut ws);
        decoder.score(predictions, temperature, 0, &mut ws, &mut scores);
        let balance = decoder.backward(forest, predictions, temperature, &scores, d, AUX, &mut ws, &mut grads);
        Step { scores, grads, balance, routes: ws.routes().to_vec() }
    })
}

const AUX: f32 = 0.3;

#[test]
fn equals_its_float64_twin() {
    // Absolute error of a log-prob, relative error of a gradient. A bf16 has 8 bits: 0.4% a product's factor, some hundred factors deep.
    let (full, rounded) = ((2e-5, 1e-4), (0.05, 0.08));
    let f32_cases = [(hybrid(), 1.0, full), (other(), 0.7, full), (dense(), 1.0, full)];
    let bf16_cases = [hybrid(), other(), dense()].map(|config| (half(config), 1.0, rounded));
    for (config, temperature, (near, alike)) in f32_cases.into_iter().chain(bf16_cases) {
        let decoder = decoder(config, 3);
        let forest = forest(4);
        let predictions = predictions(&forest);
        let d = coefficients(predictions.len());
        let ours = step(&decoder, &forest, &predictions, &d, temperature, Pass::default(), 1);

        let twin = Twin::new(&decoder).unwrap();
        let (logprobs, balance) = twin.forward(&forest, &predictions, temperature.into(), &ours.routes).unwrap();
        for (p, (a, b)) in ours.scores.logprob.iter().zip(logprobs.to_vec1::<f64>().unwrap()).enumerate() {
            assert!((f64::from(*a) - b).abs() < near, "prediction {p}: {a} and {b}");
        }
        let balance_value = balance.to_scalar::<f64>().unwrap();
        assert!((f64::from(ours.balance) - balance_value).abs() < near, "{} and {balance_value}", ours.balance);

        let d: Vec<f64> = d.iter().map(|&d| f64::from(d)).collect();
        let n = d.len();
        let d = candle_core::Tensor::from_vec(d, n, &candle_core::Device::Cpu).unwrap();
        let loss = ((logprobs * d).unwrap().sum_all().unwrap() + (balance * f64::from(AUX)).unwrap()).unwrap();
        let grads = loss.backward().unwrap();
        for (name, grad) in ours.grads.iter() {
            // candle drops some gradients without a word: an absent one is a failure of the twin.
            let twin = grads.get(twin.weights[name].as_tensor()).unwrap_or_else(|| panic!("no gradient for {name}"));
            let twin: Vec<f32> =
                twin.flatten_all().unwrap().to_vec1::<f64>().unwrap().iter().map(|&x| x as f32).collect();
            let error = relative(grad.data(), &twin);
            assert!(error < alike, "{name}: relative error {error:e}");
        }
    }
}

/// Central differences of the loss along random directions of single tensors, summed in float64, routes pinned.
#[test]
fn gradients_are_the_slopes_of_the_loss() {
    let decoder = decoder(hybrid(), 7);
    let forest = forest(8);
    let predictions = predictions(&forest);
    let d = coefficients(predictions.len());
    let ours = step(&decoder, &forest, &predictions, &d, 1.0, Pass::default(), 1);
    let loss = |weights: Weights| {
        let mut moved = decoder.clone();
        moved.weights = weights;
        let pass = Pass { replay: Some(&ours.routes), ..Pass::default() };
        let step = step(&moved, &forest, &predictions, &d, 1.0, pass, 1);
        let sum: f64 = step.scores.logprob.iter().zip(&d).map(|(&l, &d)| f64::from(l) * f64::from(d)).sum();
        sum + f64::from(AUX) * f64::from(step.balance)
    };
    for name in [
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.qkv_proj.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.2.block_sparse_moe.gate.weight",
        "model.layers.2.self_attn.output_gate.weight",
        "model.layers.3.block_sparse_moe.experts.w3.weight",
    ] {
        let mut rng = draws(9, name, 0, 0);
        let direction: Vec<f32> =
            decoder.weights.get(name).unwrap().data().iter().map(|_| 2.0 * rng.random::<f32>() - 1.0).collect();
        let size = direction.iter().map(|x| x * x).sum::<f32>().sqrt();
        let step = 5e-2 / size;
        let moved = |by: f32| {
            let mut weights = decoder.weights.clone();
            let tensor = weights.get_mut(name).unwrap().data_mut();
            tensor.iter_mut().zip(&direction).for_each(|(w, d)| *w += by * d);
            loss(weights)
        };
        let slope = (moved(step) - moved(-step)) / (2.0 * f64::from(step));
        let grad = ours.grads.get(name).unwrap().data();
        let along: f64 = grad.iter().zip(&direction).map(|(&g, &d)| f64::from(g) * f64::from(d)).sum();
        let norm = grad.iter().map(|g| g * g).sum::<f32>().sqrt() * size;
        assert!((slope - along).abs() < 5e-3 * f64::from(norm), "{name}: slope {slope}, gradient {along}, norm {norm}");
    }
}

/// Each leaf's path as its own sequence, with what it takes to compare: rows and the coefficients of its predictions.
#[test]
fn merged_gradients_equal_unmerged_ones() {
    for config in [hybrid(), other()] {
        let decoder = decoder(config, 11);
        let merged = forest(12);
        let segments = merged.segments();
        let leaves: Vec<usize> =
            (0..segments.len()).filter(|&i| segments.iter().all(|s| s.parent != Some(i))).collect();
        let rows_of_path = |leaf: usize| -> Vec<usize> {
            merged.ancestors(leaf).into_iter().flatten().chain(merged.rows_of(leaf)).collect()
        };
        let paths: Vec<Vec<usize>> = leaves.iter().map(|&leaf| rows_of_path(leaf)).collect();
        for (row, uses) in (0..merged.rows()).map(|r| (r, merged.uses(r))) {
            assert_eq!(paths.iter().filter(|p| p.contains(&row)).count() as u32, uses, "uses count trajectories");
        }

        // A term a trajectory and step, each with its own coefficient; the merged batch adds those of one prediction.
        let sequences: Vec<Vec<u32>> =
            paths.iter().map(|path| path.iter().map(|&r| merged.tokens()[r]).collect()).collect();
        let flat = Forest::from_sequences(sequences.iter().map(Vec::as_slice));
        let terms: usize = paths.iter().map(|p| p.len() - 1).sum();
        let flat_d = coefficients(terms);
        let (mut flat_predictions, mut summed) = (Vec::new(), std::collections::BTreeMap::<Prediction, f32>::new());
        let mut start = 0;
        for path in &paths {
            for pair in 0..path.len() - 1 {
                let target = merged.tokens()[path[pair + 1]];
                *summed.entry(Prediction { row: path[pair] as u32, target }).or_default() +=
                    flat_d[flat_predictions.len()];
                flat_predictions.push(Prediction { row: (start + pair) as u32, target });
            }
            start += path.len();
        }
        let (predictions, d): (Vec<_>, Vec<_>) = summed.into_iter().unzip();

        let ours = step(&decoder, &merged, &predictions, &d, 0.9, Pass::default(), 1);
        let k = decoder.config.experts_per_token;
        let pinned: Vec<Vec<u32>> = ours
            .routes
            .iter()
            .map(|layer| paths.iter().flatten().flat_map(|&r| layer[r * k..(r + 1) * k].to_vec()).collect())
            .collect();
        let pass = Pass { replay: Some(&pinned), ..Pass::default() };
        let unmerged = step(&decoder, &flat, &flat_predictions, &flat_d, 0.9, pass, 1);
        assert!((ours.balance - unmerged.balance).abs() < 1e-5);
        for ((name, a), (_, b)) in ours.grads.iter().zip(unmerged.grads.iter()) {
            let error = relative(a.data(), b.data());
            assert!(error < 1e-5, "{name}: relative error {error:e}");
        }
    }
}

fn assert_same_bits(a: &Step, b: &Step) {
    assert_eq!(a.scores, b.scores);
    assert_eq!(a.balance.to_bits(), b.balance.to_bits());
    for ((name, a), (_, b)) in a.grads.iter().zip(b.grads.iter()) {
        assert!(a.data().iter().zip(b.data()).all(|(a, b)| a.to_bits() == b.to_bits()), "{name} differs");
    }
}

#[test]
fn recomputing_changes_no_bit() {
    for config in [hybrid(), other(), dense(), half(hybrid())] {
        let decoder = decoder(config, 13);
        let forest = forest(14);
        let predictions = predictions(&forest);
        let d = coefficients(predictions.len());
        let kept = step(&decoder, &forest, &predictions, &d, 1.0, Pass::default(), 1);
        let recomputed = step(&decoder, &forest, &predictions, &d, 1.0, Pass { recompute: true, ..Pass::default() }, 1);
        assert_same_bits(&kept, &recomputed);
        assert_eq!(kept.routes, recomputed.routes);

        // Replayed routes survive recomputing too: ones that the router would not have chosen.
        if decoder.config.experts > 0 {
            let turned: Vec<Vec<u32>> = kept
                .routes
                .iter()
                .map(|layer| layer.iter().map(|&e| (e + 1) % decoder.config.experts as u32).collect())
                .collect();
            let run = |recompute| {
                let pass = Pass { replay: Some(&turned), recompute, ..Pass::default() };
                step(&decoder, &forest, &predictions, &d, 1.0, pass, 1)
            };
            let (kept, recomputed) = (run(false), run(true));
            assert_eq!(kept.routes, turned);
            assert_same_bits(&kept, &recomputed);
        }
    }
}

#[test]
fn threads_change_no_bit() {
    let nano = ModelConfig { experts: 4, ..Preset::HybridNano.config(VOCAB) };
    for config in [half(nano.clone()), nano] {
        let decoder = decoder(config, 15);
        let sequences: Vec<Vec<u32>> = (0..6).map(|i| tokens(70 + 3 * i, 16 + i as u64)).collect();
        let forest = Forest::from_sequences(sequences.iter().map(Vec::as_slice));
        let predictions = predictions(&forest);
        let d = coefficients(predictions.len());
        let one = step(&decoder, &forest, &predictions, &d, 1.0, Pass::default(), 1);
        let two = step(&decoder, &forest, &predictions, &d, 1.0, Pass::default(), 2);
        assert_same_bits(&one, &two);
    }
}

/// Weights kept rounded, and weights rounded by every product.
#[test]
fn kept_rounded_weights_change_no_bit() {
    let kept = Decoder::new(half(hybrid()), 19).unwrap();
    let mut anew = kept.clone();
    anew.weights.iter_mut().for_each(|(_, w)| _ = w.data_mut()); // what is written is no longer kept rounded
    let forest = forest(20);
    let predictions = predictions(&forest);
    let d = coefficients(predictions.len());
    let run = |decoder| step(decoder, &forest, &predictions, &d, 1.0, Pass::default(), 1);
    assert_same_bits(&run(&kept), &run(&anew));
}

#[test]
fn a_workspace_can_be_reused_for_any_batch() {
    let decoder = decoder(hybrid(), 17);
    let (small, large) = (Forest::from_sequences([&[1u32, 2, 3][..]]), forest(18));
    pool(1).run(|| {
        let mut ws = Workspace::default();
        let run = |forest: &Forest, pass: &Pass, ws: &mut Workspace| {
            let predictions = predictions(forest);
            let mut scores = Scores::default();
            decoder.forward(forest, pass, ws);
            decoder.score(&predictions, 1.0, 0, ws, &mut scores);
            scores
        };
        let train = Pass { train: true, ..Pass::default() };
        let first = run(&small, &train, &mut ws);
        run(&large, &Pass { recompute: true, ..train }, &mut ws);
        run(&large, &Pass::default(), &mut ws);
        assert_eq!(run(&small, &train, &mut ws), first);
    });
}

#[test]
fn every_weight_gets_a_gradient() {
    for config in [hybrid(), other(), dense()] {
        let decoder = decoder(config, 19);
        let forest = forest(20);
        let predictions = predictions(&forest);
        let step = step(&decoder, &forest, &predictions, &coefficients(predictions.len()), 1.0, Pass::default(), 1);
        for (name, grad) in step.grads.iter() {
            let grad = grad.data();
            assert!(grad.iter().all(|g| g.is_finite()), "{name}");
            // Embeddings of absent tokens and experts without rows have none; no tensor is without.
            let some = grad.iter().filter(|&&g| g != 0.0).count();
            assert!(2 * some > grad.len(), "{name}: {some} of {}", grad.len());
        }
    }
}

#[test]
fn gradients_are_added_to() {
    let decoder = decoder(other(), 21);
    let forest = forest(22);
    let predictions = predictions(&forest);
    let d = coefficients(predictions.len());
    let once = step(&decoder, &forest, &predictions, &d, 1.0, Pass::default(), 1);
    pool(1).run(|| {
        let (mut ws, mut scores, mut grads) = (Workspace::default(), Scores::default(), decoder.weights.zeros_like());
        for _ in 0..2 {
            decoder.forward(&forest, &Pass { train: true, ..Pass::default() }, &mut ws);
            decoder.score(&predictions, 1.0, 0, &mut ws, &mut scores);
            decoder.backward(&forest, &predictions, 1.0, &scores, &d, AUX, &mut ws, &mut grads);
        }
        for ((name, twice), (_, once)) in grads.iter().zip(once.grads.iter()) {
            let doubled: Vec<f32> = once.data().iter().map(|g| 2.0 * g).collect();
            assert!(relative(twice.data(), &doubled) < 1e-5, "{name}");
        }
    });
}

#[test]
fn rows_that_are_free_choose_for_themselves() {
    let decoder = decoder(hybrid(), 23);
    let forest = forest(24);
    let k = decoder.config.experts_per_token;
    pool(1).run(|| {
        let mut ws = Workspace::default();
        decoder.forward(&forest, &Pass::default(), &mut ws);
        let own = ws.routes().to_vec();
        let hidden = ws.hidden().clone();
        // The first layer's row 0 is turned, all else left free.
        let mut replay: Vec<Vec<u32>> = own.iter().map(|layer| vec![FREE; layer.len()]).collect();
        decoder.forward(&forest, &Pass { replay: Some(&replay), ..Pass::default() }, &mut ws);
        assert_eq!((ws.routes(), ws.hidden()), (&own[..], &hidden));
        let turned: Vec<u32> = own[0][..k].iter().map(|e| (e + 1) % 3).collect();
        replay[0][..k].copy_from_slice(&turned);
        decoder.forward(&forest, &Pass { replay: Some(&replay), ..Pass::default() }, &mut ws);
        assert_eq!(&ws.routes()[0][..k], &turned[..]);
        assert_eq!(&ws.routes()[0][k..], &own[0][k..]);
        assert_ne!(ws.hidden().row(0), hidden.row(0));
    });
}
