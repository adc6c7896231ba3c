//! The judge against simulated campaigns: how often it keeps what is no better, and finds what is.

use hone_agent::judge::*;
use hone_runs::draws;
use proptest::prelude::*;
use rand::RngExt;
use rand_chacha::ChaCha8Rng;

/// One run's score; the number says which kind of noise: 0 normal, 1 two modes (a run that works or does not).
fn score(rng: &mut ChaCha8Rng, mean: f64, sd: f64, modes: bool) -> f64 {
    let (a, b): (f64, f64) = (rng.random(), rng.random());
    let z = if modes {
        if a < 0.5 { -1.0 } else { 1.0 }
    } else {
        (-2.0 * (1.0 - a).ln()).sqrt() * (std::f64::consts::TAU * b).cos()
    };
    mean + sd * z
}

fn judge(min_effect: f64, noise: Noise) -> Judge {
    Judge { direction: Direction::Maximize, min_effect, replicates: [3, 12], gate: Gate::default(), noise }
}

/// What one campaign of one kind of candidate did: rounds until the first `better`, and all runs it took (None: none was better).
fn campaign(seed: u64, rounds: usize, gain: f64, min_effect: f64, modes: bool) -> (Option<usize>, usize) {
    let mut rng = draws(seed, "campaign", 0, 0);
    let baseline: Vec<f64> = (0..3).map(|_| score(&mut rng, 0.6, 0.02, modes)).collect();
    let mut replicates = baseline.clone();
    let (mut confirmations, mut runs) = (0, baseline.len());
    for round in 1..=rounds {
        let judge = judge(min_effect, Noise::of([&replicates[..]]));
        let mut pairs = Vec::new();
        let screened = loop {
            match screen(&judge, &baseline, &pairs) {
                Screen::More { total } => {
                    assert_eq!(total, pairs.len() + 1);
                    let i = pairs.len();
                    pairs.push(Pair {
                        seed: i as u64,
                        candidate: score(&mut rng, 0.6 + gain, 0.02, modes),
                        incumbent: baseline[i],
                    });
                    runs += 1;
                }
                Screen::Promising(estimate) => break Some(estimate),
                Screen::Stop { .. } => break None,
            }
        };
        let Some(screened) = screened else { continue };
        confirmations += 1;
        let alpha = alpha_of(&judge.gate, confirmations, 0);
        let mut pairs = Vec::new();
        loop {
            match confirm(&judge, alpha, &screened, &pairs) {
                Confirm::More { .. } => {
                    let seed = 100 + pairs.len() as u64;
                    let (candidate, incumbent) =
                        (score(&mut rng, 0.6 + gain, 0.02, modes), score(&mut rng, 0.6, 0.02, modes));
                    pairs.push(Pair { seed, candidate, incumbent });
                    replicates.push(incumbent);
                    runs += 2;
                }
                Confirm::Done { verdict: Verdict::Better, .. } => return (Some(round), runs),
                Confirm::Done { .. } => break,
            }
        }
    }
    (None, runs)
}

/// In how many of 600 campaigns of 25 rounds a candidate that equals the incumbent was kept; 5% are 30.
fn kept_although_equal(min_effect: f64, modes: bool) -> usize {
    (0..600).filter(|i| campaign(*i, 25, 0.0, min_effect, modes).0.is_some()).count()
}

#[test]
fn a_against_a_is_kept_in_fewer_campaigns_than_alpha() {
    let kept = kept_although_equal(0.0005, false);
    assert!((3..=30).contains(&kept), "{kept}");
}

#[test]
fn a_against_a_with_a_worthwhile_effect_is_kept_in_fewer_campaigns_than_alpha() {
    let kept = kept_although_equal(0.01, false);
    assert!(kept <= 30, "{kept}");
}

#[test]
fn a_against_a_with_two_modes_is_kept_in_fewer_campaigns_than_alpha() {
    let kept = kept_although_equal(0.0005, true);
    assert!(kept <= 30, "{kept}");
}

#[test]
fn large_effects_are_found_at_once_and_cheaply() {
    let results: Vec<_> = (0..400).map(|i| campaign(i, 3, 0.10, 0.03, false)).collect();
    let at_once = results.iter().filter(|(round, _)| *round == Some(1)).count();
    let found = results.iter().filter(|(round, _)| round.is_some()).count();
    let runs = results.iter().map(|(_, runs)| *runs).sum::<usize>() as f64 / results.len() as f64;
    println!("{at_once} at once, {found} found, {runs} runs");
    assert!(at_once >= 360, "{at_once} of 400 five-sigma effects confirmed in the first round");
    assert!(found >= 396 && runs < 18.0, "{found} of 400 found with {runs} runs on average");
}

