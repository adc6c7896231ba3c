//! `hone eval`: a model, local or behind an endpoint, on a suite.

use super::{relative, root_of, threads};
use crate::{cli, output};
use hone_evals::{
    evaluate::{Progress, evaluate},
    meter::Meter,
    model::LanguageModel,
    remote::{Client, Endpoint, RemoteModel},
    suite::{Split, Subset, Suite},
};
use hone_runs::{Class, Failure, Result};
use hone_trainer::engine::Engine;
use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;

/// Calls to an endpoint at once.
const PARALLEL: usize = 8;

/// Evaluates, prints the table of scores or the report, saves it where asked.
pub fn run(args: &cli::Eval, json: bool) -> Result<()> {
    let root = root_of(&args.suite, args.workspace.as_deref())?;
    let suite = Suite::load(&root, &relative(&args.suite, &root)?)?;
    let subset = Subset {
        split: match args.split {
            cli::Split::Dev => Split::Dev,
            cli::Split::HeldOut => Split::HeldOut,
        },
        fold: args.fold.as_deref().map(fold).transpose()?,
    };
    let model = model(args)?;
    let bar = std::io::stderr().is_terminal().then(|| {
        let style = ProgressStyle::with_template("{bar:30} {pos}/{len}  {msg}  {elapsed}")
            .unwrap_or_else(|_| ProgressStyle::default_bar());
        ProgressBar::new(0).with_style(style)
    });
    let mut progress = |p: Progress<'_>| {
        if let Some(bar) = &bar {
            bar.set_length(p.total as u64);
            bar.set_position(p.done as u64);
            bar.set_message(p.task.to_owned());
        }
    };
    let report = evaluate(model.as_ref(), &suite, subset, args.seed, &mut progress)?;
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    if let Some(out) = &args.out {
        report.save(out)?;
    }
    output::either(json, &report, || report.table())
}

/// `J/F`, J from 1 as people count; [`Subset::fold`] counts from 0.
fn fold(text: &str) -> Result<(usize, usize)> {
    let parts = text.split_once('/').and_then(|(j, f)| Some((j.parse().ok()?, f.parse().ok()?)));
    let fold = parts.filter(|(j, f): &(usize, usize)| (1..=*f).contains(j)).map(|(j, f)| (j - 1, f));
    fold.ok_or_else(|| {
        Failure::new(Class::Usage, format!("`{text}` is not a fold."))
            .hint("write J/F with J from 1 to F, e.g. --fold 1/4")
    })
}

/// The model that the arguments name.
fn model(args: &cli::Eval) -> Result<Box<dyn LanguageModel>> {
    match (&args.model, &args.endpoint, &args.model_name) {
        (Some(path), _, _) => Ok(Box::new(Engine::load(path, threads(&args.compute))?)),
        (None, Some(url), Some(name)) => {
            let key = std::env::var_os(&args.api_key_env).is_some().then(|| args.api_key_env.clone());
            let endpoint = Endpoint { api_key_env: key, ..Endpoint::new(name, url) };
            Ok(Box::new(RemoteModel::new(Client::new(endpoint, Meter::unlimited(), "eval")?, PARALLEL)?))
        }
        _ => Err(Failure::new(Class::Usage, "No model is named.")
            .hint("give --model DIR, or --endpoint URL with --model-name NAME")),
    }
}
