//! The command line as clap sees it: names, arguments and help. What a command does lies in `commands/`.

use clap::{Args, Parser, Subcommand, ValueEnum};
use std::path::PathBuf;

/// A self-evolving model iteration system: a kept change is a real one.
#[derive(Parser)]
#[command(name = "hone", version, propagate_version = true, arg_required_else_help = true)]
#[command(after_help = "Start with `hone quickstart`: no network, no key, no GPU.")]
pub struct Cli {
    /// Print one JSON document to stdout (JSON Lines where the command streams).
    #[arg(long, global = true)]
    pub json: bool,
    /// Say more on stderr; twice for debugging.
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub verbose: u8,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Subcommand)]
pub enum Command {
    /// Make a workspace, train its baseline, run a campaign, show the rounds and the review queue.
    Quickstart(Quickstart),
    /// Make a workspace to start from: a git repository with goal, recipe and evals.
    Init(Init),
    /// Say what this machine has.
    Doctor,
    /// Check a goal, recipe or suite.
    Validate {
        /// The YAML file.
        file: PathBuf,
    },
    /// Say what a goal or recipe needs before it is spent: memory, compute, disk, time.
    Plan(Plan),
    /// Print the JSON Schema of a file that people write.
    Schema {
        /// Which file.
        kind: FileKind,
        /// Print the reference page made of it instead.
        #[arg(long)]
        markdown: bool,
    },
    /// Run and follow campaigns.
    #[command(subcommand)]
    Campaign(Campaign),
    /// The person's queue: keep, roll back or iterate.
    #[command(subcommand)]
    Review(Review),
    /// Check a campaign's ledger, its kept commits and the reports behind them again, offline.
    Verify {
        /// The campaign's name.
        campaign: String,
        /// Where the workspace lies.
        #[arg(long, default_value = ".")]
        workspace: PathBuf,
    },
    /// Make a campaign again from the recorded replies of its models, offline, and compare it event by event.
    Replay {
        /// The campaign's name.
        campaign: String,
        /// Make the training runs and evaluations again, too, instead of taking their results from the record.
        #[arg(long)]
        train: bool,
        /// Where the workspace lies.
        #[arg(long, default_value = ".")]
        workspace: PathBuf,
    },
    /// Train a recipe.
    Train(Train),
    /// Evaluate a model on a suite.
    Eval(Eval),
    /// Sample from a model.
    Generate(Generate),
    /// Score token sequences.
    Logprobs(Logprobs),
    /// Look at runs.
    #[command(subcommand)]
    Runs(Runs),
    /// Measure this machine: what the trainer does a second beside the limit, both in one run.
    Bench(Bench),
    /// Put faults into small campaigns of this program, on this machine, and see that they change nothing.
    Selftest(Selftest),
    /// Print shell completions.
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
    /// Print the reference page of the command line.
    #[command(hide = true)]
    Reference,
    /// Watch one run's process tree (started by the launcher, not by people).
    #[command(hide = true)]
    Supervise {
        /// The run's specification.
        spec: PathBuf,
    },
}

/// The files that people write.
#[derive(Clone, Copy, ValueEnum)]
pub enum FileKind {
    /// goal.yaml
    Goal,
    /// recipe.yaml
    Recipe,
    /// suite.yaml
    Suite,
}

/// Where to compute.
#[derive(Clone, Copy, ValueEnum)]
pub enum Device {
    /// The processor.
    Cpu,
    /// The best device found (today: the processor).
    Auto,
}

/// What every computing command takes.
#[derive(Args)]
pub struct Compute {
    /// Where to compute.
    #[arg(long, value_enum, default_value = "auto")]
    pub device: Device,
    /// Worker threads (0: one a core). Results do not depend on it.
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub threads: usize,
}

/// Arguments of `quickstart`.
#[derive(Args)]
pub struct Quickstart {
    /// Where to make the workspace; it must not exist or be empty.
    #[arg(default_value = "hone-quickstart")]
    pub dir: PathBuf,
    /// Rounds of the campaign.
    #[arg(long, default_value_t = 8, value_name = "N")]
    pub rounds: u32,
    /// Seed of the campaign: another seed, other random draws everywhere.
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub seed: u64,
}

/// Arguments of `init`.
#[derive(Args)]
pub struct Init {
    /// Where to make the workspace; it must not exist or be empty.
    pub dir: PathBuf,
    /// What it is about.
    #[arg(long, value_enum, default_value = "addition")]
    pub template: Template,
}

/// Workspaces to start from.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Template {
    /// Multi-digit addition: supervised, then reinforcement learning.
    Addition,
    /// Reversing text.
    Reverse,
    /// Countdown: reach a number by arithmetic.
    Countdown,
    /// Next-token loss on a text file.
    Text,
}

