//! The one client of remote models: OpenAI-compatible chat endpoints. Every call is reserved, made, settled, recorded and masked; has a
//! timeout; is tried again only where that can help; and stops for a while where nothing helps. Local models are not served from here.
//!
//! The library's own retries would hide attempts from the meter, so its calls go through a service that sends once.

mod model;
mod recorded;

pub use model::RemoteModel;
pub use recorded::Recording;

use crate::mask::Masker;
use crate::meter::{Call, Ending, Meter, Outcome, Price, Usage};
use crate::model::Finish;
use crate::task::digest;
use async_openai::config::OpenAIConfig;
use async_openai::error::OpenAIError;
use async_openai::middleware::HttpRequestFactory;
use hone_runs::{Class, Failure, Result, Span, draws};
use rand::RngExt;
use reqwest::StatusCode;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use std::{error::Error, fmt};

/// Where a remote model is and what it costs. `llm:` of a goal.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Endpoint {
    /// The model's name there.
    pub model: String,
    /// The URL up to and with `/v1`.
    #[serde(default = "default_base_url")]
    pub base_url: String,
    /// The environment variable that holds the key. None: no key is sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_key_env: Option<String>,
    /// US dollars a million tokens. None: unpriced, and refused where a budget in dollars is set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub price: Option<Price>,
    /// The longest wait for one reply.
    #[serde(default = "default_timeout")]
    pub timeout: Span,
    /// Attempts at one request, the first included, where trying again can help.
    #[serde(default = "default_attempts")]
    #[schemars(range(min = 1, max = 20))]
    pub attempts: u32,
}

fn default_base_url() -> String {
    "https://api.openai.com/v1".into()
}

fn default_timeout() -> Span {
    Span::seconds(120)
}

fn default_attempts() -> u32 {
    4
}

