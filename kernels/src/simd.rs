//! Vector arithmetic with the instruction set chosen at run time (AVX-512, AVX2, NEON, or none of them). Not for
//! operations: this file knows slices of numbers and nothing else.
//!
//! A kernel is a function generic over [`Simd`], entered through [`dispatch!`], marked `#[inline(always)]` together with
//! everything it calls, so that it is compiled once for each instruction set:
//!
//! ```ignore
//! fn norm(x: &[f32]) -> f32 {
//!     dispatch!(|s| dot(s, x, x)).sqrt()
//! }
//! ```
//!
//! Enter once around a whole loop, not once an element. Sums run in [`LANES`] lanes whatever the width of the
//! registers (element i goes to lane i mod [`LANES`], by fused multiply-add where there is a product), and the lanes are
//! added by halves; so the bits of a result are the same on every instruction set, and a twin in plain Rust can be exact.

pub use pulp::Simd;

/// Lanes of a sum, on every instruction set: one AVX-512 register, two of AVX2, four of NEON.
pub const LANES: usize = 16;

/// The instruction set that the vector kernels run with here: chosen at run time, among those they were compiled for.
pub fn instruction_set() -> &'static str {
    #[cfg(target_arch = "x86_64")]
    match pulp::Arch::new() {
        pulp::Arch::V4(_) => return "AVX-512",
        pulp::Arch::V3(_) => return "AVX2 with FMA",
        _ => {}
    }
    #[cfg(target_arch = "aarch64")]
    if let pulp::Arch::Neon(_) = pulp::Arch::new() {
        return "NEON";
    }
    "none"
}

/// Runs an expression compiled for the best instruction set of this machine: `dispatch!(|s| dot(s, x, y))`. What the
/// expression calls must be `#[inline(always)]`, or it is compiled for the oldest processor of the platform.
#[cfg(target_arch = "x86_64")]
macro_rules! dispatch {
    (|$s:ident| $work:expr) => {
        match pulp::Arch::new() {
            pulp::Arch::V4($s) => $crate::simd::vectorized!($s, $work),
            pulp::Arch::V3($s) => $crate::simd::vectorized!($s, $work),
            _ => {
                let $s = pulp::Scalar::new();
                $work
            }
        }
    };
}

/// Runs an expression compiled for the best instruction set of this machine.
#[cfg(target_arch = "aarch64")]
macro_rules! dispatch {
    (|$s:ident| $work:expr) => {
        match pulp::Arch::new() {
            pulp::Arch::Neon($s) => $crate::simd::vectorized!($s, $work),
            _ => {
                let $s = pulp::Scalar::new();
                $work
            }
        }
    };
}

/// Runs an expression; this platform has no vector instructions that are known here.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
macro_rules! dispatch {
    (|$s:ident| $work:expr) => {{
        let $s = pulp::Scalar::new();
        $work
    }};
}

/// Runs an expression compiled for the instruction set of `$s`; see [`dispatch!`].
macro_rules! vectorized {
    ($s:ident, $work:expr) => {{
        let once = $crate::simd::Once;
        pulp::Simd::vectorize(
            $s,
            #[inline(always)]
            || {
                let _once = once;
                $work
            },
        )
    }};
}

pub(crate) use {dispatch, vectorized};

/// What a closure consumes to be callable only once. A closure that merely borrows would be called through a shim that the
/// compiler may leave outside the vectorised function, and with it all its instructions.
pub(crate) struct Once;

/// Sixteen running sums, in as many registers as they need.
#[derive(Clone, Copy)]
struct Lanes<S: Simd>([S::f32s; LANES]); // only the first LANES / S::F32_LANES are used; the rest costs nothing

impl<S: Simd> Lanes<S> {
    #[inline(always)]
    fn fill(s: S, value: f32) -> Self {
        Self([s.splat_f32s(value); LANES])
    }

    /// Merges up to [`LANES`] elements of `x` and `y` lane by lane; missing ones count as 0.
    #[inline(always)]
    fn merge(&mut self, s: S, x: &[f32], y: &[f32], f: impl Fn(S::f32s, S::f32s, S::f32s) -> S::f32s) {
        let n = S::F32_LANES;
        for (i, lane) in self.0.iter_mut().enumerate().take(LANES / n) {
            let (from, to) = ((i * n).min(x.len()), ((i + 1) * n).min(x.len()));
            *lane = f(s.partial_load_f32s(&x[from..to]), s.partial_load_f32s(&y[from..to]), *lane);
        }
    }

    /// Halves the lanes until one is left: lane i takes lane i + half.
    #[inline(always)]
    fn fold(mut self, f: impl Fn(S::f32s, S::f32s) -> S::f32s) -> S::f32s {
        let mut half = LANES / S::F32_LANES / 2;
        while half > 0 {
            for i in 0..half {
                self.0[i] = f(self.0[i], self.0[i + half]);
            }
            half /= 2;
        }
        self.0[0]
    }
}

