//! The batch: a packed forest of token segments in depth-first order, without padding. A plain sequence is a root; a
//! packed batch is many roots; rollouts of one prompt are a tree whose shared prefix stands once.

use std::ops::Range;

/// A run of consecutive rows. A row sees its own segment up to itself, and all rows of its ancestors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// First row.
    pub start: usize,
    /// Number of rows, at least 1.
    pub len: usize,
    /// Index of the segment that this one continues; it stands earlier.
    pub parent: Option<usize>,
    /// How many trajectories run through this segment (at least 1); weighs its rows in averages over tokens.
    pub uses: u32,
}

/// A unique (row, target): the log-prob of `target` given all that `row` sees. A branching row predicts one token a child.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Prediction {
    /// Row of the forest whose hidden state predicts.
    pub row: u32,
    /// The token predicted.
    pub target: u32,
}

/// What is wrong with a forest, by segment.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed forest: segment {segment}: {fault}")]
pub struct ForestError {
    /// Index of the segment at fault.
    pub segment: usize,
    /// What is wrong with it.
    pub fault: &'static str,
}

/// A validated forest with what every operation needs derived once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Forest {
    tokens: Vec<u32>,
    segments: Vec<Segment>,
    positions: Vec<u32>,
    segment_of: Vec<u32>,
    ends: Vec<usize>,
}

impl Forest {
    /// Checks and takes a forest: segments tile `tokens` in order, none is empty, parents stand earlier and the order is
    /// depth-first (a segment's parent is the segment before it, or an ancestor of that one).
    ///
    /// # Errors
    /// The first malformed segment, with its fault.
    pub fn new(tokens: Vec<u32>, segments: Vec<Segment>) -> Result<Self, ForestError> {
        let mut positions = Vec::with_capacity(tokens.len());
        let mut segment_of = Vec::with_capacity(tokens.len());
        let mut ends = vec![0; segments.len()];
        let mut open: Vec<usize> = Vec::new(); // path from the root to the segment before
        let mut row = 0;
        for (i, s) in segments.iter().enumerate() {
            let err = |fault| Err(ForestError { segment: i, fault });
            if s.len == 0 {
                return err("is empty");
            }
            if s.uses == 0 {
                return err("has no uses");
            }
            if s.start != row {
                return err("does not start where the one before ends");
            }
            if s.len > tokens.len() - row {
                return err("runs past the last token");
            }
            if u32::try_from(row + s.len).is_err() {
                return err("runs past the last row that 32 bits count");
            }
            match s.parent {
                Some(p) if p >= i => return err("has a parent that does not stand before it"),
                Some(p) => {
                    while open.last().is_some_and(|&o| o != p) {
                        ends[open.pop().expect("just seen")] = row;
                    }
                    if open.is_empty() {
                        return err("is not in depth-first order");
                    }
                }
                None => {
                    for o in open.drain(..) {
                        ends[o] = row;
                    }
                }
            }
            let depth = s.parent.map_or(0, |p: usize| {
                let last = segments[p].start + segments[p].len - 1;
                positions[last] + 1
            });
            open.push(i);
            positions.extend(depth..depth + s.len as u32);
            segment_of.resize(row + s.len, i as u32);
            row += s.len;
        }
        if row != tokens.len() {
            return Err(ForestError { segment: segments.len(), fault: "is missing: tokens are left over" });
        }
        for o in open {
            ends[o] = row;
        }
        Ok(Self { tokens, segments, positions, segment_of, ends })
    }

