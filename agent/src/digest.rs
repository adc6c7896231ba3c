//! Bounded digests of what a run wrote: its curves in a few numbers each, its log in a few lines. Text from a log is data:
//! it is cleaned of whatever could drive a terminal, and never parsed for a metric.

use serde::{Deserialize, Serialize};

/// A curve in a few numbers. Steps without the metric are not points; points that are not finite count in `nonfinite` only.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Series {
    /// Finite points.
    pub n: usize,
    /// NaN or infinite points.
    pub nonfinite: usize,
    /// Step of the first and the last finite point.
    pub steps: [u64; 2],
    /// First value.
    pub first: f64,
    /// Last value.
    pub last: f64,
    /// Smallest value.
    pub min: f64,
    /// Largest value.
    pub max: f64,
    /// Mean over the last quarter of the points.
    pub tail_mean: f64,
    /// Rise over the last quarter of the points: slope of the least-squares line times its length, in the metric's unit.
    pub tail_rise: f64,
    /// Standard deviation of the last quarter's points around that line.
    pub tail_noise: f64,
}
