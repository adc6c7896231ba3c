//! Attention's work cut into tasks: a tree and a head, or some heads. Trees share nothing, heads share nothing; so where the cuts lie
//! leaves no trace in the results.

use crate::blocks::Rows;
use crate::columns::{ColumnsMut, Shared};
use crate::forest::{Forest, Span};
use rayon::prelude::*;
use std::ops::Range;

/// Rows of small trees that make a task together.
const BUNDLE: usize = 128;

/// Tasks a thread that even out trees of different length.
const TASKS: usize = 4;

/// Calls `work(tree, head, outs)` for each tree and head: the rows of `outs` are the forest's, their columns divided evenly
/// among the heads, and the call gets those of its tree and head.
pub(crate) fn for_heads<const N: usize>(
    forest: &Forest,
    heads: usize,
    outs: [Rows; N],
    work: impl Fn(&Span, usize, [ColumnsMut; N]) + Sync,
) {
    let bundles = bundles(forest);
    for_tasks(forest, &bundles, heads, heads, outs, |tree, group, outs| work(tree, group.start, outs));
}

/// As [`for_heads`], for work that reads rows just once: a call gets neighbouring heads, as many as leave tasks enough for all
/// threads, and passes over the rows with all of them together. Memory then sees long pieces of rows; one head after another would
/// leave it at half its speed.
pub(crate) fn for_head_groups<const N: usize>(
    forest: &Forest,
    heads: usize,
    outs: [Rows; N],
    work: impl Fn(&Span, Range<usize>, [ColumnsMut; N]) + Sync,
) {
    let bundles = bundles(forest);
    // Heads are equal in cost, trees are not.
    let wanted = rayon::current_num_threads() * if bundles.len() == 1 { 1 } else { TASKS };
    let groups =
        (1..=heads).filter(|groups| heads.is_multiple_of(*groups)).find(|groups| groups * bundles.len() >= wanted);
    for_tasks(forest, &bundles, heads, groups.unwrap_or(heads), outs, work);
}

/// The trees, small neighbours together.
fn bundles(forest: &Forest) -> Vec<Span> {
    let mut bundles: Vec<Span> = Vec::new();
    for tree in forest.trees() {
        match bundles.last_mut().filter(|b| b.rows.len() < BUNDLE) {
            Some(bundle) => (bundle.segments.end, bundle.rows.end) = (tree.segments.end, tree.rows.end),
            None => bundles.push(tree),
        }
    }
    bundles
}

fn for_tasks<const N: usize>(
    forest: &Forest,
    bundles: &[Span],
    heads: usize,
    groups: usize,
    outs: [Rows; N],
    work: impl Fn(&Span, Range<usize>, [ColumnsMut; N]) + Sync,
) {
    let outs = outs.map(|out| Shared::new(out.data, out.cols));
    let each = heads / groups.max(1);
    let of_task = |task: usize| {
        let group = task % groups;
        for tree in forest.trees_of(bundles[task / groups].clone()) {
            // SAFETY: trees share no rows, groups of heads no columns, and each pair of them is visited once.
            let outs = outs.map(|out| unsafe { out.columns(tree.rows.clone(), group, groups) });
            work(&tree, group * each..(group + 1) * each, outs);
        }
    };
    let tasks = 0..bundles.len() * groups;
    if rayon::current_num_threads() == 1 {
        return tasks.into_iter().for_each(of_task);
    }
    tasks.into_par_iter().with_max_len(1).for_each(of_task);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::threads::Pool;

    #[test]
    fn every_tree_and_head_is_visited_once_in_its_place() {
        let long = vec![0u32; 512];
        let short = [1u32, 2, 3];
        let forest = Forest::from_sequences([&short[..], &long].into_iter().chain(vec![&short[..]; 100]));
        for threads in 1..=3 {
            let [mut a, mut b, mut c] = [6, 2, 6].map(|cols| vec![0.0; forest.rows() * cols]);
            Pool::new(threads).expect("threads").run(|| {
                let outs = [Rows { data: &mut a, cols: 6 }, Rows { data: &mut b, cols: 2 }];
                for_heads(&forest, 2, outs, |tree, head, [mut a, mut b]| {
                    for i in tree.rows.clone() {
                        a.row(i - tree.rows.start).iter_mut().for_each(|a| *a += (3 * i + head) as f32);
                        b.row(i - tree.rows.start)[0] += (5 * i + head) as f32;
                    }
                });
                let outs = [Rows { data: &mut c, cols: 6 }];
                for_head_groups(&forest, 6, outs, |tree, heads, [mut c]| {
                    for i in 0..tree.rows.len() {
                        for (c, head) in c.row(i).iter_mut().zip(heads.clone()) {
                            *c += (7 * (tree.rows.start + i) + head) as f32;
                        }
                    }
                });
            });
            let expected = |i: usize| [3 * i, 3 * i, 3 * i, 3 * i + 1, 3 * i + 1, 3 * i + 1].map(|x| x as f32);
            assert!(a.chunks(6).enumerate().all(|(i, a)| a == expected(i)));
            assert!(c.chunks(6).enumerate().all(|(i, c)| (0..6).all(|head| c[head] == (7 * i + head) as f32)));
            assert!(b.chunks(2).enumerate().all(|(i, b)| b == [5 * i, 5 * i + 1].map(|x| x as f32)));
        }
    }
}
