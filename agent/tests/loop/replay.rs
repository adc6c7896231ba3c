//! Campaigns that are made again from their record: the same fold, or the first difference by name.

use crate::support::{Acting, Place, Script, Setting, set, usual_script};
use hone_agent::calls;
use hone_agent::campaign::{self, Request};
use hone_agent::llm::Llm;
use hone_agent::proposal::Proposer;
use hone_agent::replay::{self, Replayed};
use hone_agent::review;
use hone_evals::meter::{Budget, Meter};
use hone_evals::remote::{Client, Endpoint};
use hone_runs::{Class, Failure, Result};
use serde_json::json;
use std::sync::Arc;
use wiremock::{Mock, MockServer, ResponseTemplate, matchers};

async fn again(place: &Place, setting: &Setting, train: bool, script: &Script) -> Result<Replayed> {
    let script = script.clone();
    let tools = setting.toolbox();
    let ledger = place.ledger().await;
    replay::replay(&place.workspace(), &ledger, "c1", train, tools, Arc::new(()), &|_, _| {
        Ok(vec![Arc::new(script.clone()) as Arc<dyn Proposer>])
    })
    .await
}

#[tokio::test]
async fn a_campaign_is_the_same_again_with_its_runs_from_the_record_or_made_again() {
    let place = Place::usual();
    let setting = Setting::default();
    setting.drive(&place, &usual_script()).await.unwrap();
    let (before, branches) = (place.belongings(), place.branches());
    let trained = setting.fake.trained();
    let recorded = place.ledger().await.canonical_fold("c1").await.unwrap();

    let found = again(&place, &setting, false, &usual_script()).await.unwrap();
    assert_eq!((found.rounds, found.complete, found.events), (3, true, recorded.events.len()));
    assert_eq!(found.hash, recorded.hash);
    assert_eq!(setting.fake.trained(), trained, "no run was made");

    let found = again(&place, &setting, true, &usual_script()).await.unwrap();
    assert_eq!(found.hash, recorded.hash);
    assert_eq!(setting.fake.trained(), 2 * trained, "all runs were made");

    assert_eq!((place.belongings(), place.branches()), (before, branches), "nothing outside was written");
    let left = std::fs::read_dir(place.root().join(".hone")).unwrap().flatten();
    assert!(!left.into_iter().any(|e| e.file_name().to_string_lossy().starts_with("scratch-")));
}

#[tokio::test]
async fn the_first_difference_is_named() {
    let place = Place::usual();
    let setting = Setting::default();
    setting.drive(&place, &usual_script()).await.unwrap();
    let other = Script::sets(&[("lr", json!(0.3)), ("lr", json!(0.06)), ("lr", json!(0.4))]);
    let failure = again(&place, &setting, false, &other).await.unwrap_err();
    assert_eq!(failure.class, Class::Integrity);
    assert!(failure.message.contains("In round 2, step `propose`"), "{failure}");
    assert!(failure.message.contains("0.05") && failure.message.contains("0.06"), "{failure}");
}

#[tokio::test]
async fn peoples_decisions_are_followed() {
    // The next round sees the note and the older incumbent.
    let place = Place::usual();
    let setting = Setting::default();
    let script = Script::of(|seen| {
        let lr = if seen.notes.is_empty() { 0.3 } else { 0.35 };
        Ok(set("lr", json!(lr + 0.01 * f64::from(seen.round))))
    });
    let (workspace, ledger) = (place.workspace(), place.ledger().await);
    let acting = Acting {
        script: script.clone(),
        round: 2,
        action: move || {
            let (workspace, ledger) = (workspace.clone(), ledger.clone());
            async move {
                review::iterate(&workspace, &ledger, "c1", 1, "smaller steps").await.unwrap();
                review::rollback(&workspace, &ledger, "c1", 1).await.unwrap();
            }
        },
    };
    let proposers: [Arc<dyn Proposer>; 1] = [Arc::new(acting)];
    setting.campaign(&place).await.unwrap().run(&proposers).await.unwrap();
    // After the end, too.
    review::keep(&place.workspace(), &place.ledger().await, "c1", 3).await.unwrap();
    let recorded = place.ledger().await.canonical_fold("c1").await.unwrap();
    assert!(recorded.events.iter().any(|e| e.kind == "rollback"));
    let found = again(&place, &setting, false, &script).await.unwrap();
    assert_eq!((found.hash, found.complete), (recorded.hash, true));
}

