//! Replies as they were recorded, in place of a network. A reply is found by the content of its request, so a replay that asks something
//! else than the campaign did gets an error that shows where the two part, and never another question's answer.

use super::{ChatReply, Shared, parse};
use crate::meter::{Call, Ending, Outcome, Usage};
use crate::task::digest;
use hone_runs::{Class, Failure, Result};
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// The calls of a campaign, by the content of what was asked. Each is handed out once.
#[derive(Debug, Default)]
pub struct Recording {
    calls: Mutex<BTreeMap<String, Vec<Call>>>,
    /// Requests in the order they were first made.
    requests: Vec<Value>,
}

impl Recording {
    /// Of the last state of each call, in the order they were made.
    pub fn new(calls: impl IntoIterator<Item = Call>) -> Self {
        let (mut by_key, mut requests) = (BTreeMap::<String, Vec<Call>>::new(), Vec::new());
        for call in calls {
            let same = by_key.entry(key(&call.request)).or_default();
            if same.is_empty() {
                requests.push(call.request.clone());
            }
            same.push(call);
        }
        Self { calls: Mutex::new(by_key), requests }
    }

    /// Requests that were not asked again.
    pub fn left(&self) -> usize {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Different requests.
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Whether nothing was recorded.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    fn take(&self, body: &Value) -> Result<Vec<Call>> {
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = calls.remove(&key(body)) {
            return Ok(found);
        }
        // The next that was asked then: where the two part is what went differently.
        let next = self.requests.iter().find(|request| calls.contains_key(&key(request)));
        let parts = next.map_or("there are no more recorded requests".into(), |next| parting(next, body));
        Err(Failure::new(Class::Integrity, format!("No reply to this request was recorded: {parts}."))
            .hint("A prompt, a template, the masked secrets of the environment, or Hone itself differs from then."))
    }
}

impl Shared {
    /// The recorded reply to a request. All its attempts are charged, as they were then; the last reply counts, since a process that died
    /// before it wrote down an answer asked again.
    pub(super) fn recall(&self, recording: &Recording, body: &Value, worst: Usage) -> Result<ChatReply> {
        let mut found = Err(Failure::new(Class::Integrity, "Every recorded attempt at this request was cut off."));
        for call in recording.take(body)? {
            let reservation = self.meter.reserve(self.call(body, worst, call.attempt), self.endpoint.price)?;
            let parsed = call.reply.as_ref().and_then(|reply| parse(reply, worst.prompt_tokens));
            let (outcome, usage) = match call.outcome {
                Outcome::Answered => (Outcome::Answered, Some(parsed.as_ref().map_or(worst, |reply| reply.usage))),
                Outcome::Failed => (Outcome::Failed, Some(Usage::default())),
                // A reservation without an end was cut off by the death of its process.
                Outcome::CutOff | Outcome::Reserved => (Outcome::CutOff, None),
            };
            reservation.settle(Ending { outcome, usage, reply: None, error: call.error.clone(), class: call.class })?;
            match (outcome, parsed) {
                (Outcome::Answered, reply) => found = reply.ok_or_else(|| self.silent()),
                (_, _) if found.is_ok() => {}
                _ => {
                    let class = call.class.unwrap_or(Class::Infrastructure);
                    found = Err(Failure::new(class, call.error.unwrap_or_else(|| "The call was cut off.".into())));
                }
            }
        }
        found
    }
}

fn key(body: &Value) -> String {
    digest(&[&body.to_string()])
}

/// Where two requests part, in a sentence.
fn parting(then: &Value, now: &Value) -> String {
    let text = |body: &Value| -> Vec<String> {
        let messages = body["messages"].as_array().cloned().unwrap_or_default();
        messages.iter().map(|m| m["content"].as_str().unwrap_or_default().to_string()).collect()
    };
    let (then_said, now_said) = (text(then), text(now));
    for (i, (then, now)) in then_said.iter().zip(&now_said).enumerate() {
        let line = then.lines().zip(now.lines()).position(|(a, b)| a != b);
        let line = line.or_else(|| (then != now).then(|| then.lines().count().min(now.lines().count())));
        if let Some(line) = line {
            let shown = |text: &str| -> String {
                let line: String = text.lines().nth(line).unwrap_or("(the end)").chars().take(120).collect();
                line.escape_debug().to_string()
            };
            return format!(
                "message {} parts from the recorded one in line {}: \"{}\" then, \"{}\" now",
                i + 1,
                line + 1,
                shown(then),
                shown(now)
            );
        }
    }
    if then_said.len() != now_said.len() {
        return format!("the recorded one has {} messages, this one {}", then_said.len(), now_said.len());
    }
    "the messages are the same, and the model or its settings differ".into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::meter::{Budget, Meter, Price, Spend};
    use crate::remote::{Client, Endpoint, Message};
    use serde_json::json;
    use std::sync::Arc;

    /// What a client would record of these endings of one request.
    fn calls(request: &Value, endings: &[(Outcome, Option<&str>, Option<Class>)]) -> Vec<Call> {
        let one = |(i, (outcome, text, class)): (usize, &(Outcome, Option<&str>, Option<Class>))| {
            Call {
            id: i as u64,
            purpose: "propose".into(),
            model: "m".into(),
            endpoint: "http://127.0.0.1:9/v1".into(),
            attempt: 1,
            outcome: *outcome,
            usage: Usage::default(),
            usd: None,
            request: request.clone(),
            reply: text.map(|text| {
                json!({"choices": [{"message": {"content": text}}], "usage": {"prompt_tokens": 5, "completion_tokens": 2}})
            }),
            error: class.map(|_| "refused".into()),
            class: *class,
        }
        };
        endings.iter().enumerate().map(one).collect()
    }

    fn body(text: &str) -> Value {
        json!({"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 9})
    }

    fn client(recording: &Arc<Recording>, meter: &Arc<Meter>) -> Client {
        // Nothing listens there, and no key is set.
        let endpoint = Endpoint {
            api_key_env: Some("HONE_TEST_NO_SUCH_KEY".into()),
            price: Some(Price { prompt: 1.0, completion: 1.0 }),
            ..Endpoint::new("m", "http://127.0.0.1:9/v1")
        };
        Client::replay(endpoint, Arc::clone(meter), "propose", Arc::clone(recording)).unwrap()
    }

    #[tokio::test]
    async fn the_last_reply_counts_and_every_attempt_is_charged() {
        let endings = [
            (Outcome::Failed, None, Some(Class::Infrastructure)),
            (Outcome::Answered, Some("lost with its process"), None),
            (Outcome::Reserved, None, None),
            (Outcome::Answered, Some("used"), None),
        ];
        let recording = Arc::new(Recording::new(calls(&body("a"), &endings)));
        let meter = Meter::new(Budget { tokens: Some(10_000), usd: None }, Spend::default(), |_| Ok(()));
        let reply = client(&recording, &meter).chat(&[Message::user("a")], None, 9, None).await.unwrap();
        assert_eq!(reply.text, "used");
        let spend = meter.spend();
        assert_eq!((spend.calls, spend.tokens - spend.cut_off_tokens), (4, 14));
        assert!(spend.cut_off_tokens >= 9, "what was cut off stays charged: {spend:?}");
        assert_eq!((recording.len(), recording.left()), (1, 0));
    }

    #[tokio::test]
    async fn a_refusal_is_a_refusal_again() {
        let recording = Arc::new(Recording::new(calls(&body("a"), &[(Outcome::Failed, None, Some(Class::Other))])));
        let failure =
            client(&recording, &Meter::unlimited()).chat(&[Message::user("a")], None, 9, None).await.unwrap_err();
        assert_eq!(failure.class, Class::Other);
    }

    #[tokio::test]
    async fn another_request_gets_no_reply_and_says_where_it_parts() {
        let recording = Arc::new(Recording::new(calls(&body("one\ntwo"), &[(Outcome::Answered, Some("x"), None)])));
        let ask = |text: &str| {
            let client = client(&recording, &Meter::unlimited());
            let text = text.to_string();
            async move { client.chat(&[Message::user(text)], None, 9, None).await.unwrap_err() }
        };
        let failure = ask("one\nthree").await;
        assert_eq!(failure.class, Class::Integrity);
        assert!(failure.message.contains("message 1") && failure.message.contains("line 2"), "{failure}");
        assert!(failure.message.contains("\"two\" then, \"three\" now"), "{failure}");
        assert_eq!(recording.left(), 1, "a wrong question uses nothing up");
    }
}
