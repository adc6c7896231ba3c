//! The worker pool: a rayon pool of a fixed size whose threads flush denormals. All numeric work runs inside it.

/// A pool of numeric workers. Results never depend on its size.
pub struct Pool {
    inner: rayon::ThreadPool,
}

impl Pool {
    /// A pool of `threads` workers (0: one a core), each with flush-to-zero and denormals-are-zero set.
    ///
    /// # Errors
    /// When the system gives no threads.
    pub fn new(threads: usize) -> Result<Self, rayon::ThreadPoolBuildError> {
        let inner =
            rayon::ThreadPoolBuilder::new().num_threads(threads).start_handler(|_| flush_denormals()).build()?;
        Ok(Self { inner })
    }

    /// Runs `work` on the pool; operations inside use its workers.
    pub fn run<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        self.inner.install(work)
    }

    /// Number of workers.
    pub fn threads(&self) -> usize {
        self.inner.current_num_threads()
    }
}

/// Sets flush-to-zero and denormals-are-zero on this thread, where the processor has them: a product of two activations
/// that falls below 1e-38 would otherwise cost a hundred times a normal one.
pub fn flush_denormals() {
    #[cfg(target_arch = "x86_64")]
    {
        const FLUSH_TO_ZERO: u32 = 1 << 15;
        const DENORMALS_ARE_ZERO: u32 = 1 << 6;
        let mut mxcsr = 0u32;
        // SAFETY: both instructions are SSE, which x86-64 has; the operand is a live u32; only rounding of denormals changes.
        unsafe {
            std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut mxcsr, options(nostack));
            mxcsr |= FLUSH_TO_ZERO | DENORMALS_ARE_ZERO;
            std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const mxcsr, options(nostack, readonly));
        }
    }
    #[cfg(target_arch = "aarch64")]
    {
        const FLUSH_TO_ZERO: u64 = 1 << 24; // of inputs and results alike
        let mut fpcr: u64;
        // SAFETY: FPCR is readable and writable from user code; only rounding of denormals changes.
        unsafe {
            std::arch::asm!("mrs {}, fpcr", out(reg) fpcr, options(nomem, nostack));
            fpcr |= FLUSH_TO_ZERO;
            std::arch::asm!("msr fpcr, {}", in(reg) fpcr, options(nomem, nostack));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{Simd, dispatch, map};
    use std::hint::black_box;

    #[test]
    fn workers_flush_denormals() {
        for threads in 1..=3 {
            let pool = Pool::new(threads).unwrap();
            assert_eq!(pool.threads(), threads);
            let everywhere = pool.inner.broadcast(|_| {
                let mut lanes = [f32::MIN_POSITIVE; 16];
                dispatch!(|s| map(s, &mut lanes, |x| s.mul_f32s(x, s.splat_f32s(0.5))));
                let product = black_box(f32::MIN_POSITIVE) * black_box(0.25); // a denormal result
                let input = black_box(f32::from_bits(1)) * black_box(1e30); // a denormal input
                (product, input, lanes)
            });
            assert_eq!(everywhere, vec![(0.0, 0.0, [0.0; 16]); threads]);
        }
    }

    #[test]
    fn other_threads_keep_denormals() {
        assert!(black_box(f32::MIN_POSITIVE) * black_box(0.25) > 0.0);
    }
}
