//! The engine: text in and out, log-probs of tokens, the same answers from a checkpoint.

use crate::common::*;
use hone_evals::model::{Finish, LanguageModel, Sampling};
use hone_runs::Class;
use hone_trainer::checkpoint;
use hone_trainer::decoder::Decoder;
use hone_trainer::engine::Engine;
use hone_trainer::tokenizer::Tokenizer;

/// 12 characters and the end: 13 ids.
const ALPHABET: &str = "0123456789+\n";

fn tokenizer() -> Tokenizer {
    Tokenizer::chars([ALPHABET]).unwrap()
}

fn engine(decoder: Decoder) -> Engine {
    assert_eq!(tokenizer().vocab_size(), VOCAB);
    Engine { decoder, tokenizer: tokenizer(), pool: pool(2), model_hash: None, checkpoint_hash: None }
}

fn strings(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|t| t.to_string()).collect()
}

#[test]
fn completions_follow_their_prompt_not_its_company() {
    let engine = engine(decoder(hybrid(), 50));
    let sampling = Sampling { temperature: 1.0, max_tokens: 20, k: 2, stop: vec!["\n".into(), "é".into()] };
    let all = engine.complete(&strings(&["1+2", "", "45"]), &sampling, 7).unwrap();
    let alone = engine.complete(&strings(&["45"]), &sampling, 7).unwrap();
    assert_eq!(all[2], alone[0]);
    assert_ne!(engine.complete(&strings(&["45"]), &sampling, 8).unwrap(), alone);
    for completion in all.iter().flatten() {
        assert!(!completion.text.contains('\n'), "the stop string is left out");
        let hidden = usize::from(completion.finish == Finish::Stop);
        assert_eq!(completion.text.len() + hidden, completion.tokens, "one token a character, and one to stop");
    }
    assert!(all.iter().flatten().any(|c| c.finish == Finish::Stop));
}

#[test]
fn stop_strings_of_several_characters_are_left_out() {
    let engine = engine(decoder(hybrid(), 51));
    let plain = Sampling { temperature: 1.0, max_tokens: 30, k: 1, stop: vec![] };
    let text = engine.complete(&strings(&["12"]), &plain, 3).unwrap()[0][0].text.clone();
    assert!(text.len() > 8, "{text:?}");
    let stop = text[4..7].to_string();
    let cut = engine.complete(&strings(&["12"]), &Sampling { stop: vec![stop.clone()], ..plain }, 3).unwrap();
    assert_eq!(cut[0][0].text, text[..text.find(&stop).unwrap()]);
    assert_eq!(cut[0][0].finish, Finish::Stop);
}

#[test]
fn logprobs_are_of_all_tokens_but_the_first() {
    let engine = engine(decoder(hybrid(), 52));
    let sequences = vec![vec![3], vec![1, 2, 3, 4], vec![5, 6]];
    let scored = engine.logprobs(&sequences, 0).unwrap();
    assert_eq!((scored[0].logprobs.len(), scored[0].loss), (0, None));
    assert_eq!(scored[1].logprobs.len(), 3);
    let mean = scored[1].logprobs.iter().map(|&p| -f64::from(p)).sum::<f64>() / 3.0;
    assert_eq!(scored[1].loss, Some(mean));
    assert_eq!(serde_json::to_string(&scored[0]).unwrap(), r#"{"logprobs":[],"loss":null}"#);
    // A sequence's log-probs do not depend on its company.
    assert_eq!(engine.logprobs(&sequences[1..2], 0).unwrap()[0], scored[1]);

    // The chain rule: the last token's log-prob is that of sampling it.
    let probabilities: f64 = (0..VOCAB as u32)
        .map(|last| f64::from(engine.logprobs(&[vec![1, 2, last]], 0).unwrap()[0].logprobs[1]).exp())
        .sum();
    assert!((probabilities - 1.0).abs() < 1e-5);

    // The most probable tokens of a place, with the log-probs that they have as its token.
    let with_top = engine.logprobs(&sequences, 3).unwrap();
    assert_eq!(with_top[0].top, Some(vec![]));
    assert_eq!((&with_top[1].logprobs, with_top[2].top.as_ref().map(Vec::len)), (&scored[1].logprobs, Some(1)));
    let last = &with_top[1].top.as_ref().unwrap()[2];
    let mut all: Vec<_> =
        (0..VOCAB as u32).map(|id| (id, engine.logprobs(&[vec![1, 2, 3, id]], 0).unwrap()[0].logprobs[2])).collect();
    all.sort_by(|a, b| b.1.total_cmp(&a.1));
    assert_eq!(last, &all[..3]);
    assert_eq!(engine.logprobs(&sequences[1..2], 100).unwrap()[0].top.as_ref().unwrap()[0].len(), VOCAB);

    for bad in [vec![], vec![1, VOCAB as u32]] {
        let failure = engine.logprobs(&[vec![1], bad], 0).unwrap_err();
        assert_eq!(failure.class, Class::Usage);
        assert!(failure.message.starts_with("Token sequence 2 "), "{failure}");
    }
}

#[test]
fn texts_are_scored_from_their_second_token() {
    let engine = engine(decoder(dense(), 53));
    let scores = engine.score(&strings(&["1+2", "", "7"])).unwrap();
    assert_eq!((scores[0].tokens, scores[0].bytes), (2, 2));
    let expected: f64 = engine.logprobs(&[tokenizer().encode("1+2").unwrap()], 0).unwrap()[0]
        .logprobs
        .iter()
        .map(|&p| f64::from(p))
        .sum();
    assert_eq!(scores[0].logprob, expected);
    assert_eq!((scores[1].tokens, scores[2].tokens, scores[2].logprob), (0, 0, 0.0));
}

#[test]
fn a_loaded_checkpoint_answers_as_the_model_did() {
    let dir = tempfile::tempdir().unwrap();
    let before = engine(decoder(other(), 54));
    checkpoint::save(&dir.path().join("checkpoints/step-5"), &before.decoder, &before.tokenizer, None).unwrap();
    let after = Engine::load(dir.path(), 1).unwrap();
    let sampling = Sampling { temperature: 0.0, max_tokens: 12, ..Sampling::default() };
    let prompts = strings(&["1+2", "99+"]);
    assert_eq!(before.complete(&prompts, &sampling, 0).unwrap(), after.complete(&prompts, &sampling, 0).unwrap());
    assert_eq!(after.identity()["model"].as_str().unwrap().len(), 64);
    assert_eq!(Engine::load(&dir.path().join("nothing"), 1).err().unwrap().class, Class::Usage);
    let failure = after.complete(&strings(&["a"]), &sampling, 0).unwrap_err();
    assert!(failure.message.contains("'a'"), "{failure}");
    let hot = Sampling { temperature: f32::NAN, ..sampling };
    assert_eq!(after.complete(&prompts, &hot, 0).unwrap_err().class, Class::Usage);
}