/// The loop.
#[derive(Subcommand)]
pub enum Campaign {
    /// Run a new campaign towards a goal.
    Run(CampaignRun),
    /// Say where a campaign stands.
    Status(CampaignName),
    /// Take up a paused or killed campaign where it stands.
    Resume(CampaignName),
    /// Ask a running campaign to pause when the runs under way are done.
    Pause(CampaignName),
    /// End a campaign when the runs under way are done; it is not taken up again.
    Stop(CampaignName),
    /// List the workspace's campaigns.
    List {
        /// Where the workspace lies.
        #[arg(long, default_value = ".")]
        workspace: PathBuf,
    },
}

/// Arguments of `campaign run`.
#[derive(Args)]
pub struct CampaignRun {
    /// The goal file.
    #[arg(default_value = "goal.yaml")]
    pub goal: PathBuf,
    /// Rounds, instead of the goal's budget.
    #[arg(long, value_name = "N")]
    pub rounds: Option<u32>,
    /// Seed of the campaign.
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub seed: u64,
}

/// A campaign, by name.
#[derive(Args)]
pub struct CampaignName {
    /// The campaign's name; the newest where it is left out.
    pub campaign: Option<String>,
    /// Where the workspace lies.
    #[arg(long, default_value = ".")]
    pub workspace: PathBuf,
}

/// The queue.
#[derive(Subcommand)]
pub enum Review {
    /// What waits for a decision.
    List {
        /// Decided items too.
        #[arg(long)]
        all: bool,
        /// Where the workspace lies.
        #[arg(long, default_value = ".")]
        workspace: PathBuf,
    },
    /// One item: claim, effect, cost, diff, flags.
    Show(ReviewItem),
    /// Keep a change (or confirm one that the policy kept).
    Keep(ReviewItem),
    /// Roll a change back.
    Rollback(ReviewItem),
    /// Send a note to the next proposal.
    Iterate {
        /// The item.
        #[command(flatten)]
        item: ReviewItem,
        /// What the next proposal should heed.
        #[arg(long)]
        note: String,
    },
}

/// An item of the queue, by id.
#[derive(Args)]
pub struct ReviewItem {
    /// The item's id, as `review list` shows it.
    pub id: String,
    /// Where the workspace lies.
    #[arg(long, default_value = ".")]
    pub workspace: PathBuf,
}

/// Arguments of `train`.
#[derive(Args)]
pub struct Train {
    /// The recipe file.
    pub recipe: PathBuf,
    /// The run's folder: manifest, metrics, TensorBoard events, checkpoints.
    #[arg(long)]
    pub out: PathBuf,
    /// Seed of every draw.
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub seed: u64,
    /// Set a key of the recipe: `optimizer.lr=3e-3`, `stages.0.sft.digits=3`. May be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Take up the run in DIR from its last checkpoint.
    #[arg(long)]
    pub resume: bool,
    /// The workspace that the recipe's files are relative to (default: the recipe's repository or folder).
    #[arg(long)]
    pub workspace: Option<PathBuf>,
    /// Device and threads.
    #[command(flatten)]
    pub compute: Compute,
}

/// Arguments of `plan`.
#[derive(Args)]
pub struct Plan {
    /// The goal, whose recipe is then looked at, or a recipe.
    #[arg(default_value = "goal.yaml")]
    pub file: PathBuf,
    /// Set a key of the recipe, as `train` does. May be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Do not time steps.
    #[arg(long)]
    pub no_measure: bool,
    /// The workspace that the recipe's files are relative to (default: the file's repository or folder).
    #[arg(long)]
    pub workspace: Option<PathBuf>,
    /// Device and threads. A goal's runs have one thread each.
    #[command(flatten)]
    pub compute: Compute,
}

/// Arguments of `eval`.
#[derive(Args)]
pub struct Eval {
    /// The suite file.
    pub suite: PathBuf,
    /// A checkpoint folder.
    #[arg(long, required_unless_present = "endpoint", conflicts_with = "endpoint")]
    pub model: Option<PathBuf>,
    /// An OpenAI-compatible endpoint, e.g. http://localhost:8000/v1.
    #[arg(long, requires = "model_name")]
    pub endpoint: Option<String>,
    /// The model's name at the endpoint.
    #[arg(long)]
    pub model_name: Option<String>,
    /// Environment variable that holds the endpoint's key.
    #[arg(long, default_value = "OPENAI_API_KEY", value_name = "VAR")]
    pub api_key_env: String,
    /// Which items.
    #[arg(long, value_enum, default_value = "dev")]
    pub split: Split,
    /// One of F disjoint folds of the split, as J/F (J from 1).
    #[arg(long, value_name = "J/F")]
    pub fold: Option<String>,
    /// Seed of the samples.
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub seed: u64,
    /// Write the JSON report here.
    #[arg(long)]
    pub out: Option<PathBuf>,
    /// The workspace that the suite's files are relative to (default: the suite's repository or folder).
    #[arg(long)]
    pub workspace: Option<PathBuf>,
    /// Device and threads.
    #[command(flatten)]
    pub compute: Compute,
}