    /// A packed batch of plain sequences, each a root. Empty sequences are skipped.
    pub fn from_sequences<'a>(sequences: impl IntoIterator<Item = &'a [u32]>) -> Self {
        let (mut tokens, mut segments) = (Vec::new(), Vec::new());
        for s in sequences.into_iter().filter(|s| !s.is_empty()) {
            segments.push(Segment { start: tokens.len(), len: s.len(), parent: None, uses: 1 });
            tokens.extend_from_slice(s);
        }
        Self::new(tokens, segments).expect("roots that tile their tokens are a forest")
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.tokens.len()
    }
    /// Token of each row.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }
    /// The segments, depth-first.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }
    /// Depth in tokens of each row: its RoPE position.
    pub fn positions(&self) -> &[u32] {
        &self.positions
    }
    /// Segment of each row.
    pub fn segment_of(&self) -> &[u32] {
        &self.segment_of
    }
    /// End (exclusive) of a segment's subtree: key j of the segment is seen by rows j ≤ i < end.
    pub fn subtree_end(&self, segment: usize) -> usize {
        self.ends[segment]
    }
    /// Rows of one segment.
    pub fn rows_of(&self, segment: usize) -> Range<usize> {
        let s = &self.segments[segment];
        s.start..s.start + s.len
    }
    /// The runs of rows that a segment's rows see before their own segment: its ancestors, root first.
    pub fn ancestors(&self, segment: usize) -> Vec<Range<usize>> {
        let mut path = Vec::new();
        let mut at = self.segments[segment].parent;
        while let Some(p) = at {
            path.push(self.rows_of(p));
            at = self.segments[p].parent;
        }
        path.reverse();
        path
    }
    /// How many trajectories run through each row.
    pub fn uses(&self, row: usize) -> u32 {
        self.segments[self.segment_of[row] as usize].uses
    }
}

/// A stretch of whole segments, and their rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// Segments.
    pub segments: Range<usize>,
    /// Rows.
    pub rows: Range<usize>,
}

impl Forest {
    /// The trees, in order, each a root with all below it; together they hold every row. Nothing one computes depends on
    /// another.
    pub fn trees(&self) -> impl Iterator<Item = Span> + '_ {
        self.trees_of(Span { segments: 0..self.segments.len(), rows: 0..self.rows() })
    }

    /// The trees of a span that starts and ends between trees.
    pub fn trees_of(&self, span: Span) -> impl Iterator<Item = Span> + '_ {
        let mut at = span.segments.start;
        std::iter::from_fn(move || {
            if at == span.segments.end {
                return None;
            }
            let (first, rows) = (at, self.segments[at].start..self.ends[at]);
            at = if rows.end == self.rows() { self.segments.len() } else { self.segment_of[rows.end] as usize };
            Some(Span { segments: first..at, rows })
        })
    }

    /// Whether another segment continues this one.
    pub fn has_children(&self, segment: usize) -> bool {
        self.ends[segment] > self.rows_of(segment).end
    }
}

#[cfg(test)]
pub(crate) mod testing {
    //! Forests to test operations on, and what it means to take one apart into plain sequences.

    use super::*;
    use crate::Tensor;
    use proptest::prelude::*;
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    fn push(
        tokens: &mut Vec<u32>,
        segments: &mut Vec<Segment>,
        len: usize,
        parent: Option<usize>,
        rng: &mut ChaCha8Rng,
    ) {
        segments.push(Segment { start: tokens.len(), len, parent, uses: 1 });
        tokens.extend((0..len).map(|_| rng.random_range(0..11u32)));
    }

    fn grow(
        tokens: &mut Vec<u32>,
        segments: &mut Vec<Segment>,
        parent: Option<usize>,
        depth: usize,
        rng: &mut ChaCha8Rng,
    ) {
        let len = [1, 1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 21, 33][rng.random_range(0..13)];
        let me = segments.len();
        push(tokens, segments, len, parent, rng);
        let children = if depth < 3 && tokens.len() < 120 { [0, 0, 1, 2, 3][rng.random_range(0..5)] } else { 0 };
        for _ in 0..children {
            grow(tokens, segments, Some(me), depth + 1, rng);
        }
    }

    /// A forest of one to five trees, up to four segments deep, with up to three children a segment, lengths on both
    /// sides of powers of two; every second one ends in many roots of one or two tokens. `uses` are counted from the leaves.
    pub fn random_forest(seed: u64) -> Forest {
        let rng = &mut ChaCha8Rng::seed_from_u64(seed);
        let (mut tokens, mut segments) = (Vec::new(), Vec::new());
        for _ in 0..rng.random_range(1..6) {
            grow(&mut tokens, &mut segments, None, 0, rng);
        }
        if rng.random() {
            for i in 0..20 {
                push(&mut tokens, &mut segments, 1 + i % 2, None, rng);
            }
        }
        let leaves: Vec<bool> = (0..segments.len()).map(|i| segments.iter().all(|s| s.parent != Some(i))).collect();
        let mut uses: Vec<u32> = leaves.iter().map(|&leaf| leaf.into()).collect();
        for i in (0..segments.len()).rev() {
            if let Some(p) = segments[i].parent {
                uses[p] += uses[i];
            }
            segments[i].uses = uses[i];
        }
        Forest::new(tokens, segments).expect("grown depth-first")
    }