#[test]
fn effects_of_the_size_worth_keeping_are_mostly_found() {
    let found = (0..400).filter(|i| campaign(*i, 1, 0.06, 0.03, false).0.is_some()).count();
    println!("{found} found");
    assert!(found >= 280, "{found} of 400");
}

#[test]
fn hopeless_candidates_cost_one_or_two_runs() {
    let runs: usize = (0..200).map(|i| campaign(i, 10, -0.20, 0.03, false).1 - 3).sum();
    assert!(runs <= 200 * 10 * 12 / 10, "{runs} screening runs for 2000 hopeless candidates");
}

#[test]
fn levels_sum_to_alpha() {
    let family = Gate { alpha: 0.05, error: ErrorRate::Family };
    let sum: f64 = (1..10_000).map(|j| alpha_of(&family, j, 3)).sum();
    assert!(sum < 0.05 && sum > 0.0499, "{sum}");
    let fdr = Gate { error: ErrorRate::Fdr, ..family };
    assert_eq!(alpha_of(&fdr, 2, 0), alpha_of(&family, 2, 0));
    assert!((alpha_of(&fdr, 4, 2) - 3.0 * alpha_of(&family, 4, 0)).abs() < 1e-15);
}

#[test]
fn scores_that_are_not_finite_are_invalid_and_named() {
    let judge = judge(0.01, Noise { sd: 0.02, df: 2 });
    let screened = Estimate { n: 3, effect: 0.1, interval: None };
    let pairs = [Pair { seed: 7, candidate: f64::NAN, incumbent: 0.5 }];
    let Screen::Stop { verdict: Verdict::Invalid, reason, .. } = screen(&judge, &[0.5], &pairs) else {
        panic!("screened")
    };
    assert!(reason.contains("seed 7") && reason.contains("NaN"), "{reason}");
    let done = confirm(&judge, 0.03, &screened, &pairs);
    assert!(matches!(done, Confirm::Done { verdict: Verdict::Invalid, .. }), "{done:?}");
    assert_eq!(floor(Direction::Maximize, 0.01, judge.noise, &pairs), None);
    assert_eq!(floor(Direction::Maximize, 0.01, judge.noise, &[]), None);
}

#[test]
fn equal_scores_are_undecided_and_worse_is_worse() {
    let judge = judge(0.01, Noise { sd: 0.02, df: 2 });
    let pairs =
        |gain: f64| -> Vec<_> { (0..12).map(|seed| Pair { seed, candidate: 0.5 + gain, incumbent: 0.5 }).collect() };
    for (gain, wanted) in [(0.0, Verdict::Undecided), (-0.3, Verdict::Worse)] {
        let Screen::Stop { verdict, .. } = screen(&judge, &[0.5], &pairs(gain)) else { panic!("{gain}") };
        assert_eq!(verdict, wanted);
        let screened = Estimate { n: 3, effect: 0.05, interval: None };
        let Confirm::Done { verdict, p, .. } = confirm(&judge, 0.03, &screened, &pairs(gain)) else { panic!("{gain}") };
        assert_eq!((verdict, p), (wanted, 1.0));
    }
}

/// One seed on which the incumbent worked by luck hides nothing, and one on which the candidate did promises nothing.
#[test]
fn one_lucky_run_decides_no_screening() {
    let judge = Judge { replicates: [4, 10], ..judge(0.05, Noise { sd: 0.4, df: 3 }) };
    let pairs = |candidate: [f64; 4], incumbent: [f64; 4]| -> Vec<_> {
        (0..4).map(|i| Pair { seed: i as u64, candidate: candidate[i], incumbent: incumbent[i] }).collect()
    };
    let (plain, lucky, better) = ([0.12, 0.11, 0.13, 0.1], [1.0, 0.11, 0.13, 0.1], [0.25, 0.3, 0.22, 0.27]);
    for n in 1..4 {
        assert!(matches!(screen(&judge, &lucky, &pairs(better, lucky)[..n]), Screen::More { .. }), "{n}");
    }
    assert!(matches!(screen(&judge, &lucky, &pairs(better, lucky)), Screen::Promising(_)));
    assert!(matches!(screen(&judge, &plain, &pairs(lucky, plain)), Screen::Stop { .. }));
    // What no run of the candidate speaks for is stopped as early as ever.
    assert!(matches!(screen(&judge, &lucky, &pairs([0.01; 4], lucky)[..1]), Screen::Stop { .. }));
}

