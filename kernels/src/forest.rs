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
            for j in 0..s.len {
                positions.push(depth + j as u32);
                segment_of.push(i as u32);
            }
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
