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

/// Sets flush-to-zero and denormals-are-zero on this thread, where the processor has them.
pub fn flush_denormals() {
    todo!()
}