/// Σ x·y over the common length.
#[inline(always)]
pub fn dot<S: Simd>(s: S, x: &[f32], y: &[f32]) -> f32 {
    let n = x.len().min(y.len());
    let ((xs, x), (ys, y)) = (x[..n].as_chunks::<LANES>(), y[..n].as_chunks::<LANES>());
    let mut lanes = Lanes::fill(s, 0.0);
    let step = |a, b, c| s.mul_add_f32s(a, b, c);
    for (x, y) in xs.iter().zip(ys) {
        lanes.merge(s, x, y, step);
    }
    if !x.is_empty() {
        lanes.merge(s, x, y, step);
    }
    s.reduce_sum_f32s(lanes.fold(|a, b| s.add_f32s(a, b)))
}

/// Σ x.
#[inline(always)]
pub fn sum<S: Simd>(s: S, x: &[f32]) -> f32 {
    let (xs, x) = x.as_chunks::<LANES>();
    let mut lanes = Lanes::fill(s, 0.0);
    let step = |a, _, c| s.add_f32s(a, c);
    for x in xs {
        lanes.merge(s, x, x, step);
    }
    if !x.is_empty() {
        lanes.merge(s, x, x, step);
    }
    s.reduce_sum_f32s(lanes.fold(|a, b| s.add_f32s(a, b)))
}

/// The greatest of `x`, −∞ where it is empty. NaN among others may be passed over.
#[inline(always)]
pub fn max<S: Simd>(s: S, x: &[f32]) -> f32 {
    let (xs, x) = x.as_chunks::<LANES>();
    let mut lanes = Lanes::fill(s, f32::NEG_INFINITY);
    for x in xs {
        lanes.merge(s, x, x, |a, _, c| s.max_f32s(a, c));
    }
    let most = s.reduce_max_f32s(lanes.fold(|a, b| s.max_f32s(a, b)));
    x.iter().fold(most, |most, &x| if x > most { x } else { most })
}

/// `y += a · x`, by fused multiply-add.
#[inline(always)]
pub fn axpy<S: Simd>(s: S, a: f32, x: &[f32], y: &mut [f32]) {
    let a = s.splat_f32s(a);
    update(s, x, y, |x, y| s.mul_add_f32s(a, x, y));
}

/// `x = f(x)`, element by element.
#[inline(always)]
pub fn map<S: Simd>(s: S, x: &mut [f32], f: impl Fn(S::f32s) -> S::f32s) {
    let (head, tail) = S::as_mut_simd_f32s(x);
    for x in head {
        *x = f(*x);
    }
    if !tail.is_empty() {
        let x = f(s.partial_load_f32s(tail));
        s.partial_store_f32s(tail, x);
    }
}

/// `y = f(x, y)`, element by element over the common length.
#[inline(always)]
pub fn update<S: Simd>(s: S, x: &[f32], y: &mut [f32], f: impl Fn(S::f32s, S::f32s) -> S::f32s) {
    let n = x.len().min(y.len());
    let ((xs, x), (ys, y)) = (S::as_simd_f32s(&x[..n]), S::as_mut_simd_f32s(&mut y[..n]));
    for (x, y) in xs.iter().zip(ys) {
        *y = f(*x, *y);
    }
    if !x.is_empty() {
        let new = f(s.partial_load_f32s(x), s.partial_load_f32s(y));
        s.partial_store_f32s(y, new);
    }
}

