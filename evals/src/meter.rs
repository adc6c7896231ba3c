//! What calls to remote models may cost and have cost: budgets, prices, reservations, and a record of every call. One meter serves all
//! clients of a campaign, whatever their purpose. It calls nobody: that is `remote.rs`.
//!
//! Every call reserves its worst case before it starts and settles what it used when it ends, so the sum of what is spent and what is
//! in flight never passes the budget but by the error of one estimate. A call that was cut off stays charged at its reservation.

use hone_runs::{Class, Failure, Result};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What a model costs, in US dollars a million tokens.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Price {
    /// Tokens sent.
    pub prompt: f64,
    /// Tokens received.
    pub completion: f64,
}

impl Price {
    /// The cost of `usage`, in US dollars.
    pub fn of(&self, usage: Usage) -> f64 {
        (self.prompt * usage.prompt_tokens as f64 + self.completion * usage.completion_tokens as f64) / 1e6
    }
}

/// Tokens of one call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Sent.
    pub prompt_tokens: u64,
    /// Received.
    pub completion_tokens: u64,
    /// The server did not say; this is our estimate.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub estimated: bool,
}

impl Usage {
    /// Sent and received.
    pub fn tokens(self) -> u64 {
        self.prompt_tokens.saturating_add(self.completion_tokens)
    }
}

/// Hard limits over all calls.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Budget {
    /// Tokens, sent and received.
    pub tokens: Option<u64>,
    /// US dollars. Refuses models without a known price.
    pub usd: Option<f64>,
}

/// What has been spent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Spend {
    /// Attempts made, whatever became of them.
    pub calls: u64,
    /// Tokens charged, those of calls cut off included.
    pub tokens: u64,
    /// US dollars charged, those of calls cut off included.
    pub usd: f64,
    /// Tokens charged of models without a known price: their dollars are in no sum.
    pub unpriced_tokens: u64,
    /// Tokens of calls cut off, charged at their reservations.
    pub cut_off_tokens: u64,
    /// US dollars of calls cut off, charged at their reservations.
    pub cut_off_usd: f64,
}

/// How far a call is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// Under way: reserved, not settled. A record that ends here was cut off by the death of its process.
    Reserved,
    /// A reply came.
    Answered,
    /// No reply, and nothing to pay: refused, rate-limited, unreachable.
    Failed,
    /// No reply, but the model may have worked: timed out, broken off. Charged at its reservation.
    CutOff,
}

/// The record of one attempt. Recorded twice: when it is reserved, and when it is settled. Secrets are masked in all its texts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Call {
    /// Counts the meter's calls from 0; both records of a call have the same.
    pub id: u64,
    /// What it is for, such as `propose` or `eval`.
    pub purpose: String,
    /// The model asked for.
    pub model: String,
    /// The base URL.
    pub endpoint: String,
    /// Counts the attempts at the same request from 1.
    pub attempt: u32,
    /// How far it is.
    pub outcome: Outcome,
    /// What it is charged, or while it is under way what is reserved.
    pub usage: Usage,
    /// The same in US dollars; None where the model has no known price.
    pub usd: Option<f64>,
    /// The request as sent.
    pub request: serde_json::Value,
    /// The reply as received, where there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reply: Option<serde_json::Value>,
    /// Why there was none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// The error's class.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub class: Option<Class>,
}

/// Stores a call. When it fails, the call does not start, or its reply is not used: nothing is spent unrecorded.
pub type Record = dyn Fn(&Call) -> Result<()> + Send + Sync;

/// Holds the budget of all calls.
pub struct Meter {
    budget: Budget,
    state: Mutex<State>,
    record: Box<Record>,
}

#[derive(Default)]
struct State {
    spent: Spend,
    reserved_tokens: u64,
    reserved_usd: f64,
}

