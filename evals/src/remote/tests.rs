//! Tests of the remote client against scripted servers.

use super::*;
use crate::evaluate::evaluate;
use crate::mask::MASK;
use crate::meter::{Budget, Spend};
use crate::model::{LanguageModel, Sampling};
use crate::suite::{Subset, Suite};
use wiremock::matchers::{body_partial_json, header, method, path};
use wiremock::{Mock, MockServer, Request as Received, ResponseTemplate};

fn good(text: &str) -> ResponseTemplate {
    ResponseTemplate::new(200).set_body_json(json!({
        "model": "served", "choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 11, "completion_tokens": 3}
    }))
}

fn refusal(status: u16, message: &str) -> ResponseTemplate {
    ResponseTemplate::new(status).set_body_json(json!({"error": {"message": message, "type": "x"}}))
}

async fn serve(replies: Vec<ResponseTemplate>) -> MockServer {
    let server = MockServer::start().await;
    // Each reply once, in order; the last for ever.
    let last = replies.len() - 1;
    for (i, reply) in replies.into_iter().enumerate() {
        let mock = Mock::given(method("POST"))
            .and(path("/v1/chat/completions"))
            .respond_with(reply)
            .with_priority(i as u8 + 1);
        if i < last { mock.up_to_n_times(1).mount(&server).await } else { mock.mount(&server).await }
    }
    server
}

type Calls = Arc<Mutex<Vec<Call>>>;

fn recorded(budget: Budget) -> (Arc<Meter>, Calls) {
    let calls = Calls::default();
    let into = Arc::clone(&calls);
    let meter = Meter::new(budget, Spend::default(), move |call| {
        into.lock().unwrap().push(call.clone());
        Ok(())
    });
    (meter, calls)
}

/// A client without patience.
fn client(endpoint: Endpoint, meter: Arc<Meter>) -> Client {
    let mut client = Client::new(endpoint, meter, "test").unwrap();
    let patience = &mut Arc::get_mut(&mut client.shared).unwrap().patience;
    patience.first = Duration::from_millis(1);
    patience.longest = Duration::from_millis(5);
    client
}

fn endpoint(server: &MockServer) -> Endpoint {
    Endpoint::new("m", format!("{}/v1", server.uri()))
}

async fn ask(client: &Client) -> Result<ChatReply> {
    client.chat(&[Message::system("be brief"), Message::user("hello")], None, 20, Some(0.7)).await
}

async fn received(server: &MockServer) -> usize {
    server.received_requests().await.unwrap().len()
}

#[tokio::test]
async fn a_good_reply_is_charged_and_recorded() {
    let server = serve(vec![good("hi")]).await;
    let (meter, calls) = recorded(Budget::default());
    let endpoint = Endpoint { price: Some(Price { prompt: 1.0, completion: 2.0 }), ..endpoint(&server) };
    let schema = json!({"type": "object"});
    let reply = client(endpoint, Arc::clone(&meter))
        .chat(&[Message::user("hello")], Some(&schema), 20, Some(0.7))
        .await
        .unwrap();
    assert_eq!((reply.text.as_str(), reply.model.as_str(), reply.finish), ("hi", "served", Finish::Stop));
    assert_eq!(reply.usage, Usage { prompt_tokens: 11, completion_tokens: 3, estimated: false });
    assert_eq!(meter.spend().tokens, 14);
    assert!((meter.spend().usd - 17e-6).abs() < 1e-15);
    let sent: Value = server.received_requests().await.unwrap()[0].body_json().unwrap();
    assert_eq!((sent["temperature"].to_string(), sent["max_tokens"].as_u64()), ("0.7".to_string(), Some(20)));
    assert_eq!(sent["response_format"]["json_schema"]["schema"], schema);
    let calls = calls.lock().unwrap();
    assert_eq!(calls.iter().map(|call| call.outcome).collect::<Vec<_>>(), [Outcome::Reserved, Outcome::Answered]);
    assert!(calls[0].usage.tokens() >= 14 && calls[0].usage.estimated, "the reservation is the worst case");
    assert_eq!(calls[1].reply.as_ref().unwrap()["choices"][0]["message"]["content"], "hi");
}

