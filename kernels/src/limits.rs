//! What this machine does at most, measured: for benchmarks to print beside their own figures. Each call is one measurement
//! in seconds; who compares takes the least of several, in turn with what it measures, so that both meet the same machine.

use crate::Dtype;
use crate::matrix::{Matrix, Write, multiply_in};
use crate::simd::{Simd, dispatch};
use rayon::prelude::*;
use std::hint::black_box;
use std::time::Instant;

/// Side of the square matrices of [`Limits::product`].
const SIDE: usize = 1024;
/// Floats of each array that is read or copied: 256 MiB, far past any cache.
const FLOATS: usize = 64 << 20;
/// Floats that a worker takes at a time.
const PART: usize = 1 << 16;
/// Steps of the register loop a worker.
const STEPS: usize = 2 << 20;
/// Sums at once: what hides the latency of a multiply-add on present processors.
const CHAINS: usize = 12;

/// The memory that the measurements need.
pub struct Limits {
    factors: [Vec<f32>; 2],
    result: Vec<f32>,
    from: Vec<f32>,
    to: Vec<f32>,
}

impl Default for Limits {
    fn default() -> Self {
        let factor = |k: usize| (0..SIDE * SIDE).map(|i| ((i * k) % 17) as f32 / 17.0 - 0.5).collect();
        Self {
            factors: [factor(7), factor(11)],
            result: vec![0.0; SIDE * SIDE],
            from: vec![1.0; FLOATS],
            // Not zeros: the system gives those no memory until they are written.
            to: vec![0.5; FLOATS],
        }
    }
}

impl Limits {
    /// Operations of one [`Limits::product`].
    pub const PRODUCT_FLOPS: f64 = 2.0 * (SIDE * SIDE * SIDE) as f64;
    /// Bytes that one [`Limits::copy`] reads and writes.
    pub const COPY_BYTES: f64 = 8.0 * FLOATS as f64;
    /// Bytes that one [`Limits::read`] reads.
    pub const READ_BYTES: f64 = 4.0 * FLOATS as f64;

    /// Seconds of a 1024³ product in `dtype`, by the fastest of the implementations linked in: this crate's, and in f32 `gemm`'s. Call
    /// inside a pool, like the others.
    pub fn product(&mut self, dtype: Dtype) -> f64 {
        let [a, b] = self.factors.each_ref().map(|x| Matrix::new(x, SIDE, SIDE));
        let begun = Instant::now();
        multiply_in(dtype, a, b, Write::Over, black_box(&mut self.result), SIDE);
        let ours = begun.elapsed().as_secs_f64();
        if dtype == Dtype::F32 { ours.min(self.gemm()) } else { ours }
    }

    /// Seconds of the product in f32 by the `gemm` crate.
    fn gemm(&mut self) -> f64 {
        let (stride, threads) = (SIDE as isize, gemm::Parallelism::Rayon(0));
        let out = black_box(&mut self.result).as_mut_ptr();
        let [a, b] = self.factors.each_ref().map(|x| x.as_ptr());
        let begun = Instant::now();
        // SAFETY: all three hold SIDE rows of SIDE, and the output is borrowed mutably.
        unsafe {
            gemm::gemm(
                SIDE, SIDE, SIDE, out, 1, stride, false, a, 1, stride, b, 1, stride, 0.0, 1.0, false, false, false,
                threads,
            );
        }
        begun.elapsed().as_secs_f64()
    }

    /// Seconds to copy an array to another.
    pub fn copy(&mut self) -> f64 {
        let begun = Instant::now();
        self.to.par_chunks_mut(PART).zip(self.from.par_chunks(PART)).for_each(|(to, from)| to.copy_from_slice(from));
        black_box(&mut self.to);
        begun.elapsed().as_secs_f64()
    }

    /// Seconds to read an array.
    pub fn read(&self) -> f64 {
        let begun = Instant::now();
        self.from.par_chunks(PART).for_each(|part| {
            black_box(dispatch!(|s| crate::simd::sum(s, part)));
        });
        begun.elapsed().as_secs_f64()
    }

    /// Operations a second of multiply-adds that touch no memory, over all workers: a slow product cannot lower this limit.
    pub fn multiply_adds(&self) -> f64 {
        let begun = Instant::now();
        let lanes: usize = rayon::broadcast(|_| dispatch!(|s| register_loop(s))).into_iter().sum();
        2.0 * (lanes * CHAINS * STEPS) as f64 / begun.elapsed().as_secs_f64()
    }
}

/// Runs the loop; the lanes of a register.
#[inline(always)]
fn register_loop<S: Simd>(s: S) -> usize {
    let (x, y) = (s.splat_f32s(black_box(0.999)), s.splat_f32s(black_box(0.001)));
    let mut sums = [s.splat_f32s(1.0); CHAINS];
    for _ in 0..STEPS {
        for sum in &mut sums {
            *sum = s.mul_add_f32s(*sum, x, y);
        }
    }
    black_box(sums.into_iter().fold(y, |a, b| s.add_f32s(a, b)));
    S::F32_LANES
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::threads::Pool;

    #[test]
    fn no_limit_is_zero_and_no_product_beats_the_register_loop() {
        let mut limits = Limits { from: vec![1.0; PART], to: vec![0.0; PART], ..Limits::default() };
        let [product, fma] = Pool::new(1).unwrap().run(|| {
            assert!(limits.copy() > 0.0 && limits.read() > 0.0);
            let product = (0..3).map(|_| limits.product(Dtype::F32)).fold(f64::MAX, f64::min);
            [Limits::PRODUCT_FLOPS / product, (0..3).map(|_| limits.multiply_adds()).fold(0.0, f64::max)]
        });
        // A busy machine may slow either: only what no noise explains is asked.
        assert!(product > 1e8 && fma > 0.5 * product, "{product:.2e} of {fma:.2e}");
        assert_eq!(limits.to, limits.from);
    }
}
