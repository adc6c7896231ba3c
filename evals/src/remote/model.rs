//! A remote model as evals see it: completions over a chat endpoint. The calls themselves are the client's.

use super::{ChatReply, Client, Message, Request};
use crate::model::{Completion, Finish, LanguageModel, Sampling, TextScore};
use crate::task::digest;
use hone_runs::{Class, Failure, Result};
use serde_json::{Map, Value};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::Semaphore;

/// A remote model as evals see it. Prompts go as a user's message; the server applies its own chat template.
pub struct RemoteModel {
    client: Client,
    parallel: usize,
    /// Its own, so that it can be called from any thread; None once it is dropped.
    runtime: Option<tokio::runtime::Runtime>,
}

impl RemoteModel {
    /// Evaluates through `client` with at most `parallel` calls at once.
    ///
    /// # Errors
    /// [`Class::Infrastructure`] where no thread can be started.
    pub fn new(client: Client, parallel: usize) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime =
            runtime.map_err(|e| Failure::new(Class::Infrastructure, format!("Cannot start a thread: {e}.")))?;
        Ok(Self { client, parallel: parallel.max(1), runtime: Some(runtime) })
    }
}

impl Drop for RemoteModel {
    fn drop(&mut self) {
        // Waiting for it would panic where this is dropped inside another runtime.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl LanguageModel for RemoteModel {
    /// Servers that honour `seed` answer alike for equal seeds; many do not.
    fn complete(&self, prompts: &[String], sampling: &Sampling, seed: u64) -> Result<Vec<Vec<Completion>>> {
        let runtime = self.runtime.as_ref().expect("there until drop");
        let (room, failed) = (Arc::new(Semaphore::new(self.parallel)), Arc::new(AtomicBool::new(false)));
        let (sender, receiver) = std::sync::mpsc::channel();
        for (p, prompt) in prompts.iter().enumerate() {
            for i in 0..sampling.k {
                let key = digest(&["sample", &seed.to_string(), prompt, &i.to_string()]);
                let request = Request {
                    messages: vec![Message::user(prompt)],
                    max_tokens: sampling.max_tokens,
                    temperature: Some(sampling.temperature),
                    stop: sampling.stop.clone(),
                    seed: u32::from_str_radix(&key[..8], 16).ok().map(|seed| seed >> 1),
                    json_schema: None,
                };
                let (client, room, failed, sender) =
                    (self.client.clone(), Arc::clone(&room), Arc::clone(&failed), sender.clone());
                runtime.spawn(async move {
                    let Ok(_permit) = room.acquire().await else { return };
                    // After a failure no further call is begun; those under way are paid for and awaited.
                    if failed.load(Ordering::Relaxed) {
                        return;
                    }
                    let reply = client.ask(request).await;
                    failed.fetch_or(reply.is_err(), Ordering::Relaxed);
                    let _ = sender.send((p, i, reply));
                });
            }
        }
        drop(sender);
        let mut found: Vec<Vec<Option<Completion>>> = prompts.iter().map(|_| vec![None; sampling.k]).collect();
        let mut failure = None;
        // Ends when the last task has dropped its sender.
        for (p, i, reply) in receiver {
            match reply {
                Ok(reply) => found[p][i] = Some(completion(reply, &sampling.stop)),
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        if let Some(failure) = failure {
            return Err(failure);
        }
        let all: Option<Vec<Vec<Completion>>> = found.into_iter().map(|row| row.into_iter().collect()).collect();
        all.ok_or_else(|| Failure::new(Class::Infrastructure, "A call to the remote model was lost.").hint("try again"))
    }

    fn score(&self, _texts: &[String]) -> Result<Vec<TextScore>> {
        let message = format!(
            "{} cannot score texts: chat endpoints give no log-probs of a prompt.",
            self.client.endpoint().base_url
        );
        Err(Failure::new(Class::Usage, message).hint("evaluate text tasks on a local checkpoint (`--model`)"))
    }

    fn chat(&self, message: &str) -> Result<String> {
        Ok(message.to_string())
    }

    fn identity(&self) -> Map<String, Value> {
        let endpoint = self.client.endpoint();
        Map::from_iter([
            ("model".into(), endpoint.model.as_str().into()),
            ("engine".into(), "chat completions".into()),
            ("endpoint".into(), self.client.shared.masker.mask(&endpoint.base_url).into()),
        ])
    }
}

/// A reply as a completion. Servers may ignore `stop`, so the text is cut here too.
fn completion(reply: ChatReply, stop: &[String]) -> Completion {
    let cut = stop.iter().filter(|stop| !stop.is_empty()).filter_map(|stop| reply.text.find(stop.as_str())).min();
    let finish = if cut.is_some() { Finish::Stop } else { reply.finish };
    let text = reply.text[..cut.unwrap_or(reply.text.len())].to_string();
    Completion { text, tokens: usize::try_from(reply.usage.completion_tokens).unwrap_or(usize::MAX), finish }
}
