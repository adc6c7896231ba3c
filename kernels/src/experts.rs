//! Grouped SwiGLU experts: y = Σ_e weight_e · w2_e(silu(w1_e x) ⊙ w3_e x). Rows are grouped by expert once, and read where they
//! lie; an expert without rows costs nothing and gets no gradient.

use crate::{
    Tensor,
    blocks::{Rows, for_rows},
    matrix::{Matrix, Write, multiply_here},
    pointwise::{silu_and_slope, swiglu_slice, zip},
    router::Routes,
    scratch,
    simd::{Simd, axpy, dispatch, dot},
};
use std::ops::Range;
use std::sync::Mutex;

/// Grouped rows that one task takes: few enough to balance threads, enough to pay for laying out the weights.
const CHUNK: usize = 512;

/// Weights `[E, H, I]`, `[E, H, I]`, `[E, I, H]`: gate (w1), up (w3), down (w2).
#[derive(Clone, Copy)]
pub struct Experts<'a> {
    /// Gate projection.
    pub w1: &'a Tensor,
    /// Up projection.
    pub w3: &'a Tensor,
    /// Down projection.
    pub w2: &'a Tensor,
}

/// Gradients of the same shapes, added to.
pub struct ExpertGrads<'a> {
    /// Of the gate projection.
    pub w1: &'a mut Tensor,
    /// Of the up projection.
    pub w3: &'a mut Tensor,
    /// Of the down projection.
    pub w2: &'a mut Tensor,
}

/// Rows sorted by expert and what backward needs of forward. Reused from step to step.
#[derive(Clone, Debug, Default)]
pub struct Grouped {
    /// Source row of each grouped row, `[T·k]`, by expert, then by row.
    pub rows: Vec<u32>,
    /// Slot in `[T, k]` of each grouped row.
    pub slots: Vec<u32>,
    /// Where each expert's rows begin, `[E + 1]`.
    pub starts: Vec<usize>,
    /// Grouped row of each slot, `[T, k]`: the inverse of `slots`.
    pub places: Vec<u32>,
    /// w1 x, `[T·k, I]`.
    pub gate: Tensor,
    /// w3 x, `[T·k, I]`.
    pub up: Tensor,
}

impl Grouped {
    /// Counting sort of the slots by expert.
    fn sort(&mut self, routes: &Routes, experts: usize) {
        let n = routes.experts.len();
        self.starts.clear();
        self.starts.resize(experts + 1, 0);
        for &e in &routes.experts {
            self.starts[e as usize + 1] += 1;
        }
        for e in 0..experts {
            self.starts[e + 1] += self.starts[e];
        }
        self.rows.resize(n, 0);
        self.slots.resize(n, 0);
        self.places.resize(n, 0);
        for (slot, &e) in routes.experts.iter().enumerate() {
            // starts[e] runs ahead as e's rows are placed, and is set back below.
            let place = self.starts[e as usize];
            self.starts[e as usize] += 1;
            self.rows[place] = (slot / routes.k) as u32;
            self.slots[place] = slot as u32;
            self.places[slot] = place as u32;
        }
        self.starts.rotate_right(1);
        self.starts[0] = 0;
    }

    /// The grouped rows in runs of one expert, about evenly cut and none longer than [`CHUNK`]: (expert, grouped rows).
    fn chunks(&self) -> impl Iterator<Item = (usize, Range<usize>)> {
        self.starts.windows(2).enumerate().flat_map(|(e, w)| {
            let (start, rows) = (w[0], w[1] - w[0]);
            let count = rows.div_ceil(CHUNK);
            (0..count).map(move |i| (e, start + rows * i / count..start + rows * (i + 1) / count))
        })
    }
}