#[tokio::test]
async fn rate_limits_and_server_errors_are_tried_again() {
    for first in [
        refusal(429, "slow down"),
        ResponseTemplate::new(503).set_body_string("<html>busy</html>"),
        refusal(408, "late"),
    ] {
        let server = serve(vec![first, good("hi")]).await;
        let (meter, calls) = recorded(Budget::default());
        assert_eq!(ask(&client(endpoint(&server), Arc::clone(&meter))).await.unwrap().text, "hi");
        assert_eq!((received(&server).await, meter.spend().calls, meter.spend().tokens), (2, 2, 14));
        assert_eq!(calls.lock().unwrap()[1].outcome, Outcome::Failed);
        assert_eq!(calls.lock().unwrap()[3].attempt, 2);
    }
}

#[tokio::test]
async fn a_server_that_stays_broken_is_given_up() {
    let server = serve(vec![refusal(500, "oh no")]).await;
    let failure = ask(&client(endpoint(&server), Meter::unlimited())).await.unwrap_err();
    assert_eq!((failure.class, received(&server).await), (Class::Infrastructure, 4));
    assert!(failure.message.contains("oh no") && failure.message.contains("4 attempts"), "{failure}");
}

#[tokio::test]
async fn other_refusals_are_final() {
    for (status, class) in
        [(400, Class::Other), (422, Class::Other), (401, Class::Usage), (404, Class::Usage), (302, Class::Usage)]
    {
        let server = serve(vec![refusal(status, "because")]).await;
        let failure = ask(&client(endpoint(&server), Meter::unlimited())).await.unwrap_err();
        assert_eq!((failure.class, received(&server).await), (class, 1), "{status}");
        assert!(failure.message.contains("because") && failure.hint.is_some(), "{failure}");
    }
    let quota = json!({"error": {"message": "no more", "type": "insufficient_quota"}});
    let server = serve(vec![ResponseTemplate::new(429).set_body_json(quota)]).await;
    let failure = ask(&client(endpoint(&server), Meter::unlimited())).await.unwrap_err();
    assert_eq!((failure.class, received(&server).await), (Class::Budget, 1));
}

#[tokio::test]
async fn a_timeout_is_tried_again_and_stays_charged() {
    let server = serve(vec![good("late").set_delay(Duration::from_secs(20))]).await;
    let (meter, calls) = recorded(Budget::default());
    let endpoint = Endpoint { timeout: Span::new(Duration::from_millis(80)), attempts: 2, ..endpoint(&server) };
    let failure = ask(&client(endpoint, Arc::clone(&meter))).await.unwrap_err();
    assert_eq!(failure.class, Class::Infrastructure);
    assert!(failure.message.contains("did not answer within 80ms"), "{failure}");
    let reserved = calls.lock().unwrap()[0].usage.tokens();
    assert_eq!((meter.spend().tokens, meter.spend().cut_off_tokens), (2 * reserved, 2 * reserved));
}

#[tokio::test]
async fn an_unreachable_endpoint_says_so() {
    // A port that was free a moment ago.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let meter = Meter::unlimited();
    let failure =
        ask(&client(Endpoint::new("m", format!("http://127.0.0.1:{port}/v1")), Arc::clone(&meter))).await.unwrap_err();
    assert_eq!((failure.class, meter.spend().tokens), (Class::Infrastructure, 0));
    assert!(failure.message.contains("Cannot reach") && failure.hint.unwrap().contains("base_url"));
}