    /// Random forests for property tests.
    pub fn forests() -> impl Strategy<Value = Forest> {
        any::<u64>().prop_map(random_forest)
    }

    /// [A,B,C,D], [A,B,E,F] and [A,G,H] as one tree: it forks after B and after A.
    pub fn lettered() -> Forest {
        let segment = |start, len, parent, uses| Segment { start, len, parent, uses };
        let segments = vec![
            segment(0, 1, None, 3),
            segment(1, 1, Some(0), 2),
            segment(2, 2, Some(1), 1),
            segment(4, 2, Some(1), 1),
            segment(6, 2, Some(0), 1),
        ];
        Forest::new(vec![0, 1, 2, 3, 4, 5, 6, 7], segments).expect("written depth-first")
    }

    /// The rows of each trajectory, root to leaf, in order of leaves.
    pub fn paths(forest: &Forest) -> Vec<Vec<usize>> {
        (0..forest.segments().len())
            .filter(|&s| !forest.has_children(s))
            .map(|s| forest.ancestors(s).into_iter().chain([forest.rows_of(s)]).flatten().collect())
            .collect()
    }

    /// The same trajectories as a batch of plain sequences.
    pub fn unmerged(forest: &Forest) -> Forest {
        let sequences: Vec<Vec<u32>> =
            paths(forest).iter().map(|rows| rows.iter().map(|&r| forest.tokens()[r]).collect()).collect();
        Forest::from_sequences(sequences.iter().map(|s| &s[..]))
    }

    /// The rows of `x`, one a row of the forest, as the rows of [`unmerged`].
    pub fn unmerge(forest: &Forest, x: &Tensor) -> Tensor {
        let rows = paths(forest).concat();
        let data = rows.iter().flat_map(|&r| x.row(r)).copied().collect();
        Tensor::from_vec(data, &[rows.len(), x.cols()])
    }

    /// The transpose of [`unmerge`]: rows that came from one are added.
    pub fn merge_sum(forest: &Forest, x: &Tensor) -> Tensor {
        let mut sum = Tensor::zeros(&[forest.rows(), x.cols()]);
        for (from, &to) in paths(forest).concat().iter().enumerate() {
            for (sum, x) in sum.row_mut(to).iter_mut().zip(x.row(from)) {
                *sum += x;
            }
        }
        sum
    }