/// `out[T, H]` from `x[T, H]`. A row's sum runs over its experts in the order of its route.
pub fn forward(experts: Experts, x: &Tensor, routes: &Routes, grouped: &mut Grouped, out: &mut Tensor) {
    let (rows, width, inner, k) = (x.rows(), x.cols(), experts.w1.cols(), routes.k);
    assert_eq!(routes.experts.len(), rows * k, "a route a row");
    let (count, total) = (experts.w1.shape()[0], rows * k);
    grouped.sort(routes, count);
    for tensor in [&mut grouped.gate, &mut grouped.up] {
        tensor.resize(&[total, inner]);
    }
    out.resize(&[rows, width]);
    let mut gate_and_up = [std::mem::take(&mut grouped.gate), std::mem::take(&mut grouped.up)];
    let dtype = experts.w1.dtype();
    scratch::with(total * width, |down| {
        let [gate, up] = gate_and_up.each_mut().map(|t| Rows { data: t.data_mut(), cols: inner });
        let mut parts = (gate, up, Rows { data: &mut *down, cols: width });
        let mut jobs = Vec::new();
        for (e, places) in grouped.chunks() {
            let n = places.len();
            jobs.push((e, places, [parts.0.take(n), parts.1.take(n)], parts.2.take(n)));
        }
        each(jobs, |(e, places, [gate, up], down)| {
            let n = places.len();
            let x = matrix(x).picking(&grouped.rows[places]);
            multiply_here(dtype, x, weights_of(experts.w1, e), Write::Over, gate, inner);
            multiply_here(dtype, x, weights_of(experts.w3, e), Write::Over, up, inner);
            scratch::with(n * inner, |product| {
                swiglu_slice(gate, up, product);
                let product = Matrix::new(product, n, inner);
                multiply_here(dtype, product, weights_of(experts.w2, e), Write::Over, down, width);
            });
        });
        for_rows(rows, k * width, Rows { data: out.data_mut(), cols: width }, |first, out| {
            dispatch!(|s| for (i, out) in out.data.chunks_exact_mut(width).enumerate() {
                out.fill(0.0);
                for slot in (first + i) * k..(first + i + 1) * k {
                    let place = grouped.places[slot] as usize;
                    axpy(s, routes.weights[slot], &down[place * width..(place + 1) * width], out);
                }
            });
        });
    });
    [grouped.gate, grouped.up] = gate_and_up;
}

/// `dx[T, H]` and `d_weights[T, k]` overwritten, weight gradients added to, from the input `x` of [`forward`] and what it left in
/// `grouped`.
pub fn backward(
    experts: Experts,
    x: &Tensor,
    routes: &Routes,
    grouped: &Grouped,
    d_out: &Tensor,
    dx: &mut Tensor,
    d_weights: &mut Vec<f32>,
    grads: ExpertGrads,
) {
    let (rows, width, inner, k) = (d_out.rows(), d_out.cols(), experts.w1.cols(), routes.k);
    let total = rows * k;
    assert_eq!(grouped.rows.len(), total, "the groups are of this batch");
    d_weights.resize(total, 0.0);
    dx.resize(&[rows, width]);
    let (forward, backward) = (experts.w1.dtype(), grads.w1.dtype());
    scratch::with(total * (width + 3 * inner + 1), |memory| {
        let (d_x, memory) = memory.split_at_mut(total * width); // of the grouped rows
        let (d_gate, memory) = memory.split_at_mut(total * inner);
        let (d_up, memory) = memory.split_at_mut(total * inner);
        let (product, d_weight) = memory.split_at_mut(total * inner); // the product times its row's weight
        {
            let parts = [(&mut *d_x, width), (&mut *d_gate, inner), (&mut *d_up, inner), (&mut *product, inner)];
            let mut parts = parts.map(|(data, cols)| Rows { data, cols });
            let mut of_weights = Rows { data: &mut *d_weight, cols: 1 };
            let mut jobs = Vec::new();
            for (e, places) in grouped.chunks() {
                let n = places.len();
                jobs.push((e, places, parts.each_mut().map(|p| p.take(n)), of_weights.take(n)));
            }
            each(jobs, |(e, places, [d_x, d_gate, d_up, product], d_weight)| {
                let n = places.len();
                // The gradient of the product before it is weighed stands where the product's will.
                let d_out = matrix(d_out).picking(&grouped.rows[places.clone()]);
                multiply_here(forward, d_out, matrix_of(experts.w2, e).transposed(), Write::Over, product, inner);
                through_product(&routes.weights, grouped, places, inner, d_gate, d_up, product, d_weight);
                let (d_gate, d_up) = (Matrix::new(d_gate, n, inner), Matrix::new(d_up, n, inner));
                multiply_here(forward, d_gate, matrix_of(experts.w1, e).transposed(), Write::Over, d_x, width);
                multiply_here(forward, d_up, matrix_of(experts.w3, e).transposed(), Write::Add, d_x, width);
            });
        }
        let mut jobs = Vec::new();
        let mut grads = [grads.w1, grads.w3, grads.w2].map(|t| Rows { data: t.data_mut(), cols: width * inner });
        for w in grouped.starts.windows(2) {
            let grads = grads.each_mut().map(|g| g.take(1));
            if w[0] < w[1] {
                for (which, grad) in grads.into_iter().enumerate() {
                    jobs.push((w[0]..w[1], which, grad));
                }
            }
        }
        each(jobs, |(places, which, grad)| {
            let n = places.len();
            let d = [&*d_gate, &*d_up, &*product][which];
            let d = Matrix::new(&d[places.start * inner..places.end * inner], n, inner);
            let picked = &grouped.rows[places];
            if which < 2 {
                multiply_here(backward, matrix(x).picking(picked).transposed(), d, Write::Add, grad, inner);
            } else {
                multiply_here(backward, d.transposed(), matrix(d_out).picking(picked), Write::Add, grad, width);
            }
        });
        for (d, &place) in d_weights.iter_mut().zip(&grouped.places) {
            *d = d_weight[place as usize];
        }
        for_rows(rows, k * width, Rows { data: dx.data_mut(), cols: width }, |first, dx| {
            dispatch!(|s| for (i, dx) in dx.data.chunks_exact_mut(width).enumerate() {
                dx.fill(0.0);
                for slot in (first + i) * k..(first + i + 1) * k {
                    let place = grouped.places[slot] as usize;
                    axpy(s, 1.0, &d_x[place * width..(place + 1) * width], dx);
                }
            });
        });
    });
}

