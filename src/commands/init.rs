//! `hone init`: a workspace to start from.

use crate::{
    cli::{self, Template},
    output,
};
use hone_agent::workspace::Workspace;
use hone_runs::Result;
use serde_json::json;
use std::path::Path;

/// Makes the workspace and says what lies where.
pub fn run(args: &cli::Init, json: bool) -> Result<()> {
    let commit = create(&args.dir, args.template)?;
    output::either(json, &json!({"workspace": args.dir, "commit": commit}), || {
        let dir = args.dir.display();
        format!(
            "Made {dir}, a git repository:\n  goal.yaml            what should get better\n  recipe/recipe.yaml   how a model is trained\n  \
             evals/               what is measured\n\nWhat next:\n  cd {dir}\n  hone validate goal.yaml\n  hone campaign run"
        )
    })
}

/// Makes a workspace of `template` in `dir`, with one commit; gives its id.
pub fn create(dir: &Path, template: Template) -> Result<String> {
    let files: &[(&str, &str)] = match template {
        Template::Addition => &[
            ("goal.yaml", include_str!("../templates/addition/goal.yaml")),
            ("recipe/recipe.yaml", include_str!("../templates/addition/recipe/recipe.yaml")),
            ("evals/addition.yaml", include_str!("../templates/addition/evals/addition.yaml")),
        ],
        Template::Reverse => &[
            ("goal.yaml", include_str!("../templates/reverse/goal.yaml")),
            ("recipe/recipe.yaml", include_str!("../templates/reverse/recipe/recipe.yaml")),
            ("evals/reverse.yaml", include_str!("../templates/reverse/evals/reverse.yaml")),
        ],
        Template::Countdown => &[
            ("goal.yaml", include_str!("../templates/countdown/goal.yaml")),
            ("recipe/recipe.yaml", include_str!("../templates/countdown/recipe/recipe.yaml")),
            ("evals/countdown.yaml", include_str!("../templates/countdown/evals/countdown.yaml")),
        ],
        Template::Text => &[
            ("goal.yaml", include_str!("../templates/text/goal.yaml")),
            ("recipe/recipe.yaml", include_str!("../templates/text/recipe/recipe.yaml")),
            ("evals/text.yaml", include_str!("../templates/text/evals/text.yaml")),
            ("data/text.txt", include_str!("../../docs/architecture.md")),
        ],
    };
    Workspace::create(dir, files)
}
