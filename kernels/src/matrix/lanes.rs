//! What a product is made of on one instruction set: registers of f32 sums, and lanes that a multiply-add takes in. A lane holds
//! an f32, or a pair of bf16 that lie one after another along the inner dimension.

use crate::simd::Simd;
use bytemuck::Pod;

/// Lanes of the inner dimension that are summed in one piece, and then added to the output.
pub(super) const DEPTH: usize = 512;
/// Length of a row of a tile of the left factor: not a power of two, so that its rows do not share cache sets.
pub(super) const LINE: usize = DEPTH + 16;
/// Most rows of any tile.
pub(super) const MOST_ROWS: usize = 12;
/// Registers side by side in a tile.
pub(super) const WIDE: usize = 2;

/// An instruction set's multiply-add.
pub(super) trait Lanes: Copy + Send + Sync {
    /// What a multiply-add takes of each factor.
    type Lane: Pod + Default + Send + Sync;
    /// A register of lanes.
    type Register: Copy;
    /// A register of sums.
    type Sums: Copy;
    /// Sums a register.
    const WIDTH: usize;
    /// Rows of a tile: as many as leave all sums in registers.
    const ROWS: usize;
    /// Elements of the inner dimension a lane.
    const ELEMENTS: usize;

    /// No sum yet.
    fn zero(self) -> Self::Sums;
    /// A register of zeros.
    fn zero_lanes(self) -> Self::Register;
    /// The first `WIDTH` lanes of `x`.
    fn load(self, x: &[Self::Lane]) -> Self::Register;
    /// The lanes of `x`, fewer than `WIDTH`, and zeros.
    fn load_part(self, x: &[Self::Lane]) -> Self::Register;
    /// `sums + a · b`.
    fn step(self, a: Self::Lane, b: Self::Register, sums: Self::Sums) -> Self::Sums;
    /// At most `WIDTH` sums from memory.
    fn sums(self, x: &[f32]) -> Self::Sums;
    /// Writes as many sums as `out` holds, at most `WIDTH`, or adds them to it.
    fn store(self, sums: Self::Sums, out: &mut [f32], add: bool);
    /// Lanes along a run of elements; the last is filled up with 0.
    fn along(self, x: &[f32], out: &mut [Self::Lane]);
    /// Lanes of the elements of `x` (and `y`, the next along the inner dimension, where a lane holds two; None: zeros).
    fn across(self, x: &[f32], y: Option<&[f32]>, out: &mut [Self::Lane]);
    /// Swaps the rows and columns of a block of 16 × 16 lanes.
    #[inline(always)]
    fn transpose(self, block: &mut [[Self::Lane; 16]; 16]) {
        transpose_plain(block);
    }
    /// Lanes stored ready, where this product takes them so.
    fn stored(pairs: &[u32]) -> Option<&[Self::Lane]>;
}

/// f32 on the instruction set `S`.
#[derive(Clone, Copy)]
pub(super) struct F32<S>(pub S);

impl<S: Simd> Lanes for F32<S> {
    type Lane = f32;
    type Register = S::f32s;
    type Sums = S::f32s;
    const WIDTH: usize = S::F32_LANES;
    const ROWS: usize = if S::REGISTER_COUNT >= 32 { MOST_ROWS } else { 6 };
    const ELEMENTS: usize = 1;

