//! Rollout equals training, row for row: log-probs bit for bit, independent of company; and the ways a completion ends.

use crate::common::*;
use hone_evals::model::Finish;
use hone_kernels::head::Scores;
use hone_kernels::{Forest, Prediction, Segment};
use hone_trainer::config::{ModelConfig, Preset};
use hone_trainer::decoder::{Decoder, Pass, Workspace};
use hone_trainer::rollout::{RolloutOptions, Sample, generate, generate_keyed};

fn prompts() -> Vec<Vec<u32>> {
    [1, 5, 9, 5, 17].iter().enumerate().map(|(i, &n)| tokens(n, 30 + i as u64)).collect()
}

fn options() -> RolloutOptions {
    RolloutOptions { temperature: 0.8, max_tokens: 14, stop: vec![2], n: 3, seed: 40, ..RolloutOptions::default() }
}

/// Log-probs and routes of `samples` by the trainer: the forest {prompt → completions}.
fn trained(decoder: &Decoder, prompt: &[u32], samples: &[Sample], temperature: f32) -> Vec<(Vec<f32>, Vec<Vec<u32>>)> {
    let mut tokens = prompt.to_vec();
    let uses = samples.len() as u32;
    let mut segments = vec![Segment { start: 0, len: prompt.len(), parent: None, uses }];
    // (row, target) of each token: the first is predicted by the prompt's last row, the last one's own row is not needed.
    let mut places: Vec<Vec<Prediction>> = Vec::new();
    for s in samples {
        let start = tokens.len();
        let fed = &s.tokens[..s.tokens.len() - 1];
        let row = |i: usize| if i == 0 { prompt.len() - 1 } else { start + i - 1 };
        places
            .push(s.tokens.iter().enumerate().map(|(i, &target)| Prediction { row: row(i) as u32, target }).collect());
        if !fed.is_empty() {
            segments.push(Segment { start, len: fed.len(), parent: Some(0), uses: 1 });
            tokens.extend_from_slice(fed);
        }
    }
    let forest = Forest::new(tokens, segments).unwrap();
    let mut predictions: Vec<Prediction> = places.iter().flatten().copied().collect();
    predictions.sort();
    predictions.dedup();
    let (mut ws, mut scores) = (Workspace::default(), Scores::default());
    decoder.forward(&forest, &Pass::default(), &mut ws);
    decoder.score(&predictions, temperature, 0, &mut ws, &mut scores);
    let k = decoder.config.experts_per_token;
    let found = |p: &Prediction| scores.logprob[predictions.binary_search(p).unwrap()];
    let routes = |p: &Prediction| {
        let row = p.row as usize;
        ws.routes().iter().flat_map(|layer| layer[row * k..(row + 1) * k].to_vec()).collect::<Vec<u32>>()
    };
    places.iter().map(|path| (path.iter().map(found).collect(), path.iter().map(routes).collect())).collect()
}

#[test]
fn logprobs_and_routes_equal_the_trainers_bit_for_bit() {
    let nano = ModelConfig { block: 4, ..Preset::HybridNano.config(VOCAB) };
    let f32_cases = [(hybrid(), 0.8), (other(), 1.0), (dense(), 0.8), (hybrid(), 0.0), (nano, 1.3)];
    for (config, temperature) in f32_cases.into_iter().chain([(half(hybrid()), 0.8), (half(other()), 1.0)]) {
        let decoder = decoder(config, 41);
        pool(2).run(|| {
            let prompts = prompts();
            let samples = generate(&decoder, &prompts, &RolloutOptions { temperature, ..options() });
            let mut tokens = 0;
            for (prompt, group) in prompts.iter().zip(&samples) {
                // T = 0 reports log-probs at temperature 1.
                let scored = trained(&decoder, prompt, group, if temperature == 0.0 { 1.0 } else { temperature });
                for (sample, (logprobs, routes)) in group.iter().zip(scored) {
                    tokens += sample.tokens.len();
                    assert_eq!(sample.logprobs, logprobs);
                    assert_eq!(sample.routes, routes);
                }
            }
            assert!(tokens > 60, "{tokens} tokens are too few to show it");
        });
    }
}

