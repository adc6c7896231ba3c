//! Attention's work cut into tasks: one a tree and head. Trees share nothing, heads share nothing; so where the cuts lie
//! leaves no trace in the results.

use crate::blocks::{Parts, Rows};
use crate::columns::ColumnsMut;
use crate::forest::{Forest, Span};

/// Rows of small trees that make a task together.
const BUNDLE: usize = 128;
/// Rows from which on a tree is worth a task a head, at the price of gathering the heads' columns afterwards.
const LONG: usize = 512;

/// Calls `work(tree, head, outs)` for each tree and head: the rows of `outs` are the forest's, their columns divided evenly
/// among the heads, and the call gets those of its tree and head.
pub(crate) fn for_heads<const N: usize>(
    forest: &Forest,
    heads: usize,
    outs: [Rows; N],
    work: impl Fn(&Span, usize, [ColumnsMut; N]) + Sync,
) {
    let all = Span { segments: 0..forest.segments().len(), rows: 0..forest.rows() };
    if rayon::current_num_threads() == 1 {
        return run(forest, all, heads, outs, &work);
    }
    let mut bundles: Vec<Span> = Vec::new();
    for tree in forest.trees() {
        match bundles.last_mut().filter(|b| b.rows.len() < BUNDLE) {
            Some(bundle) => (bundle.segments.end, bundle.rows.end) = (tree.segments.end, tree.rows.end),
            None => bundles.push(tree),
        }
    }
    if !bundles.is_empty() {
        halves(forest, &bundles, heads, outs, &work);
    }
}

fn halves<const N: usize>(
    forest: &Forest,
    bundles: &[Span],
    heads: usize,
    outs: [Rows; N],
    work: &(impl Fn(&Span, usize, [ColumnsMut; N]) + Sync),
) {
    if let [bundle] = bundles {
        return run(forest, bundle.clone(), heads, outs, work);
    }
    let (left, right) = bundles.split_at(bundles.len() / 2);
    let (a, b) = outs.split_at(right[0].rows.start - left[0].rows.start);
    rayon::join(|| halves(forest, left, heads, a, work), || halves(forest, right, heads, b, work));
}

/// All trees of a span, whose rows `outs` are.
fn run<const N: usize>(
    forest: &Forest,
    span: Span,
    heads: usize,
    mut outs: [Rows; N],
    work: &(impl Fn(&Span, usize, [ColumnsMut; N]) + Sync),
) {
    for tree in forest.trees_of(span) {
        let rows = tree.rows.len();
        let mut outs = outs.each_mut().map(|out| Rows { data: out.take(rows), cols: out.cols });
        if rows >= LONG && heads > 1 && rayon::current_num_threads() > 1 {
            each_apart(&tree, heads, outs, work);
            continue;
        }
        for head in 0..heads {
            let outs = outs.each_mut().map(|out| {
                let width = out.cols / heads;
                ColumnsMut::new(out.data, out.cols, head * width, width)
            });
            work(&tree, head, outs);
        }
    }
}

/// One tree's heads side by side: each writes columns of its own, which are then gathered.
fn each_apart<const N: usize>(
    tree: &Span,
    heads: usize,
    outs: [Rows; N],
    work: &(impl Fn(&Span, usize, [ColumnsMut; N]) + Sync),
) {
    use rayon::prelude::*;
    let apart: Vec<[Vec<f32>; N]> = (0..heads)
        .into_par_iter()
        .with_max_len(1)
        .map(|head| {
            let mut own = outs.each_ref().map(|out| vec![0.0; out.data.len() / heads]);
            let mut widths = outs.each_ref().map(|out| out.cols / heads).into_iter();
            let columns = own.each_mut().map(|own| {
                let width = widths.next().expect("a width an output");
                ColumnsMut::new(own, width, 0, width)
            });
            work(tree, head, columns);
            own
        })
        .collect();
    for (i, out) in outs.into_iter().enumerate() {
        let width = out.cols / heads;
        for (row, out) in out.data.chunks_exact_mut(out.cols).enumerate() {
            for (out, own) in out.chunks_exact_mut(width).zip(&apart) {
                out.copy_from_slice(&own[i][row * width..(row + 1) * width]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::threads::Pool;

    #[test]
    fn every_tree_and_head_is_visited_once_in_its_place() {
        let long = vec![0u32; LONG];
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