/// Through SwiGLU's product and the route's weight, for grouped rows `places`. `product` holds the gradient of the unweighed product and
/// gets the weighed product; the others are overwritten.
fn through_product(
    weights: &[f32],
    grouped: &Grouped,
    places: Range<usize>,
    inner: usize,
    d_gate: &mut [f32],
    d_up: &mut [f32],
    product: &mut [f32],
    d_weight: &mut [f32],
) {
    scratch::with(inner, |plain| {
        dispatch!(|s| for (i, place) in places.enumerate() {
            let here = i * inner..(i + 1) * inner;
            let (gate, up) = (grouped.gate.row(place), grouped.up.row(place));
            let weight = s.splat_f32s(weights[grouped.slots[place] as usize]);
            let (d_gate, d_up, product) = (&mut d_gate[here.clone()], &mut d_up[here.clone()], &mut product[here]);
            zip(
                s,
                [gate, up, &*product],
                [d_gate, d_up, &mut *plain],
                #[inline(always)]
                |[gate, up, d]| {
                    let (silu, slope) = silu_and_slope(s, gate);
                    let d_weighed = s.mul_f32s(weight, d);
                    let d_gate = s.mul_f32s(s.mul_f32s(d_weighed, up), slope);
                    [d_gate, s.mul_f32s(d_weighed, silu), s.mul_f32s(silu, up)]
                },
            );
            d_weight[i] = dot(s, product, plain);
            zip(
                s,
                [&*plain],
                [product],
                #[inline(always)]
                |[x]| [s.mul_f32s(weight, x)],
            );
        });
    });
}

/// Tasks share nothing that is written, so they may run in any order; they are taken in theirs, so that threads work on one
/// expert's weights at a time.
fn each<J: Send>(jobs: Vec<J>, work: impl Fn(J) + Sync + Send) {
    let threads = rayon::current_num_threads().min(jobs.len());
    if threads <= 1 {
        return jobs.into_iter().for_each(work);
    }
    let queue = Mutex::new(jobs.into_iter());
    let next = || queue.lock().expect("no task panics with the queue in hand").next();
    rayon::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|_| {
                while let Some(job) = next() {
                    work(job)
                }
            });
        }
    });
}

