//! Token embedding: a gather, and its scatter in the order of ids.

use crate::{
    Tensor,
    blocks::{Rows, for_rows},
};

/// `out[T, H]` = rows of `table[V, H]` named by `tokens`. Panics on a token past the table.
pub fn forward(table: &Tensor, tokens: &[u32], out: &mut Tensor) {
    let width = table.cols();
    out.resize(&[tokens.len(), width]);
    for (row, &token) in out.data_mut().chunks_exact_mut(width.max(1)).zip(tokens) {
        row.copy_from_slice(table.row(token as usize));
    }
}

/// `d_table[V, H] += ` the rows of `d_out[T, H]`, added per id in row order.
pub fn backward(tokens: &[u32], d_out: &Tensor, d_table: &mut Tensor) {
    let (vocabulary, width) = (d_table.rows(), d_table.cols());
    assert_eq!(tokens.len(), d_out.rows(), "a gradient a token");
    let by_id = ById::new(tokens, vocabulary);
    let cost = width * tokens.len().div_ceil(vocabulary.max(1));
    for_rows(vocabulary, cost, Rows { data: d_table.data_mut(), cols: width }, |first, table| {
        for (i, sum) in table.data.chunks_exact_mut(width.max(1)).enumerate() {
            for &row in by_id.rows(first + i) {
                for (s, g) in sum.iter_mut().zip(d_out.row(row as usize)) {
                    *s += g;
                }
            }
        }
    });
}

/// Rows sorted by id, then by row: a counting sort.
struct ById {
    order: Vec<u32>,
    starts: Vec<u32>,
}

impl ById {
    fn new(ids: &[u32], count: usize) -> Self {
        let mut starts = vec![0; count + 1];
        for &id in ids {
            starts[id as usize + 1] += 1;
        }
        for i in 0..count {
            starts[i + 1] += starts[i];
        }
        let mut next = starts.clone();
        let mut order = vec![0; ids.len()];
        for (row, &id) in ids.iter().enumerate() {
            order[next[id as usize] as usize] = row as u32;
            next[id as usize] += 1;
        }
        Self { order, starts }
    }

    fn rows(&self, id: usize) -> &[u32] {
        &self.order[self.starts[id] as usize..self.starts[id + 1] as usize]
    }
}

/// The same, a row at a time.
#[cfg(test)]
pub(crate) mod plain {
    use crate::Tensor;

    pub(crate) fn forward(table: &Tensor, tokens: &[u32], out: &mut Tensor) {
        out.resize(&[tokens.len(), table.cols()]);
        for (t, &token) in tokens.iter().enumerate() {
            for j in 0..table.cols() {
                out.row_mut(t)[j] = table.row(token as usize)[j];
            }
        }
    }

    pub(crate) fn backward(tokens: &[u32], d_out: &Tensor, d_table: &mut Tensor) {
        for (t, &token) in tokens.iter().enumerate() {
            for j in 0..d_table.cols() {
                d_table.row_mut(token as usize)[j] += d_out.row(t)[j];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        oracle::{self, assert_close, random},
        threads::Pool,
    };
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn equals_its_twin_bit_for_bit_on_any_number_of_threads(
            tokens in prop::collection::vec(0u32..9, 0..400), width in 1usize..70, threads in 1usize..4,
        ) {
            let (table, d_out) = (random(1, &[9, width]), random(2, &[tokens.len(), width]));
            let (mut fast, mut slow) = (Tensor::default(), Tensor::default());
            forward(&table, &tokens, &mut fast);
            plain::forward(&table, &tokens, &mut slow);
            prop_assert_eq!(&fast, &slow);
            let (mut fast, mut slow) = (random(3, &[9, width]), random(3, &[9, width]));
            Pool::new(threads).expect("threads").run(|| backward(&tokens, &d_out, &mut fast));
            plain::backward(&tokens, &d_out, &mut slow);
            prop_assert_eq!(&fast, &slow);
        }
    }

    #[test]
    fn gradients_agree_with_the_oracles() {
        let tokens = [3u32, 0, 3, 3, 1];
        let (table, d_out) = (random(1, &[5, 6]), random(2, &[5, 6]));
        let mut d_table = Tensor::zeros(&[5, 6]);
        backward(&tokens, &d_out, &mut d_table);
        let found = oracle::autograd(&[&table], &[&d_out], |v| {
            Ok(vec![v[0].index_select(&candle_core::Tensor::new(&tokens, v[0].device())?, 0)?])
        });
        assert_close(d_table.data(), &found.gradients[0], 1e-6, 1e-6);
        oracle::assert_slopes(&[&table], &[&d_out], &[&d_table], 1e-2, 1e-3, |v| {
            let mut out = Tensor::default();
            forward(&v[0], &tokens, &mut out);
            vec![out]
        });
    }
}