#[tokio::test]
async fn a_dead_endpoint_is_left_alone() {
    let server = serve(vec![refusal(500, "dead")]).await;
    let mut client = client(endpoint(&server), Meter::unlimited());
    Arc::get_mut(&mut client.shared).unwrap().patience.rest = Duration::from_secs(3600);
    for _ in 0..5 {
        assert!(ask(&client).await.is_err());
    }
    assert_eq!(received(&server).await, 8, "two calls of four attempts, then none");
    let failure = ask(&client).await.unwrap_err();
    assert!(failure.message.contains("left alone"), "{failure}");
    assert!(failure.message.ends_with("failed (status 500): \"dead\"."), "the cause is kept: {failure}");
    // When the rest is over one call may try, and its success closes the circuit.
    client.shared.circuit.lock().unwrap().open_until = Some(Instant::now());
    server.reset().await;
    Mock::given(method("POST")).respond_with(good("back")).mount(&server).await;
    assert_eq!(ask(&client).await.unwrap().text, "back");
    assert_eq!(ask(&client).await.unwrap().text, "back");
}

#[tokio::test]
async fn an_open_circuit_says_that_the_connection_was_refused() {
    // A port that was free a moment ago.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let client = client(Endpoint::new("m", format!("http://127.0.0.1:{port}/v1")), Meter::unlimited());
    for _ in 0..2 {
        assert!(ask(&client).await.is_err());
    }
    let message = ask(&client).await.unwrap_err().message;
    assert!(message.contains("8 times in a row") && message.contains("Cannot reach"), "{message}");
    assert!(message.to_lowercase().contains("refused"), "{message}");
}

#[tokio::test]
async fn the_budget_is_a_hard_stop() {
    let server = serve(vec![good("hi")]).await;
    let (meter, _) = recorded(Budget { tokens: Some(200), usd: None });
    let client = client(endpoint(&server), Arc::clone(&meter));
    let failure = loop {
        match ask(&client).await {
            Ok(_) => assert!(meter.spend().tokens <= 200),
            Err(failure) => break failure,
        }
    };
    assert_eq!(failure.class, Class::Budget);
    let sent = received(&server).await;
    assert!(sent > 2 && meter.spend().tokens == 14 * sent as u64 && meter.spend().tokens <= 200);
    let usd = Meter::new(Budget { tokens: None, usd: Some(5.0) }, Spend::default(), |_| Ok(()));
    let failure = ask(&self::client(endpoint(&server), usd)).await.unwrap_err();
    assert!(failure.message.contains("no known price"), "{failure}");
    assert_eq!(received(&server).await, sent, "nothing was sent");
}

#[tokio::test]
async fn lesser_servers_may_leave_things_out() {
    let bare = ResponseTemplate::new(200).set_body_json(json!({"choices": [{"message": {"content": "seven!!"}}]}));
    let server = serve(vec![bare]).await;
    let reply = ask(&client(endpoint(&server), Meter::unlimited())).await.unwrap();
    assert_eq!((reply.text.as_str(), reply.usage.completion_tokens, reply.usage.estimated), ("seven!!", 3, true));
    assert!(reply.usage.prompt_tokens > 4);
    let parts =
        json!({"choices": [{"message": {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}}]});
    let server = serve(vec![ResponseTemplate::new(200).set_body_json(parts)]).await;
    assert_eq!(ask(&client(endpoint(&server), Meter::unlimited())).await.unwrap().text, "ab");
    for unusable in [
        ResponseTemplate::new(200).set_body_string("not json"),
        ResponseTemplate::new(200).set_body_json(json!({"ok": 1})),
    ] {
        let server = serve(vec![unusable]).await;
        let failure = ask(&client(endpoint(&server), Meter::unlimited())).await.unwrap_err();
        assert_eq!((failure.class, received(&server).await), (Class::Infrastructure, 1), "{failure}");
    }
}

#[tokio::test]
async fn the_key_is_sent_and_shows_nowhere() {
    const KEY: &str = "test-key-0a1b2c3d4e5f";
    // SAFETY: nothing else in this process reads or writes this variable.
    unsafe { std::env::set_var("HONE_TEST_API_KEY", KEY) };
    let server = MockServer::start().await;
    let echo = |request: &Received| {
        let key = request.headers["authorization"].to_str().unwrap().to_string();
        refusal(400, &format!("bad {key} and {}", request.url))
    };
    Mock::given(header("authorization", format!("Bearer {KEY}").as_str())).respond_with(echo).mount(&server).await;
    let (meter, calls) = recorded(Budget::default());
    let client = client(Endpoint { api_key_env: Some("HONE_TEST_API_KEY".into()), ..endpoint(&server) }, meter);
    let failure = client.chat(&[Message::user(format!("my key is {KEY}"))], None, 5, None).await.unwrap_err();
    assert!(failure.message.contains(MASK) && !failure.to_string().contains(KEY), "{failure}");
    let records = serde_json::to_string(&*calls.lock().unwrap()).unwrap();
    assert!(records.contains(MASK) && !records.contains(KEY), "{records}");
    let sent = String::from_utf8(server.received_requests().await.unwrap()[0].body.clone()).unwrap();
    assert!(sent.contains("my key is [masked]"), "{sent}");
    assert!(!format!("{client:?}").contains(KEY));
}