impl Meter {
    /// A meter that starts from what has been `spent` already (a resumed campaign's ledger knows) and hands each record to `record`.
    pub fn new(
        budget: Budget,
        spent: Spend,
        record: impl Fn(&Call) -> Result<()> + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self { budget, state: Mutex::new(State { spent, ..State::default() }), record: Box::new(record) })
    }

    /// A meter without limits that records nothing: for a person's own evaluation of an endpoint.
    pub fn unlimited() -> Arc<Self> {
        Self::new(Budget::default(), Spend::default(), |_| Ok(()))
    }

    /// What has been spent. Calls in flight are not in it.
    pub fn spend(&self) -> Spend {
        self.state().spent
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // The sums are whole after every statement, so another thread's panic has left none half-made.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reserves `call.usage`, the worst case, at `price`, and records the call as reserved.
    ///
    /// # Errors
    /// [`Class::Budget`] where the budget does not hold it; [`Class::Usage`] where dollars are limited and the price is unknown; and the
    /// record's own.
    pub(crate) fn reserve(self: &Arc<Self>, mut call: Call, price: Option<Price>) -> Result<Reservation> {
        call.usd = price.map(|price| price.of(call.usage));
        let tokens = call.usage.tokens();
        {
            let mut state = self.state();
            if let Some(limit) = self.budget.usd {
                let Some(usd) = call.usd else {
                    let message =
                        format!("The model {} has no known price, so a budget in dollars cannot be held.", call.model);
                    return Err(Failure::new(Class::Usage, message)
                        .hint("give its price, `price: {prompt: …, completion: …}` in dollars a million tokens, or a budget in tokens alone"));
                };
                let committed = state.spent.usd + state.reserved_usd;
                if committed + usd > limit {
                    let spent =
                        format!("${committed:.4} of ${limit:.4} are spent, and the next call may cost ${usd:.4}");
                    return Err(exhausted("usd", &spent));
                }
            }
            if let Some(limit) = self.budget.tokens {
                let committed = state.spent.tokens.saturating_add(state.reserved_tokens);
                if committed.saturating_add(tokens) > limit {
                    let spent = format!("{committed} of {limit} are spent, and the next call may use {tokens}");
                    return Err(exhausted("tokens", &spent));
                }
            }
            call.id = state.spent.calls;
            state.spent.calls += 1;
            state.reserved_tokens += tokens;
            state.reserved_usd += call.usd.unwrap_or(0.0);
        }
        // Should recording fail, the call does not start and costs nothing.
        if let Err(failure) = (self.record)(&call) {
            drop(self.release(call.usage, call.usd));
            return Err(failure);
        }
        Ok(Reservation { meter: Arc::clone(self), price, call: Some(call) })
    }

    /// Takes a call's reservation back.
    fn release(&self, usage: Usage, usd: Option<f64>) -> MutexGuard<'_, State> {
        let mut state = self.state();
        state.reserved_tokens = state.reserved_tokens.saturating_sub(usage.tokens());
        state.reserved_usd = (state.reserved_usd - usd.unwrap_or(0.0)).max(0.0);
        state
    }
}

fn exhausted(budget: &str, spent: &str) -> Failure {
    Failure::new(Class::Budget, format!("{EXHAUSTED}{budget} does not hold the next call: {spent}."))
        .hint("raise the goal's `budget`; a campaign ends here")
}

/// How the message of a call that the budget does not hold begins.
const EXHAUSTED: &str = "The budget of ";

/// The budget that a refused call names, as a goal calls it: `usd` or `tokens`.
pub fn named_budget(failure: &Failure) -> Option<&'static str> {
    let rest = failure.message.strip_prefix(EXHAUSTED)?;
    ["usd", "tokens"].into_iter().find(|name| rest.split(' ').next() == Some(name))
}

/// What one call may cost until it is settled. Dropped unsettled (its task was cancelled), the call counts as cut off.
pub(crate) struct Reservation {
    meter: Arc<Meter>,
    price: Option<Price>,
    /// As reserved; None once it is settled.
    call: Option<Call>,
}

/// How a call ended.
pub(crate) struct Ending {
    pub outcome: Outcome,
    /// None: as reserved.
    pub usage: Option<Usage>,
    pub reply: Option<serde_json::Value>,
    pub error: Option<String>,
    pub class: Option<Class>,
}

impl Reservation {
    /// Charges what the call used and records it.
    ///
    /// # Errors
    /// The record's own. The charge stands.
    pub(crate) fn settle(mut self, ending: Ending) -> Result<()> {
        self.end(ending)
    }

