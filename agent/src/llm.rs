//! The proposer that asks a language model, over the one metered client. It asks for JSON by schema, accepts JSON however
//! it is wrapped, checks it, and asks once more with the exact problem. What the model says is only ever a proposal: it
//! names edits, and decides, runs and measures nothing.

use hone_evals::mask::Masker;
use hone_evals::model::Finish;
use hone_evals::remote::{ChatReply, Client, Message};
use hone_runs::{Class, Failure, Result};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::edit::{Edit, apply_edits, changes, fingerprint};
use crate::prompt::{Prompts, data};
use crate::proposal::{Observation, Proposal, Proposed, Proposer, Proposing, Usage};
use crate::scope::Scope;

/// Most edits of a proposal: more is not one idea.
const EDITS: usize = 20;
/// Most characters of a title.
const TITLE: usize = 80;

/// A language model as a proposer.
#[derive(Clone, Debug)]
pub struct Llm {
    client: Client,
    max_tokens: usize,
    temperature: Option<f32>,
}

/// What a model answers: a [`Proposal`] without its source.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Answer {
    /// The change in a few words; a branch is named after it.
    title: String,
    /// What in the data suggests the change, and why it should help.
    hypothesis: String,
    /// The edits, applied in order.
    edits: Vec<Edit>,
    /// The expected change of the metric, in its own unit and sign.
    predicted_effect: f64,
    /// For a repeat of something tried: what is different this time.
    #[serde(default)]
    differs: Option<String>,
}

/// Why an answer is not as it should be.
enum Problem {
    /// There is no proposal in it, or one that cannot be carried out.
    Unusable(String),
    /// A proposal that will be refused at admission, and is recorded there if the model insists.
    Inadmissible(String, Box<Proposal>),
}

impl Llm {
    /// Asks through `client`, for at most `max_tokens` a reply; `temperature` None leaves it to the endpoint.
    pub fn new(client: Client, max_tokens: usize, temperature: Option<f32>) -> Self {
        Self { client, max_tokens, temperature }
    }

    /// One reply. Endpoints that refuse the request with a schema are asked without: the prompt holds it, too.
    async fn ask(&self, messages: &[Message], schema: &Value) -> Result<ChatReply> {
        match self.client.chat(messages, Some(schema), self.max_tokens, self.temperature).await {
            Err(refused) if refused.class == Class::Other => {
                tracing::info!("asking again without a schema: {}", refused.message);
                self.client.chat(messages, None, self.max_tokens, self.temperature).await
            }
            other => other,
        }
    }

    async fn converse(&self, observation: &Observation) -> Result<Proposed> {
        let masker = Masker::from_environment::<&str>([]);
        let prompts = Prompts::new(&observation.prompts);
        let schema = schemars::schema_for!(Answer).to_value();
        let data = data(observation, &schema, &masker);
        let system = prompts.render("propose.system.hbs", &data)?;
        let user = prompts.render("propose.user.hbs", &data)?;
        let mut transcript = vec![Message::system(masker.mask(&system)), Message::user(masker.mask(&user))];
        let mut usage = Usage::default();
        let mut turn = 1;
        let answer = loop {
            let reply = match self.ask(&transcript, &schema).await {
                // What the first reply cost is not lost with the second.
                Err(failure) if turn == 2 && failure.class == Class::Budget => break Err(failure),
                reply => reply?,
            };
            self.charge(&mut usage, &reply);
            // Masked before it is understood: what a proposal says is stored, and a replay hears it as it was recorded.
            let reply = ChatReply { text: masker.mask(&reply.text), ..reply };
            transcript.push(Message::assistant(&reply.text));
            let problem = match self.understand(observation, &reply) {
                Ok(proposal) => break Ok(proposal),
                Err(problem) => problem,
            };
            match problem {
                Problem::Unusable(text) if turn == 2 => {
                    break Err(Failure::new(Class::Agent, format!("No usable proposal from {}: {text}", self.model()))
                        .hint(
                            "The round's transcript has both replies. A stronger model, or `max_tokens`, may help.",
                        ));
                }
                // Admission refuses it under its own name.
                Problem::Inadmissible(_, proposal) if turn == 2 => break Ok(*proposal),
                Problem::Unusable(text) | Problem::Inadmissible(text, _) => {
                    let repair = prompts.render("repair.hbs", &json!({ "problem": text }))?;
                    transcript.push(Message::user(masker.mask(&repair)));
                    turn += 1;
                }
            }
        };
        Ok(Proposed { answer, transcript, usage })
    }

    fn model(&self) -> &str {
        &self.client.endpoint().model
    }

    fn charge(&self, usage: &mut Usage, reply: &ChatReply) {
        usage.calls += 1;
        usage.prompt_tokens += reply.usage.prompt_tokens;
        usage.completion_tokens += reply.usage.completion_tokens;
        let price = self.client.endpoint().price;
        usage.usd = price.map(|price| usage.usd.unwrap_or_default() + price.of(reply.usage));
    }