#[test]
fn unusable_endpoints_are_refused_before_anything_is_sent() {
    let new = |endpoint| Client::new(endpoint, Meter::unlimited(), "test").unwrap_err();
    let unset = Endpoint { api_key_env: Some("HONE_TEST_UNSET".into()), ..Endpoint::new("m", "http://h/v1") };
    let failure = new(unset);
    assert_eq!(failure.class, Class::Usage);
    assert!(failure.message.contains("HONE_TEST_UNSET is not set"));
    assert!(new(Endpoint::new("m", "ftp://h")).message.contains("no http or https URL"));
}

#[test]
fn goals_name_endpoints_in_yaml() {
    let text = "model: m\nbase_url: http://127.0.0.1:1/v1\ntimeout: 30s\nprice: {prompt: 0.1, completion: 0.4}\n";
    let endpoint: Endpoint = hone_runs::config::parse(text, "goal.yaml").unwrap();
    assert_eq!((endpoint.timeout, endpoint.attempts), (Span::seconds(30), 4));
    assert!(hone_runs::config::parse::<Endpoint>("model: m\nbase_ulr: x\n", "goal.yaml").is_err());
}

/// A remote model that adds.
async fn adder() -> MockServer {
    let server = MockServer::start().await;
    let add = |request: &Received| {
        let body: Value = request.body_json().unwrap();
        let prompt = body["messages"][0]["content"].as_str().unwrap().to_string();
        let (a, b) = prompt.trim_end_matches('=').split_once('+').unwrap();
        good(&format!("{}\nand so on", a.parse::<u64>().unwrap() + b.parse::<u64>().unwrap()))
    };
    Mock::given(body_partial_json(json!({"stop": ["\n"], "temperature": 0.0}))).respond_with(add).mount(&server).await;
    server
}

const SUITE: &str = "tasks:\n- name: add\n  data: {native: addition, n: 40}\n  template: chat\n";

#[tokio::test]
async fn suites_are_evaluated_remotely() {
    let server = adder().await;
    let meter = Meter::unlimited();
    let client = client(endpoint(&server), Arc::clone(&meter));
    // From a plain thread as from within a runtime.
    let model = RemoteModel::new(client, 4).unwrap();
    let suite = Suite::parse(std::path::Path::new("."), "s.yaml", SUITE).unwrap();
    let report = evaluate(&model, &suite, Subset::DEV, 1, &mut |_| {}).unwrap();
    assert_eq!(report.score("add/pass@1").unwrap().value, 1.0);
    assert_eq!(meter.spend().calls as usize, report.items.len());
    assert_eq!(report.fingerprint.model["model"], "m");
    assert!(model.score(&["x".into()]).unwrap_err().hint.unwrap().contains("local"));
}

#[tokio::test]
async fn a_failed_call_ends_the_evaluation() {
    let server = serve(vec![refusal(400, "no")]).await;
    let meter = Meter::unlimited();
    let model = RemoteModel::new(client(endpoint(&server), Arc::clone(&meter)), 2).unwrap();
    let prompts: Vec<String> = (0..30).map(|i| format!("{i}+1=")).collect();
    let failure = model.complete(&prompts, &Sampling::default(), 1).unwrap_err();
    assert_eq!(failure.class, Class::Other);
    assert!(meter.spend().calls <= 4, "no further calls are begun: {}", meter.spend().calls);
}