/// e^x, element by element: at most 1 unit in the last place from the true value where that is a normal number; 0 below,
/// +∞ above, NaN of NaN.
///
/// x = n ln 2 + r with |r| ≤ ln 2 / 2; e^r by the polynomial of Cephes' `expf`; n is added to the exponent's bits.
#[inline(always)]
pub fn exp<S: Simd>(s: S, x: S::f32s) -> S::f32s {
    const LOWEST: f32 = -87.336_54; // e^x is the smallest normal number
    const HIGHEST: f32 = 88.722_83; // e^x is just below the largest
    const LN2_HIGH: f32 = 0.693_359_4; // 9 bits, so that n · LN2_HIGH is exact
    const LN2_LOW: f32 = -2.121_944_4e-4;
    const SHIFT: f32 = 12_582_912.0; // 1.5 · 2^23: adding it leaves the nearest integer in the low bits
    const CUBIC_AND_UP: [f32; 6] =
        [1.987_569_1e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 5.000_000_1e-1];

    let splat = |x| s.splat_f32s(x);
    let shifted = s.mul_add_f32s(x, splat(std::f32::consts::LOG2_E), splat(SHIFT));
    let n = s.sub_f32s(shifted, splat(SHIFT));
    let r = s.mul_add_f32s(n, splat(-LN2_HIGH), x);
    let r = s.mul_add_f32s(n, splat(-LN2_LOW), r);
    let mut p = splat(CUBIC_AND_UP[0]);
    for c in &CUBIC_AND_UP[1..] {
        p = s.mul_add_f32s(p, r, splat(*c));
    }
    let p = s.add_f32s(s.mul_add_f32s(p, s.mul_f32s(r, r), r), splat(1.0));
    let exponent = s.wrapping_dyn_shl_u32s(s.transmute_u32s_f32s(shifted), s.splat_u32s(23));
    let y = s.transmute_f32s_u32s(s.add_u32s(s.transmute_u32s_f32s(p), exponent));
    let y = s.select_f32s(s.less_than_f32s(x, splat(LOWEST)), splat(0.0), y);
    let y = s.select_f32s(s.greater_than_f32s(x, splat(HIGHEST)), splat(f32::INFINITY), y);
    s.select_f32s(s.equal_f32s(x, x), y, x)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn fold16(mut lanes: [f32; LANES]) -> f32 {
        let mut half = LANES / 2;
        while half > 0 {
            for i in 0..half {
                lanes[i] += lanes[i + half];
            }
            half /= 2;
        }
        lanes[0]
    }

    fn plain_dot(x: &[f32], y: &[f32]) -> f32 {
        let mut lanes = [0.0f32; LANES];
        for (i, (x, y)) in x.iter().zip(y).enumerate() {
            lanes[i % LANES] = x.mul_add(*y, lanes[i % LANES]);
        }
        fold16(lanes)
    }

    fn plain_sum(x: &[f32]) -> f32 {
        let mut lanes = [0.0f32; LANES];
        for (i, x) in x.iter().enumerate() {
            lanes[i % LANES] += x;
        }
        fold16(lanes)
    }

    /// Everything this file computes, as bits.
    #[inline(always)]
    fn all<S: Simd>(s: S, a: f32, x: &[f32], y: &[f32]) -> Vec<u32> {
        let (mut exps, mut line) = (x.to_vec(), y.to_vec());
        map(s, &mut exps, |x| exp(s, x));
        axpy(s, a, x, &mut line);
        let numbers = [dot(s, x, y), sum(s, x), max(s, x)];
        numbers.iter().chain(&exps).chain(&line).map(|x| x.to_bits()).collect()
    }

    proptest! {
        #[test]
        fn every_instruction_set_gives_the_plain_bits(
            xy in prop::collection::vec((-3.0f32..3.0, -3.0f32..3.0), 0..70),
            a in -2.0f32..2.0,
        ) {
            let (x, y): (Vec<f32>, Vec<f32>) = xy.into_iter().unzip();
            let plain = all(pulp::Scalar::new(), a, &x, &y);
            prop_assert_eq!(plain[0], plain_dot(&x, &y).to_bits());
            prop_assert_eq!(plain[1], plain_sum(&x).to_bits());
            prop_assert_eq!(plain[2], x.iter().copied().fold(f32::NEG_INFINITY, f32::max).to_bits());
            let line: Vec<u32> = x.iter().zip(&y).map(|(x, y)| a.mul_add(*x, *y).to_bits()).collect();
            prop_assert_eq!(&plain[3 + x.len()..], &line[..]);
            prop_assert_eq!(&dispatch!(|s| all(s, a, &x, &y)), &plain);
            #[cfg(target_arch = "x86_64")]
            if let Some(v3) = pulp::x86::V3::try_new() {
                prop_assert_eq!(&v3.vectorize(#[inline(always)] || all(v3, a, &x, &y)), &plain);
            }
        }
    }

    #[test]
    fn exp_is_within_one_unit_in_the_last_place() {
        // Every 1,009th float from e^x's smallest normal value to its largest.
        let inputs =
            |range: std::ops::Range<u32>, sign: f32| range.step_by(1009).map(move |b| sign * f32::from_bits(b));
        let mut x: Vec<f32> =
            inputs(0..88.722_83f32.to_bits(), 1.0).chain(inputs(0..87.33654f32.to_bits(), -1.0)).collect();
        let truth: Vec<f64> = x.iter().map(|x| f64::from(*x).exp()).collect();
        dispatch!(|s| map(s, &mut x, |x| exp(s, x)));
        for (got, want) in x.iter().zip(truth) {
            let nearest = want as f32;
            let unit = f64::from(f32::from_bits(nearest.to_bits() + 1)) - f64::from(nearest);
            let error = (f64::from(*got) - want).abs() / unit;
            assert!(error <= 1.0, "e^x = {want}, got {got}: {error} units");
        }
    }

    #[test]
    fn exp_at_the_edges() {
        let mut x = [f32::NEG_INFINITY, -1e30, -104.0, -87.4, 0.0, -0.0, 88.8, 1e30, f32::INFINITY, f32::NAN];
        dispatch!(|s| map(s, &mut x, |x| exp(s, x)));
        assert_eq!(x[..9], [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, f32::INFINITY, f32::INFINITY, f32::INFINITY]);
        assert!(x[9].is_nan());
    }
}