#[test]
fn minimising_is_maximising_upside_down() {
    let up = judge(0.01, Noise { sd: 0.02, df: 2 });
    let down = Judge { direction: Direction::Minimize, ..up };
    let pairs: Vec<_> = (0..6).map(|s| Pair { seed: s, candidate: 0.7 + 0.01 * s as f64, incumbent: 0.5 }).collect();
    let swapped: Vec<_> =
        pairs.iter().map(|p| Pair { candidate: -p.candidate, incumbent: -p.incumbent, ..*p }).collect();
    let (Screen::Promising(a), Screen::Promising(b)) = (screen(&up, &[0.5], &pairs), screen(&down, &[-0.5], &swapped))
    else {
        panic!()
    };
    let ([al, ah], [bl, bh]) = (a.interval.unwrap(), b.interval.unwrap());
    assert_eq!((a.effect, al, ah), (-b.effect, -bh, -bl));
    let Confirm::Done { p, .. } = confirm(&up, 0.03, &a, &pairs) else { panic!() };
    let Confirm::Done { p: q, verdict, .. } = confirm(&down, 0.03, &b, &swapped) else { panic!() };
    assert_eq!((p, verdict), (q, Verdict::Better));
}

#[test]
fn floors_hold_break_and_stay_unclear() {
    let noise = Noise { sd: 0.001, df: 5 };
    let pairs =
        |drop: f64| -> Vec<_> { (0..3).map(|seed| Pair { seed, candidate: 0.9 - drop, incumbent: 0.9 }).collect() };
    assert_eq!(floor(Direction::Maximize, 0.01, noise, &pairs(0.0)), Some(Floor::Held));
    assert_eq!(floor(Direction::Maximize, 0.01, noise, &pairs(0.02)), Some(Floor::Broken));
    assert_eq!(floor(Direction::Maximize, 0.01, noise, &pairs(0.0095)), Some(Floor::Unclear));
    assert_eq!(floor(Direction::Minimize, 0.01, noise, &pairs(0.02)), Some(Floor::Held));
}

#[test]
fn the_detectable_effect_shrinks_with_replicates_and_grows_with_noise() {
    let judge = judge(0.01, Noise { sd: 0.02, df: 2 });
    let of = |most, sd| Judge { replicates: [3, most], noise: Noise { sd, df: 2 }, ..judge }.detectable();
    assert!(of(12, 0.02) < of(6, 0.02) && of(6, 0.02) < of(3, 0.02));
    assert!((of(12, 0.04) / of(12, 0.02) - 2.0).abs() < 1e-6);
    assert!((0.02..0.04).contains(&of(12, 0.02)), "{}", of(12, 0.02));
}

#[test]
fn noise_never_mixes_commits() {
    let noise = Noise::of([&[0.5, 0.52][..], &[0.9, 0.92], &[0.1]]);
    assert_eq!(noise.df, 2);
    assert!((noise.sd - 0.02 / std::f64::consts::SQRT_2).abs() < 1e-12);
}

proptest! {
    /// A better candidate is never judged worse on as many seeds, `better` stays, and more seeds change no verdict that was given.
    #[test]
    fn verdicts_are_monotone_and_final(gains in prop::collection::vec(-0.1..0.2f64, 1..12), lift in 0.0..0.2f64, screened in 0.0..0.2f64) {
        let judge = judge(0.02, Noise { sd: 0.02, df: 2 });
        let rank = |v| match v { Verdict::Worse => 0, Verdict::Undecided => 1, _ => 2 };
        let estimate = Estimate { n: 3, effect: screened, interval: None };
        let pairs = |lift: f64| -> Vec<_> {
            gains.iter().enumerate().map(|(i, g)| Pair { seed: i as u64, candidate: 0.5 + g + lift, incumbent: 0.5 }).collect()
        };
        let (plain, lifted) = (confirm(&judge, 0.03, &estimate, &pairs(0.0)), confirm(&judge, 0.03, &estimate, &pairs(lift)));
        // After as many seeds; one that stopped earlier has seen less.
        if let (Confirm::Done { verdict: a, estimate: Some(e), .. }, Confirm::Done { verdict: b, estimate: Some(f), .. }) = (&plain, &lifted)
            && e.n == f.n
        {
            prop_assert!(rank(*b) >= rank(*a), "{plain:?} then {lifted:?}");
        }
        if matches!(plain, Confirm::Done { verdict: Verdict::Better, .. }) {
            prop_assert!(matches!(lifted, Confirm::Done { verdict: Verdict::Better, .. }), "{lifted:?}");
        }
        for n in 0..gains.len() {
            let early = confirm(&judge, 0.03, &estimate, &pairs(0.0)[..n]);
            if matches!(early, Confirm::Done { .. }) { prop_assert_eq!(&early, &plain); }
        }
    }
}
