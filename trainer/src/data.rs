//! From texts and trajectories to batches: packing token sequences into forests, and saying which tokens are trained.
//! Not for losses; nothing here knows a model.
//!
//! There is no padding: what is trained follows from token ids and lengths alone, so an end token that doubles as a
//! padding token is trained like any other. The last token of a sequence predicts nothing and gets no row.

use hone_kernels::{Forest, Prediction, Segment};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Which completions of one prompt share rows. Either way the prompt stands once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Merge {
    /// Equal completions only. Segments are those of the rollout, so log-probs equal it bit for bit.
    #[default]
    Equal,
    /// Every shared prefix stands once: fewest rows. Segments then break where completions part, and lightning layers, which
    /// chunk from a segment's start, agree with the rollout to rounding only.
    Prefix,
}

/// Terms and the forest that scores them.
#[derive(Clone, Debug, PartialEq)]
pub struct Batch {
    /// The rows.
    pub forest: Forest,
    /// The unique (row, target) pairs, sorted.
    pub predictions: Vec<Prediction>,
    /// Prediction of each term; terms lie trajectory after trajectory, in token order.
    pub terms: Vec<u32>,
    /// Terms of each trajectory, in the order they were added.
    pub trajectories: Vec<Range<usize>>,
}

impl Batch {
    /// What stands at each term's prediction, e.g. log-probs: `out[term] = of[prediction]`.
    pub fn gather(&self, of: &[f32], out: &mut Vec<f32>) {
        out.clear();
        out.extend(self.terms.iter().map(|&p| of[p as usize]));
    }

    /// Sums term gradients at their predictions, in term order: `out[prediction] = Σ of[term]`.
    pub fn scatter(&self, of: &[f32], out: &mut Vec<f32>) {
        out.clear();
        out.resize(self.predictions.len(), 0.0);
        for (&p, d) in self.terms.iter().zip(of) {
            out[p as usize] += d;
        }
    }

    /// The forest row that predicts a term.
    pub fn row(&self, term: usize) -> usize {
        self.predictions[self.terms[term] as usize].row as usize
    }
}

/// Collects sequences and groups into one [`Batch`].
#[derive(Debug, Default)]
pub struct Packer {
    tokens: Vec<u32>,
    segments: Vec<Segment>,
    sites: Vec<Prediction>,
    trajectories: Vec<Range<usize>>,
}

impl Packer {
    /// Rows so far.
    pub fn rows(&self) -> usize {
        self.tokens.len()
    }

    /// Adds one plain sequence, a root and a trajectory; the tokens from index `trained_from` on are terms. The first
    /// token of a sequence has nothing before it and is never one. Sequences of fewer than two tokens add no rows.
    pub fn add(&mut self, sequence: &[u32], trained_from: usize) {
        let (base, first) = (self.tokens.len() as u32, self.sites.len());
        if let [rows @ .., _] = sequence
            && !rows.is_empty()
        {
            self.segment(rows, None, 1);
            let trained = sequence.iter().enumerate().skip(trained_from.max(1));
            self.sites.extend(trained.map(|(i, &target)| Prediction { row: base + i as u32 - 1, target }));
        }
        self.trajectories.push(first..self.sites.len());
    }

    /// Adds the completions of one prompt (not empty), a tree; every completion is a trajectory, all its tokens are terms.
    pub fn add_group(&mut self, prompt: &[u32], completions: &[&[u32]], merge: Merge) {
        let root = self.segment(prompt, None, completions.len().max(1) as u32);
        let fork = self.tokens.len() as u32 - 1; // the row that predicts every completion's first token
        let bodies: Vec<&[u32]> = completions.iter().map(|c| &c[..c.len().saturating_sub(1)]).collect();
        let mut rows: Vec<Vec<u32>> = completions.iter().map(|_| vec![fork]).collect();
        self.grow(&bodies, (0..completions.len()).collect(), 0, root, merge, &mut rows);
        for (completion, rows) in completions.iter().zip(&rows) {
            let first = self.sites.len();
            self.sites.extend(completion.iter().zip(rows).map(|(&target, &row)| Prediction { row, target }));
            self.trajectories.push(first..self.sites.len());
        }
    }

