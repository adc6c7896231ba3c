use super::*;
use crate::forest::testing::{forests, lettered, merge_sum, random_forest, sees, unmerge, unmerged};
use crate::oracle::{assert_close, assert_slopes, autograd, random};
use crate::threads::Pool;
use candle_core as candle;
use proptest::prelude::*;

/// Query heads, key heads, width.
const SHAPES: [(usize, usize, usize); 7] =
    [(1, 1, 1), (2, 1, 3), (4, 2, 8), (3, 3, 16), (2, 2, 20), (4, 1, 32), (2, 1, 72)];

fn heads((heads, kv_heads, head_dim): (usize, usize, usize)) -> Heads {
    Heads { heads, kv_heads, head_dim, scale: 1.0 / (head_dim as f32).sqrt() }
}

fn inputs(shape: Heads, forest: &Forest, seed: u64) -> [Tensor; 3] {
    let (wide, narrow) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
    [(seed, wide), (seed + 1, narrow), (seed + 2, narrow)].map(|(seed, width)| random(seed, &[forest.rows(), width]))
}

fn run(shape: Heads, forest: &Forest, [q, k, v]: &[Tensor; 3]) -> [Tensor; 2] {
    let [mut out, mut lse] = [(); 2].map(|()| Tensor::default());
    forward(shape, forest, q, k, v, &mut out, &mut lse);
    [out, lse]
}

