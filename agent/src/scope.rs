//! What a candidate may touch: the goal's `edit` patterns, and what no pattern can open.

use glob::{MatchOptions, Pattern};
use hone_runs::{Class, Failure, Result};

/// The editable part of a workspace. Patterns are read as in a `.gitignore`: the last one that matches decides, `!` closes what an earlier
/// one opened, a pattern with a slash before its end is anchored at the root and one without matches at any depth, and a folder stands for
/// all it holds. Matching is exact in case.
#[derive(Clone, Debug)]
pub struct Scope {
    patterns: Vec<(bool, Pattern)>,
    closed: Vec<String>,
}

const MATCHING: MatchOptions =
    MatchOptions { case_sensitive: true, require_literal_separator: true, require_literal_leading_dot: false };

impl Scope {
    /// A scope of `patterns`, without the files `closed` (goal, suites, data), which stay protected whatever the patterns say.
    ///
    /// # Errors
    /// `Usage` when a pattern cannot be read.
    pub fn new(patterns: &[String], closed: &[String]) -> Result<Self> {
        let patterns = patterns.iter().map(|p| compile(p)).collect::<Result<_>>()?;
        Ok(Self { patterns, closed: closed.to_vec() })
    }

    /// Whether a candidate may write `path`, which is relative to the root with `/` between its parts.
    pub fn allows(&self, path: &str) -> bool {
        is_plain(path)
            && !is_hone_or_git(path)
            && !is_prompt(path)
            && !self.closed.iter().any(|c| c.eq_ignore_ascii_case(path))
            && self.matches(path)
    }

    /// Whether the patterns alone open `path`.
    pub fn matches(&self, path: &str) -> bool {
        // A pattern that matches a folder opens all below it, so each leading part of the path is asked.
        let leading: Vec<&str> = path.match_indices('/').map(|(at, _)| &path[..at]).chain([path]).collect();
        let decided =
            self.patterns.iter().rev().find(|(_, p)| leading.iter().any(|part| p.matches_with(part, MATCHING)));
        decided.is_some_and(|(opens, _)| *opens)
    }
}

fn compile(text: &str) -> Result<(bool, Pattern)> {
    let wrong = |why: &str| {
        Failure::new(Class::Usage, format!("`{text}` is not a pattern of paths: {why}."))
            .hint("Patterns are read as in a .gitignore, for example `recipe/**` or `*.md`.")
    };
    let (opens, body) = text.strip_prefix('!').map_or((true, text), |rest| (false, rest));
    let body = body.strip_suffix('/').unwrap_or(body);
    let anchored = body.contains('/');
    let body = body.strip_prefix('/').unwrap_or(body);
    if body.is_empty() || body.split('/').any(|part| part == ".." || part == ".") {
        return Err(wrong("it names no path inside the workspace"));
    }
    let full = if anchored { body.to_string() } else { format!("**/{body}") };
    Pattern::new(&full).map(|p| (opens, p)).map_err(|e| wrong(e.msg))
}

/// Whether `path` is relative, without `.`, `..`, empty parts, backslashes or control characters.
pub fn is_plain(path: &str) -> bool {
    !path.is_empty()
        && !path.contains(|c: char| c == '\\' || c.is_control())
        && path.split('/').all(|part| !part.is_empty() && part != "." && part != "..")
}

/// Whether `path` lies among the prompts: a proposer that could edit them would write its own instructions.
pub(crate) fn is_prompt(path: &str) -> bool {
    path.split('/').next().is_some_and(|first| first.trim_end_matches(['.', ' ']).eq_ignore_ascii_case("prompts"))
}

/// Whether `path` lies in git's or Hone's own folders, or steers git, in any spelling that some file system folds to those.
fn is_hone_or_git(path: &str) -> bool {
    let mut parts = path.split('/').map(|part| part.trim_end_matches(['.', ' ']).to_ascii_lowercase());
    let own = matches!(path.split('/').next().map(str::to_ascii_lowercase).as_deref(), Some(".hone" | "runs"));
    own || parts.any(|part| matches!(part.as_str(), ".git" | "git~1" | ".gitmodules" | ".gitattributes" | ".gitignore"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scope(patterns: &[&str]) -> Scope {
        let patterns: Vec<String> = patterns.iter().map(|p| (*p).to_string()).collect();
        Scope::new(&patterns, &["evals/add.yaml".into(), "goal.yaml".into()]).unwrap()
    }

    #[test]
    fn patterns_read_as_in_a_gitignore() {
        let cases: [(&[&str], &str, bool); 12] = [
            (&["recipe/**"], "recipe/recipe.yaml", true),
            (&["recipe/**"], "recipe/deep/er.yaml", true),
            (&["recipe"], "recipe/recipe.yaml", true),
            (&["recipe/"], "a/recipe/recipe.yaml", true),
            (&["/recipe/"], "a/recipe/recipe.yaml", false),
            (&["recipe/*.yaml"], "recipe/deep/er.yaml", false),
            (&["*.md"], "docs/notes.md", true),
            (&["**/few.txt"], "few.txt", true),
            (&["recipe/**", "!recipe/secret.yaml"], "recipe/secret.yaml", false),
            (&["!recipe/secret.yaml", "recipe/**"], "recipe/secret.yaml", true),
            (&["recipe/**"], "Recipe/recipe.yaml", false),
            (&["recipe/**"], "recipes/recipe.yaml", false),
        ];
        for (patterns, path, allowed) in cases {
            assert_eq!(scope(patterns).allows(path), allowed, "{patterns:?} {path}");
        }
    }

    #[test]
    fn no_pattern_opens_what_judges_or_steers() {
        let all = scope(&["**", "/**", "evals/**"]);
        assert!(all.allows("evals/other.yaml"));
        for path in [
            "evals/add.yaml",
            "Evals/ADD.yaml",
            "goal.yaml",
            ".git/config",
            "a/.GIT/hooks/post-checkout",
            ".git./config",
            ".hone/ledger.db",
            "runs/c1/x",
            "prompts/repair.hbs",
            "Prompts./repair.hbs",
            ".gitattributes",
            "../x",
            "a/../../x",
            "/etc/passwd",
            "a//b",
            "a\\b",
            "",
            "a/\u{7}",
        ] {
            assert!(!all.allows(path), "{path}");
        }
    }

    #[test]
    fn a_pattern_outside_the_workspace_is_refused() {
        for pattern in ["../**", "a/../b", "/", "", "a/***b"] {
            assert_eq!(Scope::new(&[pattern.to_string()], &[]).unwrap_err().class, Class::Usage, "{pattern}");
        }
    }
}