    /// Adds below `parent` the rows of `bodies[who]` from `depth` on, all of which agree before it; notes each body's rows.
    fn grow(
        &mut self,
        bodies: &[&[u32]],
        who: Vec<usize>,
        depth: usize,
        parent: usize,
        merge: Merge,
        rows: &mut [Vec<u32>],
    ) {
        let mut rest: Vec<usize> = who.into_iter().filter(|&i| bodies[i].len() > depth).collect();
        while let Some(&first) = rest.first() {
            let lead = &bodies[first][depth..];
            let joins = |i: usize| match merge {
                Merge::Equal => bodies[i][depth..] == *lead,
                Merge::Prefix => bodies[i][depth] == lead[0],
            };
            let (together, others): (Vec<usize>, Vec<usize>) = rest.iter().partition(|&&i| joins(i));
            let shared = together.iter().map(|&i| common_prefix(lead, &bodies[i][depth..])).min().unwrap_or(lead.len());
            let start = self.tokens.len() as u32;
            let segment = self.segment(&lead[..shared], Some(parent), together.len() as u32);
            for &i in &together {
                rows[i].extend(start..start + shared as u32);
            }
            self.grow(bodies, together, depth + shared, segment, merge, rows);
            rest = others;
        }
    }

    fn segment(&mut self, tokens: &[u32], parent: Option<usize>, uses: u32) -> usize {
        self.segments.push(Segment { start: self.tokens.len(), len: tokens.len(), parent, uses });
        self.tokens.extend_from_slice(tokens);
        self.segments.len() - 1
    }

    /// The batch of all that was added, and an empty packer left behind.
    pub fn finish(&mut self) -> Batch {
        let mut predictions = self.sites.clone();
        predictions.sort_unstable();
        predictions.dedup();
        let place = |site| predictions.binary_search(site).expect("every site is among the predictions") as u32;
        let terms = self.sites.iter().map(place).collect();
        let forest = Forest::new(std::mem::take(&mut self.tokens), std::mem::take(&mut self.segments))
            .expect("segments are added depth-first and tile their tokens");
        self.sites.clear();
        Batch { forest, predictions, terms, trajectories: std::mem::take(&mut self.trajectories) }
    }
}