    #[inline(always)]
    fn zero(self) -> S::f32s {
        self.0.splat_f32s(0.0)
    }
    #[inline(always)]
    fn zero_lanes(self) -> S::f32s {
        self.zero()
    }
    #[inline(always)]
    fn load(self, x: &[f32]) -> S::f32s {
        S::as_simd_f32s(x).0[0]
    }
    #[inline(always)]
    fn load_part(self, x: &[f32]) -> S::f32s {
        self.0.partial_load_f32s(x)
    }
    #[inline(always)]
    fn step(self, a: f32, b: S::f32s, sums: S::f32s) -> S::f32s {
        self.0.mul_add_f32s(self.0.splat_f32s(a), b, sums)
    }
    #[inline(always)]
    fn sums(self, x: &[f32]) -> S::f32s {
        if x.len() >= S::F32_LANES { self.load(x) } else { self.load_part(x) }
    }
    #[inline(always)]
    fn store(self, sums: S::f32s, out: &mut [f32], add: bool) {
        let s = self.0;
        if let Some(out) = S::as_mut_simd_f32s(out).0.first_mut() {
            *out = if add { s.add_f32s(*out, sums) } else { sums };
        } else if !out.is_empty() {
            let sums = if add { s.add_f32s(s.partial_load_f32s(out), sums) } else { sums };
            s.partial_store_f32s(out, sums);
        }
    }
    #[inline(always)]
    fn along(self, x: &[f32], out: &mut [f32]) {
        copy(x, out);
    }
    #[inline(always)]
    fn across(self, x: &[f32], _: Option<&[f32]>, out: &mut [f32]) {
        copy(x, out);
    }
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn transpose(self, block: &mut [[f32; 16]; 16]) {
        if S::F32_LANES == 16 {
            // SAFETY: the only instruction set of this platform with registers of 16 f32 is AVX-512, whose token `S` is.
            unsafe { transpose_avx512(bytemuck::cast_mut(block)) }
        } else {
            transpose_plain(block);
        }
    }
    fn stored(_: &[u32]) -> Option<&[f32]> {
        None
    }
}

/// Swaps the rows and columns of a block, without vector instructions.
#[inline(always)]
fn transpose_plain<T: Copy>(block: &mut [[T; 16]; 16]) {
    for i in 0..16 {
        for j in 0..i {
            (block[i][j], block[j][i]) = (block[j][i], block[i][j]);
        }
    }
}

/// Copies what is short: whole registers, and no call.
#[inline(always)]
pub(crate) fn copy<T: Copy>(from: &[T], to: &mut [T]) {
    let ((blocks, from), (outs, to)) = (from.as_chunks::<16>(), to.as_chunks_mut::<16>());
    for (from, to) in blocks.iter().zip(outs) {
        *to = *from;
    }
    for (from, to) in from.iter().zip(to) {
        *to = *from;
    }
}

/// The nearest bf16, ties to even, as the low half of the result; what is not a number stays so. Denormals become 0, as in the
/// processor's own conversion.
#[inline(always)]
pub(crate) fn to_bf16(x: f32) -> u32 {
    let bits = x.to_bits();
    if bits & 0x7f80_0000 == 0 {
        return (bits >> 16) & 0x8000;
    }
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let quiet = (bits >> 16) | 0x40;
    if x.is_nan() { quiet } else { rounded }
}

/// Two neighbours along the inner dimension in one lane, the first in the low half.
#[inline(always)]
pub(crate) fn pair(first: f32, second: f32) -> u32 {
    to_bf16(first) | to_bf16(second) << 16
}

#[cfg(target_arch = "x86_64")]
pub(super) use bf16::*;
#[cfg(target_arch = "x86_64")]
mod bf16 {
    use super::*;
    use std::arch::x86_64::*;

    /// Pairs of bf16, multiplied exactly and added in f32 (AVX512-BF16). The processor flushes denormals here whatever its settings.
    #[derive(Clone, Copy)]
    pub(in crate::matrix) struct Bf16(pulp::x86::V4);