    fn end(&mut self, ending: Ending) -> Result<()> {
        let Some(mut call) = self.call.take() else { return Ok(()) };
        let mut state = self.meter.release(call.usage, call.usd);
        call.usage = ending.usage.unwrap_or(call.usage);
        call.usd = self.price.map(|price| price.of(call.usage));
        let (tokens, usd) = (call.usage.tokens(), call.usd.unwrap_or(0.0));
        state.spent.tokens = state.spent.tokens.saturating_add(tokens);
        state.spent.usd += usd;
        if call.usd.is_none() {
            state.spent.unpriced_tokens = state.spent.unpriced_tokens.saturating_add(tokens);
        }
        if ending.outcome == Outcome::CutOff {
            state.spent.cut_off_tokens = state.spent.cut_off_tokens.saturating_add(tokens);
            state.spent.cut_off_usd += usd;
        }
        drop(state);
        (call.outcome, call.reply, call.error, call.class) = (ending.outcome, ending.reply, ending.error, ending.class);
        (self.meter.record)(&call)
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let error = Some("The caller did not wait for the reply.".to_string());
        if let Err(failure) =
            self.end(Ending { outcome: Outcome::CutOff, usage: None, reply: None, error, class: None })
        {
            tracing::warn!("a call cut off could not be recorded: {}", failure.message);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn call(prompt_tokens: u64, completion_tokens: u64) -> Call {
        Call {
            id: 0,
            purpose: "test".into(),
            model: "m".into(),
            endpoint: "e".into(),
            attempt: 1,
            outcome: Outcome::Reserved,
            usage: Usage { prompt_tokens, completion_tokens, estimated: true },
            usd: None,
            request: Value::Null,
            reply: None,
            error: None,
            class: None,
        }
    }

    fn answered(prompt_tokens: u64, completion_tokens: u64) -> Ending {
        let usage = Some(Usage { prompt_tokens, completion_tokens, estimated: false });
        Ending { outcome: Outcome::Answered, usage, reply: None, error: None, class: None }
    }

    fn tokens(limit: u64) -> Arc<Meter> {
        Meter::new(Budget { tokens: Some(limit), usd: None }, Spend::default(), |_| Ok(()))
    }

    #[test]
    fn reservations_and_spending_together_stay_within_the_budget() {
        let meter = tokens(100);
        let first = meter.reserve(call(20, 40), None).unwrap();
        let refused = meter.reserve(call(20, 40), None).err().unwrap();
        assert_eq!(refused.class, Class::Budget);
        first.settle(answered(20, 5)).unwrap();
        meter.reserve(call(20, 40), None).unwrap().settle(answered(20, 40)).unwrap();
        assert_eq!(meter.spend().tokens, 85);
        assert!(meter.reserve(call(10, 6), None).is_err());
        assert_eq!(meter.reserve(call(10, 5), None).unwrap().call.as_ref().unwrap().id, 2);
    }

    #[test]
    fn money_needs_a_price() {
        let meter = Meter::new(Budget { tokens: None, usd: Some(1.0) }, Spend::default(), |_| Ok(()));
        let refused = meter.reserve(call(1, 1), None).err().unwrap();
        assert_eq!(refused.class, Class::Usage);
        let price = Price { prompt: 1.0, completion: 10.0 };
        let dear = meter.reserve(call(100_000, 90_001), Some(price)).err().unwrap();
        assert!(dear.class == Class::Budget && dear.message.contains("$1.0000"), "{dear}");
        meter.reserve(call(100_000, 90_000), Some(price)).unwrap().settle(answered(100_000, 50_000)).unwrap();
        assert!((meter.spend().usd - 0.6).abs() < 1e-12);
        assert_eq!(meter.spend().unpriced_tokens, 0);
    }

    #[test]
    fn what_has_no_price_is_marked_and_not_free() {
        let meter = Meter::unlimited();
        meter.reserve(call(10, 10), None).unwrap().settle(answered(10, 7)).unwrap();
        assert_eq!((meter.spend().usd, meter.spend().unpriced_tokens), (0.0, 17));
    }

    #[test]
    fn a_call_cut_off_stays_charged_at_its_reservation() {
        let meter = tokens(100);
        drop(meter.reserve(call(20, 40), None).unwrap());
        assert_eq!((meter.spend().tokens, meter.spend().cut_off_tokens), (60, 60));
        let usage = Some(Usage::default());
        let failed = Ending { outcome: Outcome::Failed, usage, reply: None, error: None, class: None };
        meter.reserve(call(20, 20), None).unwrap().settle(failed).unwrap();
        assert_eq!(meter.spend().tokens, 60);
    }

    #[test]
    fn a_resumed_meter_goes_on_from_what_was_spent() {
        let spent = Spend { calls: 7, tokens: 90, ..Spend::default() };
        let meter = Meter::new(Budget { tokens: Some(100), usd: None }, spent, |_| Ok(()));
        assert!(meter.reserve(call(10, 1), None).is_err());
        assert_eq!(meter.reserve(call(5, 5), None).unwrap().call.as_ref().unwrap().id, 7);
    }

    #[test]
    fn every_call_is_recorded_before_and_after_and_none_goes_unrecorded() {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let into = Arc::clone(&seen);
        let meter = Meter::new(Budget::default(), Spend::default(), move |call| {
            into.lock().unwrap().push((call.id, call.outcome, call.usage.tokens()));
            Ok(())
        });
        meter.reserve(call(10, 10), None).unwrap().settle(answered(10, 2)).unwrap();
        assert_eq!(*seen.lock().unwrap(), [(0, Outcome::Reserved, 20), (0, Outcome::Answered, 12)]);

        let full = || Err(Failure::new(Class::Infrastructure, "The disk is full."));
        let meter = Meter::new(Budget { tokens: Some(20), usd: None }, Spend::default(), move |_| full());
        assert!(meter.reserve(call(10, 10), None).is_err());
        assert_eq!((meter.spend().tokens, meter.state().reserved_tokens), (0, 0));
    }
}
