//! Work on independent rows, split over the pool. For work whose rows share nothing but what they read: where the cuts lie leaves
//! no trace in the results. Sums over rows are the operations' own affair.

/// Costs below this (about an element's pointwise work each) run on the calling thread: a split costs microseconds.
const WORTH_SPLITTING: usize = 16 * 1024;

/// Rows of `cols` elements each, lent for writing.
pub(crate) struct Rows<'a, T = f32> {
    /// The elements, row-major.
    pub data: &'a mut [T],
    /// Elements a row, at least 1.
    pub cols: usize,
}

impl<'a, T> Rows<'a, T> {
    /// Takes the first `rows` rows off.
    pub(crate) fn take(&mut self, rows: usize) -> &'a mut [T] {
        self.data.split_off_mut(..rows * self.cols).expect("as many rows as there are")
    }
}

/// What [`for_rows`] can cut between two rows: [`Rows`] and tuples of them.
pub(crate) trait Parts: Send + Sized {
    /// The first `rows` rows, and the others.
    fn split_at(self, rows: usize) -> (Self, Self);
}

impl<T: Send> Parts for Rows<'_, T> {
    fn split_at(self, rows: usize) -> (Self, Self) {
        let (a, b) = self.data.split_at_mut(rows * self.cols);
        (Self { data: a, cols: self.cols }, Self { data: b, cols: self.cols })
    }
}

impl<A: Parts, B: Parts> Parts for (A, B) {
    fn split_at(self, rows: usize) -> (Self, Self) {
        let ((a, c), (b, d)) = (self.0.split_at(rows), self.1.split_at(rows));
        ((a, b), (c, d))
    }
}

impl<A: Parts, B: Parts, C: Parts> Parts for (A, B, C) {
    fn split_at(self, rows: usize) -> (Self, Self) {
        let ((a, d), (b, e), (c, f)) = (self.0.split_at(rows), self.1.split_at(rows), self.2.split_at(rows));
        ((a, b, c), (d, e, f))
    }
}

impl<P: Parts, const N: usize> Parts for [P; N] {
    fn split_at(self, rows: usize) -> (Self, Self) {
        let mut after = Vec::with_capacity(N);
        let before = self.map(|part| {
            let (a, b) = part.split_at(rows);
            after.push(b);
            a
        });
        (before, after.try_into().unwrap_or_else(|_| unreachable!("N parts were split")))
    }
}

/// Calls `work(first, parts)` on runs of rows that together are all `rows`, `first` being the first row's index. `cost` is a
/// row's work in elements; little work, or a pool of one, makes a single call.
pub(crate) fn for_rows<P: Parts>(rows: usize, cost: usize, parts: P, work: impl Fn(usize, P) + Sync) {
    let threads = rayon::current_num_threads();
    if threads == 1 || rows * cost < WORTH_SPLITTING {
        return work(0, parts);
    }
    let run = rows.div_ceil(4 * threads).max(WORTH_SPLITTING.div_ceil(4 * cost.max(1)));
    halves(0, rows, run, parts, &work);
}

fn halves<P: Parts>(first: usize, rows: usize, run: usize, parts: P, work: &(impl Fn(usize, P) + Sync)) {
    if rows <= run {
        return work(first, parts);
    }
    let half = rows / 2;
    let (a, b) = parts.split_at(half);
    rayon::join(|| halves(first, half, run, a, work), || halves(first + half, rows - half, run, b, work));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::threads::Pool;

    #[test]
    fn every_row_is_visited_once_under_its_index() {
        for (threads, rows) in [(1, 1000), (3, 1000), (3, 1), (3, 0)] {
            let (mut a, mut b) = (vec![0.0; rows * 3], vec![0.0; rows]);
            Pool::new(threads).expect("threads").run(|| {
                let parts = (Rows { data: &mut a, cols: 3 }, Rows { data: &mut b, cols: 1 });
                for_rows(rows, 1000, parts, |first, (a, b)| {
                    assert_eq!(a.data.len(), 3 * b.data.len());
                    for (i, x) in b.data.iter_mut().enumerate() {
                        *x += (first + i) as f32;
                    }
                });
            });
            assert!(b.iter().enumerate().all(|(i, &x)| x == i as f32));
        }
    }
}