    /// The proposal in a reply, checked as far as can be without running anything.
    fn understand(&self, observation: &Observation, reply: &ChatReply) -> std::result::Result<Proposal, Problem> {
        let unusable = |text: String| Problem::Unusable(text);
        let Some(found) = find_object(&reply.text) else {
            let cut_off = reply.finish == Finish::Length;
            return Err(unusable(if cut_off {
                format!("it was cut off after {} tokens, before its JSON object ended.", reply.usage.completion_tokens)
            } else {
                "it holds no JSON object.".into()
            }));
        };
        let answer: Answer = serde_json::from_value(found)
            .map_err(|e| unusable(format!("the JSON object does not fit the schema: {e}.")))?;
        let flaw = match &answer {
            a if a.title.trim().is_empty() => "`title` is empty.",
            a if a.hypothesis.trim().is_empty() => "`hypothesis` is empty.",
            a if a.edits.is_empty() => "`edits` is empty.",
            a if a.edits.len() > EDITS => "`edits` has more than 20 edits; propose one idea.",
            _ => "",
        };
        if !flaw.is_empty() {
            return Err(unusable(flaw.into()));
        }
        let proposal = Proposal {
            title: crate::digest::cut(&crate::digest::clean(answer.title.trim()), TITLE),
            hypothesis: crate::digest::printable(answer.hypothesis.trim()),
            edits: answer.edits,
            predicted_effect: answer.predicted_effect,
            differs: answer.differs.filter(|d| !d.trim().is_empty()),
            source: format!("llm/{}", self.model()),
        };
        self.check(observation, proposal)
    }

    fn check(&self, observation: &Observation, proposal: Proposal) -> std::result::Result<Proposal, Problem> {
        // An unreadable pattern is the goal's fault; admission names it.
        let scope = Scope::new(&observation.edit, &[]).ok();
        let outside =
            proposal.edits.iter().map(Edit::file).find(|file| scope.as_ref().is_some_and(|s| !s.allows(file)));
        if let Some(file) = outside {
            let text =
                format!("`{file}` may not be edited; only files that match {} may.", observation.edit.join(", "));
            return Err(Problem::Inadmissible(text, Box::new(proposal)));
        }
        let changed = apply_edits(&observation.files, &proposal.edits).map_err(|f| {
            Problem::Unusable(match f.hint {
                Some(hint) => format!("{} {hint}", f.message),
                None => f.message,
            })
        })?;
        let mut after = observation.files.clone();
        for (file, text) in changed {
            match text {
                Some(text) => drop(after.insert(file, text)),
                None => drop(after.remove(&file)),
            }
        }
        let print = fingerprint(&changes(&observation.files, &after));
        let repeat =
            observation.history.iter().find(|past| !past.changes.is_empty() && fingerprint(&past.changes) == print);
        if let (Some(past), None) = (repeat, &proposal.differs) {
            let text = format!(
                "round {} tried exactly this change. Propose another, or say in `differs` what is different now.",
                past.round
            );
            return Err(Problem::Inadmissible(text, Box::new(proposal)));
        }
        Ok(proposal)
    }
}

impl Proposer for Llm {
    fn name(&self) -> &str {
        "llm"
    }

    fn propose<'a>(&'a self, observation: &'a Observation) -> Proposing<'a> {
        Box::pin(self.converse(observation))
    }
}

/// The JSON object in a reply: the whole of it, or in a fence, or the first that is balanced. Of a model that thinks aloud, what
/// comes after the thought. None where there is none.
fn find_object(reply: &str) -> Option<Value> {
    let said = reply.rsplit_once("</think>").map_or(reply, |(_, said)| said).trim();
    let object = |text: &str| serde_json::from_str::<Value>(text.trim()).ok().filter(Value::is_object);
    let fenced = || {
        let parts: Vec<&str> = said.split("```").collect();
        // Odd parts stand inside fences; the first line of each is its language.
        parts.iter().skip(1).step_by(2).find_map(|part| object(part).or_else(|| object(part.split_once('\n')?.1)))
    };
    object(said)
        .or_else(fenced)
        .or_else(|| said.match_indices('{').take(64).find_map(|(at, _)| object(balanced(&said[at..])?)))
}

/// The text up to the brace that closes its first one; braces in strings do not count.
fn balanced(text: &str) -> Option<&str> {
    let (mut depth, mut in_string, mut escaped) = (0, false, false);
    for (at, c) in text.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' if in_string => escaped = true,
            '"' => in_string = !in_string,
            '{' if !in_string => depth += 1,
            '}' if !in_string => {
                depth -= 1;
                if depth == 0 {
                    return Some(&text[..=at]);
                }
            }
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_is_found_however_it_is_wrapped() {
        let object = json!({"a": {"b": "}{ \" ```"}});
        let text = object.to_string();
        let wrapped = [
            text.clone(),
            format!("Sure! Here it is:\n```json\n{}\n```\nGood luck.", json!({"a": {"b": "}{ \" x"}}))
                .replace(" x", " x"),
            format!("I propose {text} because {{of}} reasons."),
            format!("<think>maybe {{\"a\": 1}} or not</think>\n{text}"),
            format!("```\n{}\n```", json!({"a": 1})),
        ];
        for reply in &wrapped {
            assert!(find_object(reply).is_some_and(|v| v.get("a").is_some()), "{reply}");
        }
        assert_eq!(find_object(&wrapped[0]), Some(object.clone()));
        assert_eq!(find_object(&wrapped[2]), Some(object.clone()));
        assert_eq!(find_object(&wrapped[3]), Some(object));
        for reply in ["", "Raise the learning rate.", "{\"a\": 1", "[1, 2]", "{lr: 1}"] {
            assert_eq!(find_object(reply), None, "{reply}");
        }
    }
}
