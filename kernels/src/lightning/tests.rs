use super::*;
use crate::forest::testing::{forests, lettered, merge_sum, paths, random_forest, sees, unmerge, unmerged};
use crate::oracle::{assert_close, assert_slopes, autograd, random};
use crate::threads::Pool;
use candle_core as candle;
use proptest::prelude::*;

/// Heads, width, tokens a chunk.
const SHAPES: [(usize, usize, usize); 7] =
    [(1, 1, 1), (2, 3, 2), (4, 8, 3), (3, 16, 8), (2, 20, 16), (1, 32, 17), (2, 72, 64)];

fn heads((heads, head_dim, block): (usize, usize, usize)) -> Heads {
    Heads { head_dim, slopes: slopes(heads, 1, 4), block }
}

fn inputs(shape: &Heads, forest: &Forest, seed: u64) -> [Tensor; 3] {
    [seed, seed + 1, seed + 2].map(|seed| random(seed, &[forest.rows(), shape.slopes.len() * shape.head_dim]))
}

fn run(shape: &Heads, forest: &Forest, [q, k, v]: &[Tensor; 3]) -> Tensor {
    let mut out = Tensor::default();
    forward(shape, forest, q, k, v, &mut out, None);
    out
}

fn run_back(shape: &Heads, forest: &Forest, [q, k, v]: &[Tensor; 3], d_out: &Tensor) -> [Tensor; 3] {
    let [mut dq, mut dk, mut dv] = [(); 3].map(|()| Tensor::from_vec(vec![7.0], &[1]));
    backward(shape, forest, q, k, v, d_out, &mut dq, &mut dk, &mut dv);
    [dq, dk, dv]
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// Linear attention under the forest's mask and the heads' decay, dense, in candle.
fn dense(shape: &Heads, forest: &Forest, x: &[candle::Tensor]) -> candle::Result<Vec<candle::Tensor>> {
    let (n, d) = (forest.rows(), shape.head_dim);
    let outs = shape.slopes.iter().enumerate().map(|(h, slope)| {
        let decay = |ij: usize| {
            let (i, j) = (ij / n, ij % n);
            let distance = f64::from(forest.positions()[i]) - f64::from(forest.positions()[j]);
            if sees(forest, i, j) { (-f64::from(*slope) * distance).exp() } else { 0.0 }
        };
        let decay = candle::Tensor::from_vec((0..n * n).map(decay).collect(), (n, n), &candle::Device::Cpu)?;
        let (q, k, v) = (x[0].narrow(1, h * d, d)?, x[1].narrow(1, h * d, d)?, x[2].narrow(1, h * d, d)?);
        (q.matmul(&k.t()?)? * decay)?.matmul(&v)
    });
    Ok(vec![candle::Tensor::cat(&outs.collect::<candle::Result<Vec<_>>>()?, 1)?])
}

#[test]
fn gradients_are_those_of_autograd_and_of_differences() {
    for (seed, shape) in SHAPES.into_iter().map(heads).enumerate() {
        let seed = seed as u64;
        let forest = random_forest(seed);
        let x = inputs(&shape, &forest, 10 * seed);
        let d_out = random(99 + seed, x[0].shape());
        let inputs = x.each_ref();
        let truth = autograd(&inputs, &[&d_out], |x| dense(&shape, &forest, x));
        let grads = run_back(&shape, &forest, &x, &d_out);
        assert_close(run(&shape, &forest, &x).data(), &truth.outputs[0], 1e-4, 1e-5);
        for (grad, truth) in grads.iter().zip(&truth.gradients) {
            assert_close(grad.data(), truth, 1e-4, 1e-4);
        }
        assert_slopes(&inputs, &[&d_out], &grads.each_ref(), 1e-2, 2e-3, |x| {
            vec![run(&shape, &forest, &[x[0].clone(), x[1].clone(), x[2].clone()])]
        });
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn agrees_with_its_plain_twin(forest in forests(), shape in prop::sample::select(&SHAPES[..]), seed in 0u64..1000) {
        let shape = heads(shape);
        let x = inputs(&shape, &forest, seed);
        let d_out = random(seed + 3, x[0].shape());
        let (out, states) = plain::forward(&shape, &forest, &x[0], &x[1], &x[2]);
        let (mut fast, mut finals) = (Tensor::default(), Vec::new());
        forward(&shape, &forest, &x[0], &x[1], &x[2], &mut fast, Some(&mut finals));
        assert_close(fast.data(), out.data(), 1e-4, 1e-5);
        prop_assert_eq!(finals.len(), forest.segments().len());
        for (segment, state) in finals.iter().enumerate() {
            assert_close(state, &states[forest.rows_of(segment).end - 1], 1e-4, 1e-5);
        }
        let truth = plain::backward(&shape, &forest, &x[0], &x[1], &x[2], &d_out);
        for (grad, truth) in run_back(&shape, &forest, &x, &d_out).iter().zip(&truth) {
            assert_close(grad.data(), truth.data(), 1e-4, 1e-4);
        }
    }

    #[test]
    fn decoding_gives_the_bits_of_forward(forest in forests(), shape in prop::sample::select(&SHAPES[..]), seed in 0u64..1000) {
        let shape = heads(shape);
        let x = inputs(&shape, &forest, seed);
        let (mut out, mut finals) = (Tensor::default(), Vec::new());
        forward(&shape, &forest, &x[0], &x[1], &x[2], &mut out, Some(&mut finals));
        prop_assert_eq!(bits(run(&shape, &forest, &x).data()), bits(out.data()));
        let mut closed: Vec<State> = Vec::new();
        for (s, segment) in forest.segments().iter().enumerate() {
            let mut state = segment.parent.map_or_else(|| State::empty(&shape), |p| closed[p].clone());
            for i in forest.rows_of(s) {
                let mut one = vec![f32::NAN; out.cols()];
                row(&shape, x[0].row(i), x[1].row(i), x[2].row(i), &mut state, &mut one);
                prop_assert_eq!(bits(&one), bits(out.row(i)));
                prop_assert!(state.keys.len() <= shape.block * out.cols());
            }
            state.close(&shape);
            prop_assert_eq!(bits(&state.kv), bits(&finals[s]));
            prop_assert!(state.keys.is_empty() && state.values.is_empty());
            let again = state.clone();
            state.close(&shape);
            prop_assert_eq!(&state.kv, &again.kv);
            closed.push(again);
        }
    }

    /// Prefix-tree merging changes the cost and nothing else.
    #[test]
    fn a_tree_is_its_trajectories(forest in forests(), shape in prop::sample::select(&SHAPES[..]), seed in 0u64..1000) {
        let shape = heads(shape);
        let x = inputs(&shape, &forest, seed).map(|mut x| {
            x.data_mut().iter_mut().for_each(|x| *x *= 0.3);
            x
        });
        let flat = unmerged(&forest);
        let flat_x = x.each_ref().map(|x| unmerge(&forest, x));
        let merged = run(&shape, &forest, &x);
        assert_close(unmerge(&forest, &merged).data(), run(&shape, &flat, &flat_x).data(), 1e-6, 1e-6);
        let flat_d_out = random(seed + 3, flat_x[0].shape());
        let d_out = merge_sum(&forest, &flat_d_out);
        let apart = run_back(&shape, &flat, &flat_x, &flat_d_out);
        for (merged, apart) in run_back(&shape, &forest, &x, &d_out).iter().zip(&apart) {
            assert_close(merged.data(), merge_sum(&forest, apart).data(), 1e-5, 1e-5);
        }
    }

    #[test]
    fn the_length_of_chunks_changes_rounding_alone(forest in forests(), seed in 0u64..1000) {
        let shape = |block| heads((2, 5, block));
        let x = inputs(&shape(1), &forest, seed);
        let d_out = random(seed + 3, x[0].shape());
        let (out, grads) = (run(&shape(1), &forest, &x), run_back(&shape(1), &forest, &x, &d_out));
        for block in [2, 3, 8, 1000] {
            assert_close(run(&shape(block), &forest, &x).data(), out.data(), 1e-5, 1e-5);
            for (a, b) in run_back(&shape(block), &forest, &x, &d_out).iter().zip(&grads) {
                assert_close(a.data(), b.data(), 1e-5, 2e-5);
            }
        }
    }
}

#[test]
fn bits_depend_neither_on_threads_nor_on_company() {
    let shape = heads((3, 8, 16));
    let sequence = vec![1u32; 600]; // long enough that heads are computed apart
    let short = [1u32; 37];
    let company = vec![&short[..]; 10];
    let forest = Forest::from_sequences([&short[..], &sequence].into_iter().chain(company));
    let x = inputs(&shape, &forest, 5);
    let d_out = random(8, x[0].shape());
    let all = |threads| {
        Pool::new(threads).expect("threads").run(|| {
            let (mut out, mut finals) = (Tensor::default(), Vec::new());
            forward(&shape, &forest, &x[0], &x[1], &x[2], &mut out, Some(&mut finals));
            let [dq, dk, dv] = run_back(&shape, &forest, &x, &d_out);
            let results = [out, dq, dk, dv].map(|x| bits(x.data()));
            (results, finals.iter().map(|x| bits(x)).collect::<Vec<_>>())
        })
    };
    let one = all(1);
    assert_eq!(all(2), one);
    assert_eq!(all(3), one);

    let alone = Forest::from_sequences([&sequence[..]]);
    let part = |x: &Tensor| Tensor::from_vec(x.data()[37 * x.cols()..637 * x.cols()].to_vec(), &[600, x.cols()]);
    let (x, d_out) = (x.each_ref().map(part), part(&d_out));
    let out = run(&shape, &alone, &x);
    let [dq, dk, dv] = run_back(&shape, &alone, &x, &d_out);
    for (whole, alone) in one.0.iter().zip([out, dq, dk, dv]) {
        let cols = alone.cols();
        assert_eq!(whole[37 * cols..637 * cols], bits(alone.data()));
    }
}

#[test]
fn slopes_are_those_of_minimaxs_own_code() {
    let close = |found: Vec<f32>, expected: &[f64]| assert_close(&found, expected, 1e-6, 0.0);
    close(slopes(4, 0, 8), &[0.25, 0.0625, 0.015625, 0.00390625].map(|s| s * (1.0 + 1e-5)));
    let decays: Vec<f32> = slopes(4, 0, 8).iter().map(|s| (-s).exp()).collect();
    close(decays, &[0.778799, 0.939412, 0.984496, 0.996101]);
    close(slopes(4, 7, 8), &[0.25, 0.0625, 0.015625, 0.00390625].map(|s| s * 1e-5)); // the last layer
    close(slopes(2, 2, 5), &[0.0625, 0.00390625].map(|s| s * 0.50001));
    close(slopes(1, 0, 1), &[0.00390625 * (1.0 + 1e-5)]);
    // Not a power of two: those of 4, then every second of those of 8.
    close(slopes(6, 0, 2), &[0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125].map(|s| s * (1.0 + 1e-5)));
    assert!(slopes(0, 0, 2).is_empty());
    // Half-lives of MiniMax-01's 64 heads and 80 layers.
    let half_life = |layer: usize, head: usize| std::f64::consts::LN_2 / f64::from(slopes(64, layer, 80)[head - 1]);
    for (layer, head, tokens) in
        [(0, 1, 0.76), (0, 64, 177.0), (40, 1, 1.5), (40, 64, 359.0), (78, 1, 60.0), (78, 64, 14_007.0)]
    {
        assert!((half_life(layer, head) / tokens - 1.0).abs() < 0.03, "layer {layer}, head {head}");
    }
}

/// d = 1, q = k = v = 1, decay 1/2.
fn halving(block: usize) -> Heads {
    Heads { head_dim: 1, slopes: vec![std::f32::consts::LN_2], block }
}

#[test]
fn halving_of_ones() {
    let forest = Forest::from_sequences([&[0u32; 5][..]]);
    let ones = [(); 3].map(|()| Tensor::from_vec(vec![1.0; 5], &[5, 1]));
    let d_out = Tensor::from_vec(vec![1.0, 1.0, 1.0, 1.0, 0.0], &[5, 1]);
    for block in [1, 2, 3, 8] {
        let out = run(&halving(block), &forest, &ones);
        assert_close(out.data(), &[1.0, 1.5, 1.75, 1.875, 1.9375], 1e-6, 0.0);
        let [_, _, dv] = run_back(&halving(block), &forest, &ones, &d_out);
        assert_close(&dv.data()[..1], &[1.875], 1e-6, 0.0);
    }
}

/// Two tokens of prompt, three drafts, one accepted: rejecting is a truncation.
#[test]
fn a_rejected_draft_leaves_no_trace() {
    let shape = halving(8);
    let mut state = State::empty(&shape);
    let mut out = [0.0];
    for _ in 0..5 {
        row(&shape, &[1.0], &[1.0], &[1.0], &mut state, &mut out);
    }
    state.keys.truncate(3);
    state.values.truncate(3);
    let mut after = state.clone();
    row(&shape, &[1.0], &[1.0], &[1.0], &mut after, &mut out);
    assert_close(&out, &[1.875], 1e-6, 0.0);
    state.close(&shape);
    assert_close(&state.kv, &[1.75], 1e-6, 0.0);
}

#[test]
fn a_tree_forks_the_state() {
    // Values are powers of two, so that each output spells what it saw.
    let forest = lettered();
    let values: Vec<f32> = (0..8).map(|i| f32::powi(2.0, i)).collect();
    let ones = Tensor::from_vec(vec![1.0; 8], &[8, 1]);
    let x = [ones.clone(), ones, Tensor::from_vec(values, &[8, 1])];
    let faint = Heads { head_dim: 1, slopes: vec![1e-7], block: 2 };
    let out = run(&faint, &forest, &x);
    let seen = |rows: &[usize]| rows.iter().map(|&r| f32::powi(2.0, r as i32)).sum::<f32>();
    let trajectories = paths(&forest);
    for path in &trajectories {
        for n in 1..=path.len() {
            assert!((out.data()[path[n - 1]] - seen(&path[..n])).abs() < 1e-3);
        }
    }
}

#[test]
fn strong_decay_and_long_sequences_stay_finite() {
    for (slope, block) in [(1e3, 64), (30.0, 1000), (1e-9, 256), (0.5, 1)] {
        let shape = Heads { head_dim: 4, slopes: vec![slope], block };
        let forest = Forest::from_sequences([&vec![0u32; 5000][..]]);
        let x = inputs(&shape, &forest, 1);
        let out = run(&shape, &forest, &x);
        let grads = run_back(&shape, &forest, &x, &random(9, x[0].shape()));
        assert!([&out].into_iter().chain(&grads).all(|x| x.data().iter().all(|x| x.is_finite())));
        if slope >= 1e3 {
            // All is forgotten at once: o = (q·k) v.
            let (q, k, v) = (x[0].row(4999), x[1].row(4999), x[2].row(4999));
            let product: f32 = q.iter().zip(k).map(|(q, k)| q * k).sum();
            let alone: Vec<f32> = v.iter().map(|v| v * product).collect();
            assert_close(out.row(4999), &alone, 1e-5, 1e-6);
        }
    }
}

#[test]
fn a_million_tokens_stay_finite() {
    let shape = Heads { head_dim: 2, slopes: vec![1e-7, 1e3], block: 256 };
    let forest = Forest::from_sequences([&vec![0u32; 1 << 20][..]]);
    let x = inputs(&shape, &forest, 1);
    let out = run(&shape, &forest, &x);
    let grads = run_back(&shape, &forest, &x, &random(9, x[0].shape()));
    assert!([&out].into_iter().chain(&grads).all(|x| x.data().iter().all(|x| x.is_finite())));
}

#[test]
fn an_empty_forest_is_an_empty_result() {
    let shape = heads((2, 4, 8));
    let forest = Forest::from_sequences([]);
    let x = inputs(&shape, &forest, 1);
    assert_eq!(run(&shape, &forest, &x).shape(), [0, 8]);
    assert_eq!(run_back(&shape, &forest, &x, &random(1, &[0, 8]))[1].shape(), [0, 8]);
}
