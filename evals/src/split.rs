//! Splits: which item may be used for what, decided by its hash alone. Not the items themselves, which are a suite's.

use crate::task::point;
use hone_runs::{Class, Failure, Result};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The shares of a task's items, which make 1 together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Splits {
    /// For training. Files only: native tasks have train problems of their own.
    pub train: f64,
    /// For screening, looked at as often as one likes.
    pub dev: f64,
    /// For confirmation alone.
    pub held_out: f64,
}

/// What an item may be used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Split {
    /// Training.
    Train,
    /// Screening.
    Dev,
    /// Confirmation.
    HeldOut,
}

impl fmt::Display for Split {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Split::Train => "train",
            Split::Dev => "dev",
            Split::HeldOut => "held_out",
        })
    }
}

impl Splits {
    /// The split of the item with this id: a matter of the id alone, whatever other items there are.
    pub fn of(&self, id: &str) -> Split {
        let point = point("split", id);
        if point < self.train {
            Split::Train
        } else if point < self.train + self.dev {
            Split::Dev
        } else {
            Split::HeldOut
        }
    }

    pub(crate) fn check(&self) -> Result<()> {
        let shares = [self.train, self.dev, self.held_out];
        if shares.iter().all(|share| (0.0..=1.0).contains(share)) && (shares.iter().sum::<f64>() - 1.0).abs() < 1e-9 {
            return Ok(());
        }
        Err(Failure::new(Class::Usage, "The splits do not make 1 together.")
            .hint("for example `splits: {train: 0.8, dev: 0.1, held_out: 0.1}`"))
    }
}

/// Part of a suite's items.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Subset {
    /// Dev or held-out.
    pub split: Split,
    /// The i-th of F disjoint parts of the split (i from 0), of equal size to within an item: so that each confirmation can use items
    /// that no earlier decision saw.
    pub fold: Option<(usize, usize)>,
}

impl Subset {
    /// All dev items.
    pub const DEV: Self = Self { split: Split::Dev, fold: None };
    /// All held-out items.
    pub const HELD_OUT: Self = Self { split: Split::HeldOut, fold: None };

    /// The `i`-th of `of` disjoint parts of the held-out items.
    pub fn held_out_fold(i: usize, of: usize) -> Self {
        Self { split: Split::HeldOut, fold: Some((i, of)) }
    }
}

impl fmt::Display for Subset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.fold {
            None => write!(f, "{}", self.split),
            Some((i, of)) => write!(f, "{} {}/{of}", self.split, i + 1),
        }
    }
}