    /// Runs `work` with the instructions of AVX512-BF16. Panics where the processor has none.
    pub(in crate::matrix) fn with_bf16(work: impl FnOnce(Bf16)) {
        let pulp::Arch::V4(v4) = pulp::Arch::new() else { panic!("AVX-512 was found") };
        assert!(std::arch::is_x86_feature_detected!("avx512bf16"), "AVX512-BF16 was found");
        #[target_feature(
            enable = "avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx512bf16,avx2,fma,bmi1,bmi2,lzcnt,popcnt"
        )]
        fn enter(v4: pulp::x86::V4, work: impl FnOnce(Bf16)) {
            work(Bf16(v4));
        }
        // SAFETY: V4's token vouches for AVX-512, the check above for its bf16 part.
        unsafe { enter(v4, work) }
    }

    impl Lanes for Bf16 {
        type Lane = u32;
        type Register = __m512i;
        type Sums = __m512;
        const WIDTH: usize = 16;
        const ROWS: usize = MOST_ROWS;
        const ELEMENTS: usize = 2;

        #[inline(always)]
        fn zero(self) -> __m512 {
            bytemuck::cast(F32(self.0).zero())
        }
        #[inline(always)]
        fn zero_lanes(self) -> __m512i {
            bytemuck::Zeroable::zeroed()
        }
        #[inline(always)]
        fn load(self, x: &[u32]) -> __m512i {
            bytemuck::cast(*x.first_chunk::<16>().expect("a register's lanes"))
        }
        #[inline(always)]
        fn load_part(self, x: &[u32]) -> __m512i {
            let mut all = [0u32; 16];
            all[..x.len()].copy_from_slice(x);
            bytemuck::cast(all)
        }
        #[inline(always)]
        fn step(self, a: u32, b: __m512i, sums: __m512) -> __m512 {
            let a = self.0.splat_u32s(a);
            // SAFETY: `Bf16` is made only where the processor has the instruction; the types are 64 plain bytes each.
            unsafe {
                let a = std::mem::transmute::<pulp::u32x16, __m512bh>(a);
                _mm512_dpbf16_ps(sums, a, std::mem::transmute::<__m512i, __m512bh>(b))
            }
        }
        #[inline(always)]
        fn sums(self, x: &[f32]) -> __m512 {
            bytemuck::cast(F32(self.0).sums(x))
        }
        #[inline(always)]
        fn store(self, sums: __m512, out: &mut [f32], add: bool) {
            F32(self.0).store(bytemuck::cast(sums), out, add);
        }
        #[inline(always)]
        fn along(self, x: &[f32], out: &mut [u32]) {
            let (blocks, rest) = x.as_chunks::<32>();
            let (outs, out) = out.split_at_mut(16 * blocks.len());
            for (x, out) in blocks.iter().zip(outs.as_chunks_mut::<16>().0) {
                // SAFETY: `Bf16` is made only where the processor has the instruction; all types are plain bytes.
                *out = unsafe {
                    let (low, high) = (_mm512_loadu_ps(x.as_ptr()), _mm512_loadu_ps(x[16..].as_ptr()));
                    std::mem::transmute::<__m512bh, [u32; 16]>(_mm512_cvtne2ps_pbh(high, low))
                };
            }
            let (pairs, last) = rest.as_chunks::<2>();
            for (lane, [a, b]) in out.iter_mut().zip(pairs) {
                *lane = pair(*a, *b);
            }
            if let [last] = last {
                out[pairs.len()] = pair(*last, 0.0);
            }
        }
        #[inline(always)]
        fn across(self, x: &[f32], y: Option<&[f32]>, out: &mut [u32]) {
            let Some(y) = y else {
                for (lane, x) in out.iter_mut().zip(x) {
                    *lane = to_bf16(*x);
                }
                return;
            };
            const INTERLEAVED: [u16; 32] = {
                let mut order = [0; 32];
                let mut i = 0;
                while i < 32 {
                    order[i] = (i / 2 + i % 2 * 16) as u16;
                    i += 1;
                }
                order
            };
            let ((xs, x), (ys, y)) = (x.as_chunks::<16>(), y.as_chunks::<16>());
            let (outs, rest) = out.split_at_mut(16 * xs.len());
            for ((x, y), out) in xs.iter().zip(ys).zip(outs.as_chunks_mut::<16>().0) {
                // SAFETY: as in `along`; the order names lanes from 0 to 31.
                *out = unsafe {
                    let both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(y.as_ptr()), _mm512_loadu_ps(x.as_ptr()));
                    let both = std::mem::transmute::<__m512bh, __m512i>(both);
                    bytemuck::cast(_mm512_permutexvar_epi16(bytemuck::cast(INTERLEAVED), both))
                };
            }
            for ((lane, x), y) in rest.iter_mut().zip(x).zip(y) {
                *lane = pair(*x, *y);
            }
        }
        #[inline(always)]
        fn transpose(self, block: &mut [[u32; 16]; 16]) {
            // SAFETY: `Bf16` is made only where the processor has AVX-512.
            unsafe { transpose_avx512(block) }
        }
        fn stored(pairs: &[u32]) -> Option<&[u32]> {
            Some(pairs)
        }
    }

    /// Swaps rows and columns in four rounds: pairs of rows interleave their lanes by ones, by twos, and then quarters change places twice.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn transpose_avx512(block: &mut [[u32; 16]; 16]) {
        let x: [__m512i; 16] = std::array::from_fn(|i| bytemuck::cast(block[i]));
        let mut y = x;
        for i in 0..8 {
            y[2 * i] = _mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]);
            y[2 * i + 1] = _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]);
        }
        // Of rows 4i to 4i + 3: z[4i + j] holds column 4q + j in quarter q.
        let mut z = y;
        for i in 0..4 {
            for j in 0..2 {
                z[4 * i + 2 * j] = _mm512_unpacklo_epi64(y[4 * i + j], y[4 * i + 2 + j]);
                z[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(y[4 * i + j], y[4 * i + 2 + j]);
            }
        }
        for j in 0..4 {
            let (a, b) = (_mm512_shuffle_i32x4::<0x88>(z[j], z[4 + j]), _mm512_shuffle_i32x4::<0xdd>(z[j], z[4 + j]));
            let (c, d) =
                (_mm512_shuffle_i32x4::<0x88>(z[8 + j], z[12 + j]), _mm512_shuffle_i32x4::<0xdd>(z[8 + j], z[12 + j]));
            block[j] = bytemuck::cast(_mm512_shuffle_i32x4::<0x88>(a, c));
            block[8 + j] = bytemuck::cast(_mm512_shuffle_i32x4::<0xdd>(a, c));
            block[4 + j] = bytemuck::cast(_mm512_shuffle_i32x4::<0x88>(b, d));
            block[12 + j] = bytemuck::cast(_mm512_shuffle_i32x4::<0xdd>(b, d));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_is_the_nearest_and_of_two_the_even() {
        let cases = [
            (1.0, 0x3f80),
            (-2.5, 0xc020),
            (f32::from_bits(0x3f80_8000), 0x3f80), // halfway: to even
            (f32::from_bits(0x3f81_8000), 0x3f82),
            (f32::from_bits(0x3f80_8001), 0x3f81),
            (f32::MAX, 0x7f80),
            (f32::INFINITY, 0x7f80),
            (0.0, 0),
            (-0.0, 0x8000),
            (1e-39, 0),
        ];
        for (x, bits) in cases {
            assert_eq!(to_bf16(x), bits, "{x}");
        }
        for nan in [0x7fff_ffff, 0xffff_ffff, 0x7f80_0001] {
            let half = to_bf16(f32::from_bits(nan));
            assert!(f32::from_bits(half << 16).is_nan() && half <= 0xffff);
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn whole_registers_round_as_single_numbers_do() {
        if !crate::bf16_available() {
            return;
        }
        let values = |seed: u32| -> Vec<f32> {
            let bits = (0..70u32).map(|i| f32::from_bits((i * 0x9e37_79b9).wrapping_mul(seed)));
            bits.map(|x| if x.is_nan() { 1e-39 } else { x }).collect()
        };
        let (x, y) = (values(3), values(5));
        let (mut along, mut across) = ([0; 35], [0; 70]);
        with_bf16(|k| {
            k.along(&x, &mut along);
            k.across(&x, Some(&y), &mut across);
        });
        assert!(along.iter().enumerate().all(|(i, &lane)| lane == pair(x[2 * i], x[2 * i + 1])));
        assert!(across.iter().enumerate().all(|(i, &lane)| lane == pair(x[i], y[i])));
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn a_block_changes_rows_for_columns() {
        if !std::arch::is_x86_feature_detected!("avx512f") {
            return;
        }
        let mut block: [[u32; 16]; 16] = std::array::from_fn(|i| std::array::from_fn(|j| (16 * i + j) as u32));
        // SAFETY: the processor has AVX-512 (asked above).
        unsafe { transpose_avx512(&mut block) };
        for i in 0..16 {
            for j in 0..16 {
                assert_eq!(block[i][j] as usize, 16 * j + i, "{i} {j}");
            }
        }
    }
}
