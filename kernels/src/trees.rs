//! Attention's work cut into tasks: one a tree and head. Trees share nothing, heads share nothing; so where the cuts lie
//! leaves no trace in the results.

use crate::blocks::Rows;
use crate::columns::{ColumnsMut, Shared};
use crate::forest::{Forest, Span};
use rayon::prelude::*;

/// Rows of small trees that make a task together.
const BUNDLE: usize = 128;

/// Calls `work(tree, head, outs)` for each tree and head: the rows of `outs` are the forest's, their columns divided evenly
/// among the heads, and the call gets those of its tree and head.
pub(crate) fn for_heads<const N: usize>(
    forest: &Forest,
    heads: usize,
    outs: [Rows; N],
    work: impl Fn(&Span, usize, [ColumnsMut; N]) + Sync,
) {
    let outs = outs.map(|out| Shared::new(out.data, out.cols));
    let of_bundle = |bundle: &Span, head: usize| {
        for tree in forest.trees_of(bundle.clone()) {
            // SAFETY: trees share no rows, heads no columns, and each pair of them is visited once.
            let outs = outs.map(|out| unsafe { out.columns(tree.rows.clone(), head, heads) });
            work(&tree, head, outs);
        }
    };
    let mut bundles: Vec<Span> = Vec::new();
    for tree in forest.trees() {
        match bundles.last_mut().filter(|b| b.rows.len() < BUNDLE) {
            Some(bundle) => (bundle.segments.end, bundle.rows.end) = (tree.segments.end, tree.rows.end),
            None => bundles.push(tree),
        }
    }
    let tasks = 0..bundles.len() * heads;
    if rayon::current_num_threads() == 1 {
        return tasks.into_iter().for_each(|task| of_bundle(&bundles[task / heads], task % heads));
    }
    tasks.into_par_iter().with_max_len(1).for_each(|task| of_bundle(&bundles[task / heads], task % heads));
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
            let (mut a, mut b) = (vec![0.0; forest.rows() * 6], vec![0.0; forest.rows() * 2]);
            Pool::new(threads).expect("threads").run(|| {
                let outs = [Rows { data: &mut a, cols: 6 }, Rows { data: &mut b, cols: 2 }];
                for_heads(&forest, 2, outs, |tree, head, [mut a, mut b]| {
                    for i in tree.rows.clone() {
                        a.row(i - tree.rows.start).iter_mut().for_each(|a| *a += (3 * i + head) as f32);
                        b.row(i - tree.rows.start)[0] += (5 * i + head) as f32;
                    }
                });
            });
            let expected = |i: usize| [3 * i, 3 * i, 3 * i, 3 * i + 1, 3 * i + 1, 3 * i + 1].map(|x| x as f32);
            assert!(a.chunks(6).enumerate().all(|(i, a)| a == expected(i)));
            assert!(b.chunks(2).enumerate().all(|(i, b)| b == [5 * i, 5 * i + 1].map(|x| x as f32)));
        }
    }
}