fn matrix(t: &Tensor) -> Matrix<'_> {
    Matrix::new(t.data(), t.rows(), t.cols())
}

/// One expert's matrix of a stack `[E, in, out]`.
fn matrix_of(t: &Tensor, expert: usize) -> Matrix<'_> {
    let (rows, cols) = (t.shape()[1], t.shape()[2]);
    Matrix::new(&t.data()[expert * rows * cols..(expert + 1) * rows * cols], rows, cols)
}

/// The same, with its rounded pairs where it has them.
fn weights_of(t: &Tensor, expert: usize) -> Matrix<'_> {
    matrix_of(t, expert).with_pairs(t.pairs_of(expert))
}

/// The same, a row and an expert at a time.
#[cfg(test)]
pub(crate) mod plain {
    use super::{ExpertGrads, Experts};
    use crate::{
        Tensor,
        pointwise::plain::{silu, silu_slope},
        router::Routes,
    };

    /// x · w for one row and one expert's matrix.
    fn project(x: &[f32], w: &Tensor, expert: usize) -> Vec<f32> {
        let (rows, cols) = (w.shape()[1], w.shape()[2]);
        (0..cols).map(|o| (0..rows).map(|i| x[i] * w.data()[(expert * rows + i) * cols + o]).sum()).collect()
    }

    /// d · wᵀ for one row, and dw += xᵀ · d.
    fn project_backward(x: &[f32], w: &Tensor, expert: usize, d: &[f32], dw: &mut Tensor) -> Vec<f32> {
        let (rows, cols) = (w.shape()[1], w.shape()[2]);
        let mut dx = vec![0.0; rows];
        for i in 0..rows {
            for o in 0..cols {
                let at = (expert * rows + i) * cols + o;
                dx[i] += d[o] * w.data()[at];
                dw.data_mut()[at] += x[i] * d[o];
            }
        }
        dx
    }

    pub(crate) fn forward(experts: Experts, x: &Tensor, routes: &Routes, out: &mut Tensor) {
        out.resize(x.shape());
        out.fill(0.0);
        for slot in 0..routes.experts.len() {
            let (t, e) = (slot / routes.k, routes.experts[slot] as usize);
            let (gate, up) = (project(x.row(t), experts.w1, e), project(x.row(t), experts.w3, e));
            let product: Vec<f32> = gate.iter().zip(&up).map(|(g, u)| silu(*g) * u).collect();
            for (o, y) in out.row_mut(t).iter_mut().zip(project(&product, experts.w2, e)) {
                *o += routes.weights[slot] * y;
            }
        }
    }

