//! Random draws from a counter-based generator, keyed by what they are for: a resumed run draws what the unbroken run drew.

use rand_chacha::{ChaCha8Rng, rand_core::SeedableRng};
use sha2::{Digest, Sha256};

/// The generator of (seed, purpose, step, index). Equal keys give equal draws, on every machine; others are independent.
pub fn draws(seed: u64, purpose: &str, step: u64, index: u64) -> ChaCha8Rng {
    let mut key = Sha256::new();
    for part in [&seed.to_le_bytes()[..], &step.to_le_bytes(), &index.to_le_bytes(), purpose.as_bytes()] {
        key.update(part);
    }
    ChaCha8Rng::from_seed(key.finalize().into())
}