#[test]
fn a_sample_does_not_depend_on_its_company() {
    for config in [hybrid(), half(hybrid())] {
        let decoder = decoder(config, 42);
        let prompts = prompts();
        let together = pool(2).run(|| generate(&decoder, &prompts, &options()));
        pool(1).run(|| {
            for (i, prompt) in prompts.iter().enumerate() {
                let alone = generate_keyed(
                    &decoder,
                    std::slice::from_ref(prompt),
                    &[i as u64],
                    &RolloutOptions { n: 2, ..options() },
                );
                assert_eq!(alone[0][..], together[i][..2]);
            }
        });
        let other_seed = pool(1).run(|| generate(&decoder, &prompts, &RolloutOptions { seed: 1, ..options() }));
        assert_ne!(other_seed, together);
        assert_ne!(together[1][0], together[1][1], "samples of one prompt differ");
    }
}

#[test]
fn more_sequences_than_fit_at_once_are_all_finished() {
    let decoder = decoder(hybrid(), 43);
    let prompts: Vec<Vec<u32>> = (0..70).map(|i| tokens(1 + i % 7, i as u64)).collect();
    let options = RolloutOptions { n: 9, max_tokens: 5, ..options() };
    pool(2).run(|| {
        let all = generate(&decoder, &prompts, &options);
        assert!(all.iter().all(|group| group.len() == 9 && group.iter().all(|s| !s.tokens.is_empty())));
        for i in [0, 35, 69] {
            let alone = generate_keyed(&decoder, &prompts[i..=i], &[i as u64], &options);
            assert_eq!(alone[0], all[i]);
        }
    });
}

/// A model that always predicts `id`, far above all others.
fn certain(id: usize) -> Decoder {
    let mut decoder = decoder(dense(), 44);
    decoder.weights.get_mut("model.norm.weight").unwrap().fill(1.0);
    let layers: Vec<String> = decoder.weights.iter().map(|(n, _)| n.to_string()).collect();
    for name in layers.iter().filter(|n| n.contains("out_proj") || n.contains("down_proj")) {
        decoder.weights.get_mut(name).unwrap().fill(0.0);
    }
    decoder.weights.get_mut("model.embed_tokens.weight").unwrap().fill(1.0);
    let head = decoder.weights.get_mut("lm_head.weight").unwrap();
    head.fill(0.0);
    let cols = head.cols();
    head.data_mut().iter_mut().skip(id).step_by(cols).for_each(|w| *w = 1.0);
    decoder
}

#[test]
fn completions_end_for_a_reason() {
    let decoder = certain(5);
    let finish = |options: RolloutOptions| {
        let mut group = pool(1).run(|| generate(&decoder, &[vec![1, 2]], &options)).remove(0);
        let sample = group.remove(0);
        assert!(sample.tokens.iter().all(|&t| t == 5));
        assert_eq!((sample.logprobs.len(), sample.routes.len()), (sample.tokens.len(), sample.tokens.len()));
        (sample.tokens.len(), sample.finish)
    };
    let plain = RolloutOptions { max_tokens: 9, ..RolloutOptions::default() };
    assert_eq!(finish(plain.clone()), (9, Finish::Length));
    assert_eq!(finish(RolloutOptions { stop: vec![4, 5], ..plain.clone() }), (1, Finish::Stop));
    assert_eq!(
        finish(RolloutOptions { stop_sequences: vec![vec![], vec![5, 5, 5]], ..plain.clone() }),
        (3, Finish::Stop)
    );
    assert_eq!(finish(RolloutOptions { stop_sequences: vec![vec![5, 4]], ..plain.clone() }), (9, Finish::Length));
    assert_eq!(finish(RolloutOptions { repetition: Some(4), ..plain.clone() }), (4, Finish::Repetition));
    assert_eq!(finish(RolloutOptions { max_tokens: 0, ..plain.clone() }), (0, Finish::Length));
    assert_eq!(finish(RolloutOptions { temperature: 0.0, ..plain }), (9, Finish::Length));
}

#[test]
fn samples_follow_the_distribution() {
    let decoder = decoder(dense(), 45);
    let options = RolloutOptions { temperature: 1.5, max_tokens: 1, n: 4000, ..RolloutOptions::default() };
    let group = pool(2).run(|| generate(&decoder, &[vec![3]], &options)).remove(0);
    let mut seen = [0.0; VOCAB];
    let mut probability = [0.0; VOCAB];
    for sample in &group {
        let id = sample.tokens[0] as usize;
        seen[id] += 1.0 / group.len() as f64;
        probability[id] = f64::from(sample.logprobs[0]).exp();
    }
    assert!((probability.iter().sum::<f64>() - 1.0).abs() < 0.01);
    for (id, (seen, p)) in seen.iter().zip(probability).enumerate() {
        // Five standard errors.
        assert!((seen - p).abs() < 5.0 * (p * (1.0 - p) / 4000.0).sqrt() + 1e-9, "token {id}: {seen} of {p}");
    }
}