    pub(crate) fn backward(
        experts: Experts,
        x: &Tensor,
        routes: &Routes,
        d_out: &Tensor,
        dx: &mut Tensor,
        d_weights: &mut Vec<f32>,
        grads: ExpertGrads,
    ) {
        dx.resize(x.shape());
        dx.fill(0.0);
        d_weights.clear();
        for slot in 0..routes.experts.len() {
            let (t, e) = (slot / routes.k, routes.experts[slot] as usize);
            let (gate, up) = (project(x.row(t), experts.w1, e), project(x.row(t), experts.w3, e));
            let product: Vec<f32> = gate.iter().zip(&up).map(|(g, u)| silu(*g) * u).collect();
            let down = project(&product, experts.w2, e);
            d_weights.push(down.iter().zip(d_out.row(t)).map(|(y, g)| y * g).sum());
            let d_down: Vec<f32> = d_out.row(t).iter().map(|g| g * routes.weights[slot]).collect();
            let d_product = project_backward(&product, experts.w2, e, &d_down, grads.w2);
            let d_gate: Vec<f32> = (0..gate.len()).map(|i| d_product[i] * up[i] * silu_slope(gate[i])).collect();
            let d_up: Vec<f32> = d_product.iter().zip(&gate).map(|(d, g)| d * silu(*g)).collect();
            let from_gate = project_backward(x.row(t), experts.w1, e, &d_gate, grads.w1);
            let from_up = project_backward(x.row(t), experts.w3, e, &d_up, grads.w3);
            for (d, (a, b)) in dx.row_mut(t).iter_mut().zip(from_gate.iter().zip(from_up)) {
                *d += a + b;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        oracle::{self, assert_close, random},
        threads::Pool,
    };
    use candle_core as candle;
    use proptest::prelude::*;

    struct Case {
        x: Tensor,
        w1: Tensor,
        w3: Tensor,
        w2: Tensor,
        routes: Routes,
        d_out: Tensor,
    }

    impl Case {
        /// `rows` of `width` through `count` experts; expert 1 (where there are enough) gets no rows.
        fn new(rows: usize, width: usize, inner: usize, count: usize, k: usize) -> Self {
            let lonely = usize::from(count > k && count > 1);
            let open: Vec<u32> = (0..count as u32).filter(|&e| lonely == 0 || e != 1).collect();
            let picks = random(9, &[rows]);
            let expert = |i: usize| {
                let start = ((picks.data()[i / k] + 1.0) * 50.0) as usize;
                open[(start + i % k) % open.len()]
            };
            let routes = Routes {
                experts: (0..rows * k).map(expert).collect(),
                weights: random(8, &[rows * k]).data().to_vec(),
                scores: Tensor::default(),
                k,
            };
            Self {
                x: random(1, &[rows, width]),
                w1: random(2, &[count, width, inner]),
                w3: random(3, &[count, width, inner]),
                w2: random(4, &[count, inner, width]),
                routes,
                d_out: random(5, &[rows, width]),
            }
        }

        fn experts(&self) -> Experts<'_> {
            Experts { w1: &self.w1, w3: &self.w3, w2: &self.w2 }
        }

        /// out, dx, d_weights, dw1, dw3, dw2; everything that is overwritten starts as NaN.
        fn run(&self) -> [Tensor; 6] {
            let nan = |n| Tensor::from_vec(vec![f32::NAN; n], &[n]);
            let mut grouped = Grouped { gate: nan(5000), up: nan(7), ..Grouped::default() };
            let (mut out, mut dx, mut d_weights) = (nan(4), nan(4), vec![f32::NAN; 3]);
            scratch::with(4096, |s| s.fill(f32::NAN));
            let [mut w1, mut w3, mut w2] = [&self.w1, &self.w3, &self.w2].map(|w| Tensor::zeros(w.shape()));
            forward(self.experts(), &self.x, &self.routes, &mut grouped, &mut out);
            let grads = ExpertGrads { w1: &mut w1, w3: &mut w3, w2: &mut w2 };
            backward(self.experts(), &self.x, &self.routes, &grouped, &self.d_out, &mut dx, &mut d_weights, grads);
            let count = d_weights.len();
            [out, dx, Tensor::from_vec(d_weights, &[count]), w1, w3, w2]
        }

        fn run_plain(&self) -> [Tensor; 6] {
            let (mut out, mut dx, mut d_weights) = (Tensor::default(), Tensor::default(), vec![]);
            let [mut w1, mut w3, mut w2] = [&self.w1, &self.w3, &self.w2].map(|w| Tensor::zeros(w.shape()));
            plain::forward(self.experts(), &self.x, &self.routes, &mut out);
            let grads = ExpertGrads { w1: &mut w1, w3: &mut w3, w2: &mut w2 };
            plain::backward(self.experts(), &self.x, &self.routes, &self.d_out, &mut dx, &mut d_weights, grads);
            let count = d_weights.len();
            [out, dx, Tensor::from_vec(d_weights, &[count]), w1, w3, w2]
        }

        /// The first `rows` rows of the batch.
        fn head(&self, rows: usize) -> Self {
            let cut = |t: &Tensor| Tensor::from_vec(t.data()[..rows * t.cols()].to_vec(), &[rows, t.cols()]);
            let n = rows * self.routes.k;
            let routes = Routes {
                experts: self.routes.experts[..n].to_vec(),
                weights: self.routes.weights[..n].to_vec(),
                ..self.routes.clone()
            };
            let [w1, w3, w2] = [&self.w1, &self.w3, &self.w2].map(Tensor::clone);
            Self { x: cut(&self.x), w1, w3, w2, routes, d_out: cut(&self.d_out) }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn equals_its_twin(rows in 0usize..30, width in 1usize..20, inner in 1usize..20, count in 1usize..6, k in 1usize..6) {
            let case = Case::new(rows, width, inner, count, k.min(count));
            for (fast, slow) in case.run().iter().zip(case.run_plain()) {
                assert_close(fast.data(), slow.data(), 1e-4, 1e-4);
            }
        }
    }

    #[test]
    fn gradients_agree_with_the_oracles() {
        for (rows, width, inner, count, k) in [(1, 4, 3, 2, 1), (7, 6, 5, 4, 2), (5, 3, 4, 3, 3), (4, 5, 3, 1, 1)] {
            let case = Case::new(rows, width, inner, count, k);
            let [out, dx, d_weights, w1, w3, w2] = case.run();
            let weights = Tensor::from_vec(case.routes.weights.clone(), &[rows * k]);
            let inputs = [&case.x, &weights, &case.w1, &case.w3, &case.w2];
            // Every expert over all rows, masked by the weights: the dense form of the definition.
            let found = oracle::autograd(&inputs, &[&case.d_out], |v| {
                let mut sum: Option<candle::Tensor> = None;
                for e in 0..count {
                    let gate = v[0].matmul(&v[2].get(e)?)?;
                    let silu = (&gate / (gate.neg()?.exp()? + 1.0)?)?;
                    let y = (silu * v[0].matmul(&v[3].get(e)?)?)?.matmul(&v[4].get(e)?)?;
                    let mine: Vec<f64> =
                        case.routes.experts.iter().map(|&x| f64::from(u8::from(x as usize == e))).collect();
                    let mine = candle::Tensor::from_vec(mine, rows * k, v[0].device())?;
                    let weight = (&v[1] * mine)?.reshape((rows, k))?.sum_keepdim(1)?;
                    let y = y.broadcast_mul(&weight)?;
                    sum = Some(match sum {
                        Some(s) => (s + y)?,
                        None => y,
                    });
                }
                Ok(vec![sum.expect("an expert")])
            });
            assert_close(out.data(), &found.outputs[0], 1e-5, 1e-5);
            for (i, g) in [&dx, &d_weights, &w1, &w3, &w2].into_iter().enumerate() {
                assert_close(g.data(), &found.gradients[i], 1e-5, 1e-5);
            }
            if count > k {
                let size = width * inner;
                assert!(w1.data()[size..2 * size].iter().all(|&g| g == 0.0), "an expert without rows gets no gradient");
            }
            oracle::assert_slopes(&inputs, &[&case.d_out], &[&dx, &d_weights, &w1, &w3, &w2], 3e-3, 5e-3, |v| {
                let routes = Routes { weights: v[1].data().to_vec(), ..case.routes.clone() };
                let experts = Experts { w1: &v[2], w3: &v[3], w2: &v[4] };
                let mut out = Tensor::default();
                forward(experts, &v[0], &routes, &mut Grouped::default(), &mut out);
                vec![out]
            });
        }
    }

    #[test]
    fn bits_depend_neither_on_threads_nor_on_company() {
        let case = Case::new(64, 48, 40, 4, 2);
        let run = |threads, case: &Case| Pool::new(threads).expect("threads").run(|| case.run());
        let whole = run(1, &case);
        assert_eq!(whole, run(3, &case));
        for rows in [1, 2, 3, 17, 64] {
            let part = run(1, &case.head(rows));
            assert_eq!(part[0].data(), &whole[0].data()[..rows * 48], "{rows} rows");
        }
    }

    #[test]
    fn a_second_batch_finds_nothing_of_the_first() {
        let (first, second) = (Case::new(30, 7, 5, 4, 2), Case::new(3, 7, 5, 4, 2));
        let mut grouped = Grouped::default();
        let (mut out, mut fresh) = (Tensor::default(), Tensor::default());
        forward(first.experts(), &first.x, &first.routes, &mut grouped, &mut out);
        forward(second.experts(), &second.x, &second.routes, &mut grouped, &mut out);
        forward(second.experts(), &second.x, &second.routes, &mut Grouped::default(), &mut fresh);
        assert_eq!(out, fresh);
    }
}
