//! What a recipe may not say: values out of range, and keys that contradict each other, each with a sentence on why.

use super::{Recipe, Rl, Stage};
use hone_runs::{Class, Count, Failure, Result, Span};

/// Whether it is so, what is wrong then, and what to do.
type Fault = (bool, String, &'static str);

fn refuse(faults: impl IntoIterator<Item = Fault>) -> Result<()> {
    match faults.into_iter().find(|(is_so, ..)| *is_so) {
        Some((_, message, hint)) => Err(Failure::new(Class::Usage, message).hint(hint)),
        None => Ok(()),
    }
}

fn positive(value: f64) -> bool {
    value > 0.0 && value.is_finite()
}

impl Recipe {
    /// Refuses values that cannot be used, and keys that contradict each other.
    ///
    /// # Errors
    /// Usage, with the first contradiction and why it is one.
    pub fn check(&self) -> Result<()> {
        let (o, limits) = (&self.optimizer, self.compute.resolved());
        let spent = limits.tokens == Some(Count(0))
            || limits.flops == Some(Count(0))
            || limits.seconds == Some(Span::default());
        let whole = self.checkpoints.every > 0 && self.checkpoints.keep > 0;
        refuse([
            (
                self.stages.is_empty(),
                "The recipe has no stages.".into(),
                "add one under `stages:`, such as `- sft: {task: addition}`",
            ),
            (spent, "A `compute` limit is 0.".into(), "remove the limit, or raise it"),
            (!whole, "`checkpoints` has a 0.".into(), "use at least 1 for `every` and `keep`"),
            (
                !o.betas.iter().all(|b| (0.0..1.0).contains(b)),
                format!("`optimizer.betas` are {:?}, not in [0, 1).", o.betas),
                "remove them for 0.9 and 0.95",
            ),
            (
                !(0.0..=1.0).contains(&o.final_lr),
                format!("`optimizer.final_lr` is {}, not a share.", o.final_lr),
                "use a number from 0 to 1",
            ),
        ])?;
        let hint = "remove it for the default";
        let above = [("lr", o.lr), ("clip", o.clip), ("eps", o.eps)];
        refuse(
            above.map(|(name, x)| (!positive(x), format!("`optimizer.{name}` is {x}, not a positive number."), hint)),
        )?;
        let least = [("weight_decay", o.weight_decay), ("balance", o.balance), ("bias_rate", o.bias_rate)];
        refuse(least.map(|(name, x)| {
            (x != 0.0 && !positive(x), format!("`optimizer.{name}` is {x}, not a number of at least 0."), hint)
        }))?;
        for (i, stage) in self.stages.iter().enumerate() {
            self.check_stage(stage).map_err(|mut failure| {
                failure.message = format!("stages.{i}.{}: {}", stage.kind(), failure.message);
                failure
            })?;
        }
        self.model.check_from()
    }

    fn check_stage(&self, stage: &Stage) -> Result<()> {
        let common = stage.common();
        refuse([
            (
                !positive(stage.lr(&self.optimizer)),
                "`lr` is not a positive number.".into(),
                "remove it for the default",
            ),
            (
                !positive(common.share),
                format!("`share` is {}, not a positive number.", common.share),
                "shares are relative: 1 and 3 give a quarter and three quarters",
            ),
            (common.micro_batch == 0, "`micro_batch` is 0.".into(), "remove it for the default"),
        ])?;
        match stage {
            Stage::Sft(sft) => refuse([(
                sft.batch == 0 || sft.examples == Some(Count(0)),
                "`batch` and `examples` are at least 1.".into(),
                "remove the zero",
            )]),
            Stage::Rl(rl) => rl.check(),
        }
    }
}

impl Rl {
    fn check(&self) -> Result<()> {
        let band = self.band();
        refuse([
            (
                band.cap.is_nan() || band.cap < 1.0,
                format!("`ratio_cap` is {}, and would cap the ratio of unchanged weights, which is 1.", band.cap),
                "ratio_cap is absolute: an ε_high of 0.2 is written 1.2",
            ),
            (
                !(0.0..=1.0).contains(&band.floor),
                format!("`ratio_floor` is {}, not between 0 and 1.", band.floor),
                "ratio_floor is absolute: an ε_low of 0.2 is written 0.8, and 0 is no floor",
            ),
            (
                !positive(self.temperature),
                format!(
                    "`temperature` is {}: a greedy policy explores nothing, and has no log-probs to train.",
                    self.temperature
                ),
                "use 1.0",
            ),
            (self.group < 2, "`group` is below 2: an advantage compares completions of one prompt.".into(), "use 8"),
            (
                self.prompts == 0 || self.max_tokens == 0 || self.epochs == 0,
                "`prompts`, `max_tokens` and `epochs` are at least 1.".into(),
                "remove the zero",
            ),
            (
                self.minibatches == 0 || self.minibatches > self.prompts,
                format!(
                    "`minibatches` is {}, but each holds whole groups, of which there are {}.",
                    self.minibatches, self.prompts
                ),
                "use at least 1 and at most `prompts`",
            ),
            (
                self.resample > 0 && !self.dynamic_sampling,
                "`resample` fills the places of dropped groups, and without `dynamic_sampling` none is dropped.".into(),
                "set dynamic_sampling: true, or remove resample",
            ),
            (
                self.repetition == Some(0),
                "`repetition` is 0: every completion would halt at once.".into(),
                "remove it to never halt",
            ),
        ])
    }
}