fn common_prefix(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(x, y)| x == y).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The tokens that a term's row sees, its own included, read off the forest alone.
    fn context(forest: &Forest, row: usize) -> Vec<u32> {
        let segment = forest.segment_of()[row] as usize;
        let before = forest.ancestors(segment).into_iter().flatten();
        before.chain(forest.rows_of(segment).start..=row).map(|r| forest.tokens()[r]).collect()
    }

    fn pack(groups: &[(Vec<u32>, Vec<Vec<u32>>)], merge: Merge) -> Batch {
        let mut packer = Packer::default();
        for (prompt, completions) in groups {
            packer.add_group(prompt, &completions.iter().map(Vec::as_slice).collect::<Vec<_>>(), merge);
        }
        packer.finish()
    }

    #[test]
    fn an_answer_and_its_end_are_trained_from_the_first_token() {
        // "Hello" then ", World ! <eot>": four terms, the first predicted by the prompt's last row.
        let mut packer = Packer::default();
        packer.add(&[10, 11, 12, 13, 99], 1);
        let batch = packer.finish();
        assert_eq!(
            batch.predictions.iter().map(|p| (p.row, p.target)).collect::<Vec<_>>(),
            [(0, 11), (1, 12), (2, 13), (3, 99)]
        );
        assert_eq!(batch.forest.tokens(), [10, 11, 12, 13]);
    }

    #[test]
    fn an_end_token_that_is_also_padding_is_trained() {
        let mut packer = Packer::default();
        packer.add_group(&[1], &[&[5, 7, 2], &[5, 7]], Merge::Equal);
        let batch = packer.finish();
        assert_eq!(batch.trajectories, [0..3, 3..5]);
        assert_eq!(batch.predictions[batch.terms[2] as usize].target, 2);
    }

    #[test]
    fn a_whole_text_trains_all_but_its_first_token() {
        let mut packer = Packer::default();
        packer.add(&[3, 4, 5], 0);
        packer.add(&[3], 0);
        packer.add(&[], 0);
        let batch = packer.finish();
        assert_eq!((batch.forest.rows(), batch.terms.len()), (2, 2));
        assert_eq!(batch.trajectories, [0..2, 2..2, 2..2]);
    }

    #[test]
    fn eleven_tokens_merge_into_eight_nodes() {
        // [A,B,C,D], [A,B,E,F], [A,G,H]: one more token each, so that every token of the example has a row.
        let tails: [&[u32]; 3] = [&[2, 3, 4, 0], &[2, 5, 6, 0], &[7, 8, 0]];
        let mut packer = Packer::default();
        packer.add_group(&[1], &tails, Merge::Prefix);
        let forest = packer.finish().forest;
        assert_eq!(forest.tokens(), [1, 2, 3, 4, 5, 6, 7, 8]);
        let shape: Vec<_> = forest.segments().iter().map(|s| (s.len, s.parent, s.uses)).collect();
        assert_eq!(shape, [(1, None, 3), (1, Some(0), 2), (2, Some(1), 1), (2, Some(1), 1), (2, Some(0), 1)]);
    }

    #[test]
    fn other_ids_of_the_same_text_stay_apart() {
        // ["he", "llo"] and ["hello"] are other tokens, whatever they decode to.
        let batch = pack(&[(vec![1], vec![vec![20, 21, 2], vec![22, 2]])], Merge::Prefix);
        assert_eq!(batch.forest.rows(), 1 + 2 + 1);
    }

    #[test]
    fn equal_completions_share_rows_and_stay_terms_of_their_own() {
        let batch = pack(&[(vec![1, 9], vec![vec![4, 2], vec![4, 2], vec![4, 5, 2], vec![2]])], Merge::Equal);
        // The body of the first two is [4], of the third [4, 5]; the last has none.
        assert_eq!(
            batch.forest.segments().iter().map(|s| (s.len, s.uses)).collect::<Vec<_>>(),
            [(2, 4), (1, 2), (2, 1)]
        );
        assert_eq!(batch.terms.len(), 2 + 2 + 3 + 1);
        let mut sums = Vec::new();
        batch.scatter(&[1.0; 8], &mut sums);
        assert_eq!(sums.iter().sum::<f32>(), 8.0);
        assert!(batch.predictions.len() < 8);
    }

    proptest! {
        #[test]
        fn every_term_sees_its_own_trajectory(
            groups in prop::collection::vec(
                (prop::collection::vec(0u32..3, 1..4), prop::collection::vec(prop::collection::vec(0u32..3, 1..6), 1..6)), 1..4),
            prefix in any::<bool>(),
        ) {
            let batch = pack(&groups, if prefix { Merge::Prefix } else { Merge::Equal });
            let mut trajectory = batch.trajectories.iter();
            for (prompt, completions) in &groups {
                for completion in completions {
                    let range = trajectory.next().unwrap().clone();
                    prop_assert_eq!(range.len(), completion.len());
                    for (i, term) in range.enumerate() {
                        let want = [&prompt[..], &completion[..i]].concat();
                        prop_assert_eq!(context(&batch.forest, batch.row(term)), want);
                        prop_assert_eq!(batch.predictions[batch.terms[term] as usize].target, completion[i]);
                    }
                }
            }
            prop_assert!(batch.predictions.is_sorted());
            // Uses count trajectories: weighed rows are the rows of the unmerged sequences.
            let weighed: usize = (0..batch.forest.rows()).map(|r| batch.forest.uses(r) as usize).sum();
            let plain: usize = groups.iter().flat_map(|(p, cs)| cs.iter().map(|c| p.len() + c.len() - 1)).sum();
            prop_assert_eq!(weighed, plain);
        }
    }
}