impl Endpoint {
    /// The endpoint at `base_url` with all else at its default: no key, no price.
    pub fn new(model: impl Into<String>, base_url: impl Into<String>) -> Self {
        Self {
            model: model.into(),
            base_url: base_url.into(),
            api_key_env: None,
            price: None,
            timeout: default_timeout(),
            attempts: default_attempts(),
        }
    }
}

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user` or `assistant`.
    pub role: String,
    /// Its text.
    pub content: String,
}

impl Message {
    /// Instructions.
    pub fn system(content: impl Into<String>) -> Self {
        Self { role: "system".into(), content: content.into() }
    }
    /// A user's words.
    pub fn user(content: impl Into<String>) -> Self {
        Self { role: "user".into(), content: content.into() }
    }
    /// The model's own earlier words.
    pub fn assistant(content: impl Into<String>) -> Self {
        Self { role: "assistant".into(), content: content.into() }
    }
}

/// What a model replied.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatReply {
    /// Its text; empty where it gave none.
    pub text: String,
    /// Why it ended.
    pub finish: Finish,
    /// Tokens, as the server says or as estimated.
    pub usage: Usage,
    /// The model that answered, as the server calls it.
    pub model: String,
}

/// What is asked.
#[derive(Clone, Debug, Default)]
struct Request {
    messages: Vec<Message>,
    json_schema: Option<Value>,
    max_tokens: usize,
    temperature: Option<f32>,
    stop: Vec<String>,
    seed: Option<u32>,
}

/// How long to wait between attempts, and when to stop for a while.
#[derive(Clone, Copy, Debug)]
struct Patience {
    /// Before the second attempt; doubled for each further one.
    first: Duration,
    /// At most this, whatever the server asks for.
    longest: Duration,
    /// This many failed attempts in a row open the circuit.
    failures: u32,
    /// It stays open so long; then one call may try.
    rest: Duration,
}

/// A metered client of one endpoint. Clones share its state.
#[derive(Clone)]
pub struct Client {
    shared: Arc<Shared>,
}

struct Shared {
    endpoint: Endpoint,
    purpose: String,
    api: async_openai::Client<OpenAIConfig>,
    meter: Arc<Meter>,
    masker: Masker,
    patience: Patience,
    circuit: Mutex<Circuit>,
    /// Replies come from here, and nothing is sent.
    recording: Option<Arc<Recording>>,
}

/// Opens after many failures in a row, so that a dead endpoint is not asked again and again.
#[derive(Default)]
struct Circuit {
    failures: u32,
    /// What the last of them said.
    last: String,
    open_until: Option<Instant>,
}

/// A reply that is no success, as the sending service hands it up through the library.
#[derive(Debug)]
struct Rejection {
    status: StatusCode,
    retry_after: Option<Duration>,
    body: String,
}

impl fmt::Display for Rejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "status {}", self.status)
    }
}

impl Error for Rejection {}

/// Why an attempt gave no reply.
struct Setback {
    failure: Failure,
    /// Trying again can help; the server may have said when.
    again: Option<Option<Duration>>,
    /// The model may have worked for it.
    cut_off: bool,
}

/// Of a rejection's body no more than this is read or shown.
const SHOWN: usize = 500;

impl Client {
    /// A client of `endpoint` whose calls are charged to `meter` as `purpose` (`propose`, `eval`, …). Nothing is sent yet.
    ///
    /// # Errors
    /// [`Class::Usage`] where the URL is none or the key's variable is not set; [`Class::Infrastructure`] where no TLS can be set up.
    pub fn new(endpoint: Endpoint, meter: Arc<Meter>, purpose: &str) -> Result<Self> {
        Self::build(endpoint, meter, purpose, None)
    }

    /// A client that sends nothing: every reply is one of `recording`, found by what was asked, and charged as it was then. It needs no key.
    ///
    /// # Errors
    /// As [`Client::new`].
    pub fn replay(endpoint: Endpoint, meter: Arc<Meter>, purpose: &str, recording: Arc<Recording>) -> Result<Self> {
        Self::build(Endpoint { api_key_env: None, ..endpoint }, meter, purpose, Some(recording))
    }

    fn build(endpoint: Endpoint, meter: Arc<Meter>, purpose: &str, recording: Option<Arc<Recording>>) -> Result<Self> {
        let key = key(&endpoint)?;
        let url = reqwest::Url::parse(&endpoint.base_url).ok().filter(|url| matches!(url.scheme(), "http" | "https"));
        let Some(url) = url else {
            let message = format!("`{}` is no http or https URL.", endpoint.base_url);
            return Err(
                Failure::new(Class::Usage, message).hint("set `base_url`, for example http://127.0.0.1:8000/v1")
            );
        };
        let http = http_client(&endpoint, url.scheme() == "https" && recording.is_none())?;
        // Organisation and project headers, which the library takes from the environment, are no business of other endpoints.
        let config = OpenAIConfig::new()
            .with_api_base(endpoint.base_url.trim_end_matches('/'))
            .with_api_key(key.clone().unwrap_or_default())
            .with_org_id("")
            .with_project_id("");
        let has_key = key.is_some();
        let service = tower::service_fn(move |request: HttpRequestFactory| send_once(http.clone(), request, has_key));
        let api = async_openai::Client::with_config(config).with_http_service(service);
        let failures = 2 * endpoint.attempts.max(1);
        let seconds = Duration::from_secs;
        let patience =
            Patience { first: Duration::from_millis(500), longest: seconds(30), failures, rest: seconds(60) };
        let masker = Masker::from_environment(key);
        let purpose = purpose.to_string();
        let circuit = Mutex::default();
        let shared = Shared { endpoint, purpose, api, meter, masker, patience, circuit, recording };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Where it calls.
    pub fn endpoint(&self) -> &Endpoint {
        &self.shared.endpoint
    }

    /// Asks for one reply of at most `max_tokens` to `messages`; `json_schema` asks for JSON of that schema, which the caller still
    /// checks, since not every server honours it. `temperature` None leaves it to the server. Secrets in the messages are masked.
    ///
    /// # Errors
    /// [`Class::Infrastructure`]: unreachable, no answer in time, rate-limited or broken after all attempts, or an unusable reply;
    /// [`Class::Budget`]: the budget does not hold it, here or at the provider; [`Class::Usage`]: key, URL or model are refused;
    /// [`Class::Other`]: the request is refused.
    pub async fn chat(
        &self,
        messages: &[Message],
        json_schema: Option<&Value>,
        max_tokens: usize,
        temperature: Option<f32>,
    ) -> Result<ChatReply> {
        let messages = messages.to_vec();
        self.ask(Request { messages, json_schema: json_schema.cloned(), max_tokens, temperature, ..Request::default() })
            .await
    }

    async fn ask(&self, request: Request) -> Result<ChatReply> {
        let shared = &*self.shared;
        let (body, worst) = shared.body(&request);
        if let Some(recording) = &shared.recording {
            return shared.recall(recording, &body, worst);
        }
        let mut attempt = 1;
        loop {
            shared.admit()?;
            let setback = match shared.attempt(&body, worst, attempt).await? {
                Ok(reply) => return Ok(reply),
                Err(setback) => setback,
            };
            let Some(asked) = setback.again.filter(|_| attempt < shared.endpoint.attempts) else {
                let mut failure = setback.failure;
                if attempt > 1 {
                    failure.message = format!("{} ({attempt} attempts)", failure.message.trim_end_matches('.')) + ".";
                }
                return Err(failure);
            };
            tracing::info!("attempt {attempt} at {}: {}", shared.endpoint.base_url, setback.failure.message);
            tokio::time::sleep(shared.delay(&body, attempt, asked)).await;
            attempt += 1;
        }
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("endpoint", &self.shared.endpoint)
            .field("purpose", &self.shared.purpose)
            .finish()
    }
}

impl Shared {
    /// The request's body, and the most it can use. Tokens sent are estimated from above: a third of the bytes (English and code have
    /// four or more bytes a token), and 16 a message for the template.
    fn body(&self, request: &Request) -> (Value, Usage) {
        let messages: Vec<Value> = request
            .messages
            .iter()
            .map(|message| json!({"role": message.role, "content": self.masker.mask(&message.content)}))
            .collect();
        let mut body = json!({"model": self.endpoint.model, "messages": messages});
        // OpenAI's own newer models take only the newer name, most other servers only the older.
        let is_openai = self.endpoint.base_url.contains("://api.openai.com");
        body[if is_openai { "max_completion_tokens" } else { "max_tokens" }] = request.max_tokens.into();
        if let Some(temperature) = request.temperature {
            // By way of text: 0.7 and not 0.699999988079071.
            body["temperature"] = temperature.to_string().parse::<f64>().unwrap_or_default().into();
        }
        if !request.stop.is_empty() {
            body["stop"] = json!(request.stop);
        }
        if let Some(seed) = request.seed {
            body["seed"] = seed.into();
        }
        if let Some(schema) = &request.json_schema {
            body["response_format"] =
                json!({"type": "json_schema", "json_schema": {"name": "reply", "schema": schema}});
        }
        let schema_bytes = request.json_schema.as_ref().map_or(0, |schema| schema.to_string().len());
        let bytes = messages.iter().filter_map(|m| m["content"].as_str()).map(str::len).sum::<usize>() + schema_bytes;
        let prompt_tokens = bytes.div_ceil(3) as u64 + 16 * messages.len() as u64;
        (body, Usage { prompt_tokens, completion_tokens: request.max_tokens as u64, estimated: true })
    }

    /// One attempt: reserve, call, settle, record. The outer error is the meter's or the record's, and final.
    async fn attempt(
        &self,
        body: &Value,
        worst: Usage,
        attempt: u32,
    ) -> Result<std::result::Result<ChatReply, Setback>> {
        let reservation = self.meter.reserve(self.call(body, worst, attempt), self.endpoint.price)?;
        // The HTTP client has the same limit; this one holds whatever it does.
        let limit = self.endpoint.timeout.duration() + Duration::from_secs(5);
        let answer = match tokio::time::timeout(limit, self.api.chat().create_byot::<_, Value>(body)).await {
            Ok(answer) => answer.map_err(|error| self.setback(&error)),
            Err(_) => Err(self.too_slow()),
        };
        match answer {
            Ok(reply) => {
                self.count(None);
                let parsed = parse(&reply, worst.prompt_tokens);
                let usage = Some(parsed.as_ref().map_or(worst, |reply| reply.usage));
                let reply = Some(self.masker.mask_json(&reply));
                let error = parsed.is_none().then(|| "no message".to_string());
                reservation.settle(Ending { outcome: Outcome::Answered, usage, reply, error, class: None })?;
                Ok(parsed.ok_or_else(|| Setback { failure: self.silent(), again: None, cut_off: false }))
            }
            Err(setback) => {
                self.count(setback.again.is_some().then_some(setback.failure.message.as_str()));
                let (error, class) = (Some(setback.failure.message.clone()), Some(setback.failure.class));
                let (outcome, usage) =
                    if setback.cut_off { (Outcome::CutOff, None) } else { (Outcome::Failed, Some(Usage::default())) };
                reservation.settle(Ending { outcome, usage, reply: None, error, class })?;
                Ok(Err(setback))
            }
        }
    }

    /// A call that is about to be made.
    fn call(&self, body: &Value, worst: Usage, attempt: u32) -> Call {
        Call {
            id: 0,
            purpose: self.purpose.clone(),
            model: self.endpoint.model.clone(),
            endpoint: self.masker.mask(&self.endpoint.base_url),
            attempt,
            outcome: Outcome::Reserved,
            usage: worst,
            usd: None,
            request: body.clone(),
            reply: None,
            error: None,
            class: None,
        }
    }

    /// Refuses while the circuit is open; lets one call through when its rest is over.
    fn admit(&self) -> Result<()> {
        let mut circuit = self.circuit.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(until) = circuit.open_until else { return Ok(()) };
        let now = Instant::now();
        if now >= until {
            circuit.open_until = Some(now + self.patience.rest);
            return Ok(());
        }
        let message = format!(
            "{} failed {} times in a row and is left alone for now; the last time: {}",
            self.endpoint.base_url, circuit.failures, circuit.last
        );
        Err(Failure::new(Class::Infrastructure, self.masker.mask(&message))
            .hint(format!("check the endpoint; it is tried again in {} s", (until - now).as_secs() + 1)))
    }

    /// Counts an attempt: `dead` is the error of one that is worth another try. Whatever is not shows that the endpoint is
    /// alive.
    fn count(&self, dead: Option<&str>) {
        let mut circuit = self.circuit.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(error) = dead else {
            *circuit = Circuit::default();
            return;
        };
        circuit.failures += 1;
        circuit.last = error.to_string();
        if circuit.failures >= self.patience.failures {
            circuit.open_until = Some(Instant::now() + self.patience.rest);
        }
    }

    /// Doubles with each attempt, and is spread over half of itself so that clients do not come back all at once; or what the server
    /// asked for.
    fn delay(&self, body: &Value, attempt: u32, asked: Option<Duration>) -> Duration {
        let key = digest(&[&body.to_string()]);
        let seed = u64::from_str_radix(&key[..16], 16).unwrap_or_default();
        let spread = draws(seed, "backoff", attempt.into(), 0).random_range(0.5..1.0);
        let backoff = self.patience.first.saturating_mul(1 << (attempt - 1).min(16)).mul_f64(spread);
        asked.unwrap_or_default().max(backoff).min(self.patience.longest)
    }

    fn silent(&self) -> Failure {
        let message = format!("The reply of {} holds no message.", self.endpoint.base_url);
        Failure::new(Class::Infrastructure, self.masker.mask(&message))
            .hint("check that `base_url` is an OpenAI-compatible endpoint (…/v1)")
    }

    fn too_slow(&self) -> Setback {
        let message = format!("{} did not answer within {}.", self.endpoint.base_url, self.endpoint.timeout);
        let failure = Failure::new(Class::Infrastructure, self.masker.mask(&message))
            .hint("raise `timeout`, or check whether the server is overloaded");
        Setback { failure, again: Some(None), cut_off: true }
    }

    fn setback(&self, error: &OpenAIError) -> Setback {
        let url = &self.endpoint.base_url;
        match error {
            OpenAIError::Boxed(boxed) => match boxed.downcast_ref::<Rejection>() {
                Some(rejection) => self.rejected(rejection),
                None => self.broken(format!("Calling {url} failed: {boxed}."), true),
            },
            OpenAIError::Reqwest(error) if error.is_connect() => {
                self.broken(format!("Cannot reach {url}: {}.", innermost(error)), false)
            }
            OpenAIError::Reqwest(error) if error.is_timeout() => self.too_slow(),
            OpenAIError::Reqwest(error) => {
                self.broken(format!("The connection to {url} broke: {}.", innermost(error)), true)
            }
            // The server answered, and would answer so again.
            other => {
                let shown: String = other.to_string().chars().take(SHOWN).collect();
                let setback = self.broken(format!("The reply of {url} cannot be read: {shown}."), true);
                Setback { again: None, ..setback }
            }
        }
    }

    fn broken(&self, message: String, cut_off: bool) -> Setback {
        let failure = Failure::new(Class::Infrastructure, self.masker.mask(&message))
            .hint("check `base_url`, that the server runs, and the network");
        Setback { failure, again: Some(None), cut_off }
    }

    fn rejected(&self, rejection: &Rejection) -> Setback {
        let (status, url) = (rejection.status.as_u16(), &self.endpoint.base_url);
        let body: Value = serde_json::from_str(&rejection.body).unwrap_or_default();
        let said = body["error"]["message"].as_str().or(body["message"].as_str()).unwrap_or(&rejection.body);
        // One line, bounded: it is the server's text, quoted.
        let said: String = said.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(SHOWN).collect();
        let said = if said.is_empty() { "it gave no reason".to_string() } else { format!("\"{said}\"") };
        let is_quota = ["type", "code"].iter().any(|key| body["error"][*key] == "insufficient_quota");
        let variable = self.endpoint.api_key_env.as_deref().unwrap_or("(none set)");
        let (class, what, hint, again) = match status {
            429 if is_quota => (
                Class::Budget,
                "says that the account's quota is used up",
                "see to the account, or use another model".into(),
                false,
            ),
            429 => (Class::Infrastructure, "limits the rate of calls", "wait, or use fewer calls at once".into(), true),
            408 | 500..=599 => {
                (Class::Infrastructure, "failed", "the server is at fault or overloaded: try later".into(), true)
            }
            401 | 403 => (
                Class::Usage,
                "refused the key",
                format!("check the environment variable of `api_key_env`: {variable}"),
                false,
            ),
            404 => (
                Class::Usage,
                "was not found",
                "check `base_url` (it ends in /v1) and the `model`'s name".to_string(),
                false,
            ),
            300..=399 => (
                Class::Usage,
                "redirects elsewhere, which is not followed",
                "set `base_url` to the final address".into(),
                false,
            ),
            _ => (
                Class::Other,
                "refused the request",
                "the server's own words say why; the model may not support what was asked".into(),
                false,
            ),
        };
        let message = format!("{url} {what} (status {status}): {said}.");
        let failure = Failure::new(class, self.masker.mask(&message)).hint(hint);
        Setback { failure, again: again.then_some(rejection.retry_after), cut_off: false }
    }
}

/// The key, where one is named.
fn key(endpoint: &Endpoint) -> Result<Option<String>> {
    let Some(name) = &endpoint.api_key_env else { return Ok(None) };
    let hint = format!("set it: `export {name}=…`; for a server without keys leave out `api_key_env`");
    let value = std::env::var(name).unwrap_or_default().trim().to_string();
    if value.is_empty() {
        return Err(Failure::new(Class::Usage, format!("The environment variable {name} is not set.")).hint(hint));
    }
    if !value.bytes().all(|b| b.is_ascii_graphic()) {
        return Err(Failure::new(Class::Usage, format!("The environment variable {name} holds no key.")).hint(hint));
    }
    Ok(Some(value))
}

fn http_client(endpoint: &Endpoint, tls: bool) -> Result<reqwest::Client> {
    // Someone may have installed one already; then that one serves.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let builder = reqwest::Client::builder()
        .user_agent(concat!("hone/", env!("CARGO_PKG_VERSION")))
        .connect_timeout(Duration::from_secs(10))
        .timeout(endpoint.timeout.duration())
        .redirect(reqwest::redirect::Policy::none());
    // Plain http needs no certificates, and must work where none are installed.
    let builder = if tls { builder } else { builder.tls_certs_only([]) };
    builder.build().map_err(|e| {
        Failure::new(Class::Infrastructure, format!("No secure connections can be made: {}.", innermost(&e)))
            .hint("install the system's CA certificates (the package ca-certificates)")
    })
}

/// Sends a request exactly once.
async fn send_once(
    http: reqwest::Client,
    request: HttpRequestFactory,
    has_key: bool,
) -> std::result::Result<reqwest::Response, OpenAIError> {
    let mut request = request.build().await?;
    if !has_key {
        request.headers_mut().remove(reqwest::header::AUTHORIZATION);
    }
    let mut response = http.execute(request).await?;
    let status = response.status();
    if status.is_success() {
        return Ok(response);
    }
    let retry_after = response.headers().get(reqwest::header::RETRY_AFTER).and_then(|value| value.to_str().ok());
    let retry_after = retry_after.and_then(|seconds| seconds.trim().parse().ok()).map(Duration::from_secs);
    let mut body = Vec::new();
    // The status says enough where the body cannot be read.
    while let Ok(Some(chunk)) = response.chunk().await {
        body.extend_from_slice(&chunk);
        if body.len() > 64 * 1024 {
            break;
        }
    }
    let body = String::from_utf8_lossy(&body).into_owned();
    Err(OpenAIError::Boxed(Box::new(Rejection { status, retry_after, body })))
}

/// What lies at the bottom of an error, which says most.
fn innermost(error: &dyn Error) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string().trim_end_matches('.').to_string()
}

/// A reply from its JSON, with whatever a lesser server leaves out.
fn parse(reply: &Value, prompt_tokens: u64) -> Option<ChatReply> {
    let choice = &reply["choices"][0];
    let message = choice["message"].as_object()?;
    let text = match message.get("content") {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => parts.iter().filter_map(|part| part["text"].as_str()).collect(),
        _ => String::new(),
    };
    let said = &reply["usage"];
    let usage = match (said["prompt_tokens"].as_u64(), said["completion_tokens"].as_u64()) {
        (Some(prompt_tokens), Some(completion_tokens)) => Usage { prompt_tokens, completion_tokens, estimated: false },
        _ => Usage { prompt_tokens, completion_tokens: text.len().div_ceil(3) as u64, estimated: true },
    };
    let finish = if choice["finish_reason"] == "length" { Finish::Length } else { Finish::Stop };
    let model = reply["model"].as_str().unwrap_or_default().to_string();
    Some(ChatReply { text, finish, usage, model })
}

#[cfg(test)]
mod tests;