#[tokio::test]
async fn a_stop_is_followed() {
    let place = Place::usual();
    let setting = Setting::default();
    let (workspace, ledger) = (place.workspace(), place.ledger().await);
    let stopping = Acting {
        script: usual_script(),
        round: 2,
        action: move || {
            let (workspace, ledger) = (workspace.clone(), ledger.clone());
            async move { campaign::request(&workspace, &ledger, "c1", Request::Stop).await.unwrap() }
        },
    };
    let proposers: [Arc<dyn Proposer>; 1] = [Arc::new(stopping)];
    setting.campaign(&place).await.unwrap().run(&proposers).await.unwrap();
    let recorded = place.ledger().await.canonical_fold("c1").await.unwrap();
    let found = again(&place, &setting, false, &usual_script()).await.unwrap();
    assert_eq!((found.hash, found.rounds), (recorded.hash, 2));
}

#[tokio::test]
async fn a_campaign_under_way_is_followed_as_far_as_its_rounds_are_whole() {
    let place = Place::usual();
    let setting = Setting::default();
    let failing = Script(Arc::new(|seen| {
        if seen.round == 3 {
            return Err(Failure::new(Class::Infrastructure, "The endpoint is gone."));
        }
        (usual_script().0)(seen)
    }));
    setting.drive(&place, &failing).await.unwrap_err();
    let found = again(&place, &setting, false, &usual_script()).await.unwrap();
    assert_eq!((found.rounds, found.complete), (2, false));
}

/// A good reply, prose and its repair, and one that is out of scope: the endpoint is gone when they are asked for again.
#[tokio::test]
async fn a_models_campaign_is_the_same_again_without_its_endpoint() {
    let place = Place::usual();
    let setting = Setting::default();
    let says = |file: &str, value: f64| {
        json!({
            "title": format!("lr to {value}"), "hypothesis": "It is too low.", "predicted_effect": 0.1,
            "edits": [{"op": "set", "file": file, "key": "lr", "value": value}],
        })
        .to_string()
    };
    let replies = [
        says("recipe/recipe.yaml", 0.3),
        "Higher, I would say.".into(),
        says("recipe/recipe.yaml", 0.35),
        says("evals/add.yaml", 1.0),
    ];
    let server = MockServer::start().await;
    for (i, text) in replies.iter().enumerate() {
        let body = json!({
            "choices": [{"finish_reason": "stop", "message": {"role": "assistant", "content": text}}],
            "usage": {"prompt_tokens": 100, "completion_tokens": 20},
        });
        let mock = Mock::given(matchers::method("POST")).respond_with(ResponseTemplate::new(200).set_body_json(body));
        let mock = if i + 1 < replies.len() { mock.up_to_n_times(1) } else { mock };
        mock.with_priority(i as u8 + 1).mount(&server).await;
    }
    let endpoint = Endpoint::new("scripted", format!("{}/v1", server.uri()));
    let campaign = setting.campaign(&place).await.unwrap();
    let meter = calls::meter(&place.workspace(), "c1", Budget::default()).unwrap();
    let llm = Llm::new(Client::new(endpoint.clone(), meter, "propose").unwrap(), 500, None);
    campaign.run(&[Arc::new(llm) as Arc<dyn Proposer>]).await.unwrap();
    drop((campaign, server));

    let replay = |model: &'static str| {
        let (place, setting, endpoint) = (&place, &setting, endpoint.clone());
        async move {
            let ledger = place.ledger().await;
            replay::replay(
                &place.workspace(),
                &ledger,
                "c1",
                false,
                setting.toolbox(),
                Arc::new(()),
                &|_, recording| {
                    let endpoint = Endpoint { model: model.into(), ..endpoint.clone() };
                    let client = Client::replay(endpoint, Meter::unlimited(), "propose", Arc::clone(recording))?;
                    Ok(vec![Arc::new(Llm::new(client, 500, None)) as Arc<dyn Proposer>])
                },
            )
            .await
        }
    };
    let recorded = place.ledger().await.canonical_fold("c1").await.unwrap();
    let found = replay("scripted").await.unwrap();
    assert_eq!((found.hash, found.rounds, found.requests), (recorded.hash, 3, 5));
    // What was not recorded has no reply, whatever was.
    let failure = replay("another").await.unwrap_err();
    assert_eq!(failure.class, Class::Integrity);
    assert!(failure.message.contains("No reply to this request was recorded"), "{failure}");
}
