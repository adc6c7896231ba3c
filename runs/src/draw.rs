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

#[cfg(test)]
mod tests {
    use super::*;
    use rand_chacha::rand_core::Rng;

    #[test]
    fn a_key_names_its_draws() {
        let first = |seed, purpose, step, index| draws(seed, purpose, step, index).next_u64();
        // Pinned: another value here means that no earlier run can be reproduced.
        assert_eq!(first(1, "shuffle", 2, 3), 17_549_470_771_722_476_126);
        let other =
            [first(0, "shuffle", 2, 3), first(1, "sample", 2, 3), first(1, "shuffle", 3, 2), first(2, "shuffle", 1, 3)];
        assert!(other.iter().all(|draw| *draw != first(1, "shuffle", 2, 3)));
    }
}