    /// Whether row `i` sees row `j`, from parents alone.
    pub fn sees(forest: &Forest, i: usize, j: usize) -> bool {
        let mut at = Some(forest.segment_of()[i] as usize);
        while let Some(s) = at {
            if forest.rows_of(s).contains(&j) {
                return j <= i;
            }
            at = forest.segments()[s].parent;
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::testing::*;
    use super::*;
    use proptest::prelude::*;

    fn segment(start: usize, len: usize, parent: Option<usize>) -> Segment {
        Segment { start, len, parent, uses: 1 }
    }

    fn fault(rows: usize, segments: Vec<Segment>) -> (usize, &'static str) {
        let error = Forest::new(vec![0; rows], segments).unwrap_err();
        (error.segment, error.fault)
    }

    #[test]
    fn malformed_forests_are_refused_by_name() {
        assert_eq!(fault(1, vec![segment(0, 1, None), segment(1, 0, None)]), (1, "is empty"));
        assert_eq!(fault(1, vec![Segment { uses: 0, ..segment(0, 1, None) }]), (0, "has no uses"));
        assert_eq!(
            fault(3, vec![segment(0, 1, None), segment(2, 1, None)]),
            (1, "does not start where the one before ends")
        );
        assert_eq!(fault(2, vec![segment(0, 3, None)]), (0, "runs past the last token"));
        assert_eq!(fault(2, vec![segment(0, 2, Some(0))]), (0, "has a parent that does not stand before it"));
        assert_eq!(fault(2, vec![segment(0, 1, None)]), (1, "is missing: tokens are left over"));
        let sibling_root = vec![segment(0, 1, None), segment(1, 1, None), segment(2, 1, Some(0))];
        assert_eq!(fault(3, sibling_root), (2, "is not in depth-first order"));
        let cousin = vec![segment(0, 1, None), segment(1, 1, Some(0)), segment(2, 1, Some(0)), segment(3, 1, Some(1))];
        assert_eq!(fault(4, cousin), (3, "is not in depth-first order"));
        let error = Forest::new(vec![0; 2], vec![segment(0, 3, None)]).unwrap_err();
        assert_eq!(error.to_string(), "malformed forest: segment 0: runs past the last token");
    }

    #[test]
    fn lettered_tree() {
        let forest = lettered();
        assert_eq!(forest.positions(), [0, 1, 2, 3, 2, 3, 1, 2]);
        assert_eq!(forest.segment_of(), [0, 1, 2, 2, 3, 3, 4, 4]);
        assert_eq!((0..5).map(|s| forest.subtree_end(s)).collect::<Vec<_>>(), [8, 6, 4, 6, 8]);
        assert_eq!(forest.ancestors(3), [0..1, 1..2]);
        assert_eq!((0..5).map(|s| forest.has_children(s)).collect::<Vec<_>>(), [true, true, false, false, false]);
        assert_eq!((0..8).map(|r| forest.uses(r)).collect::<Vec<_>>(), [3, 2, 1, 1, 1, 1, 1, 1]);
        assert_eq!(forest.trees().collect::<Vec<_>>(), [Span { segments: 0..5, rows: 0..8 }]);
        let unmerged = unmerged(&forest);
        assert_eq!(unmerged.tokens(), [0, 1, 2, 3, 0, 1, 4, 5, 0, 6, 7]);
    }

    #[test]
    fn sequences_are_roots() {
        let forest = Forest::from_sequences([&[7, 8, 9][..], &[], &[5]]);
        assert_eq!(forest.tokens(), [7, 8, 9, 5]);
        assert_eq!(forest.positions(), [0, 1, 2, 0]);
        let trees: Vec<_> = forest.trees().collect();
        assert_eq!(trees, [Span { segments: 0..1, rows: 0..3 }, Span { segments: 1..2, rows: 3..4 }]);
        assert_eq!(Forest::from_sequences([]).trees().count(), 0);
    }

    proptest! {
        #[test]
        fn derived_facts_follow_from_parents(forest in forests()) {
            let n = forest.rows();
            for s in 0..forest.segments().len() {
                let rows = forest.rows_of(s);
                // The one integer a segment is the whole mask.
                for i in 0..n {
                    for j in rows.clone() {
                        prop_assert_eq!(sees(&forest, i, j), j <= i && i < forest.subtree_end(s));
                    }
                }
                let children = forest.segments().iter().filter(|c| c.parent == Some(s));
                prop_assert_eq!(forest.has_children(s), children.count() > 0);
            }
            for i in 0..n {
                let seen = (0..n).filter(|&j| sees(&forest, i, j)).count();
                prop_assert_eq!(forest.positions()[i] as usize + 1, seen);
                let trajectories = paths(&forest).iter().filter(|p| p.contains(&i)).count();
                prop_assert_eq!(forest.uses(i) as usize, trajectories);
            }
            let (mut segment, mut row) = (0, 0);
            for tree in forest.trees() {
                prop_assert_eq!((tree.segments.start, tree.rows.start), (segment, row));
                prop_assert_eq!(forest.segments()[segment].parent, None);
                prop_assert!(tree.segments.clone().skip(1).all(|s| forest.segments()[s].parent.is_some()));
                (segment, row) = (tree.segments.end, tree.rows.end);
            }
            prop_assert_eq!((segment, row), (forest.segments().len(), n));
        }
    }
}