/// The splits of a suite.
#[derive(Clone, Copy, ValueEnum)]
pub enum Split {
    /// For looking at while working.
    Dev,
    /// For confirming, once.
    #[value(name = "held_out", alias = "held-out")]
    HeldOut,
}

/// Arguments of `bench`.
#[derive(Args)]
pub struct Bench {
    /// Which: kernels, train-step or decode (default: all).
    pub name: Option<String>,
    /// Where.
    #[command(flatten)]
    pub compute: Compute,
}

/// Arguments of `selftest`.
#[derive(Args)]
pub struct Selftest {
    /// kill -9, paused processes, clock jumps, a full disk, and fifty candidates at once over repositories in every state.
    #[arg(long, required = true)]
    pub chaos: bool,
    /// How many times to kill.
    #[arg(long, default_value_t = 200, value_name = "N")]
    pub kills: u32,
    /// Only this kind of fault.
    #[arg(long, value_enum)]
    pub only: Option<Fault>,
    /// Seed of the instants.
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub seed: u64,
    /// The folder to make a small disk of (started by the self-test, not by people).
    #[arg(long, hide = true)]
    pub small_disk: Option<PathBuf>,
}

/// The kinds of fault.
#[derive(Clone, Copy, ValueEnum)]
pub enum Fault {
    /// kill -9.
    Kill,
    /// Processes stopped and continued.
    Pause,
    /// Clock jumps.
    Clock,
    /// A full disk.
    Disk,
    /// Fifty candidates at once, over repositories in every state.
    Git,
}

/// Arguments of `generate`.
#[derive(Args)]
pub struct Generate {
    /// A checkpoint folder.
    #[arg(long)]
    pub model: PathBuf,
    /// The prompt; standard input where it is left out.
    #[arg(long)]
    pub prompt: Option<String>,
    /// 0 is greedy.
    #[arg(long, default_value_t = 0.0)]
    pub temperature: f32,
    /// At most this many tokens.
    #[arg(long, default_value_t = 64, value_name = "N")]
    pub max_tokens: usize,
    /// Samples.
    #[arg(short, long, default_value_t = 1, value_name = "N")]
    pub n: usize,
    /// End a completion here; may be repeated.
    #[arg(long)]
    pub stop: Vec<String>,
    /// Seed of the samples.
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub seed: u64,
    /// Device and threads.
    #[command(flatten)]
    pub compute: Compute,
}

/// Arguments of `logprobs`.
#[derive(Args)]
pub struct Logprobs {
    /// A checkpoint folder.
    #[arg(long)]
    pub model: PathBuf,
    /// JSON Lines, each `{"tokens": […]}`.
    #[arg(long)]
    pub tokens: PathBuf,
    /// Also list the most probable tokens in each place, with their log-probs.
    #[arg(long, default_value_t = 0, value_name = "K")]
    pub top: usize,
    /// Device and threads.
    #[command(flatten)]
    pub compute: Compute,
}

/// Looking at runs.
#[derive(Subcommand)]
pub enum Runs {
    /// List the workspace's runs.
    List {
        /// Where the workspace lies.
        #[arg(long, default_value = ".")]
        workspace: PathBuf,
    },
    /// One run: recipe, result, errors.
    Show {
        /// A run's folder, or its id as `runs list` shows it.
        id: String,
        /// Where the workspace lies.
        #[arg(long, default_value = ".")]
        workspace: PathBuf,
    },
    /// One run's metrics.
    Metrics {
        /// A run's folder, or its id.
        id: String,
        /// Draw curves into an SVG file instead.
        #[arg(long, value_name = "FILE")]
        plot: Option<PathBuf>,
        /// Only names that contain this; may be repeated.
        #[arg(long)]
        name: Vec<String>,
        /// Where the workspace lies.
        #[arg(long, default_value = ".")]
        workspace: PathBuf,
    },
    /// Two runs side by side: recipe differences and last metrics.
    Compare {
        /// A run.
        a: String,
        /// Another.
        b: String,
        /// Draw both runs' curves into an SVG file.
        #[arg(long, value_name = "FILE")]
        plot: Option<PathBuf>,
        /// Only names that contain this; may be repeated.
        #[arg(long)]
        name: Vec<String>,
        /// Where the workspace lies.
        #[arg(long, default_value = ".")]
        workspace: PathBuf,
    },
}