fn run_back(shape: Heads, forest: &Forest, x: &[Tensor; 3], d_out: &Tensor) -> [Tensor; 3] {
    let [out, lse] = run(shape, forest, x);
    let [mut dq, mut dk, mut dv] = [(); 3].map(|()| Tensor::from_vec(vec![7.0], &[1]));
    backward(shape, forest, &x[0], &x[1], &x[2], &out, &lse, d_out, &mut dq, &mut dk, &mut dv);
    [dq, dk, dv]
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// Dense attention under the forest's mask, in candle.
fn dense(shape: Heads, forest: &Forest, x: &[candle::Tensor]) -> candle::Result<Vec<candle::Tensor>> {
    let n = forest.rows();
    let mask = (0..n * n).map(|ij| if sees(forest, ij / n, ij % n) { 0.0 } else { -1e4 }).collect::<Vec<f64>>();
    let mask = candle::Tensor::from_vec(mask, (n, n), &candle::Device::Cpu)?;
    let d = shape.head_dim;
    let outs = (0..shape.heads).map(|h| {
        let of_group = h / (shape.heads / shape.kv_heads);
        let (q, k, v) = (x[0].narrow(1, h * d, d)?, x[1].narrow(1, of_group * d, d)?, x[2].narrow(1, of_group * d, d)?);
        let scores = ((q.matmul(&k.t()?)? * f64::from(shape.scale))? + &mask)?;
        let p = scores.broadcast_sub(&scores.max_keepdim(1)?.detach())?.exp()?;
        p.broadcast_div(&p.sum_keepdim(1)?)?.matmul(&v)
    });
    Ok(vec![candle::Tensor::cat(&outs.collect::<candle::Result<Vec<_>>>()?, 1)?])
}

#[test]
fn gradients_are_those_of_autograd_and_of_differences() {
    for (seed, shape) in SHAPES.into_iter().map(heads).enumerate() {
        let seed = seed as u64;
        let forest = random_forest(seed);
        let x = inputs(shape, &forest, 10 * seed);
        let d_out = random(99 + seed, x[0].shape());
        let inputs = x.each_ref();
        let truth = autograd(&inputs, &[&d_out], |x| dense(shape, &forest, x));
        let grads = run_back(shape, &forest, &x, &d_out);
        assert_close(run(shape, &forest, &x)[0].data(), &truth.outputs[0], 1e-5, 1e-6);
        for (grad, truth) in grads.iter().zip(&truth.gradients) {
            assert_close(grad.data(), truth, 1e-4, 1e-5);
        }
        assert_slopes(&inputs, &[&d_out], &grads.each_ref(), 1e-2, 2e-3, |x| {
            let [out, _] = run(shape, &forest, &[x[0].clone(), x[1].clone(), x[2].clone()]);
            vec![out]
        });
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn agrees_with_its_plain_twin(forest in forests(), shape in prop::sample::select(&SHAPES[..]), seed in 0u64..1000) {
        let shape = heads(shape);
        let x = inputs(shape, &forest, seed);
        let d_out = random(seed + 3, x[0].shape());
        let (out, lse) = plain::forward(shape, &forest, &x[0], &x[1], &x[2]);
        let [fast, fast_lse] = run(shape, &forest, &x);
        assert_close(fast.data(), out.data(), 1e-5, 1e-6);
        assert_close(fast_lse.data(), lse.data(), 1e-5, 1e-6);
        let truth = plain::backward(shape, &forest, &x[0], &x[1], &x[2], &d_out);
        for (grad, truth) in run_back(shape, &forest, &x, &d_out).iter().zip(&truth) {
            assert_close(grad.data(), truth.data(), 1e-4, 1e-5);
        }
    }

    #[test]
    fn decoding_gives_the_bits_of_forward_however_the_cache_is_cut(
        forest in forests(), shape in prop::sample::select(&SHAPES[..]), seed in 0u64..1000, cuts in prop::collection::vec(0usize..60, 0..4),
    ) {
        let shape = heads(shape);
        let x = inputs(shape, &forest, seed);
        let [out, _] = run(shape, &forest, &x);
        for i in 0..forest.rows() {
            let seen: Vec<usize> = (0..forest.rows()).filter(|&j| sees(&forest, i, j)).collect();
            let cache = |x: &Tensor| seen.iter().flat_map(|&j| x.row(j)).copied().collect::<Vec<f32>>();
            let (keys, values) = (cache(&x[1]), cache(&x[2]));
            let mut ends: Vec<usize> = cuts.iter().map(|&c| c.min(seen.len()) * x[1].cols()).chain([keys.len()]).collect();
            ends.sort_unstable();
            let starts = [0].into_iter().chain(ends.iter().copied());
            let runs: Vec<Run> = starts.zip(&ends).map(|(from, &to)| (&keys[from..to], &values[from..to])).collect();
            let mut one = vec![f32::NAN; x[0].cols()];
            row(shape, x[0].row(i), &runs, &mut one);
            prop_assert_eq!(bits(&one), bits(out.row(i)));
        }
    }

    /// Prefix-tree merging changes the cost and nothing else.
    #[test]
    fn a_tree_is_its_trajectories(forest in forests(), shape in prop::sample::select(&SHAPES[..]), seed in 0u64..1000) {
        let shape = heads(shape);
        let x = inputs(shape, &forest, seed);
        let flat = unmerged(&forest);
        let flat_x = x.each_ref().map(|x| unmerge(&forest, x));
        // Runs cut differently, one order of keys: equal to the last bit.
        for (merged, apart) in run(shape, &forest, &x).iter().zip(run(shape, &flat, &flat_x)) {
            prop_assert_eq!(bits(unmerge(&forest, merged).data()), bits(apart.data()));
        }
        let flat_d_out = random(seed + 3, flat_x[0].shape());
        let d_out = merge_sum(&forest, &flat_d_out);
        let apart = run_back(shape, &flat, &flat_x, &flat_d_out);
        for (merged, apart) in run_back(shape, &forest, &x, &d_out).iter().zip(&apart) {
            assert_close(merged.data(), merge_sum(&forest, apart).data(), 1e-5, 1e-5);
        }
    }
}

#[test]
fn bits_depend_neither_on_threads_nor_on_company() {
    let shape = heads((4, 2, 8));
    let sequence = vec![1u32; 600]; // long enough that heads are computed apart
    let short = [1u32; 37];
    let company = vec![&short[..]; 10];
    let forest = Forest::from_sequences([&short[..], &sequence].into_iter().chain(company));
    let x = inputs(shape, &forest, 5);
    let d_out = random(8, x[0].shape());
    let all = |threads| {
        Pool::new(threads).expect("threads").run(|| {
            let [out, lse] = run(shape, &forest, &x);
            let [dq, dk, dv] = run_back(shape, &forest, &x, &d_out);
            [out, lse, dq, dk, dv].map(|x| bits(x.data()))
        })
    };
    let one = all(1);
    assert_eq!(all(2), one);
    assert_eq!(all(3), one);

    let alone = Forest::from_sequences([&sequence[..]]);
    let part = |x: &Tensor| Tensor::from_vec(x.data()[37 * x.cols()..637 * x.cols()].to_vec(), &[600, x.cols()]);
    let (x, d_out) = (x.each_ref().map(part), part(&d_out));
    let [out, lse] = run(shape, &alone, &x);
    let [dq, dk, dv] = run_back(shape, &alone, &x, &d_out);
    for (whole, alone) in one.iter().zip([out, lse, dq, dk, dv]) {
        let cols = alone.cols();
        assert_eq!(whole[37 * cols..637 * cols], bits(alone.data()));
    }
}

#[test]
fn bits_are_those_of_no_vector_instructions() {
    let shape = heads((4, 2, 20));
    let forest = random_forest(3);
    let x = inputs(shape, &forest, 1);
    let [out, _] = run(shape, &forest, &x);
    let mut plain = Tensor::zeros(out.shape());
    for tree in forest.trees() {
        for head in 0..2 {
            let [q, k, v] = x.each_ref().map(|x| Columns::part(x, head, 2).starting_at(tree.rows.start));
            let mut lse = Tensor::zeros(&[tree.rows.len(), 2]);
            let mut lse = ColumnsMut::new(lse.data_mut(), 2, 0, 2);
            let mut out = ColumnsMut::new(&mut plain.data_mut()[tree.rows.start * 80..], 80, head * 40, 40);
            let (packed, room) = room(&forest, &tree, 20);
            let (mut keys, mut memory) = (vec![f32::NAN; packed], vec![f32::NAN; BLOCK * (20 + room)]);
            let s = pulp::Scalar::new();
            forward_head(s, &shape, &forest, &tree, q, k, v, &mut keys, &mut memory, room, &mut out, &mut lse);
        }
    }
    assert_eq!(bits(out.data()), bits(plain.data()));
}

#[test]
fn a_first_row_sees_itself_alone() {
    let forest = lettered();
    let shape = heads((2, 1, 3));
    let x = inputs(shape, &forest, 1);
    let [out, lse] = run(shape, &forest, &x);
    assert_eq!(out.row(0), [x[2].row(0), x[2].row(0)].concat());
    for h in 0..2 {
        let score: f32 = x[0].row(0)[3 * h..3 * h + 3].iter().zip(x[1].row(0)).map(|(q, k)| q * k).sum();
        assert!((lse.row(0)[h] - score * shape.scale).abs() < 1e-6);
    }
}

#[test]
fn scores_of_any_size_stay_finite() {
    let forest = Forest::from_sequences([&[0u32; 40][..]]);
    let shape = heads((1, 1, 4));
    let mut x = inputs(shape, &forest, 1);
    x[0].data_mut().iter_mut().for_each(|q| *q *= 1e4);
    x[1].data_mut().iter_mut().for_each(|k| *k *= 1e4);
    let [out, lse] = run(shape, &forest, &x);
    let grads = run_back(shape, &forest, &x, &random(4, x[0].shape()));
    assert!([&out, &lse].into_iter().chain(&grads).all(|x| x.data().iter().all(|x| x.is_finite())));
}

#[test]
fn an_empty_forest_is_an_empty_result() {
    let shape = heads((2, 1, 4));
    let forest = Forest::from_sequences([]);
    let x = inputs(shape, &forest, 1);
    assert_eq!(run(shape, &forest, &x)[0].shape(), [0, 8]);
    assert_eq!(run_back(shape, &forest, &x, &random(1, &[0, 8]))[1].shape(), [0, 4]);
}
