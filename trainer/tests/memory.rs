//! Memory in a real training run and while decoding, seen by the allocator: what a step takes anew, what a run takes at its most
//! beside its plan, and that resident memory stays where it is.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use hone_kernels::threads::Pool;
use hone_trainer::config::{ModelConfig, Preset};
use hone_trainer::decoder::Decoder;
use hone_trainer::plan::plan;
use hone_trainer::recipe::Recipe;
use hone_trainer::rollout::{RolloutOptions, generate};
use hone_trainer::train::{Observer, Progress, TrainOptions, train};

/// Larger allocations are what a workspace is for. In the shapes below every array of all rows is larger.
const LARGE: usize = 64 << 10;

/// Counts what goes through it.
struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);
static WATCHED: AtomicBool = AtomicBool::new(false);
static SEEN: Mutex<Vec<(usize, String)>> = Mutex::new(Vec::new());
/// Tests take turns: they share the counters.
static TURN: Mutex<()> = Mutex::new(());

thread_local! {
    /// Set while an allocation is looked at, since looking allocates.
    static LOOKING: Cell<bool> = const { Cell::new(false) };
}

fn note(size: usize) {
    if size > LARGE && WATCHED.load(Relaxed) && !LOOKING.replace(true) {
        let place = std::backtrace::Backtrace::force_capture().to_string();
        let frames = place.lines().filter(|line| line.contains("hone_") && !line.contains("memory::")).take(3);
        SEEN.lock().unwrap().push((size, frames.map(|f| f.trim().to_string()).collect::<Vec<_>>().join(" < ")));
        LOOKING.set(false);
    }
}

// SAFETY: every call goes to the system's allocator as it came; counting touches no memory that is handed out.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        PEAK.fetch_max(LIVE.fetch_add(layout.size(), Relaxed) + layout.size(), Relaxed);
        note(layout.size());
        // SAFETY: the caller's.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        PEAK.fetch_max(LIVE.fetch_add(layout.size(), Relaxed) + layout.size(), Relaxed);
        note(layout.size());
        // SAFETY: the caller's.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's.
        unsafe { System.dealloc(pointer, layout) }
    }
    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        LIVE.fetch_sub(layout.size(), Relaxed);
        PEAK.fetch_max(LIVE.fetch_add(size, Relaxed) + size, Relaxed);
        note(size);
        // SAFETY: the caller's.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

/// Ends watching; the large allocations seen, each with where it was made.
fn seen() -> Vec<(usize, String)> {
    WATCHED.store(false, Relaxed);
    std::mem::take(&mut *SEEN.lock().unwrap())
}

fn resident() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<usize>().ok()? << 10)
}

/// Looks at a run's steps from outside: watches those after the second, and reads resident memory along the way.
#[derive(Default)]
struct Steps {
    resident: Vec<usize>,
}

impl Observer for Steps {
    fn step(&mut self, progress: &Progress) {
        WATCHED.store((2..6).contains(&progress.step), Relaxed);
        self.resident.extend(resident());
    }
}

/// Three lightning layers and a softmax layer with four experts. Every example has 63 rows, so every step has 504.
const RECIPE: &str = "
model: {preset: hybrid-nano, hidden_size: 64, intermediate_size: 96}
compute: {tokens: 100M}
checkpoints: {every: 1000}
stages:
  - sft: {task: reverse, length: 32, batch: 512, steps: 40}
";

fn run(recipe: &Recipe, threads: usize, observer: &mut dyn Observer) {
    let folder = tempfile::tempdir().unwrap();
    let options = TrainOptions { out: folder.path().join("run"), threads, ..TrainOptions::default() };
    train(recipe, &options, observer).unwrap();
}

#[test]
fn steps_after_the_second_take_no_large_memory_and_leave_none() {
    let _turn = TURN.lock().unwrap();
    let mut steps = Steps::default();
    run(&Recipe::parse(RECIPE, "recipe.yaml", &[]).unwrap(), 1, &mut steps);
    let seen = seen();
    assert!(seen.is_empty(), "in 4 steps: {seen:#?}");

    // Where the system tells: 30 steps move resident memory by less than one array of all rows a step would.
    if let [.., _] = steps.resident[..] {
        let (early, late) = (steps.resident[8], steps.resident[38]);
        assert!(late < early + (1 << 20), "{early} bytes became {late}");
    }
}

#[test]
fn a_run_takes_what_its_plan_says() {
    let _turn = TURN.lock().unwrap();
    let rl = RECIPE.replace("steps: 40", "steps: 3")
        + "  - rl: {task: reverse, length: 6, prompts: 8, group: 8, max_tokens: 12, steps: 3, dynamic_sampling: false}\n";
    for (text, threads) in [(&RECIPE.replace("steps: 40", "steps: 3"), 1), (&rl, 1), (&rl, 2)] {
        let recipe = Recipe::parse(text, "recipe.yaml", &[]).unwrap();
        let planned = plan(&recipe, Path::new("."), threads).unwrap().memory_total as f64;
        PEAK.store(LIVE.load(Relaxed), Relaxed);
        let before = LIVE.load(Relaxed);
        run(&recipe, threads, &mut ());
        let taken = (PEAK.load(Relaxed) - before) as f64;
        println!("{threads} workers: {taken} bytes at the most, {planned} planned");
        assert!((0.85..1.1).contains(&(taken / planned)), "{taken} bytes at the most, {planned} planned");
    }
}

#[test]
fn decoding_steps_after_the_second_take_no_large_memory() {
    let _turn = TURN.lock().unwrap();
    // 64 rows a step: logits of 2048 ids, or rows of 256 and more, are large.
    let config = ModelConfig { hidden_size: 256, intermediate_size: 256, ..Preset::HybridNano.config(2048) };
    let decoder = Decoder::new(config, 1).unwrap();
    let prompts: Vec<Vec<u32>> = (0..8).map(|i| vec![i, i + 1, i + 2]).collect();
    let count = |max_tokens| {
        let options = RolloutOptions { max_tokens, n: 8, ..RolloutOptions::default() };
        let pool = Pool::new(1).unwrap();
        WATCHED.store(true, Relaxed);
        let samples = pool.run(|| generate(&decoder, &prompts, &options));
        let seen = seen();
        assert!(samples.iter().flatten().all(|s| s.tokens.len() == max_tokens));
        seen
    };
    // The first token comes of the prompt's pass, so two tokens are one decoding step.
    let (short, long) = (count(3), count(23));
    assert_eq!(short.len(), long.len(), "20 steps took more: {long:#?}");
    assert!(!long.is_empty(), "the arrays are large");
}
