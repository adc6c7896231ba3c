//! The wall clock, for what people read: no decision rests on it, since it may jump. Durations are measured by [`std::time::Instant`].

use std::sync::LazyLock;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Seconds by which this process's wall clock is off, negative ones too: how a self-test makes clocks jump.
pub const SKEW: &str = "HONE_CLOCK_SKEW";

static SKEWED: LazyLock<i64> =
    LazyLock::new(|| std::env::var(SKEW).ok().and_then(|seconds| seconds.parse().ok()).unwrap_or(0));

/// Time since the Unix epoch; zero before it.
pub fn now() -> Duration {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let skew = Duration::from_secs(SKEWED.unsigned_abs());
    if *SKEWED < 0 { now.saturating_sub(skew) } else { now + skew }
}
